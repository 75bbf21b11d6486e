"""Pure jitted functions over (cfg, params, cache).

    logits, cache = prefill(cfg, params, tokens, lengths, cache)      whole prompts, ragged
    logits, cache = decode_step(cfg, params, tokens, cache)           one token per row
    logits, proposal = verify_step(cfg, params, tokens, lengths, cache)   a draft, all at once
    cache         = commit(proposal, accepted)                        the accepted tokens stay
    cache         = reset_rows(cache, rows)                           rows for the next prompts
    output        = generate(cfg, params, tokens, lengths, cache, sampling, key, max_new_tokens)

Each call donates its cache: use the cache that it returns. A traced call (inside of ``jax.grad``,
``jax.vmap``, ``jax.jit``) donates nothing, because a derivative reads the old cache. Operands of
another type, shape or dtype raise JaxLlamaError. A row with impossible values (a length outside of
[1, T], an id outside of the vocabulary) stays unchanged and gets NaN logits.

``generate`` runs prefill, then one ``lax.while_loop`` on the device until every row has stopped
(``executors.resident``). A token's sampling key is ``fold_in(row key, its position)``. A row's
tokens therefore depend neither on its neighbours nor on its slot.  Every function here runs inside
of ``jit``, ``vmap``, ``scan`` and ``shard_map``; ``generate`` then takes a traced key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import (
    all_logits,
    check_room,
    donated,
    fill,
    int32_ids,
    or_nan,
    possible_rows,
    scores_of,
    verify,
)
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.sampling import Sampling, SamplingParams, sampling_rows
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.posting import posting
from jaxllama.executors.prompts import PromptBatch, start
from jaxllama.executors.resident import loop_for
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, Proposal
from jaxllama.model.mixers import keeps_tokens
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import check_ints, check_key, float_dtype
from jaxllama.typing import ArrayOrNumpy, Params, Tree


def init_params(cfg: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random parameters on the default device.

    Weights are normal with standard deviation 0.02, norms are 1, biases are 0.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    key : jax.Array
        A PRNG key, such as ``jax.random.key(0)``.
    dtype : data-type
        Type of every parameter: float32, bfloat16 or float16.

    Returns
    -------
    dict
        The tree of parameters, as ``prefill`` and the other functions take it.

    Raises
    ------
    JaxLlamaError
        If ``key`` is no PRNG key or ``dtype`` is no floating-point type.
    """
    check_key("key", key)
    return _init_params(cfg, float_dtype(dtype).name, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_params(cfg: ModelConfig, dtype: str, key: jax.Array) -> Params:
    from flax.core.meta import unbox

    from jaxllama.model.module import Decoder

    params = unbox(Decoder(cfg).init(key, method="tree")["params"])
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def logits(cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return teacher-forced logits of every position.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    params : dict
        Its parameters.
    tokens : jax.Array
        Integer ``[B, T]``: token ids, right-padded.
    lengths : jax.Array
        Integer ``[B]``: valid tokens of each row, in [1, T].

    Returns
    -------
    jax.Array
        float32 ``[B, T, V]``. Values at padded positions have no meaning. A row with an impossible
        length or id gets NaN.

    Raises
    ------
    JaxLlamaError
        If an operand has another type, shape or dtype, or if T exceeds ``cfg.max_position``.
    """
    check_prompts(cfg, tokens, lengths)
    return all_logits(cfg, params, tokens, lengths)


@donated(4, static_argnums=0, static_argnames="chunk")
def prefill(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Append prompts to the cache's rows and return the logits after each row's last token.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    params : dict
        Its parameters.
    tokens : jax.Array
        Integer ``[B, T]``: token ids, right-padded.
    lengths : jax.Array
        Integer ``[B]``: valid tokens of each row, in [1, T].
    cache : Cache
        The cache of B rows. The call donates it, unless it is traced.
    chunk : int, optional
        Tokens of a row that pass through the model at once (``decoding.forward.prefill_chunk``). It
        bounds the memory of activations. ``docs/rooms/model.md`` lists where results are equal to
        the bit.

    Returns
    -------
    jax.Array
        float32 ``[B, V]``: logits of each row's last valid token.
    Cache
        The cache with the new tokens.

    Raises
    ------
    JaxLlamaError
        If an operand has another type, shape or dtype; if T exceeds the cache's capacity or
        ``cfg.max_position``; or if ``chunk`` is below 1.

    Notes
    -----
    A row without room for all its tokens keeps those that fit, and gets NaN logits. A row with an
    impossible length or id stays unchanged and gets NaN logits.
    """
    check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    check_chunk(chunk)
    check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = int32_ids(tokens, lengths)
    possible = possible_rows(cfg, tokens, lengths)
    lengths = jnp.where(possible, lengths, 0)
    scores, cache = fill(cfg, params, tokens, lengths, cache, chunk)
    return or_nan(possible, scores), cache


@donated(3, static_argnums=0)
def decode_step(
    cfg: ModelConfig, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append one token to every row and return the logits of the next ones.

    Parameters
    ----------
    cfg : ModelConfig
    params
        The parameters, such as ``lm.params``.
    tokens : int [B]
        One token a row.
    cache : Cache
        It is donated, unless the call is traced. Use the returned one.

    Returns
    -------
    (float32 [B, V], Cache)
        The logits after the token, and the cache with it.

    Raises
    ------
    JaxLlamaError
        If an operand has another type, shape or dtype.

    Notes
    -----
    A row that is full, or whose token is outside of the vocabulary, keeps its cache and gets NaN
    logits. A model without attention is never full and has no mask of rows: there a token outside
    of the vocabulary gives NaN logits and also changes the row's state.

    With ``cfg.attn_sparsity`` below 1 the token reads that share of the values. ``prefill`` reads
    all of them, so it is the function for prompts.
    """
    check_ints("tokens", tokens, "[B]")
    _check_cache(cfg, cache, tokens.shape[0])
    (tokens,) = int32_ids(tokens)
    is_known = (tokens >= 0) & (tokens < cfg.vocab_size)
    live = jnp.ones_like(cache.lengths) if cache.capacity is None else is_known.astype(jnp.int32)
    hidden, after = decoder.forward(cfg, params, tokens[:, None], live, cache, sparse=True)
    return or_nan(is_known, scores_of(cfg, params, hidden[:, 0], cache, live)), after


@donated(4, static_argnums=0)
def verify_step(
    cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array, cache: Cache
) -> tuple[jax.Array, Proposal]:
    """Return the logits of k + 1 new tokens per row in one pass, and a proposal for the cache.

    The logits after each token are those of ``decode_step``, to the bit those of a step with
    B (k + 1) rows. ``commit`` makes a cache of the proposal.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    params : dict
        Its parameters.
    tokens : jax.Array
        Integer ``[B, k+1]``: each row's newest token and a draft of the tokens after it. The cache
        holds none of them.
    lengths : jax.Array
        Integer ``[B]``: valid tokens of each row, in [1, k+1].
    cache : Cache
        The cache of B rows. The call donates it, unless it is traced.

    Returns
    -------
    jax.Array
        float32 ``[B, k+1, V]``. ``logits[:, j]`` are the logits after token j, and NaN where the
        row has no room for it. Logits at padded positions have no meaning.
    Proposal
        The cache and the new tokens, for ``commit``.

    Raises
    ------
    JaxLlamaError
        If an operand has another type, shape or dtype, or if k + 1 exceeds the cache's capacity.

    Notes
    -----
    A row with an impossible length or id proposes nothing and gets NaN logits. Source: speculative
    decoding (arXiv 2211.17192). Linear attention keeps its states, and the tokens' k, v and decay
    beside them.
    """
    check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = int32_ids(tokens, lengths)
    possible = possible_rows(cfg, tokens, lengths)
    lengths = jnp.where(possible, lengths, 0)
    scores, proposal = verify(cfg, params, tokens, lengths, cache, exact=True)
    return or_nan(possible, scores), proposal


def commit(proposal: Proposal, accepted: jax.Array) -> Cache:
    """Return the cache with the accepted tokens of a proposal.

    Parameters
    ----------
    proposal : Proposal
        The result of ``verify_step``. The call donates it, unless it is traced.
    accepted : jax.Array
        Integer ``[B]``: drafted tokens to keep, from 0 to k. The row also keeps its newest token.
        -1 leaves the row unchanged. Numbers above the valid tokens, or above the row's room, keep
        all of them.

    Returns
    -------
    Cache
        The cache with ``accepted + 1`` more tokens per row.

    Raises
    ------
    JaxLlamaError
        If ``accepted`` is not an integer array of B elements.
    """
    check_ints("accepted", accepted, "[B]", batch=proposal.cache.batch)
    return _commit(proposal.cache, proposal.new, proposal.tokens, accepted)


@donated(0)
def _commit(cache: Cache, new: jax.Array, tokens: LayerState, accepted: jax.Array) -> Cache:
    (kept,) = int32_ids(accepted)
    kept = jnp.minimum(kept, new) + 1  # which the largest numbers would overflow
    return verification.commit(Proposal(cache, new, tokens), kept, exact=True)


@donated(0)
def reset_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Return the cache with some rows as ``init_cache`` makes them, for the next prompts.

    Parameters
    ----------
    cache : Cache
        The cache of B rows. The call donates it, unless it is traced.
    rows : jax.Array
        bool ``[B]``: the rows to empty; or integer ``[R]``: their indices. Indices outside of
        [0, B) name no row.

    Returns
    -------
    Cache
        The cache. The other rows keep their tokens.

    Raises
    ------
    JaxLlamaError
        If ``rows`` has another type, shape or dtype.

    Notes
    -----
    A length of 0 alone empties only attention's rows: the state of a GLA, delta rule, Mamba-2 or
    short convolution layer would reach the next prompt.
    """
    if not isinstance(cache, Cache):
        raise JaxLlamaError(f"cache: {type(cache).__name__}: expected a Cache (init_cache)")
    if getattr(rows, "dtype", None) == jnp.bool_:
        if rows.shape != (cache.batch,):
            raise JaxLlamaError(f"rows{list(rows.shape)}: expected bool [{cache.batch}]")
        is_reset = rows
    else:
        check_ints("rows", rows, "[R]")
        row_index = jnp.arange(cache.batch, dtype=jnp.int32)[:, None]
        is_reset = jnp.any(row_index == int32_ids(rows)[0], axis=1)

    def empty(leaf: jax.Array) -> jax.Array:
        of_row = is_reset.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(of_row, jnp.zeros((), leaf.dtype), leaf)

    layers = tuple(
        layer if isinstance(layer, KVCache) else jax.tree.map(empty, layer)
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers, lengths=empty(cache.lengths))


def check_prompts(cfg: ModelConfig, tokens: ArrayOrNumpy, lengths: ArrayOrNumpy) -> None:
    """Raise JaxLlamaError unless tokens and lengths are integer arrays ``[B, T]`` and ``[B]``."""
    check_ints("tokens", tokens, "[B, T]")
    check_ints("lengths", lengths, "[B]", batch=tokens.shape[0])
    if tokens.shape[1] > cfg.max_position:
        raise JaxLlamaError(
            f"tokens{list(tokens.shape)}: {cfg.name} has a context of {cfg.max_position} "
            "(max_position)"
        )


def _check_cache(cfg: ModelConfig, cache: Tree, batch: int) -> None:
    """Raise JaxLlamaError unless ``cache`` is a cache of ``batch`` rows of this model."""
    if not isinstance(cache, Cache):
        raise JaxLlamaError(f"cache: {type(cache).__name__}: expected a Cache (init_cache)")
    if cache.batch != batch:
        raise JaxLlamaError(f"cache: it has {cache.batch} rows, and there are tokens of {batch}")
    kinds = [layer is None or isinstance(layer, KVCache) for layer in cache.layers]
    if kinds != [keeps_tokens(kind) for kind in cfg.layer_types]:
        raise JaxLlamaError(f"cache: its layers are not those of {cfg.name}")


def generate(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    sampling: Sampling | Sequence[Sampling] | SamplingParams,
    key: jax.Array | int,
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> Rows:
    """Continue every prompt until its row stops or has ``max_new_tokens`` new tokens.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    params : dict
        Its parameters.
    tokens : jax.Array
        Integer ``[B, T]``: token ids, right-padded.
    lengths : jax.Array
        Integer ``[B]``: valid tokens of each row; 0 marks an empty row.
    cache : Cache
        The cache of B rows, with room for ``T + max_new_tokens - 1`` tokens. The model does not
        read the last token again.
    sampling : Sampling, sequence of Sampling, or SamplingParams
        One for all rows, one per row, or the stacked form (``SamplingParams.stack``).
    key : jax.Array or int
        A PRNG key or a seed, for rows without a seed of their own. It may be traced.
    max_new_tokens : int
        Most new tokens of a row, at least 1.
    chunk : int, optional
        As for ``prefill``.
    stop_tokens : sequence of int, optional
        Ids that end a row; ``cfg.eos_token_ids`` by default.

    Returns
    -------
    Rows
        ``tokens`` int32 ``[B, max_new_tokens]`` and ``logprobs`` float32 of this shape, of which
        row b has the first ``counts[b]``. ``counts`` int32 ``[B]``, ``done`` bool ``[B]`` (whether
        the row met a stop token), and ``cache``, which does not hold a row's newest token yet.

    Raises
    ------
    JaxLlamaError
        If an operand has another type, shape or dtype; if T exceeds ``cfg.max_position``; or if the
        cache has too little room. Where this process can read the values, also for a length outside
        of [0, T], an invalid id, or a row that exceeds the context.
    """
    check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    if max_new_tokens < 1:
        raise JaxLlamaError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    if all(_is_on_host(x) for x in (tokens, lengths)):
        _check_values(cfg, np.asarray(tokens), np.asarray(lengths), max_new_tokens)
    width = tokens.shape[1]
    check_room(cache, width + max_new_tokens - 1, f"tokens ({width} + {max_new_tokens} new - 1)")
    check_chunk(chunk)
    if not isinstance(sampling, SamplingParams):
        given = sampling_rows(sampling, tokens.shape[0])
        sampling = SamplingParams.stack(given, cfg.vocab_size, key)
    elif (n := sampling.temperature.shape[0]) != tokens.shape[0]:
        raise JaxLlamaError(f"sampling: {n} entries for {tokens.shape[0]} prompts")
    stops = cfg.eos_token_ids if stop_tokens is None else stop_tokens
    stop_ids = jax.device_put(np.asarray(tuple(stops), np.int32))  # jnp would compile a program
    rows = start(
        cfg,
        params,
        PromptBatch(tokens, lengths, sampling, stop_ids),
        cache.layers,
        cache.lengths,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
    )
    posted = posting(cfg, params, rows.written.shape[1])
    rows, _ = loop_for(cfg, params)(cfg, posted, rows, sampling, stop_ids, max_new_tokens)
    return rows


def check_chunk(chunk: int | None) -> None:
    """Raise JaxLlamaError for a number of tokens a piece that is not positive."""
    if chunk is not None and chunk < 1:
        raise JaxLlamaError(f"chunk = {chunk}: must be at least 1")


def _is_on_host(x: object) -> bool:
    """Return whether this process can read the values; it cannot read a trace's or another
    process's.
    """
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _check_values(
    cfg: ModelConfig, tokens: np.ndarray, lengths: np.ndarray, max_new_tokens: int
) -> None:
    """Raise JaxLlamaError that names the first impossible length or valid id."""
    width = tokens.shape[1]
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise JaxLlamaError(f"lengths[{row}] = {length}: must be from 0 to {width}")
        if length + max_new_tokens > cfg.max_position:
            raise JaxLlamaError(
                f"row {row}: {length} tokens and {max_new_tokens} new ones exceed the context of "
                f"{cfg.name}, {cfg.max_position} (max_position)"
            )
        ids = tokens[row, :length]
        bad = ids[(ids < 0) | (ids >= cfg.vocab_size)]
        if bad.size:
            raise JaxLlamaError(
                f"tokens[{row}]: id {bad[0]} is outside of the vocabulary of {cfg.vocab_size}"
            )

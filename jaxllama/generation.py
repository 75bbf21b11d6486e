"""prefill, decode_step, generate: pure jitted functions over (cfg, params, cache).

    logits, cache = prefill(cfg, params, tokens, lengths, cache)      whole prompts, ragged
    logits, cache = decode_step(cfg, params, tokens, cache)           one token per row
    logits, proposal = verify_step(cfg, params, tokens, lengths, cache)   a draft, all at once
    cache         = commit(proposal, accepted)                        what of it stays
    output        = generate(cfg, params, tokens, lengths, cache, sampling, key, max_new_tokens)

The cache is donated at every call: use the one that comes back.  A call that is traced (inside of
``jax.grad``, ``jax.vmap``, ``jax.jit``) donates nothing, because a derivative reads the old cache.
Operands of another type, shape or dtype raise JaxLlamaError.  A row whose values are impossible
(a length outside of [1, T], an id outside of the vocabulary) stays as it is and gets NaN logits.

``generate`` is prefill, then one
``lax.while_loop`` on the device until every row has stopped; ``start`` and ``advance`` are its two
halves, for callers that look at the text in between (streaming, stop strings).  The sampling key of
a token is ``fold_in(row key, its position)``, so a row's tokens depend neither on its neighbours
nor on its slot.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder
from jaxllama.model.cache import Cache, Proposal
from jaxllama.model.lora import ROWS, for_rows
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Hidden
from jaxllama.parallel.mesh import mesh_of, traced_mesh
from jaxllama.sampling import History, Sampling, SamplingParams, sample
from pallas_kernels.brief import short_repr
from pallas_kernels.rows import greedy

Params = dict[str, Any]
# Tokens, of all rows together, that a GPU's prefill takes through the model at once: enough for its
# products at full speed, and 3 GB of activations for Llama-3.1-8B, 6 GB for 70B.
PREFILL_TOKENS = 32768
# A CPU's, of each row.
CPU_PREFILL_TOKENS = 512


def donated(at: int, **static: Any) -> Callable[[Callable[..., Any]], Any]:
    """``jax.jit`` that donates argument ``at``, unless the call is made inside of a trace.

    static: of ``jax.jit``.  ``lower``, ``trace`` and ``__wrapped__`` are the donating program's.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        keeping = jax.jit(function, **static)
        donating = jax.jit(function, donate_argnums=at, **static)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_traced = get_opaque_trace_state() != _untraced()
            return (keeping if is_traced else donating)(*args, **kwargs)

        vars(call).update(lower=donating.lower, trace=donating.trace)
        return call

    return decorate


@functools.cache
def _untraced() -> Any:
    """jax's state outside of any trace, which a new thread has.  (To look for tracers among the
    parameters would cost each step hundreds of checks.)"""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(get_opaque_trace_state).result()


def init_params(cfg: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters (normal, 0.02; norms 1; biases 0), made on the default device."""
    return _init_params(cfg, jnp.dtype(dtype).name, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_params(cfg: ModelConfig, dtype: str, key: jax.Array) -> Params:
    from jaxllama.model.module import Decoder

    params = Decoder(cfg).init(key, method="tree")["params"]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@functools.partial(jax.jit, static_argnums=0)
def logits(cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Teacher-forced float32 logits ``[B, T, V]`` of ``tokens[B, T]``, right-padded beyond
    ``lengths[B]`` (what stands there in the result means nothing).

    Raises JaxLlamaError for operands of another type, shape or dtype, and where T exceeds
    ``cfg.max_position``.  A row with a length outside of [1, T], or a valid id outside of the
    vocabulary, gets NaN logits.
    """
    _check_prompts(cfg, tokens, lengths)
    tokens, lengths = _int32(tokens, lengths)
    possible = _possible(cfg, tokens, lengths)
    hidden, _ = decoder.forward(cfg, params, tokens, lengths)
    return _or_nan(possible, decoder.logits(cfg, params, hidden))


def prefill_chunk(rows: int, width: int) -> int | None:
    """The ``chunk`` for prompts of ``width`` tokens in ``rows`` rows: equal pieces, as few as the
    memory of activations allows; None where that is one."""
    is_cpu = jax.default_backend() == "cpu"
    most = CPU_PREFILL_TOKENS if is_cpu else max(PREFILL_TOKENS // rows, 128)
    pieces = -(-width // most)
    return None if pieces == 1 else min(-(-width // pieces // 128) * 128, most)


@donated(4, static_argnums=0, static_argnames="chunk")
def prefill(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Append ``tokens[B, T]`` (right-padded, ``lengths[B]`` valid) to the cache's rows.

    chunk: tokens a row that go through the model at once (``prefill_chunk``).  It bounds the memory
    of activations; ``model/README.md`` lists where the results are equal to the bit and where up to
    rounding.  Returns (float32 logits ``[B, V]`` of each row's last valid token, cache).  The given
    cache is donated, unless the call is traced.

    Raises JaxLlamaError for operands of another type, shape or dtype, where T exceeds the cache's
    capacity or ``cfg.max_position``, and for a chunk below 1.  A row whose tokens do not fit behind
    what it holds gets those that do, and NaN logits.  A row with a length outside of [1, T], or a
    valid id outside of the vocabulary, stays as it is and gets NaN logits.
    """
    _check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    if chunk is not None and chunk < 1:
        raise JaxLlamaError(f"chunk = {chunk}: must be at least 1")
    _check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = _int32(tokens, lengths)
    possible = _possible(cfg, tokens, lengths)
    lengths = jnp.where(possible, lengths, 0)
    scores, cache = _fill(cfg, params, tokens, lengths, cache, chunk)
    return _or_nan(possible, scores), cache


@donated(4, static_argnums=0, static_argnames="chunk")
def fill_rows(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """``prefill`` of operands that are known to be right; a row of length 0 stays as it is, and its
    logits mean nothing.  ``tokens`` may be padded beyond ``cfg.max_position``."""
    _check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = _int32(tokens, lengths)
    return _fill(cfg, params, tokens, lengths, cache, chunk)


def _fill(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None,
) -> tuple[jax.Array, Cache]:
    before = cache

    if chunk is None or chunk >= tokens.shape[1]:
        hidden, cache = _forward(cfg, params, tokens, lengths, cache)
        last = hidden.last(lengths)
    else:
        n_chunks = -(-tokens.shape[1] // chunk)
        tokens = jnp.pad(tokens, ((0, 0), (0, n_chunks * chunk - tokens.shape[1])))
        pieces = jnp.moveaxis(tokens.reshape(tokens.shape[0], n_chunks, chunk), 1, 0)
        total = cache.lengths + lengths

        def one_chunk(carry: tuple[Cache, Hidden], piece: tuple[jax.Array, jax.Array]):
            cache, last = carry
            index, part = piece
            n_new = jnp.clip(lengths - index * chunk, 0, chunk)
            hidden, cache = _forward(cfg, params, part, n_new, cache, total)
            return (cache, hidden.last(n_new, last)), None

        blank = jnp.zeros((tokens.shape[0], cfg.d_model), decoder.activation_dtype(params))
        index = jnp.arange(n_chunks, dtype=jnp.int32)
        (cache, last), _ = lax.scan(one_chunk, (cache, Hidden(blank)), (index, pieces))
    return _logits(cfg, params, last, before, lengths), cache


@donated(3, static_argnums=0)
def decode_step(
    cfg: ModelConfig, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append one token to every row: ``tokens[B]`` -> (float32 logits ``[B, V]``, cache).

    A generated token, which reads the share ``cfg.attn_sparsity`` of the values; a prompt's are
    for ``prefill``, which reads all of them.  A row that is full, or whose token is outside of the
    vocabulary, stays as it is and gets NaN logits.  (Without attention no row is ever full, and the
    step has no mask of rows: such a token changes the row's state, and the logits are NaN.)  The
    given cache is donated, unless the call is traced.  Raises JaxLlamaError for operands of another
    type, shape or dtype.
    """
    _check_ints("tokens", tokens, "[B]")
    _check_cache(cfg, cache, tokens.shape[0])
    (tokens,) = _int32(tokens)
    is_known = (tokens >= 0) & (tokens < cfg.vocab_size)
    live = jnp.ones_like(cache.lengths) if cache.capacity is None else is_known.astype(jnp.int32)
    hidden, after = _forward(cfg, params, tokens[:, None], live, cache, sparse=True)
    return _or_nan(is_known, _logits(cfg, params, hidden[:, 0], cache, live)), after


@donated(4, static_argnums=0)
def verify_step(
    cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array, cache: Cache
) -> tuple[jax.Array, Proposal]:
    """``decode_step`` of k + 1 tokens at once, none of which the cache has yet: ``tokens[B, k+1]``
    -> (float32 logits ``[B, k+1, V]``, proposal).

    tokens: of each row the newest one and a draft of what follows; lengths int32 ``[B]`` counts
    the valid ones, and logits behind them mean nothing.  ``logits[:, j]`` are ``decode_step``'s
    after token j, bit for bit those of a step of B * (k+1) rows; NaN where the row has no room for
    it.  ``commit`` makes a cache of the proposal; the one given is donated, unless the call is
    traced.  Raises JaxLlamaError for operands of another type, shape or dtype, and where k + 1
    exceeds the cache's capacity.  A row with a length outside of [1, k+1], or a valid id outside of
    the vocabulary, proposes nothing and gets NaN logits.

    Source: speculative decoding (arXiv 2211.17192); for linear attention the states are kept and
    the tokens' k, v and decay beside them.
    """
    _check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    _check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = _int32(tokens, lengths)
    possible = _possible(cfg, tokens, lengths)
    lengths = jnp.where(possible, lengths, 0)
    scores, proposal = verify(cfg, params, tokens, lengths, cache, exact=True)
    return _or_nan(possible, scores), proposal


def verify(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    exact: bool = False,
) -> tuple[jax.Array, Proposal]:
    """``verify_step`` inside of a program; exact: as of ``decoder.propose``."""
    hidden, proposal = decoder.propose(cfg, params, tokens, lengths, cache, exact)
    scores = decoder.logits(cfg, params, hidden.flat())
    scores = scores.reshape(*tokens.shape, -1)
    if cache.capacity is not None:
        last = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        scores = jnp.where((last < cache.capacity)[:, :, None], scores, jnp.float32(jnp.nan))
    return scores, proposal


def commit(proposal: Proposal, accepted: jax.Array) -> Cache:
    """The cache with ``accepted[B] + 1`` of the proposal's tokens: the newest and so many drafts,
    from 0 to k; -1 leaves a row as it was.  More than there are (``lengths``, or what fits the
    row) counts as all of them.  The proposal is donated, unless the call is traced.  Raises
    JaxLlamaError where ``accepted`` is not an array of B whole numbers."""
    _check_ints("accepted", accepted, "[B]", batch=proposal.cache.batch)
    return _commit(proposal.cache, proposal.new, proposal.tokens, accepted)


@donated(0)
def _commit(cache: Cache, new: jax.Array, tokens: Any, accepted: jax.Array) -> Cache:
    return decoder.commit(Proposal(cache, new, tokens), *_int32(accepted + 1), exact=True)


def _forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total: jax.Array | None = None,
    sparse: bool = False,
) -> tuple[Hidden, Cache]:
    """``decoder.forward`` of a cache, which gives a cache."""
    hidden, after = decoder.forward(cfg, params, tokens, lengths, cache, total, sparse=sparse)
    assert after is not None
    return hidden, after


def _logits(
    cfg: ModelConfig, params: Params, hidden: Hidden, cache: Cache, lengths: jax.Array
) -> jax.Array:
    """Logits after ``lengths[B]`` new tokens; NaN for rows of ``cache`` without room for them.
    (A choice that whatever reads the logits makes in passing.)"""
    logits = decoder.logits(cfg, params, hidden)
    if cache.capacity is None:
        return logits
    fits = cache.lengths + lengths <= cache.capacity
    return jnp.where(fits[:, None], logits, jnp.float32(jnp.nan))


def _check_room(cache: Cache, width: int, what: str) -> None:
    if cache.capacity is not None and width > cache.capacity:
        raise JaxLlamaError(f"{width} {what} do not fit a cache of max_len {cache.capacity}")


def _check_prompts(cfg: ModelConfig, tokens: Any, lengths: Any) -> None:
    """Raises JaxLlamaError for what are no tokens ``[B, T]`` and lengths ``[B]``."""
    _check_ints("tokens", tokens, "[B, T]")
    _check_ints("lengths", lengths, "[B]", batch=tokens.shape[0])
    if tokens.shape[1] > cfg.max_position:
        raise JaxLlamaError(
            f"tokens{list(tokens.shape)}: {cfg.name} has a context of {cfg.max_position} "
            "(max_position)"
        )


def _check_ints(name: str, x: Any, axes: str, batch: int | None = None) -> None:
    """Raises JaxLlamaError for what is no array of whole numbers with these axes."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise JaxLlamaError(f"{name}: {type(x).__name__}: expected an array of integers {axes}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise JaxLlamaError(f"{name}: {x.dtype}: expected integers")
    if len(x.shape) != axes.count(",") + 1 or 0 in x.shape:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {axes}, at least one of each")
    if batch is not None and x.shape[0] != batch:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {batch}, one for each row")


def _check_cache(cfg: ModelConfig, cache: Any, batch: int) -> None:
    """Raises JaxLlamaError for what is no cache of ``batch`` rows of this model."""
    if not isinstance(cache, Cache):
        raise JaxLlamaError(f"cache: {type(cache).__name__}: expected a Cache (init_cache)")
    if cache.batch != batch:
        raise JaxLlamaError(f"cache: it has {cache.batch} rows, and there are tokens of {batch}")
    kinds = [isinstance(layer, KVCache) for layer in cache.layers]
    if kinds != [kind == "attention" for kind in cfg.layer_types]:
        raise JaxLlamaError(f"cache: its layers are not those of {cfg.name}")


def _possible(cfg: ModelConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """bool ``[B]``: the row's length is in [1, T] and its valid ids are in the vocabulary."""
    is_valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    is_known = (tokens >= 0) & (tokens < cfg.vocab_size)
    in_range = (lengths >= 1) & (lengths <= tokens.shape[1])
    return in_range & jnp.all(is_known | ~is_valid, axis=1)


def _or_nan(rows: jax.Array, scores: jax.Array) -> jax.Array:
    """``scores[B, ...]`` of the rows that are true in ``rows[B]``, NaN elsewhere."""
    rows = rows.reshape(-1, *(1,) * (scores.ndim - 1))
    return jnp.where(rows, scores, jnp.float32(jnp.nan))


def _int32(*ids: jax.Array) -> list[jax.Array]:
    """Tokens or lengths, which come as int64 under ``jax_enable_x64``: what int32 cannot hold stays
    out of range."""
    largest = 2**31 - 1
    return [
        (jnp.clip(x, -1, largest) if x.dtype.itemsize == 8 else x).astype(jnp.int32) for x in ids
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateState:
    """What the loop carries and what it leaves.

    tokens int32 and logprobs float32 ``[B, max_new_tokens]``: row b's first ``counts[b]`` entries
    are real, a stop token included.  ``done[b]``: the row met a stop token.  ``step``: tokens
    written so far (the loop's own clock).  ``history`` is None unless a row has penalties.
    """

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    done: jax.Array
    step: jax.Array
    cache: Cache
    history: History | None

    __repr__ = short_repr


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
) -> GenerateState:
    """Continue ``tokens[B, T]`` (right-padded, ``lengths[B]``) by up to ``max_new_tokens``.

    sampling: one for all rows, one per row, or the stacked form; a row without a seed of its own
    uses ``key`` (a PRNG key or an int).  stop_tokens: ids that end a row, cfg's by default.
    The loop ends when every row has stopped or ``max_new_tokens`` are written.
    Raises JaxLlamaError for a cache with room for less than ``T + max_new_tokens - 1`` tokens: the
    last one is not read again.  Raises it, too, for operands of another type, shape or dtype, for
    more tokens than ``cfg.max_position``.  Where this process has the values of ``tokens`` and
    ``lengths``, a length outside of [0, T] (0: an empty row) and a valid id outside of the
    vocabulary raise it, too.
    """
    _check_prompts(cfg, tokens, lengths)
    _check_cache(cfg, cache, tokens.shape[0])
    if max_new_tokens < 1:
        raise JaxLlamaError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    if all(_is_on_host(x) for x in (tokens, lengths)):
        _check_values(cfg, np.asarray(tokens), np.asarray(lengths), max_new_tokens)
    width = tokens.shape[1]
    _check_room(cache, width + max_new_tokens - 1, f"tokens ({width} + {max_new_tokens} new - 1)")
    if not isinstance(sampling, SamplingParams):
        rows = [sampling] * tokens.shape[0] if isinstance(sampling, Sampling) else list(sampling)
        sampling = SamplingParams.stack(rows, cfg.vocab_size, key)
    stops = cfg.eos_token_ids if stop_tokens is None else stop_tokens
    stop_ids = jnp.asarray(tuple(stops), jnp.int32)
    state = start(
        cfg,
        params,
        tokens,
        lengths,
        cache,
        sampling,
        stop_ids,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
    )
    return loop_for(params)(cfg, params, state, sampling, stop_ids, max_new_tokens)


def _is_on_host(x: Any) -> bool:
    """Whether this process can read the values: not those of a trace, or of another process."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _check_values(
    cfg: ModelConfig, tokens: np.ndarray, lengths: np.ndarray, max_new_tokens: int
) -> None:
    """Raises JaxLlamaError naming the first length or valid id that is impossible."""
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


class Alone(NamedTuple):
    """The shapes in which a deterministic model reads prompts, those of an engine.

    rows: tokens of every decode step.  widths: tokens of the programs that read a row's prompt
    without its last token, one after the other (``text.rows.pieces_of``).
    """

    rows: int
    widths: tuple[int, ...]


def _prefill_alone(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    alone: Alone,
) -> tuple[jax.Array, Cache]:
    """``fill_rows`` of an empty cache: prompts without their last tokens one row after the other,
    and these in a decode step of all rows.  Rows of length 0 cost nothing."""
    width = max(sum(alone.widths), tokens.shape[1])
    padded = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    firsts = np.cumsum([0, *alone.widths]).tolist()

    def one(row: tuple[Any, ...]) -> Cache:
        tokens, length, cache, adapter = jax.tree.map(lambda leaf: leaf[None], row)
        own = params if adapter is None else for_rows(params, adapter)

        def read(cache: Cache, first: Any, width: int, fresh: bool = False) -> Cache:
            piece = lax.dynamic_slice_in_dim(tokens, first, width, axis=1)
            n_new = jnp.clip(length - 1 - first, 0, width)
            _, after = decoder.forward(cfg, own, piece, n_new, cache, length, fresh=fresh)
            assert after is not None
            return after

        if alone.widths:
            cache = read(cache, 0, alone.widths[0], fresh=True)
        if len(alone.widths) > 2:  # all but the first and the last have the same width
            middle = lambda cache, first: (read(cache, first, alone.widths[1]), None)  # noqa: E731
            cache, _ = lax.scan(middle, cache, jnp.asarray(firsts[1:-2], jnp.int32))
        if len(alone.widths) > 1:
            cache = read(cache, firsts[-2], alone.widths[-1])
        return jax.tree.map(lambda leaf: leaf[0], cache)

    rows = padded, lengths, cache, params.get(ROWS)
    cache = lax.map(lambda row: lax.cond(row[1] > 0, one, lambda row: row[2], row), rows)
    newest = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
    live, width = (lengths > 0).astype(jnp.int32), alone.rows // tokens.shape[0]
    if width == 1:
        hidden, after = _forward(cfg, params, newest, live, cache)
        return _logits(cfg, params, hidden[:, 0], cache, live), after
    # Fewer rows, each with a draft, have a step's shapes as tokens to be verified.
    newest = jnp.pad(newest, ((0, 0), (0, width - 1)))
    hidden, proposal = decoder.propose(cfg, params, newest, live, cache, exact=True, sparse=False)
    scores = decoder.logits(cfg, params, hidden.flat())[::width]
    return scores, decoder.commit(proposal, live, exact=True)


@donated(4, static_argnums=0, static_argnames=("max_new_tokens", "chunk", "alone"))
def start(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    *,
    max_new_tokens: int,
    chunk: int | None = None,
    alone: Alone | None = None,
) -> GenerateState:
    """Prefill and the first new token, in a state with room for ``max_new_tokens``.

    A row of length 0 is empty: done from the beginning.  alone: the cache is empty, and its rows
    are read in these shapes whatever the batch and ``chunk``.
    """
    tokens, lengths = _int32(tokens, lengths)
    if alone is not None:
        scores, cache = _prefill_alone(cfg, params, tokens, lengths, cache, alone)
    else:
        scores, cache = fill_rows(cfg, params, tokens, lengths, cache, chunk=chunk)
    return _first_token(cfg, tokens, lengths, scores, cache, sampling, stop_ids, max_new_tokens)


def start_in_pieces(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    *,
    max_new_tokens: int,
    chunk: int,
    on_prompt: Callable[[int, int], None],
) -> GenerateState:
    """``start``, with one call of a program for every ``chunk`` tokens of a row.

    on_prompt: called after each as (tokens read of the longest row, tokens of the longest row).
    """
    _check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = _int32(tokens, lengths)
    total, longest = cache.lengths + lengths, int(jax.device_get(lengths).max())
    last = Hidden(jnp.zeros((tokens.shape[0], cfg.d_model), decoder.activation_dtype(params)))
    for first in range(0, longest, chunk):
        piece = tokens[:, first : first + chunk]
        piece = jnp.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
        n_new = jnp.clip(lengths - first, 0, chunk)
        last, cache = _piece(cfg, params, piece, n_new, cache, total, last)
        jax.block_until_ready(last)
        on_prompt(min(first + chunk, longest), longest)
    return _after_pieces(
        cfg,
        params,
        tokens,
        lengths,
        cache,
        total,
        last,
        sampling,
        stop_ids,
        max_new_tokens=max_new_tokens,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(4, 6))
def _piece(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total: jax.Array,
    last: Hidden,
) -> tuple[Hidden, Cache]:
    """A piece of every row's prompt; last: ``[B, D]`` of its last token so far."""
    hidden, cache = _forward(cfg, params, tokens, lengths, cache, total)
    return hidden.last(lengths, last), cache


@functools.partial(jax.jit, static_argnums=0, static_argnames="max_new_tokens", donate_argnums=4)
def _after_pieces(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    total: jax.Array,
    last: Hidden,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    *,
    max_new_tokens: int,
) -> GenerateState:
    before = dataclasses.replace(cache, lengths=total - lengths)
    scores = _logits(cfg, params, last, before, lengths)
    return _first_token(cfg, tokens, lengths, scores, cache, sampling, stop_ids, max_new_tokens)


def _first_token(
    cfg: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    scores: jax.Array,
    cache: Cache,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    max_new_tokens: int,
) -> GenerateState:
    """The state after prompts whose last tokens have the logits ``scores [B, V]``."""
    batch = tokens.shape[0]
    history = History.of_prompt(tokens, lengths, cfg.vocab_size) if sampling.penalties else None
    state = GenerateState(
        tokens=jnp.zeros((batch, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((batch, max_new_tokens), jnp.float32),
        counts=jnp.zeros((batch,), jnp.int32),
        done=lengths == 0,
        step=jnp.int32(0),
        cache=cache,
        history=history,
    )
    return emit(state, scores, sampling, stop_ids)


class _Carry(NamedTuple):
    """What ``advance`` carries: of each row its newest token, whether it is done, its counts, its
    cache's length and the step, int32 ``[5, B]``; tokens and the bits of logprobs, int32
    ``[2, B, max_new_tokens]``; the cache's layers; the history."""

    rows: Any
    written: jax.Array
    layers: tuple[Any, ...]
    history: History | None


_LOOP = {"static_argnums": 0, "donate_argnums": 2}


@donated(2, static_argnums=0)
def advance(
    cfg: ModelConfig,
    params: Params,
    state: GenerateState,
    sampling: SamplingParams,
    stop_ids: jax.Array,
    until: jax.Array | int,
) -> GenerateState:
    """Run the loop until ``until`` tokens are written in all, or every row has stopped.

    What it carries for a row is one array, and what it writes another, since on a GPU each small
    array that changes costs a step a kernel.  The condition is computed where it is asked for: as
    an element of the carry it would save a kernel, but a graph then reads it before the step has
    written it (``evaluation/speed/README.md``).
    """
    until = jnp.minimum(until, state.tokens.shape[1])

    def unfinished(carry: _Carry) -> jax.Array:
        _, done, _, _, step = carry.rows
        return jnp.any((done == 0) & (step < until))

    def one_token(carry: _Carry) -> _Carry:
        newest, done, counts, lengths, step = carry.rows
        before, live = Cache(carry.layers, lengths), 1 - done
        hidden, after = _forward(cfg, params, newest[:, None], live, before, sparse=True)
        plan = None if sampling.features else _own_end(cfg, params, hidden, stop_ids)
        if plan is not None:
            product = decoder.head_product(cfg, params, hidden[:, 0])
            kept = greedy.append_greedy(
                product,
                carry.rows,
                carry.written,
                stop_ids,
                capacity=before.capacity,
                planned=plan,
            )
            return _Carry(*kept, after.layers, None)
        scores = _logits(cfg, params, hidden[:, 0], before, live)
        rows = newest, done, counts, after.lengths, step
        carry = _Carry(rows, carry.written, after.layers, carry.history)
        return _append(carry, scores, sampling, stop_ids)

    return _unpack(lax.while_loop(unfinished, one_token, _pack(state)))


def _own_end(
    cfg: ModelConfig, params: Params, hidden: Hidden, stop_ids: jax.Array
) -> greedy.GreedyPlan | None:
    """The plan of the kernel of what follows the head in a greedy step, if there is one here."""
    logits = jax.ShapeDtypeStruct((hidden.x.shape[0], cfg.vocab_size), hidden.x.dtype)
    is_plain = cfg.logit_softcap is None and traced_mesh(params) is None
    return greedy.own_append(logits, stop_ids) if is_plain else None


def loop_for(params: Params) -> Callable[..., GenerateState]:
    """``advance``, compiled as suits the devices that (concrete) parameters are on."""
    return compiler_options.compiled_for(advance, mesh_of(params), **_LOOP)


def emit(
    state: GenerateState, scores: jax.Array, sampling: SamplingParams, stop_ids: jax.Array
) -> GenerateState:
    """Sample one token per row and append it; rows that are done stand still."""
    return _unpack(_append(_pack(state), scores, sampling, stop_ids))


def _pack(state: GenerateState) -> _Carry:
    newest = lax.dynamic_index_in_dim(state.tokens, state.step - 1, 1, keepdims=False)
    step = jnp.broadcast_to(state.step, newest.shape)
    done = state.done.astype(jnp.int32)
    rows = jnp.stack([newest, done, state.counts, state.cache.lengths, step])
    written = jnp.stack([state.tokens, _bits(state.logprobs)])
    return _Carry(rows, written, state.cache.layers, state.history)


def _unpack(carry: _Carry) -> GenerateState:
    _, done, counts, lengths, step = carry.rows
    return GenerateState(
        tokens=carry.written[0],
        logprobs=lax.bitcast_convert_type(carry.written[1], jnp.float32),
        counts=counts,
        done=done != 0,
        step=step[0],
        cache=Cache(carry.layers, lengths),
        history=carry.history,
    )


def _append(
    carry: _Carry, scores: jax.Array, sampling: SamplingParams, stop_ids: jax.Array
) -> _Carry:
    """``emit`` for what the loop carries."""
    _, done, counts, lengths, step = carry.rows
    live = 1 - done
    tokens, logprobs = sample(scores, sampling, lengths, carry.history)
    new = jnp.where(live > 0, jnp.stack([tokens, _bits(logprobs)]), 0)  # [2, B]
    done |= jnp.any(tokens[:, None] == stop_ids[None, :], axis=1).astype(jnp.int32)
    rows = jnp.stack([new[0], done, counts + live, lengths, step + 1])
    written = lax.dynamic_update_slice_in_dim(carry.written, new[:, :, None], step[0], axis=2)
    history = carry.history
    history = None if history is None else history.add(tokens, live > 0)
    return _Carry(rows, written, carry.layers, history)


def _bits(floats: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(floats, jnp.int32)

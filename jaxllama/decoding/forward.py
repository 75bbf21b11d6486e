"""Passes over the model inside of a jitted program: prompts, one token a row, a draft.

    scores, cache    = fill(cfg, params, tokens, lengths, cache, chunk)      prompts
    scores, proposal = verify(cfg, params, tokens, lengths, cache, exact)    several tokens a row
    donated(at, ...)            a decorator: ``jax.jit`` that donates outside of a trace

These functions do not check their operands.  ``jaxllama.generation`` has the checked, public ones.
Logits of a row without room for its tokens are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder, verification
from jaxllama.model.cache import Cache, Proposal
from jaxllama.model.records import Hidden
from jaxllama.parallel.sequence import sequence_shards
from jaxllama.typing import Params, Tree
from pallas_kernels.transform import equally_varying, is_traced

# Tokens, of all rows together, that a GPU's prefill takes through the model at once: enough for its
# products at full speed, and 3 GB of activations for Llama-3.1-8B, 6 GB for 70B.
PREFILL_TOKENS = 32768
# Tokens of each row that a CPU's prefill takes through the model at once.
CPU_PREFILL_TOKENS = 512


def donated(at: int, **static: Any) -> Callable[[Callable[..., Tree]], jax.stages.Wrapped]:
    """``jax.jit`` that donates argument ``at``, unless the call is made inside of a trace.

    Inside of a ``shard_map`` all operands then vary over the same axes, as a loop's carry must.

    static: keyword arguments of ``jax.jit``.  ``lower`` and ``trace`` are the donating program's.
    """

    def decorate(function: Callable[..., Tree]) -> jax.stages.Wrapped:
        @functools.wraps(function)
        def varying(*args: Tree, **kwargs: Any) -> Tree:
            return function(*equally_varying(args), **kwargs)

        keeping = jax.jit(varying, **static)
        donating = jax.jit(function, donate_argnums=at, **static)

        @functools.wraps(function)
        def call(*args: Tree, **kwargs: Any) -> Tree:
            return (keeping if is_traced() else donating)(*args, **kwargs)

        vars(call).update(lower=donating.lower, trace=donating.trace)
        return cast(jax.stages.Wrapped, call)

    return decorate


def prefill_chunk(rows: int, width: int, mesh: Mesh | None = None) -> int | None:
    """The ``chunk`` for prompts of ``width`` tokens in ``rows`` rows.

    The pieces have equal widths, and are as few as memory for activations allows.  None: one piece.
    mesh: of the parameters, whose devices may share a chunk's tokens.
    """
    is_cpu = jax.default_backend() == "cpu"
    most = CPU_PREFILL_TOKENS if is_cpu else max(PREFILL_TOKENS // rows, 128)
    most *= sequence_shards(mesh, rows)
    pieces = -(-width // most)
    return None if pieces == 1 else min(-(-width // pieces // 128) * 128, most)


def int32_ids(*ids: jax.Array) -> list[jax.Array]:
    """Return tokens or lengths as int32.

    They are int64 under ``jax_enable_x64``. A number that int32 cannot hold stays out of range.
    """
    largest = 2**31 - 1
    return [
        (jnp.clip(x, -1, largest) if x.dtype.itemsize == 8 else x).astype(jnp.int32) for x in ids
    ]


def check_room(cache: Cache, width: int, what: str) -> None:
    """Raise JaxLlamaError if a row of the cache holds fewer than ``width`` tokens."""
    if cache.capacity is not None and width > cache.capacity:
        raise JaxLlamaError(f"{width} {what} do not fit a cache of max_len {cache.capacity}")


def scores_of(
    cfg: ModelConfig, params: Params, hidden: Hidden, cache: Cache, lengths: jax.Array
) -> jax.Array:
    """Logits after ``lengths[B]`` new tokens; NaN for rows of ``cache`` without room for them.
    XLA fuses this choice into the op that reads the logits."""
    logits = decoder.logits(cfg, params, hidden)
    if cache.capacity is None:
        return logits
    fits = cache.lengths + lengths <= cache.capacity
    return jnp.where(fits[:, None], logits, jnp.float32(jnp.nan))


@donated(4, static_argnums=0, static_argnames="chunk")
def fill_rows(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """``jl.prefill`` without checks of the operands.

    A row of length 0 stays as it is, and its logits mean nothing.  ``tokens`` may be padded beyond
    ``cfg.max_position``.
    """
    check_room(cache, tokens.shape[1], "tokens")
    tokens, lengths = int32_ids(tokens, lengths)
    return fill(cfg, params, tokens, lengths, cache, chunk)


def fill(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None,
) -> tuple[jax.Array, Cache]:
    """Return the logits ``[B, V]`` of each row's last valid token of ``tokens[B, T]``, and the
    cache.
    """
    last, after, _ = fill_hidden(cfg, params, tokens, lengths, cache, chunk)
    return scores_of(cfg, params, last, cache, lengths), after


# (kept, following[B, T], hidden[B, T, D], lengths[B]) -> kept, as ``heads.HeadDraft.read_prompt``.
ReadHidden = Callable[[Tree, jax.Array, Hidden, jax.Array], Tree]


def fill_hidden(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    chunk: int | None,
    read: ReadHidden | None = None,
    kept: Tree = None,
    *,
    fresh: bool = False,
) -> tuple[Hidden, Cache, Tree]:
    """Return (hidden state ``[B, D]`` of each row's last valid token, cache, kept).

    read: takes the hidden states of a chunk, with the token after each of them.  A row's last token
    has no successor yet, so the lengths leave it out.  fresh: as for ``decoder.forward``.
    """
    before = Hidden.zeros(cfg, tokens.shape[:1], decoder.activation_dtype(params))
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))

    if chunk is None or chunk >= tokens.shape[1]:
        hidden, cache = decoder.forward(cfg, params, tokens, lengths, cache, fresh=fresh)
        if read is not None:
            kept = read(kept, following, hidden, jnp.maximum(lengths - 1, 0))
        return hidden.last(lengths), cache, kept
    n_chunks = -(-tokens.shape[1] // chunk)

    def cut(tokens: jax.Array) -> jax.Array:
        tokens = jnp.pad(tokens, ((0, 0), (0, n_chunks * chunk - tokens.shape[1])))
        return jnp.moveaxis(tokens.reshape(tokens.shape[0], n_chunks, chunk), 1, 0)

    total = cache.lengths + lengths
    pieces = cut(tokens), None if read is None else cut(following)

    def one_chunk(carry: tuple[Cache, Hidden, Tree], piece: tuple[Tree, ...]):
        cache, last, kept = carry
        index, (part, following) = piece
        n_new = jnp.clip(lengths - index * chunk, 0, chunk)
        hidden, cache = decoder.forward(cfg, params, part, n_new, cache, total)
        if read is not None:
            n_known = jnp.clip(lengths - 1 - index * chunk, 0, chunk)
            kept = read(kept, following, hidden, n_known)
        return (cache, hidden.last(n_new, last), kept), None

    index = jnp.arange(n_chunks, dtype=jnp.int32)
    first = equally_varying((cache, before, kept))
    (cache, last, kept), _ = lax.scan(one_chunk, first, (index, pieces))
    return last, cache, kept


def possible_rows(cfg: ModelConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return bool ``[B]``: the row's length is in [1, T] and its valid ids are in the vocabulary.

    Other rows get NaN logits.
    """
    is_valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    is_known = (tokens >= 0) & (tokens < cfg.vocab_size)
    in_range = (lengths >= 1) & (lengths <= tokens.shape[1])
    return in_range & jnp.all(is_known | ~is_valid, axis=1)


def or_nan(rows: jax.Array, scores: jax.Array) -> jax.Array:
    """Return ``scores[B, ...]`` with NaN in the rows that are false in ``rows[B]``."""
    rows = rows.reshape(-1, *(1,) * (scores.ndim - 1))
    return jnp.where(rows, scores, jnp.float32(jnp.nan))


@functools.partial(jax.jit, static_argnums=0)
def all_logits(
    cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Return teacher-forced float32 logits ``[B, T, V]``; rows that are not ``possible_rows`` get
    NaN.
    """
    tokens, lengths = int32_ids(tokens, lengths)
    possible = possible_rows(cfg, tokens, lengths)
    hidden, _ = decoder.forward(cfg, params, tokens, lengths)
    return or_nan(possible, decoder.logits(cfg, params, hidden))


def verify(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    exact: bool = False,
) -> tuple[jax.Array, Proposal]:
    """Return the logits ``[B, T, V]`` of ``tokens[B, T]`` and the proposal.

    The proposal has their hidden states.  exact: as for ``verification.propose``.
    """
    hidden, proposal = verification.propose(cfg, params, tokens, lengths, cache, exact)
    scores = decoder.logits(cfg, params, hidden.flat())
    scores = scores.reshape(*tokens.shape, -1)
    if cache.capacity is not None:
        last = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        scores = jnp.where((last < cache.capacity)[:, :, None], scores, jnp.float32(jnp.nan))
    return scores, dataclasses.replace(proposal, hidden=hidden)

"""Slots: the engine's device state, and the jitted functions that change it.

    Slots(cache, token, active, remaining, ignore_eos, sampling, history)     every leaf [B, ...]

A running request is one row.  Life of a row: its prompt but for the last token is prefilled into a
cache of its own (``fill``, ``fill_new``), ``insert`` puts that into a free slot, whole, and
``decode`` appends the row's newest token and draws the next, several times a call.  A free slot may
hold anything, NaN included.  Llama, GLA and hybrid rows and every cache dtype differ in
``Cache``'s leaves only, so nothing here knows which they are, but for the pool:

The **pool** of the prefix cache is a Cache too: ``rows`` rows of ``block`` tokens.  ``load_blocks``
makes the cache of a new row out of pool rows; ``store_blocks`` copies a prompt's blocks into the
pool (of GLA layers: the state after the last block).

Sampling: all features of ``sample`` are compiled into one program and a ``lax.switch`` runs what
some row of the batch needs (``level_of``), so a request with another feature compiles nothing.

Donated: what each function returns anew.  Sources: document 3 of the seeds (Inferencer) for slots,
lengths and insertion; Orca.  Left out: paging (a row's cache is contiguous, up to ``max_len``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.cache import Cache, GLAState, KVCache, init_cache
from jaxllama.cache import insert as insert_cache
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import Decoder
from jaxllama.sampling import History, Sampling, SamplingParams, sample
from jaxllama.serving.request import MAX_LOGPROBS

Params = dict[str, Any]
# OpenAI takes up to 300 entries.
MAX_BIAS = 320
# Branches of the sampler: greedy, greedy with edited logits, everything.
_EDITS = ("bias", "penalties")
_LEVELS = ((), _EDITS, (*_EDITS, "draw", "top_k", "top_p", "min_p"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """token int32: the newest, not yet in the cache.  active: somebody's.  remaining int32: tokens
    that may still be drawn.  ignore_eos: goes on past stop tokens."""

    cache: Cache
    token: jax.Array
    active: jax.Array
    remaining: jax.Array
    ignore_eos: jax.Array
    sampling: SamplingParams
    history: History

    @property
    def size(self) -> int:
        return self.token.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one ``decode`` wrote: tokens int32 and logprobs float32 ``[B, width]``, of which row b's
    first ``counts[b]`` are real, and if asked for the likeliest tokens ``[B, width, n]``."""

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Row:
    """What ``insert`` needs to know of a request beside its cache."""

    token: np.ndarray
    remaining: np.ndarray
    ignore_eos: np.ndarray
    sampling: SamplingParams
    history: History


def make_row(
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    remaining: int,
    ignore_eos: bool,
    vocab_size: int,
) -> Row:
    """The Row of a request that has written ``output``."""
    history = History(np.zeros((1, vocab_size), bool), np.zeros((1, vocab_size), np.int32))
    if sampling.has_penalties:
        history.prompt[0, list(prompt)] = True
        np.add.at(history.counts[0], list(output), 1)
    return Row(
        np.array([output[-1] if output else prompt[-1]], np.int32),
        np.array([remaining], np.int32),
        np.array([ignore_eos]),
        _one_sampling(sampling, vocab_size),
        history,
    )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """JaxLlamaError if a row cannot have these parameters."""
    bias = sampling.logit_bias or ()
    if len(bias) > MAX_BIAS:
        raise JaxLlamaError(
            f"logit_bias has {len(bias)} entries: the engine takes up to {MAX_BIAS}"
        )
    for token, _ in bias:
        if token >= vocab_size:
            raise JaxLlamaError(
                f"logit_bias: token id {token} is outside the vocabulary of {vocab_size}"
            )


def _one_sampling(sampling: Sampling, vocab_size: int) -> SamplingParams:
    """One row's parameters in the shape that all rows have: every feature's arrays are there."""
    params = SamplingParams.stack([sampling], vocab_size, 0)
    ids = np.full((1, MAX_BIAS), vocab_size, np.int32)
    values = np.zeros((1, MAX_BIAS), np.float32)
    for column, (token, value) in enumerate(sampling.logit_bias or ()):
        ids[0, column], values[0, column] = token, value
    return dataclasses.replace(params, bias_ids=ids, bias_values=values, features=())


def level_of(requests: Sequence[Sampling], is_masked: bool) -> int:
    """The cheapest branch of the sampler that serves all of these."""
    if any(row.temperature > 0 for row in requests):
        return 2
    return int(is_masked or any(row.has_penalties or row.logit_bias for row in requests))


def init_slots(cfg: ModelConfig, size: int, max_len: int, dtype: str) -> Slots:
    """``size`` free slots."""
    row = make_row(Sampling(), [0], [], 0, False, cfg.vocab_size)
    row = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), size, axis=0), row)
    row = jax.device_put(row)
    active = jax.device_put(np.zeros(size, bool))
    cache = empty_cache(cfg, size, max_len, dtype)
    return Slots(cache, row.token, active, row.remaining, row.ignore_eos, row.sampling, row.history)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_cache(cfg: ModelConfig, rows: int, max_len: int, dtype: str) -> Cache:
    return init_cache(cfg, rows, max_len, dtype)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def fill(
    cfg: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    totals: jax.Array,
) -> Cache:
    """Append ``tokens[R, T]``, ``lengths[R]`` valid, to a cache; no logits.

    totals[R]: the whole prompt's length, which dynamic RoPE depends on.
    """
    decoder = Decoder(cfg, params["norm"]["weight"].dtype)
    _, cache = decoder.apply({"params": params}, tokens, lengths, cache, totals)
    return cache


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def fill_new(
    cfg: ModelConfig,
    params: Params,
    capacity: int,
    dtype: str,
    tokens: jax.Array,
    lengths: jax.Array,
    totals: jax.Array,
) -> Cache:
    """``fill`` of a new cache with room for ``capacity`` tokens a row."""
    return fill(
        cfg, params, init_cache(cfg, tokens.shape[0], capacity, dtype), tokens, lengths, totals
    )


@functools.partial(jax.jit, donate_argnums=0)
def insert(slots: Slots, slot: jax.Array, source: Cache, source_row: jax.Array, row: Row) -> Slots:
    """Row ``source_row`` of ``source`` and ``row`` into slot ``slot``, which becomes active."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(old, new, slot, axis=0)

    return Slots(
        cache=insert_cache(slots.cache, slot, source, source_row),
        token=put(slots.token, row.token),
        active=put(slots.active, jnp.ones((1,), bool)),
        remaining=put(slots.remaining, row.remaining),
        ignore_eos=put(slots.ignore_eos, row.ignore_eos),
        sampling=jax.tree.map(put, slots.sampling, row.sampling),
        history=jax.tree.map(put, slots.history, row.history),
    )


@jax.jit
def resize(slots: Slots, index: jax.Array) -> Slots:
    """Slots of another number: new slot i is old slot ``index[i]``, or free where that is -1."""
    moved = jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0, mode="clip"), slots)
    return dataclasses.replace(moved, active=moved.active & (index >= 0))


@functools.partial(jax.jit, static_argnums=0, static_argnames="width", donate_argnums=2)
def decode(
    cfg: ModelConfig,
    params: Params,
    slots: Slots,
    keep: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    steps: jax.Array,
    level: jax.Array,
    wants_top: jax.Array,
    is_contended: jax.Array,
    *,
    width: int,
) -> tuple[Slots, Drawn]:
    """Up to ``steps`` (at most ``width``) new tokens for every active row.

    keep bool ``[B]``: False frees a slot first.  masks uint32 ``[B, ceil(V / 32)]``: bit i of a row
    allows token i; not read at level 0.  is_contended: come back as soon as a row has ended.
    """
    batch, n_top = slots.size, min(MAX_LOGPROBS, cfg.vocab_size)
    decoder = Decoder(cfg, params["norm"]["weight"].dtype)
    slots = dataclasses.replace(slots, active=slots.active & keep)
    before = jnp.sum(slots.active, dtype=jnp.int32)

    def draw_with(features: tuple[str, ...]):
        def draw(scores: jax.Array, slots: Slots, masks: jax.Array):
            params = dataclasses.replace(slots.sampling, features=features)
            allowed = _unpack(masks, cfg.vocab_size) if features else None
            return sample(scores, params, slots.cache.lengths, slots.history, allowed)

        return draw

    branches = [draw_with(features) for features in _LEVELS]

    def unfinished(carry: tuple[jax.Array, Slots, Drawn]) -> jax.Array:
        step, slots, _ = carry
        live = jnp.sum(slots.active, dtype=jnp.int32)
        return (step < steps) & (live > 0) & ~(is_contended & (live < before))

    def one_token(carry: tuple[jax.Array, Slots, Drawn]) -> tuple[jax.Array, Slots, Drawn]:
        step, slots, drawn = carry
        live = slots.active
        hidden, cache = decoder.apply(
            {"params": params}, slots.token[:, None], live.astype(jnp.int32), slots.cache
        )
        scores = decoder.apply({"params": params}, hidden[:, 0], method=Decoder.logits)
        slots = dataclasses.replace(slots, cache=cache)
        tokens, logprobs = lax.switch(level, branches, scores, slots, masks)
        top = lax.cond(wants_top, _likeliest, _no_likeliest, scores)
        stopped = jnp.any(tokens[:, None] == stop_ids[None, :], axis=1) & ~slots.ignore_eos
        remaining = slots.remaining - live.astype(jnp.int32)

        def put(buffer: jax.Array, column: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(buffer, column[:, None], step, axis=1)

        drawn = Drawn(
            tokens=put(drawn.tokens, tokens),
            logprobs=put(drawn.logprobs, logprobs),
            counts=drawn.counts + live.astype(jnp.int32),
            top_tokens=put(drawn.top_tokens, top[0]),
            top_logprobs=put(drawn.top_logprobs, top[1]),
        )
        slots = dataclasses.replace(
            slots,
            token=jnp.where(live, tokens, slots.token),
            active=live & ~stopped & (remaining > 0),
            remaining=remaining,
            history=slots.history.add(tokens, live),
        )
        return step + 1, slots, drawn

    blank = Drawn(
        jnp.zeros((batch, width), jnp.int32),
        jnp.zeros((batch, width), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, width, n_top), jnp.int32),
        jnp.zeros((batch, width, n_top), jnp.float32),
    )
    _, slots, drawn = lax.while_loop(unfinished, one_token, (jnp.int32(0), slots, blank))
    return slots, drawn


def _likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, tokens = lax.top_k(scores, min(MAX_LOGPROBS, scores.shape[1]))
    return tokens, values - jax.nn.logsumexp(scores, axis=1, keepdims=True)


def _no_likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (scores.shape[0], min(MAX_LOGPROBS, scores.shape[1]))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _unpack(masks: jax.Array, vocab_size: int) -> jax.Array:
    """uint32 ``[B, ceil(V / 32)]`` -> bool ``[B, V]``, the lowest bit first."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)
    return (bits & jnp.uint32(1)).astype(bool).reshape(masks.shape[0], -1)[:, :vocab_size]


def init_pool(cfg: ModelConfig, rows: int, block: int, dtype: str) -> Cache:
    """The prefix cache's memory: one block of tokens a row."""
    return empty_cache(cfg, rows, block, dtype)


@jax.jit
def load_blocks(pool: Cache, rows: jax.Array, n_blocks: jax.Array, length: jax.Array) -> Cache:
    """One row with room for ``len(rows)`` blocks, of which the first ``n_blocks`` (at least 1) are
    the pool's ``rows``: ``length`` tokens.  What follows is beyond its length."""

    def joined(leaf: jax.Array) -> jax.Array:  # [rows, block, ...] -> [1, n * block, ...]
        return leaf[rows].reshape(1, -1, *leaf.shape[2:])

    def last(leaf: jax.Array) -> jax.Array:
        return leaf[rows[n_blocks - 1]][None]

    layers = tuple(
        jax.tree.map(joined if isinstance(layer, KVCache) else last, layer) for layer in pool.layers
    )
    return Cache(layers, length[None])


@functools.partial(jax.jit, donate_argnums=0)
def store_blocks(
    pool: Cache,
    source: Cache,
    source_row: jax.Array,
    begin: jax.Array,
    rows: jax.Array,
    state_row: jax.Array,
) -> Cache:
    """The blocks of ``source``'s row from token ``begin`` on go to the pool's ``rows``, and its GLA
    states to ``state_row``; row numbers past the pool's end are dropped."""

    def put_blocks(old: jax.Array, new: jax.Array) -> jax.Array:
        where = begin + jnp.arange(rows.shape[0] * old.shape[1], dtype=jnp.int32)
        blocks = jnp.take(new[source_row], where, axis=0, mode="clip")
        return old.at[rows].set(blocks.reshape(rows.shape[0], *old.shape[1:]), mode="drop")

    def put_state(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[state_row].set(new[source_row], mode="drop")

    layers = tuple(
        jax.tree.map(put_state if isinstance(old, GLAState) else put_blocks, old, new)
        for old, new in zip(pool.layers, source.layers, strict=True)
    )
    return Cache(layers, pool.lengths)

"""Slots: the engine's device state, and the jitted functions that change it.

    Slots(cache, token, prompted, active, remaining, ignore_eos, sampling, history)    all [B, ...]

A running request is one row.  Life of a row: its prompt but for the last token is prefilled into a
cache outside (``fill``, ``fill_new``), ``insert`` puts the rows of such a cache into free slots,
whole, and ``decode`` appends each row's newest token and draws the next, several times a call.  A
free slot may hold anything, NaN included.  Llama, GLA and hybrid rows and every cache dtype differ
in ``Cache``'s leaves only, so nothing here knows which they are.

Sampling: all features of ``sample`` are compiled into one program and a ``lax.switch`` runs what
some row of the batch needs (``level_of``), so a request with another feature compiles nothing.

A transfer between host and device costs time whatever its size: what the host says to ``insert``
and ``decode`` is one array (``pack``, ``make_orders``), and so is what rows have written.

Donated: what each function returns anew.  Sources: document 3 of the seeds (Inferencer) for slots,
lengths and insertion; Orca.  Left out: paging (a row's cache is contiguous, up to ``max_len``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache, cache_shardings, init_cache
from jaxllama.model.decoder import forward, logits
from jaxllama.parallel.mesh import mesh_of, traced_mesh
from jaxllama.sampling import History, Sampling, SamplingParams, sample
from jaxllama.serving.engine.request import MAX_LOGPROBS

Params = dict[str, Any]
# Branches of the sampler: greedy, greedy with edited logits, everything.
_EDITS = ("bias", "penalties")
_LEVELS = ((), _EDITS, (*_EDITS, "draw", "top_k", "top_p", "min_p", "mixed"))
HIGHEST_LEVEL = len(_LEVELS) - 1  # serves every request
MAX_BIAS = 320  # entries of logit_bias a row; OpenAI takes up to 300


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """token int32: the newest, not yet in the cache.  prompted: it is the prompt's last, which
    attends to everything, where generated tokens may attend sparsely.  active: somebody's.
    remaining int32: tokens that may still be drawn.  ignore_eos: goes on past stop tokens."""

    cache: Cache
    token: jax.Array
    prompted: jax.Array
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
    """What one ``decode`` has written: tokens int32 and logprobs float32 ``[B, width]``, of which
    row b's first ``counts[b]`` are real; if asked for, the likeliest tokens ``[B, width, n]``."""

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def level_of(requests: Sequence[Sampling], is_masked: bool) -> int:
    """The cheapest branch of the sampler that serves all of these."""
    if any(row.temperature > 0 for row in requests):
        return HIGHEST_LEVEL
    return int(is_masked or any(row.has_penalties or row.logit_bias for row in requests))


def init_slots(cfg: ModelConfig, cache: Cache) -> Slots:
    """A free slot for every row of the cache."""
    size, vocab = cache.batch, cfg.vocab_size
    none, no = np.zeros(size, np.int32), np.zeros(size, bool)
    seen, counts = np.zeros((size, vocab), bool), np.zeros((size, vocab), np.int32)
    history = History(seen, counts)  # pyright: ignore[reportArgumentType] - soon on the device
    rest = (none, no, no, none, no, stack_sampling([Sampling()] * size, vocab), history)
    mesh = mesh_of(cache.lengths)
    place = None if mesh is None else NamedSharding(mesh, P())
    return Slots(cache, *jax.device_put(rest, place))


def _constrained(slots: Slots, like: Slots) -> Slots:
    """The arrays where they belong on the mesh of ``like``, if any, whatever the compiler would
    choose: what a program gives, it takes again without being compiled anew."""
    mesh = traced_mesh(like.cache.lengths)
    if mesh is None:
        return slots
    everywhere = NamedSharding(mesh, P())
    places = jax.tree.map(lambda leaf: everywhere, slots)
    places = dataclasses.replace(places, cache=cache_shardings(slots.cache, mesh))
    return jax.lax.with_sharding_constraint(slots, places)


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

    totals[R]: the whole prompt's length, which dynamic RoPE depends on; what is behind it was
    generated.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    written = cache.lengths[:, None] + columns >= totals[:, None]
    _, after = forward(cfg, params, tokens, lengths, cache, totals, sparse=written)
    return after  # pyright: ignore[reportReturnType] - there is one where one was given


@functools.partial(jax.jit, static_argnums=(0, 2))
def fill_new(
    cfg: ModelConfig,
    params: Params,
    dtype: str,
    tokens: jax.Array,
    lengths: jax.Array,
    totals: jax.Array,
) -> Cache:
    """``fill`` of a new cache with room for these tokens."""
    rows, width = tokens.shape
    return fill(cfg, params, init_cache(cfg, rows, width, dtype), tokens, lengths, totals)


@functools.partial(jax.jit, donate_argnums=0)
def insert(slots: Slots, source: Cache, packed: jax.Array) -> Slots:
    """The rows of ``source`` into their slots, which become active, as packed Rows say.  No two go
    to one slot."""
    rows = unpack(packed, slots.history.counts.shape[1])

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        # A cache may have less room than the slots: the rest of a slot is beyond its length.
        where = (rows.slot, *(slice(size) for size in new.shape[1:]))
        return old.at[where].set(new, mode="drop", unique_indices=True)

    newest = jnp.take_along_axis(rows.tokens, rows.n_tokens[:, None] - 1, axis=1)[:, 0]
    inserted = Slots(
        cache=jax.tree.map(put, slots.cache, source),
        token=put(slots.token, newest),
        prompted=put(slots.prompted, rows.n_tokens == rows.n_prompt),
        active=put(slots.active, jnp.ones(newest.shape, bool)),
        remaining=put(slots.remaining, rows.remaining),
        ignore_eos=put(slots.ignore_eos, rows.ignore_eos),
        sampling=jax.tree.map(put, slots.sampling, rows.sampling),
        history=jax.tree.map(put, slots.history, _history(rows, slots.history.counts.shape[1])),
    )
    return _constrained(inserted, slots)


def _history(rows: Rows, vocab_size: int) -> History:
    history = History.of_prompt(rows.tokens, rows.n_prompt, vocab_size)
    columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    written = (columns >= rows.n_prompt[:, None]) & (columns < rows.n_tokens[:, None])
    where = jnp.arange(rows.tokens.shape[0])[:, None], jnp.where(written, rows.tokens, vocab_size)
    return dataclasses.replace(history, counts=history.counts.at[where].add(1, mode="drop"))


@jax.jit
def resize(slots: Slots, index: jax.Array) -> Slots:
    """Slots of another number: new slot i is old slot ``index[i]``, or free where that is -1."""
    moved = jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0, mode="clip"), slots)
    return _constrained(dataclasses.replace(moved, active=moved.active & (index >= 0)), slots)


def make_orders(
    keep: np.ndarray, *, steps: int, level: int, wants_top: bool, wanted: int
) -> np.ndarray:
    """What ``decode`` is told, int32 ``[4 + B]``."""
    return np.concatenate([[steps, level, wants_top, wanted], keep]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, static_argnames="width", donate_argnums=2)
def decode(
    cfg: ModelConfig,
    params: Params,
    slots: Slots,
    orders: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    *,
    width: int,
) -> tuple[Slots, jax.Array, tuple[jax.Array, jax.Array]]:
    """Up to ``steps`` (at most ``width``) new tokens for every active row.

    orders: of ``make_orders``.  keep bool ``[B]``: False frees a slot first.  level: the sampler's
    branch.  wanted: come back as soon as so many rows have ended; 0 is never.  masks uint32
    ``[B, ceil(V / 32)]``: bit i of a row allows token i; not read at level 0.

    Returns (slots, rows int32 ``[B, 1 + 2 width]``: how many tokens, the tokens, the bits of their
    logprobs; the likeliest tokens and their logprobs ``[B, width, n]``, if asked for).
    """
    batch, n_top = slots.size, min(MAX_LOGPROBS, cfg.vocab_size)
    steps, level, wants_top, wanted = orders[:4]
    keep, wants_top = orders[4:] != 0, wants_top != 0
    slots = dataclasses.replace(slots, active=slots.active & keep)
    before = jnp.sum(slots.active, dtype=jnp.int32)

    def draw_with(features: tuple[str, ...]):
        def draw(scores: jax.Array, slots: Slots, masks: jax.Array):
            params = dataclasses.replace(slots.sampling, features=features)
            allowed = _mask_bits(masks, cfg.vocab_size) if features else None
            return sample(scores, params, slots.cache.lengths, slots.history, allowed)

        return draw

    branches = [draw_with(features) for features in _LEVELS]

    def unfinished(carry: tuple[jax.Array, Slots, Drawn]) -> jax.Array:
        step, slots, _ = carry
        live = jnp.sum(slots.active, dtype=jnp.int32)
        return (step < steps) & (live > 0) & ((wanted == 0) | (before - live < wanted))

    def one_token(carry: tuple[jax.Array, Slots, Drawn]) -> tuple[jax.Array, Slots, Drawn]:
        step, slots, drawn = carry
        live = slots.active
        hidden, cache = forward(
            cfg, params, slots.token[:, None], live.astype(jnp.int32), slots.cache,
            sparse=~slots.prompted[:, None],
        )  # fmt: skip
        scores = logits(cfg, params, hidden[:, 0])
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
            prompted=slots.prompted & ~live,
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
    _, after, drawn = lax.while_loop(unfinished, one_token, (jnp.int32(0), slots, blank))
    bits = lax.bitcast_convert_type(drawn.logprobs, jnp.int32)
    rows = jnp.concatenate([drawn.counts[:, None], drawn.tokens, bits], axis=1)
    return _constrained(after, slots), rows, (drawn.top_tokens, drawn.top_logprobs)


def _likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, tokens = lax.top_k(scores, min(MAX_LOGPROBS, scores.shape[1]))
    return tokens, values - jax.nn.logsumexp(scores, axis=1, keepdims=True)


def _no_likeliest(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (scores.shape[0], min(MAX_LOGPROBS, scores.shape[1]))
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _mask_bits(masks: jax.Array, vocab_size: int) -> jax.Array:
    """uint32 ``[B, ceil(V / 32)]`` -> bool ``[B, V]``, the lowest bit first."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)
    return (bits & jnp.uint32(1)).astype(bool).reshape(masks.shape[0], -1)[:, :vocab_size]


# Newcomers, as arrays and as one array:  packed = pack(make_rows(newcomers, ...))  on the host,
# rows = unpack(packed, vocab_size)  on the device


class Newcomer(NamedTuple):
    """A request on its way into slot ``slot``; ``output`` is what it has written already."""

    slot: int
    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    remaining: int
    ignore_eos: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What ``insert`` needs to know of the rows of a cache, all ``[R, ...]``.

    slot int32: where each goes, past the last slot for one that is nobody's.  tokens int32
    ``[R, max_len]``: the prompt, then the output; n_prompt and n_tokens count them.
    """

    slot: Any  # numpy's arrays on the host, jax's inside of ``insert``
    tokens: Any
    n_prompt: Any
    n_tokens: Any
    remaining: Any
    ignore_eos: Any
    sampling: SamplingParams


def make_rows(newcomers: Mapping[int, Newcomer], rows: int, max_len: int, vocab_size: int) -> Rows:
    """newcomers: by the row of the cache that is theirs; the others of ``rows`` are nobody's."""
    slot = np.arange(2**30, 2**30 + rows, dtype=np.int32)  # distinct, as insert promises
    tokens = np.zeros((rows, max_len), np.int32)
    n_prompt, n_tokens, remaining = (np.zeros(rows, np.int32) for _ in range(3))
    ignore_eos = np.zeros(rows, bool)
    sampling = [Sampling()] * rows
    for row, new in newcomers.items():
        slot[row], sampling[row] = new.slot, new.sampling
        n_prompt[row], n_tokens[row] = len(new.prompt), len(new.prompt) + len(new.output)
        tokens[row, : n_prompt[row]] = new.prompt
        tokens[row, n_prompt[row] : n_tokens[row]] = new.output
        remaining[row], ignore_eos[row] = new.remaining, new.ignore_eos
    params = stack_sampling(sampling, vocab_size)
    return Rows(slot, tokens, n_prompt, n_tokens, remaining, ignore_eos, params)


def pack(rows: Rows) -> np.ndarray:
    """Rows as one int32 array ``[R, n]``, floats by their bits."""
    leaves = jax.tree.leaves(rows)
    flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
    bits = [leaf.astype(np.int32) if leaf.dtype == bool else leaf.view(np.int32) for leaf in flat]
    return np.concatenate(bits, axis=1)


def unpack(packed: jax.Array, vocab_size: int) -> Rows:
    """Inside a jitted function."""
    n_rows, columns = packed.shape
    rest = pack(make_rows({}, 1, 0, vocab_size)).shape[1]
    like, structure = jax.tree.flatten(make_rows({}, n_rows, columns - rest, vocab_size))
    ends = np.cumsum([leaf[0].size for leaf in like]).tolist()
    leaves = []
    for leaf, end in zip(like, ends, strict=True):
        bits = packed[:, end - leaf[0].size : end].reshape(leaf.shape)
        is_bool = leaf.dtype == bool
        leaves.append(bits != 0 if is_bool else lax.bitcast_convert_type(bits, leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def stack_sampling(rows: Sequence[Sampling], vocab_size: int) -> SamplingParams:
    """The rows' parameters in the shape that all rows have: every feature's arrays are there."""
    params = SamplingParams.on_host(rows, vocab_size)
    ids = np.full((len(rows), MAX_BIAS), vocab_size, np.int32)
    values = np.zeros((len(rows), MAX_BIAS), np.float32)
    for row, sampling in enumerate(rows):
        pairs: tuple[Any, ...] = tuple(sampling.logit_bias or ())
        for column, (token, value) in enumerate(pairs):
            ids[row, column], values[row, column] = token, value
    return dataclasses.replace(params, bias_ids=ids, bias_values=values, features=())

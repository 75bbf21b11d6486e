"""Slots: the engine's device state, and the jitted functions that change it.

    BatchState(cache, snapshots, token, prompted, active, remaining, ignore_eos, sampling, history,
               drafting)

A running request is one row of ``cache``, whose attention layers are pages that all rows share.
``admit`` gives a slot to a request, with its pages and its initial state. ``fill`` appends the
prompt, except its last token, to the cache; ``copy_pages`` takes it from another row. ``decode``
appends each row's newest token and samples the next one, several times a call. A slot or a page
without an owner may hold anything, NaN included.

Llama, GLA and hybrid models and all cache dtypes differ in ``Cache``'s leaves only, so nothing here
tests for them. The layers of a draft model follow the model's own, in the same cache. A page holds
its tokens' keys and values for both models, and a snapshot holds both states.

``fill`` and ``decode`` change only the rows listed in their arguments.

A transfer between host and device costs time whatever its size. So the host sends one array to each
function (``pack``, ``make_orders``) and reads one array of results.

Each function donates the arrays that it returns updated. Sources: Inferencer (document 3 of the
seeds) for slots and lengths; Orca (OSDI 2022) for iteration-level batching; PagedAttention (arXiv
2309.06180).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import ADAPTIVE, Draft, NGram, Pace, PromptPart, SlotDrafts
from jaxllama.decoding.gain import DRAFT
from jaxllama.decoding.sampling import BiasPairs, History, Sampling, SamplingParams
from jaxllama.engine import passes
from jaxllama.engine.batch import BatchState
from jaxllama.model.cache import Cache, LayerState, cache_shardings, init_pages
from jaxllama.model.decoder import forward
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.parallel.mesh import MODEL_AXIS, traced_mesh
from jaxllama.typing import Params, Tree

NOBODY = 2**30  # an index past the last slot, page or snapshot
MAX_BIAS = 320  # largest number of logit_bias entries of a row; OpenAI takes up to 300
_NGRAM = NGram()


@functools.partial(jax.jit, static_argnums=range(11))
def empty_slots(
    cfg: ModelConfig,
    size: int,
    row_pages: int,
    pages: int,
    page: int,
    states: int,
    dtype: str,
    text: int = 0,
    draft: ModelConfig | None = None,
    hidden: str | None = None,
    parts: int = 1,
) -> BatchState:
    """Return ``size`` free slots.

    row_pages, pages, page: as for ``init_pages``. states: number of snapshots. text: number of
    tokens of text that a row drafts from. draft: config of the draft model or of a head's
    layer, if there is one. hidden: dtype of the hidden states that a head keeps. parts: as of
    ``Cache``; a part of the slots is of consecutive ones.
    """
    cfgs = (cfg,) if draft is None else (cfg, draft)
    caches = [
        init_pages(model_config, size, row_pages, pages, page, dtype) for model_config in cfgs
    ]
    cache = dataclasses.replace(
        caches[0], layers=sum((model_config.layers for model_config in caches), ()), parts=parts
    )
    like = sum(
        (init_pages(model_config, states, 1, 1, 1, dtype).layers for model_config in cfgs), ()
    )
    snapshots = tuple(None if isinstance(layer, KVCache) else layer for layer in like)
    none, no = jnp.zeros(size, jnp.int32), jnp.zeros(size, bool)
    vocab = cfg.vocab_size
    history = History(jnp.zeros((size, vocab), bool), jnp.zeros((size, vocab), jnp.int32))
    sampling = jax.tree.map(jnp.asarray, stack_sampling([Sampling()] * size, vocab))
    drafting = None
    if text:
        last = None if hidden is None else jnp.zeros((size, cfgs[-1].d_model), hidden)
        drafting = SlotDrafts(jnp.zeros((size, text), jnp.int32), _new_pace(size), none, (), last)
    return BatchState(cache, snapshots, none, no, no, none, no, sampling, history, drafting)


def _new_pace(rows: int) -> Pace:
    return Pace(*(jnp.full(rows, value, jnp.int32) for value in (ADAPTIVE, 0, 1)))


def slots_shardings(slots: BatchState, mesh: Mesh | AbstractMesh) -> BatchState:
    """Return the shardings of slots or their shapes.

    Heads are split, and rows and pages in several parts; all else is replicated.  The history is
    split as logits are, or a call would gather it.
    """
    cache = cache_shardings(slots.cache, mesh)
    places = jax.tree.map(lambda leaf: cache.lengths, slots)
    shared = cache_shardings(dataclasses.replace(slots.cache, parts=1), mesh)
    snapshots = tuple(
        None if known is None else place
        for known, place in zip(slots.snapshots, shared.layers, strict=True)
    )
    history = places.history
    if slots.history.counts.shape[1] % mesh.shape[MODEL_AXIS] == 0:
        lengths: Tree = cache.lengths
        [rows] = lengths.spec or (None,)
        split = NamedSharding(mesh, P(rows, MODEL_AXIS))
        history = jax.tree.map(lambda _: split, history)
    return dataclasses.replace(places, cache=cache, snapshots=snapshots, history=history)


def _everywhere(results: tuple[Tree, ...], like: BatchState) -> tuple[Tree, ...]:
    """Return results on all devices of ``like``'s mesh, so that each process can read them."""
    mesh = traced_mesh(like.cache.lengths)
    if mesh is None:
        return results
    return jax.lax.with_sharding_constraint(results, NamedSharding(mesh, P()))


def _constrained(slots: BatchState, like: BatchState) -> BatchState:
    """Constrain the arrays to the shardings of ``like``'s mesh, if there is one.

    A program then accepts its own output without being compiled again.
    """
    mesh = traced_mesh(like.cache.lengths)
    if mesh is None:
        return slots
    return jax.lax.with_sharding_constraint(slots, slots_shardings(slots, mesh))


class _Rows(NamedTuple):
    """Indices of rows, ``[n]``. In several parts, each n / parts of them are of one part's rows, so
    that a device needs no other's."""

    at: jax.Array
    parts: int = 1

    def take(self, tree: Tree) -> Tree:
        """Return these rows of every array. Indices past the last row give any row."""
        return self._each(lambda rows, leaf: jnp.take(leaf, rows, axis=0, mode="clip"), tree)

    def put(self, old: Tree, new: Tree) -> Tree:
        """Write ``new`` to these rows of ``old``, which differ. Indices past the last row are
        dropped."""

        def written(rows: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[rows].set(new, mode="drop", unique_indices=True)

        return self._each(written, old, new)

    def _each(self, function: Callable[..., jax.Array], *trees: Tree) -> Tree:
        """Return ``function(rows, *leaves)`` of the trees' arrays, for each part alone."""

        def of_leaves(*leaves: jax.Array) -> jax.Array:
            if self.parts == 1:
                return function(self.at, *leaves)
            cut = [leaf.reshape(self.parts, -1, *leaf.shape[1:]) for leaf in (self.at, *leaves)]
            first = jnp.arange(self.parts, dtype=jnp.int32)[:, None] * cut[1].shape[1]
            found = jax.vmap(function)(cut[0] - first, *cut[1:])
            return found.reshape(-1, *found.shape[2:])

        return jax.tree.map(of_leaves, *trees)


def _of_caches(function: Callable[..., Tree], *caches: Cache) -> Cache:
    """Apply ``function``, ``take`` or ``put`` of rows, to the per-row parts of the caches.

    Rows share the pages, which are taken from the last cache.
    """
    layers = tuple(
        states[-1] if isinstance(states[0], KVCache) else function(*states)
        for states in zip(*(cache.layers for cache in caches), strict=True)
    )
    lengths, table = function(*((cache.lengths, cache.table) for cache in caches))
    return dataclasses.replace(caches[0], layers=layers, lengths=lengths, table=table)


@functools.partial(jax.jit, donate_argnums=0)
def admit(slots: BatchState, packed: jax.Array) -> BatchState:
    """Give slots to the newcomers of packed AdmittedRows. No two of them go to one slot."""
    cache = slots.cache
    assert cache.table is not None
    rows = unpack(packed, slots.history.counts.shape[1], cache.table.shape[1])
    slot, put = rows.slot, _Rows(rows.slot, cache.parts).put
    layers = tuple(
        state if known is None else put(state, _beginning(known, rows.snapshot))
        for state, known in zip(cache.layers, slots.snapshots, strict=True)
    )
    lengths, table = put((cache.lengths, cache.table), (rows.length, rows.table))
    admitted = dataclasses.replace(
        slots,
        cache=dataclasses.replace(cache, layers=layers, lengths=lengths, table=table),
        token=put(slots.token, rows.token),
        prompted=put(slots.prompted, rows.prompted),
        active=put(slots.active, jnp.ones(slot.shape, bool)),
        remaining=put(slots.remaining, rows.remaining),
        ignore_eos=put(slots.ignore_eos, rows.ignore_eos),
        sampling=put(slots.sampling, rows.sampling),
        history=put(slots.history, _history(rows, slots.history.counts.shape[1])),
    )
    if slots.drafting is not None:
        more = slots.drafting.text.shape[1] - rows.tokens.shape[1]
        text = jnp.pad(rows.tokens, ((0, 0), (0, more)))
        read, last = rows.length, slots.drafting.last
        if last is not None:
            read, last = jnp.full_like(read, -1), jnp.zeros((len(slot), last.shape[1]), last.dtype)
        news = SlotDrafts(text, _new_pace(len(slot)), read, (), last)
        admitted = dataclasses.replace(admitted, drafting=put(slots.drafting, news))
    return _constrained(admitted, slots)


@functools.partial(jax.jit, donate_argnums=0)
def copy_pages(slots: BatchState, pages: jax.Array) -> BatchState:
    """Copy each first page of ``pages`` int32 ``[n, 2]`` to the second, as all were before.

    Indices past the last page are ignored.
    """
    source, target = pages.T

    def copied(pool: jax.Array) -> jax.Array:
        new = jnp.take(pool, source, axis=0, mode="clip")
        # Nothing is written past the last page, so these targets may be equal.
        return pool.at[target].set(new, mode="drop", unique_indices=True)

    layers = tuple(
        jax.tree.map(copied, layer) if isinstance(layer, KVCache) else layer
        for layer in slots.cache.layers
    )
    return _constrained(slots.with_layers(layers), slots)


def _beginning(snapshots: LayerState, index: jax.Array) -> LayerState:
    """Return the snapshots at ``index``, ``[R, ...]``; at -1 the state before any token."""

    def beginning_of(leaf: jax.Array) -> jax.Array:
        none = jnp.zeros((len(index), *leaf.shape[1:]), leaf.dtype)
        if not len(leaf):
            return none
        is_known = (index >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(is_known, jnp.take(leaf, index, axis=0, mode="clip"), none)

    return jax.tree.map(beginning_of, snapshots)


def _history(rows: AdmittedRows, vocab_size: int) -> History:
    history = History.of_prompt(rows.tokens, rows.n_prompt, vocab_size)
    columns = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    written = (columns >= rows.n_prompt[:, None]) & (columns < rows.n_tokens[:, None])
    where = jnp.arange(rows.tokens.shape[0])[:, None], jnp.where(written, rows.tokens, vocab_size)
    return dataclasses.replace(history, counts=history.counts.at[where].add(1, mode="drop"))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("fresh", "draft"), donate_argnums=2)
def fill(
    cfg: ModelConfig,
    params: Params,
    slots: BatchState,
    tokens: jax.Array,
    facts: jax.Array,
    draft_params: Params | None = None,
    *,
    fresh: bool,
    draft: Draft = _NGRAM,
) -> BatchState:
    """Append ``tokens[R, T]`` to rows of the cache, the draft model's too; computes no logits.

    facts int32 ``[R, 5]``: each row's slot; the number of its valid tokens; the length of the whole
    prompt; the snapshot that takes the state afterwards; the token after the valid ones, which a
    head reads. A slot past the last marks an unused row, and a snapshot past the last takes
    none. Dynamic RoPE depends on the prompt's length, and tokens after the prompt were generated.
    fresh: whether the rows are empty.
    """
    slot, lengths, totals, snapshot, following = facts.T
    rows = _Rows(slot, slots.cache.parts)
    cache = _of_caches(rows.take, slots.cache)
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    written = cache.lengths[:, None] + columns >= totals[:, None]
    layers, more = _parted(cfg, cache)
    hidden, layers = forward(
        cfg, params, tokens, lengths, layers, totals, sparse=written, fresh=fresh
    )
    assert layers is not None
    drafting = slots.drafting
    part = PromptPart(tokens, lengths, totals, hidden, following, fresh)
    more = draft.fill(draft.weights(params, draft_params), more, part)
    if drafting is not None and draft.counts_read:
        drafting = drafting._replace(read=rows.put(drafting.read, layers.lengths))
    cache = dataclasses.replace(layers, layers=(*layers.layers, *more.layers))
    snapshots = tuple(
        None if known is None else _Rows(snapshot).put(known, state)
        for known, state in zip(slots.snapshots, cache.layers, strict=True)
    )
    cache = _of_caches(rows.put, slots.cache, cache)
    filled = dataclasses.replace(slots, cache=cache, snapshots=snapshots, drafting=drafting)
    return _constrained(filled, slots)


def _parted(cfg: ModelConfig, cache: Cache) -> tuple[Cache, Cache]:
    """Split a cache into the model's own layers and the draft's layers after them."""
    layers, more = cache.layers[: cfg.n_layers], cache.layers[cfg.n_layers :]
    return dataclasses.replace(cache, layers=layers), dataclasses.replace(cache, layers=more)


def make_orders(
    rows: np.ndarray, *, level: int, wants_top: bool, steps: int, how: int = DRAFT
) -> np.ndarray:
    """Return the ``orders`` of ``decode``, int32.

    rows ``[n, 3 + k]``: slot, largest number of new tokens, number of pages so far, new pages.
    """
    calls = [level, wants_top, steps, how]
    return np.concatenate([calls, rows.reshape(-1)]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, static_argnames="sizes", donate_argnums=2)
def decode(
    cfg: ModelConfig,
    params: Params,
    slots: BatchState,
    orders: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    draft_params: Params | None = None,
    *,
    sizes: passes.CallSizes,
) -> tuple[BatchState, jax.Array, tuple[jax.Array, jax.Array]]:
    """Generate up to ``sizes.width`` tokens for each of ``sizes.n`` rows.

    orders: from ``make_orders``. Slot indices past the last are ignored. In a full batch row i
    belongs to slot i or is unused. Page indices past the last are ignored too. Its first four
    entries are the sampler's branch, whether the likeliest tokens are wanted, the largest number of
    passes, and how rows draft (``decoding.gain``).

    masks uint32 ``[n, ceil(V / 32) + width]``: bit i of a row allows token i. The columns after
    the bits hold forced tokens: 0 leaves a position to the bits, and t + 1 forces token t. Level 0
    of the sampler does not read the masks.

    Returns (slots, rows, top). rows int32 ``[n, 3 + 2 width]``: number of new tokens, number of
    drafted tokens, number of accepted drafts, the tokens, and the bits of their logprobs. top: the
    likeliest tokens and their logprobs ``[n, width, top]``, if requested.
    """
    n, every = sizes.n, slots
    orders_of_rows = orders[4:].reshape(n, -1)
    rows, limits = orders_of_rows[:, 0], orders_of_rows[:, 1]
    if n != every.size:
        slots = _of_rows(every, rows)
    is_live = rows < every.size
    cache = _with_pages(slots.cache, orders_of_rows[:, 2], orders_of_rows[:, 3:])
    table = cache.table
    assert table is not None
    cache = dataclasses.replace(cache, table=table[:, : sizes.context])
    cache, more = _parted(cfg, cache)
    slots = dataclasses.replace(slots, cache=cache, active=slots.active & is_live)
    if slots.drafting is not None:
        drafting = slots.drafting._replace(layers=more.layers)
        slots = dataclasses.replace(slots, drafting=drafting)
    slots, drawn, top = passes.run(
        cfg, params, slots, limits, orders[:4], masks, stop_ids, draft_params, sizes
    )
    active, drafting = slots.active, slots.drafting
    if n == every.size:
        active = jnp.where(is_live, active, every.active)
    layers = slots.cache.layers
    if drafting is not None:
        layers, drafting = (*layers, *drafting.layers), drafting._replace(layers=())
    cache = dataclasses.replace(slots.cache, layers=layers, table=table)
    slots = dataclasses.replace(slots, cache=cache, active=active, drafting=drafting)
    if n != every.size:
        slots = _to_rows(every, rows, slots)
    return _constrained(slots, every), *_everywhere((drawn, top), every)


def _of_rows(slots: BatchState, rows: jax.Array) -> BatchState:
    take = _Rows(rows, slots.cache.parts).take
    cache, snapshots = _of_caches(take, slots.cache), slots.snapshots
    taken = take(dataclasses.replace(slots, cache=None, snapshots=None))
    return dataclasses.replace(taken, cache=cache, snapshots=snapshots)


def _to_rows(slots: BatchState, rows: jax.Array, new: BatchState) -> BatchState:
    put = _Rows(rows, slots.cache.parts).put
    bare = dataclasses.replace(slots, cache=None, snapshots=None)
    state = put(bare, dataclasses.replace(new, cache=None, snapshots=None))
    cache = _of_caches(put, slots.cache, new.cache)
    return dataclasses.replace(state, cache=cache, snapshots=slots.snapshots)


def _with_pages(cache: Cache, had: jax.Array, more: jax.Array) -> Cache:
    """Return the cache after the rows got more pages, ``[n, k]``, after their first ``had``."""
    assert cache.table is not None
    where = had[:, None] + jnp.arange(more.shape[1], dtype=jnp.int32)
    where = jnp.where(more < NOBODY, where, cache.table.shape[1])
    index = jnp.arange(len(more), dtype=jnp.int32)[:, None], where
    return dataclasses.replace(cache, table=cache.table.at[index].set(more, mode="drop"))


# Newcomers travel as one array: the host calls packed = pack(make_rows(newcomers, ...)), and the
# device calls rows = unpack(packed, vocab_size, row_pages).


class Newcomer(NamedTuple):
    """A request that is to be admitted to slot ``slot``.

    length: number of tokens of its known prefix, which the first of ``pages`` hold. snapshot: index
    of the state after them. output: the tokens that it has generated already.
    """

    slot: int
    pages: Sequence[int]
    length: int
    snapshot: int | None
    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    remaining: int
    ignore_eos: bool
    drafts: bool = False

    @property
    def history(self) -> int:
        """Number of tokens that the request's sampling, or its drafts, depend on."""
        is_read = self.drafts or self.sampling.has_penalties
        return len(self.prompt) + len(self.output) if is_read else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdmittedRows:
    """The arguments of ``admit`` for all newcomers, each ``[R, ...]``.

    slot int32: an index past the last slot marks an unused row. table int32 ``[R, M]``: a row's
    pages, then indices past the last page. snapshot int32: -1 for none. tokens int32 ``[R, T]``:
    the history, which is the prompt and then the output; n_prompt and n_tokens count them.
    """

    slot: Tree  # numpy arrays on the host, jax arrays inside of ``admit``
    table: Tree
    length: Tree
    snapshot: Tree
    token: Tree
    prompted: Tree
    tokens: Tree
    n_prompt: Tree
    n_tokens: Tree
    remaining: Tree
    ignore_eos: Tree
    sampling: SamplingParams


def make_rows(
    newcomers: Sequence[Newcomer | None], rows: int, width: int, row_pages: int, vocab_size: int
) -> AdmittedRows:
    """Return ``rows`` rows, of which the first are the newcomers'; None is an unused row.

    width: number of columns of the tokens.
    """
    slot = np.arange(NOBODY, NOBODY + rows, dtype=np.int32)  # distinct, as ``admit`` requires
    table = np.full((rows, row_pages), NOBODY, np.int32)
    tokens = np.zeros((rows, width), np.int32)
    length, token, n_prompt, n_tokens, remaining = (np.zeros(rows, np.int32) for _ in range(5))
    snapshot = np.full(rows, -1, np.int32)
    prompted, ignore_eos = (np.zeros(rows, bool) for _ in range(2))
    sampling = [Sampling()] * rows
    for row, new in enumerate(newcomers):
        if new is None:
            continue
        slot[row], sampling[row], length[row] = new.slot, new.sampling, new.length
        table[row, : len(new.pages)] = new.pages
        if new.snapshot is not None:
            snapshot[row] = new.snapshot
        token[row], prompted[row] = (*new.prompt, *new.output)[-1], not new.output
        if new.history:
            n_prompt[row], n_tokens[row] = len(new.prompt), new.history
            tokens[row, : new.history] = (*new.prompt, *new.output)
        remaining[row], ignore_eos[row] = new.remaining, new.ignore_eos
    params = stack_sampling(sampling, vocab_size)
    return AdmittedRows(
        slot,
        table,
        length,
        snapshot,
        token,
        prompted,
        tokens,
        n_prompt,
        n_tokens,
        remaining,
        ignore_eos,
        params,
    )


def pack(rows: AdmittedRows) -> np.ndarray:
    """Return the rows as one int32 array ``[R, n]``; floats keep their bits."""
    leaves = jax.tree.leaves(rows)
    flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
    bits = [leaf.astype(np.int32) if leaf.dtype == bool else leaf.view(np.int32) for leaf in flat]
    return np.concatenate(bits, axis=1)


def unpack(packed: jax.Array, vocab_size: int, row_pages: int) -> AdmittedRows:
    """Undo ``pack``, inside a jitted function."""
    n_rows, columns = packed.shape
    rest = pack(make_rows((), 1, 0, row_pages, vocab_size)).shape[1]
    like = make_rows((), n_rows, columns - rest, row_pages, vocab_size)
    like, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf[0].size for leaf in like]).tolist()
    leaves = []
    for leaf, end in zip(like, ends, strict=True):
        bits = packed[:, end - leaf[0].size : end].reshape(leaf.shape)
        is_bool = leaf.dtype == bool
        leaves.append(bits != 0 if is_bool else lax.bitcast_convert_type(bits, leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def stack_sampling(rows: Sequence[Sampling], vocab_size: int) -> SamplingParams:
    """Return the rows' parameters with the arrays of every feature, so that shapes are fixed."""
    params = SamplingParams.on_host(rows, vocab_size)
    ids = np.full((len(rows), MAX_BIAS), vocab_size, np.int32)
    values = np.zeros((len(rows), MAX_BIAS), np.float32)
    for row, sampling in enumerate(rows):
        pairs: BiasPairs = tuple(sampling.logit_bias or ())
        for column, (token, value) in enumerate(pairs):
            ids[row, column], values[row, column] = token, value
    return dataclasses.replace(params, bias_ids=ids, bias_values=values, features=())

"""Slots: the engine's device state, and the jitted functions that change it.

    Slots(cache, snapshots, token, prompted, active, remaining, ignore_eos, sampling, history,
          drafting)

A running request is one row of ``cache``, whose attention layers are pages that all rows share.
Life of a row: ``admit`` gives a slot to a request, with its pages and the state that it begins
with; its prompt but for the last token goes through ``fill`` into the cache; ``decode`` appends
each row's newest token and draws the next, several times a call.  Nothing is copied on the way.  A
slot or a page that is nobody's may hold anything, NaN included.  Rows of Llama, GLA and hybrids and
every cache dtype differ in ``Cache``'s leaves only, so nothing here knows which they are.  A model
that drafts has its layers behind the model's own, in the same cache: a page holds its tokens' keys
and values for both, and so does a snapshot.

``fill`` and ``decode`` run on those rows alone that they are told.

A transfer between host and device costs time whatever its size: what the host says to each is one
array (``pack``, ``make_orders``), and so is what rows have written.

Donated: what each function returns anew.  Sources: document 3 of the seeds (Inferencer) for slots
and lengths; Orca; PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import ADAPTIVE, ModelDraft, NGram, Pace
from jaxllama.decoding.sampling import History, Sampling, SamplingParams
from jaxllama.engine import passes
from jaxllama.engine.batch import BatchState, SlotDrafts
from jaxllama.model.cache import Cache, LayerState, cache_shardings, init_pages
from jaxllama.model.decoder import forward
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.parallel.mesh import traced_mesh

Params = dict[str, Any]
NOBODY = 2**30  # past the last slot, page or snapshot
MAX_BIAS = 320  # entries of logit_bias a row; OpenAI takes up to 300
_NGRAM = NGram()


@functools.partial(jax.jit, static_argnums=range(9))
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
) -> BatchState:
    """``size`` slots, all free; the sizes of ``init_pages``, how many snapshots, and how many
    tokens of text a row drafts from; the model that does, if one does."""
    cfgs = (cfg,) if draft is None else (cfg, draft)
    caches = [init_pages(one, size, row_pages, pages, page, dtype) for one in cfgs]
    cache = dataclasses.replace(caches[0], layers=sum((one.layers for one in caches), ()))
    like = sum((init_pages(one, states, 1, 1, 1, dtype).layers for one in cfgs), ())
    snapshots = tuple(None if isinstance(layer, KVCache) else layer for layer in like)
    none, no = jnp.zeros(size, jnp.int32), jnp.zeros(size, bool)
    vocab = cfg.vocab_size
    history = History(jnp.zeros((size, vocab), bool), jnp.zeros((size, vocab), jnp.int32))
    sampling = jax.tree.map(jnp.asarray, stack_sampling([Sampling()] * size, vocab))
    drafting = None
    if text:
        drafting = SlotDrafts(jnp.zeros((size, text), jnp.int32), _new_pace(size), none)
    return BatchState(cache, snapshots, none, no, no, none, no, sampling, history, drafting)


def _new_pace(rows: int) -> Pace:
    return Pace(*(jnp.full(rows, value, jnp.int32) for value in (ADAPTIVE, 0, 1)))


def slots_shardings(slots: BatchState, mesh: Mesh | AbstractMesh) -> BatchState:
    """Where arrays of slots, or of their shapes, belong: heads are split, all else is
    everywhere."""
    everywhere = NamedSharding(mesh, P())
    places = jax.tree.map(lambda leaf: everywhere, slots)
    cache = cache_shardings(slots.cache, mesh)
    snapshots = tuple(
        None if known is None else place
        for known, place in zip(slots.snapshots, cache.layers, strict=True)
    )
    return dataclasses.replace(places, cache=cache, snapshots=snapshots)


def _constrained(slots: BatchState, like: BatchState) -> BatchState:
    """The arrays where they belong on the mesh of ``like``, if any, whatever the compiler would
    choose: what a program gives, it takes again without being compiled anew."""
    mesh = traced_mesh(like.cache.lengths)
    if mesh is None:
        return slots
    return jax.lax.with_sharding_constraint(slots, slots_shardings(slots, mesh))


def _take(rows: jax.Array, tree: Any) -> Any:
    """These rows of every array; past the last, any."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), tree)


def _put(rows: jax.Array, old: Any, new: Any) -> Any:
    """``new``'s rows into these of ``old``; past the last they are dropped."""
    return jax.tree.map(lambda o, n: o.at[rows].set(n, mode="drop"), old, new)


def _by_row(function: Any, rows: jax.Array, cache: Cache, *others: Cache) -> Cache:
    """``function(rows, ...)`` of what caches have by row; pages are all rows', and the last's."""
    layers = tuple(
        states[-1] if isinstance(states[0], KVCache) else function(rows, *states)
        for states in zip(*(each.layers for each in (cache, *others)), strict=True)
    )
    rest = [(each.lengths, each.table) for each in (cache, *others)]
    return Cache(layers, *function(rows, *rest))


@functools.partial(jax.jit, donate_argnums=0)
def admit(slots: BatchState, packed: jax.Array) -> BatchState:
    """Slots for newcomers, as packed Rows say.  No two go to one slot."""
    cache = slots.cache
    assert cache.table is not None
    rows = unpack(packed, slots.history.counts.shape[1], cache.table.shape[1])
    slot = rows.slot
    layers = tuple(
        state if known is None else _put(slot, state, _beginning(known, rows.snapshot))
        for state, known in zip(cache.layers, slots.snapshots, strict=True)
    )
    lengths, table = _put(slot, (cache.lengths, cache.table), (rows.length, rows.table))
    admitted = dataclasses.replace(
        slots,
        cache=Cache(layers, lengths, table),
        token=_put(slot, slots.token, rows.token),
        prompted=_put(slot, slots.prompted, rows.prompted),
        active=_put(slot, slots.active, jnp.ones(slot.shape, bool)),
        remaining=_put(slot, slots.remaining, rows.remaining),
        ignore_eos=_put(slot, slots.ignore_eos, rows.ignore_eos),
        sampling=_put(slot, slots.sampling, rows.sampling),
        history=_put(slot, slots.history, _history(rows, slots.history.counts.shape[1])),
    )
    if slots.drafting is not None:
        more = slots.drafting.text.shape[1] - rows.tokens.shape[1]
        text = jnp.pad(rows.tokens, ((0, 0), (0, more)))
        news = SlotDrafts(text, _new_pace(len(slot)), rows.length)
        admitted = dataclasses.replace(admitted, drafting=_put(slot, slots.drafting, news))
    return _constrained(admitted, slots)


def _beginning(snapshots: LayerState, index: jax.Array) -> LayerState:
    """These snapshots, ``[R, ...]``; at -1 the state of no tokens."""

    def one(leaf: jax.Array) -> jax.Array:
        none = jnp.zeros((len(index), *leaf.shape[1:]), leaf.dtype)
        if not len(leaf):
            return none
        is_known = (index >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(is_known, jnp.take(leaf, index, axis=0, mode="clip"), none)

    return jax.tree.map(one, snapshots)


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
    draft: NGram | ModelDraft = _NGRAM,
) -> BatchState:
    """Append ``tokens[R, T]`` to rows of the cache, the draft's too; no logits.

    facts int32 ``[R, 4]``: each row's slot, past the last for nobody's; how many of its tokens are
    valid; the whole prompt's length, which dynamic RoPE depends on, and what is behind it was
    generated; the snapshot that its state then becomes, past the last for none.  fresh: the rows
    are empty.
    """
    slot, lengths, totals, snapshot = facts.T
    cache = _by_row(_take, slot, slots.cache)
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    written = cache.lengths[:, None] + columns >= totals[:, None]
    own, more = _parted(cfg, cache)
    _, own = forward(cfg, params, tokens, lengths, own, totals, sparse=written, fresh=fresh)
    assert own is not None
    drafting = slots.drafting
    if isinstance(draft, ModelDraft):
        assert draft_params is not None and drafting is not None
        more = draft.fill(draft_params, tokens, lengths, more, totals, fresh=fresh)
        drafting = drafting._replace(read=_put(slot, drafting.read, own.lengths))
    cache = dataclasses.replace(own, layers=(*own.layers, *more.layers))
    snapshots = tuple(
        None if known is None else _put(snapshot, known, state)
        for known, state in zip(slots.snapshots, cache.layers, strict=True)
    )
    cache = _by_row(_put, slot, slots.cache, cache)
    filled = dataclasses.replace(slots, cache=cache, snapshots=snapshots, drafting=drafting)
    return _constrained(filled, slots)


def _parted(cfg: ModelConfig, cache: Cache) -> tuple[Cache, Cache]:
    """The model's own layers, and those behind them."""
    own, more = cache.layers[: cfg.n_layers], cache.layers[cfg.n_layers :]
    return dataclasses.replace(cache, layers=own), dataclasses.replace(cache, layers=more)


def make_orders(rows: np.ndarray, *, level: int, wants_top: bool, steps: int) -> np.ndarray:
    """What ``decode`` is told, int32.  rows ``[n, 3 + k]``: slot, most tokens, how many pages it
    had, new ones."""
    return np.concatenate([[level, wants_top, steps], rows.reshape(-1)]).astype(np.int32)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("n", "context", "width", "widths", "draft"),
    donate_argnums=2,
)
def decode(
    cfg: ModelConfig,
    params: Params,
    slots: BatchState,
    orders: jax.Array,
    masks: jax.Array,
    stop_ids: jax.Array,
    draft_params: Params | None = None,
    *,
    n: int,
    context: int,
    width: int,
    widths: tuple[int, ...] = (1,),
    draft: NGram | ModelDraft = _NGRAM,
) -> tuple[BatchState, jax.Array, tuple[jax.Array, jax.Array]]:
    """New tokens for each of ``n`` rows, for none more than ``width``; none has more than
    ``context`` pages.  widths: tokens of a row that a pass may verify, 1 and, where there are
    drafts, more.  draft: who makes them.

    orders: of ``make_orders``.  A slot past the last is nobody's; with as many rows as there are
    slots, row i is slot i's or nobody's.  A page past the last is none.  level: the sampler's
    branch; steps: most passes.  masks uint32 ``[n, ceil(V / 32) + width]``: bit i of a row allows
    token i, to those of its tokens whose column behind the bits is 0; others must be that column's
    less 1.  Not read at level 0.

    Returns (slots, rows int32 ``[n, 3 + 2 width]``: how many tokens, how many were drafted and how
    many of those right, the tokens, the bits of their logprobs; the likeliest tokens and their
    logprobs ``[n, width, top]``, if asked for).
    """
    told, every = orders[3:].reshape(n, -1), slots
    rows, limits = told[:, 0], told[:, 1]
    if n != every.size:
        slots = _of_rows(every, rows)
    is_live = rows < every.size
    cache = _with_pages(slots.cache, told[:, 2], told[:, 3:])
    table = cache.table
    assert table is not None
    cache = dataclasses.replace(cache, table=table[:, :context])
    cache, more = _parted(cfg, cache)
    slots = dataclasses.replace(slots, cache=cache, active=slots.active & is_live)
    if slots.drafting is not None:
        drafting = slots.drafting._replace(layers=more.layers)
        slots = dataclasses.replace(slots, drafting=drafting)
    slots, drawn, top = passes.run(
        cfg, params, slots, limits, orders[:3], masks, stop_ids, width, widths, draft, draft_params
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
    return _constrained(slots, every), drawn, top


def _of_rows(slots: BatchState, rows: jax.Array) -> BatchState:
    cache, snapshots = _by_row(_take, rows, slots.cache), slots.snapshots
    taken = _take(rows, dataclasses.replace(slots, cache=None, snapshots=None))
    return dataclasses.replace(taken, cache=cache, snapshots=snapshots)


def _to_rows(slots: BatchState, rows: jax.Array, new: BatchState) -> BatchState:
    bare = dataclasses.replace(slots, cache=None, snapshots=None)
    put = _put(rows, bare, dataclasses.replace(new, cache=None, snapshots=None))
    cache = _by_row(_put, rows, slots.cache, new.cache)
    return dataclasses.replace(put, cache=cache, snapshots=slots.snapshots)


def _with_pages(cache: Cache, had: jax.Array, more: jax.Array) -> Cache:
    """The cache's rows with more pages, ``[n, k]``, behind the first ``had``."""
    assert cache.table is not None
    where = had[:, None] + jnp.arange(more.shape[1], dtype=jnp.int32)
    where = jnp.where(more < NOBODY, where, cache.table.shape[1])
    index = jnp.arange(len(more), dtype=jnp.int32)[:, None], where
    return dataclasses.replace(cache, table=cache.table.at[index].set(more, mode="drop"))


# Newcomers, as arrays and as one array:  packed = pack(make_rows(newcomers, ...))  on the host,
# rows = unpack(packed, vocab_size, row_pages)  on the device


class Newcomer(NamedTuple):
    """A request on its way into slot ``slot``; ``output`` is what it has written already.  It
    begins with ``length`` known tokens, the first of ``pages``, and a snapshot's state."""

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
        """Tokens that its sampling, or its drafts, depend on."""
        is_read = self.drafts or self.sampling.has_penalties
        return len(self.prompt) + len(self.output) if is_read else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdmittedRows:
    """What ``admit`` needs to know of newcomers, all ``[R, ...]``.

    slot int32: past the last for nobody's.  table int32 ``[R, M]``: a row's pages, and past the
    last.  snapshot int32: -1 for none.  tokens int32 ``[R, T]``: of the history, the prompt, then
    the output; n_prompt and n_tokens count them.
    """

    slot: Any  # numpy's arrays on the host, jax's inside of ``admit``
    table: Any
    length: Any
    snapshot: Any
    token: Any
    prompted: Any
    tokens: Any
    n_prompt: Any
    n_tokens: Any
    remaining: Any
    ignore_eos: Any
    sampling: SamplingParams


def make_rows(
    newcomers: Sequence[Newcomer], rows: int, width: int, row_pages: int, vocab_size: int
) -> AdmittedRows:
    """The first of ``rows``; the others are nobody's.  width: of the tokens."""
    slot = np.arange(NOBODY, NOBODY + rows, dtype=np.int32)  # distinct, as admit promises
    table = np.full((rows, row_pages), NOBODY, np.int32)
    tokens = np.zeros((rows, width), np.int32)
    length, token, n_prompt, n_tokens, remaining = (np.zeros(rows, np.int32) for _ in range(5))
    snapshot = np.full(rows, -1, np.int32)
    prompted, ignore_eos = (np.zeros(rows, bool) for _ in range(2))
    sampling = [Sampling()] * rows
    for row, new in enumerate(newcomers):
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
    """Rows as one int32 array ``[R, n]``, floats by their bits."""
    leaves = jax.tree.leaves(rows)
    flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
    bits = [leaf.astype(np.int32) if leaf.dtype == bool else leaf.view(np.int32) for leaf in flat]
    return np.concatenate(bits, axis=1)


def unpack(packed: jax.Array, vocab_size: int, row_pages: int) -> AdmittedRows:
    """Inside a jitted function."""
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
    """The rows' parameters in the shape that all rows have: every feature's arrays are there."""
    params = SamplingParams.on_host(rows, vocab_size)
    ids = np.full((len(rows), MAX_BIAS), vocab_size, np.int32)
    values = np.zeros((len(rows), MAX_BIAS), np.float32)
    for row, sampling in enumerate(rows):
        pairs: tuple[Any, ...] = tuple(sampling.logit_bias or ())
        for column, (token, value) in enumerate(pairs):
            ids[row, column], values[row, column] = token, value
    return dataclasses.replace(params, bias_ids=ids, bias_values=values, features=())

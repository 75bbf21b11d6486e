"""Sparse attention over an offloaded cache: all keys move, and only the values that are read.

    SparseCache      the cache of one layer and batch
    decode_layer     keys choose the values on the device; missing values move row by row

A SparseCache is a ``LayerCache`` whose snapshot of V stays in host memory as plain arrays. A step
moves K, and the rows of V that some query head keeps. Each row moves once, however many heads of a
group read it. The newest tokens are in the tail on the device. Once in ``TAIL`` steps all of V
moves, so that the snapshot can be written anew.

Source: FlexGen (arXiv 2303.06865), section 5; there every head has its own keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.executors.offloaded.cpu_attention import output, project
from jaxllama.executors.offloaded.layer_cache import (
    TAIL,
    LayerCache,
    assemble,
    empty_tail,
    first_columns,
    snapshot_columns,
)
from jaxllama.executors.offloaded.programs import Rope
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.attention.sparse import heaviest, kept_values
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.rope import Ropes, narrowed, widened
from jaxllama.offload.store import Store, is_stored, on_device, wait
from jaxllama.typing import Tree
from pallas_kernels.attention.rope_cache import from_cache_basis, rope_and_write
from pallas_kernels.qtensor import QTensor

PROGRAMS = 16  # number of different counts of moved rows
_NOWHERE = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class SparseState:
    """The state of a sparse layer during a step.

    keys: the snapshot's keys, on the device.
    values: the snapshot's values, a tree of Stored.
    tail, slots, held: as in ``LayerCache``.
    """

    keys: jax.Array | QTensor
    values: Tree
    tail: KVCache
    slots: jax.Array
    held: int
    capacity: int


class SparseCache(LayerCache):
    """A sparse layer's cache: ``load`` returns a KVCache for the prefill, then SparseStates."""

    _capacity = 0

    def load(self) -> KVCache | SparseState:
        if self._stored is None:
            return self.empty()
        assert self._slots is not None  # the store and the tail begin together
        keys = self._store.get(self._stored.k)
        return SparseState(
            keys, self._stored.v, self._tail, self._slots, self._held, self._capacity
        )

    def load_whole(self) -> KVCache:
        state = self.load()
        return state if isinstance(state, KVCache) else self._whole_of(state)

    def _whole_of(self, state: SparseState) -> KVCache:
        snapshot = KVCache(state.keys, self._store.get(state.values))
        return assemble(snapshot, state.tail, state.slots, self._capacity)

    def save(self, state: KVCache | SparseState, slots: jax.Array | None, filled: int) -> None:
        if isinstance(state, SparseState):
            self._tail, self._slots, self._held = state.tail, state.slots, state.held
            if self._held < TAIL:
                return
            state = self._whole_of(state)
        self._capacity = state.k.shape[1]
        self._replace(first_columns(state, snapshot_columns(self._capacity, filled)))
        self._tail, self._slots = empty_tail(state)
        self._held = 0

    def _replace(self, state: KVCache) -> None:
        old, put = self._stored, functools.partial(self._store.put, shares=self._shares)
        self._stored = wait(KVCache(put(state.k), put(state.v, pinned=False)))
        self._store.free(old)


def decode_layer(
    layer: LayerConfig,
    store: Store,
    weights: Tree,
    stream: Stream,
    state: SparseState,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Rope,
) -> tuple[Stream, SparseState]:
    """Run the mixer's half of an attention layer for one token a row."""
    qkv, gate, stream = project(layer, weights, stream)
    tail, slots, kept, places = _choose(
        layer.mixer,
        state.capacity,
        qkv,
        state.keys,
        state.tail,
        state.slots,
        jnp.int32(state.held),
        positions,
        lengths,
        rope,
    )
    rows = _rows_elsewhere(np.asarray(places), state)
    moved = store.take(state.values, rows)
    resident = jax.tree.map(lambda leaf: leaf.device, state.values, is_leaf=is_stored)
    heads = _attend(
        layer.mixer,
        kept,
        places,
        resident,
        moved,
        jax.device_put(rows, store.on_device),
        tail.v,
        qkv.dtype,
    )
    state = dataclasses.replace(state, tail=tail, slots=slots, held=state.held + 1)
    return output(layer, weights, heads, gate, stream), state


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def _choose(
    cfg: AttentionConfig,
    capacity: int,
    qkv: jax.Array,
    keys: jax.Array | QTensor,
    tail: KVCache,
    slots: jax.Array,
    held: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    rope: Ropes,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Put the new token into the tail, and choose the values that its query reads.

    Returns the tail, its slots, weights ``[B, K, G, keep]`` and places int32 of the same shape. A
    place is a row of the snapshot's ``[B, S, K]``, or -2 minus a row of the tail's, or -1 for none.
    A row without a new token (stopped, or without a prompt) reads nothing. Neither the snapshot nor
    the tail holds its position.
    """
    batch, columns, n_kv, _ = keys.shape
    has_new = lengths > 0
    qkv, rope = widened(qkv, rope, tail.k.shape[-1])
    cos, sin = (table[:, 0] for table in rope.of(cfg.rope, qkv.shape[-1]))
    tail_slot = jnp.where(has_new, held, TAIL)
    q, *kv = rope_and_write(qkv, cos, sin, tail.k, tail.v, tail_slot, implementation="xla")
    tail = KVCache(*kv)
    slots = slots.at[:, held].set(jnp.where(has_new, positions[:, 0], capacity))
    k = assemble(keys, tail.k, slots, capacity)
    index, kept = heaviest(q[:, None], k, positions, cfg.attn_sparsity, cfg.sliding_window)
    kept = jnp.where(has_new[:, None, None, None], kept, 0.0)
    rows = jnp.arange(batch, dtype=jnp.int32)
    newest = jnp.full((batch, capacity), -1, jnp.int32)
    newest = newest.at[rows[:, None], slots].set(jnp.arange(TAIL, dtype=jnp.int32), mode="drop")
    row, head = rows[:, None, None, None], jnp.arange(n_kv, dtype=jnp.int32)[None, :, None, None]
    at = newest[row, index]
    in_snapshot = (row * columns + index) * n_kv + head
    in_tail = -2 - ((row * TAIL + at) * n_kv + head)
    places = jnp.where(at >= 0, in_tail, in_snapshot)
    return tail, slots, kept, jnp.where(kept > 0, places, -1)


def _rows_elsewhere(places: np.ndarray, state: SparseState) -> np.ndarray:
    """Return the rows of the snapshot that are read but are not on the device, int32 in order.

    Each row occurs once. Padding keeps the number of different lengths small.
    """
    places = places[places >= 0]
    wanted = np.zeros(math.prod(state.keys.shape[:3]), bool)
    wanted[places] = True
    wanted[: on_device(state.values)] = False
    rows = np.flatnonzero(wanted).astype(np.int32)
    unit = -(-len(wanted) // PROGRAMS)
    return np.pad(rows, (0, -len(rows) % unit), constant_values=_NOWHERE)


@functools.partial(jax.jit, static_argnums=(0, 7))
def _attend(
    cfg: AttentionConfig,
    kept: jax.Array,
    places: jax.Array,
    resident: Tree,
    moved: Tree,
    rows: jax.Array,
    tail: jax.Array | QTensor,
    dtype: jnp.dtype,
) -> jax.Array:
    """Return heads ``[B, N, H]``: weights ``kept`` times the values at ``places``.

    A value is in the snapshot's part on the device, among the moved ``rows``, or in the tail.
    """
    of_moved = jnp.searchsorted(rows, places)

    def pick(tail: jax.Array, moved: jax.Array, resident: jax.Array | None) -> jax.Array:
        tail = tail.reshape(-1, tail.shape[-1])
        found = tail.at[-2 - places].get(mode="clip")
        n_resident = 0 if resident is None else resident.shape[0]
        if moved.shape[0]:
            there = moved.at[of_moved].get(mode="clip")
            found = jnp.where((places >= n_resident)[..., None], there, found)
        if resident is not None:
            here = ((places >= 0) & (places < n_resident))[..., None]
            found = jnp.where(here, resident.at[places].get(mode="clip"), found)
        return found

    leaves, treedef = jax.tree.flatten(tail)
    here = jax.tree.leaves(resident, is_leaf=lambda leaf: leaf is None)
    values = map(pick, leaves, jax.tree.leaves(moved), here)
    heads = from_cache_basis(tail, kept_values(kept, treedef.unflatten(values), dtype))
    return narrowed(heads, cfg.head_dim)

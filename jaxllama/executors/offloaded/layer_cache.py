"""LayerCache: storage for the cache of one layer and one batch between its turns.

    state = cache.load()          on the device, for the layer's program to update
    state = cache.load_whole()    the same as one array a leaf, for a step that reads prompts
    cache.save(state, ...)        the program's result

A cache that is whole on the device is handed over and taken back. Any other cache has two parts.
The *snapshot* stores the columns written so far. The *tail*, on the device, has the newest tokens
and their slots. ``load`` puts the tail over the snapshot. A step stores one token a row. When the
tail is full, the snapshot is written anew. So a step reads the row's tokens once and, spread over
``TAIL`` steps, writes them once. Nothing in host memory is ever changed in place.

A GLA state does not grow and changes as a whole, so each step stores it anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllama.model.cache import LayerState
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.offload.policy import Shares
from jaxllama.offload.store import Store, wait
from jaxllama.typing import Tree

TAIL = 16  # tokens a row that stay on the device between two writes of a snapshot


def snapshot_columns(capacity: int, filled: int) -> int:
    """Return the columns of a snapshot that holds ``filled`` tokens.

    There are few different widths, because each needs a program of its own.
    """
    unit = max(TAIL, capacity // 8)
    return min(capacity, -(-filled // unit) * unit)


class LayerCache:
    """The cache of one layer and one batch. See the module docstring.

    empty: a function that makes the state before the first token.
    """

    def __init__(self, store: Store, shares: Shares, empty: Callable[[], LayerState]) -> None:
        self._store, self._shares, self.empty = store, shares, empty
        self._whole: LayerState | None = None
        self._stored: Tree = None
        self._tail: Tree = None
        self._slots: jax.Array | None = None
        self._held = 0  # tokens in the tail

    @property
    def moves(self) -> bool:
        return self._shares.device < 100

    def load(self) -> LayerState:
        if not self.moves:
            whole, self._whole = self._whole, None
            return self.empty() if whole is None else whole
        if self._stored is None:
            return self.empty()
        state = self._store.get(self._stored)
        if not isinstance(state, KVCache):
            return state
        capacity = jax.eval_shape(self.empty).k.shape[1]
        return assemble(state, self._tail, self._slots, capacity)

    def load_whole(self) -> LayerState:
        return self.load()

    def save(self, state: LayerState, slots: jax.Array | None, filled: int) -> None:
        """Store the state.

        slots: int32 ``[B]``: the column of each row's new token; at least the capacity for none.
            None after a prefill.
        filled: number of columns that may hold a token.
        """
        if not self.moves:
            self._whole = state
            return
        if not isinstance(state, KVCache):
            self._replace(state)
            return
        if slots is not None and self._stored is not None and self._held < TAIL:
            self._tail, self._slots = _push(
                state, self._tail, self._slots, slots, jnp.int32(self._held)
            )
            self._held += 1
            return
        capacity = state.k.shape[1]
        self._replace(first_columns(state, snapshot_columns(capacity, filled)))
        self._tail, self._slots = empty_tail(state)
        self._held = 0

    def _replace(self, state: LayerState) -> None:
        old, self._stored = self._stored, wait(self._store.put(state, self._shares))
        self._store.free(old)


@functools.partial(jax.jit, static_argnums=3)
def assemble(snapshot: Tree, tail: Tree, slots: jax.Array, capacity: int) -> Tree:
    """Return the cache, or a part of it, ``[B, capacity, ...]``.

    It has the snapshot's columns, with the tail's tokens written over them.
    """
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]

    def assembled(old: jax.Array, new: jax.Array) -> jax.Array:
        room = ((0, 0), (0, capacity - old.shape[1])) + ((0, 0),) * (old.ndim - 2)
        return jnp.pad(old, room).at[rows, slots].set(new, mode="drop")

    return jax.tree.map(assembled, snapshot, tail)


@functools.partial(jax.jit, donate_argnums=(1, 2))
def _push(
    state: KVCache, tail: KVCache, tail_slots: jax.Array, slots: jax.Array, index: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Copy the token at ``slots`` of each row to place ``index`` of the tail."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return (
        jax.tree.map(
            lambda old, all_: old.at[:, index].set(all_.at[rows, slots].get(mode="clip")),
            tail,
            state,
        ),
        tail_slots.at[:, index].set(slots),
    )


@functools.partial(jax.jit, static_argnums=1)
def first_columns(state: KVCache, columns: int) -> KVCache:
    return jax.tree.map(lambda leaf: leaf[:, :columns], state)


@jax.jit
def empty_tail(state: KVCache) -> tuple[KVCache, jax.Array]:
    batch, capacity = state.k.shape[:2]

    def zeros(leaf: jax.Array) -> jax.Array:
        return jnp.zeros((batch, TAIL, *leaf.shape[2:]), leaf.dtype)

    return jax.tree.map(zeros, state), jnp.full((batch, TAIL), capacity, jnp.int32)

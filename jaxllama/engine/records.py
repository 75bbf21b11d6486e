"""Records: a page, or a snapshot of the states, as words; and the programs that make and read them.

    records = save(page_leaves(slots), pages)     uint32 [n, size], a row for each page
    slots = load_pages(slots, pages, records)
    record = save(state_leaves(slots), row)       a snapshot of all layers with a state
    slots = load_state(slots, where, record)      to a slot and to a row of the snapshots

A record has the bytes of all layers one after the other, in the cache's own codes: two codes of
four bits to a byte. Indices past the last page, slot or row are ignored. ``weights_hash`` tells the
records of one model from those of others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxllama.engine.batch import BatchState
from jaxllama.errors import JaxLlamaError
from jaxllama.model.cache import LayerState
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.offload.experts import host_view
from jaxllama.typing import LocalDevice, Tree
from pallas_kernels.rounding import NIBBLES
from pallas_kernels.rows.words import gather, row_bytes, scatter

FORMAT = 1  # of the bytes of a record


def page_leaves(slots: BatchState) -> list[jax.Array]:
    """Return the arrays ``[P, ...]`` of all pages."""
    layers = [layer for layer in slots.cache.layers if isinstance(layer, KVCache)]
    return jax.tree.leaves(layers)


def state_leaves(slots: BatchState) -> list[jax.Array]:
    """Return the arrays ``[S, ...]`` of all snapshots."""
    return jax.tree.leaves(slots.snapshots)


def record_bytes(leaves: Sequence[jax.Array]) -> int:
    """Return the bytes of one row of these arrays."""
    return sum(map(row_bytes, leaves))


@jax.jit
def save(leaves: Sequence[jax.Array], rows: jax.Array) -> jax.Array:
    """Return the records of these rows of the arrays, uint32 ``[n, size]``."""
    return gather(leaves, rows)


@functools.partial(jax.jit, donate_argnums=0)
def load_pages(slots: BatchState, pages: jax.Array, records: jax.Array) -> BatchState:
    layers = slots.cache.layers
    paged = tuple(layer if isinstance(layer, KVCache) else None for layer in layers)
    return slots.with_layers(_joined(_put(paged, pages, records), layers))


@functools.partial(jax.jit, donate_argnums=0)
def load_state(slots: BatchState, where: jax.Array, record: jax.Array) -> BatchState:
    """where: int32 ``[2]``, the slot and the row of the snapshots."""
    layers = slots.cache.layers
    kept = zip(slots.snapshots, layers, strict=True)
    states = tuple(None if known is None else state for known, state in kept)
    slots = slots.with_layers(_joined(_put(states, where[:1], record), layers))
    return dataclasses.replace(slots, snapshots=_put(slots.snapshots, where[1:], record))


def _put(tree: Tree, rows: jax.Array, records: jax.Array) -> Tree:
    """Write records to these rows of the tree's arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(scatter(leaves, rows, records))


def _joined(new: Sequence[LayerState | None], old: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """Return the new layers, and old ones instead of None."""
    pairs = zip(new, old, strict=True)
    return tuple(layer if layer is not None else before for layer, before in pairs)


class Memories:
    """The memories between which records move: a device's and pinned memory of its host."""

    def __init__(self, device: LocalDevice) -> None:
        self.on_device = SingleDeviceSharding(device, memory_kind="device")
        self.on_host = SingleDeviceSharding(device, memory_kind="pinned_host")

    def to_device(self, records: jax.Array) -> jax.Array:
        return jax.block_until_ready(jax.device_put(records, self.on_device))

    def pin(self, data: np.ndarray) -> jax.Array:
        """Return records of these bytes in pinned memory.  Raises as ``to_host`` does."""
        return self.to_host(data.view(np.uint32))

    @staticmethod
    def view(records: jax.Array) -> np.ndarray:
        """Return the bytes of records in pinned memory, without a copy."""
        return host_view(records).reshape(len(records), -1)

    def to_host(self, data: jax.Array | np.ndarray) -> jax.Array:
        """Return records in pinned memory.  Raises JaxLlamaError if there is no room in it."""
        try:
            return jax.block_until_ready(jax.device_put(data, self.on_host))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise JaxLlamaError(
                "no room in pinned host memory: make host_cache_gb smaller, or set "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB above it, 64 unless set"
            ) from None


def weights_hash(weights: Sequence[Tree], facts: Sequence[object]) -> bytes:
    """Return a hash of arrays' values, and of facts whose repr tells them from others.

    Each array is summed on its device with factors by place, so the time is that of reading it.
    """
    leaves, structure = jax.tree.flatten(weights)
    sums = jax.device_get([_checksum(leaf) for leaf in leaves])
    kinds = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    text = repr((FORMAT, facts, str(structure), kinds, [pair.tolist() for pair in sums]))
    return hashlib.blake2b(text.encode(), digest_size=20).digest()


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Return two sums uint32 ``[2]`` over the bits of an array."""
    if leaf.dtype != jnp.bool_:
        width = 4 if leaf.dtype.name in NIBBLES else 8 * leaf.dtype.itemsize
        leaf = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}"))
    bits = leaf.astype(jnp.uint32).reshape(-1)
    place = lax.iota(jnp.uint32, len(bits))
    sums = []
    for odd in (0x9E3779B1, 0x85EBCA77):
        mixed = (bits ^ (place * jnp.uint32(odd))) * jnp.uint32(odd ^ 0x27D4EB2E | 1)
        mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(odd)
        sums.append(jnp.sum(mixed ^ (mixed >> jnp.uint32(13)), dtype=jnp.uint32))
    return jnp.stack(sums)

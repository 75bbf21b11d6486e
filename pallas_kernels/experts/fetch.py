"""Experts from pinned host memory, chosen on the device: no host waits for the choice.

    addresses_of(pieces) -> int32 [E, 2]                   of pinned arrays, 0 where there is none
    fetch(addresses, experts[G], leaves) -> arrays [G, bytes / 4] int32 or [G, bytes] uint8
    fetched_weight(addresses, experts[G], like, offsets) -> weight [G, out, in]

A GPU reads pinned host memory by the host's own addresses (CUDA's unified addressing). So a kernel
copies the experts that a router has just chosen, in the program that computes with them, at the
link's rate. A transfer begun by the host waits until the host has read the choice. The caller keeps
the pinned arrays while programs that read them run.

An expert's parts (codes, scales, zeros) lie behind each other in its bytes. A weight in the layout
of the CPU's handlers (``cpu.weight``) becomes rows on the way. XLA takes 0.19 ms on an H200 to lay
out 13 MB of it, beside 0.29 ms for the link.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.cpu.weight import TILE, CpuWeight, restore
from pallas_kernels.qtensor import QTensor, packed_bytes
from pallas_kernels.rounding import NIBBLES


class FetchedLeaf(NamedTuple):
    """One part of an expert: ``nbytes`` at ``offset``, both multiples of 16.

    item: 0 if it is copied as it is. Otherwise it lies by tile, unit and row, ``[tiles, units,
    16]`` of 1 or 4 bytes, and becomes rows ``[tiles, 16, units]``.
    is_nibbles: an item is 8 codes, the first four in the low halves of its bytes.
    flip: bits of such an item that change.
    """

    offset: int
    nbytes: int
    item: int = 0
    units: int = 0
    is_nibbles: bool = False
    flip: int = 0

    def like(self, count: int) -> jax.ShapeDtypeStruct:
        if self.item == 1:
            return jax.ShapeDtypeStruct((count, self.nbytes), jnp.uint8)
        return jax.ShapeDtypeStruct((count, self.nbytes // 4), jnp.int32)


def addresses_of(pieces: Mapping[int, jax.Array], n_experts: int) -> np.ndarray:
    """Return the addresses of pinned arrays as words, low before high: int32 ``[E, 2]``."""
    found = np.zeros(n_experts, np.uint64)
    for expert, piece in pieces.items():
        found[expert] = piece.unsafe_buffer_pointer()
    return found.view(np.int32).reshape(n_experts, 2)


def fetch(
    addresses: jax.Array, experts: jax.Array, leaves: Sequence[FetchedLeaf]
) -> list[jax.Array]:
    """Return the parts of ``experts [G]``, each as ``FetchedLeaf.like`` says.

    addresses: int32 ``[E, 2]``, as ``addresses_of`` returns them.
    An index below 0 or behind the last expert reads nothing; its floats are zeros.
    Where the kernel does not run, the host reads its memory in a callback.
    """
    out = [leaf.like(experts.shape[0]) for leaf in leaves]
    if dispatch.hopper_reason() is None:
        from pallas_kernels.experts import fetch_kernel

        return fetch_kernel.fetch(addresses, experts, leaves, out)
    found = []
    for leaf, like in zip(leaves, out, strict=True):
        raw = jax.ShapeDtypeStruct((experts.shape[0], leaf.nbytes), jnp.uint8)
        data = jax.pure_callback(_copied, raw, addresses, experts, leaf.offset, leaf.nbytes)
        found.append(_in_rows(data, leaf).reshape(like.shape))
    return found


def _copied(
    addresses: np.ndarray, experts: np.ndarray, offset: np.ndarray, nbytes: np.ndarray
) -> np.ndarray:
    found = np.zeros((len(experts), int(nbytes)), np.uint8)
    own = np.ascontiguousarray(addresses).view(np.uint64).reshape(-1)
    for row, expert in zip(found, np.asarray(experts), strict=True):
        if 0 <= expert < len(own):
            ctypes.memmove(row.ctypes.data, int(own[expert]) + int(offset), row.nbytes)
    return found


def _in_rows(data: jax.Array, leaf: FetchedLeaf) -> jax.Array:
    """The kernel's result in jax.numpy, of ``data [G, nbytes]``."""
    if leaf.item == 1:
        return data.reshape(len(data), -1, leaf.units, TILE).swapaxes(2, 3)
    words = lax.bitcast_convert_type(data.reshape(len(data), -1, 4), jnp.uint32)
    if leaf.item == 4:
        words = words.reshape(len(data), -1, leaf.units, TILE).swapaxes(2, 3)
    if leaf.is_nibbles:
        places = [4 * (2 * (i % 4) + i // 4) for i in range(8)]  # of column i, in bits
        parts = [(words >> at & 15) << 4 * i for i, at in enumerate(places)]
        words = sum(parts[1:], parts[0]) ^ jnp.uint32(leaf.flip)
    return lax.bitcast_convert_type(words, jnp.int32)


def fetched_leaves(
    like: Any, offsets: Sequence[int], restores: bool = True
) -> tuple[FetchedLeaf, ...]:
    """Return how the parts of an expert are fetched.

    like: the weight ``[1, out, in]``, arrays or shapes.  offsets: of its leaves in its bytes.
    restores: whether the CPU's layout becomes a QTensor.
    """
    parts = jax.tree.leaves(like)
    sizes = [packed_bytes(math.prod(part.shape), part.dtype) for part in parts]
    leaves = [FetchedLeaf(at, -(-n // 16) * 16) for at, n in zip(offsets, sizes, strict=True)]
    if not (restores and isinstance(like, CpuWeight) and _turns(like)):
        return tuple(leaves)
    form, units = like.form, like.q.shape[-1] // (4 * TILE)
    flip = 0x88888888 if form.bits == 4 and not form.is_float4 else 0
    turned = {"item": 4, "units": units, "is_nibbles": form.bits == 4, "flip": flip}
    leaves[0] = leaves[0]._replace(**turned)
    if jnp.dtype(like.scale.dtype).itemsize == 1:
        leaves[1] = leaves[1]._replace(item=1, units=like.groups)
    return tuple(leaves)


def _turns(w: CpuWeight) -> bool:
    """Whether the kernel lays out the codes in rows: they have no padding, in which no row ends."""
    whole = w.form.n % TILE == 0 and w.padded_k == w.form.k
    return whole and w.zero is None and w.unit is None


def fetched_weight(
    addresses: jax.Array,
    experts: jax.Array,
    like: Any,
    offsets: Sequence[int],
    restores: bool = True,
) -> Any:
    """Return the weight of ``experts [G]``, ``[G, out, in]``.

    like, offsets, restores: as for ``fetched_leaves``.
    """
    parts, structure = jax.tree.flatten(like)
    leaves = fetched_leaves(like, offsets, restores)
    found = [
        _typed(data, part) if not leaf.item else data
        for data, part, leaf in zip(fetch(addresses, experts, leaves), parts, leaves, strict=True)
    ]
    weight = structure.unflatten(found)
    if not (restores and isinstance(like, CpuWeight)):
        return weight
    if not leaves[0].item:
        return restore(weight)
    form, count = like.form, experts.shape[0]
    q = lax.bitcast_convert_type(weight.q, jnp.dtype(form.dtype)).reshape(count, form.n, form.k)
    if leaves[1].item:
        scale = lax.bitcast_convert_type(weight.scale, jnp.dtype(form.scale))
    else:
        scale = weight.scale.swapaxes(-1, -2).astype(form.scale)
    scale = scale.reshape(count, form.n, like.groups)
    return QTensor(q, scale, None, form.activations, weight.columns, weight.input_scale)


def _typed(data: jax.Array, part: Any) -> jax.Array:
    """Words ``[G, words]`` as an array like ``part [1, ...]``, without what fills its end."""
    dtype, count = jnp.dtype(part.dtype), math.prod(part.shape)
    per_word = 8 if dtype.name in NIBBLES else 4 // dtype.itemsize
    if per_word == 0:
        data = data.reshape(len(data), -1, dtype.itemsize // 4)
        own = lax.bitcast_convert_type(data, dtype)
    else:
        own = lax.bitcast_convert_type(data, dtype).reshape(len(data), -1)
    return own[:, :count].reshape(len(data), *part.shape[1:])

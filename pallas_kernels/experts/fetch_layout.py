"""The parts of an expert in the bytes that ``fetch`` copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.weight import TILE, CpuWeight
from pallas_kernels.qtensor import packed_bytes


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
    if jnp.dtype(like.scale.dtype).itemsize == 1 and like.zero is None and like.unit is None:
        leaves[1] = leaves[1]._replace(item=1, units=like.groups)
    return tuple(leaves)


def _turns(w: CpuWeight) -> bool:
    """Whether the kernel lays out the codes in rows: they have no padding, in which no row ends."""
    return w.form.n % TILE == 0 and w.padded_k == w.form.k

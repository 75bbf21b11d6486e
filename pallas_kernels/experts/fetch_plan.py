"""Parts of experts that ``fetch`` reads."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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

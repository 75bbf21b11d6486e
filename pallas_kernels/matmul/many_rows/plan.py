"""How a weight-only product is divided among blocks and warpgroups; arithmetic only.

``matmul.many_rows.weight`` tells what the parts do.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.matmul.many_rows.pipeline import N_SM

BLOCK_K = 64  # columns in a slot: one swizzle of 16-bit activations
_SHARED_BYTES = 224 * 1024  # of a block, without its barriers


@dataclasses.dataclass(frozen=True)
class WeightTile:
    """One block's tile and pipeline.

    tokens: rows of x, the N of its wgmma.
    rows: of w, 64 per compute warpgroup.
    cluster: 2 blocks side by side in w's rows share (multicast) the activations.
    width: of the planar snake, in tiles of w's rows.
    unroll: slots that are dequantized before their wgmmas are issued.
    store: tokens per store of the epilogue.
    parts: sets of warpgroups that take turns at the slots; their sums meet in shared memory.
    split: 2 gives each block of a cluster half of K.  Each sends the sums of half of its rows to
        the other's shared memory and finishes the other half.
    """

    tokens: int = 256
    rows: int = 128
    stages: int = 4
    cluster: int = 2
    width: int = 8
    unroll: int = 2
    store: int = 64
    parts: int = 1
    split: int = 1

    def unrolled(self, k: int) -> int:
        """Slots that are dequantized together: all of a block's, in steps of as many."""
        return self.unroll if k // BLOCK_K // self.split % self.unroll == 0 else 1

    def divides(self, k: int) -> bool:
        """Whether a block has whole slots, and always the same set of warpgroups comes to a slot of
        the ring: who skips a barrier's phase loses count."""
        turn = self.parts * self.unrolled(k)
        steps, rest = divmod(k // BLOCK_K, self.split)
        return rest == 0 and (self.parts == 1 or steps % turn == self.stages % turn == 0)

    def fitted(self, m: int, n: int, bits: int, row_bytes: int) -> WeightTile:
        """With as many stages as fit.  row_bytes: of the groups' vectors of a row, if stored."""
        across, sum_bytes = self.rows // 64, 256 * self.tokens
        used = across * (self.parts - 1) * sum_bytes
        used += -(-across // 2) * (self.split - 1) * sum_bytes
        used += across * 256 * min(self.store, self.tokens)
        used += self.vector_slots(m, n) * self.rows * (row_bytes // self.split + 8)
        # Scales and zeros of up to two groups of a slot where they are not stored.
        slot = BLOCK_K * (2 * self.tokens + self.rows * bits // 8) + 8 * self.rows * (not row_bytes)
        stages = min(self.stages, (_SHARED_BYTES - used) // slot)
        turn = self.parts * self.unroll if self.parts > 1 else 1
        return dataclasses.replace(self, stages=stages // turn * turn)

    def vector_slots(self, m: int, n: int) -> int:
        """Two tiles' vectors are in shared memory, unless no block has two tiles."""
        blocks = self.cluster * self.split
        tiles = -(-m // self.tokens) * -(-n // (self.rows * self.cluster))
        return min(2, -(-tiles // (N_SM // blocks)))


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which vectors there are, and how many columns a group has."""

    group: int
    stored: bool  # the groups' vectors come as they are stored, [N, K / group], once a tile
    scale: bool  # per group, in the loop
    zero: str | None  # per group, in the loop: "int" before the scale, "float" after it
    row: bool  # per row, in the epilogue
    bias: bool

    @property
    def groups_per_slot(self) -> int:
        return max(1, BLOCK_K // self.group)

    @property
    def slots_per_group(self) -> int:
        return max(1, self.group // BLOCK_K)

"""How the decode matmul divides ``x[M, K] w[N, K]^T`` among blocks and warps of an H200.

Arithmetic only; ``quantized_matmul_decode_mosaic`` tells what the parts do.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.qtensor import QTensor

WARPS = 16
# How many clusters of a size an H200 runs at a time: 4 does not divide the SMs of all of its
# processing clusters.  One cluster more waits for the first to end.  (8: from the sizes that give
# 30 clusters of 4, not measured.)
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 14}
SHARED = 226 * 1024
SLOT = WARPS * 1024  # bytes of a ring slot: one block of columns of a tile, 2 x 16 bytes per lane
# Floats from one token to the next in a partial sum of 16 rows: stores hit every bank once.
PITCH = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of one product among blocks and warps."""

    m: int
    split: int
    warps: int  # of a block that have columns of their own
    k_warp: int  # columns of a warp
    resident: bool  # x stays in shared memory instead of registers
    clusters: int
    per: int  # tiles of the busiest cluster
    batch: int  # tiles between two sums over warps
    depth: int  # ring slots
    param_bytes: int  # scales and zeros of one tile

    @property
    def n_tiles(self) -> int:
        """Groups of 8 tokens."""
        return -(-self.m // 8)

    @property
    def buffers(self) -> int:
        return min(2, -(-self.per // self.batch))

    @property
    def partial_bytes(self) -> int:
        """Partial sums of the batches in flight."""
        return self.buffers * self.batch * WARPS * self.n_tiles * 8 * PITCH * 4

    @property
    def x_bytes(self) -> int:
        return 2 * self.m * self.warps * self.k_warp

    @property
    def arena_bytes(self) -> int:
        """Partial sums and x, which lie in the same place unless x has to stay."""
        if self.resident:
            return self.partial_bytes + self.x_bytes
        return max(self.partial_bytes, self.x_bytes)

    @property
    def shared_bytes(self) -> int:
        params = self.buffers * self.batch * self.param_bytes
        return self.depth * SLOT + self.arena_bytes + params


def slices(k: int, bits: int, n_tiles: int) -> list[tuple[int, int, int, bool]]:
    """Ways to give K to warps, best first: (split, warps, columns of a warp, x resident).

    With x in registers it takes n_tiles * columns / 8 of a thread, of which 64 fit, and the runs
    divide K.  With x in shared memory one block has all of K; the last run then begins where it
    still ends with K, and reads zeros for the part of x that the one before it has.
    """
    block = 128 if bits == 4 else 64
    cuts = []
    for split in CLUSTERS:
        for k_warp in (256, 128, 64, 512):
            if k_warp % block or k % (k_warp * split) or n_tiles * k_warp > 512:
                continue
            warps = k // k_warp // split
            if 8 <= warps <= WARPS:
                cuts.append((split, warps, k_warp, False))
                break
    # A sum over a cluster takes longer than 512 columns a warp, which crowd the registers.
    cuts.sort(key=lambda cut: (cut[0] > 1, cut[0] == 8, cut[2] == 512, cut[0]))
    if not cuts and k % block == 0 and k >= 8 * block:
        k_warp = -(-k // block // WARPS) * block
        cuts.append((1, -(-k // k_warp), k_warp, True))
    return cuts


def make_plan(m: int, w: QTensor, *, depth: int | None = None) -> Plan | None:
    """The plan for m tokens and w, or None if nothing fits shared memory."""
    n, k = w.shape
    bits = 4 if w.dtype == jnp.int4 else 8
    depth = depth or (3 if m <= 8 else 2)
    tiles = n // 16
    zero_bytes = 0 if w.zero is None else w.zero.dtype.itemsize
    param_bytes = 16 * w.scale.shape[1] * (w.scale.dtype.itemsize + zero_bytes)
    for cut in slices(k, bits, -(-m // 8)):
        clusters = min(tiles, CLUSTERS[cut[0]])
        per = -(-tiles // clusters)
        for slots in (depth, 2):
            for batch in (-(-per // i) for i in range(1, per + 1)):
                plan = Plan(m, *cut, clusters, per, batch, slots, param_bytes)
                if plan.shared_bytes <= SHARED:
                    return plan
    return None

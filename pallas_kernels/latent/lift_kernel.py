"""The merge of a step's chunks and the product that makes values of latents, in one launch.

    out[b, n] = up_v[n] low,    low = sum_c 2^(top_c - top) part_c / sum_c 2^(top_c - top) sum_c

``attention.merge`` has the sum over chunks.  A head of a row has ``PARTS`` blocks.  Each computes
low, and its part of the values: every warp has neighbouring rows of up_v, and a lane 16 columns.

Copies: lanes load parts and up_v into registers.
Waits: for the kernel before, and once at the block's barrier, for the warps' sums.
Writes: lane 0 of a warp stores its rows' results.

Floor: up_v's bytes.  Every block of a head reads the head's chunks, from the L2.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import ptx as p
from pallas_kernels.attention.merge import ChunkMerge
from pallas_kernels.latent.plan import LATENT
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.operands import lane_sums
from pallas_kernels.rows.fused_parts import floats, packed

WARPS, PARTS = 8, 8


@functools.partial(jax.jit, static_argnames=("capacity", "chunk", "still"))
def lifted_chunks(
    parts: jax.Array,
    stats: jax.Array,
    lengths: jax.Array,
    up: jax.Array,
    *,
    capacity: int,
    chunk: int,
    still: int,
) -> jax.Array:
    """``[B, N, d_v]`` of chunks ``[B, chunks, rows, 512]``; up ``[N, still + d_v, 512]``."""
    batch, _, rows, _ = parts.shape
    n, width, _ = up.shape
    d_v = width - still
    shape = {"shape": (capacity, rows, LATENT), "chunk": chunk, "heads": rows}
    body = functools.partial(_LiftedMerge, up=(n, still, d_v), **shape)
    (out,) = launch(
        body,
        {"parts": parts, "stats": stats, "lengths": lengths, "sinks": None, "up": up},
        {"out": jax.ShapeDtypeStruct((batch, n, d_v), up.dtype)},
        name="latent_merge_and_lift",
        grid=batch * n * PARTS,
        warpgroups=WARPS // 4,
        scratch={"sums": WARPS * 32 * (2 + LATENT // 32)},
        registers=True,
    )
    return out


class _LiftedMerge(ChunkMerge):
    """A part of one head's values.  up: (heads, rows of up_k, rows of up_v) of a head."""

    def __init__(self, gmem, smem, *, up, **facts):
        super().__init__(gmem, smem, window=None, warps=WARPS, kind="bf16", rotated=False, **facts)
        heads, still, d_v = up
        head, part = self.block // PARTS, self.block % PARTS
        row, own = head // heads, head % heads
        self.block = row * self.n + own
        each = d_v // PARTS // WARPS  # rows of a warp
        first = part * (WARPS * each) + self.warp * each
        start = own * (still + d_v) + (still + first)
        self.rows = [p.offset(p.address(gmem.up), start + i, 2 * LATENT) for i in range(each)]
        self.to = p.offset(p.address(gmem.out), head * d_v + first, 2)

    def run(self) -> None:
        for i, row in enumerate(self.rows):
            p.when(p.equal(self.lane, i), functools.partial(p.prefetch, row, 2 * LATENT))
        super().run()

    def finish(self, size: int) -> None:
        """By all warps: their rows times the latents, rounded as they would be stored."""
        low = floats(packed(self.merged(size), self.kind))
        words = []
        for row in self.rows:
            at = p.offset(row, self.lane, 2 * self.columns)
            words.append(p.load_global(at, 8))
        sums = []
        for eight in words:
            total = p.cf(0.0)
            for w, x in zip(floats(eight), low, strict=True):
                total = p.fma(w, x, total)
            sums.append(total)
        for i, total in enumerate(lane_sums(sums)):
            store = functools.partial(
                p.store_global_half, p.offset(self.to, p.ci(2 * i)), p.narrow(total, self.kind)
            )
            p.when(self.lane < 1, store)

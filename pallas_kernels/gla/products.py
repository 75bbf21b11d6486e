"""dA = scale * do v^T of every chunk on Hopper, in the form that the gradient kernel's mma takes.

For a chunk of 64 tokens there are three results:

- G = dA + dA^T, with dA taken below the diagonal (bf16)
- in a second tile, side by side, the pairs of G inside the 16x16 diagonal blocks that belong to the
  tree's levels 1, 2, 4 and 8
- dA's diagonal in float32

``gla.gradients`` runs the two register steps itself at Dv = 128.  For wider values one chunk's
products serve several slices of key channels, and ``chunk_products`` is a kernel of its own.

    load    : | do v of stage n+2 (64 value channels) ...        three workers, three slots each
    stage   : | dA, dA^T of stage n | ... | item, after the last stage: G -> smem, TMA out

Copies: each worker copies do and v of its own stages by TMA, two stages ahead (``load``).
Waits: a worker waits for a stage's two copies on ``ready[slot]``.  The warpgroup's barrier in
``stage`` says that its warps are done with the slot that is refilled.  Before a worker writes an
item's results to shared memory, it waits until the last ones have left.  Workers share nothing.
Writes: TMA takes G, its masked blocks and dA's diagonal from shared memory after the last stage.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import REF, inline, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    TILE,
    ChannelLane,
    b_tiles,
    blocks_for,
    bundle,
    bundle_layout,
    bundle_type,
    digits,
    unbundle,
    worker_items,
    zeros,
)

PRODUCT_WARPGROUPS, PRODUCT_SLOTS = 3, 3

# Accumulators of a warp's rows 16w..: [column block 0..3][column half][4] of G's row, where blocks
# left of the diagonal come from do v^T and right of it from v do^T, then the diagonal block of the
# latter: 5 x 2 x 4 registers.


def products_call():
    """Adds 64 value channels: (do and v tiles, acc) -> acc."""

    @inline(plgpu.RefType(ROWS), bundle_layout(40), out=bundle_type(40))
    def call(tiles_ref, acc):
        lane = ChannelLane()
        base = p.shared_address(tiles_ref)
        flat = unbundle(acc, 40)[0]
        regs = [flat[4 * i : 4 * i + 4] for i in range(10)]
        mine = lane.warp << 11
        for at in lane.row_matrices(base):
            own = at + mine
            d_own, v_own = p.load_matrices(own), p.load_matrices(own, at=TILE)
            for block in range(4):
                above = p.ci(block) > lane.warp
                shift = p.where(above, 0, p.ci(TILE))
                b = p.load_matrices(at + shift, at=2048 * block)
                a = [p.where(above, y, x) for x, y in zip(d_own, v_own, strict=True)]
                for half, fragment in enumerate(b_tiles(b)):
                    regs[2 * block + half] = p.mma(regs[2 * block + half], a, fragment)
            for half, fragment in enumerate(b_tiles(d_own)):
                regs[8 + half] = p.mma(regs[8 + half], v_own, fragment)
        return bundle([x for four in regs for x in four])

    return call


def symmetric_call(scale: float):
    """Writes G, its level-masked diagonal blocks, and the diagonal of dA."""

    @inline(plgpu.RefType(ROWS), REF, bundle_layout(40))
    def call(pair_ref, diagonal_ref, acc):
        lane = ChannelLane()
        flat = unbundle(acc, 40)[0]
        regs = [[x * scale for x in flat[4 * i : 4 * i + 4]] for i in range(10)]
        base, diagonal = p.shared_address(pair_ref), p.shared_address(diagonal_ref)

        def put(tile, row, chunk, values):
            chunk = chunk ^ (row & 7)
            p.store_shared(lane.pair(base, row, chunk), [p.pack(*values)], TILE * tile)

        for block in range(4):
            for half in range(2):
                for h in range(2):
                    row = (lane.warp << 4) + lane.g + 8 * h
                    put(0, row, p.ci(2 * block + half), regs[2 * block + half][2 * h : 2 * h + 2])
        # The diagonal block of the warp: lower part do v^T, upper part v do^T.
        lower = []
        for half in range(2):
            picked = [p.cf(0.0)] * 4
            for block in range(4):
                here = p.equal(lane.warp, block)
                picked = [
                    p.where(here, x, y) for x, y in zip(regs[2 * block + half], picked, strict=True)
                ]
            lower.append(picked)
        for half in range(2):
            for h in range(2):
                i = lane.g + 8 * h
                row = (lane.warp << 4) + i
                masked = {level: [] for level in (1, 2, 4, 8)}
                for e in range(2):
                    j = (lane.c << 1) + (8 * half + e)
                    below = i > j
                    value = p.where(below, lower[half][2 * h + e], regs[8 + half][2 * h + e])
                    differ = i ^ j
                    for level, out in masked.items():
                        top = differ >> (level.bit_length() - 1)
                        here = p.equal(top, 1)
                        out.append(p.where(here, value, 0.0))
                    if half == h:
                        same = p.equal(i, j)
                        with mgpu.when(same):
                            p.store_shared(diagonal + (row << 2), [lower[half][2 * h + e]])
                for n, values in enumerate(masked.values()):
                    put(1, row, p.ci(2 * n + half), values)

    return call


class _Worker:
    """The program of a warpgroup: its chunks, a stage of 64 value channels at a time."""

    def __init__(self, gmem, smem, barrier, *, sizes: tuple[int, int, int], n_work, scale):
        self.n_heads, self.n_chunks, self.n_stages = sizes
        self.gmem, self.scale = gmem, scale
        own, self.n_items, self.item_of = worker_items(n_work, PRODUCT_WARPGROUPS)
        self.tiles, self.symmetric, self.diagonal, self.ready = (
            x.at[own] for x in (smem.tiles, smem.pairs, smem.diagonals, barrier.ready)
        )

    def run(self) -> None:
        for n in range(2):
            pl.when(n < self.n_items * self.n_stages)(functools.partial(self.load, n))
        lax.fori_loop(0, self.n_items, self.item, None)
        plgpu.wait_smem_to_gmem(0)

    def place(self, i):
        """(chunk, head, row) of item i."""
        return digits(self.item_of(i), self.n_chunks, self.n_heads)

    def load(self, n) -> None:
        """Copy do and v of stage n, counted over all items."""
        c, head, b = self.place(n // self.n_stages)
        rows, at = pl.ds(c * CHUNK, CHUNK), pl.ds(n % self.n_stages * 64, 64)
        slot = n % PRODUCT_SLOTS
        for index, x in enumerate((self.gmem.d_out, self.gmem.v)):
            plgpu.copy_gmem_to_smem(
                x.at[b, rows, head, at], self.tiles.at[slot, index], self.ready.at[slot]
            )

    def item(self, i, _) -> None:
        """dA, dA^T of every stage, then G and its results out."""
        acc = lax.fori_loop(0, self.n_stages, functools.partial(self.stage, i), zeros(40))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        symmetric_call(self.scale)(self.symmetric, self.diagonal, acc)
        plgpu.commit_smem()
        c, head, b = self.place(i)
        for tile in range(2):
            plgpu.copy_smem_to_gmem(self.symmetric.at[tile], self.gmem.pairs.at[b, head, c, tile])
        plgpu.copy_smem_to_gmem(self.diagonal, self.gmem.diagonals.at[b, head, c])

    def stage(self, i, s, acc):
        n = i * self.n_stages + s
        plgpu.barrier_wait(self.ready.at[n % PRODUCT_SLOTS])
        plgpu.commit_smem()  # every warp is done with stage n - 1, whose slot is refilled
        more = n + 2 < self.n_items * self.n_stages
        pl.when(more)(functools.partial(self.load, n + 2))
        return products_call()(self.tiles.at[n % PRODUCT_SLOTS], acc)


def chunk_products(d_out, v, scale: float):
    """G and its level-masked diagonal blocks, bf16 [B, H, NC, 2, 64, 64]; dA's diagonal, f32."""
    b, t, h, dv = v.shape
    nc = -(-t // CHUNK)
    n_work = nc * h * b
    wgs = PRODUCT_WARPGROUPS
    sizes = h, nc, dv // 64

    return launch(
        functools.partial(_Worker, sizes=sizes, n_work=n_work, scale=scale),
        {"d_out": d_out, "v": v},
        {
            "pairs": jax.ShapeDtypeStruct((b, h, nc, 2, CHUNK, CHUNK), jnp.bfloat16),
            "diagonals": jax.ShapeDtypeStruct((b, h, nc, CHUNK), jnp.float32),
        },
        name="gla_chunk_products",
        grid=blocks_for(n_work, wgs),
        warpgroups=wgs,
        scratch={
            "tiles": plgpu.SMEM((wgs, PRODUCT_SLOTS, 2, CHUNK, 64), jnp.bfloat16, transforms=ROWS),
            "pairs": plgpu.SMEM((wgs, 2, CHUNK, CHUNK), jnp.bfloat16, transforms=ROWS),
            "diagonals": plgpu.SMEM((wgs, CHUNK), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=(wgs, PRODUCT_SLOTS)),
        },
    )

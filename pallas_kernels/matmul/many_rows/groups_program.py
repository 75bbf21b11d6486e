"""The sums of FP8 groups: each step of 128 columns of K has scales of x and of w.

A step's product leaves the tensor cores, is multiplied by both scales in float32 and added.

Copies, all by ``pair_program._Feeder``: x and w ``copy_slot``; scales ``copy_scales``; blocked
scales of w ``copy_vectors``.
Waits: a multiplier waits on ``full`` for each step, which in ``add_by_step`` brings its scales too.
It waits on ``scales_full`` for eight steps' scales as they are stored, and on ``vectors_full`` for
a tile's blocked scales of w.  Arrivals: at ``empty`` one thread of each multiplier of the cluster;
at ``scales_empty`` all threads of the block's multipliers; at ``vectors_empty`` those that
``finish`` the tile.
Writes: none; sums stay in registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.pipeline import ring_next, ring_slot
from pallas_kernels.qtensor import BLOCK_ROWS

_LAYOUT = plgpu.Layout.WGMMA
HELD = 8  # scales of a row, as they are stored, that one copy brings


class GroupSums:
    """The part of ``pair_program``'s multiplying warpgroup that adds groups' sums."""

    block: Any
    tile: Any
    gmem: Any
    smem: Any
    barrier: Any
    row0: Any
    col0: Any
    operands: Any

    def product_by_group(self, t, ref):
        """The sum over K of each step's product times the scales of its rows of x and of w."""
        block, tile = self.block, self.tile
        first = ring_slot(t * block.loads, tile.stages)
        if block.by_block:
            return self.product_by_block(t, ref, first)
        step = functools.partial(self.add_stored if block.few else self.add_by_step, t, ref)
        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.cols), jnp.float32), _LAYOUT)
        return lax.fori_loop(0, block.steps, step, (first, zero))[1]

    def product_by_block(self, t, ref, first):
        """The same where 128 rows of w share their scales: a tuple of columns' sums.

        A thread multiplies a step's products by its two rows' scales times one or two of w.  Two
        steps' are loaded in the two before: among a step's wgmmas they would delay all but the
        first.
        """
        block, tile, barrier = self.block, self.tile, self.barrier
        plgpu.barrier_wait(barrier.vectors_full.at[t % 2])
        unit = math.gcd(tile.n, BLOCK_ROWS)
        zero = plgpu.layout_cast(jnp.zeros((tile.rows, unit), jnp.float32), _LAYOUT)

        def batch(b, carry):
            place = (t * block.batches + b) % 2
            plgpu.barrier_wait(barrier.scales_full.at[place])
            whole = block.steps % HELD == 0  # then the loop's length is known
            count = HELD if whole else jnp.minimum(HELD, block.steps - b * HELD)
            factors_at = functools.partial(self.block_factors, t, place, b * HELD)

            def added(at, factors, totals):
                sums = self.step_product(ref, at)
                plgpu.barrier_arrive(barrier.empty.at[at])
                return ring_next(at, 1, tile.stages), self.added(t, sums, factors, totals)

            def two_steps(i, carry):
                at, factors, totals = carry
                next_two = jnp.minimum(2 * i + 2, HELD - 2)
                later = tuple(factors_at(next_two + k) for k in range(2))
                for k in range(2):
                    at, totals = added(at, factors[k], totals)
                return at, later, totals

            carry = carry[0], tuple(factors_at(k) for k in range(2)), carry[1]
            at, factors, totals = lax.fori_loop(0, count // 2, two_steps, carry)
            if not whole:
                last = lambda _, carry: added(carry[0], factors[0], carry[1])  # noqa: E731
                at, totals = lax.fori_loop(0, count % 2, last, (at, totals))
            # All threads arrive, so this may not be needed: no GPU has run without it.
            pipeline.warpgroup_barrier()
            plgpu.barrier_arrive(barrier.scales_empty.at[place])
            return at, totals

        return lax.fori_loop(0, block.batches, batch, (first, (zero,) * (tile.cols // unit)))[1]

    def block_factors(self, t, place, begin, i):
        """Factors of the rows' sums of step ``begin`` + i, for each block of w's rows; the step's
        scales of x are the i-th of ``place``."""
        rows = self.smem.scale_x.at[place, pl.ds(self.row0, self.tile.rows), i]
        of_x, of_w = pipeline.load_strided(rows, jnp.float32, 0), self.smem.scale_w.at[t % 2]
        return tuple(of_x * of_w[b, begin + i].astype(jnp.float32) for b in range(of_w.shape[0]))

    def added(self, t, sums, factors, totals):
        """``totals``, tuples of columns, plus a step's sums times their factors."""
        unit = totals[0].shape[1]
        in_block = lax.rem(self.block.origin(t)[1], jnp.int32(BLOCK_ROWS))
        spread = [lax.broadcast_in_dim(x, (self.tile.rows, unit), [0]) for x in factors]
        out = []
        for c, total in zip(range(0, self.tile.cols, unit), totals, strict=True):
            factor = spread[0]
            for b, later in enumerate(spread[1:], 1):
                factor = jnp.where(in_block + c >= b * BLOCK_ROWS, later, factor)
            out.append(total + sums[:, c : c + unit] * factor)
        return tuple(out)

    def step_product(self, ref, at):
        """The product of the ring's slot."""
        smem = self.smem
        plgpu.barrier_wait(self.barrier.full.at[at])

        def multiplied(acc):
            plgpu.wgmma(acc, *self.operands(smem.x.tiles, smem.w.tiles, at))
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        return pl.run_scoped(multiplied, ref)

    def add_by_step(self, t, ref, j, carry):
        """Add a step's product, with scales from the ring's slot; return the next slot too."""
        at, total = carry

        def scales(vector, first, axis):
            part = vector.at[at, pl.ds(first, ref.shape[axis])]
            loaded = plgpu.load(part, layout=_LAYOUT.reduce(1 - axis))
            return lax.broadcast_in_dim(loaded, ref.shape, [axis])

        sums = self.step_product(ref, at)
        of_x = scales(self.smem.scale_x, self.row0, 0)
        of_w = scales(self.smem.scale_w, self.col0, 1)
        total += sums * (of_x * of_w)
        # One thread says that the slot is free, and other warps may still read its scales.
        pipeline.warpgroup_barrier()
        plgpu.barrier_arrive(self.barrier.empty.at[at])
        return ring_next(at, 1, self.tile.stages), total

    def add_stored(self, t, ref, j, carry):
        """Add a step's product, with scales as they are stored; return the ring's next slot too."""
        block, barrier = self.block, self.barrier
        at, total = carry
        place, held = (t * block.batches + j // HELD) % 2, j % HELD
        pl.when(held == 0)(lambda: plgpu.barrier_wait(barrier.scales_full.at[place]))

        def scales(vector, first, axis):
            part = vector.at[place, pl.ds(first, ref.shape[axis]), held]
            loaded = pipeline.load_strided(part, jnp.float32, axis)
            return lax.broadcast_in_dim(loaded, ref.shape, [axis])

        of_x = scales(self.smem.scale_x, self.row0, 0)
        of_w = scales(self.smem.scale_w, self.col0, 1)
        is_last = (held == HELD - 1) | (j == block.steps - 1)
        pl.when(is_last)(lambda: plgpu.barrier_arrive(barrier.scales_empty.at[place]))
        total += self.step_product(ref, at) * (of_x * of_w)
        plgpu.barrier_arrive(barrier.empty.at[at])
        return ring_next(at, 1, self.tile.stages), total

"""The copies of a block of the weight-only product: see ``weight`` for its contract and timeline.

``Feeder`` makes them in a warpgroup of its own.  ``CopiesAhead`` has the first of two warpgroups
that multiply make them, step by step.

Copies: one warp, by TMA.  Waits: that warp on ``empty`` and ``vectors_empty`` before it reuses
memory, and in ``drain`` until the last slots are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.pipeline import drain, ring_next, ring_slot


class Feeder:
    """The copies: x, w and the parameters of a slot go into the ring, vectors once a tile."""

    def __init__(self, block):
        self.block, self.tile, self.barrier = block, block.tile, block.barrier
        self.box = pipeline.rows_of_box(block.m, block.tile.tokens)
        self.axes = "pair" if block.tile.cluster > 1 else None

    def copy_tiles(self) -> None:
        lax.fori_loop(0, self.block.tiles, self.copy_tile, None)
        self.drain()

    def drain(self) -> None:
        """Wait until the last copies have been read."""
        block = self.block
        drain(self.barrier.empty, block.tiles * block.steps, self.tile.stages)
        if block.by_tile:
            drain(self.barrier.vectors_empty, block.tiles, block.vector_slots)

    def copy_tile(self, t, _) -> None:
        block = self.block
        m0, n0 = block.origin(t)
        slot, rows = lax.rem(t, block.vector_slots), pl.ds(n0, self.tile.rows)
        if block.by_tile:
            self.copy_vectors(t, m0, rows, slot)
        first = ring_slot(t * block.steps, self.tile.stages)
        lax.fori_loop(0, block.steps, functools.partial(self.copy_slot, t, m0, rows), first)

    def copy_vectors(self, t, m0, rows, slot) -> None:
        block, full, empty = self.block, self.barrier.vectors_full, self.barrier.vectors_empty
        pl.when(t >= block.vector_slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
        for name in block.by_tile:
            vector, to = getattr(block.gmem, name), getattr(block.smem, name)
            source = vector.at[pl.ds(m0, self.tile.tokens) if name == "token" else rows]
            if to.ndim == 3:  # a row of w has several groups, of which a block may need a part
                groups = to.shape[2]
                first = block.k_part * groups if groups < vector.shape[1] else 0
                source = vector.at[rows, pl.ds(first, groups)]
            plgpu.copy_gmem_to_smem(source, to.at[slot], full.at[slot])

    def copy_slot(self, t, m0, rows, j, at):
        """Copy the j-th step of K into slot ``at``, and return the next slot."""
        block, gmem, smem, groups = self.block, self.block.gmem, self.block.smem, self.block.groups
        stages, full = self.tile.stages, self.barrier.full.at[at]
        first = (block.first_step + j) * self.tile.block
        pl.when(t * block.steps + j >= stages)(
            lambda: plgpu.barrier_wait(self.barrier.empty.at[at])
        )
        width = self.tile.block // self.tile.pieces
        for piece in range(self.tile.pieces):
            plgpu.copy_gmem_to_smem(
                gmem.x.at[pl.ds(m0, self.box), pl.ds(first + piece * width, width)],
                smem.x.rows.at[at, piece, pl.ds(0, self.box)],
                full,
                collective_axes=self.axes,
            )
        codes = gmem.w.at[rows, pl.ds(first, self.tile.block)]
        plgpu.copy_gmem_to_smem(codes, block.w_tiles.at[at], full)
        own = pl.ds(groups.group_of(block.first_step + j), groups.groups_per_slot)
        for name in block.by_slot:
            vector, to = getattr(gmem, name), getattr(smem, name)
            plgpu.copy_gmem_to_smem(vector.at[own, rows], to.at[at], full)
        return ring_next(at, 1, stages)


class CopiesAhead(Feeder):
    """The same where no warpgroup only copies: in each of its steps the first warpgroup copies into
    the slot that it left ``lag`` steps ago."""

    def begin(self) -> None:
        """Copy the first steps of the first tile."""
        first, count = jnp.int32(0), self.tile.stages - self.tile.lag
        step = functools.partial(self.copy_step, first, *self.block.origin(first))
        loop = functools.partial(lax.fori_loop, 0, count, lambda j, _: step(j), None)
        self.run(loop, self.block.tiles > 0)

    def start_tile(self, t) -> None:
        """Note where the t-th tile lies, and the next one."""
        self.t, self.here, self.there = t, self.block.origin(t), self.block.origin(t + 1)

    def copy(self, j) -> None:
        """In the tile's j-th step: make the copy of ``stages`` - ``lag`` steps later."""
        steps, later = self.block.steps, j + self.tile.stages - self.tile.lag
        is_next = later >= steps
        m0, n0 = (jnp.where(is_next, b, a) for a, b in zip(self.here, self.there, strict=True))
        t = self.t + is_next.astype(jnp.int32)
        step = jnp.where(is_next, later - steps, later)
        self.run(functools.partial(self.copy_step, t, m0, n0, step), t < self.block.tiles)

    def end(self) -> None:
        self.run(self.drain, True)

    def run(self, copies: Callable[[], None], is_due) -> None:
        """Make copies in the first warpgroup's first warp."""
        in_warp = functools.partial(pipeline.in_one_warp, copies)
        pl.when(is_due & (self.block.warpgroup == 0))(in_warp)

    def copy_step(self, t, m0, n0, j) -> None:
        """Copy the t-th tile's j-th step of K, and before its first what comes once a tile."""
        block, rows = self.block, pl.ds(n0, self.tile.rows)
        if block.by_tile:
            slot = lax.rem(t, block.vector_slots)
            pl.when(j == 0)(lambda: self.copy_vectors(t, m0, rows, slot))
        self.copy_slot(t, m0, rows, j, ring_slot(t * block.steps + j, self.tile.stages))


class NoCopies:
    """Nothing to do, for a warpgroup that multiplies beside a ``Feeder``."""

    begin = start_tile = copy = end = staticmethod(lambda *_: None)

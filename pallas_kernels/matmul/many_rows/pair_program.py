"""The program of a block of the product of two like operands: see ``pair`` for its contract.

``PairBlock`` holds the facts that all of a block's warpgroups share.  ``_Feeder`` is the warpgroup
that copies, ``_Multiplier`` each of the two that compute.  Everything is emitted while the kernel
is traced.

``pair`` says who copies, who waits and who writes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.groups_program import HELD, GroupSums
from pallas_kernels.matmul.many_rows.pipeline import (
    REGISTERS,
    drain,
    feed,
    meet_peer,
    my_tiles,
    ring_next,
    ring_slot,
    tile_of,
)
from pallas_kernels.matmul.many_rows.plan import BLOCK_BYTES, PairTile
from pallas_kernels.qtensor import BLOCK_ROWS

_LAYOUT = plgpu.Layout.WGMMA
LOW_BLOCK = BLOCK_BYTES // 2  # ranks of a low-rank term in a slot


class PairBlock:
    """A block's memory, its place in the grid, and the tiles that it computes.

    gmem.factor, scale_out: the scale of all rows of x, and of a gated result, or None; gmem.low:
    inner products and second factors of a low-rank term, or None; sources: the rows of w that each
    second factor is for.  by_group: a step of K has scales of its own.  by_block: 128 rows of w
    share them.
    """

    def __init__(self, gmem, smem, barrier, *, tile: PairTile, swiglu: bool, sources, shape):
        m, n, k = shape
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.tile, self.swiglu, self.sources = tile, swiglu, sources
        self.m, self.n = m, n
        self.warpgroup, self.pair = lax.axis_index("warpgroup"), lax.axis_index("pair")
        self.n_clusters = tile.sms // (tile.cluster * tile.split)
        self.out_cols = tile.cols // 2 if swiglu else tile.cols  # of a warpgroup
        self.wide = tile.n // 2 if swiglu else tile.n
        self.few = tile.m == 64  # blocks of a cluster share x, else w
        m_cluster, n_cluster = (1, tile.cluster) if self.few else (tile.cluster, 1)
        self.grid = pl.cdiv(m, tile.m * m_cluster), pl.cdiv(n, self.wide * n_cluster)
        self.block_k = BLOCK_BYTES // gmem.x.dtype.itemsize
        self.steps = pl.cdiv(k, self.block_k) // tile.split
        self.ranks = 0 if gmem.low is None else gmem.low[1].shape[1]  # of all adapters
        self.low_steps = pl.cdiv(self.ranks, LOW_BLOCK)
        self.loads = self.steps + self.low_steps
        self.part = lax.axis_index("part")
        self.tiles = my_tiles(self.grid[0] * self.grid[1], self.n_clusters)
        self.by_group = gmem.scale_x is not None and gmem.scale_x.ndim == 2
        self.by_block = self.by_group and gmem.scale_w.ndim == 3
        self.batches = pl.cdiv(self.steps, HELD)  # of a tile's scales as they are stored
        names = ("bias",) if self.by_group else ("scale_x", "scale_w", "bias")
        names = ("scale_w", "bias") if self.by_block else names
        self.vectors = [x for x in names if getattr(gmem, x) is not None]

    def origin(self, t):
        """The first row of x and of w of this block's t-th tile."""
        tile = self.tile
        mi, ni = tile_of(t, self.grid, self.n_clusters, 0, tile.width)
        if tile.cluster > 1 and self.few:
            ni = ni * tile.cluster + self.pair
        elif tile.cluster > 1:
            mi = mi * tile.cluster + self.pair
        return mi * tile.m, ni * self.wide

    def run(self) -> None:
        pipeline.await_kernel(self.gmem.w, self.wide, self.tile, self.m)
        feed(self.warpgroup, 2, _Feeder(self).copy_tiles)
        pl.when(self.warpgroup < 2)(lambda: _Multiplier.started(self).compute_tiles())


class _Feeder:
    """The copies: x and w into the ring, a tile's scales and bias beside it."""

    def __init__(self, block: PairBlock):
        self.block, self.tile, self.barrier = block, block.tile, block.barrier
        self.gmem, self.smem = block.gmem, block.smem
        self.box = pipeline.rows_of_box(block.m, block.tile.m)
        axes = "pair" if block.tile.cluster > 1 else None
        self.x_axes, self.w_axes = (axes, None) if block.few else (None, axes)

    def copy_tiles(self) -> None:
        block = self.block
        lax.fori_loop(0, block.tiles, self.copy_tile, None)
        drain(self.barrier.empty, block.tiles * block.loads, self.tile.stages)
        if block.vectors:
            drain(self.barrier.vectors_empty, block.tiles, 2)

    def copy_tile(self, t, _) -> None:
        block = self.block
        m0, n0 = block.origin(t)
        if block.vectors:
            self.copy_vectors(t, m0, n0)
        at = ring_slot(t * block.loads, self.tile.stages)
        at = lax.fori_loop(0, block.steps, functools.partial(self.copy_slot, t, m0, n0), at)
        if block.gmem.low is not None:
            low = functools.partial(self.copy_low_rank, t, m0, n0)
            lax.fori_loop(0, block.low_steps, low, at)

    def copy_vectors(self, t, m0, n0) -> None:
        slot = t % 2
        pl.when(t >= 2)(lambda: plgpu.barrier_wait(self.barrier.vectors_empty.at[slot]))
        for name in self.block.vectors:
            to = getattr(self.smem, name)
            span = pl.ds(m0 if name == "scale_x" else n0, to.shape[-1])
            source, full = getattr(self.gmem, name), self.barrier.vectors_full.at[slot]
            if self.block.by_block and name == "scale_w":
                blocks = pl.ds(n0 // BLOCK_ROWS, to.shape[1])
                columns = pl.ds(self.block.part * self.block.steps, to.shape[2])
                plgpu.copy_gmem_to_smem(source.at[blocks, 0, columns], to.at[slot], full)
            elif self.block.swiglu and name == "scale_w":
                for half in range(2):
                    plgpu.copy_gmem_to_smem(source.at[half, span], to.at[slot, half], full)
            else:
                plgpu.copy_gmem_to_smem(source.at[span], to.at[slot], full)

    def copy_slot(self, t, m0, n0, j, at):
        """Copy the j-th step of K into slot ``at``, and return the next slot."""
        block, stages, full = self.block, self.tile.stages, self.barrier.full.at[at]
        x, w = self.smem.x, self.smem.w
        step = block.part * block.steps + j
        columns = pl.ds(step * block.block_k, block.block_k)
        pl.when(t * block.loads + j >= stages)(
            lambda: plgpu.barrier_wait(self.barrier.empty.at[at])
        )
        if block.by_group:
            self.copy_scales(t, m0, n0, j, at)
        plgpu.copy_gmem_to_smem(
            self.gmem.x.at[pl.ds(m0, self.box), columns],
            x.rows.at[at, pl.ds(0, self.box)],
            full,
            collective_axes=self.x_axes,
        )
        if block.swiglu and not block.few:  # the tile's rows of gate, then the same of up
            for half in range(2):
                rows = pl.ds(half * block.n + n0, block.wide)
                plgpu.copy_gmem_to_smem(
                    self.gmem.w.at[rows, columns],
                    w.rows.at[at, half],
                    full,
                    collective_axes=self.w_axes,
                )
        elif block.swiglu:  # a warpgroup's rows of gate, then the same of up
            for half in range(2):
                rows = pl.ds(n0 + half * block.out_cols, block.out_cols)
                plgpu.copy_gmem_to_smem(self.gmem.w.at[:, rows, columns], w.rows.at[at, half], full)
        else:
            rows = pl.ds(n0, self.tile.n)
            plgpu.copy_gmem_to_smem(
                self.gmem.w.at[rows, columns], w.rows.at[at], full, collective_axes=self.w_axes
            )
        return ring_next(at, 1, stages)

    def copy_scales(self, t, m0, n0, j, at) -> None:
        """Copy the scales of the tile's j-th step, or as they are stored those of eight steps."""
        block, barrier = self.block, self.barrier
        step = block.part * block.steps + j
        operands = ("scale_x", m0, self.box), ("scale_w", n0, self.tile.n)
        operands = operands[:1] if block.by_block else operands

        def by_step():
            for name, first, _ in operands:
                to = getattr(self.smem, name)
                source = getattr(self.gmem, name).at[step, pl.ds(first, to.shape[1])]
                plgpu.copy_gmem_to_smem(source, to.at[at], barrier.full.at[at])

        def as_stored():
            of_tile = j // HELD
            batch = t * block.batches + of_tile
            place, held = batch % 2, pl.ds(block.part * block.steps + of_tile * HELD, HELD)
            pl.when(batch >= 2)(lambda: plgpu.barrier_wait(barrier.scales_empty.at[place]))
            for name, first, rows in operands:
                source = getattr(self.gmem, name).at[pl.ds(first, rows), held]
                to = getattr(self.smem, name).at[place, pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(source, to, barrier.scales_full.at[place])

        if block.few or block.by_block:
            pl.when(j % HELD == 0)(as_stored)
        else:
            by_step()

    def copy_low_rank(self, t, m0, n0, j, at):
        """Copy 64 ranks of the source that the tile's rows of w belong to; return the next slot."""
        block, stages = self.block, self.tile.stages
        pl.when(t * block.loads + block.steps + j >= stages)(
            lambda: plgpu.barrier_wait(self.barrier.empty.at[at])
        )
        begin = 0
        for source, size in enumerate(block.sources):
            copy = functools.partial(self.copy_source, source, begin, m0, n0, j, at)
            pl.when((n0 >= begin) & (n0 < begin + size))(copy)
            begin += size
        return ring_next(at, 1, stages)

    def copy_source(self, source: int, begin: int, m0, n0, j, at) -> None:
        """Copy a source's inner products and second factors; begin: its first row of w."""
        inner, *second = self.gmem.low
        full = self.barrier.full.at[at]
        ranks = pl.ds(source * self.block.ranks + j * LOW_BLOCK, LOW_BLOCK)
        plgpu.copy_gmem_to_smem(
            inner.at[pl.ds(m0, self.box), ranks],
            self.smem.x.low_rows.at[at, pl.ds(0, self.box)],
            full,
        )
        ranks = pl.ds(j * LOW_BLOCK, LOW_BLOCK)
        rows = pl.ds(n0 - begin, self.tile.n)
        plgpu.copy_gmem_to_smem(second[source].at[rows, ranks], self.smem.w.low_rows.at[at], full)


class _Multiplier(GroupSums):
    """A warpgroup that multiplies its part of a tile: 64 rows of x, or with ``few`` rows its share
    of the columns."""

    @classmethod
    def started(cls, block: PairBlock) -> _Multiplier:
        plgpu.set_max_registers(REGISTERS[2][1], action="increase")
        return cls(block)

    def __init__(self, block: PairBlock):
        self.block, self.tile, self.gmem = block, block.tile, block.gmem
        self.smem, self.barrier, self.warpgroup = block.smem, block.barrier, block.warpgroup
        tile, few = block.tile, block.few
        # The first row and column in the tile, and the first column of the result's tile.
        self.row0 = 0 if few else self.warpgroup * tile.rows
        self.col0 = self.warpgroup * tile.cols if few else 0
        self.out0 = self.warpgroup * block.out_cols if few else 0
        self.sum_dtype = jnp.int32 if block.gmem.x.dtype == jnp.int8 else jnp.float32
        self.factor = None if block.gmem.factor is None else block.gmem.factor[0]
        self.out_factor = (
            None if block.gmem.scale_out is None else _inverse(block.gmem.scale_out[0])
        )

    def compute_tiles(self) -> None:
        block = self.block
        lax.fori_loop(0, block.tiles, self.compute_tile, None)
        if self.tile.split > 1:  # a block must not leave while the other may signal it
            sent = jnp.logical_and(block.part != self.warpgroup, block.tiles > 0)
            pl.when(sent)(lambda: plgpu.barrier_wait(self.barrier.peer_empty.at[self.warpgroup]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_tile(self, t, _) -> None:
        m0, n0 = self.block.origin(t)
        acc, added = self.product(t), self.low_rank(t)
        finish = functools.partial(self.finish, t, m0, n0, added)
        if self.tile.split == 1:
            return finish(acc)
        return meet_peer(
            t,
            acc,
            self.block.part,
            lambda: self.warpgroup,
            self.smem.peer_sums,
            self.barrier.peer_full,
            self.barrier.peer_empty.at[self.warpgroup],
            finish,
        )

    # --- wgmma ---

    def product(self, t):
        """The sum over K; with ``promote`` a fresh accumulator every few steps."""
        block, tile = self.block, self.tile
        ref = plgpu.ACC((tile.rows, tile.cols), self.sum_dtype)
        views = self.smem.x.tiles, self.smem.w.tiles

        def summed(first, count):
            run = functools.partial(self.accumulate, views, first, count)
            return pl.run_scoped(run, ref)

        if block.by_group:
            return self.product_by_group(t, ref)
        if not tile.promote:
            return summed(t * block.loads, block.steps)

        def part(p, total):
            begin = p * tile.promote
            whole = block.steps % tile.promote == 0  # then the inner loop's length is known
            # A last step with code of its own would take the registers that the two sums need.
            count = tile.promote if whole else jnp.minimum(tile.promote, block.steps - begin)
            return total + summed(t * block.loads + begin, count)

        zero = plgpu.layout_cast(jnp.zeros(ref.shape, self.sum_dtype), _LAYOUT)
        return lax.fori_loop(0, pl.cdiv(block.steps, tile.promote), part, zero)

    def low_rank(self, t):
        """The low-rank term, from the slots behind the tile's last step of K; or None."""
        block, tile = self.block, self.tile
        if self.gmem.low is None:
            return None
        views = self.smem.x.low_tiles, self.smem.w.low_tiles
        first = t * block.loads + block.steps
        run = functools.partial(self.accumulate, views, first, block.low_steps)
        return pl.run_scoped(run, plgpu.ACC((tile.rows, tile.cols), jnp.float32))

    def accumulate(self, views, first, count, acc):
        """acc += the products of slots first .. first + count; one wgmma stays in flight."""
        stages, empty = self.tile.stages, self.barrier.empty

        def step(j, at):
            plgpu.barrier_wait(self.barrier.full.at[at])
            plgpu.wgmma(acc, *self.operands(*views, at))
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(empty.at[ring_next(at, stages - 1, stages)], predicate=j > 0)
            return ring_next(at, 1, stages)

        end = lax.fori_loop(0, count, step, ring_slot(first, stages))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[ring_next(end, stages - 1, stages)])
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    def operands(self, x, w, at):
        """This warpgroup's rows of the slot's x, and its columns of w."""
        tile = self.tile
        if self.block.few:
            return x.at[at], w.at[at, pl.ds(self.col0, tile.cols)].transpose((1, 0))
        return x.at[at, pl.ds(self.row0, tile.rows)], w.at[at].transpose((1, 0))

    # --- acc -> float32 * scales + bias -> shared memory -> TMA store ---

    def finish(self, t, m0, n0, added, acc) -> None:
        block, tile, smem, barrier = self.block, self.tile, self.smem, self.barrier
        slot, width = t % 2, self.smem.out.tiles.shape[-1]
        if block.vectors and not block.by_block:
            plgpu.barrier_wait(barrier.vectors_full.at[slot])
        pieces = [(r, c) for r in range(0, tile.rows, 64) for c in range(0, block.out_cols, width)]
        for piece, (r, c) in enumerate(pieces):
            y = self.finished(slot, acc, added, r, c)
            # The stores of all tiles take the two places in turn.
            place = piece % 2 if len(pieces) % 2 == 0 else (t * len(pieces) + piece) % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            smem.out.tiles[self.warpgroup, place] = y.astype(self.gmem.out.dtype)
            plgpu.commit_smem()
            rows, columns = pl.ds(m0 + self.row0 + r, 64), pl.ds(n0 + self.out0 + c, width)
            plgpu.copy_smem_to_gmem(
                smem.out.rows.at[self.warpgroup, place], self.gmem.out.at[rows, columns]
            )
        if block.vectors:
            plgpu.barrier_arrive(barrier.vectors_empty.at[slot])

    def finished(self, slot, acc, added, r: int, c: int):
        """64 rows of the result from row r and column c of this warpgroup's sums on."""
        block, smem = self.block, self.smem
        width = smem.out.tiles.shape[-1]

        def vector(ref, start, size, axis):
            v = plgpu.load(ref.at[slot, pl.ds(start, size)], layout=_LAYOUT.reduce(1 - axis))
            return lax.broadcast_in_dim(v.astype(jnp.float32), (64, width), [axis])

        y = _columns(acc, c, width)[r : r + 64]
        if block.swiglu and self.gmem.scale_w is not None:
            return self.gated(slot, acc, r, c)
        if block.swiglu:
            up = block.out_cols + c
            y = jax.nn.silu(y) * acc[r : r + 64, up : up + width]
        if self.gmem.scale_w is not None and not block.by_group:
            y = y.astype(jnp.float32)
            if self.factor is None:
                y = y * vector(smem.scale_x, self.row0 + r, 64, 0)
            else:
                y = y * self.factor
            y = y * vector(smem.scale_w, self.col0 + c, width, 1)
        if added is not None:
            y = y + added[r : r + 64, c : c + width]
        if self.gmem.bias is not None:
            y = y + vector(smem.bias, self.col0 + c, width, 1)
        return y

    def gated(self, slot, acc, r: int, c: int):
        """The same of gate and up in codes with scales, in multiples of the result's scale."""
        block, smem = self.block, self.smem
        width = smem.out.tiles.shape[-1]

        def of(ref, first, size, axis):
            v = plgpu.load(ref.at[pl.ds(first, size)], layout=_LAYOUT.reduce(1 - axis))
            return lax.broadcast_in_dim(v, (64, width), [axis])

        def scaled(half):
            first = half * block.out_cols + c
            y = acc[r : r + 64, first : first + width].astype(jnp.float32)
            of_x = self.factor
            if of_x is None:
                of_x = of(smem.scale_x.at[slot], self.row0 + r, 64, 0)
            return y * of_x * of(smem.scale_w.at[slot, half], self.out0 + c, width, 1)

        return jax.nn.silu(scaled(0)) * scaled(1) * self.out_factor


def _columns(acc, first: int, width: int):
    """Columns of sums, or of a tuple of columns' sums."""
    if isinstance(acc, tuple):
        unit = acc[0].shape[1]
        acc, first = acc[first // unit], first % unit
    return acc[:, first : first + width]


def _inverse(scale):
    """1 / scale to some units in the last place: a division is a call, beside which ptxas waits for
    every wgmma (its C7509)."""
    root = lax.rsqrt(scale)
    return root * root

"""The program of a block of the grouped product of many pairs (``kernel``).

``PairsBlock`` holds the facts that all of a block's warpgroups share.  The feeder and the
multipliers are those of the dense product (``matmul.many_rows.weight_program``), which differ here
in three places: a tile's expert comes from a table, and so do its rows of x, which other warps
gather (``gather_program``); the rows of gate and up are copied side by side; and results
go to their pairs.

``kernel`` says who copies, who waits and who writes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.experts.many_pairs.finish_program import RowStage, store_one
from pallas_kernels.experts.many_pairs.gather_program import GatherShape, RowGather, SortedRows
from pallas_kernels.experts.many_pairs.plan import (
    Tile,
    has_sorted_rows,
    in_groups,
    results,
    rows_in_memory,
)
from pallas_kernels.jax_internals import llvm
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul.many_rows import unpack
from pallas_kernels.matmul.many_rows.pipeline import feed, my_tiles, ring_next, ring_slot
from pallas_kernels.matmul.many_rows.plan import BLOCK_K, SlotGroups
from pallas_kernels.matmul.many_rows.unpack import FragmentRows
from pallas_kernels.matmul.many_rows.weight_program import Feeder, Multiplier
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value

_LAYOUT = plgpu.Layout.WGMMA
_SPLAT = plgpu.Layout.WG_SPLAT((128,))
UNIT = 32  # rows of w whose scales or zeros are one copy
WIDTHS = 16, 32, 40, 48, 64, 96, 128, 160
_AT_ONCE = 8  # groups of eight tokens whose pairs are loaded together; 16 spill up to 84 bytes


class PairsBlock:
    """A block's memory, its place in the grid, and the tiles that it computes.

    gmem.work: int32 ``[1 + N, 4]``.  Its first row begins with the number of parts.  The others are
    a part's expert, first row of x and end of its rows.  A tile is a part and ``wide`` results.
    """

    def __init__(
        self, gmem, smem, barrier, *, tile: Tile, weight: StoredWeight, finish, shape, fan
    ):
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.tile, self.weight, self.finish = tile, weight, finish
        self.gated, self.groups = finish.gate is not None, SlotGroups(weight.group, BLOCK_K)
        self.n, self.k = shape
        self.n_out = self.n // 2 if self.gated else self.n
        self.warpgroup, self.pair = lax.axis_index("warpgroup"), lax.axis_index("pair")
        self.n_clusters = tile.sms // tile.cluster
        self.wide = results(tile, self.gated)
        self.pitch = rows_in_memory(tile, self.gated) // (1 + self.gated)
        self.across = self.computing = self.n_warpgroups()
        self.steps = self.k // BLOCK_K
        # The blocks of a cluster have neighbouring tiles of one part of the pairs.  In
        # ``TokenBlock`` each has a part of its own, of the same results.
        self.parts_per_cluster = self.parts_of_cluster()
        self.columns = pl.cdiv(self.n_out, self.wide * tile.cluster // self.parts_per_cluster)
        self.vector_slots = 2
        self.sorted = has_sorted_rows(tile)
        # Of the rows of x that are copied and multiplied: the least that has a part's.  Two blocks
        # that share them copy half each, whole groups of eight.
        least = 16 if self.sorted else 8
        self.widths = [w for w in WIDTHS if w < tile.tokens and w % least == 0] + [tile.tokens]
        self.gather: RowGather | SortedRows
        if self.sorted:
            self.gather = SortedRows(barrier.full)
        else:
            self.gather = RowGather(smem.row_barriers, tile.stages, self.computing)
        self.gather_shape = GatherShape(
            fan=fan,
            pitch=2 * self.k,
            steps=self.steps,
            columns=self.columns,
            n_clusters=self.n_clusters,
            tokens=tile.tokens,
            widths=tuple(self.widths),
            cluster=self.parts_per_cluster,
        )
        self.by_tile = [name for name in ("scale", "zero") if getattr(gmem, name) is not None]

    def run(self) -> None:
        self.gather.start()
        inline()(p.await_kernel)()
        groups = pl.cdiv(self.gmem.work[0, 0], self.parts_per_cluster)
        self.tiles = my_tiles(groups * self.columns, self.n_clusters)
        others, loads = [], self.tiles * self.steps
        if isinstance(self.gather, RowGather):
            slots, full = self.smem.x.bytes, self.barrier.full
            others = self.gather.workers(self.gmem, slots, self.gather_shape, loads, full)
        feed(self.warpgroup, self.computing, self.feeder().copy_tiles, others)
        pl.when(self.warpgroup < self.computing)(self.multiply)

    def n_warpgroups(self) -> int:
        """Warpgroups that multiply: side by side in w's rows."""
        return self.tile.rows // 64

    def parts_of_cluster(self) -> int:
        return 1

    def feeder(self) -> PairsFeeder:
        return PairsFeeder(self)

    def multiply(self) -> None:
        PairsMultiplier.started(self).compute_tiles()

    def origin(self, t):
        """The part, or the cluster's parts, and the first result of this block's t-th tile:
        neighbours share x."""
        index = t * self.n_clusters + lax.axis_index("cluster")
        ni = lax.rem(index, jnp.asarray(self.columns, index.dtype))
        part = lax.div(index, jnp.asarray(self.columns, index.dtype))
        if self.tile.cluster > self.parts_per_cluster:
            ni = ni * self.tile.cluster + self.pair
        return part, ni * self.wide

    def await_slot(self, t, j, at) -> None:
        self.gather.wait(at, t * self.steps + j)

    def release_slot(self, at) -> None:
        plgpu.barrier_arrive(self.barrier.empty.at[at])
        self.gather.release(at)

    def by_width(self, part, body: Callable[[int], None]) -> None:
        """Run ``body(width)`` for the least width that has the part's rows of x."""
        rows = self.gmem.work[part + 1, 2] - self.gmem.work[part + 1, 1]
        for below, width in itertools.pairwise([0, *self.widths]):
            pl.when((rows > below) & (rows <= width))(functools.partial(body, width))


class PairsFeeder(Feeder):
    """The copies of a tile's weight: its expert's rows, gate and up side by side."""

    def __init__(self, block: PairsBlock):
        self.block, self.tile, self.barrier = block, block.tile, block.barrier

    def copy_tile(self, t, _) -> None:
        block = self.block
        part, n0 = block.origin(t)
        begins = self.begins(block.gmem.work[part + 1, 0], n0)
        if block.by_tile:
            self.copy_vectors_of(t, begins)
        if not block.sorted:
            return self.copy_slots(t, begins)
        axes = "pair" if self.tile.cluster > 1 else None
        first = block.gmem.work[part + 1, 1]
        copy = lambda width: self.copy_slots(t, begins, rows=(pl.ds(first, width), axes))  # noqa: E731
        return block.by_width(part, copy)

    def begins(self, expert, n0) -> list:
        """A tile's first row of w, or of gate and of up."""
        block = self.block
        return [expert * block.n + n0 + block.n_out * i for i in range(1 + block.gated)]

    def copy_slots(self, t, begins, axes=None, rows=None) -> None:
        """Copy all of a tile's slots.  axes: of the blocks that share the weight.  rows: of x that
        lies by expert, and the axes of the blocks that share them."""
        at = ring_slot(t * self.block.steps, self.tile.stages)
        copy = functools.partial(self.copy_slot_of, t, begins, axes, rows)
        lax.fori_loop(0, self.block.steps, copy, at)

    def copy_vectors_of(self, t, begins) -> None:
        block = self.block
        full, empty = self.barrier.vectors_full, self.barrier.vectors_empty
        slot = lax.rem(t, block.vector_slots)
        pl.when(t >= block.vector_slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
        units = block.pitch // UNIT
        for name in block.by_tile:
            source, to = getattr(block.gmem, name), getattr(block.smem, name).boxes
            for i, begin in enumerate(begins):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(begin // UNIT, units)],
                    to.at[slot, pl.ds(i * units, units)],
                    full.at[slot],
                )

    def copy_slot_of(self, t, begins, axes, of_x, j, at):
        """Copy the j-th step of K into slot ``at``, and return the next slot."""
        block, gmem, smem, tile = self.block, self.block.gmem, self.block.smem, self.tile
        full, columns = self.barrier.full.at[at], pl.ds(j * BLOCK_K, BLOCK_K)
        is_used = t * block.steps + j >= tile.stages
        pl.when(is_used)(lambda: plgpu.barrier_wait(self.barrier.empty.at[at]))
        if of_x is not None:
            tokens, sharing = of_x
            to = smem.x.rows.at[at, pl.ds(0, tokens.size)]
            plgpu.copy_gmem_to_smem(gmem.x.at[tokens, columns], to, full, collective_axes=sharing)
        for i, begin in enumerate(begins):
            rows = pl.ds(i * block.pitch, block.wide)
            source = gmem.w.at[pl.ds(begin, block.wide), columns]
            to = smem.w.tiles.at[at, rows]
            plgpu.copy_gmem_to_smem(source, to, full, collective_axes=axes)
        return ring_next(at, 1, tile.stages)


class PairsMultiplier(Multiplier):
    """A warpgroup that multiplies 64 rows of w, or 32 of gate and 32 of up, by a tile's tokens."""

    def __init__(self, block: PairsBlock):
        super().__init__(block)
        self.rows, self.where = pl.ds(64 * self.half, 64), FragmentRows()
        if block.gated:  # the thread that has a row of gate also has that of up
            self.rows = pl.ds(32 * self.half, block.pitch + 32)
            self.where = FragmentRows(8, block.pitch)

    def compute_tile(self, t, _) -> None:
        block = self.block
        part, n0 = block.origin(t)
        slot = lax.rem(t, block.vector_slots)
        if block.by_tile:
            plgpu.barrier_wait(self.barrier.vectors_full.at[slot])
        block.by_width(part, functools.partial(self.compute_width, t, part, n0))
        if block.by_tile:
            plgpu.barrier_arrive(self.barrier.vectors_empty.at[slot])

    def compute_width(self, t, part, n0, width: int) -> None:
        """A tile of so many rows of x, of which the part has all or the first."""
        self.width = width
        ref = plgpu.ACC((64, width), self.sum_dtype)
        self.finish(part, n0, pl.run_scoped(functools.partial(self.sum_of_products, t), ref))

    def tokens_at(self, at):
        return self.smem.x.tiles.at[at, pl.ds(0, self.width)]

    def sum_of_products(self, t, acc):
        """The sum over K.  While a slot is multiplied, the next one's weights are unpacked.

        Two slots a turn have registers of their own: with one, ptxas lets every wgmma end before
        the next weights are unpacked (its C7513).
        """
        block, stages = self.block, self.tile.stages

        def weights(j, at):
            block.await_slot(t, j, at)
            return self.dequantized(t, j, at)

        def multiply(at, a) -> None:
            plgpu.wgmma(acc, a, self.tokens_at(at).transpose((1, 0)))

        def multiplied(at) -> None:
            plgpu.wgmma_wait(0)
            block.release_slot(at)

        def both(j, at, a):
            """Multiply slots j and j + 1.  a: of slot j.  Return the second's place."""
            multiply(at, a)
            second = ring_next(at, 1, stages)
            b = weights(j + 1, second)
            multiplied(at)
            multiply(second, b)
            return second

        def turn(i, carry):
            at, a = carry
            second = both(2 * i, at, a)
            third = ring_next(second, 1, stages)
            a = weights(2 * i + 2, third)
            multiplied(second)
            return third, a

        first, turns = ring_slot(t * block.steps, stages), (block.steps - 1) // 2
        at, a = lax.fori_loop(0, turns, turn, (first, weights(0, first)))
        if block.steps % 2:
            multiply(at, a)
        else:
            at = both(2 * turns, at, a)
        multiplied(at)
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    def dequantized(self, t, j, at):
        smem, block, weight = self.smem, self.block, self.weight
        slot = lax.rem(t, block.vector_slots)

        def vector(name, g=0):
            group = block.groups.group_of(j) + g
            return getattr(smem, name).rows.at[slot, self.rows, group]

        count = block.groups.groups_per_slot if in_groups(weight) else 0
        scales = [vector("scale", g) for g in range(count)]
        zeros = None if block.gmem.zero is None else vector("zero")
        codes = smem.w.bytes.at[at, self.rows]
        return unpack.to_bfloat16(weight, codes, scales, zeros, self.where)

    def finish(self, part, n0, acc) -> None:
        """Store a tile's results at their pairs.  n0: the first result."""
        gmem = self.gmem
        column = plgpu.layout_cast(jnp.full((128,), n0, jnp.int32), _SPLAT)
        vectors = [v for v in (gmem.row, gmem.bias) if v is not None]
        store = inline(*[REF] * (4 + len(vectors)), _SPLAT, _LAYOUT)(self.stored)
        stage = self.smem.stage.at[self.half]
        store(gmem.out, gmem.pairs, gmem.work.at[part + 1], stage, *vectors, column, acc)

    def stored(self, out, pairs, part, stage, *rest) -> None:
        """The code of ``finish``: a thread's rows of w, by eight tokens at a time."""
        block, finish, gated = self.block, self.block.finish, self.block.gated
        *vectors, column, acc = rest
        expert, first, end, _ = p.load_global(p.address(part), 4)
        thread = p.register("tid.x")
        half = (thread >> 7) % block.across
        row, _, quad = self.where.place()
        own = column.registers.flat[0] + half * (32 if gated else 64) + row
        columns = [own] if gated else [own, own + 8]
        inside = [c < block.n_out for c in columns]
        w_row = expert * block.n
        w_rows = [w_row + p.minimum(c, block.n_out - 1) for c in columns]
        if gated:
            w_rows.append(w_rows[0] + block.n_out)

        def vector(ref) -> list[Value]:
            base = p.address(ref)
            return [p.load_global(p.offset(base, r, 4), 1, kind="f32")[0] for r in w_rows]

        held = [vector(ref) for ref in vectors]
        scales = held.pop(0) if finish.scaled else None
        biases = held.pop(0) if held else None
        flat, at, to = list(acc.registers.reshape(-1)), p.address(pairs), p.address(out)
        size = finish.bytes

        def values(i: int) -> list[list[Value]]:
            """The results of tokens 8 i + 2 quad + (0, 1)."""
            sums = [
                [llvm.extractelement(flat[2 * i + h], p.ci(e)) for h in range(2)] for e in range(2)
            ]
            return [finish.of_one(own, scales, biases) for own in sums]

        last, eights = end - 1, acc.shape[1] // 8
        if size == 2:
            begin = column.registers.flat[0] + half * (32 if gated else 64)
            how = RowStage(gated, p.shared_address(stage), at, to, begin, block.n_out)
            how.store(values, first, end, eights)
            return
        for c in range(0, eights, _AT_ONCE):
            group = range(c, min(c + _AT_ONCE, eights))
            tokens = [first + quad * 2 + (8 * i + e) for i in group for e in range(2)]
            at_pairs = [p.offset(at, p.smaller(token, last), 4) for token in tokens]
            places = [p.load_global(place, 1)[0] for place in at_pairs]
            results = [y for i in group for y in values(i)]
            for token, place, own_results in zip(tokens, places, results, strict=True):
                base = p.offset(to, place, block.n_out * size)
                for c_out, ok, y in zip(columns, inside, own_results, strict=True):
                    is_own = (token < end) & ok
                    store_one(p.offset(base, c_out, size), y, is_own)

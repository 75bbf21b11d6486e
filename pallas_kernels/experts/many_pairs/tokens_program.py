"""The program of a block of the grouped product of many pairs where the weight is bfloat16.

``TokenBlock`` differs from ``PairsBlock`` in who has what: no operand is in registers, so tokens
are the M of wgmma and rows of w its N.  A tile then has twice as many sums, and a byte of a tile's
operands is multiplied more often.

    cluster      two blocks with a part each, which share (multicast) the rows of w if both parts
                 are of one expert
    warpgroup    64 tokens, all of the tile's rows of w; one wgmma stays in flight
    thread       rows of gate and the same of up, so the gate needs no exchange

The two parts are neighbours in the order of pairs, so an expert's short last part goes with the
first of the next expert.  A warpgroup without tokens does not multiply.  Rows behind a part's last
are multiplied, and not stored.

Copies: the feeder's warp brings w by TMA.  If both blocks have one expert, each copies half of the
rows of w to both.  Other warps gather each block's own rows of x (``gather_program``).
Waits: a slot's w is refilled when all multiplying warpgroups of both blocks have arrived at its
``empty``, also those without tokens (``pass_by``).  The gathering warps wait for their block alone.
Writes: a warpgroup stores its results at their pairs, as bfloat16 through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.experts.many_pairs.finish_program import TokenStage, exchanged_four
from pallas_kernels.experts.many_pairs.pairs_program import PairsBlock, PairsFeeder
from pallas_kernels.experts.many_pairs.plan import token_stage
from pallas_kernels.jax_internals import llvm
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul.many_rows.pipeline import REGISTERS, ring_next, ring_slot
from pallas_kernels.matmul.many_rows.unpack import FragmentRows
from pallas_kernels.ptx import Value

_LAYOUT = plgpu.Layout.WGMMA
_SPLAT = plgpu.Layout.WG_SPLAT((128,))


class TokenBlock(PairsBlock):
    """A block of which each warpgroup has 64 tokens."""

    def n_warpgroups(self) -> int:
        return self.tile.tokens // 64

    def multiply(self) -> None:
        plgpu.set_max_registers(REGISTERS[self.computing][1], action="increase")
        TokenMultiplier(self).compute_tiles()

    def parts_of_cluster(self) -> int:
        return self.tile.cluster

    def feeder(self) -> PairsFeeder:
        return TokenFeeder(self)

    def part_of(self, group, rank):
        """The part that a block of the cluster has of a group of parts, and whether it has one."""
        n_parts, part = self.gmem.work[0, 0], group * self.tile.cluster + rank
        return jnp.minimum(part, n_parts - 1), part < n_parts

    def tokens_of(self, group):
        """This block's part, its first token and their end; it may have none."""
        part, has_one = self.part_of(group, self.pair)
        first, end = self.gmem.work[part + 1, 1], self.gmem.work[part + 1, 2]
        return part, jnp.where(has_one, first, end), end


class TokenFeeder(PairsFeeder):
    """The copies of a tile's weight: both blocks' at once where they have one expert."""

    def copy_tile(self, t, _) -> None:
        block = self.block
        group, n0 = block.origin(t)
        first, second = (block.gmem.work[block.part_of(group, i)[0] + 1, 0] for i in range(2))
        begins = self.begins(jnp.where(block.pair == 0, first, second), n0)
        pl.when(first == second)(lambda: self.copy_slots(t, begins, "pair"))
        pl.when(first != second)(lambda: self.copy_slots(t, begins))


class TokenMultiplier:
    """A warpgroup that multiplies 64 tokens by a tile's rows of w."""

    def __init__(self, block: TokenBlock):
        self.block, self.tile, self.smem, self.gmem = block, block.tile, block.smem, block.gmem
        self.tokens = pl.ds(64 * block.warpgroup, 64)

    def compute_tiles(self) -> None:
        lax.fori_loop(0, self.block.tiles, self.compute_tile, None)

    def compute_tile(self, t, _) -> None:
        block = self.block
        group, n0 = block.origin(t)
        part, first, end = block.tokens_of(group)
        first += 64 * block.warpgroup

        def multiply() -> None:
            ref = plgpu.ACC((64, self.tile.rows), jnp.float32)
            sums = pl.run_scoped(functools.partial(self.sum_of_products, t), ref)
            self.finish(part, n0, first, end, sums)

        pl.when(first < end)(multiply)
        pl.when(first >= end)(lambda: self.pass_by(t))

    def pass_by(self, t) -> None:
        """Keep step with the others through a tile."""

        def step(j, at):
            self.block.await_slot(t, j, at)
            self.block.release_slot(at)
            return ring_next(at, 1, self.tile.stages)

        first = ring_slot(t * self.block.steps, self.tile.stages)
        lax.fori_loop(0, self.block.steps, step, first)

    def sum_of_products(self, t, acc):
        block, stages = self.block, self.tile.stages

        def step(j, at):
            self.block.await_slot(t, j, at)
            x, w = self.smem.x.tiles.at[at, self.tokens], self.smem.w.tiles.at[at]
            plgpu.wgmma(acc, x, w.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(j > 0)(lambda: self.block.release_slot(ring_next(at, stages - 1, stages)))
            return ring_next(at, 1, stages)

        end = lax.fori_loop(0, block.steps, step, ring_slot(t * block.steps, stages))
        plgpu.wgmma_wait(0)
        self.block.release_slot(ring_next(end, stages - 1, stages))
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    def finish(self, part, n0, first, end, acc) -> None:
        """Store the sums at their pairs.  n0: the first result; first: this warpgroup's first token
        of up to 64; end: that of the part's tokens."""
        gmem = self.gmem
        scalars = (n0, first, end)
        splats = [plgpu.layout_cast(jnp.full((128,), v, jnp.int32), _SPLAT) for v in scalars]
        biases = [] if gmem.bias is None else [gmem.bias]
        stage = self.smem.stage.at[self.block.warpgroup]
        refs = gmem.out, gmem.pairs, gmem.work.at[part + 1], stage, *biases
        types = (*[REF] * len(refs), *[_SPLAT] * len(splats), _LAYOUT)
        inline(*types)(self.stored)(*refs, *splats, acc)

    def stored(self, out, pairs, part, stage, *rest) -> None:
        """The code of ``finish``: a thread has two neighbours of every eight results of two tokens.

        In float32 two lanes exchange them, so that each has four neighbours."""
        block, finish = self.block, self.block.finish
        *biases, n0, first, end, acc = rest
        n0, first, end = (v.registers.flat[0] for v in (n0, first, end))
        (expert,) = p.load_global(p.address(part), 1)
        row, in_eight, quad = FragmentRows().place()
        flat, at, to = list(acc.registers.reshape(-1)), p.address(pairs), p.address(out)
        sets = 1 + block.gated
        eights = self.tile.rows // 8 // sets
        w_row = expert * block.n + quad * 2
        at_bias = p.address(biases[0]) if biases else None

        def biases_of(i: int) -> list[Sequence[Value]]:
            """Those of gate and up of two neighbouring results."""
            first = w_row + p.minimum(n0 + 8 * i, block.n_out - 8)
            rows = [first + s * block.n_out for s in range(sets)]
            return [p.load_global(p.offset(at_bias, r, 4), 2, kind="f32") for r in rows]

        def two(i: int, h: int, of_pair: list[Sequence[Value]] | None) -> list[Value]:
            """The i-th eight's two results of this lane's h-th token."""
            of_sets = [flat[2 * (i + s * eights) + h] for s in range(sets)]
            sums = [[llvm.extractelement(v, p.ci(e)) for v in of_sets] for e in range(2)]
            held = [None if of_pair is None else [v[e] for v in of_pair] for e in range(2)]
            return [y for (y,) in finish.of_two(sums, None, held)]

        def several(group: range, h: int) -> list[list[Value]]:
            held = [biases_of(i) for i in group] if biases else [None] * len(group)
            return [two(i, h, of_pair) for i, of_pair in zip(group, held, strict=True)]

        if finish.bytes == 4:
            for h in range(2):
                token = first + row + 8 * h
                (place,) = p.load_global(p.offset(at, p.smaller(token, end - 1), 4), 1)
                to_row = p.offset_rows(to, place, block.n_out * 4)
                exchanged_four(several, h, to_row, n0, p.below(token, end), eights, block.n_out)
            return
        own_tokens, pitch = token_stage(self.tile)
        warp = (p.register("tid.x") & 127) >> 5
        stage = p.shared_address(stage) + warp * (own_tokens * pitch)
        token, wide = first + (row - in_eight), pitch // 2 - 8
        for c in range(0, 8 * eights, wide):
            words = lambda i, h, c=c: [  # noqa: E731
                p.pack(*values) for values in several(range(c // 8 + i, c // 8 + i + 4), h)
            ]
            how = TokenStage(stage, at, to, n0 + c, block.n_out, pitch)
            how.store(words, token, end)

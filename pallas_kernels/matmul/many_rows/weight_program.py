"""The program of a block of the weight-only product: see ``weight`` for its contract and timeline.

``WeightBlock`` holds the facts that all of a block's warpgroups share.  ``Multiplier`` is each of
those that compute; the copies are in ``copies_program``.  Everything is emitted while the kernel is
traced.

``weight`` says who copies, who waits and who writes; ``weight._scratch`` has the arrivals.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline, unpack
from pallas_kernels.matmul.many_rows.copies_program import CopiesAhead, Feeder, NoCopies
from pallas_kernels.matmul.many_rows.pipeline import (
    REGISTERS,
    feed,
    meet_peer,
    my_tiles,
    ring_next,
    ring_slot,
    tile_of,
)
from pallas_kernels.matmul.many_rows.plan import SlotGroups, WeightTile
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.matmul.widen import FLOAT4_REST

_LAYOUT = plgpu.Layout.WGMMA


class WeightOperands(NamedTuple):
    """The arrays of ``weight_matmul``.  A kernel has references to them under the same names.

    x : [M, K]
        bfloat16 or float16; or int8 or e4m3 codes, beside int4 weights.
    w : [N, K]
        int4, or the bits of float4 codes; int8; or float8_e4m3fn beside bfloat16, in one group of
        scales a slot.
    scale, zero : [K / group, N] or None
        In x's dtype, or the bytes of float4's scales as int8; with ``tile.stored`` they are
        [N, K / group].  Beside 8-bit x both are stored, zero is int8 and scale is int8 or floats.
    row, bias : [N] or None
        Floats: a scale, and what is added last.
    token : [M] or None
        Floats: the scale of each row of x.
    """

    x: jax.Array
    w: jax.Array
    scale: jax.Array | None = None
    zero: jax.Array | None = None
    row: jax.Array | None = None
    bias: jax.Array | None = None
    token: jax.Array | None = None


def scales_sums(held: WeightOperands) -> bool:
    """Whether scales multiply sums of 128 columns of codes, not weights."""
    return held.x.dtype.itemsize == 1 and (held.x.dtype != jnp.int8 or held.row is None)


def is_unpacked(weight: StoredWeight, tile: WeightTile) -> bool:
    """Whether codes become the operand byte by byte (``unpack``)."""
    one_group = tile.stored and weight.group % (tile.block // tile.pieces) == 0
    return weight.float4 or weight.float8 or (weight.bits == 4 and one_group)


class WeightBlock:
    """A block's memory, its place in the grid, and the tiles that it computes.

    pair: the block's place among those side by side in w's rows.  k_part: its part of K, of
    ``tile.split``.  ``tile.parts`` is another thing: sets of warpgroups that take turns at slots.
    """

    def __init__(self, gmem, smem, barrier, *, tile: WeightTile, weight: StoredWeight):
        (m, k), n = gmem.x.shape, gmem.w.shape[0]
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.tile, self.weight, self.m, self.k = tile, weight, m, k
        self.groups = SlotGroups(weight.group, tile.block)
        self.unpacked = is_unpacked(weight, tile)
        self.w_tiles = smem.w.tiles if self.unpacked else smem.w
        self.warpgroup, self.pair, self.k_part = (
            lax.axis_index(axis) for axis in ("warpgroup", "pair", "part")
        )
        self.n_clusters = tile.sms // (tile.cluster * tile.split)
        self.grid = pl.cdiv(m, tile.tokens), pl.cdiv(n, tile.rows * tile.cluster)
        self.steps = k // tile.block // tile.split
        self.first_step = self.k_part * self.steps
        self.tiles = my_tiles(self.grid[0] * self.grid[1], self.n_clusters)
        self.vector_slots = tile.vector_slots(m, n)
        self.across = tile.rows // 64  # warpgroups side by side in w's rows
        self.computing = self.across * tile.parts
        # Vectors that come with every slot of the ring, and those that come once a tile.
        of_groups, of_rows = self.present("scale", "zero"), self.present("row", "bias", "token")
        self.by_slot = [] if tile.stored else of_groups
        self.by_tile = of_groups + of_rows if tile.stored else of_rows

    def present(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self.gmem, name) is not None]

    def origin(self, t):
        """The first token and the first row of w of this block's t-th tile."""
        tile = self.tile
        mi, ni = tile_of(t, self.grid, self.n_clusters, 1, tile.width)
        n0 = ni if tile.cluster == 1 else ni * tile.cluster + self.pair
        return mi * tile.tokens, n0 * tile.rows

    def run(self) -> None:
        pipeline.await_kernel(self.gmem.w, self.tile.rows, self.tile, self.m)
        if self.tile.lag:
            return Multiplier(self).compute_tiles()
        feed(self.warpgroup, self.computing, Feeder(self).copy_tiles)
        is_computing = self.warpgroup < self.computing
        return pl.when(is_computing)(lambda: Multiplier.started(self).compute_tiles())


class Multiplier:
    """A warpgroup that multiplies 64 rows of w by a tile's tokens, all slots or its turns of them.

    half: which 64 rows of the block's.  turn: which of ``tile.parts`` warpgroups that share them.
    """

    @classmethod
    def started(cls, block: WeightBlock) -> Multiplier:
        plgpu.set_max_registers(REGISTERS[block.computing][1], action="increase")
        return cls(block)

    def __init__(self, block: WeightBlock):
        self.block, self.tile, self.weight, self.smem = block, block.tile, block.weight, block.smem
        self.gmem, self.barrier = block.gmem, block.barrier
        self.half, self.turn = block.warpgroup % block.across, block.warpgroup // block.across
        self.rows = pl.ds(self.half * 64, 64)
        self.sum_dtype = jnp.int32 if self.gmem.x.dtype == jnp.int8 else jnp.float32
        self.scaled = scales_sums(self.gmem)
        self.ahead = CopiesAhead(block) if block.tile.lag else NoCopies()

    def compute_tiles(self) -> None:
        block, tile = self.block, self.tile
        self.ahead.begin()
        lax.fori_loop(0, block.tiles, self.compute_tile, None)
        self.ahead.end()
        if tile.split > 1:  # a block must not leave while the other may signal it
            sent = (self.turn == 0) & (block.k_part != self.half % 2) & (block.tiles > 0)
            pl.when(sent)(lambda: plgpu.barrier_wait(self.barrier.peer_empty.at[self.half]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute_tile(self, t, _) -> None:
        block, tile = self.block, self.tile
        m0, n0 = block.origin(t)
        self.ahead.start_tile(t)
        if tile.stored:
            plgpu.barrier_wait(self.barrier.vectors_full.at[lax.rem(t, block.vector_slots)])
        if self.scaled:
            acc = self.sum_of_scaled(t)
        else:
            ref = plgpu.ACC((64, tile.tokens), self.sum_dtype)
            acc = pl.run_scoped(functools.partial(self.sum_of_products, t), ref)
        if tile.parts == 1:
            return self.over_blocks(t, m0, n0, acc)
        pl.when(self.turn > 0)(lambda: self.give_sum(t, acc))
        return pl.when(self.turn == 0)(lambda: self.over_blocks(t, m0, n0, self.over_turns(acc)))

    # --- codes -> floats ---

    def stored_at(self, ref, t, j, g=0, count=None):
        """Slot j's g-th group of the tile's stored vectors, or its first ``count``; shared memory
        holds the groups of this block's part of K, or all."""
        block = self.block
        j = j if ref.shape[2] < block.k // block.weight.group else block.first_step + j
        group = block.groups.group_of(j) + g
        group = group if count is None else pl.ds(group, count)
        return ref.at[lax.rem(t, block.vector_slots), self.rows, group]

    def group_of(self, piece: int) -> int:
        """A piece's group among its slot's."""
        return piece * self.block.groups.groups_per_slot // self.tile.pieces

    def scales_of(self, t, j, at, g):
        """Slot j's g-th group of scales, from the tile's vectors or from the ring."""
        if self.tile.stored:
            return self.stored_at(self.smem.scale, t, j, g)
        return self.smem.scale.at[at, g, self.rows]

    def per_column(self, ref, t, j, at):
        """The groups' vectors, spread over the slot's weights: [64, columns]."""
        groups, shape = self.block.groups, (64, self.tile.block)

        def of_group(g):
            if self.tile.stored:
                v = pipeline.load_strided(self.stored_at(ref, t, j, g), self.gmem.x.dtype, 0)
            else:
                v = plgpu.load(ref.at[at, g, self.rows], layout=_LAYOUT.reduce(1))
            return lax.broadcast_in_dim(v, shape, [0])

        parts = [of_group(g) for g in range(groups.groups_per_slot)]
        if len(parts) == 1:
            return parts[0]
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_LAYOUT)
        return jnp.where(column < groups.group, *parts)

    def dequantized(self, t, j, at, piece=0):
        """A piece of the slot's weights as wgmma's register operand, in x's dtype."""
        gmem, smem, weight, group = self.gmem, self.smem, self.weight, self.group_of(piece)
        if not self.block.unpacked:
            return self.converted(t, j, at)
        codes = smem.w.bytes.at[at, self.rows]
        if weight.float4:
            count, pitch = self.block.groups.groups_per_slot, None
            if self.tile.stored:
                scales, pitch = [self.stored_at(smem.scale, t, j, count=count)], smem.scale.shape[2]
            else:
                scales = [self.scales_of(t, j, at, g) for g in range(count)]
            how = {"wide": self.tile.parts == 1, "scale_pitch": pitch}
            return unpack.to_bfloat16(weight, codes, scales, **how)
        scales = [] if gmem.scale is None else [self.scales_of(t, j, at, group)]
        zeros = None if gmem.zero is None else self.stored_at(smem.zero, t, j, group)
        if gmem.x.dtype.itemsize == 2:
            return unpack.to_bfloat16(weight, codes, scales, zeros)
        multiples = None if self.scaled else scales[0]
        how = {"piece": piece, "interleaved": weight.interleaved}
        return unpack.to_8_bits(gmem.x.dtype, codes, zeros, multiples, **how)

    def converted(self, t, j, at):
        """The slot's weights in x's dtype, by Pallas's own conversions."""
        gmem, smem, weight = self.gmem, self.smem, self.weight
        wide = plgpu.Layout.WGMMA_UPCAST_2X
        if gmem.w.dtype == jnp.int4:
            wide = plgpu.Layout.WGMMA_UPCAST_4X
        codes = plgpu.load(self.block.w_tiles.at[at, self.rows], layout=wide)
        a = plgpu.layout_cast(codes, _LAYOUT).astype(gmem.x.dtype)
        if weight.int_zero:
            a = a - self.per_column(smem.zero, t, j, at)  # exact: small integers
        if gmem.scale is not None:
            a = a * self.per_column(smem.scale, t, j, at)
        if weight.float_zero:
            a = a + self.per_column(smem.zero, t, j, at)
        return a

    # --- wgmma ---

    def tokens_at(self, at, piece=0):
        """The rows of x in slot ``at``."""
        return self.smem.x.tiles.at[at, piece]

    def sum_of_products(self, t, acc):
        """The sum over this warpgroup's slots, ``unroll`` of them at a time."""
        block, tile, stages = self.block, self.tile, self.tile.stages
        unroll = tile.unrolled(block.k)
        skip = (tile.parts - 1) * unroll

        def step(turn, at):
            places = [ring_next(at, u, stages) for u in range(unroll)]
            j = (turn * tile.parts + self.turn) * unroll
            for at in places:
                plgpu.barrier_wait(self.barrier.full.at[at])
            pieces = range(tile.pieces)
            weights = [
                [self.dequantized(t, j + u, at, piece) for piece in pieces]
                for u, at in enumerate(places)
            ]
            for at, of_slot in zip(places, weights, strict=True):
                for piece, a in enumerate(of_slot):
                    plgpu.wgmma(acc, a, self.tokens_at(at, piece).transpose((1, 0)))
            self.ahead.copy(j)
            for u, at in enumerate(places):
                plgpu.wgmma_wait((unroll - 1 - u) * tile.pieces)
                plgpu.barrier_arrive(self.barrier.empty.at[at])
            return ring_next(places[-1], 1 + skip, stages)

        turns = (block.steps // unroll - self.turn + tile.parts - 1) // tile.parts
        first = ring_slot(t * block.steps + self.turn * unroll, stages)
        lax.fori_loop(0, turns, step, first)
        return plgpu.wgmma_accumulator_load(acc, wait_n=None)

    def sum_of_scaled(self, t):
        """The float32 sum of every slot's sum times its group's scale."""
        block, tile = self.block, self.tile
        turns = (block.steps - self.turn + tile.parts - 1) // tile.parts
        nothing = plgpu.layout_cast(jnp.zeros((64, tile.tokens), jnp.float32), _LAYOUT)
        first = ring_slot(t * block.steps + self.turn, tile.stages)
        step = functools.partial(self.add_scaled, t)
        return lax.fori_loop(0, turns, step, (first, nothing))[1]

    def add_scaled(self, t, turn, carry):
        at, total = carry
        shape = 64, self.tile.tokens
        j = turn * self.tile.parts + self.turn
        plgpu.barrier_wait(self.barrier.full.at[at])
        a = self.dequantized(t, j, at)
        column = pipeline.load_strided(self.stored_at(self.smem.scale, t, j), jnp.float32, 0)
        if self.sum_dtype == jnp.float32:
            column = column * (1 / unpack.E4M3_STEP)

        def product(acc):
            plgpu.wgmma(acc, a, self.tokens_at(at).transpose((1, 0)))
            self.ahead.copy(j)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.barrier.empty.at[at])
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        sums = pl.run_scoped(product, plgpu.ACC(shape, self.sum_dtype))
        scales = lax.broadcast_in_dim(column, shape, [0])
        at = ring_next(at, self.tile.parts, self.tile.stages)
        return at, total + sums.astype(jnp.float32) * scales

    # --- sums of several warpgroups, and of two blocks ---

    def give_sum(self, t, acc) -> None:
        """Leave the sum of this warpgroup's turns to the first of those that share the rows."""
        block, barrier = self.block, self.barrier
        place = (self.turn - 1) * block.across + self.half
        pl.when(t > 0)(lambda: plgpu.barrier_wait(barrier.sums_empty.at[place]))
        self.smem.sums[place] = acc
        plgpu.barrier_arrive(barrier.sums_full.at[place])
        if self.tile.stored:
            plgpu.barrier_arrive(barrier.vectors_empty.at[lax.rem(t, block.vector_slots)])

    def over_turns(self, acc):
        """Add what the other warpgroups left."""
        total = acc
        for other in range(self.tile.parts - 1):
            place = other * self.block.across + self.half
            plgpu.barrier_wait(self.barrier.sums_full.at[place])
            total += plgpu.load(self.smem.sums.at[place], layout=_LAYOUT)
            plgpu.barrier_arrive(self.barrier.sums_empty.at[place])
        return total

    def over_blocks(self, t, m0, n0, acc) -> None:
        """Finish the tile, with ``split`` in one of the two blocks that have half of K each."""
        finish = functools.partial(self.finish, t, m0, n0)
        if self.tile.split == 1:
            return finish(acc)
        of_pair = self.smem.peer_sums.at[self.half // 2]  # of two warpgroups' rows one's are sent

        def sent():
            if self.block.by_tile:
                slot = lax.rem(t, self.block.vector_slots)
                if self.block.across == 1 and not self.tile.stored:
                    # The block finishes no tile, and must not leave before its copies have ended.
                    plgpu.barrier_wait(self.barrier.vectors_full.at[slot])
                plgpu.barrier_arrive(self.barrier.vectors_empty.at[slot])

        return meet_peer(
            t,
            acc,
            self.block.k_part,
            lambda: self.half % 2,
            of_pair,
            self.barrier.peer_full,
            self.barrier.peer_empty.at[self.half],
            finish,
            sent,
        )

    # --- acc * row + bias -> 16 bits, transposed -> TMA store ---

    def finish(self, t, m0, n0, acc) -> None:
        block, gmem, smem, barrier = self.block, self.gmem, self.smem, self.barrier
        out, width = smem.out.tiles, smem.out.tiles.shape[2]
        slot = lax.rem(t, block.vector_slots)
        if block.by_tile and not self.tile.stored:
            plgpu.barrier_wait(barrier.vectors_full.at[slot])

        def of_rows(name):
            if getattr(gmem, name) is None:
                return None
            v = plgpu.load(getattr(smem, name).at[slot, self.rows], layout=_LAYOUT.reduce(1))
            return lax.broadcast_in_dim(v.astype(jnp.float32), (64, width), [0])

        row_scale, row_bias = of_rows("row"), of_rows("bias")
        if self.weight.float4:  # the rest of what makes its codes floats
            row_scale = FLOAT4_REST if row_scale is None else row_scale * FLOAT4_REST
        if block.by_tile and gmem.token is None:
            plgpu.barrier_arrive(barrier.vectors_empty.at[slot])
        pieces = range(0, self.tile.tokens, width)
        for piece, c in enumerate(pieces):
            y = acc[:, c : c + width]
            if gmem.token is not None:
                v = plgpu.load(smem.token.at[slot, pl.ds(c, width)], layout=_LAYOUT.reduce(0))
                y = y.astype(jnp.float32) * lax.broadcast_in_dim(v, (64, width), [1])
            if row_scale is not None:
                y = y * row_scale
            if row_bias is not None:
                y = y + row_bias
            # After an odd number of stores the last of a tile was from the next one's first place.
            pending = 0 if piece == 0 and len(pieces) % 2 else 1
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            out.at[self.half, piece % 2].transpose((1, 0))[...] = plgpu.layout_cast(
                y.astype(gmem.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                smem.out.rows.at[self.half, piece % 2],
                gmem.out.at[pl.ds(m0 + c, width), pl.ds(n0 + 64 * self.half, 64)],
            )
        if gmem.token is not None:
            plgpu.barrier_arrive(barrier.vectors_empty.at[slot])

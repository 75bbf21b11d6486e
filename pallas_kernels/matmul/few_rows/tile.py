"""The matmul of a decode step on Hopper: ``x[M, K] w[N, K]^T``, M <= 16, and what stands around it.

Contract.  w is int4, int8 or float8 in groups or whole rows, MXFP4, NVFP4, or 16-bit floats. Its
layout is the plain one, so loading a model moves nothing.  x is bfloat16 or float16.  The weights
are the 16-row operand of mma.m16n8k16, so 8 tokens cost one instruction.

Division of work. One block of 16 warps per SM, alone or in clusters of ``split`` that share K. A
cluster walks over tiles of 16 rows of w. A warp owns the same run of columns of every tile and
keeps x's fragments for it in registers (or, ``resident``, in shared memory). Each lane copies its
own weights through its own places in a ring in shared memory (cp.async), 16 bytes of one row at a
time. It reads back only what it wrote: within a batch of tiles no warp waits for another.

    start      all    the first of w -> L2 | the kernel before has ended
               all    x, scales of the first batch -> smem, ring filled     (``tile_x``, ``Copies``)
               warp   its run of x -> registers | barrier
    run_tile   warp   wait, codes -> registers, refill, dequantize, mma, partial sum -> smem
                                                                        (``tile_loop``, ``widen``)
    run_batch  all    barrier | sum of the warps' partials in a fixed order (with split > 1 through
                      the peers' shared memory), fused parts, one rounding, store  (``PartialSums``)

Copies: each lane copies its own codes by cp.async (``Copies.codes``).  All threads copy a batch's
scales, bias and residual by cp.async.  A warp copies its own run of x, or with a norm all threads
load x through registers.
Waits: a lane waits for its own copies (``copies_wait``).  All warps meet at a block barrier at the
end of ``start``, and at one in each ``run_batch`` before sums are added.  Blocks of a cluster meet
once each batch, and at the end.
Writes: all threads store a batch's outputs; with ``split`` each block those of every split-th tile.
Without clusters (``apart``) blocks do not meet.  Each stores float32 sums of its part of K, and XLA
adds them, bias and residual (``kernel``).

Fusion.  A norm, out = rsqrt(mean x^2 + eps) * ((x * gamma) W): x then comes by registers instead of
cp.async, is multiplied on its way to shared memory, and the factor multiplies the sum at the end.
The same way takes a pending term that is added to x: every block adds it, and the first cluster
stores the sum.  Scales are copied a batch ahead, bias and residual at the start of their own
batch.  With SwiGLU the steps are pairs of a tile of gate and its tile of up. The warps sum both at
once.

Order of columns. Any order will do for mma, if both operands agree. A lane with quad index c takes
columns 32 c .. 32 c + 31 of a block of 128 (int8: 16 of 64, floats: 8 of 32). A bit trick widens
two weights at once. It takes nibbles i and i + 4 of a word (bytes i and i + 2), so x's pairs are
permuted once to match.

Numerics.  A code minus its zero point is exact in bfloat16 and float16.  In groups of at least one
block, with symmetric or integer zeros, the group's sum is scaled in float32.  With smaller groups
or floating zeros (bfloat16 only) the weight is rounded once to bfloat16 (``fold``).  x * gamma is
rounded once to bfloat16.  Scales of float4 multiply the weight exactly, and NVFP4's unit the sum of
a row.  Everything else is float32, added in an order that depends on the
weight, M and what is fused alone.

Floor, K = 4096, N = 14336, int4 in groups of 128 on an H200: 29.4 MB of codes + 0.9 of scales at
4.3 TB/s, 7.0 us.  Result: 9.9 with one row, 10.7 with 8, 12.4 with 16.  The other shapes and
attempts: ``docs/lab/matmul.md``.  Command: ``python -m benchmarks.kernels.matmul
quantized_matmul``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.block import Params, TileBlock
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import PITCH, SLOT, WARPS, TileDivision
from pallas_kernels.matmul.few_rows.several import RowOffsets, Several
from pallas_kernels.matmul.few_rows.tile_loop import Copies, TileLoop
from pallas_kernels.matmul.few_rows.tile_x import NormedX, StagedX
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """partial: shared memory of the partial sums."""

    block: TileBlock
    params: Params
    partial: Value
    normed: NormedX | None

    def partial_at(self, slot, warp, token, row):
        per_warp = 4 * self.block.plan.n_tiles * 8 * PITCH
        return (
            self.partial
            + slot * (WARPS * per_warp)
            + warp * per_warp
            + token * (4 * PITCH)
            + row * 4
        )

    def store_partial(self, slot, total) -> None:
        block = self.block
        at = self.partial_at(slot, block.warp, block.quad * 2, block.row)
        for t in range(block.plan.n_tiles):
            for i in range(4):
                p.store_shared(at, [total[t][i]], 4 * ((8 * t + i % 2) * PITCH + 8 * (i // 2)))

    def reduce(self, batch, buffer, count: int) -> None:
        """``count`` tiles; with SwiGLU a tile of gate and one of up make one of the output."""
        block, plan, parts = self.block, self.block.plan, 2 if self.block.plan.pairs else 1
        values, first = 16 * plan.m, buffer * plan.batch

        def token_and_row(index):
            rest = index % values
            return rest >> 4, rest & 15

        def finish(index, t, value_of):
            """Finish output tile t; value_of(slot, token, row): a sum over all of K."""
            token, row = token_and_row(index)
            slots = [first + t * parts + i for i in range(parts)]
            sums = [value_of(slot, token, row) for slot in slots]
            step = batch * (plan.batch // parts) + t
            tile = step * plan.clusters + block.cluster
            self.write(sums, slots, tile, token, row)

        def whole(index):
            finish(index, index // values, lambda *where: self.over_warps(*where)[1])

        def of_block(index):
            at, value = self.over_warps(first + index // values, *token_and_row(index))
            p.store_shared(at, [value])

        def of_cluster(index):
            # Each block finishes every split-th tile of the output.
            t = index // values * plan.split + block.rank
            p.when(t < count // parts, lambda: finish(index, t, self.over_blocks))

        if plan.split == 1 or plan.apart:
            block.threads(count // parts * values, whole)
            return
        block.threads(count * values, of_block)
        p.cluster_barrier()  # all blocks' sums are there
        block.threads(-(-count // parts // plan.split) * values, of_cluster)

    def over_warps(self, slot, token, row):
        """(where the first warp's partial sum is, the sum over the warps)."""
        plan = self.block.plan
        at = self.partial_at(slot, p.ci(0), token, row)
        value = p.load_float(at)
        for w in range(1, plan.warps):
            warp_bytes = 4 * plan.n_tiles * 8 * PITCH
            value = value + p.load_float(at, w * warp_bytes)
        return at, value

    def over_blocks(self, slot, token, row):
        """The sum over the cluster's blocks of what ``over_warps`` found there."""
        at = self.partial_at(slot, p.ci(0), token, row)
        blocks = [p.load_peer(p.peer_address(at, i)) for i in range(self.block.plan.split)]
        return functools.reduce(operator.add, blocks)

    def write(self, sums, slots, tile, token, row) -> None:
        operands, params = self.block.operands, self.params

        def biases():
            at = params.base + row * 4 + params.bias_at
            places = [at + slot * params.tile_bytes for slot in slots]
            for place in places:
                yield p.load_float(place)

        def residual():
            at = slots[0] * params.tile_bytes + token * 32 + row * 2
            old = p.load_shared_narrow(params.base + at, "u16", params.residual_at)
            yield p.widen(old, operands.kinds["out"])

        def store():
            (out,) = operands.finish(
                sums,
                factor=None if self.normed is None else self.normed.factor(token),
                biases=None if operands.bias is None else biases(),
                residual=None if operands.residual is None else residual(),
            )
            column = tile * 16 + row
            index = token * (16 * self.block.out_tiles) + column
            if self.block.plan.apart:
                own = 16 * self.block.out_tiles * self.block.plan.m
                index = index + self.block.rank * own
            operands.store(index, out)

        p.when(tile < self.block.out_tiles, store)


# --- the kernel -----------------------------------------------------------------------------------


# Shared memory of a block, as ``TileDivision.scratch_sizes`` has it; the last with a norm.
SCRATCH = "partial", "ring", "params", "squares"


class TileProgram:
    """The program of one block.  Everything is emitted while the kernel is traced.

    smem: partial (partial sums and x), ring, params (scales and what else a tile needs) and, with a
    norm, squares of x.
    """

    def __init__(
        self,
        plan: TileDivision,
        operands: FewRowsOperands,
        smem: SimpleNamespace,
        several: Several | None = None,
    ):
        normed = operands.gamma is not None
        names = SCRATCH if normed else SCRATCH[:-1]
        at = {name: p.shared_address(getattr(smem, name)) for name in names}
        block = TileBlock.here(plan, operands)
        x_mine = at["partial"] + block.working * (2 * plan.m * plan.k_warp)
        if plan.resident:
            x_mine = x_mine + plan.partial_bytes
        lane_k = block.k0 + block.quad * (block.columns // 4)
        weight = operands.weight
        row_bytes = operands.k * weight.bits // 8
        w = p.offset(operands.w, block.row, row_bytes)
        shift = 1 if weight.bits == 4 else 0
        w = p.offset(w, block.k0 * 2 if weight.plain else block.k0 >> shift)
        w = p.offset(w, block.quad, 16)
        ring = at["ring"] + block.warp * 1024 + block.lane * 16
        layout = Params.of(at["params"], block)
        loop = TileLoop.of(block, layout, lane_k)
        places = {
            "w": RowOffsets(w, 16 * row_bytes),
            "scale": RowOffsets(operands.scale, 16 * layout.scale_row),
            "zero": RowOffsets(operands.zero, 16 * layout.zero_row),
        }
        if several is not None:
            block = dataclasses.replace(block, cluster=block.cluster - several.begin)
            places = several.added_to(places, operands)
        self.plan, self.operands, self.block = plan, operands, block
        self.copies = Copies(block, layout, ring, places)
        self.loop = dataclasses.replace(loop, block=block)
        self.staged = StagedX(block, x_mine)
        self.normed = None
        if normed:
            self.normed = NormedX.of(block, self.staged, at["squares"])
        self.sums = PartialSums(block, layout, at["partial"], self.normed)

    def run(self) -> None:
        plan = self.plan
        self.start()
        full = (plan.per - 1) // plan.batch
        slot = [p.ci(0)]
        if full:
            slot = p.loop(
                0, full, 1, slot, lambda b, c: self.run_batch(b, c[0], plan.batch, final=False)
            )
        self.run_batch(p.ci(full), slot[0], plan.per - full * plan.batch, final=True)
        if plan.split > 1 and not plan.apart:
            p.cluster_barrier()  # no block may leave while others read its shared memory

    def start(self) -> None:
        """x -> registers, scales of the first batch -> shared memory, the ring filled."""
        normed, copies = self.normed, self.copies
        self.operands.prefetch(self.block.thread)
        copies.prefetch()
        p.await_kernel()
        if normed is None:
            self.block.working_warps(self.staged.copy)
        else:
            loaded = normed.begin()
        copies.scales(p.ci(0), p.ci(0))
        p.copies_commit()
        copies.fill()
        if normed is not None:
            normed.end(loaded)
        p.copies_wait(self.plan.depth)
        p.warp_barrier()
        self.x = self.staged.fragments()
        p.barrier()
        if normed is not None:
            normed.sum_squares()

    def run_batch(self, batch, slot, count: int, *, final: bool):
        """``count`` tiles; [the ring's slot behind them]."""
        plan, n_blocks, copies = self.plan, self.block.n_blocks, self.copies
        buffer = batch & 1 if plan.buffers == 2 else p.ci(0)
        copies.addends(batch, buffer, count)
        if not final:
            copies.scales(batch + 1, buffer ^ 1)
        last = min(count, -(-plan.depth // n_blocks)) if final else 0
        if count > last:
            (slot,) = p.loop(
                0,
                count - last,
                1,
                [slot],
                lambda i, carried: [self.run_tile(batch, buffer, i, carried[0], None)],
            )
        for i in range(count - last, count):
            slot = self.run_tile(batch, buffer, p.ci(i), slot, count - i)
        # The next batch's scales are in the first group of this one.
        p.copies_wait(min(plan.depth, count * n_blocks) - 1)
        p.barrier()
        self.sums.reduce(batch, buffer, count)
        return [slot]

    def run_tile(self, batch, buffer, i, slot, left: int | None):
        """Tile i of a batch.  slot: byte offset in the ring of the codes that come next; left: how
        many tiles there are from this one on, or None if they outlast the ring."""
        slots = [slot]
        next_codes = functools.partial(self.next_codes, slots, batch, i, left)
        at = buffer * self.plan.batch + i
        self.sums.store_partial(at, self.loop.run(at, self.x, next_codes))
        return slots[-1]

    def next_codes(self, slots: list, batch, i, left: int | None, piece: int):
        """The codes of a piece of the tile, and its place refilled; slots: grows by the next."""
        depth, n_blocks, copies = self.plan.depth, self.block.n_blocks, self.copies
        place = copies.ring + slots[-1]
        p.copies_wait(depth - 1)
        rows = [p.load_shared(place, 4, 512 * half) for half in range(2)]
        later = piece + depth
        if left is None or later < left * n_blocks:
            step = batch * self.plan.batch + i + later // n_blocks
            copies.codes(step, later % n_blocks, place)
        p.copies_commit()
        moved = slots[-1] + SLOT
        slots.append(p.where(moved < depth * SLOT, moved, 0))
        return rows

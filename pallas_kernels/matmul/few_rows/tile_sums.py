"""The tile kernel's end: the warps' and blocks' partial sums added in a fixed order, then what is
fused behind the product, one rounding, and the store."""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.block import Params, TileBlock
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import PITCH, WARPS
from pallas_kernels.matmul.few_rows.tile_x import NormedX
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """partial: shared memory of the partial sums."""

    block: TileBlock
    operands: FewRowsOperands
    params: Params
    partial: Value
    normed: NormedX | None

    def partial_at(self, slot, warp, token, row):
        per_warp = 4 * self.block.plan.n_tiles * 8 * PITCH
        return p.add(
            self.partial,
            p.mul(slot, WARPS * per_warp),
            p.mul(warp, per_warp),
            p.mul(token, 4 * PITCH),
            p.mul(row, 4),
        )

    def store_partial(self, slot, total) -> None:
        block = self.block
        at = self.partial_at(slot, block.warp, p.mul(block.quad, 2), block.row)
        for t in range(block.plan.n_tiles):
            for i in range(4):
                p.store_shared(at, [total[t][i]], 4 * ((8 * t + i % 2) * PITCH + 8 * (i // 2)))

    def reduce(self, batch, buffer, count: int) -> None:
        """``count`` tiles; with SwiGLU a tile of gate and one of up make one of the output."""
        block, plan = self.block, self.block.plan
        parts = 2 if plan.pairs else 1
        values = 16 * plan.m
        slot_of = functools.partial(p.add, p.mul(buffer, plan.batch))

        def token_and_row(index):
            rest = arith.remui(index, p.ci(values))
            return p.shift_right(rest, 4), arith.andi(rest, p.ci(15))

        def over_warps(slot, token, row):
            at = self.partial_at(slot, p.ci(0), token, row)
            value = p.load_float(at)
            for w in range(1, plan.warps):
                warp_bytes = 4 * plan.n_tiles * 8 * PITCH
                value = arith.addf(value, p.load_float(at, w * warp_bytes))
            return at, value

        def finish(index, t, value_of):
            """Finish output tile t; value_of(slot, token, row): a sum over all of K."""
            token, row = token_and_row(index)
            slots = [slot_of(p.mul(t, parts), i) for i in range(parts)]
            sums = [value_of(slot, token, row) for slot in slots]
            step = p.add(p.mul(batch, plan.batch // parts), t)
            tile = p.add(p.mul(step, plan.clusters), block.cluster)
            self.write(sums, slots, tile, token, row)

        if plan.split == 1 or plan.apart:

            def whole(index):
                t = arith.divui(index, p.ci(values))
                finish(index, t, lambda *where: over_warps(*where)[1])

            block.threads(count // parts * values, whole)
            return

        def of_block(index):
            slot = slot_of(arith.divui(index, p.ci(values)))
            at, value = over_warps(slot, *token_and_row(index))
            p.store_shared(at, [value])

        block.threads(count * values, of_block)
        p.cluster_barrier()

        def over_blocks(slot, token, row):
            at = self.partial_at(slot, p.ci(0), token, row)
            blocks = [p.load_peer(p.peer_address(at, i)) for i in range(plan.split)]
            return functools.reduce(arith.addf, blocks)

        def of_cluster(index):
            # Each block finishes every split-th tile of the output.
            t = p.add(p.mul(arith.divui(index, p.ci(values)), plan.split), block.rank)
            p.when(p.less(t, count // parts), lambda: finish(index, t, over_blocks))

        block.threads(-(-count // parts // plan.split) * values, of_cluster)

    def write(self, sums, slots, tile, token, row) -> None:
        operands, params = self.operands, self.params

        def biases():
            at = p.add(params.base, params.bias_at, p.mul(row, 4))
            places = [p.add(at, p.mul(slot, params.tile_bytes)) for slot in slots]
            for place in places:
                yield p.load_float(place)

        def residual():
            at = p.add(p.mul(slots[0], params.tile_bytes), p.mul(token, 32), p.mul(row, 2))
            old = p.load_shared_narrow(p.add(params.base, at), "u16", params.residual_at)
            yield p.widen(old, operands.kinds["out"])

        def store():
            (out,) = operands.finish(
                sums,
                factor=None if self.normed is None else self.normed.factor(token),
                biases=None if operands.bias is None else biases(),
                residual=None if operands.residual is None else residual(),
            )
            column = p.add(p.mul(tile, 16), row)
            index = p.add(p.mul(token, 16 * self.block.out_tiles), column)
            if self.block.plan.apart:
                own = 16 * self.block.out_tiles * self.block.plan.m
                index = p.add(index, p.mul(self.block.rank, own))
            operands.store(index, out)

        p.when(p.less(tile, self.block.out_tiles), store)

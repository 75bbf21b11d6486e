"""The tile kernel's end: the warps' and blocks' partial sums added in a fixed order, then what is
fused behind the product, one rounding, and the store."""

from __future__ import annotations

import dataclasses
import functools
import operator

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.block import Params, TileBlock
from pallas_kernels.matmul.few_rows.plan import PITCH, WARPS
from pallas_kernels.matmul.few_rows.tile_x import NormedX
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

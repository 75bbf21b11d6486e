"""The decode matmul's end: the warps' and blocks' partial sums added in a fixed order, then what is
fused behind the product, one rounding, and the store."""

from __future__ import annotations

import functools

from jax._src.lib.mlir.dialects import arith

from pallas_kernels import mosaic as p
from pallas_kernels.fused_parts import silu
from pallas_kernels.matmul.few_rows.plan import PITCH, WARPS

_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


class Sums:
    """The part of a block's program that ends a batch; see ``matmul.few_rows.kernel``."""

    def partial_at(self, slot, warp, token, row):
        per_warp = 4 * self.plan.n_tiles * 8 * PITCH
        return p.add(
            self.partial,
            p.mul(slot, WARPS * per_warp),
            p.mul(warp, per_warp),
            p.mul(token, 4 * PITCH),
            p.mul(row, 4),
        )

    def store_partial(self, slot, total) -> None:
        at = self.partial_at(slot, self.warp, p.mul(self.quad, 2), self.row)
        for t in range(self.plan.n_tiles):
            for i in range(4):
                p.store_shared(at, total[t][i], 4 * ((8 * t + i % 2) * PITCH + 8 * (i // 2)))

    def reduce(self, batch, buffer, count: int) -> None:
        """``count`` tiles; with SwiGLU a tile of gate and one of up make one of the output."""
        plan = self.plan
        parts = 2 if plan.pairs else 1
        values = 16 * plan.m
        slot_of = functools.partial(p.add, p.mul(buffer, plan.batch))

        def token_and_row(index):
            rest = arith.remui(index, p.ci(values))
            return p.shift_right(rest, 4), arith.andi(rest, p.ci(15))

        def over_warps(slot, token, row):
            at = self.partial_at(slot, p.ci(0), token, row)
            value = p.load_shared(at)
            for w in range(1, plan.warps):
                warp_bytes = 4 * plan.n_tiles * 8 * PITCH
                value = arith.addf(value, p.load_shared(at, w * warp_bytes))
            return at, value

        def finish(index, t, value_of):
            """Of output tile t of the batch; value_of(slot, token, row): a sum over all of K."""
            token, row = token_and_row(index)
            slots = [slot_of(p.mul(t, parts), i) for i in range(parts)]
            sums = [value_of(slot, token, row) for slot in slots]
            step = p.add(p.mul(batch, plan.batch // parts), t)
            tile = p.add(p.mul(step, plan.clusters), self.cluster)
            self.write(sums, slots, tile, token, row)

        if plan.split == 1:

            def whole(index):
                t = arith.divui(index, p.ci(values))
                finish(index, t, lambda *where: over_warps(*where)[1])

            self.threads(count // parts * values, whole)
            return

        def of_block(index):
            slot = slot_of(arith.divui(index, p.ci(values)))
            p.store_shared(*over_warps(slot, *token_and_row(index)))

        self.threads(count * values, of_block)
        p.cluster_barrier()

        def over_blocks(slot, token, row):
            at = self.partial_at(slot, p.ci(0), token, row)
            blocks = [p.load_peer(p.peer_address(at, i)) for i in range(plan.split)]
            return functools.reduce(arith.addf, blocks)

        def of_cluster(index):
            # Each block finishes every split-th tile of the output.
            t = p.add(p.mul(arith.divui(index, p.ci(values)), plan.split), self.rank)
            p.when(p.less(t, count // parts), lambda: finish(index, t, over_blocks))

        self.threads(-(-count // parts // plan.split) * values, of_cluster)

    def write(self, sums, slots, tile, token, row) -> None:
        def store():
            values = sums
            if self.gamma is not None:
                factor = self.factor(token)
                values = [arith.mulf(v, factor) for v in values]
            if self.bias is not None:
                at = p.add(self.params, self.bias_at, p.mul(row, 4))
                places = [p.add(at, p.mul(slot, self.plan.param_bytes)) for slot in slots]
                values = [
                    arith.addf(v, p.load_shared(b)) for v, b in zip(values, places, strict=True)
                ]
            out = arith.mulf(silu(values[0]), values[1]) if self.plan.pairs else values[0]
            if self.residual is not None:
                at = p.add(p.mul(slots[0], self.plan.param_bytes), p.mul(token, 32), p.mul(row, 2))
                old = p.load_shared_narrow(p.add(self.params, at), "u16", self.residual_at)
                out = arith.addf(out, p.widen(old, self.out_kind))
            column = p.add(p.mul(tile, 16), row)
            at = p.add(p.mul(token, 16 * self.out_tiles), column)
            at = p.offset(self.out, at, _BYTES[self.out_kind])
            if self.out_kind == "f32":
                p.store_global(at, out)
            else:
                p.store_global_half(at, p.narrow(out, self.out_kind))

        p.when(p.less(tile, self.out_tiles), store)

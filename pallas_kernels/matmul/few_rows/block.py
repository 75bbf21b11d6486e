"""Where a thread of the tile kernel stands, and what its block has of the product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import THREADS, WARPS, TileDivision
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class TileBlock:
    """row, quad: the lane's of an mma's operands.  cluster, rank: the block's.  working: the warp,
    or the last that has columns of its own; k0: the first of its columns."""

    plan: TileDivision
    scheme: FewRowsScheme
    n: int
    k: int
    thread: Value
    warp: Value
    lane: Value
    row: Value
    quad: Value
    cluster: Value
    rank: Value
    working: Value
    k0: Value

    @classmethod
    def here(cls, plan: TileDivision, scheme: FewRowsScheme, n: int, k: int) -> TileBlock:
        thread = p.register("tid.x")
        warp, lane = p.shift_right(thread, 5), arith.andi(thread, p.ci(31))
        row, quad = p.shift_right(lane, 2), arith.andi(lane, p.ci(3))
        if plan.apart:
            block = p.register("ctaid.x")
            cluster, rank = (f(block, p.ci(plan.split)) for f in (arith.divui, arith.remui))
        elif plan.split > 1:
            cluster, rank = p.register("clusterid.x"), p.register("cluster_ctarank")
        else:
            cluster, rank = p.register("ctaid.x"), p.ci(0)
        # Warps without their own columns repeat those of the last warp; their sums are not read.
        working = p.minimum(warp, plan.warps - 1)
        k0 = p.mul(p.add(p.mul(rank, plan.warps), working), plan.k_warp)
        block = cls(plan, scheme, n, k, thread, warp, lane, row, quad, cluster, rank, working, k0)
        if block.overlap:
            block = dataclasses.replace(block, k0=p.minimum(k0, k - plan.k_warp))
        return block

    @property
    def overlap(self) -> int:
        """Columns that the last warp has and the one before it too."""
        return self.plan.split * self.plan.warps * self.plan.k_warp - self.k

    @property
    def n_blocks(self) -> int:
        """Blocks of columns of a warp."""
        return self.plan.k_warp // self.scheme.columns

    @property
    def out_tiles(self) -> int:
        return self.n // 16 // (2 if self.plan.pairs else 1)

    def working_warps(self, body: Callable[[], object]) -> None:
        """body() in the warps that have columns of their own."""
        if self.plan.warps < WARPS:
            p.when(p.less(self.warp, self.plan.warps), body)
        else:
            body()

    def threads(self, count: int, body: Callable[[Value], object]) -> None:
        """body(i) for i below count, divided among the block's threads."""
        for first in range(0, count, THREADS):
            index = p.add(self.thread, first)
            if first + THREADS <= count:
                body(index)
            else:
                p.when(p.less(index, count), functools.partial(body, index))

    def tile_of(self, step: Value) -> Value:
        """Tile of w of a step; a step too many is computed on the last tile and dropped.  With
        SwiGLU every second step is the tile of up that belongs to the tile of gate before."""
        if not self.plan.pairs:
            tile = p.add(p.mul(step, self.plan.clusters), self.cluster)
            return p.minimum(tile, self.out_tiles - 1)
        tile = p.add(p.mul(p.shift_right(step, 1), self.plan.clusters), self.cluster)
        up = p.mul(arith.andi(step, p.ci(1)), self.out_tiles)
        return p.add(p.minimum(tile, self.out_tiles - 1), up)


@dataclasses.dataclass(frozen=True)
class Params:
    """The parameters of the tiles in flight, in shared memory: 16 rows of scales, of zeros, the
    bias, the residual.  scale_row, zero_row: bytes; bias_at, residual_at: of a tile's."""

    base: Value
    tile_bytes: int
    scale_row: int
    zero_row: int
    bias_at: int
    residual_at: int

    @classmethod
    def of(
        cls, base: Value, plan: TileDivision, scheme: FewRowsScheme, operands: FewRowsOperands
    ) -> Params:
        scale_row, zero_row = scheme.scale_row, scheme.zero_row
        bias_at = 16 * (scale_row + zero_row)
        residual_at = bias_at + (0 if operands.bias is None else 64)
        return cls(base, plan.param_bytes, scale_row, zero_row, bias_at, residual_at)

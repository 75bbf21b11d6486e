"""Where a thread of the tile kernel stands, and what its block has of the product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import THREADS, WARPS, TileDivision, columns_of, folds
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class TileBlock:
    """row, quad: the lane's of an mma's operands.  cluster, rank: the block's.  working: the warp,
    or the last that has columns of its own; k0: the first of its columns."""

    plan: TileDivision
    operands: FewRowsOperands
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
    def here(cls, plan: TileDivision, operands: FewRowsOperands) -> TileBlock:
        thread = p.register("tid.x")
        warp, lane = thread >> 5, thread & 31
        row, quad = lane >> 2, lane & 3
        if plan.apart:
            block = p.register("ctaid.x")
            cluster, rank = block // plan.split, block % plan.split
        elif plan.split > 1:
            cluster, rank = p.register("clusterid.x"), p.register("cluster_ctarank")
        else:
            cluster, rank = p.register("ctaid.x"), p.ci(0)
        # Warps without their own columns repeat those of the last warp; their sums are not read.
        working = p.minimum(warp, plan.warps - 1)
        k0 = (rank * plan.warps + working) * plan.k_warp
        place = thread, warp, lane, row, quad, cluster, rank, working, k0
        block = cls(plan, operands, *place)
        if block.overlap:
            block = dataclasses.replace(block, k0=p.minimum(k0, operands.k - plan.k_warp))
        return block

    @property
    def weight(self) -> StoredWeight:
        return self.operands.weight

    @property
    def kind(self) -> str:
        """The kind of x's floats, which the weights become too."""
        return self.operands.kinds["x"]

    @property
    def columns(self) -> int:
        """Columns of a block of w: 4 lanes x 4 words."""
        return columns_of(self.weight)

    @property
    def folds(self) -> bool:
        """Whether scales multiply the weights."""
        return folds(self.weight)

    @property
    def overlap(self) -> int:
        """Columns that the last warp has and the one before it too."""
        return self.plan.split * self.plan.warps * self.plan.k_warp - self.operands.k

    @property
    def n_blocks(self) -> int:
        """Blocks of columns of a warp."""
        return self.plan.k_warp // self.columns

    @property
    def out_tiles(self) -> int:
        return self.operands.n // 16 // (2 if self.plan.pairs else 1)

    def working_warps(self, body: Callable[[], object]) -> None:
        """body() in the warps that have columns of their own."""
        if self.plan.warps < WARPS:
            p.when(self.warp < self.plan.warps, body)
        else:
            body()

    def threads(self, count: int, body: Callable[[Value], object]) -> None:
        """body(i) for i below count, divided among the block's threads."""
        for first in range(0, count, THREADS):
            index = self.thread + first
            if first + THREADS <= count:
                body(index)
            else:
                p.when(index < count, functools.partial(body, index))

    def tile_of(self, step: Value) -> Value:
        """Tile of w of a step; a step too many is computed on the last tile and dropped.  With
        SwiGLU every second step is the tile of up that belongs to the tile of gate before."""
        if not self.plan.pairs:
            tile = step * self.plan.clusters + self.cluster
            return p.minimum(tile, self.out_tiles - 1)
        tile = (step >> 1) * self.plan.clusters + self.cluster
        up = (step & 1) * self.out_tiles
        return p.minimum(tile, self.out_tiles - 1) + up


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
    def of(cls, base: Value, block: TileBlock) -> Params:
        scale_row, zero_row = block.weight.scale_row, block.weight.zero_row
        bias_at = 16 * (scale_row + zero_row)
        residual_at = bias_at + (0 if block.operands.bias is None else 64)
        return cls(base, block.plan.param_bytes, scale_row, zero_row, bias_at, residual_at)

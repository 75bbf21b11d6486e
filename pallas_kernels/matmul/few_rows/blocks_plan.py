"""How one kernel divides the products of one x with several weights: arithmetic only.

One row takes the program of one row (``row``) if the largest group's product alone would. Else all
weights take tiles.  A launch has blocks of one size, so the groups share one program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason, named_plan
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import (
    WARPS,
    RowDivision,
    RowPlan,
    TileDivision,
    row_plan,
    tile_plan,
)


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights of one form, their numbers of rows, and the blocks that they have from ``begin``."""

    division: RowDivision | TileDivision
    rows: tuple[int, ...]
    begin: int

    @property
    def blocks(self) -> int:
        return blocks_of(self.division)

    @property
    def firsts(self) -> list[int]:
        """The first row, or tile, of each weight but the first."""
        piece = 1 if isinstance(self.division, RowDivision) else 16
        return [end // piece for end in itertools.accumulate(self.rows[:-1])]


@dataclasses.dataclass(frozen=True)
class BlocksPlan:
    """The division of one x's products with several weights."""

    kernel: ClassVar[str] = "quantized_matmul_blocks_mosaic"
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return str([group.division for group in self.groups])


def blocks_of(division: RowDivision | TileDivision) -> int:
    """Return the number of blocks, or of clusters that share K."""
    return division.blocks if isinstance(division, RowDivision) else division.clusters


def divide_blocks(
    calls: Sequence[MatmulCall], rows: Sequence[tuple[int, ...]], *, by_rows: bool
) -> BlocksPlan | Reason:
    """Return the plan of a launch.

    calls: with each group's weights as one.  rows: those of every weight in it.  by_rows: takes the
    program of one row where each group has a plan of it.
    """
    plans = _row_plans(calls) if by_rows else None
    found = _tile_plans(calls) if plans is None else plans
    if isinstance(found, Reason):
        return found
    begins = itertools.accumulate(map(blocks_of, found), initial=0)
    return BlocksPlan(tuple(Group(*parts) for parts in zip(found, rows, begins, strict=False)))


def _row_plans(calls: Sequence[MatmulCall]) -> list[RowDivision] | None:
    """The largest group leaves whole SMs to the others where that costs it no round; these have as
    few blocks as give each warp a unit."""
    plans = []
    for call in calls:
        plan = named_plan(row_plan(call))
        if not isinstance(plan, RowPlan):
            return None
        plans.append(plan.divide(call))
    main = max(range(len(plans)), key=lambda i: calls[i].n)
    largest, of_an_sm = plans[main], max(1, WARPS // plans[main].warps)
    plans = [dataclasses.replace(found, warps=largest.warps, spread=False) for found in plans]
    others = sum(found.blocks for i, found in enumerate(plans) if i != main)
    fewer = dataclasses.replace(largest, sms=max(1, largest.sms - -(-others // of_an_sm)))
    plans[main] = fewer if fewer.rounds == largest.rounds else largest
    return plans


def _tile_plans(calls: Sequence[MatmulCall]) -> list[TileDivision] | Reason:
    """The largest group leaves SMs to the others where that costs it no time."""
    plans = []
    for call in calls:
        found = tile_plan(call)
        if isinstance(found, Reason):
            return found
        plans.append(found.divide(call))
    if len(plans) > 1 and any(found.split > 1 for found in plans):
        return Reason("weights that are stored differently, and K divided among blocks")
    if any(found.apart for found in plans):
        return Reason("K is divided among blocks that are no cluster")
    if any(found.m < call.m for found, call in zip(plans, calls, strict=True)):
        return Reason(f"{calls[0].m} rows need more than shared memory holds")
    if len(plans) > 1:
        main = max(range(len(plans)), key=lambda i: calls[i].n)
        fewest = -(-calls[main].n // 16 // plans[main].per)
        others = sum(found.clusters for i, found in enumerate(plans) if i != main)
        clusters = max(fewest, min(plans[main].clusters, gpu().sms - others))
        plans[main] = dataclasses.replace(plans[main], clusters=clusters)
    return plans

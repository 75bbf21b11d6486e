"""The plans that dispatch can return, listed by op and card.

A planner chooses among the tiles of its tables.  The sizes M, N and K enter when a call is divided
by its plan, so that the plans of an op are few.  ``tests/golden/plans`` records what proves each of
them, and a test compares the record with these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pallas_kernels.device import gpu, planned_for
from pallas_kernels.dispatch import Plan
from pallas_kernels.matmul.few_rows.plan import row_plans, tile_plans
from pallas_kernels.matmul.many_rows.plan import gated_tile, pair_plans, weight_plans
from pallas_kernels.matmul.mid_rows.plan import mid_plans


def _quantized_matmul() -> Sequence[Plan]:
    many = [*pair_plans(), *weight_plans()] if gpu().wgmma else mid_plans()
    return [*row_plans(), *tile_plans(), *many]


def _gated_matmul() -> Sequence[Plan]:
    return [gated_tile(rows) for rows in (64, 128)] if gpu().wgmma else []


OPS: dict[str, Callable[[], Sequence[Plan]]] = {
    "quantized_matmul": _quantized_matmul,
    "gated_matmul": _gated_matmul,
}


def plans(op: str, card: str) -> tuple[Plan, ...]:
    """Return every plan that dispatch can return for an op on a card.

    Parameters
    ----------
    op
        A key of ``OPS``.
    card
        The name of a card in ``architecture.CARDS``.
    """
    with planned_for(card):
        return tuple(OPS[op]())

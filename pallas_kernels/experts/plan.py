"""Which Mosaic kernel computes a grouped product, and the division of one of few pairs.

Each pair of a token and an expert is a product of one row. It is divided as ``few_rows`` divides
that product, over its share of the multiprocessors.  ``many_pairs_plan`` plans the kernel of many
pairs, and ``summed_plan`` that of sums over experts.  The plan with the shortest predicted time
(``predict``) is taken, if that is shorter than the time of XLA's shortest form.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Predicted, Reason, named_plan, shortest
from pallas_kernels.experts import predict
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs_plan import GroupedTilePlan, inner_gate, tile_plan
from pallas_kernels.experts.summed_plan import GroupedSumPlan, summed_plan
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import RowDivision, RowPlan, row_warps
from pallas_kernels.matmul.few_rows.plan import row_plan as one_row_plan

MOST_PAIRS = 512


@dataclasses.dataclass(frozen=True)
class GroupedRowPlan(Predicted):
    """row: the division of one pair's product among ``row.blocks`` blocks."""

    kernel: ClassVar[str] = "grouped_matmul_row_mosaic"
    row: RowDivision
    pairs: int

    def representative(self) -> GroupedRowPlan:
        row = dataclasses.replace(self.row, k=2048, units=1, sms=1, spread=False)
        return GroupedRowPlan(row, pairs=1)


GroupedPlan = GroupedRowPlan | GroupedTilePlan | GroupedSumPlan
_FORMS: dict[type, predict.Form] = {
    GroupedRowPlan: "mosaic",
    GroupedTilePlan: "tiles",
    GroupedSumPlan: "summed",
}


def plan(
    x: jax.Array, w: predict.Weight, n_pairs: int, gated: Gate | None, *, joined: int = 0
) -> GroupedPlan | Reason:
    """The plan of a kernel for ``x[..., K]`` and ``w[E, N, K]``, or why there is none.

    A Reason carries the plan if XLA's form is predicted to be shorter.
    joined: number of neighbouring pairs whose results are summed, a token's; 0 for none.
    """
    n_rows = planned_rows(math.prod(x.shape[:-1]))
    few = row_plan(x, w, n_pairs, gated)
    many = tile_plan(x, w, n_pairs, gated)
    plans = [few, many] + ([summed_plan(x, w, n_pairs, joined)] if joined else [])
    is_inside = inner_gate(gated) is not None

    def us(one: GroupedPlan) -> float:
        return predict.form_us(_FORMS[type(one)], w, n_pairs, n_rows, is_inside)

    return shortest(plans, us, lambda: predict.xla_us(w, n_pairs, n_rows))


def partial(found: GroupedPlan | Reason) -> GroupedPlan | Reason:
    """The plan for a weight that has not all experts."""
    own = found.plan if isinstance(found, Reason) else found
    if not isinstance(own, GroupedSumPlan):
        return found
    own = dataclasses.replace(own, partial=True)
    return dataclasses.replace(found, plan=own) if isinstance(found, Reason) else own


def row_plan(
    x: jax.Array, w: predict.Weight, n_pairs: int, gated: Gate | None
) -> GroupedRowPlan | Reason:
    """The plan of the kernel of few pairs, or why it has none."""
    if n_pairs > MOST_PAIRS:
        return Reason(f"{n_pairs} pairs; the kernel of few pairs takes up to {MOST_PAIRS}")
    one = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), w)
    row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    is_gated = inner_gate(gated) is not None
    call = MatmulCall.of(row, one, jnp.float32, swiglu=is_gated)
    divided = one_row_plan(call, short_chunk=True)
    found = named_plan(divided)
    if found is None:
        assert isinstance(divided, Reason)
        return divided
    assert isinstance(found, RowPlan)
    whole = found.divide(call)
    sms = max(1, gpu().sms // n_pairs)
    warps = row_warps(whole.k, whole.units, whole.bits, sms)
    return GroupedRowPlan(dataclasses.replace(whole, sms=sms, warps=warps), n_pairs)

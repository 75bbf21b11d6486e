"""Which Mosaic kernel computes a grouped product, and the division of one of few pairs.

Each pair of a token and an expert is a product of one row. It is divided as ``few_rows`` divides
that product, over its share of the multiprocessors.  ``many_pairs.plan`` plans the kernel of many
pairs, and ``summed_plan`` that of sums over experts.  The plan with the shortest predicted time
is taken, if that is shorter than the time of XLA's shortest form:

    us = start + sum(costs * amounts)

``form_work`` says the amounts of a form.  Bytes count as microseconds of a copy at the device's
rate. A form of cost 1 moves them as fast as a copy does.  An H100 and an H200 took the same time
where a form unpacks the int4 codes of chosen experts.  The multiprocessors bound that, and both
cards have as many, so these bytes count at one rate on each.  The card's table holds the costs,
which ``benchmarks.kernels.experts_fit`` fits to measured times.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Predicted, Reason, named_plan, shortest
from pallas_kernels.experts.blocks import most_blocks
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs.plan import (
    GroupedTilePlan,
    chosen_experts,
    inner_gate,
    shortest_tile,
    tile_plan,
)
from pallas_kernels.experts.summed_plan import GroupedSumPlan, summed_plan
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import RowDivision, RowPlan, row_warps
from pallas_kernels.matmul.few_rows.plan import row_plan as one_row_plan
from pallas_kernels.qtensor import QTensor, tree_bytes
from pallas_kernels.rounding import NIBBLES

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
_FORMS: dict[type, Form] = {
    GroupedRowPlan: "mosaic",
    GroupedTilePlan: "tiles",
    GroupedSumPlan: "summed",
}


def plan(
    x: jax.Array, w: Weight, n_pairs: int, gated: Gate | None, *, joined: int = 0
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
        return form_us(_FORMS[type(one)], w, n_pairs, n_rows, is_inside)

    return shortest(plans, us, lambda: xla_us(w, n_pairs, n_rows))


def partial(found: GroupedPlan | Reason) -> GroupedPlan | Reason:
    """The plan for a weight that has not all experts."""
    own = found.plan if isinstance(found, Reason) else found
    if not isinstance(own, GroupedSumPlan):
        return found
    own = dataclasses.replace(own, partial=True)
    return dataclasses.replace(found, plan=own) if isinstance(found, Reason) else own


def row_plan(x: jax.Array, w: Weight, n_pairs: int, gated: Gate | None) -> GroupedRowPlan | Reason:
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


# --- predicted times ------------------------------------------------------------------------------


Weight = jax.Array | jax.ShapeDtypeStruct | QTensor
XlaForm = Literal["gather", "blocks", "every"]
Form = XlaForm | Literal["mosaic", "tiles", "summed"]
XLA_FORMS: tuple[XlaForm, ...] = ("gather", "blocks", "every")
MOST_SUMS = 1 << 28  # bytes of the sums of all rows with all experts that "every" holds
_LEAST_ROWS, _MOST_ROWS = 16, 512  # of a block on an accelerator


class FormWork(NamedTuple):
    """family: of the costs of the card's table.  amounts: one for each of its costs."""

    family: str
    amounts: tuple[float, ...]


def block_rows(n_pairs: int, n_experts: int) -> int:
    """Rows of a block on an accelerator: the power of two at an expert's mean number of pairs."""
    mean = max(1, n_pairs // n_experts)
    return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (mean - 1).bit_length()))


def shortest_form(w: Weight, n_pairs: int, n_rows: int) -> XlaForm:
    """XLA's form with the shortest predicted time, of those whose arrays are not too large.

    Parameters
    ----------
    w : Array or QTensor [E, out, in]
        The weight, or its shapes.
    n_pairs : int
        Pairs of a token and an expert.
    n_rows : int
        Rows of x: a token's pairs may share one.
    """
    fits = has_every(w, n_rows)
    forms: list[XlaForm] = [form for form in XLA_FORMS if fits or form != "every"]
    return min(forms, key=lambda form: form_us(form, w, n_pairs, n_rows))


def has_every(w: Weight, n_rows: int) -> bool:
    """Whether the float32 sums of all rows with all experts are within the limit."""
    n_experts, out, _ = w.shape
    return 4 * n_rows * n_experts * out <= MOST_SUMS


def xla_us(w: Weight, n_pairs: int, n_rows: int) -> float:
    """Predicted microseconds of XLA's shortest form."""
    return form_us(shortest_form(w, n_pairs, n_rows), w, n_pairs, n_rows)


def form_us(form: Form, w: Weight, n_pairs: int, n_rows: int, gated: bool = False) -> float:
    """Predicted microseconds of a form; "mosaic" is the kernel of few pairs, "tiles" of many,
    "summed" of sums over experts.

    gated: whether a gate is in the kernel of many pairs.
    """
    family, amounts = form_work(form, w, n_pairs, n_rows, gated)
    cost = gpu().costs[family]
    return cost.start + sum(c * amount for c, amount in zip(cost.serial, amounts, strict=True))


def form_work(form: Form, w: Weight, n_pairs: int, n_rows: int, gated: bool = False) -> FormWork:
    """The amounts of a form's work, for ``w[E, out, in]``, so many pairs and rows of x.

    "mosaic", "summed" and "gather" read an expert for each pair.  "blocks" writes an expert's
    floats and reads them again once a block.  "every" does so once for all experts' codes; it reads
    a float weight as it lies.  "tiles" reads an expert once, or takes as long as its busiest block.
    """
    n_experts, out, width = w.shape
    stored = tree_bytes(w) / n_experts  # of one expert
    floats = 2 * out * width
    if form in ("mosaic", "gather", "summed"):
        return FormWork(f"experts {form} {_codes(w)}", (_read_us(w, n_pairs * stored),))
    if form == "tiles":
        read = _copy_us(chosen_experts(n_experts, n_pairs) * stored)
        _, busiest = shortest_tile(w, n_pairs, gated)
        return FormWork(f"experts tiles {_codes(w)}", (max(read, busiest),))
    if form == "every":
        is_codes = isinstance(w, QTensor)
        read = n_experts * (stored + 2 * floats * is_codes)
        # The product hides the write of its sums; the pick reads and writes those of the pairs.
        around = _product_us(n_rows * n_experts * out * width) + _copy_us(2 * 4 * n_pairs * out)
        family = f"experts every {'codes' if is_codes else 'float'}"
        return FormWork(family, (_copy_us(read), around))
    moved = stored + 2 * floats
    size = block_rows(n_pairs, n_experts)
    count = most_blocks(n_pairs, n_experts, size)
    # Rows of x in bfloat16 and of the result in float32 are written and read.
    rows = _copy_us(2 * count * size * (2 * width + 4 * out))
    around = _product_us(count * size * out * width) + rows
    return FormWork(f"experts blocks {_codes(w)}", (count, _read_us(w, count * moved), around))


def _codes(w: Weight) -> str:
    """The family's name for the weight's values, by their bits."""
    if not isinstance(w, QTensor):
        return "float"
    return "int4" if w.dtype.name in NIBBLES else "int8"


def _copy_us(size: float) -> float:
    return 1e6 * size / gpu().copy_rate


def _read_us(w: Weight, size: float) -> float:
    """Return the microseconds in which the bytes of the chosen experts are read."""
    return 1e6 * size / gpu().experts.unpack_rate if _codes(w) == "int4" else _copy_us(size)


def _product_us(multiplied: float) -> float:
    return 1e6 * 2 * multiplied / gpu().product_rates["bfloat16"]

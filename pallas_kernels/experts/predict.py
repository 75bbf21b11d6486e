"""Predicted microseconds of the forms of a grouped product on an accelerator.

    us = start + sum(costs * amounts)

``form_work`` says the amounts of a form.  Bytes count as microseconds of a copy at the device's
rate, so a cost of 1 is a form that moves them as a copy does.  ``device.Gpu.costs`` holds the
costs, which ``benchmarks.kernels.experts_fit`` fits to measured times.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.experts.blocks import most_blocks
from pallas_kernels.qtensor import QTensor, tree_bytes

XlaForm = Literal["gather", "blocks", "masked"]
XLA_FORMS: tuple[XlaForm, ...] = ("gather", "blocks", "masked")
_LEAST_ROWS, _MOST_ROWS = 16, 512  # of a block on an accelerator


class FormWork(NamedTuple):
    """family: of ``device.Gpu.costs``.  amounts: one for each of its costs."""

    family: str
    amounts: tuple[float, ...]


def block_rows(n_pairs: int, n_experts: int) -> int:
    """Rows of a block on an accelerator: the power of two at an expert's mean number of pairs."""
    mean = max(1, n_pairs // n_experts)
    return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (mean - 1).bit_length()))


def shortest_form(w: Any, n_pairs: int) -> XlaForm:
    """XLA's form with the shortest predicted time.

    Parameters
    ----------
    w : Array or QTensor [E, out, in]
        The weight, or its shapes.
    n_pairs : int
        Pairs of a token and an expert.
    """
    return min(XLA_FORMS, key=lambda form: form_us(form, w, n_pairs))


def xla_us(w: Any, n_pairs: int) -> float:
    """Predicted microseconds of XLA's shortest form."""
    return min(form_us(form, w, n_pairs) for form in XLA_FORMS)


def form_us(form: XlaForm | Literal["mosaic"], w: Any, n_pairs: int) -> float:
    """Predicted microseconds of a form; "mosaic" is the kernel of few pairs."""
    family, amounts = form_work(form, w, n_pairs)
    cost = gpu().costs[family]
    return cost.start + sum(c * amount for c, amount in zip(cost.serial, amounts, strict=True))


def form_work(form: XlaForm | Literal["mosaic"], w: Any, n_pairs: int) -> FormWork:
    """The amounts of a form's work, for ``w[E, out, in]`` and so many pairs.

    The kernel and "gather" read an expert for each pair.  Both other forms write its floats and
    read them again: "blocks" once a block, "masked" for all experts.
    """
    n_experts, out, width = w.shape
    stored = tree_bytes(w) / n_experts  # of one expert
    floats = 2 * out * width
    if form in ("mosaic", "gather"):
        return FormWork(f"experts {form} {_codes(w)}", (_copy_us(n_pairs * stored),))
    moved = stored + 2 * floats
    if form == "masked":
        multiplied = _product_us(n_pairs * n_experts * out * width)
        return FormWork("experts masked", (_copy_us(n_experts * moved), multiplied))
    size = block_rows(n_pairs, n_experts)
    count = most_blocks(n_pairs, n_experts, size)
    # Rows of x in bfloat16 and of the result in float32 are written and read.
    rows = _copy_us(2 * count * size * (2 * width + 4 * out))
    around = _product_us(count * size * out * width) + rows
    return FormWork(f"experts blocks {_codes(w)}", (count, _copy_us(count * moved), around))


def _codes(w: Any) -> str:
    """The family's name for the weight's values, by their bits."""
    if not isinstance(w, QTensor):
        return "float"
    return "int4" if w.dtype == jnp.int4 else "int8"


def _copy_us(size: float) -> float:
    return 1e6 * size / gpu().copy_rate


def _product_us(multiplied: float) -> float:
    return 1e6 * 2 * multiplied / gpu().product_rates["bfloat16"]

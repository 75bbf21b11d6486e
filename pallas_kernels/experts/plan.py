"""How the Mosaic kernel computes a grouped product of few pairs: arithmetic only.

Each pair of a token and an expert is a product of one row. It is divided as ``few_rows`` divides
that product, over its share of the multiprocessors.  The plan is taken where its predicted time
(``predict``) is shorter than that of XLA's shortest form.
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
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import RowPlan, row_plan

MOST_PAIRS = 512


@dataclasses.dataclass(frozen=True)
class GroupedRowPlan(Predicted):
    """row: the division of one pair's product among ``row.blocks`` blocks."""

    kernel: ClassVar[str] = "grouped_matmul_row_mosaic"
    row: RowPlan
    pairs: int


def plan(
    x: jax.Array, w: predict.Weight, n_pairs: int, activation: str | None
) -> GroupedRowPlan | Reason:
    """The kernel's plan for ``x[..., K]`` and ``w[E, N, K]``, or why it has none.

    A Reason carries the plan if XLA's form is predicted to be shorter.
    activation: of SwiGLU's gate, None without one.
    """
    if n_pairs > MOST_PAIRS:
        return Reason(f"{n_pairs} pairs; the kernel takes up to {MOST_PAIRS}")
    one = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), w)
    row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    swiglu, activation = activation is not None, activation or "silu"
    call = MatmulCall.of(row, one, jnp.float32, swiglu=swiglu, activation=activation)
    divided = row_plan(call, short_chunk=True)
    found = named_plan(divided)
    if found is None:
        assert isinstance(divided, Reason)
        return divided
    assert isinstance(found, RowPlan)
    found = dataclasses.replace(found, sms=max(1, gpu().sms // n_pairs))
    n_rows = math.prod(x.shape[:-1])
    return shortest(
        [GroupedRowPlan(found, n_pairs)],
        lambda _: predict.form_us("mosaic", w, n_pairs, n_rows),
        lambda: predict.xla_us(w, n_pairs, n_rows),
    )

"""A product and all that stands around it, if one kernel does it: the question of a caller who else
computes the parts in another way than ``quantized_matmul``."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.dispatch import Find, Plan, choose_plan, own_plan
from pallas_kernels.matmul.call import Around
from pallas_kernels.matmul.few_rows.plan import RowPlan
from pallas_kernels.matmul.op import check_around, check_operands, planners, run
from pallas_kernels.operands import FLOATS, Columns, dtype_name
from pallas_kernels.qtensor import QTensor, RowBlocks

_Weight = jax.Array | QTensor | CpuWeight
_Result = jax.Array | tuple[jax.Array, jax.Array]


@overload
def fused_matmul(
    x: jax.Array | QTensor | Columns,
    w: _Weight | RowBlocks,
    *,
    bias: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    norm: tuple[jax.Array, float] | None = ...,
    residual: jax.Array | None = ...,
    swiglu: bool = ...,
    activation: str = ...,
    pending: None = ...,
) -> jax.Array | None: ...
@overload
def fused_matmul(
    x: jax.Array | QTensor | Columns,
    w: _Weight | RowBlocks,
    *,
    bias: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    norm: tuple[jax.Array, float] | None = ...,
    residual: jax.Array | None = ...,
    swiglu: bool = ...,
    activation: str = ...,
    pending: jax.Array,
) -> tuple[jax.Array, jax.Array] | None: ...
def fused_matmul(
    x: jax.Array | QTensor | Columns,
    w: _Weight | RowBlocks,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    activation: str = "silu",
    pending: jax.Array | None = None,
) -> _Result | None:
    """Return ``quantized_matmul`` of these if one kernel does all of it here and is the faster way.

    The result is None otherwise, and the caller computes the parts.
    The kernel of one row reads the first columns of an array where they are (``Columns``).
    Raises ValueError as ``quantized_matmul`` does.
    """
    if isinstance(x, QTensor) or isinstance(w, RowBlocks):
        return None
    rows = None
    if isinstance(x, Columns):
        rows = x.rows if x.start == 0 else None
        # XLA would hand columns to the kernel in a fusion of slices, in which no GPU has run one.
        x = jnp.asarray(lax.optimization_barrier(x.value))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    out = jnp.dtype(dtype_name("quantized_matmul", "out_dtype", out_dtype, FLOATS))
    gamma, eps = (None, None) if norm is None else norm
    gated = swiglu, activation if swiglu else None
    around = Around(out, bias, gamma, eps, residual, pending, *gated)
    check_operands(x, w, around)
    check_around(x, w, around)
    find, on_cpu = planners(x, w, around)
    plan = own_plan(find, x, w, cpu=on_cpu)
    if rows is not None and isinstance(plan, RowPlan):
        x = rows
    return None if plan is None else _fused_run(x, w, around, plan)


def _fused_run(x: jax.Array, w: _Weight, around: Around, plan: Plan) -> _Result:
    """Compute a fused product by the plan, and record the choice for ``explain``."""
    find: Find = lambda: plan  # noqa: E731
    choose_plan("quantized_matmul", None, find, x, w, *around.others, cpu=find)
    return run(x, w, around, plan, None)

"""Which kernel computes a product: the one with the shortest predicted time, or XLA's form.

On a CPU ``cpu.matmul.plan`` plans calls with a weight in its layout.  On a GPU the planner of each
kernel returns its division of a call, or why it has none.  ``predict`` predicts the times of each
plan and of XLA's form.  The kernel is launched with the chosen plan.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import matmul as cpu
from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Plan, Reason, named_plan, shortest
from pallas_kernels.fixed_sums import has_fixed_sums, planned_rows
from pallas_kernels.matmul import predict
from pallas_kernels.matmul.call import Around, MatmulCall, Static
from pallas_kernels.matmul.few_rows import plan as few_rows
from pallas_kernels.matmul.many_rows import plan as many_rows
from pallas_kernels.matmul.mid_rows import plan as mid_rows
from pallas_kernels.qtensor import FLOAT4, QTensor

KernelPlan = (
    few_rows.RowPlan
    | few_rows.TilePlan
    | mid_rows.MidTile
    | many_rows.PairTile
    | many_rows.WeightTile
)


def plans(call: MatmulCall) -> list[KernelPlan | Reason]:
    """Return the plan or reason of every kernel for a call on a GPU.

    A kernel of few rows divides K by their number, so fixed sums leave it out.
    """
    few = [] if has_fixed_sums() else few_rows.plans(call)
    return [*few, mid_rows.plan(call), many_rows.plan(call)]


def _moves_columns(call: MatmulCall, w: QTensor) -> bool:
    return w.columns is not None and not (call.quantized_x and w.interleaved)


def plan(call: MatmulCall) -> Plan | Reason:
    """Return the plan with the shortest predicted time, or a Reason if XLA's form is shorter."""
    w = call.w
    if isinstance(w, CpuWeight):
        return Reason("w is in the layout of the CPU's handler")
    if isinstance(w, QTensor) and (_moves_columns(call, w) or w.activations is not None):
        return Reason("columns in another order, or quantized activations, are not fused")
    if isinstance(w, QTensor) and w.unit is not None and not call.quantized_x and w.dtype != FLOAT4:
        return Reason("w has scales in two levels, which are one before a product of floats")
    if call.pending is not None and (
        call.norm is None or call.pending not in (jnp.float32, call.x)
    ):
        return Reason("what is pending is float32 or of x's dtype, and comes before a norm")
    return _fixed_plan(call) if has_fixed_sums() else _shortest(call)


def _shortest(call: MatmulCall) -> KernelPlan | Reason:
    us = functools.partial(predict.kernel_us, call=call)
    return shortest(plans(call), us, functools.partial(predict.xla_us, call))


def _fixed_plan(call: MatmulCall) -> KernelPlan | Reason:
    """Return the weight's one plan, that of ``planned_rows`` rows, with the call's own times.

    Sums of int8 codes are exact, so their kernel takes the tile of the call's rows.
    """
    is_exact = call.quantized_x and call.x == jnp.int8 and not (call.low_rank or lacking("wgmma"))
    is_exact = is_exact and call.codes.dtype == jnp.int8 and call.weight.n_groups == 1
    rows = call.m if is_exact else planned_rows(call.m)
    found = _shortest(dataclasses.replace(call, m=rows))
    plan = named_plan(found) if is_exact else found  # XLA's form multiplies by scales otherwise
    if not isinstance(plan, KernelPlan):
        return found
    us, xla_us = predict.kernel_us(plan, call=call), predict.xla_us(call)
    return dataclasses.replace(plan, predicted_us=us, xla_us=xla_us)


def run(static: Static, x: jax.Array | QTensor, w: Any, around: Around) -> Any:
    """Compute a product ``x[M, K] w[N, K]^T`` with the kernel of its plan.

    w: or a CpuWeight, with a plan of its own.
    """
    call, plan = static.call, static.plan
    assert call is not None and plan is not None
    if isinstance(plan, cpu.CpuPlan):
        assert not isinstance(x, QTensor)
        return cpu.run(call, plan, x, w, around.bias, around.gamma, around.residual)
    if isinstance(plan, few_rows.RowPlan | few_rows.TilePlan):
        from pallas_kernels.matmul.few_rows import kernel

        return kernel.matmul(x, w, around, plan.divide(call))
    if isinstance(plan, mid_rows.MidTile):
        from pallas_kernels.matmul.mid_rows import kernel

        assert isinstance(w, QTensor)
        return kernel.matmul(x, w, around.bias, around.out, plan)
    assert isinstance(plan, many_rows.PairTile | many_rows.WeightTile)
    from pallas_kernels.matmul.many_rows import kernel

    return kernel.matmul(x, w, around, plan.divide(call))

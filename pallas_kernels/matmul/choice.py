"""Which kernel computes a product: an ordered tuple of implementations, each asked once.

On a CPU ``cpu.matmul.plan`` is asked, of a weight in its layout.  On a GPU ``few_rows.plan`` and
``many_rows.plan`` each say how their kernels would divide a call, or why they
have no plan for it, or that XLA was measured to be faster; XLA's form is what is left.  The plan
that is found is what the kernel is launched with.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.cpu import matmul as cpu
from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.dispatch import Plan, Reason, first_plan
from pallas_kernels.matmul.call import Call
from pallas_kernels.matmul.few_rows import plan as few_rows
from pallas_kernels.matmul.many_rows import plan as many_rows
from pallas_kernels.qtensor import QTensor


def plan(call: Call) -> Plan | Reason:
    """Of the first implementation that has one."""
    w = call.w
    if isinstance(w, CpuWeight):
        return Reason("w is in the layout of the CPU's handler")
    if isinstance(w, QTensor) and (w.columns is not None or w.activations is not None):
        return Reason("columns in another order, or quantized activations, are not fused")
    if call.pending is not None and (call.norm is None or call.pending != jnp.float32):
        return Reason("what is pending is float32, and comes before a norm")
    return first_plan(call, few_rows.plan, many_rows.plan)


def run(static: tuple[Call, Plan], x, w, bias=None, gamma=None, residual=None, pending=None) -> Any:
    """The kernel of a plan.  x: [M, K], as are the others' leading axes one."""
    call, plan = static
    if isinstance(plan, cpu.CpuPlan):
        return cpu.run(call, plan, x, w, bias, gamma, residual)
    if isinstance(plan, few_rows.RowPlan | few_rows.TilePlan):
        from pallas_kernels.matmul.few_rows import kernel

        fused = {"bias": bias, "gamma": gamma, "residual": residual, "pending": pending}
        fixed = {"out_dtype": call.out, "eps": call.eps, "swiglu": call.swiglu}
        return kernel.matmul(x, w, **fused, **fixed, plan=plan)
    from pallas_kernels.matmul.many_rows import kernel

    return kernel.matmul(x, w, bias, call.out, plan, swiglu=call.swiglu)

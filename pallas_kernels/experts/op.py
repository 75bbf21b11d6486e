"""Matrix products with the experts that each token has chosen.

    y[t, j] = x[t] @ w[experts[t, j]].T + bias[experts[t, j]]       then the gate, in float32
    out[t]  = sum_j weights[t, j] * y[t, j]                         with weights; else y itself

The two products of a mixture of experts are two calls.  The first has ``gated``; the second reads
``[T, k, in]``, a row for each pair of a token and an expert, and has ``weights``.

Sums are float32 from the product to the only cast.  The weighted sum goes in the order of j.  On a
CPU a token's result has the same bits in any batch, because every product has the same shape.

The weight is an array, or a QTensor with a leading axis of experts (weight-only: codes by rows or
groups, zeros of both kinds, scales in two levels).  ``experts.xla`` holds the forms, ``kernel`` and
``many_pairs.kernel`` the Mosaic kernels, and ``plan`` the times that choose among them.  A CPU's
handler (``cpu.experts``) reads its own layout.  Where w is a ``CpuWeight``, its preparation was the
choice, and x is rounded to 8 bits in blocks.

float8 codes that ask for activations in float8 (``QTensor.activations``) get them: x is rounded to
codes, with a scale for a token or a group of columns, and multiplied as floats.

Gradients: x, weights, bias, and a plain w or a QTensor's scales and floating zeros.  Codes have
none.  The backward pass keeps only the operands.

Left out: activations in int8, act-order (``columns``), experts over several devices.
Sources: sparsely gated mixtures (arXiv 1701.06538), MegaBlocks (2211.15841).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cpu import experts as cpu
from pallas_kernels.cpu.weight import CpuWeight, restore
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, is_empty
from pallas_kernels.experts import xla
from pallas_kernels.experts.blocks import by_expert
from pallas_kernels.experts.gate import ClampedGate, Gate, apply_gate, check_gate
from pallas_kernels.experts.many_pairs.plan import GroupedTilePlan, inner_gate
from pallas_kernels.experts.summed_plan import GroupedSumPlan
from pallas_kernels.fixed_sums import has_fixed_sums, ordered_sums, planned_rows
from pallas_kernels.operands import check
from pallas_kernels.qtensor import FLOAT4, QTensor, dequantize
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.transform import XLA, Op, OpChoice, chosen

__all__ = ["ClampedGate", "grouped_matmul", "grouped_matmul_reference"]

Weight = jax.Array | QTensor | CpuWeight


class GroupedStatic(NamedTuple):
    """fan: experts of a row of x.  out: the result's dtype.  partial: an index of ``n_experts`` is
    an expert that w has not."""

    fan: int
    gated: Gate | None
    plan: Plan | None
    out: jnp.dtype
    n_experts: int
    partial: bool


_Operands = tuple[jax.Array, jax.Array | QTensor, jax.Array]
_OPERANDS = {
    "w": "float|QTensor [E+, out, in]",
    "experts": "int32 [T, k+]",
    "weights": "float [T, k] ?",
    "bias": "float [E, out] ?",
}


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | QTensor | CpuWeight,
    experts: jax.Array,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gated: Gate | None = None,
    first: jax.Array | int | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return the products of each token with its experts, summed by ``weights`` if they are given.

    Parameters
    ----------
    x : float [T, in] or [T, k, in]
        float32, bfloat16 or float16. With three axes each pair of token and expert has its own row.
    w : float, QTensor or CpuWeight [E, out, in]
        The experts' weights.
    experts : int32 [T, k]
        Each token's experts.  Without ``first``, indices outside of [0, E) are clamped to it.
    weights : float [T, k], optional
        Weight of each pair in the token's sum.
    bias : float [E, out], optional
        Added in float32 before the gate.
    gated : "silu", "gelu", "gelu_tanh" or ClampedGate, optional
        An expert's rows are gate, then up. The pair's result is ``activation(gate) * up``.
    first : int32 scalar, optional
        w holds the experts from ``first`` on, a device's share.  The product of a pair with another
        expert is zero, its bias too, and the kernels do not compute it.
    out_dtype : data-type, optional
        Of the result; default: x's.
    implementation : "xla", "mosaic", "cpu" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    Array [T, out] with weights, else [T, k, out]
        In ``out_dtype``; ``out`` is halved by ``gated``.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand |
    | jvp, grad, at any order       | x, weights, bias, floats and scales of w |
    | export, jit over many devices | the XLA form; ValueError if the caller named a kernel |
    """
    op = "grouped_matmul"
    rows = "float [T, in]" if getattr(x, "ndim", 2) == 2 else "float [T, k, in]"
    given = {"x": x, "experts": experts, "weights": weights, "bias": bias}
    outline = w.outline if isinstance(w, CpuWeight) else w
    sizes = check(op, {"x": rows, **_OPERANDS}, w=outline, **given)
    check_gate(op, gated, sizes["out"])
    x, w = _rounded(x, w), _weight_only(op, w)
    on_cpu = functools.partial(_cpu_plan, w, experts, gated == "silu" and bias is None)
    is_cpu = isinstance(w, CpuWeight) or implementation == "cpu"
    find = functools.partial(_kernel_plan, x, w, experts, gated, weights is not None, first)
    plan = choose_plan(op, implementation, find, x, w, experts, cpu=on_cpu if is_cpu else None)
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if is_empty(x, w, experts):
        out = sizes["out"] // 2 if gated else sizes["out"]
        shape = experts.shape if weights is None else experts.shape[:1]
        return jnp.zeros((*shape, out), dtype)
    if first is not None:  # E is none of them
        own = experts - jnp.asarray(first, jnp.int32)
        experts = jnp.where((own >= 0) & (own < sizes["E"]), own, sizes["E"])
    fan = 1 if x.ndim == 3 else sizes["k"]
    static = GroupedStatic(fan, gated, plan, dtype, sizes["E"], first is not None)
    if plan is None and not isinstance(w, CpuWeight):
        return _composed(static, x, w, _clipped(static, experts), weights, bias)
    return _planned(chosen(plan, implementation), static, x, w, experts, weights, bias)


def _kernel_plan(
    x: jax.Array,
    w: Weight,
    experts: jax.Array,
    gated: Gate | None,
    summed: bool,
    first: jax.Array | int | None,
) -> Plan | Reason:
    from pallas_kernels.experts import plan

    if isinstance(w, CpuWeight):
        return Reason("w is in the layout of the CPU's handler")
    joined = experts.shape[1] if summed and x.ndim == 3 and gated is None else 0
    n_pairs = planned_rows(experts.shape[0]) * experts.shape[1]
    found = plan.plan(x, w, n_pairs, gated, joined=joined)
    is_whole = first is None
    return found if is_whole else plan.partial(found)


def _clipped(static: GroupedStatic, experts: jax.Array) -> jax.Array:
    """Experts that w has, or E for none of them."""
    return experts if static.partial else jnp.clip(experts, 0, static.n_experts - 1)


def _cpu_plan(w: Weight, experts: jax.Array, swiglu: bool) -> Plan | Reason:
    if not isinstance(w, CpuWeight):
        return Reason("w is not in the handler's layout, which pallas_kernels.cpu.prepare gives it")
    return cpu.plan(w, experts.size, swiglu)


def _has_float8(w: QTensor | CpuWeight) -> bool:
    """Whether w has float8 codes and asks for activations in float8."""
    return w.dtype.name == w.activations == "float8_e4m3fn"


def _rounded(x: jax.Array, w: Weight) -> jax.Array:
    """x as float8 codes and scales hold it, if w asks for that.  A token has one scale, or one for
    each group of columns, as w has them.  Every form multiplies floats, so these are floats.  The
    CPU's handler takes x as it is."""
    if not (isinstance(w, QTensor) and _has_float8(w)):
        return x
    assert w.activations is not None
    is_static = w.input_scale is not None
    group_size = None if is_static else w.group_size
    codes = quantize_tokens(x, w.activations, scale=w.input_scale, group_size=group_size)
    return dequantize(codes, x.dtype)


def _weight_only(op: str, w: Weight) -> Weight:
    """Return w without notes, and int4 codes with one level of scales; checks them first."""
    if not isinstance(w, QTensor | CpuWeight):
        return w
    if w.activations is not None and not _has_float8(w):
        raise ValueError(f"{op}: w asks for activations in {w.activations}; experts read floats")
    if w.columns is not None:
        raise ValueError(f"{op}: w has columns in another order, which experts have not")
    if isinstance(w, CpuWeight):
        return w
    w = w if w.dtype == FLOAT4 else w.in_one_level
    return QTensor(w.q, w.scale, w.zero, unit=w.unit)


def _composed(
    static: GroupedStatic,
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    pairs = jnp.minimum(experts.reshape(-1), static.n_experts - 1)
    y = _sums(XLA, static.fan, x.reshape(-1, x.shape[-1]), w, pairs)
    return _finished(static, y, static.gated, experts, weights, bias)


def _finished(
    static: GroupedStatic,
    y: jax.Array,
    gated: Gate | None,
    experts: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Apply bias, gate, weights and the cast to float32 products ``[P, out]``."""
    y = y.reshape(*experts.shape, -1)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[jnp.minimum(experts, static.n_experts - 1)]
    y = y if gated is None else apply_gate(y, gated)
    if static.partial:
        y = jnp.where((experts < static.n_experts)[..., None], y, jnp.zeros_like(y))
    return y.astype(static.out) if weights is None else weighted_sum(y, weights, static.out)


def weighted_sum(y: jax.Array, weights: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``sum_j weights[t, j] * y[t, j]`` in the order of j, ``[T, out]``.

    y: float32 ``[T, k, out]``.
    """
    parts = weights.astype(jnp.float32)[..., None] * y
    if has_fixed_sums():  # a fusion may else round a product and its sum as one
        return ordered_sums(parts, axis=1)[:, 0].astype(dtype)
    total = functools.reduce(jnp.add, (parts[:, j] for j in range(y.shape[1])))
    return total.astype(dtype)


def grouped_matmul_reference(
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gated: Gate | None = None,
) -> jax.Array:
    """``grouped_matmul`` written plainly in float32, for tests; never optimised."""
    floats = dequantize(w) if isinstance(w, QTensor) else w.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    x32 = jnp.broadcast_to(x32[:, None], (*experts.shape, x.shape[-1])) if x.ndim == 2 else x32
    y = jnp.einsum("tki,tkoi->tko", x32, floats[experts], precision=jax.lax.Precision.HIGHEST)
    static = GroupedStatic(1, gated, None, jnp.dtype(jnp.float32), floats.shape[0], False)
    return _finished(static, y, gated, experts, weights, bias)


def _sums_xla(fan: int, x: jax.Array, w: jax.Array | QTensor, experts: jax.Array) -> jax.Array:
    return xla.sums(x, w, experts, fan)


def _sums_backward(
    choice: OpChoice, fan: int, operands: _Operands, saved: object, dy: jax.Array
) -> tuple[jax.Array, jax.Array | QTensor, None]:
    x, w, experts = operands
    return *xla.backward(x, w, experts, dy, fan), None


_sums = Op("grouped_matmul", _sums_xla, backward=_sums_backward)


# --- the kernels ----------------------------------------------------------------------------------


def planned(
    static: GroupedStatic,
    x: jax.Array,
    w: Any,
    experts: jax.Array,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Run a plan's kernel, then the steps of ``_finished`` that the kernel does not have."""
    gated, plan = static.gated, static.plan
    if isinstance(plan, GroupedSumPlan):
        from pallas_kernels.experts.summed_kernel import grouped_sum

        assert weights is not None
        out_dtype = static.out if static.out == jnp.bfloat16 else jnp.float32
        y = grouped_sum(x, w, experts, weights, bias, plan=plan, out_dtype=out_dtype)
        return y.astype(static.out)
    if not isinstance(plan, cpu.GroupedPlan | GroupedTilePlan):
        from pallas_kernels.experts.kernel import grouped_rows

        how = {**_inside(static, weights), "partial": static.partial}  # it clamps experts itself
        y = grouped_rows(x.reshape(-1, x.shape[-1]), w, experts.reshape(-1), bias, plan=plan, **how)
        return _finished(static, y, _left(gated), _clipped(static, experts), weights, None)
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(plan, cpu.GroupedPlan):
        experts = _clipped(static, experts)
        y = _handled(static.fan, plan, rows, w, experts.reshape(-1))
        left, added = (None, None) if plan.program.swiglu else (gated, bias)
    else:
        from pallas_kernels.experts.many_pairs.kernel import grouped_tiles

        how = {**_inside(static, weights), "partial": static.partial}  # it clamps experts itself
        left, added = _left(gated), None
        y = grouped_tiles(rows, w, experts.reshape(-1), bias, tile=plan.tile, **how)
    return _finished(static, y, left, experts, weights, added)


def _inside(static: GroupedStatic, weights: jax.Array | None) -> dict[str, Any]:
    """The arguments of a Mosaic kernel: it also rounds a result that is final."""
    is_final = weights is None and _left(static.gated) is None
    out_dtype = static.out if is_final and static.out == jnp.bfloat16 else jnp.float32
    return {"fan": static.fan, "gate": inner_gate(static.gated), "out_dtype": out_dtype}


def _left(gated: Gate | None) -> Gate | None:
    """The gate, if no Mosaic kernel has it."""
    return gated if inner_gate(gated) is None else None


def _handled(
    fan: int, plan: cpu.GroupedPlan, x: jax.Array, w: CpuWeight, pairs: jax.Array
) -> jax.Array:
    """The CPU handler's products: sort the pairs by expert, and restore the tokens' order.

    Pairs without an expert come last, and are not computed.
    """
    order, starts = by_expert(pairs, w.shape[0])
    y = cpu.run(plan, x[order // fan], w, starts)
    return jnp.zeros_like(y).at[order].set(y)


def _planned_xla(
    static: GroupedStatic,
    x: jax.Array,
    w: Any,
    experts: jax.Array,
    weights: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """The XLA form; a weight in the CPU handler's layout is converted back first."""
    plain: Any = _weight_only("grouped_matmul", restore(w)) if isinstance(w, CpuWeight) else w
    return _composed(static, x, plain, _clipped(static, experts), weights, bias)


_planned = Op("grouped_matmul", _planned_xla, planned)

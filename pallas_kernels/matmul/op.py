"""Matrix product with a weight that is quantized, or plain: ``x[..., K] @ w[N, K].T + bias``.

The scheme is read off the operands:

    x float  x  w int4 | int8 | float8_e4m3fn   weight-only: groups or rows, zeros of both kinds
    x float  x  w float                         plain
    x int8   x  w int8                          W8A8: int32 accumulation, exact
    x fp8    x  w fp8                           FP8: float32 accumulation
    x int8   x  w int4, scales in two levels    W4A8: int32 accumulation, exact
    x int8 or fp8  x  w int4                    W4A8: float32 accumulation of groups' sums

In these ``x`` is a QTensor with one scale per token, without zeros; in the first two ``w`` has one
per output channel and no zeros either, an int4 ``w`` groups and integer zeros as it likes.  Scales
of tokens and rows and the bias are applied to the accumulator, then one cast.
A ``w`` with ``columns`` (act-order) takes x's features in that order: one gather before anything
else, so that no kernel knows of it.

What stands around the product in a decoder may be part of the call: an RMSNorm of x before it,
SwiGLU or an activation and a residual behind it.  Up to 16 rows of 16-bit floats it is then one
kernel (but for the activation), float32 from the product to the only rounding; elsewhere the ops
run one after the other.  ``fused_matmul`` is the one kernel or None.
A quantized x may bring a low-rank term (LoRA), which up to 64 rows is in the product's kernel.

The XLA forms are in ``matmul.xla``, the kernels in ``few_rows`` (up to 16 rows of x) and
``many_rows``; ``matmul.choice`` asks each for a plan.  All read the plain layout, so there is no
re-layout at load.  A CPU's handler (``cpu.matmul``) reads its own: where w is a ``CpuWeight``,
whose preparation was the choice, floats of x are rounded to 8 bits by blocks of 32.

Gradients: for float x, with respect to x, bias, w.scale and a floating w.zero (or a plain w), and
to what is fused; for QTensor x, with respect to both scales and bias.  Codes get none.  That of x
is one product with the dequantized weight (in blocks of 512 MiB where that is larger) on an
accelerator, of operands in x's dtype summed in float32; on a CPU it goes by tiles, in float32.

Leaves out: mixed pairs but with int4, scales that vary along K for quantized x, a residual behind
SwiGLU in one kernel.
Sources: LLM.int8 (arXiv 2208.07339), AWQ (2306.00978), GPTQ (2210.17323), SmoothQuant (2211.10438).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.cpu import matmul as cpu
from pallas_kernels.cpu.weight import CpuWeight, restore
from pallas_kernels.dispatch import (
    Find,
    Implementation,
    Plan,
    Reason,
    choose_plan,
    is_empty,
    own_plan,
)
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.xla import (
    contract_rows,
    low_rank_sums,
    outer_sums,
    pair_sums,
    weight_only_sums,
    widened,
)
from pallas_kernels.operands import FLOATS, check
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize, take_columns
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import gate
from pallas_kernels.transform import Op, OpChoice, chosen

_Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
_GATES = ("silu", "gelu", "gelu_tanh")
_LowRank = tuple[jax.Array, tuple[jax.Array, ...]]


@overload
def quantized_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    *,
    bias: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    norm: tuple[jax.Array, float] | None = ...,
    residual: jax.Array | None = ...,
    swiglu: bool = ...,
    activation: _Activation | None = ...,
    pending: None = ...,
    low_rank: _LowRank | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...
@overload
def quantized_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    *,
    bias: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    norm: tuple[jax.Array, float] | None = ...,
    residual: jax.Array | None = ...,
    swiglu: bool = ...,
    activation: _Activation | None = ...,
    pending: jax.Array,
    low_rank: _LowRank | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
def quantized_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    activation: _Activation | None = None,
    pending: jax.Array | None = None,
    low_rank: _LowRank | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``x[..., K]`` times ``w[N, K]`` transposed -> ``[..., N]``.

    bias: ``[N]``, added in float32 before the only cast.
    out_dtype: x's dtype for float x; for a QTensor x the dtype of w.scale if that is 16 bits wide
        (the compute dtype of a checkpoint), else float32.
    norm: (weight ``[K]``, eps) of an RMSNorm of x that comes first.
    residual: of the result's shape and dtype, added last.
    activation: "relu", "gelu", "gelu_tanh" (its approximation) or "silu" of the product with its
        bias.  No kernel has one: the product comes in out_dtype, XLA computes the activation of it
        in float32 and casts again.  ``explain`` says so in a line of its own.
    swiglu: w's rows are gate, then up; the result is ``activation(gate) * up`` of ``[..., N / 2]``,
        with "silu" by default, "gelu" or "gelu_tanh".
    pending: float32 or of x's dtype, of x's shape, to be added to x before the norm; the result is
        then a pair, with the sum in x's dtype.
    low_rank: with a QTensor x, added in float32 before the cast: (inner ``[..., S R]``, S second
        factors ``[N_s, R]``), where the N_s rows of w from source to source get
        ``inner[..., s R : s R + R] @ second[s].T``.  ``rows.low_rank`` makes inner.

    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | floats and scales, and floating zeros: a rule of its own |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    Raises ValueError for shapes or dtypes that do not go together and for another activation,
    NotImplementedError for ``implementation="mosaic"`` or ``"cpu"`` where no kernel covers it.
    """
    if out_dtype is None:
        if not isinstance(x, QTensor):
            out_dtype = x.dtype
        else:
            scale = getattr(w, "scale", x.scale).dtype
            out_dtype = scale if scale.itemsize == 2 else jnp.float32
    out_dtype = jnp.dtype(out_dtype)
    _check(x, w, bias, out_dtype, norm, residual, swiglu, pending, low_rank)
    _check_activation(activation, swiglu)
    if activation is not None and not swiglu:
        alone: Any = quantized_matmul(
            x,
            w,
            bias=bias,
            out_dtype=out_dtype,
            norm=norm,
            pending=pending,
            low_rank=low_rank,
            implementation=implementation,
        )
        y, *total = alone if pending is not None else (alone,)
        y = _activated(y, activation)
        y = y if residual is None else residual + y
        return (y, *total) if total else y
    activation = activation or "silu"
    if norm is None and residual is None and not swiglu:
        if isinstance(w, QTensor):
            return _product(x, w, bias, out_dtype, implementation, low_rank)
        if isinstance(w, CpuWeight):
            return _prepared_product(x, w, bias, out_dtype, implementation)
    gamma, eps = (None, None) if norm is None else (norm[0], float(norm[1]))
    fused = {"gamma": gamma, "eps": eps, "residual": residual, "pending": pending}
    call = MatmulCall.of(x, w, out_dtype, bias=bias, swiglu=swiglu, activation=activation, **fused)
    find, on_cpu = functools.partial(choice.plan, call), _cpu_plan(call, implementation)
    operands = x, w, gamma, residual, pending
    plan = choose_plan("quantized_matmul", implementation, find, *operands, cpu=on_cpu)
    if plan is None:
        parts = "xla" if is_empty(x, w) else implementation
        return _composed(call, parts, x, w, bias, gamma, residual, pending)
    return _run(chosen(plan, implementation), call, plan, bias, *operands)


def fused_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | RowBlocks | CpuWeight,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    activation: str = "silu",
    pending: jax.Array | None = None,
) -> Any:
    """``quantized_matmul`` of these where one kernel does all of it here and is the faster way;
    else None, and the caller computes the parts.  Raises ValueError as it does."""
    if isinstance(x, QTensor) or isinstance(w, RowBlocks):
        return None
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, w, bias, out_dtype, norm, residual, swiglu, pending, None)
    gamma, eps = (None, None) if norm is None else (norm[0], float(norm[1]))
    fused = {"gamma": gamma, "eps": eps, "residual": residual, "pending": pending}
    call = MatmulCall.of(x, w, out_dtype, bias=bias, swiglu=swiglu, activation=activation, **fused)
    operands = x, w, gamma, residual, pending
    plan = own_plan(functools.partial(choice.plan, call), x, w, cpu=_cpu_plan(call))
    if plan is None:
        return None
    choose_plan("quantized_matmul", None, lambda: plan, *operands, cpu=lambda: plan)
    return _run(chosen(plan, None), call, plan, bias, *operands)


def _run(
    made: OpChoice,
    call: MatmulCall,
    plan: Plan,
    bias: jax.Array | None,
    x: jax.Array | QTensor,
    w: Any,
    gamma: jax.Array | None,
    residual: jax.Array | None,
    pending: jax.Array | None,
) -> Any:
    """The kernel of a plan, with all that is fused."""
    residual, pending = _flatten(residual), _flatten(pending)
    out = _fused(made, (call, plan), _flatten(x), w, bias, gamma, residual, pending)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), out)


def _cpu_plan(call: MatmulCall, implementation: Implementation | None = None) -> Find | None:
    """The handler's planner where w is in its layout, or the handler was named."""
    is_asked = isinstance(call.w, CpuWeight) or implementation == "cpu"
    return functools.partial(cpu.plan, call) if is_asked else None


def product_plan(
    x: jax.Array | QTensor, w: QTensor, *, out_dtype: DTypeLike, bias: jax.Array | None = None
) -> Plan | Reason:
    """The kernel of ``quantized_matmul`` of these with nothing else, on a GPU that has it."""
    return choice.plan(MatmulCall.of(x, _weights_for(x, w), out_dtype, bias=bias))


def _weights_for(x: jax.Array | QTensor, w: QTensor) -> QTensor:
    """w without notes, and for floats of x in one level of scales."""
    w = w if isinstance(x, QTensor) else w.in_one_level
    return QTensor(w.q, w.scale, w.zero, unit=w.unit)


def _product(
    x: jax.Array | QTensor,
    w: QTensor,
    bias: jax.Array | None,
    out_dtype: jnp.dtype,
    implementation: Implementation | None,
    low_rank: _LowRank | None = None,
) -> jax.Array:
    """The product of a QTensor alone, or with a low-rank term."""
    if w.columns is not None and not is_empty(x, w):
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None)
    rows, w = _flatten(x), _weights_for(x, w)
    call = MatmulCall.of(rows, w, out_dtype, bias=bias, low_rank=low_rank)
    find = functools.partial(choice.plan, call)
    on_cpu = _cpu_plan(call, implementation)
    plan = choose_plan("quantized_matmul", implementation, find, rows, w, cpu=on_cpu)
    if low_rank is not None and (plan is None or is_empty(x, w)):
        y = _product(x, w, bias, jnp.dtype(jnp.float32), implementation)
        return (y + low_rank_sums(*low_rank)).astype(out_dtype)
    if is_empty(x, w):
        return _finish(jnp.zeros((*x.shape[:-1], w.shape[0]), jnp.float32), bias, out_dtype)
    made = chosen(plan, implementation)
    if isinstance(rows, QTensor) and w.dtype == jnp.int4:
        scales = rows.scale, w.scale, w.unit
        out = _int4_pair(made, (call, plan), *scales, bias, rows.q, w.q, w.zero)
    elif isinstance(rows, QTensor):
        low_rank = low_rank and (_flatten(low_rank[0]), low_rank[1])
        scales = rows.scale, w.scale
        out = _quantized_pair(made, (call, plan), *scales, bias, rows.q, w.q, low_rank)
    else:
        out = _weight_only(made, (call, plan), rows, w.scale, w.zero, bias, w.q)
    return out.reshape(*x.shape[:-1], w.shape[0])


def _prepared_product(
    x: jax.Array | QTensor,
    w: CpuWeight,
    bias: jax.Array | None,
    out_dtype: jnp.dtype,
    implementation: Implementation | None,
) -> jax.Array:
    """The product of a weight in the layout of the CPU's handler alone."""
    if w.columns is not None and not is_empty(x):
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None)
    rows = _flatten(x)
    call = MatmulCall.of(rows, w, out_dtype, bias=bias)
    find, on_cpu = functools.partial(choice.plan, call), _cpu_plan(call, implementation)
    plan = choose_plan("quantized_matmul", implementation, find, rows, w, cpu=on_cpu)
    if plan is None:
        return _product(x, restore(w), bias, out_dtype, "xla")
    made = chosen(plan, implementation)
    out = _fused(made, (call, plan), rows, w, bias, None, None, None)
    return out.reshape(*x.shape[:-1], w.shape[0])


def _composed(
    call: MatmulCall,
    implementation: Implementation | None,
    x: Any,
    w: jax.Array | QTensor | CpuWeight,
    bias: jax.Array | None,
    gamma: jax.Array | None,
    residual: jax.Array | None,
    pending: jax.Array | None = None,
) -> Any:
    """The parts of a fused product one after the other."""
    if pending is not None:
        total = (x.astype(jnp.float32) + pending.astype(jnp.float32)).astype(x.dtype)
        return _composed(call, implementation, total, w, bias, gamma, residual), total
    if gamma is not None and call.eps is not None:  # both or neither
        x = rms_norm(x, gamma, call.eps, implementation=implementation)
    if isinstance(w, QTensor):
        y = _product(x, w, bias, call.out, implementation)
    elif isinstance(w, CpuWeight):
        y = _prepared_product(x, w, bias, call.out, implementation)
    else:
        y = _dense(x, w, bias, call.out)
    if call.swiglu:
        y = gate(y, call.activation, implementation=implementation)
    return y if residual is None else residual + y


def _dense(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    """A product with plain weights, by XLA."""
    # Rows are flattened because XLA's matrix-vector code wants a plain 2-D product.  On CPUs
    # ``x @ w.T`` says the same and is slower: a fifth in SmolLM2 on jax 0.10, four times on 0.11.
    out = lax.dot_general(
        _flatten(x),
        w.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )
    if bias is not None:
        out = out + bias.astype(x.dtype)
    return out.reshape(*x.shape[:-1], w.shape[0]).astype(out_dtype)


_Tree = TypeVar("_Tree")
_Static = tuple[MatmulCall, Any]  # and the kernel's plan
_OPERANDS = {
    "x": "float|QTensor [..., K]",
    "w": "float|QTensor [N, K]",
    "bias": "float [N] ?",
    "norm's weight": "float [K] ?",
    "pending": "float [..., K] ?",
    "residual": "float [..., columns] ?",
}


def _check(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    bias: jax.Array | None,
    out_dtype: jnp.dtype,
    norm: tuple[jax.Array, float] | None,
    residual: jax.Array | None,
    swiglu: bool,
    pending: jax.Array | None,
    low_rank: _LowRank | None,
) -> None:
    """ValueError, with the fact, for operands that make no product."""
    op = "quantized_matmul"
    gamma = None if norm is None else norm[0]
    fused = {"bias": bias, "norm's weight": gamma, "pending": pending, "residual": residual}
    check(op, _OPERANDS, x=x, w=w.outline if isinstance(w, CpuWeight) else w, **fused)
    n = w.shape[0]
    if out_dtype.name not in FLOATS:
        raise ValueError(f"{op}: out_dtype {out_dtype} is not a float")
    if isinstance(x, QTensor):
        _check_pair(x, w)
        if norm is not None or residual is not None or swiglu:
            raise ValueError(f"{op}: norm, residual and swiglu go with a float x")
    if low_rank is not None:
        _check_low_rank(x, w, *low_rank)
    if pending is not None and norm is None:
        raise ValueError(f"{op}: pending, of x's shape {x.shape}, comes before a norm")
    if swiglu and n % 2:
        raise ValueError(f"{op}: the {n} rows of w are not gate and up")
    shape = (*x.shape[:-1], n // 2 if swiglu else n)
    if residual is not None and (residual.shape, residual.dtype) != (shape, out_dtype):
        raise ValueError(
            f"{op}: residual {residual.dtype}{residual.shape} is not the result's "
            f"{out_dtype}{shape}, of x {x.shape} and w {w.shape}"
        )


def _check_activation(activation: str | None, swiglu: bool) -> None:
    known = _GATES if swiglu else tuple(_ACTIVATIONS)
    if activation is not None and activation not in known:
        what = "the gate of swiglu" if swiglu else "a product"
        raise ValueError(
            f"quantized_matmul: activation {activation!r} of {what} is not one of "
            f"{', '.join(known)}"
        )


def _activated(y: jax.Array, activation: str) -> jax.Array:
    """The activation of a product, in float32, of y's dtype."""
    reason = Reason("behind a product it is element-wise, and XLA's fusion runs at memory speed")
    choose_plan(activation, None, lambda: reason, y)  # ``explain`` lists it
    return _ACTIVATIONS[activation](y.astype(jnp.float32)).astype(y.dtype)


def _check_low_rank(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | CpuWeight,
    inner: jax.Array,
    second: tuple[jax.Array, ...],
) -> None:
    op, ranks = "quantized_matmul", second[0].shape[-1]
    if not isinstance(x, QTensor):
        raise ValueError(f"{op}: low_rank goes with a quantized x")
    shape = (*x.shape[:-1], len(second) * ranks)
    fits = all(b.ndim == 2 and b.shape[1] == ranks and b.dtype == inner.dtype for b in second)
    if not fits or inner.shape != shape or sum(b.shape[0] for b in second) != w.shape[0]:
        raise ValueError(
            f"{op}: low_rank {inner.shape} and {[b.shape for b in second]} do not fit x {x.shape} "
            f"and w {w.shape}"
        )


def _check_pair(x: QTensor, w: jax.Array | QTensor | CpuWeight) -> None:
    if not isinstance(w, QTensor):
        raise ValueError("quantized_matmul: a quantized x goes with a quantized w")
    pair = (jnp.dtype(x.dtype).name, jnp.dtype(w.dtype).name)
    if pair[0] not in ("int8", "float8_e4m3fn") or pair[1] not in (pair[0], "int4"):
        raise ValueError(
            f"quantized_matmul: no scheme multiplies {pair[0]} by {pair[1]} codes, x by w"
        )
    if x.columns is not None:
        raise ValueError("quantized_matmul: a quantized x has its columns in order")
    for name, t in (("x", x), ("w", w)):
        if t.dtype == jnp.int4:
            if t.zero is not None and not jnp.issubdtype(t.zero.dtype, jnp.integer):
                raise ValueError("quantized_matmul: with a quantized x, w needs integer zeros")
        elif t.scale.shape[-1] != 1 or t.zero is not None:
            raise ValueError(
                f"quantized_matmul: with a quantized x, {name} needs one scale per row and no "
                f"zeros, not {t.scale.shape[-1]} groups"
                + (" with zeros" if t.zero is not None else "")
            )


def quantized_matmul_reference(
    x: jax.Array | QTensor,
    w: QTensor,
    *,
    bias: jax.Array | None = None,
    activation: _Activation | None = None,
) -> jax.Array:
    """The same product written plainly, in float32; never optimised."""
    x32 = dequantize(x) if isinstance(x, QTensor) else x.astype(jnp.float32)
    out = jnp.einsum("...k,nk->...n", x32, dequantize(w), precision=lax.Precision.HIGHEST)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out if activation is None else _ACTIVATIONS[activation](out)


def _flatten(x: _Tree) -> _Tree:
    # Not -1, which zero columns leave open.
    return jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1]), x)


def _finish(acc: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)
    return acc.astype(out_dtype)


# --- weight-only ---------------------------------------------------------------------------------


def _weight_only_kernel(
    static: _Static,
    x: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    bias: jax.Array | None,
    q: jax.Array,
) -> jax.Array:
    return choice.run(static, x, QTensor(q, scale, zero), bias)


def _weight_only_xla(
    static: _Static,
    x: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    bias: jax.Array | None,
    q: jax.Array,
) -> jax.Array:
    return _finish(weight_only_sums(x, scale, zero, q), bias, static[0].out)


def _weight_only_backward(
    chosen: OpChoice, static: _Static, operands: Any, saved: Any, dy: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, scale, zero, bias, q = operands
    dy = dy.astype(jnp.float32)
    dx = contract_rows(dy, QTensor(q, scale, zero), x.dtype).astype(x.dtype)
    # dW is formed only if a caller wants a gradient of scale or zero; jit drops it otherwise.
    dw = outer_sums(dy, x).reshape(*scale.shape, -1)
    codes = q.astype(jnp.float32).reshape(dw.shape)
    dzero = None
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        codes = codes - zero.astype(jnp.float32)[..., None]
    elif zero is not None:
        dzero = jnp.sum(dw, axis=-1).astype(zero.dtype)
    dscale = jnp.sum(dw * codes, axis=-1).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx, dscale, dzero, dbias, None


_weight_only = Op(
    "quantized_matmul", _weight_only_xla, _weight_only_kernel, backward=_weight_only_backward
)


# --- quantized x quantized -----------------------------------------------------------------------


def _pair_kernel(
    static: _Static,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    xq: jax.Array,
    wq: jax.Array,
    low_rank: _LowRank | None,
) -> jax.Array:
    x, w = QTensor(xq, x_scale), QTensor(wq, w_scale)
    return choice.run(static, x, w, bias, low_rank=low_rank)


def _pair_xla(
    static: _Static,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    xq: jax.Array,
    wq: jax.Array,
    low_rank: _LowRank | None,
) -> jax.Array:
    scales = x_scale.astype(jnp.float32) * w_scale.astype(jnp.float32)[:, 0]
    sums = pair_sums(xq, wq) * scales
    if low_rank is not None:
        sums = sums + low_rank_sums(*low_rank)
    return _finish(sums, bias, static[0].out)


_quantized_pair = Op("quantized_matmul", _pair_xla, _pair_kernel)


def _int4_kernel(
    static: _Static,
    x_scale: jax.Array,
    w_scale: jax.Array,
    unit: jax.Array | None,
    bias: jax.Array | None,
    xq: jax.Array,
    wq: jax.Array,
    zero: jax.Array | None,
) -> jax.Array:
    x, w = QTensor(xq, x_scale), QTensor(wq, w_scale, zero, unit=unit)
    return choice.run(static, x, w, bias)


def _int4_xla(
    static: _Static,
    x_scale: jax.Array,
    w_scale: jax.Array,
    unit: jax.Array | None,
    bias: jax.Array | None,
    xq: jax.Array,
    wq: jax.Array,
    zero: jax.Array | None,
) -> jax.Array:
    if unit is not None and xq.dtype == jnp.int8:
        sums = pair_sums(xq, widened(wq, w_scale, zero)) * unit[:, 0]
    else:
        w = QTensor(wq, w_scale, zero, unit=unit).in_one_level
        sums = weight_only_sums(xq.astype(jnp.bfloat16), w.scale, w.zero, w.q)
    return _finish(sums * x_scale.astype(jnp.float32), bias, static[0].out)


_int4_pair = Op("quantized_matmul", _int4_xla, _int4_kernel)


# --- fused products ------------------------------------------------------------------------------


def _fused_xla(static: _Static, *operands: Any) -> Any:
    return _composed(static[0], "xla", *operands)


def _fused_parts(static: _Static, x: jax.Array, w: Any, *rest: Any) -> Any:
    # A prepared weight's derivative is that of the weight which it stands for.
    w = restore(w) if isinstance(w, CpuWeight) else w
    return _composed(static[0], None, x, w, *rest)


_fused = Op("quantized_matmul", _fused_xla, choice.run, derivative=_fused_parts)

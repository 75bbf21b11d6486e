"""Matrix product with a weight that is quantized, or plain: ``x[..., K] @ w[N, K].T + bias``.

The scheme is read off the operands:

    x float  x  w int4 | int8 | float8_e4m3fn   weight-only: groups or rows, zeros of both kinds
    x float  x  w float4_e2m1fn                 weight-only: MXFP4 and NVFP4
    x float  x  w float                         plain
    x int8   x  w int8                          W8A8: int32 accumulation, exact
    x fp8    x  w fp8                           FP8: float32 accumulation; also both in groups
    x int8   x  w int4, scales in two levels    W4A8: int32 accumulation, exact
    x int8 or fp8  x  w int4                    W4A8: float32 accumulation of groups' sums

In the last four schemes ``x`` is a QTensor with one scale per token, without zeros. In W8A8 and FP8
``w`` has one scale per output channel and no zeros either. In FP8 x and w may instead have as many
groups of columns, each with a scale (DeepSeek-V3's blocks, arXiv 2412.19437, section 3.3). An int4
``w`` may have groups and integer zeros. The scales of tokens and rows and the bias are applied to
the accumulator, then the result is cast once. A ``w`` with ``columns`` (act-order) takes x's
features in that order. x is gathered before everything else, so no kernel sees that order, except
that W4A8's kernel reads the one of ``interleave`` with x as it is.

The call may include the work around the product in a decoder: an RMSNorm of x before it, and
SwiGLU, an activation or a residual after it.  With up to 16 rows of 16-bit floats all of it but the
activation is one kernel, float32 from the product to the only rounding.  Elsewhere the ops run one
after the other.  ``fused.fused_matmul`` is the one kernel or None.  A quantized x takes what comes
after the product, and no norm: ``rms_norm(quantize=)`` makes its codes.  It may have a low-rank
term (LoRA).  With up to 64 rows the product's kernel computes that term.

The XLA forms are in ``weight_only`` and ``codes``, the kernels in ``few_rows`` (up to 16 rows of
x), ``mid_rows`` and ``many_rows``; ``matmul.choice`` asks each for a plan.  All read the plain
layout, so loading a model needs no new layout.  Only W4A8 is faster in another order of columns
(``interleave``).  The CPU's handler (``cpu.matmul``) reads its own
layout, a ``CpuWeight``; to prepare one is to choose the handler.  It rounds floats of x to 8 bits
by blocks of 32.

Gradients: a float x has them for x, bias, w.scale of floats of 16 bits or more, w.unit, a floating
w.zero (or a plain w) and the fused operands. A QTensor x has them for both scales and bias.  Codes
get none.  On an accelerator, the gradient of x is one product with the dequantized weight, in
blocks of 512 MiB if it is larger.  Its operands have x's dtype and its sums are float32. On a CPU
it goes by tiles, in float32.

Leaves out: mixed pairs of dtypes other than with int4; scales that vary along K for a quantized x
other than FP8; a residual after SwiGLU in one kernel.
Sources: LLM.int8 (arXiv 2208.07339), AWQ (2306.00978), GPTQ (2210.17323), SmoothQuant (2211.10438).
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
)
from pallas_kernels.fixed_sums import by_blocks
from pallas_kernels.matmul import call, choice
from pallas_kernels.matmul.call import Around, LowRankTerm, MatmulCall, Static
from pallas_kernels.matmul.codes import codes, low_rank_sums
from pallas_kernels.matmul.weight_only import finish, weight_only, weight_only_gradients
from pallas_kernels.operands import FLOATS, check, dtype_name
from pallas_kernels.qtensor import FLOAT4, QTensor, dequantize, take_columns
from pallas_kernels.rows.activations import ACTIVATIONS, GATES
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu
from pallas_kernels.transform import Op, chosen

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
_Tree = TypeVar("_Tree")
_Weight = jax.Array | QTensor | CpuWeight
_Result = jax.Array | tuple[jax.Array, jax.Array]


_OP = "quantized_matmul"
_OPERANDS = {
    "x": "float|QTensor [..., K]",
    "w": "float|QTensor [N, K]",
    "bias": "float [N] ?",
    "norm's weight": "float [K] ?",
    "pending": "float [..., K] ?",
    "residual": "float [..., columns] ?",
}
_FUSED = tuple(_OPERANDS)[2:]


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
    activation: Activation | None = ...,
    pending: None = ...,
    low_rank: LowRankTerm | None = ...,
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
    activation: Activation | None = ...,
    pending: jax.Array,
    low_rank: LowRankTerm | None = ...,
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
    activation: Activation | None = None,
    pending: jax.Array | None = None,
    low_rank: LowRankTerm | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return ``x`` times ``w`` transposed, with optional steps before and after the product.

    Parameters
    ----------
    x : float or QTensor [..., K]
        The rows. float32, bfloat16 or float16, or codes of ``quantize_tokens``.
    w : float, QTensor or CpuWeight [N, K]
        The weight.
    bias : float [N], optional
        Added in float32 before the only cast.
    out_dtype : data-type, optional
        Float dtype of the result. The default is x's. For a QTensor x it is the dtype of w.scale if
        that has 16 bits, else float32.
    norm : (float [K], float), optional
        Weight and epsilon of an RMSNorm of a float x that comes first.
    residual : [..., N], optional
        Added last. It has the result's shape and dtype.
    swiglu : bool
        The rows of w are gate, then up. The result is ``activation(gate) * up``, ``[..., N / 2]``.
    activation : str, optional
        "relu", "gelu", "gelu_tanh" (its approximation) or "silu" of the product with its bias. With
        ``swiglu`` the gate's: "silu" by default, "gelu" or "gelu_tanh".
    pending : [..., K], optional
        Added to x before ``norm``; float32 or x's dtype.
    low_rank : (float [..., S R], S factors [N_s, R]), optional
        With a QTensor x, added in float32 before the cast. The N_s rows of w from source s get
        ``inner[..., s R : s R + R] @ second[s].T``. ``rows.low_rank`` makes inner.
    implementation : "xla", "mosaic", "cpu" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    Array [..., N], or [..., N / 2] with ``swiglu``
        The result in out_dtype. With ``pending`` a pair: the result, and the sum of x and pending
        in x's dtype.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | floats and scales, and floating zeros: a rule of its own |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    No kernel has an activation without ``swiglu``. The product is then cast to out_dtype, and XLA
    computes the activation in float32 and casts again. ``explain`` shows this.
    """
    if out_dtype is None:
        out_dtype = _codes_result(x, w) if isinstance(x, QTensor) else x.dtype
    else:
        out_dtype = dtype_name(_OP, "out_dtype", out_dtype, FLOATS)
    gamma, eps = (None, None) if norm is None else norm
    gated = swiglu, activation
    around = Around(jnp.dtype(out_dtype), bias, gamma, eps, residual, pending, *gated, low_rank)
    check_operands(x, w, around)
    is_alone = gamma is residual is pending is activation is None and not swiglu
    if is_alone and isinstance(w, QTensor | CpuWeight):
        return _product(x, w, around, implementation)
    check_around(x, w, around)
    if activation is not None and not swiglu:
        return _with_activation(x, w, around, activation, implementation)
    if isinstance(x, QTensor):  # no kernel does more than the product
        return _composed(x, w, around, implementation)
    find, on_cpu = planners(x, w, around, implementation)
    plan = choose_plan(_OP, implementation, find, x, w, gamma, residual, pending, cpu=on_cpu)
    if plan is None:
        return _composed(x, w, around, "xla" if is_empty(x, w) else implementation)
    return run(x, w, around, plan, implementation)


def _codes_result(x: QTensor, w: _Weight) -> DTypeLike:
    """Return the dtype of a product of codes for which the caller names none."""
    scale = getattr(w, "scale", x.scale).dtype
    return scale if scale.itemsize == 2 else jnp.float32


def planners(
    x: jax.Array | QTensor,
    w: _Weight,
    around: Around,
    implementation: Implementation | None = None,
) -> tuple[Find, Find | None]:
    """Return the planner of the GPU's kernels, and that of the CPU's handler.

    The handler is asked if w is in its layout, or if the caller named it.
    """
    call = functools.partial(MatmulCall.around, x, w, around)
    is_asked = isinstance(w, CpuWeight) or implementation == "cpu"
    return lambda: choice.plan(call()), (lambda: cpu.plan(call())) if is_asked else None


def run(
    x: jax.Array | QTensor,
    w: _Weight,
    around: Around,
    plan: Plan,
    implementation: Implementation | None,
) -> _Result:
    """Compute a product and all that is fused with the plan's kernel."""
    static = Static(around.out, MatmulCall.around(x, w, around), plan)
    rows = {name: _flatten(getattr(around, name)) for name in ("residual", "pending")}
    eps = None if around.eps is None else float(around.eps)
    around = dataclasses.replace(around, **rows, eps=eps)
    out = _fused(chosen(plan, implementation), static, _flatten(x), w, around)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), out)


def product_plan(
    x: jax.Array | QTensor, w: QTensor, *, out_dtype: DTypeLike, bias: jax.Array | None = None
) -> Plan | Reason:
    """Return the plan of ``quantized_matmul`` of these with nothing else, on a GPU."""
    return choice.plan(MatmulCall.of(x, _without_notes(x, w), out_dtype, bias=bias))


def _without_notes(x: jax.Array | QTensor, w: QTensor) -> QTensor:
    """Return w without notes, and for floats of x in one level of scales."""
    # An accelerator reads NVFP4's scales as they are stored, and applies ``unit`` to the sums.
    keeps_levels = isinstance(x, QTensor) or w.dtype == FLOAT4
    w = w if keeps_levels else w.in_one_level
    notes: dict[str, Any] = {"blocked": w.blocked} if isinstance(x, QTensor) else {}
    if w.columns is not None and _keeps_order(x, w):
        notes |= {"columns": w.columns, "interleaved": True}
    return QTensor(w.q, w.scale, w.zero, unit=w.unit, **notes)


def _keeps_order(x: jax.Array | QTensor, w: _Weight) -> bool:
    """Whether a kernel reads w's columns, which have an order, in that order with x as it is."""
    if not (isinstance(x, QTensor) and isinstance(w, QTensor)):
        return False
    return w.interleaved and w.columns is not None


def _product(
    x: jax.Array | QTensor,
    w: QTensor | CpuWeight,
    around: Around,
    implementation: Implementation | None,
) -> jax.Array:
    """Compute the product of a weight in codes with nothing around it but a low-rank term."""
    if w.columns is not None and not _keeps_order(x, w) and not is_empty(x, w):
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None)
    if isinstance(w, CpuWeight):
        return _prepared_product(x, w, around, implementation)
    rows, w = _flatten(x), _without_notes(x, w)
    find, on_cpu = planners(rows, w, around, implementation)
    plan = choose_plan(_OP, implementation, find, rows, w, cpu=on_cpu)
    if plan is None and around.low_rank is not None:
        return _with_low_rank(x, w, around, around.low_rank, implementation)
    if is_empty(x, w):
        return finish(jnp.zeros((*x.shape[:-1], w.shape[0]), jnp.float32), around.bias, around.out)
    made = chosen(plan, implementation)
    static = Static(around.out, None if plan is None else MatmulCall.around(rows, w, around), plan)

    def product(rows: jax.Array | QTensor, w: QTensor) -> jax.Array:
        if isinstance(rows, QTensor):
            return _codes(made, static, rows, w, around.bias, _flat_term(around.low_rank))
        return _weight_only(made, static, rows, w, around.bias)

    out = by_blocks(product, rows, w) if plan is None else product(rows, w)
    return out.reshape(*x.shape[:-1], w.shape[0])


def _flat_term(low_rank: LowRankTerm | None) -> LowRankTerm | None:
    return None if low_rank is None else (_flatten(low_rank[0]), low_rank[1])


def _with_low_rank(
    x: jax.Array | QTensor,
    w: QTensor,
    around: Around,
    low_rank: LowRankTerm,
    implementation: Implementation | None,
) -> jax.Array:
    """Compute the product, then add the low-rank term."""
    alone = Around(jnp.dtype(jnp.float32), around.bias)
    y = _product(x, w, alone, implementation)
    return (y + low_rank_sums(*low_rank)).astype(around.out)


def _prepared_product(
    x: jax.Array | QTensor,
    w: CpuWeight,
    around: Around,
    implementation: Implementation | None,
) -> jax.Array:
    """Compute the product of a weight in the layout of the CPU's handler."""
    rows = _flatten(x)
    find, on_cpu = planners(rows, w, around, implementation)
    plan = choose_plan(_OP, implementation, find, rows, w, cpu=on_cpu)
    if plan is None:
        return _product(x, restore(w), around, "xla")
    static = Static(around.out, MatmulCall.around(rows, w, around), plan)
    out = _fused(chosen(plan, implementation), static, rows, w, around)
    return out.reshape(*x.shape[:-1], w.shape[0])


def _composed(x: Any, w: _Weight, around: Around, implementation: Implementation | None) -> Any:
    """Compute the parts of a fused product one after the other."""
    if around.pending is not None:
        total = (x.astype(jnp.float32) + around.pending.astype(jnp.float32)).astype(x.dtype)
        rest = dataclasses.replace(around, pending=None)
        return _composed(total, w, rest, implementation), total
    if around.gamma is not None and around.eps is not None:  # both or neither
        x = rms_norm(x, around.gamma, around.eps, implementation=implementation)
    if isinstance(w, QTensor | CpuWeight):
        if isinstance(x, QTensor):
            return _after_codes(x, w, around, implementation)
        alone = Around(around.out, around.bias, low_rank=around.low_rank)
        y = _product(x, w, alone, implementation)
    else:
        y = _dense(x, w, around.bias, around.out)
    if around.swiglu:
        y = swiglu(y, activation=around.gate, implementation=implementation)
    return y if around.residual is None else around.residual + y


def _after_codes(
    x: QTensor, w: QTensor | CpuWeight, around: Around, implementation: Implementation | None
) -> jax.Array:
    """Compute a product of codes, its gate and its residual in float32, rounded once at the end.

    The kernel of int4 codes writes 16 bits, so on a GPU its products are rounded before the rest.
    """
    is_short = w.dtype == jnp.int4 and around.out.itemsize == 2 and implementation != "xla"
    rounded = is_short and jax.default_backend() == "gpu"
    out = around.out if rounded else jnp.dtype(jnp.float32)
    alone = Around(out, around.bias, low_rank=around.low_rank)
    y = _product(x, w, alone, implementation).astype(jnp.float32)
    if around.swiglu:
        y = swiglu(y, activation=around.gate)
    if around.residual is not None:
        y = y + around.residual.astype(jnp.float32)
    return y.astype(around.out)


def _dense(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    """A product with plain weights, by XLA."""
    # Rows are flattened because XLA's matrix-vector code wants a plain 2-D product.  On CPUs
    # ``x @ w.T`` says the same and is slower: a fifth in SmolLM2 on jax 0.10, four times on 0.11.
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )
    out = by_blocks(product, _flatten(x), w.astype(x.dtype))
    if bias is not None:
        out = out + bias.astype(x.dtype)
    return out.reshape(*x.shape[:-1], w.shape[0]).astype(out_dtype)


def check_operands(x: jax.Array | QTensor, w: _Weight, around: Around) -> None:
    """Raise ValueError, with the fact, for operands that make no product."""
    given = around.bias, around.gamma, around.pending, around.residual
    fused = dict(zip(_FUSED, given, strict=True))
    check(_OP, _OPERANDS, x=x, w=w.outline if isinstance(w, CpuWeight) else w, **fused)
    if isinstance(x, QTensor):
        call.check_codes(x, w, around.gamma is not None)
    if around.low_rank is not None:
        call.check_low_rank(x, w, *around.low_rank)


def check_around(x: jax.Array | QTensor, w: _Weight, around: Around) -> None:
    """Raise ValueError if what stands around the product does not fit it."""
    if around.pending is not None and around.gamma is None:
        raise ValueError(f"{_OP}: pending, of x's shape {x.shape}, comes before a norm")
    if around.swiglu and w.shape[0] % 2:
        raise ValueError(f"{_OP}: the {w.shape[0]} rows of w are not gate and up")
    if around.residual is not None:
        _check_residual(x, w, around, around.residual)
    known = GATES if around.swiglu else tuple(ACTIVATIONS)
    if around.activation is not None and around.activation not in known:
        what = "the gate of swiglu" if around.swiglu else "a product"
        raise ValueError(
            f"{_OP}: activation {around.activation!r} of {what} is not one of {', '.join(known)}"
        )


def _check_residual(
    x: jax.Array | QTensor, w: _Weight, around: Around, residual: jax.Array
) -> None:
    shape = (*x.shape[:-1], w.shape[0] // 2 if around.swiglu else w.shape[0])
    if (residual.shape, residual.dtype) != (shape, around.out):
        raise ValueError(
            f"{_OP}: residual {residual.dtype}{residual.shape} is not the result's "
            f"{around.out}{shape}, of x {x.shape} and w {w.shape}"
        )


def _with_activation(
    x: jax.Array | QTensor,
    w: _Weight,
    around: Around,
    activation: str,
    implementation: Implementation | None,
) -> _Result:
    """Compute the product, then its activation in float32, then add the residual."""
    before = None if around.gamma is None or around.eps is None else (around.gamma, around.eps)
    alone: Any = quantized_matmul(
        x,
        w,
        bias=around.bias,
        out_dtype=around.out,
        norm=before,
        pending=around.pending,
        low_rank=around.low_rank,
        implementation=implementation,
    )
    y, *total = alone if around.pending is not None else (alone,)
    reason = Reason("behind a product it is element-wise, and XLA's fusion runs at memory speed")
    choose_plan(activation, None, lambda: reason, y)  # ``explain`` lists it
    y = ACTIVATIONS[activation](y.astype(jnp.float32)).astype(y.dtype)
    y = y if around.residual is None else around.residual + y
    return (y, *total) if total else y


def _flatten(x: _Tree) -> _Tree:
    """Return arrays ``[..., K]`` as ``[M, K]``; the scale of all rows, which has no axes, stays."""
    # Not -1 rows, which zero columns leave open.
    rows = lambda leaf: leaf.reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1])  # noqa: E731
    return jax.tree.map(lambda leaf: rows(leaf) if leaf.ndim else leaf, x)


def quantized_matmul_reference(
    x: jax.Array | QTensor,
    w: QTensor,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Return ``quantized_matmul`` written plainly, in float32, which tests compare it with."""
    x32 = dequantize(x) if isinstance(x, QTensor) else x.astype(jnp.float32)
    out = jnp.einsum("...k,nk->...n", x32, dequantize(w), precision=lax.Precision.HIGHEST)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out if activation is None else ACTIVATIONS[activation](out)


# --- the ops -------------------------------------------------------------------------------------


def _product_kernel(
    static: Static,
    x: jax.Array | QTensor,
    w: QTensor,
    bias: jax.Array | None,
    low_rank: LowRankTerm | None = None,
) -> jax.Array:
    return choice.run(static, x, w, Around(static.out, bias, low_rank=low_rank))


def _fused_xla(static: Static, x: jax.Array, w: _Weight, around: Around) -> Any:
    del static
    return _composed(x[..., : w.shape[1]], w, around, "xla")


def _fused_parts(static: Static, x: jax.Array, w: _Weight, around: Around) -> Any:
    del static
    # A prepared weight's derivative is that of the weight which it stands for.
    w = restore(w) if isinstance(w, CpuWeight) else w
    return _composed(x[..., : w.shape[1]], w, around, None)


_weight_only = Op(_OP, weight_only, _product_kernel, backward=weight_only_gradients)
_codes = Op(_OP, codes, _product_kernel)
_fused = Op(_OP, _fused_xla, choice.run, derivative=_fused_parts)

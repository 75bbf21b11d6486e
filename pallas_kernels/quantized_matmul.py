"""Matrix product with a weight that is quantized, or plain: ``x[..., K] @ w[N, K].T + bias``.

The scheme is read off the operands:

    x float  x  w int4 | int8 | float8_e4m3fn   weight-only: groups or rows, zeros of both kinds
    x float  x  w float                         plain
    x int8   x  w int8                          W8A8: int32 accumulation, exact
    x fp8    x  w fp8                           FP8: float32 accumulation

In the last two ``x`` is a QTensor with one scale per token and ``w`` has one per output channel,
neither with zeros; both scales and the bias are applied to the accumulator, then one cast.
A ``w`` with ``columns`` (act-order) takes x's features in that order: one gather before anything
else, so that no kernel knows of it.

What stands around the product in a decoder may be part of the call: an RMSNorm of x before it,
SwiGLU and a residual behind it.  Up to 16 rows of 16-bit floats it is then one kernel, float32 from
the product to the only rounding; elsewhere the ops run one after the other.  ``fusible`` tells.

The XLA forms are in ``quantized_matmul_xla``; the kernels in ``quantized_matmul_row_mosaic`` (one
row of x), ``quantized_matmul_decode_mosaic`` (up to 16) and ``quantized_matmul_prefill_mosaic``.
All read the plain layout, so there is no re-layout at load.

Gradients: for float x, with respect to x, bias, w.scale and a floating w.zero (or a plain w), and
to what is fused; for QTensor x, with respect to both scales and bias.  Words are integers and get
none.

Leaves out: mixed pairs (int8 x int4, int8 x fp8), scales that vary along K for quantized x, a
residual behind SwiGLU in one kernel.
Sources: LLM.int8 (arXiv 2208.07339), AWQ (2306.00978), GPTQ (2210.17323), SmoothQuant (2211.10438).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose, wants_kernel
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize, take_columns
from pallas_kernels.quantized_matmul_choice import (
    Call,
    run_fused,
    run_kernel,
    slower,
    slower_fused,
    unfusible,
    unsupported,
)
from pallas_kernels.quantized_matmul_xla import contract_rows, pair_sums, weight_only_sums
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import swiglu as gate


def quantized_matmul(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    pending: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``x[..., K]`` times ``w[N, K]`` transposed -> ``[..., N]``.

    bias: ``[N]``, added in float32 before the only cast.
    out_dtype: x's dtype for float x; for a QTensor x the dtype of w.scale if that is 16 bits wide
        (the compute dtype of a checkpoint), else float32.
    norm: (weight ``[K]``, eps) of an RMSNorm of x that comes first.
    residual: of the result's shape and dtype, added last.
    swiglu: w's rows are gate, then up; the result is ``silu(gate) * up`` of ``[..., N / 2]``.
    pending: float32 of x's shape, to be added to x before the norm; the result is then a pair, with
        the sum in x's dtype.
    Raises ValueError for shapes or dtypes that do not go together, NotImplementedError for
    ``implementation="mosaic"`` where no kernel covers the call.
    """
    check_operands(x, w, bias)
    if out_dtype is None:
        if not isinstance(x, QTensor):
            out_dtype = x.dtype
        else:
            out_dtype = w.scale.dtype if w.scale.dtype.itemsize == 2 else jnp.float32
    out_dtype = jnp.dtype(out_dtype)
    _check_fused(x, w, out_dtype, norm, residual, swiglu, pending)
    if norm is None and residual is None and not swiglu and isinstance(w, QTensor):
        return _product(x, w, bias, out_dtype, implementation)
    gamma, eps = (None, None) if norm is None else (norm[0], float(norm[1]))
    call = Call(eps, swiglu, out_dtype)
    asked = wants_kernel(implementation)
    reason = unfusible(x, w, call, gamma, residual, pending) if asked else None
    if asked and implementation is None and reason is None:
        reason = slower_fused(x, w, call, gamma, residual, pending)
    if choose("quantized_matmul", implementation, reason) == "xla":
        return _composed(call, implementation, x, w, bias, gamma, residual, pending)
    residual, pending = _flatten(residual), _flatten(pending)
    out = _fused(call, _flatten(x), w, bias, gamma, residual, pending)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), out)


def fusible(
    x: jax.Array | QTensor,
    w: jax.Array | QTensor | RowBlocks,
    *,
    out_dtype: DTypeLike | None = None,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    pending: jax.Array | None = None,
) -> bool:
    """Is ``quantized_matmul`` of these one kernel here, and the faster way?  Only shapes and dtypes
    are looked at."""
    if isinstance(x, QTensor) or isinstance(w, RowBlocks) or not wants_kernel(None):
        return False
    eps = None if norm is None else float(norm[1])
    call = Call(eps, swiglu, jnp.dtype(x.dtype if out_dtype is None else out_dtype))
    given = x, w, call, None if norm is None else norm[0], residual, pending
    return unfusible(*given) is None and slower_fused(*given) is None


def _product(x, w, bias, out_dtype, implementation) -> jax.Array:
    """The product of a QTensor alone."""
    if w.columns is not None:
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None)
    lead = x.shape[:-1]
    rows = _flatten(x)
    asked = wants_kernel(implementation)
    reason = unsupported(rows, w, out_dtype=out_dtype) if asked else None
    if asked and implementation is None and reason is None:
        reason = slower(rows, w)
    chosen = choose("quantized_matmul", implementation, reason)
    if isinstance(x, QTensor):
        out = _quantized_pair(rows.scale, w.scale, bias, rows.q, w.q, out_dtype, chosen)
    else:
        out = _weight_only(rows, w.scale, w.zero, bias, w.q, out_dtype, chosen)
    return out.reshape(*lead, w.shape[0])


def _composed(call: Call, implementation, x, w, bias, gamma, residual, pending=None):
    """The parts of a fused product one after the other."""
    if pending is not None:
        total = (x.astype(jnp.float32) + pending).astype(x.dtype)
        return _composed(call, implementation, total, w, bias, gamma, residual), total
    if gamma is not None:
        x = rms_norm(x, gamma, call.eps, implementation=implementation)
    if isinstance(w, QTensor):
        y = _product(x, w, bias, call.out_dtype, implementation)
    else:
        y = _dense(x, w, bias, call.out_dtype)
    if call.swiglu:
        y = gate(y, implementation=implementation)
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


def check_operands(x: jax.Array | QTensor, w: QTensor, bias: jax.Array | None) -> None:
    """Raises ValueError, with the fact, for operands that make no product."""
    if w.ndim != 2:
        raise ValueError(f"quantized_matmul: w must be of shape [N, K], not {w.shape}")
    n, k = w.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"quantized_matmul: x {x.shape} does not contract with w {w.shape}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"quantized_matmul: bias {bias.shape} is not ({n},)")
    if isinstance(x, QTensor):
        if not isinstance(w, QTensor):
            raise ValueError("quantized_matmul: a quantized x goes with a quantized w")
        pair = (jnp.dtype(x.dtype).name, jnp.dtype(w.dtype).name)
        if pair not in (("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn")):
            raise ValueError(f"quantized_matmul: no scheme multiplies {pair[0]} by {pair[1]} words")
        if x.columns is not None:
            raise ValueError("quantized_matmul: a quantized x has its columns in order")
        for name, t in (("x", x), ("w", w)):
            if t.scale.shape[-1] != 1 or t.zero is not None:
                raise ValueError(
                    f"quantized_matmul: with a quantized x, {name} needs one scale per row and no "
                    f"zeros, not {t.scale.shape[-1]} groups"
                    + (" with zeros" if t.zero is not None else "")
                )
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantized_matmul: x is {x.dtype}; floats or a QTensor are wanted")


def _check_fused(x, w, out_dtype, norm, residual, swiglu, pending) -> None:
    n, k = w.shape
    if pending is not None and (norm is None or pending.shape != x.shape):
        raise ValueError(f"quantized_matmul: pending, of x's shape {x.shape}, comes before a norm")
    if isinstance(x, QTensor) and (norm is not None or residual is not None or swiglu):
        raise ValueError("quantized_matmul: norm, residual and swiglu go with a float x")
    if norm is not None and norm[0].shape != (k,):
        raise ValueError(f"quantized_matmul: the norm's weight {norm[0].shape} is not ({k},)")
    if swiglu and n % 2:
        raise ValueError(f"quantized_matmul: {n} rows of w are not gate and up")
    shape = (*x.shape[:-1], n // 2 if swiglu else n)
    if residual is not None and (residual.shape, residual.dtype) != (shape, out_dtype):
        raise ValueError(
            f"quantized_matmul: residual {residual.dtype}{residual.shape} is not the result's "
            f"{out_dtype}{shape}"
        )


def quantized_matmul_reference(
    x: jax.Array | QTensor, w: QTensor, *, bias: jax.Array | None = None
) -> jax.Array:
    """The same product written plainly, in float32; never optimised."""
    x32 = dequantize(x) if isinstance(x, QTensor) else x.astype(jnp.float32)
    out = jnp.einsum("...k,nk->...n", x32, dequantize(w), precision=lax.Precision.HIGHEST)
    return out if bias is None else out + bias.astype(jnp.float32)


def _flatten(x: jax.Array | QTensor | None) -> jax.Array | QTensor | None:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), x)


def _finish(acc: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)
    return acc.astype(out_dtype)


# --- weight-only ---------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _weight_only(x, scale, zero, bias, q, out_dtype, chosen):
    if chosen == "mosaic":
        return run_kernel(x, QTensor(q, scale, zero), bias, out_dtype)
    return _finish(weight_only_sums(x, scale, zero, q), bias, out_dtype)


def _weight_only_fwd(x, scale, zero, bias, q, out_dtype, chosen):
    out = _weight_only(x, scale, zero, bias, q, out_dtype, chosen)
    return out, (x, scale, zero, bias, q)


def _weight_only_bwd(out_dtype, chosen, saved, dy):
    x, scale, zero, bias, q = saved
    dy = dy.astype(jnp.float32)
    groups = scale.shape[-1]
    dx = contract_rows(dy, QTensor(q, scale, zero)).astype(x.dtype)
    # dW is formed only if a caller wants a gradient of scale or zero; jit drops it otherwise.
    dw = lax.dot_general(
        dy, x.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    ).reshape(q.shape[0], groups, -1)
    words = q.astype(jnp.float32).reshape(dw.shape)
    dzero = None
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        words = words - zero.astype(jnp.float32)[..., None]
    elif zero is not None:
        dzero = jnp.sum(dw, axis=-1).astype(zero.dtype)
    dscale = jnp.sum(dw * words, axis=-1).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx, dscale, dzero, dbias, None


_weight_only.defvjp(_weight_only_fwd, _weight_only_bwd)


# --- quantized x quantized -----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _quantized_pair(x_scale, w_scale, bias, xq, wq, out_dtype, chosen):
    if chosen == "mosaic":
        return run_kernel(QTensor(xq, x_scale), QTensor(wq, w_scale), bias, out_dtype)
    scales = x_scale.astype(jnp.float32) * w_scale.astype(jnp.float32)[:, 0]
    return _finish(pair_sums(xq, wq) * scales, bias, out_dtype)


def _quantized_pair_fwd(x_scale, w_scale, bias, xq, wq, out_dtype, chosen):
    out = _quantized_pair(x_scale, w_scale, bias, xq, wq, out_dtype, chosen)
    return out, (x_scale, w_scale, bias, xq, wq)


def _quantized_pair_bwd(out_dtype, chosen, saved, dy):
    x_scale, w_scale, bias, xq, wq = saved
    dy = dy.astype(jnp.float32)
    products = dy * pair_sums(xq, wq)
    row, column = x_scale.astype(jnp.float32), w_scale.astype(jnp.float32)
    dx_scale = jnp.sum(products * column[:, 0], axis=1, keepdims=True).astype(x_scale.dtype)
    dw_scale = jnp.sum(products * row, axis=0)[:, None].astype(w_scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx_scale, dw_scale, dbias, None, None


_quantized_pair.defvjp(_quantized_pair_fwd, _quantized_pair_bwd)


# --- fused products ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(call: Call, x, w, bias, gamma, residual, pending):
    return run_fused(call, x, w, bias, gamma, residual, pending)


def _fused_fwd(call, *given):
    return _fused(call, *given), given


def _fused_bwd(call, saved, dy):
    return jax.vjp(functools.partial(_composed, call, None), *saved)[1](dy)


_fused.defvjp(_fused_fwd, _fused_bwd)

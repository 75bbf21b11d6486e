"""RMS normalisation, alone or with the residual add before it and the quantize after it.

    s = x + residual                      (rounded to x's dtype: it is the next residual)
    y = s * rsqrt(mean(s^2) + eps) * weight

computed in float32 with one cast at the end.  The gradient recomputes y from s and the weight, so
nothing of float32 width is kept between the passes.  Source: RMSNorm, arXiv 1910.07467; the fused
forms are FasterLLaMA's ResNormQuantized and ResidualResNormQuantized.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import rowwise
from pallas_kernels.dispatch import Implementation
from pallas_kernels.qtensor import QTensor
from pallas_kernels.qtensor import quantize as quantize_rows


class _Call(NamedTuple):
    """What the traced arrays do not say."""

    eps: float
    quantize: str | None
    out_dtype: str
    implementation: Implementation


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: jax.Array | None = None,
    quantize: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QTensor | tuple[jax.Array | QTensor, jax.Array]:
    """Normalise the last axis of ``x[..., D]`` with ``weight[D]``.

    residual: added first; the sum (x's dtype) is returned as a second value.
    quantize: int8 or float8_e4m3fn; y is then a QTensor with one float32 scale per row.
    out_dtype: of y, x's by default; without effect on a quantized y.
    implementation: "xla", "mosaic", or None for the kernel where it is the faster one.
    Raises ValueError when the shapes disagree, NotImplementedError for a kernel that is not there.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {weight.shape} does not fit x {x.shape}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual {residual.dtype}{residual.shape} is not x's {x.dtype}{x.shape}"
        )
    words = None if quantize is None else jnp.dtype(quantize).name
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype).name
    reason = unsupported(x, weight, quantize=words, out_dtype=out)
    chosen = rowwise.choose("rms_norm", implementation, reason, x.shape[-1])
    return _rms_norm(_Call(float(eps), words, out, chosen), x, residual, weight)


def unsupported(
    x: jax.Array, weight: jax.Array, *, quantize: str | None, out_dtype: str
) -> str | None:
    """Why the Mosaic kernel does not take this call, or None.  The residual makes no difference."""
    reason = rowwise.unsupported(x, x.shape[-1], quantize or out_dtype)
    if reason is None and weight.dtype.name not in rowwise.FLOATS:
        reason = f"the weight is {weight.dtype.name}"
    return reason


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(call: _Call, x, residual, weight):
    if call.implementation == "mosaic":
        return rowwise.norm(
            x, residual, weight, call.eps, quantize=call.quantize, out_dtype=call.out_dtype
        )
    if residual is None:
        return _normalise(call, x, weight)
    total = x + residual
    return _normalise(call, total, weight), total


def _normalise(call: _Call, x, weight):
    s = x.astype(jnp.float32)
    y = s * lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + call.eps)
    y = y * weight.astype(jnp.float32)
    return y.astype(call.out_dtype) if call.quantize is None else quantize_rows(y, call.quantize)


def _forward(call: _Call, x, residual, weight):
    out = _rms_norm(call, x, residual, weight)
    return out, (x if residual is None else out[1], residual is not None, weight)


def _backward(call: _Call, saved, cotangent):
    total, has_residual, weight = saved
    d_out, d_total = cotangent if has_residual else (cotangent, None)
    d_x, d_weight = jax.vjp(functools.partial(_normalise, call), total, weight)[1](d_out)
    if not has_residual:
        return d_x, None, d_weight
    d_x = d_x + d_total
    return d_x, d_x, d_weight


_rms_norm.defvjp(_forward, _backward)

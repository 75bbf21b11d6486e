"""RMS normalisation, alone or with the residual add before it and the quantize after it.

    s = x + residual                      (rounded to x's dtype: it is the next residual)
    y = s * rsqrt(mean(s^2) + eps) * weight

computed in float32 with one cast at the end.  The gradient recomputes y from s and the weight, so
nothing of float32 width is kept between the passes.  Source: RMSNorm, arXiv 1910.07467; the fused
forms are FasterLLaMA's ResNormQuantized and ResidualResNormQuantized.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose_plan
from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.operands import FLOATS, ROW_CODES, check, dtype_name
from pallas_kernels.qtensor import QTensor, of_one_scale
from pallas_kernels.qtensor import quantize as quantize_rows
from pallas_kernels.rounding import to_codes
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.transform import Op, chosen

_OPERANDS = {
    "x": "float [..., D+]",
    "weight": "float [D]",
    "residual": "x [..., D] ?",
    "scale": "float [] ?",
}


class _Call(NamedTuple):
    """The static arguments of a call."""

    eps: float
    quantize: str | None
    out_dtype: str


_Static = tuple[_Call, RowsPlan | None]
_Operands = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None]
_Result = jax.Array | QTensor | tuple[jax.Array | QTensor, jax.Array]


@overload
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: None = ...,
    quantize: None = ...,
    out_dtype: DTypeLike | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...
@overload
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: None = ...,
    quantize: DTypeLike | None = ...,
    scale: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array | QTensor: ...
@overload
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: jax.Array,
    quantize: DTypeLike | None = ...,
    scale: jax.Array | None = ...,
    out_dtype: DTypeLike | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array | QTensor, jax.Array]: ...
def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    residual: jax.Array | None = None,
    quantize: DTypeLike | None = None,
    scale: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QTensor | tuple[jax.Array | QTensor, jax.Array]:
    """Return the RMSNorm of ``x``, or of ``x + residual``, over the last axis.

    Parameters
    ----------
    x : float [..., D]
        float32, bfloat16 or float16.
    weight : float [D]
        Factor of each feature.
    eps : float
        Number that is added to the mean square.
    residual : x's dtype [..., D], optional
        Added to x first.
    quantize : "int8" or "float8_e4m3fn", optional
        Dtype of codes to return in place of floats.
    scale : float scalar, optional
        With ``quantize``: the scale of every row; values beyond its range are clipped. By default
        each row has a scale for its largest magnitude.
    out_dtype : data-type, optional
        Float dtype of the result; x's by default. It has no effect with ``quantize``.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    float [..., D], or QTensor with ``quantize``
        The QTensor has one float32 scale for each row, and with ``scale`` its ``input_scale``. With
        ``residual`` the result is a pair:
        this, and the sum in x's dtype.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | x, residual, weight: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    check("rms_norm", _OPERANDS, x=x, weight=weight, residual=residual, scale=scale)
    codes = None if quantize is None else dtype_name("rms_norm", "quantize", quantize, ROW_CODES)
    if scale is not None and codes is None:
        raise ValueError("rms_norm: scale without quantize")
    scale = None if scale is None else scale.astype(jnp.float32)
    out = dtype_name("rms_norm", "out_dtype", x.dtype if out_dtype is None else out_dtype, FLOATS)
    given = {"given": scale is not None}
    find = functools.partial(plan, "norm", x, codes or out, weight, residual, float(eps), **given)
    found = choose_plan("rms_norm", implementation, find, x, residual, weight, scale)
    call = _Call(float(eps), codes, out), found
    return _rms_norm(chosen(found, implementation), call, x, residual, weight, scale)


def _kernel(
    static: tuple[_Call, RowsPlan],
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    scale: jax.Array | None,
) -> _Result:
    call, plan = static
    from pallas_kernels.rows import kernel

    out = kernel.run(plan, x, residual, weight, given=scale)
    y = out[0]
    if call.quantize is not None:
        y = QTensor(y, out[1]) if scale is None else of_one_scale(y, scale)
    return y if residual is None else (y, out[-1])


def _xla(
    static: _Static,
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    scale: jax.Array | None,
) -> _Result:
    call, _ = static
    total = x if residual is None else x + residual
    s = total.astype(jnp.float32)
    y = s * lax.rsqrt(row_sums(s * s) / s.shape[-1] + call.eps)
    y = y * weight.astype(jnp.float32)
    if call.quantize is None:
        y = y.astype(call.out_dtype)
    elif scale is None:
        y = quantize_rows(y, call.quantize)
    else:
        y = of_one_scale(to_codes(y / scale, call.quantize), scale)
    return y if residual is None else (y, total)


def _at_the_sum(
    static: _Static, operands: _Operands, out: tuple[jax.Array, jax.Array]
) -> _Operands:
    """The sum is kept anyway, as the next residual; x and the residual need not be."""
    _, residual, weight, scale = operands
    return operands if residual is None else (out[1], jnp.zeros_like(residual), weight, scale)


_rms_norm = Op("rms_norm", _xla, _kernel, at=_at_the_sum)

"""Which kernel takes a product, and whether it is the faster way: rules from measurements.

``unsupported`` and ``slower`` are about the product of a QTensor alone, ``unfusible`` and
``slower_fused`` about one with a norm, SwiGLU or residual around it, or a plain weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import launching
from pallas_kernels.qtensor import QTensor

_ROW, _DECODE = "quantized_matmul_row_mosaic", "quantized_matmul_decode_mosaic"


class Call(NamedTuple):
    """What is fused around a product and the traced arrays do not say."""

    eps: float | None
    swiglu: bool
    out_dtype: jnp.dtype


def unsupported(
    x: jax.Array | QTensor, w: QTensor, *, out_dtype: DTypeLike | None = None
) -> str | None:
    """Why no Mosaic kernel takes ``x[M, K]`` and ``w[N, K]``, or None."""
    from pallas_kernels.matmul.few_rows import kernel as decode
    from pallas_kernels.matmul.many_rows import kernel as prefill

    if _takes_decode(x, w, out_dtype):
        return None
    reason = prefill.unsupported(x, w, out_dtype=out_dtype)
    if reason is not None and not isinstance(x, QTensor) and x.shape[0] <= decode.MAX_TOKENS:
        reason = f"{decode.unsupported(x.shape[0], x.dtype, w)}; {reason}"
    return reason


def slower(x: jax.Array | QTensor, w: QTensor) -> str | None:
    """Why the kernel that takes the call is not worth it, or None.  One row of int8 is a
    matrix-vector product: 14336 x 4096 18.2 us by XLA and 19.8 by the kernel, 4096 x 4096 7.5 and
    8.7; but 4096 x 14336 21.9 and 18.8.  e4m3's is 19.5 and 17.3."""
    if not isinstance(x, QTensor) or x.dtype != jnp.int8 or x.shape[0] > 1:
        return None
    if w.shape[0] < w.shape[1]:
        return None
    return "XLA's matrix-vector product of one int8 row is faster"


def _takes_decode(x: jax.Array | QTensor, w: QTensor, out_dtype: DTypeLike | None) -> bool:
    """Few rows of floats are the decode kernel's; everything else the tiled kernels', at any M."""
    from pallas_kernels.matmul.few_rows import kernel as decode

    if isinstance(x, QTensor):
        return False
    return decode.unsupported(x.shape[0], x.dtype, w, out_dtype) is None


def unfusible(x, w, call: Call, gamma, residual, pending=None) -> str | None:
    """Why no one kernel computes a fused product, or a plain weight's; or None."""
    from pallas_kernels.matmul.few_rows import kernel as decode
    from pallas_kernels.matmul.many_rows import kernel as prefill

    if isinstance(w, QTensor) and (w.columns is not None or w.activations is not None):
        return "columns in another order, or quantized activations, are not fused"
    if pending is not None and (gamma is None or pending.dtype != jnp.float32):
        return "what is pending is float32, and comes before a norm"
    if takes_one_row(x, w, call.out_dtype, gamma, residual, call.swiglu):
        return None
    rows = math.prod(x.shape[:-1])
    if takes_rows(rows, w, gamma, residual):
        return prefill.unsupported_plain(rows, x.dtype, w, call.out_dtype)
    return decode.unsupported(
        rows,
        x.dtype,
        w,
        call.out_dtype,
        norm=None if gamma is None else gamma.dtype,
        residual=None if residual is None else residual.dtype,
        swiglu=call.swiglu,
    )


def slower_fused(x, w, call: Call, gamma, residual, pending=None) -> str | None:
    """Why that kernel is not worth it, or None.  With a plain weight the decode kernel is faster
    than XLA's where the weight is small (M = 16: 6144 x 4096 15.0 us, XLA 16.4; 4096 x 4096 10.8,
    XLA 11.3) and slower where it is large (28672 x 4096 59.7, XLA 56.5).  A kernel that is saved
    is worth under 1 us."""
    from pallas_kernels.matmul.many_rows import kernel as prefill

    if isinstance(w, QTensor) or takes_one_row(x, w, call.out_dtype, gamma, residual, call.swiglu):
        return None
    rows = math.prod(x.shape[:-1])
    if takes_rows(rows, w, gamma, residual):
        return prefill.slower_plain(rows, w, call.swiglu)
    saved = sum(extra is not None for extra in (gamma, residual, pending)) + call.swiglu
    if w.size * w.dtype.itemsize <= 60e6 + 50e6 * saved:
        return None
    return "XLA's product with a plain weight of this size is faster"


def takes_one_row(x, w, out_dtype, gamma=None, residual=None, swiglu: bool = False) -> bool:
    """One row of bfloat16 has a kernel of its own, which is the faster way where there is something
    to read (its NOTES; 2048 x 2048 plain 3.9 us, and 3.8 by the decode kernel), with int4 only
    beside SwiGLU or where rows are long or many: 4096 x 7168 6.8 us and 7.1, 128256 x 4096 64.9 and
    69.2, but 14336 x 4096 10.0 and 9.9, 4096 x 4096 4.9 and 4.8."""
    from pallas_kernels.matmul.few_rows import row_plan as row

    if isinstance(x, QTensor):
        return False
    values, is_long = math.prod(w.shape), w.shape[1] >= 7168
    few = 8e6
    if w.dtype == jnp.int4:
        few = 0 if swiglu else 28e6 if is_long else 1e8
    if values < few:
        return False
    reason = row.unsupported(
        math.prod(x.shape[:-1]),
        x.dtype,
        w,
        out_dtype,
        norm=None if gamma is None else gamma.dtype,
        residual=None if residual is None else residual.dtype,
        swiglu=swiglu,
    )
    return reason is None


def takes_rows(rows: int, w, gamma, residual) -> bool:
    """A plain weight's product with more rows than the decode kernel has, and at most SwiGLU with
    it, is the tiled kernels'."""
    from pallas_kernels.matmul.few_rows import kernel as decode

    plain = not isinstance(w, QTensor) and gamma is None and residual is None
    return plain and rows > decode.MAX_TOKENS


def run_kernel(x: jax.Array | QTensor, w: QTensor, bias, out_dtype) -> jax.Array:
    from pallas_kernels.matmul.few_rows import kernel as decode
    from pallas_kernels.matmul.few_rows import row_kernel as row
    from pallas_kernels.matmul.many_rows import kernel as prefill

    if isinstance(x, QTensor):
        return prefill.matmul_w8a8(x, w, bias, out_dtype)
    if takes_one_row(x, w, out_dtype):
        launching(_ROW, lambda: row.make_plan(w, False))
        return row.matmul(x, w, bias=bias, out_dtype=out_dtype)
    if _takes_decode(x, w, out_dtype):
        launching(_DECODE, lambda: decode.make_plan(x.shape[0], w, bias=bias is not None))
        return decode.matmul(x, w, bias=bias, out_dtype=out_dtype)
    return prefill.matmul_weight_only(x, w, bias, out_dtype)


def run_fused(call: Call, x, w, bias, gamma, residual, pending):
    """What ``unfusible`` has nothing against."""
    from pallas_kernels.matmul.few_rows import kernel as decode
    from pallas_kernels.matmul.few_rows import row_kernel as row
    from pallas_kernels.matmul.many_rows import kernel as prefill

    one = takes_one_row(x, w, call.out_dtype, gamma, residual, call.swiglu)
    if not one and takes_rows(x.shape[0], w, gamma, residual):
        return prefill.matmul_plain(x, w, bias, call.out_dtype, swiglu=call.swiglu)
    if one:
        launching(_ROW, lambda: row.make_plan(w, call.swiglu))
    else:
        given = {"bias": bias is not None, "residual": residual is not None, "pairs": call.swiglu}
        launching(_DECODE, lambda: decode.make_plan(x.shape[0], w, **given))
    return (row if one else decode).matmul(
        x,
        w,
        bias=bias,
        out_dtype=call.out_dtype,
        gamma=gamma,
        eps=call.eps,
        residual=residual,
        swiglu=call.swiglu,
        pending=pending,
    )

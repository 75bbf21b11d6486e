"""Quantize activations for W8A8 and FP8 matmuls: absmax rows, or one calibrated scale for all.

Where a norm or a gate makes the activations, its ``quantize=`` saves this pass; the attention
output, all heads of a token under one scale, comes here.  Source: FasterLLaMA's
AttnQuantizedTranspose.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.operands import ROW_CODES, check, dtype_name
from pallas_kernels.qtensor import QTensor, of_one_scale, quantize
from pallas_kernels.rounding import to_codes
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.transform import Op, chosen

_OPERANDS = {"x": "float [..., D+]", "scale": "float [] ?"}


def quantize_tokens(
    x: jax.Array,
    dtype: DTypeLike = "int8",
    *,
    scale: jax.Array | None = None,
    group_size: int | None = None,
    implementation: Implementation | None = None,
) -> QTensor:
    """Return ``x`` as codes, with a float32 scale for each row, or for each of its groups.

    Parameters
    ----------
    x : float [..., D]
        float32, bfloat16 or float16.
    dtype : "int8" or "float8_e4m3fn"
        Dtype of the codes.
    scale : float scalar, optional
        Scale of every row; values beyond its range are clipped. By default each row has a scale for
        its largest magnitude.
    group_size : int, optional
        Number of columns that share a scale; it divides D. By default a row has one. Groups are
        the XLA form's, and exclude ``scale``.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    QTensor
        Codes ``[..., D]`` and scales ``[..., 1]``, or ``[..., D / group_size]``; with ``scale``
        also its ``input_scale``.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | x, through the scales (and 8-bit floats): the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    check("quantize_tokens", _OPERANDS, x=x, scale=scale)
    codes = dtype_name("quantize_tokens", "dtype", dtype, ROW_CODES)
    if scale is not None:
        if group_size is not None:
            raise ValueError("quantize_tokens: scale excludes group_size")
        scale = scale.astype(jnp.float32)
    if group_size not in (None, x.shape[-1]):
        choose_plan("quantize_tokens", implementation, lambda: _GROUPS, x)
        return quantize(x, codes, group_size=group_size, scale_dtype=jnp.float32)
    find = functools.partial(plan, "copy", x, codes, given=scale is not None)
    found = choose_plan("quantize_tokens", implementation, find, x, scale)
    return _quantize(chosen(found, implementation), (codes, found), x, scale)


_GROUPS = Reason("groups of columns: one fusion of XLA reads x once")


def _kernel(static: tuple[str, RowsPlan], x: jax.Array, scale: jax.Array | None) -> QTensor:
    from pallas_kernels.rows import kernel

    out = kernel.run(static[1], x, given=scale)
    return QTensor(out[0], out[1]) if scale is None else of_one_scale(out[0], scale)


def _xla(static: tuple[str, RowsPlan | None], x: jax.Array, scale: jax.Array | None) -> QTensor:
    if scale is None:
        return quantize(x, static[0], scale_dtype=jnp.float32)
    return of_one_scale(to_codes(x.astype(jnp.float32) / scale, static[0]), scale)


_quantize = Op("quantize_tokens", _xla, _kernel)

"""Quantize activations for W8A8 and FP8 matmuls: absmax rows, or one calibrated scale for all.

Where a norm or a gate makes the activations, its ``quantize=`` saves this pass; the attention
output, all heads of a token under one scale, comes here.  Source: FasterLLaMA's
AttnQuantizedTranspose.  With a given ``scale`` nothing has to be reduced, and XLA's element-wise
fusion is all there is to win: no kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose_plan
from pallas_kernels.operands import ROW_CODES, check, dtype_name
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import to_codes
from pallas_kernels.rows.plan import RowsPlan, plan
from pallas_kernels.rows.run import run
from pallas_kernels.transform import Op, chosen

_OPERANDS = {"x": "float [..., D+]", "scale": "float [] ?"}


def quantize_tokens(
    x: jax.Array,
    dtype: DTypeLike = "int8",
    *,
    scale: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> QTensor:
    """``x[..., D]`` as codes of ``dtype`` (int8, float8_e4m3fn) and a float32 scale per row.

    scale: a float32 scalar, every row's scale; by default each row has its own.  Values beyond the
        range of the scale are clipped.
    implementation: "xla", "mosaic", or None for the kernel where it is the faster one.

    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | x, through the scales (and 8-bit floats): the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    Raises ValueError naming the operand for a wrong shape or dtype, NotImplementedError for a
    kernel that is not there.
    """
    check("quantize_tokens", _OPERANDS, x=x, scale=scale)
    codes = dtype_name("quantize_tokens", "dtype", dtype, ROW_CODES)
    if scale is not None:
        rows = jnp.broadcast_to(scale.astype(jnp.float32), (*x.shape[:-1], 1))
        return QTensor(to_codes(x.astype(jnp.float32) / rows, codes), rows)
    found = choose_plan("quantize_tokens", implementation, lambda: plan("copy", x, codes), x)
    return _quantize(chosen(found, implementation), (codes, found), x)


def _kernel(static: tuple[str, RowsPlan], x: jax.Array) -> QTensor:
    codes, scale = run(static[1], x)
    return QTensor(codes, scale)


def _xla(static: tuple[str, RowsPlan | None], x: jax.Array) -> QTensor:
    return quantize(x, static[0], scale_dtype=jnp.float32)


_quantize = Op("quantize_tokens", _xla, _kernel)

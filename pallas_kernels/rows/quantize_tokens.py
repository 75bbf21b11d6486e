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

from pallas_kernels.dispatch import Implementation
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import to_words
from pallas_kernels.rows import op as rowwise
from pallas_kernels.transform import Choice, Op

_OPERANDS = {"x": "float [..., D+]", "scale": "float [] ?"}


def quantize_tokens(
    x: jax.Array,
    dtype: DTypeLike = "int8",
    *,
    scale: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> QTensor:
    """``x[..., D]`` as words of ``dtype`` (int8, float8_e4m3fn) and a float32 scale per row.

    scale: a float32 scalar, every row's scale; by default each row's own.  What lies beyond its
        range is clipped.
    implementation: "xla", "mosaic", or None for the kernel where it is the faster one.

    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | x, through the scales (and 8-bit floats): the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    Raises ValueError naming the operand for a wrong shape or dtype, NotImplementedError for a
    kernel that is not there.
    """
    check("quantize_tokens", _OPERANDS, x=x, scale=scale)
    words = jnp.dtype(dtype).name
    if words not in ("int8", "float8_e4m3fn"):
        raise ValueError(f"quantize_tokens: dtype {words!r} is not int8 or float8_e4m3fn")
    if scale is not None:
        rows = jnp.broadcast_to(scale.astype(jnp.float32), (*x.shape[:-1], 1))
        return QTensor(to_words(x.astype(jnp.float32) / rows, words), rows)
    reason = unsupported(x, words)
    chosen = rowwise.choose("quantize_tokens", implementation, reason, x.shape[-1], x)
    return _quantize(Choice(chosen, implementation is not None), words, x)


def unsupported(x: jax.Array, dtype: str) -> str | None:
    """Why the Mosaic kernel does not take this call, or None."""
    return rowwise.unsupported(x, x.shape[-1], dtype)


def _kernel(words: str, x):
    return rowwise.tokens(x, quantize=words)


def _xla(words: str, x):
    return quantize(x, words, scale_dtype=jnp.float32)


_quantize = Op("quantize_tokens", _xla, _kernel)

"""Quantize activations for W8A8 and FP8 matmuls: absmax rows, or one calibrated scale for all.

Where a norm or a gate makes the activations, its ``quantize=`` saves this pass; the attention
output, all heads of a token under one scale, comes here.  Source: FasterLLaMA's
AttnQuantizedTranspose.  With a given ``scale`` nothing has to be reduced, and XLA's element-wise
fusion is all there is to win: no kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import rowwise
from pallas_kernels.dispatch import Implementation
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import to_words


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
    Raises ValueError for another dtype, NotImplementedError for a kernel that is not there.
    """
    words = jnp.dtype(dtype).name
    if words not in ("int8", "float8_e4m3fn"):
        raise ValueError(f"quantize_tokens: dtype {words!r} is not int8 or float8_e4m3fn")
    if scale is not None:
        rows = jnp.broadcast_to(scale.astype(jnp.float32), (*x.shape[:-1], 1))
        return QTensor(to_words(x.astype(jnp.float32) / rows, words), rows)
    reason = unsupported(x, words)
    chosen = rowwise.choose("quantize_tokens", implementation, reason, x.shape[-1])
    return _quantize(words, chosen, x)


def unsupported(x: jax.Array, dtype: str) -> str | None:
    """Why the Mosaic kernel does not take this call, or None."""
    return rowwise.unsupported(x, x.shape[-1], dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantize(words: str, implementation: Implementation, x):
    if implementation == "mosaic":
        return rowwise.tokens(x, quantize=words)
    return _xla(words, x)


def _xla(words: str, x):
    return quantize(x, words, scale_dtype=jnp.float32)


def _forward(words, implementation, x):
    return _quantize(words, implementation, x), x


def _backward(words, implementation, x, cotangent):
    return jax.vjp(functools.partial(_xla, words), x)[1](cotangent)


_quantize.defvjp(_forward, _backward)

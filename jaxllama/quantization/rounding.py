"""Rounding to nearest as the floats it leaves, for methods that compare grids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rounding import Shrink, grid, words


def rounded(
    w: jax.Array,
    dtype: str,
    group_size: int,
    zeros: bool = False,
    shrink: Shrink = 1.0,
    scale_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """The floats that ``w`` becomes, in float32."""
    scale, zero = grid(w, dtype, group_size, zeros, shrink, scale_dtype)
    return dequantize(QTensor(words(w, scale, zero, dtype), scale, zero))

"""The Walsh-Hadamard rotation of a head, which spreads outlier channels before 4-bit rounding.

    hadamard(x) = x W,   W = W^T = W^-1,   W[i, j] = +-1 / sqrt(H) for H a power of two

W is orthonormal, so q W . k W = q . k, and attention over rotated values comes out rotated and is
rotated back by W itself.  Other widths are rotated in blocks of the largest power of two that
divides them: heads of 96 in three blocks of 32, heads of an odd width not at all.

Source: QuaRot (arXiv 2404.00456), which folds the values' rotation into the projections at load;
here it is two small products around attention, so that the weights need not know of the cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def hadamard(x: jax.Array) -> jax.Array:
    """``x[..., H]`` rotated; summed in float32, in x's dtype."""
    size = block(x.shape[-1])
    if size == 1:
        return x
    # Signs are exact in every dtype, so 16-bit products are too.
    parts = jnp.einsum(
        "...i,ij->...j",
        x.reshape(*x.shape[:-1], x.shape[-1] // size, size),
        jnp.asarray(_signs(size), x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    return (parts * size**-0.5).reshape(x.shape).astype(x.dtype)


def block(width: int) -> int:
    """Features that are rotated together: the largest power of two that divides ``width``."""
    return width & -width


@functools.cache
def _signs(size: int) -> np.ndarray:
    """Sylvester's matrix: entry (i, j) is -1 where i and j share an odd number of set bits."""
    shared = np.arange(size)[:, None] & np.arange(size)[None, :]
    return 1 - 2 * (np.bitwise_count(shared).astype(np.int8) & 1)

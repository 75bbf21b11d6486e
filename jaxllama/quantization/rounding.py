"""Rounding to nearest: a weight's codes, the resulting floats, and the grid with the least error.

``search_grid`` tries a lattice of shares for the two ends of every group's range. It gives the
codes of each pair the scale that fits them best, and keeps the pair with the least squared error.
Each column is weighted by its ``importance``, the mean square of its input. Without an importance,
the weights' own squares are used, so that large weights are not clipped. Sources: AWQ's clipping
(arXiv 2306.00978), with H's diagonal for H; llama.cpp's make_qkx2_quants.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.rounding import CODES, FORMATS, Shrink, codes, kept, reciprocal
from pallas_kernels.rounding import grid as make_grid

# A weight's (dtype of the codes or format, columns per scale, whether it has zero points).
Grid = tuple[str, int, bool]
# Shares of one end's range. A share above 1 moves the grid within its step.
SHARES = tuple(1.06 - 0.03 * step for step in range(9))


def rounded(
    w: jax.Array,
    dtype: str,
    group_size: int,
    zeros: bool = False,
    shrink: Shrink = 1.0,
    scale_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Return ``w`` after rounding, as float32."""
    if dtype in FORMATS:
        return dequantize(quantize(w, dtype))
    scale, zero = make_grid(w, dtype, group_size, zeros, shrink, scale_dtype)
    return dequantize(QTensor(codes(w, scale, zero, dtype), scale, zero))


@functools.partial(jax.jit, static_argnames=("grid", "scale_dtype"))
def nearest(weight: jax.Array, shrink: Shrink, *, grid: Grid, scale_dtype: str) -> QTensor:
    """Round ``weight[..., K]`` to nearest on its grid, which covers ``shrink`` of each range.

    A format of ``quantize`` chooses its own range.
    """
    dtype, group, zeros = grid
    if dtype in FORMATS:
        row_dtype = scale_dtype if FORMATS[dtype].rows > 1 else None
        return quantize(weight, dtype, scale_dtype=row_dtype)
    scale, zero = make_grid(weight, dtype, group, zeros, shrink, scale_dtype)
    return QTensor.on_grid(codes(weight, scale, zero, dtype), scale, zero, scale_dtype)


@functools.partial(jax.jit, static_argnames=("grid", "scale_dtype"))
def fitted(
    weight: jax.Array, importance: jax.Array | None, *, grid: Grid, scale_dtype: str
) -> QTensor:
    """Round ``weight[N, K]`` to nearest on the best grid with zero points.

    importance: ``[K]``. Experts ``[E, N, K]`` are rounded one after the other, with an importance
    ``[K]`` or ``[E, K]``.
    """
    if weight.ndim == 3:
        shared = importance is None or importance.ndim == 1
        row_importance = () if shared else (importance,)

        def fit_row(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            rows, *cost = operands
            return search_grid(rows, cost[0] if cost else importance, grid=grid)

        scale, zero = lax.map(fit_row, (weight, *row_importance))
    else:
        scale, zero = search_grid(weight, importance, grid=grid)
    scale = kept(scale, zero, scale_dtype)
    return QTensor.on_grid(codes(weight, scale, zero, grid[0]), scale, zero, scale_dtype)


def search_grid(
    weight: jax.Array, importance: jax.Array | None, *, grid: Grid
) -> tuple[jax.Array, jax.Array]:
    """Return the best (scale, zero), each ``[N, K / group]``.

    All pairs are tried in one loop, which needs the memory of one: at most four float32 copies of
    the weight.
    """
    dtype, group, zeros = grid
    assert zeros
    lowest, highest = CODES[dtype]
    x = weight.astype(jnp.float32).reshape(weight.shape[0], -1, group)
    if importance is None:
        cost = jnp.square(x) + jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    else:
        cost = (importance / jnp.mean(importance)).reshape(1, -1, group)
    pairs = jnp.asarray([(low, high) for low in SHARES for high in SHARES], jnp.float32)

    def better(best: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        scale, zero = make_grid(weight, dtype, group, True, (pair[0], pair[1]))
        assert zero is not None
        shift = zero.astype(jnp.float32)[..., None]
        steps = jnp.round(x * reciprocal(scale)[..., None] + shift)
        steps = jnp.clip(steps, lowest, highest) - shift
        # Least squares: the best scale s of these steps, and how much |x - s steps|^2 is below
        # |x|^2.
        along, size = jnp.sum(cost * steps * x, axis=-1), jnp.sum(cost * steps * steps, axis=-1)
        scale = along * reciprocal(size)
        found = (along * scale, scale, zero)
        is_more = found[0] > best[0]
        return tuple(jnp.where(is_more, *both) for both in zip(found, best, strict=True)), None

    scale, zero = make_grid(weight, dtype, group, True)
    assert zero is not None
    start: tuple[jax.Array, ...] = (jnp.zeros(x.shape[:-1], jnp.float32), scale, zero)
    (_, scale, zero), _ = lax.scan(better, start, pairs)
    return scale, zero

"""GPTQ: round one input column after the other, and let the later columns compensate each error.

    H = X X^T + damping;   H^-1 = U^T U, U upper triangular
    for each column j:   q_j = round(w_j);   w_i -= (w_j - q_j) U_ji / U_jj   for i > j

Columns are rounded in the order of H's diagonal, largest first (act-order). Every group keeps the
grid of its columns in the original weight ("static groups"). So the matmul need not undo a
permutation. The grid may be clipped (``awq.search_clip``), which GPTQ's code calls "mse".

Source: arXiv 2210.17323, algorithm 1, with its blocks of columns. U comes from one Cholesky factor
of H with rows and columns reversed and one triangular solve, instead of an explicit inverse.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllama.errors import JaxLlamaError
from jaxllama.quantization.rounding import Grid
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import (
    FORMATS,
    Shrink,
    format_blocks,
    format_scales,
    reciprocal,
    to_codes,
    whole_scale,
)
from pallas_kernels.rounding import grid as make_grid

DAMPING = 0.01  # share of the mean of H's diagonal
_BLOCK = 128
_ROWS = 8192  # rows that are rounded at a time: a whole head would need eight float32 copies


def gptq(
    weight: jax.Array,
    hessian: jax.Array,
    shrink: Shrink = 1.0,
    *,
    grid: Grid,
    scale_dtype: DTypeLike = jnp.float32,
) -> QTensor:
    """Return ``weight[N, K]`` as a QTensor with a small output error under ``hessian[K, K]``.

    grid: (dtype of the codes, columns per scale, zero points). shrink: see ``rounding``. Columns
    whose input was always zero are rounded to nearest. If H is too near singular for float32, the
    damping grows tenfold, at most twice; raises JaxLlamaError if that is not enough.
    """
    n, k = weight.shape
    if hessian.shape != (k, k):
        raise JaxLlamaError(
            f"gptq: a weight of {k} inputs needs a [{k}, {k}] hessian, not {list(hessian.shape)}"
        )
    name = jnp.dtype(scale_dtype).name
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        order, upper, is_finite = _factor(hessian, damping)
        if is_finite:
            break
    else:
        raise JaxLlamaError(
            f"gptq: the inputs' second moments [{k}, {k}] are not positive definite even with "
            f"{100 * DAMPING:g} of their mean added: calibrate with more text"
        )
    # A format's scales are shared by rows beyond those rounded at a time.
    fixed = format_scales(weight, grid[0], name) if grid[0] in FORMATS else None
    done = []
    for first in range(0, n, _ROWS):
        rows = slice(first, first + _ROWS)
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows] if jnp.ndim(leaf) else leaf, shrink)
        fixed_scale = None if fixed is None else whole_scale(*fixed)[rows]
        done.append(
            _rounded(weight[rows], upper, order, part, fixed_scale, grid=grid, scale_dtype=name)
        )
    found = jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)
    return found if fixed is None else _in_format(found.q, fixed, grid[0])


def _in_format(q: jax.Array, fixed: tuple[jax.Array, jax.Array | None], name: str) -> QTensor:
    scale, unit = fixed
    return QTensor(q, scale, unit=unit, blocked=format_blocks(name, q.shape))


@jax.jit
def _factor(hessian: jax.Array, damping: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (the columns' order, U, whether U is finite)."""
    order = jnp.argsort(-jnp.diagonal(hessian), stable=True)
    upper = inverse_factor(hessian, order, damping)
    return order, upper, jnp.all(jnp.isfinite(upper))


@functools.partial(jax.jit, static_argnames=("grid", "scale_dtype"))
def _rounded(
    weight: jax.Array,
    upper: jax.Array,
    order: jax.Array,
    shrink: Shrink,
    fixed: jax.Array | None,
    *,
    grid: Grid,
    scale_dtype: str,
) -> QTensor:
    """fixed: the float32 scales of a format, or None."""
    dtype, group, zeros = grid
    w = weight.astype(jnp.float32)
    n, k = w.shape
    if fixed is None:
        scale, zero = make_grid(w, dtype, group, zeros, shrink, scale_dtype)
    else:
        dtype, scale, zero = FORMATS[dtype].codes, fixed, None

    # All arrays are [K, N], so that a column of the weight is a row in memory.
    columns_of = order // group
    scales = scale.astype(jnp.float32)[:, columns_of].T
    inverses = reciprocal(scale)[:, columns_of].T
    zeros_of = None if zero is None else zero.astype(jnp.float32)[:, columns_of].T
    block = math.gcd(k, _BLOCK)

    def one_column(i: jax.Array, carry: tuple[jax.Array, ...], begin: jax.Array):
        rows, errors, steps_out = carry
        at = begin + i
        row = rows[i]
        shift = 0.0 if zeros_of is None else zeros_of[at]
        code = to_codes(row * inverses[at] + shift, dtype).astype(jnp.float32)
        error = (row - (code - shift) * scales[at]) / upper[at, at]
        weights = lax.dynamic_slice(upper, (at, begin), (1, block))[0]
        # U is zero left of its diagonal, so columns already rounded do not change.
        rows = rows - weights[:, None] * error[None, :]
        return rows, errors.at[i].set(error), steps_out.at[i].set(code)

    def one_block(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        values, chosen = carry
        begin = index * block
        rows = lax.dynamic_slice_in_dim(values, begin, block)
        blank = jnp.zeros_like(rows)
        _, errors, picked = lax.fori_loop(
            0, block, functools.partial(one_column, begin=begin), (rows, blank, blank)
        )
        # The rest of the matrix is updated once for the whole block.
        ahead = lax.dynamic_slice_in_dim(upper, begin, block)
        later = jnp.arange(k)[None, :] >= begin + block
        ahead = jnp.where(later, ahead, 0.0)
        values = values - jnp.matmul(ahead.T, errors, precision=lax.Precision.HIGHEST)
        return values, lax.dynamic_update_slice_in_dim(chosen, picked, begin, 0)

    start = (w[:, order].T, jnp.zeros((k, n), jnp.float32))
    _, chosen = lax.fori_loop(0, k // block, one_block, start)
    q = jnp.zeros((n, k), jnp.float32).at[:, order].set(chosen.T)
    scale_dtype = scale_dtype if fixed is None else "float32"
    return QTensor.on_grid(q.astype(dtype), scale, zero, scale_dtype)


def inverse_factor(hessian: jax.Array, order: jax.Array, damping: jax.Array | float) -> jax.Array:
    """Return U, upper triangular, with ``(H + damping mean(diag H) I)^-1 = U^T U`` in this order.

    Inputs that were always zero get a diagonal of 1, so that they are independent. The result is
    NaN if the damped H is not positive definite in float32.
    """
    diagonal = jnp.diagonal(hessian)
    dead = jnp.where(diagonal > 0, 0.0, 1.0)
    ridge = damping * jnp.mean(diagonal) + dead
    h = hessian + jnp.diag(ridge)
    h = h[order][:, order]
    lower = jnp.linalg.cholesky(h[::-1, ::-1])
    reversed_upper = lower[::-1, ::-1]  # R, upper triangular, with H = R R^T
    identity = jnp.eye(h.shape[0], dtype=jnp.float32)
    return jax.scipy.linalg.solve_triangular(reversed_upper, identity, lower=False)

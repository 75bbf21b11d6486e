"""Scales that fit the chosen codes: least squares of a weight's output error.

    v_g = group g's codes less their zero points, 0 elsewhere
    A_gf = v_g H v_f^T,   b_g = v_g H w^T,   H = X X^T + damping,   s = A^-1 b       for each row w

A grid is chosen before its weights are rounded. The resulting codes are a fixed direction for each
group. The best length along each direction is a linear problem with one unknown for each group of a
row. AWQ gains most, since its rounding considers each weight alone. This is one step of Lloyd's
alternation (1982) between codes and grid, under H. Left out: zero points, which are integers, and
further rounds.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.quantization.gptq import DAMPING
from pallas_kernels.qtensor import QTensor

_FLOATS = 1 << 23  # number of floats ``[rows, groups, K]`` in memory at a time
_RIDGE = 1e-6
_FURTHEST = 0.5  # a scale changes by at most this share of itself, or stays


@jax.jit
def fit_scales(weight: jax.Array, quantized: QTensor, hessian: jax.Array) -> QTensor:
    """Return ``quantized``, of ``weight[N, K]``, with the scales of least error under ``hessian``.

    hessian is ``[K, K]``. A row whose system cannot be solved keeps its scales. A scale that would
    change too much stays too (a group whose inputs hardly occur). There is one cast to the scales'
    dtype.
    """
    n, k = weight.shape
    old = quantized.scale.astype(jnp.float32)
    groups = old.shape[1]
    size = k // groups
    diagonal = jnp.diagonal(hessian)
    ridge = DAMPING * jnp.mean(diagonal) + jnp.where(diagonal > 0, 0.0, 1.0)
    h = hessian + jnp.diag(ridge)
    steps = quantized.q.astype(jnp.float32).reshape(n, groups, size)
    if quantized.zero is not None:
        steps = steps - quantized.zero.astype(jnp.float32)[..., None]

    def one_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        v, w = row
        high = lax.Precision.HIGHEST
        vh = jnp.einsum("gi,gik->gk", v, h.reshape(groups, size, k), precision=high)
        a = jnp.einsum("gfi,fi->gf", vh.reshape(groups, groups, size), v, precision=high)
        a = a + jnp.eye(groups) * (_RIDGE * jnp.trace(a) / groups + 1e-30)
        return _solve(a, jnp.matmul(vh, w, precision=high))

    batch = max(1, min(n, _FLOATS // (groups * k)))
    scale = lax.map(one_row, (steps, weight.astype(jnp.float32)), batch_size=batch)
    near = jnp.abs(scale - old) < _FURTHEST * old  # False for NaN
    scale = jnp.where(near, scale, old).astype(quantized.scale.dtype)
    return dataclasses.replace(quantized, scale=scale, blocked=None)


def _solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a^-1 b by elimination without pivots, for a small positive definite ``a``.

    ``jnp.linalg.solve`` is not used: two batched LU decompositions at once wait for each other in
    jaxlib's CPU thread pool (seen with 0.10.2).
    """

    def eliminate(i: jax.Array, rows: jax.Array) -> jax.Array:
        pivot = rows[i] / rows[i, i]
        return (rows - rows[:, i, None] * pivot).at[i].set(pivot)

    return lax.fori_loop(0, b.shape[0], eliminate, jnp.concatenate((a, b[:, None]), axis=1))[:, -1]

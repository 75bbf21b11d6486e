"""Sums of log_decay over parts of a chunk: the exponents of the chunkwise form of GLA.

For ``g[..., C, D]`` with C a power of two, row i has one sum per level s = 1, 2, 4 .. C/2 of a
binary tree of blocks, and two for the whole chunk:

    level s, i in the second half of its block of 2s:  g from that half's start to i, inclusive
    level s, i in the first half:                      g after i to that half's end
    prefix: g from the chunk's start to i, inclusive   suffix: g after i to the chunk's end

All of g is <= 0, so are the sums, and none is a difference of two others.  They are linear in g;
``transpose_sums`` is the transpose of that map, which carries their gradients back to g's.

On a CPU the tree is climbed by additions.  A GPU is faster with one product by a 0/1 matrix per
level; there g is first raised to at least -200, whose exponential is 0 in float32 as well, so that
no 0 * inf arises.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ZERO_DECAY = -200.0  # exp of it is 0 in float32


class DecaySums(NamedTuple):
    """``levels[l]`` belongs to s = 2 ** l; all are float32 ``[..., C, D]``."""

    levels: tuple[jax.Array, ...]
    prefix: jax.Array
    suffix: jax.Array


def decay_sums(g: jax.Array, dtype: jnp.dtype, on_gpu: bool) -> DecaySums:
    """The sums of ``g[..., C, D]``, float32.

    dtype: what the caller's products read.  Below float32, a GPU sums g as two bfloat16 parts,
    exact to 2 ** -17 of each term.
    """
    if not on_gpu:
        return _climb(g)
    g = jnp.maximum(g, _ZERO_DECAY)
    *levels, prefix, suffix = (_row_sums(rows, g, dtype) for rows in sum_matrices(g.shape[-2]))
    return DecaySums(tuple(levels), prefix, suffix)


def transpose_sums(d_sums: DecaySums, dtype: jnp.dtype, on_gpu: bool) -> jax.Array:
    """The gradient of g, given those of its sums."""
    if not on_gpu:
        return jax.linear_transpose(_climb, d_sums.prefix)(d_sums)[0]
    parts = (*d_sums.levels, d_sums.prefix, d_sums.suffix)
    matrix = np.concatenate([rows.T for rows in sum_matrices(d_sums.prefix.shape[-2])], axis=1)
    return _row_sums(matrix, jnp.concatenate(parts, axis=-2), dtype)


def _climb(g: jax.Array) -> DecaySums:
    prefix, suffix = g, jnp.zeros_like(g)
    length, width = g.shape[-2:]
    levels = []
    size = 1
    while size < length:
        levels.append(jnp.where(second_halves(length, size)[:, None], prefix, suffix))
        halves = (*g.shape[:-2], length // (2 * size), 2, size, width)
        p, s = prefix.reshape(halves), suffix.reshape(halves)
        p0, p1 = p[..., 0, :, :], p[..., 1, :, :]
        prefix = jnp.stack([p0, p1 + p0[..., -1:, :]], axis=-3).reshape(g.shape)
        s0 = s[..., 0, :, :] + p1[..., -1:, :]
        suffix = jnp.stack([s0, s[..., 1, :, :]], axis=-3).reshape(g.shape)
        size *= 2
    return DecaySums(tuple(levels), prefix, suffix)


def _row_sums(matrix: np.ndarray, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``matrix[R, C] @ x[..., C, D]`` for a 0/1 matrix."""
    if dtype == jnp.float32:
        weights = jnp.asarray(matrix, jnp.float32)
        return jnp.einsum("rc,...cd->...rd", weights, x, precision=lax.Precision.HIGHEST)
    high = x.astype(jnp.bfloat16)
    low = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    weights = jnp.asarray(np.concatenate([matrix, matrix], axis=1), jnp.bfloat16)
    both = jnp.concatenate([high, low], axis=-2)
    return jnp.einsum("rc,...cd->...rd", weights, both, preferred_element_type=jnp.float32)


@functools.cache
def sum_matrices(length: int) -> tuple[np.ndarray, ...]:
    """The 0/1 matrices ``[C, C]`` whose product with g is a level (in order), prefix and suffix."""
    rows = np.arange(length)
    up_to, after = rows[None, :] <= rows[:, None], rows[None, :] > rows[:, None]
    levels = []
    size = 1
    while size < length:
        same = rows[:, None] // size == rows[None, :] // size
        levels.append(same & np.where(second_halves(length, size)[:, None], up_to, after))
        size *= 2
    return (*levels, up_to, after)


@functools.cache
def second_halves(length: int, size: int) -> np.ndarray:
    """Which of ``length`` rows lie in the second half of their block of ``2 * size``."""
    return (np.arange(length) // size) % 2 == 1


@functools.cache
def pairs(length: int, size: int) -> np.ndarray:
    """Which (row, column) meet at the level of ``size``: ``[C, C]``."""
    rows, second = np.arange(length), second_halves(length, size)
    same = rows[:, None] // (2 * size) == rows[None, :] // (2 * size)
    return same & second[:, None] & ~second[None, :]

"""Sequences in groups of chunks: how the forms in plain XLA cut, multiply and scan them.

``decay_sums`` are sums of log_decay over parts of a chunk, the exponents of GLA's form by chunks.
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
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.recurrence.op import Heads

Arrays = TypeVar("Arrays")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

# Elements of q (or v) worked on at once, found by measuring: on a CPU the group should stay near
# the caches; on a GPU it only bounds temporary memory (about 100 bytes an element).
_GROUP_ELEMENTS = {"cpu": 1 << 17, "gpu": 1 << 27}
_SCAN_UNROLL = {"cpu": 1, "gpu": 16}


def dot(equation: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """einsum of operands rounded to ``dtype``, accumulated in float32.  Without HIGHEST a GPU would
    take TF32 for float32."""
    return jnp.einsum(
        equation,
        a.astype(dtype),
        b.astype(dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    )


def operand_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the operands of matrix products.

    16-bit inputs on a GPU give bfloat16, because states would leave float16's range.  All else is
    float32; on a CPU 16-bit products are slower.
    """
    return jnp.dtype(jnp.bfloat16 if dtype.itemsize == 2 and on_gpu() else jnp.float32)


def scan_unroll() -> int:
    """Steps of a scan over chunks that are worth unrolling."""
    return _SCAN_UNROLL[_platform()]


def _platform() -> str:
    return "gpu" if on_gpu() else "cpu"


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


_Grouping = tuple[int, int, int]  # groups, chunks of a group, tokens of a chunk


def forward(
    group: Callable[[Heads, jax.Array], tuple[jax.Array, jax.Array]],
    heads: Heads,
    state: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (``o [B, T, H, Dv]``, the final state, the states ``[groups, B, H, Dk, Dv]`` before
    each group of chunks).

    group: ``group(x, state)`` -> (o, the state after the group), of the ``split`` heads x.
    """
    grouping = _grouping_of(heads, chunk)

    def one_group(state: jax.Array, x: Heads) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        o, final = group(x, state)
        return final, (o.astype(heads.v.dtype), state)

    final, (o, borders) = _scan_groups(one_group, state, _split(heads, grouping))
    return _join(o, heads.v), final, borders


def backward(
    group: Callable[..., tuple[Heads, jax.Array]],
    heads: Heads,
    borders: jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
    chunk: int,
) -> tuple[Heads, jax.Array]:
    """Return (the gradients of heads in their dtypes, that of the initial state).

    group: ``group(x, state, d_o, d_final)`` -> (gradients of x, of the state before the group).
    """
    grouping = _grouping_of(heads, chunk)

    def one_group(
        d_final: jax.Array, inputs: tuple[Heads, jax.Array, jax.Array]
    ) -> tuple[jax.Array, Heads]:
        x, state, d_out = inputs
        gradients, d_initial = group(x, state, d_out, d_final)
        return d_initial, jax.tree.map(lambda d, y: d.astype(y.dtype), gradients, x)

    inputs = (_split(heads, grouping), borders, _split(d_o, grouping))
    d_initial, gradients = _scan_groups(one_group, d_state, inputs, reverse=True)
    return jax.tree.map(_join, gradients, heads), d_initial


def _grouping_of(heads: Heads, chunk: int) -> _Grouping:
    batch, length, n_heads, d_v = heads.v.shape
    n_chunks = -(-length // chunk)
    elements = batch * n_heads * chunk * max(heads.q.shape[-1], d_v)
    limit = max(1, _GROUP_ELEMENTS[_platform()] // elements)
    n_groups = -(-n_chunks // limit)
    return n_groups, -(-n_chunks // n_groups), chunk


def _split(arrays: Arrays, grouping: _Grouping) -> Arrays:
    """``[B, T, H, D]`` -> ``[groups, B, H, N, C, D]``, padded with tokens that change nothing;
    ``[B, T, H]`` has D = 1."""

    def cut(x: jax.Array) -> jax.Array:
        x = x if x.ndim == 4 else x[..., None]
        batch, length, heads, width = x.shape
        x = jnp.pad(x, ((0, 0), (0, math.prod(grouping) - length), (0, 0), (0, 0)))
        return jnp.transpose(x.reshape(batch, *grouping, heads, width), (1, 0, 4, 2, 3, 5))

    return jax.tree.map(cut, arrays)


def _join(x: jax.Array, like: jax.Array) -> jax.Array:
    """``[groups, B, H, N, C, D]`` -> the shape of ``like``, ``[B, T, H, D]`` or ``[B, T, H]``."""
    joined = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
    joined = joined.reshape(x.shape[1], -1, x.shape[2], x.shape[-1])[:, : like.shape[1]]
    return joined.reshape(like.shape)


def _scan_groups(
    step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, xs: X, reverse: bool = False
) -> tuple[Carry, Y]:
    """lax.scan, without the loop when there is one group."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(step, carry, xs, reverse=reverse)
    carry, ys = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


# --- sums of log_decay over parts of a chunk ------------------------------------------------------


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

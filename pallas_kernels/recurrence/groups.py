"""Sequences in groups of chunks: how the forms in plain XLA cut, multiply and scan them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
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

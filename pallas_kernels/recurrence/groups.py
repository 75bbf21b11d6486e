"""Sequences in groups of chunks: how the forms in plain XLA cut, multiply and scan them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.types import HasShape

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


def grouping_of(q: HasShape, v: jax.Array, chunk: int) -> tuple[int, int, int]:
    """(groups, chunks per group, tokens per chunk)."""
    batch, length, heads = q.shape[:3]
    n_chunks = -(-length // chunk)
    elements = batch * heads * chunk * max(q.shape[-1], v.shape[-1])
    limit = max(1, _GROUP_ELEMENTS[_platform()] // elements)
    n_groups = -(-n_chunks // limit)
    return n_groups, -(-n_chunks // n_groups), chunk


def split(x: jax.Array, grouping: tuple[int, int, int]) -> jax.Array:
    """``[B, T, H, D]`` -> ``[groups, B, H, N, C, D]``, padded with tokens that change nothing."""
    batch, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, math.prod(grouping) - length), (0, 0), (0, 0)))
    return jnp.transpose(x.reshape(batch, *grouping, heads, width), (1, 0, 4, 2, 3, 5))


def join(x: jax.Array, length: int) -> jax.Array:
    """``[groups, B, H, N, C, D]`` -> ``[B, T, H, D]``."""
    joined = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
    return joined.reshape(x.shape[1], -1, x.shape[2], x.shape[-1])[:, :length]


def scan_groups(
    step: Callable[[Carry, X], tuple[Carry, Y]], carry: Carry, xs: X, reverse: bool = False
) -> tuple[Carry, Y]:
    """lax.scan, without the loop when there is one group."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(step, carry, xs, reverse=reverse)
    carry, ys = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)

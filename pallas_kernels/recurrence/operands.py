"""Checks of the operands that the kernels of both recurrences accept, and padding to fit them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.recurrence.states import VALUE_BLOCK

WIDTHS = 64, 128, 256, 512  # of keys


def shapes_reason(q: jax.Array, v: jax.Array, block: int) -> str | None:
    """Return why GLA's kernels cannot take the widths of q and v, or None.

    block: Dv has to be a multiple of it.
    """
    if q.shape[-1] not in WIDTHS:
        return f"q has Dk = {q.shape[-1]}, which is not 64, 128, 256 or 512"
    if v.shape[-1] % block:
        return f"v has Dv = {v.shape[-1]}, not a multiple of {block}"
    return None


def operands_reason(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> str | None:
    """Return why kernels that multiply the state in 16 bits cannot take q, k and v, or None.

    They take bfloat16 only, because float16 ends at 65,504.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}, the kernel takes bfloat16"
    return shapes_reason(q, v, block)


def padded(x: jax.Array | None) -> jax.Array | None:
    """Pad x with zero channels to whole blocks; their state is zeros and nothing else reads it."""
    if x is None or x.shape[-1] % VALUE_BLOCK == 0:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % VALUE_BLOCK)])

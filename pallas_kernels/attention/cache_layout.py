"""Places of a row's tokens in a cache ``[B, S, K, H]`` or in a pool ``[P, page, K, H]`` of pages.

A block table, int32 ``[B, M]``, names the pages of each row; without one the cache has a row for
each row of the call.  This file imports no kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.qtensor import QTensor

Cached = jax.Array | QTensor


def capacity_of(kv: Cached, table: jax.Array | None) -> int:
    """Return the number of tokens that a row can hold, S."""
    return kv.shape[1] if table is None else table.shape[1] * kv.shape[1]


def place(kv: Cached, slots: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (page, place in the page) of ``slots[B, T]``; page P means that nothing is written."""
    pages, page = kv.shape[:2]
    entry = jnp.take_along_axis(table, slots // page, axis=1, mode="clip")
    inside = (slots >= 0) & (slots < table.shape[1] * page) & (entry >= 0)
    return jnp.where(inside, jnp.minimum(entry, pages), pages), slots % page

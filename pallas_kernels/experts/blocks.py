"""Pairs of a token and an expert, sorted by expert into blocks of one expert each.

    blocks = blocks_of(experts[P], n_experts, size)

A block has ``size`` places.  An expert's last block may have places without a pair.  The number of
blocks is static: the most that P pairs can need.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """experts int32 ``[N]``: each block's expert.  pairs int32 ``[N, size]``: the pair at each
    place, P where there is none.  places int32 ``[P]``: each pair's place, ``block * size + i``."""

    experts: jax.Array
    pairs: jax.Array
    places: jax.Array


def most_blocks(n_pairs: int, n_experts: int, size: int) -> int:
    """The most blocks that any choice of experts needs."""
    hit = min(n_experts, n_pairs)
    return min(n_pairs, (n_pairs + hit * (size - 1)) // size)


def blocks_of(experts: jax.Array, n_experts: int, size: int) -> Blocks:
    """The blocks of pairs whose experts are ``experts[P]``, in [0, n_experts)."""
    (n_pairs,) = experts.shape
    count = most_blocks(n_pairs, n_experts, size)
    order = jnp.argsort(experts, stable=True)
    ranked = experts[order]
    rows = jnp.sum(experts[:, None] == jnp.arange(n_experts), axis=0, dtype=jnp.int32)
    blocks = (rows + (size - 1)) // size
    ends = jnp.cumsum(blocks)
    first_block, first_pair = ends - blocks, jnp.cumsum(rows) - rows
    within = jnp.arange(n_pairs, dtype=jnp.int32) - first_pair[ranked]
    place = first_block[ranked] * size + within
    pairs = jnp.full((count * size,), n_pairs, jnp.int32).at[place].set(order.astype(jnp.int32))
    places = jnp.zeros((n_pairs,), jnp.int32).at[order].set(place)
    owner = jnp.searchsorted(ends, jnp.arange(count), side="right").astype(jnp.int32)
    return Blocks(jnp.minimum(owner, n_experts - 1), pairs.reshape(count, size), places)

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


class Parts(NamedTuple):
    """order int32 ``[P]``: the pairs by expert.  work int32 ``[1 + N, 4]``: the number of parts in
    its first row; then a part's expert, its first place in that order and the end of its places."""

    order: jax.Array
    work: jax.Array


def parts_of_pairs(experts: jax.Array, n_experts: int, size: int) -> Parts:
    """Pairs by expert, without places between, in parts of up to ``size`` pairs of one expert.

    experts: int32 ``[P]`` in [0, n_experts]; the last is none, and its pairs are in no part.
    """
    (n_pairs,) = experts.shape
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    own = jnp.arange(n_experts, dtype=jnp.int32)
    # An expert's end and the parts of it and of those before it.
    ends = jnp.sum(experts[None, :] <= own[:, None], axis=1, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    count = (ends - begins + (size - 1)) // size
    last = jnp.cumsum(count, dtype=jnp.int32)
    part = jnp.arange(most_blocks(n_pairs, n_experts, size), dtype=jnp.int32)
    owner = jnp.sum(last[None, :] <= part[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, n_experts - 1)
    first = begins[owner] + (part - (last - count)[owner]) * size
    end = jnp.minimum(first + size, ends[owner])
    rows = jnp.stack([owner, first, end, jnp.zeros_like(owner)], axis=1)
    head = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(last[-1])
    return Parts(order, jnp.concatenate([head, rows]))

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


def by_expert(experts: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """(the pairs by expert int32 ``[P]``, where each expert's begin there int32 ``[E + 1]``).

    experts: int32 ``[P]`` in [0, n_experts]; pairs of the last, which is none, come last.
    """
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    before = experts[:, None] < jnp.arange(n_experts + 1)
    return order, jnp.sum(before, axis=0, dtype=jnp.int32)


def _divided(starts: jax.Array, size: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each expert's rows in pieces of up to ``size``: (the first piece of each expert ``[E]``, the
    number of pieces, the expert of each of ``most`` pieces)."""
    counts = (jnp.diff(starts) + (size - 1)) // size
    ends = jnp.cumsum(counts)
    owner = jnp.sum(ends[None, :] <= jnp.arange(most)[:, None], axis=1, dtype=jnp.int32)
    return ends - counts, ends[-1], jnp.minimum(owner, len(counts) - 1)


def blocks_of(experts: jax.Array, n_experts: int, size: int) -> Blocks:
    """The blocks of pairs whose experts are ``experts[P]``, in [0, n_experts)."""
    (n_pairs,) = experts.shape
    count = most_blocks(n_pairs, n_experts, size)
    order, starts = by_expert(experts, n_experts)
    first_block, _, owner = _divided(starts, size, count)
    ranked = experts[order]
    within = jnp.arange(n_pairs, dtype=jnp.int32) - starts[ranked]
    place = first_block[ranked] * size + within
    pairs = jnp.full((count * size,), n_pairs, jnp.int32).at[place].set(order)
    places = jnp.zeros((n_pairs,), jnp.int32).at[order].set(place)
    return Blocks(owner, pairs.reshape(count, size), places)


class SortedPairs(NamedTuple):
    """order int32 ``[P]``: the pairs by expert.  work int32 ``[1 + N, 4]``: the number of parts in
    its first row; then a part's expert, its first place in that order and the end of its places."""

    order: jax.Array
    work: jax.Array


def parts_of_pairs(experts: jax.Array, n_experts: int, size: int) -> SortedPairs:
    """Pairs by expert, without places between, in parts of up to ``size`` pairs of one expert.

    experts: int32 ``[P]`` in [0, n_experts]; the last is none, and its pairs are in no part.
    """
    part = jnp.arange(most_blocks(experts.shape[0], n_experts, size), dtype=jnp.int32)
    order, starts = by_expert(experts, n_experts)
    first_part, count, owner = _divided(starts, size, len(part))
    first = starts[owner] + (part - first_part[owner]) * size
    end = jnp.minimum(first + size, starts[owner + 1])
    rows = jnp.stack([owner, first, end, jnp.zeros_like(owner)], axis=1)
    head = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(count)
    return SortedPairs(order, jnp.concatenate([head, rows]))

"""Expert parallelism: tokens of different rows go to the devices of their experts, and come back.

    y = exchanged(x, experts, weights, per_device, compute)      inside the shard_map

Each device of the mesh's "expert" axis has its own rows and its own experts.  A token is sent once
to each device that has one of its experts, by an all-to-all.  That device returns the weighted sum
of its experts' results, and the sums are added where the token came from.

No token is dropped.  A device first counts its tokens for each other one.  The largest count of all
devices chooses the size of the exchange among three: all, a half or a quarter of a device's tokens.

Source: GShard (arXiv 2006.16668), with counts in place of a capacity.  Left out: 8-bit tokens on
the wire; overlap with the shared expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.parallel.mesh import EXPERT_AXIS

_LEAST_TOKENS = 64  # fewer tokens have one size of exchange: it costs latency, not bytes

# (x[T, D], experts[T, k], weights[T, k]) -> float32 [T, D] of this device's experts
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def exchanged(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    per_device: int,
    compute: Compute,
) -> jax.Array:
    """Return the mixture's float32 output ``[T, D]`` of this device's tokens ``x[T, D]``.

    experts, weights: int32 and float32 ``[T, k]``.  An expert of another device's is -1 for nobody.
    per_device: number of experts of a device of the axis; device d has those from
    ``d * per_device`` on.
    """
    n, n_tokens = lax.axis_size(EXPERT_AXIS), x.shape[0]
    owners = experts // per_device
    goes = jnp.any(owners[:, :, None] == jnp.arange(n, dtype=owners.dtype), axis=1)  # [T, n]
    most = lax.pmax(jnp.max(jnp.sum(goes, axis=0, dtype=jnp.int32)), EXPERT_AXIS)
    sizes = exchange_sizes(n_tokens)
    ways = [functools.partial(_exchanged, size, compute) for size in sizes]
    fits = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
    operands = x, experts, weights, goes
    return ways[0](*operands) if len(ways) == 1 else lax.switch(fits, ways, *operands)


def exchange_sizes(n_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens that a device may send to each other one, in rising order."""
    if n_tokens < _LEAST_TOKENS:
        return (n_tokens,)
    return -(-n_tokens // 4), -(-n_tokens // 2), n_tokens


def _exchanged(
    size: int,
    compute: Compute,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    goes: jax.Array,
) -> jax.Array:
    """``exchanged`` with ``size`` places for tokens from each device to each other one."""
    n_tokens, n = goes.shape
    place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    place = jnp.where(goes, place, size)  # dropped
    tokens = jnp.arange(n_tokens, dtype=jnp.int32)[:, None]
    to = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), goes.shape)
    nobody = jnp.full((n, size), n_tokens, jnp.int32)
    sent = nobody.at[to, place].set(jnp.broadcast_to(tokens, goes.shape), mode="drop")

    def swap(parts: jax.Array) -> jax.Array:
        return lax.all_to_all(parts, EXPERT_AXIS, split_axis=0, concat_axis=0)

    def delivered(values: jax.Array, fill: int) -> jax.Array:
        parts = values.at[sent].get(mode="fill", fill_value=fill)
        return swap(parts).reshape(n * size, -1)

    y = compute(delivered(x, 0), delivered(experts, -1), delivered(weights, 0))
    back = swap(y.reshape(n, size, -1))
    total = jnp.zeros((n_tokens, y.shape[-1]), jnp.float32)
    # One device after the other, so that the order of the sums does not depend on a scatter's.
    for index in range(n):
        total = total.at[sent[index]].add(back[index], mode="drop", unique_indices=True)
    return total

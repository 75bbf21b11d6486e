"""Expert parallelism: tokens of different rows go to the devices of their experts, and come back.

    y = exchanged(x, experts, weights, per_device, compute)      inside the shard_map

Each device of the mesh's "expert" axis has its own rows and its own experts.  A token is sent once
to each device that has one of its experts, by an all-to-all.  That device returns the weighted sum
of its experts' results, and the sums are added where the token came from.

A token travels with its experts and weights, so a layer has two exchanges: there and back.

No token is dropped.  Where most tokens go to most devices, an exchange has places for all of them.
Otherwise a device first counts its tokens for each other one.  The largest count of all devices
chooses the size of the exchange among three: all, a half or a quarter of a device's tokens.

Source: GShard (arXiv 2006.16668), with counts in place of a capacity.  Left out: 8-bit tokens on
the wire; overlap with the shared expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.parallel.mesh import EXPERT_AXIS

# Fewer tokens have one size of exchange.  The host of a GPU reads which size it is; in these 30 us
# a GPU sends 9 MB.
_LEAST_TOKENS = 256

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
    n, (n_tokens, k) = lax.axis_size(EXPERT_AXIS), experts.shape
    owners = experts // per_device
    goes = jnp.any(owners[:, :, None] == jnp.arange(n, dtype=owners.dtype), axis=1)  # [T, n]
    most = lax.pmax(jnp.max(jnp.sum(goes, axis=0, dtype=jnp.int32)), EXPERT_AXIS)
    sizes = exchange_sizes(n_tokens, n, k)
    ways = [functools.partial(_exchanged, size, compute) for size in sizes]
    fits = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
    operands = x, experts, weights, goes
    return ways[0](*operands) if len(ways) == 1 else lax.switch(fits, ways, *operands)


def exchange_sizes(n_tokens: int, n: int, k: int) -> tuple[int, ...]:
    """Return the numbers of tokens that a device may send to each other one, in rising order.

    n, k: numbers of devices, and of a token's experts.  If these are anywhere, a device gets the
    share 1 - (1 - 1/n)^k of the tokens.
    """
    share = 1.0 - (1.0 - 1.0 / n) ** k
    if n_tokens < _LEAST_TOKENS or share > 0.5:
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

    # Place by place the words of a token: nobody's has zeros, so experts count from 1.
    parts = x, experts + 1, weights
    words = jnp.concatenate([_words(part) for part in parts], axis=1)
    words = swap(words.at[sent].get(mode="fill", fill_value=0)).reshape(n * size, -1)
    ends = np.cumsum([_words(part).shape[1] for part in parts]).tolist()
    x, experts, weights = (
        _of_words(words[:, end - _words(part).shape[1] : end], part)
        for end, part in zip(ends, parts, strict=True)
    )
    back = swap(compute(x, experts - 1, weights).reshape(n, size, -1))
    total = jnp.zeros((n_tokens, back.shape[-1]), jnp.float32)
    # One device after the other, so that the order of the sums does not depend on a scatter's.
    for index in range(n):
        total = total.at[sent[index]].add(back[index], mode="drop", unique_indices=True)
    return total


def _words(x: jax.Array) -> jax.Array:
    """Return the 16-bit words ``[T, words]`` of an array ``[T, n]`` of 16 or 32 bits."""
    return lax.bitcast_convert_type(x, jnp.uint16).reshape(x.shape[0], -1)


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Undo ``_words`` for an array of ``like``'s dtype and columns."""
    pairs = (like.dtype.itemsize // 2,) if like.dtype.itemsize > 2 else ()
    shape = words.shape[0], like.shape[1], *pairs
    return lax.bitcast_convert_type(words.reshape(shape), like.dtype)

"""Attention over a cache in blocks of keys with an online softmax, in plain jax.numpy.

The XLA form of ``decode_attention``, and for more than one query token the way prefill reads a
cache.  The trip count is known at run time, so values beyond the longest row are never read.
Values beyond a row's own length are masked in the scores and in V, so NaN there reaches no result.

Pages: with ``table`` int32 ``[B, M]`` a cache is a pool of pages ``[P, page, K, H]``, and a row's
token t lies at ``[table[b, t // page], t % page]``; S is M * page.  Entries past the pages that a
row's tokens need may be anything, and so may pages that no row owns; rows may share pages.

Source: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.attention.operands import Entries, capacity_of
from pallas_kernels.attention.plain import attention_scores, by_head, is_visible, weighted_values
from pallas_kernels.fixed_sums import has_fixed_sums, row_sums
from pallas_kernels.qtensor import QTensor, dequantize

Kv = TypeVar("Kv", bound=Entries)

KEY_BLOCK = 512
# A GPU decodes short contexts in one block: a loop inside the loop over tokens costs more.
GPU_DECODE_BLOCK = 4096
# A CPU pays for every key that it masks: 16 rows of 60 tokens, 127 ms a step against 229.
CPU_DECODE_BLOCK = 64


def blockwise_attention(
    q: jax.Array,
    k: Entries,
    v: Entries,
    positions: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    block: int | None = None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """``q [B, T, N, H]`` at ``positions [B, T]`` over ``k, v [B, S, K, H]`` -> ``[B, T, N, H]``.

    A query sees the keys at s <= its position (and > position - window); at position -1 it sees
    none and gives zeros.  scale: of the scores, H ** -0.5 by default.  softcap: a score s becomes
    softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118).  block: keys at a time.
    table: of pages ``k, v [P, page, K, H]``; where ``page`` divides ``block``, the same bits as of
    the rows that it stands for.  sinks: ``[N]``, logits that join each head's softmax and have no
    value.
    """
    capacity = capacity_of(k, table)
    fixed = has_fixed_sums()
    if block is None:
        on_gpu = KEY_BLOCK if fixed else GPU_DECODE_BLOCK
        decode_block = {"gpu": on_gpu, "cpu": CPU_DECODE_BLOCK}
        block = decode_block.get(jax.default_backend(), KEY_BLOCK) if q.shape[1] == 1 else KEY_BLOCK
    if table is not None:  # whole pages
        block = -(-block // k.shape[1]) * k.shape[1]
    if not fixed:
        block = min(block, capacity)
    stop = (jnp.max(positions) + block) // block  # blocks that hold a visible key, rounded up
    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(jnp.min(positions) - window + 1, 0) // block

    def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        # The last block may overhang the capacity: it is moved back, and keys that an earlier
        # block has done are masked.
        size = min(block, capacity)
        begin = jnp.minimum(index * block, capacity - size)
        k_block = load(k, begin, size, q.dtype, table)
        v_block = load(v, begin, size, q.dtype, table)
        k_positions = begin + jnp.arange(size, dtype=jnp.int32)
        if fixed:  # a key's place in its block does not depend on the capacity
            rest = block - size
            k_block, v_block, k_positions = (
                _moved(x, begin - index * block, rest, axis)
                for x, axis in ((k_block, 1), (v_block, 1), (k_positions, 0))
            )
        fresh = (k_positions >= index * block)[None, None, :]
        visible = is_visible(positions, k_positions[None, :], window) & fresh  # [B, T, block]
        seen = jnp.any(visible, axis=1)[:, :, None, None]
        v_block = jnp.where(seen, v_block, jnp.zeros_like(v_block))
        scores = jnp.where(
            visible[:, None, None], attention_scores(q, k_block, scale, softcap), -jnp.inf
        )
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        # Rows that have seen no key yet keep top = -inf; exp(-inf - 0) = 0 keeps them at zero.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - base[..., None])
        fade = jnp.exp(top - base)
        out = out * jnp.transpose(fade, (0, 3, 1, 2)).reshape(*q.shape[:3], 1)
        return (
            new_top,
            total * fade + row_sums(weights)[..., 0],
            out + weighted_values(weights, v_block),
        )

    batch, n_new, n, _ = q.shape
    n_kv = k.shape[2]
    # Zeros of q, so that inside a shard_map they vary over the axes that q does.
    none = jnp.zeros_like(q, jnp.float32)
    total = jnp.moveaxis(none[..., 0].reshape(batch, n_new, n_kv, n // n_kv), 1, -1)
    # A sink is a key that has been seen already, and whose value is zero.
    zero = total - jnp.inf, total, none
    if sinks is not None:
        seen_first = total + by_head(sinks, n_kv)
        zero = seen_first, total + 1.0, none
    if block >= capacity:
        _, total, out = step(jnp.int32(0), zero)
    else:
        _, total, out = lax.fori_loop(first, stop, step, zero)
    total = jnp.transpose(total, (0, 3, 1, 2)).reshape(batch, n_new, n, 1)
    return (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)


def _moved(x: jax.Array, by: jax.Array, rest: int, axis: int) -> jax.Array:
    """Return ``x`` rolled along the axis, with ``rest`` entries of -1 behind."""
    widths = [(0, rest if at == axis else 0) for at in range(x.ndim)]
    return jnp.pad(jnp.roll(x, by, axis), widths, constant_values=-1)


def load(
    kv: Entries,
    begin: jax.Array | int,
    size: int,
    dtype: DTypeLike,
    table: jax.Array | None = None,
) -> jax.Array:
    """Tokens ``begin .. begin + size - 1`` of a cache as floats ``[B, size, K, H]``.

    table: then both are multiples of the page; an entry outside of the pool is another page.
    """
    return floats(part_of(kv, begin, size, table), dtype)


def part_of(kv: Kv, begin: jax.Array | int, size: int, table: jax.Array | None = None) -> Kv:
    """``load`` as the cache has them."""
    if table is None:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, size, axis=1), kv)
    page = kv.shape[1]
    return joined(kv, lax.dynamic_slice_in_dim(table, begin // page, size // page, axis=1))


def joined(pools: Kv, table: jax.Array) -> Kv:
    """The pages of a table one behind the other, ``[B, M * page, ...]`` of every leaf ``[P, page,
    ...]``; an entry outside of the pool is another page."""

    def rows(pool: jax.Array) -> jax.Array:
        pages = jnp.take(pool, table, axis=0, mode="clip")
        return pages.reshape(table.shape[0], -1, *pool.shape[2:])

    return jax.tree.map(rows, pools)


def floats(x: Entries, dtype: DTypeLike) -> jax.Array:
    return dequantize(x, dtype) if isinstance(x, QTensor) else x.astype(dtype)

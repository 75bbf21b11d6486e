"""Attention over keys and values that are there already: another layer's, or latents.

    over_cache(q, cache, at, window)         over a cache that holds the new tokens
    borrow(cfg, p, projected, state, at)     a layer without keys and values

The lender is a layer before.  Its state, with the call's tokens, is the ``state`` of every layer
that borrows.  A call without a cache passes a ``KeysValues`` instead.

Left out: cuDNN's kernel for a chunk behind a past.  Such chunks take XLA's form on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllama.config import AttentionConfig
from jaxllama.model.mixers.attention.chunk import attend, attend_cached
from jaxllama.model.mixers.attention.state import KVCache, as_pages
from jaxllama.model.records import At, Chunk, Draft, Pieces
from jaxllama.model.rope import narrowed, widened
from jaxllama.typing import Params
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.plain import rotate
from pallas_kernels.attention.rope_cache import from_cache_basis, to_cache_basis
from pallas_kernels.rows.rms_norm import rms_norm


class KeysValues(NamedTuple):
    """Keys with RoPE and values of a call without a cache, each ``[B, T, K, H]``."""

    k: jax.Array
    v: jax.Array


def borrow(
    cfg: AttentionConfig, p: Params, projected: jax.Array, state: KVCache | KeysValues, at: At
) -> jax.Array:
    """Return heads ``[B, T, N H]`` of queries ``projected [B, T, N H]`` over another layer's keys.

    cfg: of a layer that borrows.
    """
    assert at.rope is not None
    q = projected.reshape(*projected.shape[:-1], cfg.n_heads, cfg.head_dim)
    if cfg.qk_norm == "head":
        q = rms_norm(q, p["q_norm"]["weight"], cfg.norm_eps)
    q, rope = widened(q, at.rope, state.k.shape[-1])
    q = rotate(q, *rope.of(cfg.rope, q.shape[-1]))
    if isinstance(state, KeysValues):
        assert isinstance(at, Chunk)
        out = attend(q, *state, at.positions, cfg.sliding_window, segments=at.segments)
    else:
        out = over_cache(q, state, at, cfg.sliding_window)
    return narrowed(out, cfg.head_dim).reshape(projected.shape)


def over_cache(q: jax.Array, cache: KVCache, at: At, window: int | None) -> jax.Array:
    """Return attention of ``q [B, T, N, H]``, with RoPE, over a cache that holds its tokens."""
    (q,), table = to_cache_basis(cache.k, q), at.table
    if isinstance(at, Pieces):  # two calls, so that both pieces of a row read its cache
        halves = [x.reshape(2, -1, *x.shape[1:]) for x in (q, at.positions, at.lengths)]
        outs = [
            attend_cached(q, cache, positions, lengths, window, None, table)
            for q, positions, lengths in zip(*halves, strict=True)
        ]
        return from_cache_basis(cache.v, jnp.concatenate(outs))
    if isinstance(at, Chunk):
        out = attend_cached(q, cache, at.positions, at.lengths, window, None, table)
        return from_cache_basis(cache.v, out)
    seen = jnp.where(at.lengths > 0, at.positions[:, 0] + 1, 0)
    if isinstance(at, Draft) and not at.exact:
        seen = at.by_row(seen[:, None])
        out = decode_attention(at.by_row(q), cache.k, cache.v, seen, table=table, window=window)
        return out.reshape(q.shape)
    if isinstance(at, Draft):
        cache, table = as_pages(cache, at.table, at.width)
    out = decode_attention(q[:, 0], cache.k, cache.v, seen, table=table, window=window)
    return out[:, None]

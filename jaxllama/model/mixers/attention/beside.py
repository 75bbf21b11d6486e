"""Attention of one token a row in three parts, of which the second runs beside the cache.

before(layer, p, projected)     on the device of the weights
attend(layer, new, ...)         on the device of the cache, in the form that runs anywhere
after(layer, p, heads, gate)    on the device of the weights again
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.model.mixers.attention.mix import finished, sinks_of, split_heads, unpacked
from jaxllama.model.mixers.attention.sparse import sparse_decode
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.rope import Ropes, narrowed, widened
from jaxllama.typing import Params
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.rope_cache import from_cache_basis, rope_and_write

__all__ = ["after", "attend", "before", "sinks_of"]


def before(
    layer: LayerConfig, p: Params, projected: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return q, k and v ``[B, N + 2K, H]`` without RoPE, and the heads' gate or None."""
    gate, qkv = unpacked(layer.mixer, p, projected)
    return split_heads(layer.mixer, p, qkv[:, 0]), gate


def attend(
    layer: LayerConfig,
    qkv: jax.Array,
    position: jax.Array,
    lengths: jax.Array,
    rope: Ropes,
    sinks: jax.Array | None,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Return heads ``[B, N, H]`` and the cache with the new tokens.

    position, lengths: int32 ``[B]``; a row of length 0 has no new token.
    """
    cfg: AttentionConfig = layer.mixer
    slots = jnp.where(lengths > 0, position, cache.k.shape[1])
    qkv, rope = widened(qkv, rope, cache.k.shape[-1])
    cos, sin = (table[:, 0] for table in rope.of(cfg.rope, qkv.shape[-1]))
    q, k, v = rope_and_write(qkv, cos, sin, cache.k, cache.v, slots, implementation="xla")
    cache = KVCache(k, v)
    if cfg.attn_sparsity < 1.0:
        out = sparse_decode(
            q[:, None], cache, position[:, None], cfg.attn_sparsity, cfg.sliding_window
        )
        return narrowed(from_cache_basis(cache.v, out[:, 0]), cfg.head_dim), cache
    out = blockwise_attention(
        q[:, None],
        k,
        v,
        jnp.where(lengths > 0, position, -1)[:, None],
        window=cfg.sliding_window,
        softcap=cfg.attn_softcap,
        sinks=sinks,
    )
    return narrowed(from_cache_basis(cache.v, out[:, 0]), cfg.head_dim), cache


def after(layer: LayerConfig, p: Params, heads: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Return heads ``[B, 1, N, H]`` as the output product reads them."""
    return finished(layer.mixer, p, heads, gate)

"""Attention from latents of one token a row in three parts, as ``attention.beside`` has them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllama.config import LatentAttentionConfig, LayerConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers.latent.mix import absorbed_heads, entries, heads_of, lifted
from jaxllama.model.mixers.latent.state import LatentCache
from jaxllama.model.rope import Ropes
from jaxllama.typing import Params
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.rope_cache import from_cache_basis, store, to_cache_basis
from pallas_kernels.latent.step import turned_last
from pallas_kernels.operands import Columns


def sinks_of(cfg: LatentAttentionConfig, p: Params) -> None:
    """Return None: no head has a sink."""
    del cfg, p


def before(
    layer: LayerConfig, p: Params, projected: Sequence[Columns]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the queries of latents and what the cache holds, ``[B, N + 1, R + r]``, before RoPE.

    Raises JaxLlamaError for a layer with an indexer.
    """
    cfg: LatentAttentionConfig = layer.mixer
    if cfg.indexer is not None:
        raise JaxLlamaError("attention beside the device: not of layers with an indexer")
    heads = heads_of(cfg, p, projected)
    return jnp.concatenate([absorbed_heads(cfg, p, heads), entries(heads)], axis=2)[:, 0], None


def attend(
    layer: LayerConfig,
    new: jax.Array,
    position: jax.Array,
    lengths: jax.Array,
    rope: Ropes,
    sinks: jax.Array | None,
    cache: LatentCache,
) -> tuple[jax.Array, LatentCache]:
    """Return sums of the cache's entries ``[B, N, R + r]`` and the cache with the new tokens."""
    del sinks
    cfg: LatentAttentionConfig = layer.mixer
    slots = jnp.where(lengths > 0, position, cache.k.shape[1])
    heads = turned_last(new[:, None], *rope.of(cfg.rope, cfg.d_rope))
    (heads,) = to_cache_basis(cache.k, heads)
    q, entry = jnp.split(heads, (cfg.n_heads,), axis=2)
    k = store(cache.k, entry, slots[:, None])
    out = blockwise_attention(q, k, k, jnp.where(lengths > 0, position, -1)[:, None])
    return from_cache_basis(k, out[:, 0]), LatentCache(k, None)


def after(layer: LayerConfig, p: Params, heads: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Return sums of entries ``[B, 1, N, R + r]`` as the output product reads them."""
    del gate
    out = lifted(layer.mixer, p, heads)
    return out.reshape(*out.shape[:2], -1)

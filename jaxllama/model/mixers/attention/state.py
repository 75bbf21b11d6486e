"""The state of an attention layer: a ``KVCache`` with the keys and values of the tokens so far."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model.mixers.common import QUANTIZED_CACHE
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis
from pallas_kernels.attention.rope_cache import quantize_kv, store
from pallas_kernels.brief import short_repr
from pallas_kernels.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values, each ``[B, S, K, H]``, or pages ``[P, S, K, H]`` with a table.
    Heads are as wide as ``cached_width``. Each is an array, or a QTensor with one scale per token
    and head. int4 has a scale and a zero point per 64 features, in a rotated basis."""

    k: jax.Array | QTensor
    v: jax.Array | QTensor

    __repr__ = short_repr

    def specs(self, rows: RowAxis) -> KVCache:
        """How it is split on a mesh: rows over the axis ``rows``, heads over the model's."""
        return jax.tree.map(lambda _: P(rows, None, MODEL_AXIS), self)


def init_state(cfg: ModelConfig, rows: int, length: int, width: int, dtype: str) -> KVCache:
    """Return an empty cache of ``rows`` rows (or pages) of ``length`` tokens.

    width: features of a head in the cache.
    """
    shape = (rows, length, cfg.n_kv_heads, width)
    if dtype not in QUANTIZED_CACHE:
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    # Zeros outright: quantizing them inside a jitted caller would be folded by the compiler, at
    # seconds a layer.
    words = jax.eval_shape(lambda: quantize_kv(jnp.zeros(shape, jnp.float32), dtype))
    return KVCache(_zeros(words), _zeros(words))


def _zeros(like: QTensor) -> QTensor:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def write(
    cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array, table: jax.Array | None = None
) -> KVCache:
    """Store ``k, v [B, T, K, H]`` at positions ``slots[B, T]`` of each row; a slot beyond the
    capacity is dropped, which is how padding is kept out."""
    return KVCache(store(cache.k, k, slots, table), store(cache.v, v, slots, table))

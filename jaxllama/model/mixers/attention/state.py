"""The state of an attention layer: a ``KVCache`` with the keys and values of the tokens so far."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.model.mixers.common import QUANTIZED_CACHE
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis
from jaxllama.typing import Tree
from pallas_kernels.attention.blockwise import CPU_DECODE_BLOCK
from pallas_kernels.attention.rope_cache import quantize_kv, store
from pallas_kernels.operands import short_repr
from pallas_kernels.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values, each ``[B, S, K, H]``, or pages ``[P, S, K, H]`` with a table.
    Heads are as wide as ``cached_width``. Each is an array, or a QTensor with one scale per token
    and head. int4 has a scale and a zero point per 64 features, in a rotated basis.
    """

    k: Tree  # ``latent.state`` has its own use of both
    v: Tree

    __repr__ = short_repr

    def specs(self, rows: RowAxis) -> KVCache:
        """How it is split on a mesh: rows over the axis ``rows``, heads over the model's."""
        return jax.tree.map(lambda _: P(rows, None, MODEL_AXIS), self)


def init_state(
    layer: LayerConfig, rows: int, length: int, width: int, dtype: str
) -> KVCache | None:
    """Return an empty cache of ``rows`` rows (or pages) of ``length`` tokens.

    width: features of a head in the cache.  A layer that borrows another's keys has no cache.
    """
    cfg: AttentionConfig = layer.mixer
    if cfg.borrows:
        return None
    shape = (rows, length, cfg.n_kv_heads, width)
    return KVCache(zeros(shape, dtype), zeros(shape, dtype))


def zeros(shape: tuple[int, ...], dtype: str) -> jax.Array | QTensor:
    """Return keys or values of this shape, which are zeros, in a cache's dtype."""
    if dtype not in QUANTIZED_CACHE:
        return jnp.zeros(shape, dtype)
    # Zeros outright: quantizing them inside a jitted caller would be folded by the compiler, at
    # seconds a layer.
    words = jax.eval_shape(lambda: quantize_kv(jnp.zeros(shape, jnp.float32), dtype))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), words)


def write(
    cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array, table: jax.Array | None = None
) -> KVCache:
    """Store ``k, v [B, T, K, H]`` at positions ``slots[B, T]`` of each row; a slot beyond the
    capacity is dropped, which is how padding is kept out."""
    return KVCache(store(cache.k, k, slots, table), store(cache.v, v, slots, table))


def as_pages(cache: KVCache, table: jax.Array | None, repeats: int) -> tuple[KVCache, jax.Array]:
    """Return a cache as pages, and their table with each row ``repeats`` times.

    A cache with a table has pages already.  Else a page is one block of the XLA form, if that
    divides the rows, or a whole row.
    """
    if table is not None:
        return cache, jnp.repeat(table, repeats, axis=0)
    rows, capacity = cache.k.shape[:2]
    page = CPU_DECODE_BLOCK if capacity % CPU_DECODE_BLOCK == 0 else capacity
    pages = jax.tree.map(lambda x: x.reshape(-1, page, *x.shape[2:]), cache)
    page_table = np.arange(rows * (capacity // page), dtype=np.int32).reshape(rows, -1)
    # A constant: no layer has a kernel that makes it.
    return pages, jnp.asarray(np.repeat(page_table, repeats, axis=0))

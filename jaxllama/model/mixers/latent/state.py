"""The state of a layer of attention from latents: a ``LatentCache``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxllama.config import LatentAttentionConfig, LayerConfig
from jaxllama.model.mixers.attention.state import KVCache, zeros
from jaxllama.parallel.mesh import RowAxis
from pallas_kernels.attention.operands import LatentCodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LatentCache(KVCache):
    """A cache of latents: k has one head of ``kv_rank + d_rope`` features, ``[B, S, 1, R + r]``.

    Their first features are the values. With 8 bits k is a ``LatentCodes``. v is None, or the
    indexer's keys, ``[B, S, 1, width]``.
    """

    def specs(self, rows: RowAxis) -> LatentCache:
        """How it is split on a mesh: rows over the axis ``rows``; all heads read the one head."""
        alone = P() if rows is None else P(rows)
        return jax.tree.map(lambda _: alone, self)


def init_state(layer: LayerConfig, rows: int, length: int, width: int, dtype: str) -> LatentCache:
    """Return an empty cache of ``rows`` rows (or pages) of ``length`` tokens."""
    del width
    cfg: LatentAttentionConfig = layer.mixer

    def empty(features: int, dtype: str) -> Any:
        return zeros((rows, length, 1, features), dtype)

    if dtype in ("int8", "float8_e4m3fn"):
        k = LatentCodes(empty(cfg.kv_rank, dtype), empty(cfg.d_rope, "bfloat16"))
    else:
        k = empty(cfg.width, dtype)
    if cfg.indexer is None:
        return LatentCache(k, None)
    # Four bits would change too many choices.
    dtype = "int8" if dtype == "int4" else dtype
    return LatentCache(k, empty(cfg.indexer.head_dim, dtype))

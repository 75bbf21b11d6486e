"""Bytes of caches and hidden states, and a check of host memory for a block.

The bytes are exact for every dtype: int4 takes half a byte, and scales and zero points count.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model.cache import init_cache, init_layer
from jaxllama.model.mixers.common import LayerState
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.store import check_host_memory
from jaxllama.typing import Tree
from pallas_kernels.qtensor import packed_bytes, tree_bytes


def cache_bytes(cfg: ModelConfig, rows: int, length: int, dtype: DTypeLike) -> int:
    """Return the bytes of keys and values of ``length`` tokens in each row, or of GLA states."""
    return tree_bytes(cache_shapes(cfg, rows, length, dtype))


def hidden_bytes(cfg: ModelConfig, rows: int, length: int, dtype: DTypeLike) -> int:
    """Return the bytes of hidden states, one a token.

    Between units there are two, because the norm computes the sum.
    """
    return packed_bytes(rows * length * cfg.d_model, dtype)


def cache_shapes(
    cfg: ModelConfig, rows: int, length: int, dtype: DTypeLike
) -> tuple[LayerState, ...]:
    return _cache_shapes(cfg, rows, length, jnp.dtype(dtype).name)


def layer_shapes(layer: LayerConfig, rows: int, length: int, dtype: DTypeLike) -> LayerState:
    """Return the shapes of one layer's state."""
    name = jnp.dtype(dtype).name
    return jax.eval_shape(lambda: init_layer(layer, rows, length, name))


@functools.lru_cache(maxsize=256)
def _cache_shapes(cfg: ModelConfig, rows: int, length: int, dtype: str) -> tuple[LayerState, ...]:
    return jax.eval_shape(lambda: init_cache(cfg, rows, length, dtype)).layers


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Bytes in each place."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: Tiers) -> Tiers:
        return Tiers(self.device + other.device, self.host + other.host, self.disk + other.disk)

    def times(self, count: int) -> Tiers:
        return Tiers(self.device * count, self.host * count, self.disk * count)


def split_bytes(tree: Tree, shares: Shares) -> Tiers:
    """Return the bytes of a tree of arrays or shapes in each tier, as ``Store.put`` divides it."""
    total = Tiers()
    for leaf in jax.tree.leaves(tree):
        if leaf.ndim < 2:
            total += Tiers(device=packed_bytes(leaf.size, leaf.dtype))
        else:
            columns = leaf.shape[-1]
            rows = shares.rows(leaf.size // columns)
            total += Tiers(*(packed_bytes(count * columns, leaf.dtype) for count in rows))
    return total


def check_host(
    cfg: ModelConfig,
    policy: Policy,
    shape: tuple[int, int],
    capacity: int,
    kv_dtype: DTypeLike,
    dtype: DTypeLike,
) -> None:
    """Raise JaxLlamaError if host memory has no room for a block's cache and hidden states."""
    rows, width = shape
    cache = split_bytes(cache_shapes(cfg, rows, capacity, kv_dtype), policy.cache)
    pair = 2 * hidden_bytes(cfg, rows, width, dtype) * policy.activations.host / 100
    check_host_memory(cache.host + int(pair))

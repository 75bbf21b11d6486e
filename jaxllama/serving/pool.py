"""The pool of the prefix cache on the device: a Cache too, of ``rows`` rows of ``block`` tokens.

``load_blocks`` makes the cache of a new row out of pool rows; ``store_blocks`` copies the blocks of
prompts into the pool (of GLA layers: the state after a prompt's last block).  Which block lies in
which row is ``prefix_cache``'s to know.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxllama.cache import Cache, GLAState, KVCache
from jaxllama.config import ModelConfig
from jaxllama.serving.slots import empty_cache


def init_pool(cfg: ModelConfig, rows: int, block: int, dtype: str) -> Cache:
    """The prefix cache's memory: one block of tokens a row."""
    return empty_cache(cfg, rows, block, dtype)


@jax.jit
def load_blocks(pool: Cache, rows: jax.Array, n_blocks: jax.Array, length: jax.Array) -> Cache:
    """One row with room for ``len(rows)`` blocks, of which the first ``n_blocks`` (at least 1) are
    the pool's ``rows``: ``length`` tokens.  What follows is beyond its length."""

    def joined(leaf: jax.Array) -> jax.Array:  # [rows, block, ...] -> [1, n * block, ...]
        return leaf[rows].reshape(1, -1, *leaf.shape[2:])

    def last(leaf: jax.Array) -> jax.Array:
        return leaf[rows[n_blocks - 1]][None]

    layers = tuple(
        jax.tree.map(joined if isinstance(layer, KVCache) else last, layer) for layer in pool.layers
    )
    return Cache(layers, length[None])


@functools.partial(jax.jit, donate_argnums=0)
def store_blocks(
    pool: Cache, source: Cache, begin: jax.Array, rows: jax.Array, state_rows: jax.Array
) -> Cache:
    """The blocks of each row r of ``source`` from token ``begin`` on go to the pool's
    ``rows[r, :]``, and its GLA states to ``state_rows[r]``; row numbers past the pool's end are
    dropped."""

    def put_blocks(old: jax.Array, new: jax.Array) -> jax.Array:
        where = begin + jnp.arange(rows.shape[1] * old.shape[1], dtype=jnp.int32)
        blocks = jnp.take(new, where, axis=1, mode="clip").reshape(rows.size, *old.shape[1:])
        return old.at[rows.reshape(-1)].set(blocks, mode="drop")

    def put_state(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[state_rows].set(new, mode="drop")

    layers = tuple(
        jax.tree.map(put_state if isinstance(old, GLAState) else put_blocks, old, new)
        for old, new in zip(pool.layers, source.layers, strict=True)
    )
    return Cache(layers, pool.lengths)

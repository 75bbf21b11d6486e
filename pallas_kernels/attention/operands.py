"""The operands of the ops on a cache of keys and values, as their kernels take them, too."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.qtensor import QTensor

Cached = jax.Array | QTensor
WIDTHS = (64, 128, 256)  # of the heads that decoding's kernels take, in features


class Attended(NamedTuple):
    """The queries of the newest tokens and the cache, as ``decode_attention`` takes them."""

    q: jax.Array
    k: Cached
    v: Cached
    lengths: jax.Array
    table: jax.Array | None = None
    sinks: jax.Array | None = None

    def by_token(self) -> tuple[jax.Array, jax.Array]:
        """Return (``q [B, T, N, H]``, ``lengths [B, T]``)."""
        several = self.q.ndim == 4
        return (self.q, self.lengths) if several else (self.q[:, None], self.lengths[:, None])


class NewTokens(NamedTuple):
    """One new token of each row, as ``rope_and_write`` takes it, or T: then qkv, cos, sin and slots
    have an axis T behind B."""

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    k: Cached
    v: Cached
    slots: jax.Array
    table: jax.Array | None = None


def capacity_of(kv: Cached, table: jax.Array | None) -> int:
    """Return the number of tokens that a row can hold, S."""
    return kv.shape[1] if table is None else table.shape[1] * kv.shape[1]

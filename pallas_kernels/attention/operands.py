"""The operands of the ops on a cache of keys and values, as their kernels take them, too."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.qtensor import QTensor, dequantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCodes:
    """A cache of latents in 8 bits, ``[..., R + r]``.

    low: the latents' codes ``[..., R]``, with a scale a token.  rope: the turning part of the keys,
    bfloat16 ``[..., r]``, as a key's largest features would take the bits of the others.
    """

    low: QTensor
    rope: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.low.shape[:-1], self.low.shape[-1] + self.rope.shape[-1]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the codes."""
        return self.low.dtype

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Return the entries as floats."""
        parts = dequantize(self.low, dtype), self.rope.astype(dtype)
        return jnp.concatenate(parts, axis=-1)


Cached = jax.Array | QTensor
Entries = Cached | LatentCodes
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


def capacity_of(kv: Entries, table: jax.Array | None) -> int:
    """Return the number of tokens that a row can hold, S."""
    return kv.shape[1] if table is None else table.shape[1] * kv.shape[1]

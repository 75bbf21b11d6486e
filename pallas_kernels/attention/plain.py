"""Attention's parts in plain jax.numpy: RoPE's rotation, scores, mask, softmax, weighted values.

``hadamard`` spreads outlier channels of a head before 4-bit rounding: x W, W = W^T = W^-1.  W is
orthonormal, so q W . k W = q . k, and attention over rotated values comes out rotated and is
rotated back by W itself.  (QuaRot, arXiv 2404.00456, folds the values' rotation into the
projections at load; two small products around attention need no such weights.)

Rows without a cache, as in training, are these parts alone.  ``blockwise`` runs them over a cache.
Products are accumulated in float32.

RoPE is the "rotate half" form: feature i of the first half of a head turns with feature i of the
second (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.fixed_sums import rounded


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate ``x[B, T, heads, H]`` by tables ``[B, T, H / 2]``; float32 inside, x's dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    parts = rounded(first * c) - rounded(second * s), rounded(second * c) + rounded(first * s)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def attention_scores(
    q: jax.Array, k: jax.Array, scale: float | None = None, softcap: float | None = None
) -> jax.Array:
    """Scaled dot products of ``q [B, T, N, H]`` and ``k [B, S, K, H]`` in float32,
    ``[B, K, G, T, S]``."""
    batch, n_new, n, h = q.shape
    scale = h**-0.5 if scale is None else scale
    grouped = q.reshape(batch, n_new, k.shape[2], n // k.shape[2], h)
    scores = jnp.einsum(
        "btkgh,bskh->bkgts",
        grouped * jnp.asarray(scale, q.dtype),
        k,
        preferred_element_type=jnp.float32,
        precision=precision(q),
    )
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def by_head(sinks: jax.Array, n_kv: int) -> jax.Array:
    """``sinks [N]`` beside scores ``[B, K, G, T]``: float32 ``[1, K, G, 1]``."""
    return sinks.astype(jnp.float32).reshape(1, n_kv, -1, 1)


def softmax(scores: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """The softmax of ``scores [B, K, G, T, S]`` over S, float32.

    sinks: ``[N]``, a further logit of each head, whose own weight is left out of the result.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = by_head(sinks, scores.shape[1])[..., None]
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top))


def weighted_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """``weights[B, K, G, T, S]`` times ``v[B, S, K, H]`` -> float32 ``[B, T, N, H]``."""
    batch, n_kv, group, n_new, _ = weights.shape
    out = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
        precision=precision(v),
    )
    return out.reshape(batch, n_new, n_kv * group, v.shape[-1])


def precision(x: jax.Array) -> lax.Precision | None:
    # Without this, float32 products on a GPU may run in TF32.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def is_visible(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """Boolean ``[B, T, S]``: may the query at each position see the key at each position."""
    q_pos, k_pos = q_positions[:, :, None], k_positions[:, None, :]
    visible = k_pos <= q_pos
    return visible if window is None else visible & (k_pos > q_pos - window)


def hadamard(x: jax.Array) -> jax.Array:
    """``x[..., H]`` rotated; summed in float32, in x's dtype.

    H that is no power of two is rotated in blocks of the largest one that divides it: heads of 96
    in three blocks of 32, heads of an odd width not at all.
    """
    size = x.shape[-1] & -x.shape[-1]
    if size == 1:
        return x
    # Signs are exact in every dtype, so 16-bit products are too.
    parts = jnp.einsum(
        "...i,ij->...j",
        x.reshape(*x.shape[:-1], x.shape[-1] // size, size),
        jnp.asarray(_signs(size), x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    return (parts * size**-0.5).reshape(x.shape).astype(x.dtype)


@functools.cache
def _signs(size: int) -> np.ndarray:
    """Sylvester's matrix: entry (i, j) is -1 where i and j share an odd number of set bits."""
    shared = np.arange(size)[:, None] & np.arange(size)[None, :]
    return 1 - 2 * (np.bitwise_count(shared).astype(np.int8) & 1)

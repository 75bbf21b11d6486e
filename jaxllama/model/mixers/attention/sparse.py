"""Attention that reads few of the values: FlexGen's top-k of V (arXiv 2303.06865, section 5).

A query reads all keys of its row, and the values with the largest weights. ``heaviest`` chooses
them by the keys. ``kept_values`` reads them, also from elsewhere (``offload``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxllama.model.mixers.attention.state import KVCache
from pallas_kernels.attention.blockwise import floats, load
from pallas_kernels.attention.plain import attention_scores, is_visible
from pallas_kernels.qtensor import QTensor

SPARSE_BLOCK = 16  # query tokens of a row that gather their values at once


def sparse_attend(
    q: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    sparsity: float,
    window: int | None,
) -> jax.Array:
    """``sparse_decode`` of each of the T tokens, ``q[B, T, N, H]`` at ``positions[B, T]``."""
    if q.shape[1] == 1:
        return sparse_decode(q, cache, positions, sparsity, window)

    def attend_token(token: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, position = token
        return sparse_decode(q[:, None], cache, position[:, None], sparsity, window)[:, 0]

    tokens = jnp.moveaxis(q, 1, 0), positions.T
    return jnp.moveaxis(lax.map(attend_token, tokens, batch_size=SPARSE_BLOCK), 0, 1)


def sparse_decode(
    q: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    sparsity: float,
    window: int | None,
) -> jax.Array:
    """One query token per row, ``q[B, 1, N, H]``, reading only the heaviest rows of V.

    A row has ``len - 1`` keys older than the newest token.  Each head keeps the
    ``int(sparsity * (len - 1))`` of them with the largest softmax weights, among those that the
    window shows.  The newest token is always kept.  The weights are those of the full softmax and
    are not renormalised.  All keys are read, but only the kept rows of V are gathered.
    """
    index, weights = heaviest(q, cache.k, positions, sparsity, window)
    rows = jnp.arange(q.shape[0])[:, None, None, None]
    heads = jnp.arange(cache.k.shape[2])[None, :, None, None]
    v = jax.tree.map(lambda leaf: leaf[rows, index, heads], cache.v)
    return kept_values(weights, v, q.dtype)[:, None]


def quotas(sparsity: float, capacity: int) -> np.ndarray:
    """Return ``int(sparsity * older)`` for 0 to ``capacity - 1`` older keys, int32 ``[capacity]``.

    It is a table because the product must be Python's own, of doubles. In float32, 450 of the
    405504 products of hundredths and up to 4095 keys have another integer part.
    """
    return (sparsity * np.arange(capacity, dtype=np.float64)).astype(np.int32)


def heaviest(
    q: jax.Array,
    k: jax.Array | QTensor,
    positions: jax.Array,
    sparsity: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """The keys of ``k [B, S, K, H]`` whose values ``q [B, 1, N, H]`` at ``positions [B, 1]`` reads.

    (slots int32, softmax weights float32), both ``[B, K, N / K, keep]``; a weight of 0 says that
    the value is not to be read.
    """
    capacity = k.shape[1]
    keys = load(k, jnp.int32(0), capacity, q.dtype)
    k_positions = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    visible = is_visible(positions, k_positions, window)[:, None, None]
    scores = jnp.where(visible, attention_scores(q, keys), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)[:, :, :, 0]  # [B, K, G, S]
    newest = k_positions[:, None, None, :] == positions[:, :, None, None]  # [B, 1, 1, S]
    # The newest is ranked above every probability, so it is always the first that is kept.
    ranked = jnp.where(newest, 2.0, weights)
    table = quotas(sparsity, capacity)
    keep = 1 + int(table[-1])
    _, index = lax.top_k(ranked, keep)
    kept = jnp.take_along_axis(weights, index, axis=-1)  # 0 for keys outside the window
    quota = 1 + jnp.asarray(table).at[positions].get(mode="clip")
    used = jnp.arange(keep, dtype=jnp.int32) < quota[:, :, None, None]
    return index, jnp.where(used, kept, 0.0)


def kept_values(weights: jax.Array, v: jax.Array | QTensor, dtype: DTypeLike) -> jax.Array:
    """``weights [B, K, G, keep]`` times the values that they are of, ``[B, K, G, keep, H]``, ->
    ``[B, K * G, H]``.  Values of weight 0 may be anything."""
    v = floats(v, dtype)
    v = jnp.where(weights[..., None] > 0, v, jnp.zeros_like(v))
    out = jnp.einsum(
        "bkgs,bkgsh->bkgh", weights, v.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return out.reshape(out.shape[0], -1, out.shape[-1]).astype(dtype)

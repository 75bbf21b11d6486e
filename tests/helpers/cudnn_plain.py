"""cuDNN's attention in jnp, for tests of the code around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.plain import attention_scores, weighted_values


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    n_keys: jax.Array | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What cuDNN gives: causal, through a window too, over the first n_keys, or both."""
    scores = attention_scores(q, k)  # [B, K, G, T, S]
    index = jnp.arange(k.shape[1])
    token = jnp.arange(q.shape[1])[:, None]
    seen = (index <= token if is_causal else index >= 0)[None]
    if window is not None:
        seen &= index > token - window
    if n_keys is not None:
        seen &= index < n_keys[:, None, None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    out = weighted_values(jax.nn.softmax(scores, axis=-1), v).astype(q.dtype)
    log = jax.nn.logsumexp(scores, axis=-1)
    return out, jnp.moveaxis(log, 3, 1).reshape(q.shape[:3])

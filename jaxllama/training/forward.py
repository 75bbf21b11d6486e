"""The model in training: layer by layer, so that each layer can be recomputed on its own.

The blocks come from ``model.decoder.forward``, without a cache and on whole rows. With ``remat``
a layer keeps only its input for the backward pass. Parameters are float32 (the master weights), and
every matmul casts its own to the activations' dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.model.decoder import block, embed_tokens, final_norm
from jaxllama.model.linear import Stream
from jaxllama.model.records import At, whole_rows
from jaxllama.model.stacked import recomputed_block, walk
from jaxllama.typing import Params


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    remat: bool = False,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return the states before the head, ``[B, T, D]`` of ``dtype``, of ``tokens[B, T]``.

    params: per layer, or stacked (``model.stacked``): then layers that are alike are one loop.
    segments: int32 ``[B, T]`` where several sequences lie in a row.
    """
    stream, at = embed(cfg, params, tokens, dtype, segments)
    stream = walk(cfg, params, stream, at, recomputed_block if remat else block)
    return final_norm(cfg, params, stream)


def embed(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    segments: jax.Array | None = None,
) -> tuple[Stream, At]:
    """Return the arguments of the first layer."""
    batch, length = tokens.shape
    stream = Stream(embed_tokens(cfg, params, tokens, dtype))
    return stream, whole_rows(cfg, batch, length, segments)

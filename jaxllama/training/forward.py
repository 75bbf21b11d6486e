"""The model as training runs it: layer by layer, so that each can be recomputed on its own.

The same Blocks as ``model.Decoder``, without a cache and on whole rows; with ``remat`` a layer
keeps only its input for the backward pass.  Parameters are float32 (the master weights), and every
matmul casts its own to the activations' dtype.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.generation import Params
from jaxllama.layers import Embedding, RMSNorm
from jaxllama.model import Block, add_norm
from jaxllama.rope import rope_tables


def hidden_states(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: jnp.dtype, remat: bool = False
) -> jax.Array:
    """``tokens[B, T]`` to the states before the head, ``[B, T, D]`` of ``dtype``."""
    x, positions, lengths, rope = embed(cfg, params, tokens, dtype)
    pending = None
    for index in range(cfg.n_layers):
        layer = layer_function(cfg, index)
        layer = jax.checkpoint(layer) if remat else layer
        x, pending = layer(params[f"layer_{index}"], x, pending, positions, lengths, rope)
    norm = RMSNorm(cfg.d_model, cfg.norm_eps)
    return add_norm(functools.partial(norm.apply, {"params": params["norm"]}), x, pending)[0]


def embed(cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: jnp.dtype):
    """(x ``[B, T, D]``, positions, lengths, rope): what the layers take."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    lengths = jnp.full((batch,), length, jnp.int32)
    rope = None
    if "attention" in cfg.layer_types:
        rope = rope_tables(cfg.rope, cfg.head_dim, positions, lengths)
    table = Embedding(cfg.vocab_size, cfg.d_model)
    x = table.apply({"params": params["embed"]}, tokens, dtype)
    if cfg.embedding_scale:
        x = x * jnp.asarray(cfg.d_model**0.5, x.dtype)
    return x, positions, lengths, rope


def layer_function(cfg: ModelConfig, index: int):
    """``(params of the layer, x, pending, positions, lengths, rope) -> (x, pending)``."""
    block = Block(cfg.replace(sliding_window=cfg.window_of(index)), cfg.layer_types[index])

    def layer(params, x, pending, positions, lengths, rope):
        x, pending, _ = block.apply({"params": params}, x, pending, None, positions, lengths, rope)
        return x, pending

    return layer


def head_weight(cfg: ModelConfig, params: Params) -> jax.Array:
    """``[V, D]``."""
    return params["embed" if cfg.tie_embeddings else "head"]["weight"]

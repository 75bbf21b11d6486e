"""Decoder: embedding, blocks, final norm, head.  One description for Llama, GLA and hybrids.

    Block:   x += mixer(norm(x));  x += mlp(norm(x))        mixer from cfg.layer_types[i]

The residual stream is carried as a pair (x, pending): where the product that makes the last term
cannot add it in its own kernel (pending is then None), the next norm does, or the product behind
that norm, which then gives the stream too: so with a sum over devices.  In a decode step on
Hopper a Llama layer is few kernels: norm + qkv, RoPE + cache + attention, o + residual, norm +
gate/up + SwiGLU, down + residual.  A GLA layer's first two are norm + all its projections, and the
recursion with its decay, norm and gate.

Pure functions of (params, tokens, cache); the free functions that users call are in ``generation``.

Sources: Llama (arXiv 2302.13971), GLA (2312.06635).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllama.attention import Attention
from jaxllama.cache import Cache, GLAState, KVCache
from jaxllama.config import ModelConfig
from jaxllama.layers import (
    Embedding,
    Linear,
    Normed,
    RMSNorm,
    Stream,
    SwiGLU,
    Weight,
    input_words,
    weight_at,
)
from jaxllama.rope import rope_tables
from pallas_kernels.qtensor import QTensor


class Block(nn.Module):
    """One layer: (x, pending, state, ...) -> (x, pending, state), x and pending ``[B, T, D]``.

    It is ``mix``, then ``feed``, which offloading may run as two units.
    """

    cfg: ModelConfig
    kind: str

    def setup(self) -> None:
        cfg = self.cfg
        self.mixer_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        if self.kind == "attention":
            self.mixer = Attention(cfg)
        else:
            from jaxllama.gla import GatedLinearAttention

            self.mixer = GatedLinearAttention(cfg)
        self.mlp_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = SwiGLU(cfg.d_model, cfg.d_ff, cfg.mlp_bias)

    def __call__(
        self,
        x: jax.Array,
        pending: jax.Array | None,
        state: KVCache | GLAState | None,
        positions: jax.Array,
        lengths: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array | None, KVCache | GLAState | None]:
        x, pending, state = self.mix(x, pending, state, positions, lengths, rope)
        return *self.feed(x, pending), state

    def mix(
        self,
        x: jax.Array,
        pending: jax.Array | None,
        state: KVCache | GLAState | None,
        positions: jax.Array,
        lengths: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array | None, KVCache | GLAState | None]:
        """The first half: norm and mixer."""
        # GLA's mixer has no "qkv": several projections read its input, in float.
        words, reader = input_words(self, "mixer", "qkv"), weight_at(self, "mixer", "qkv")
        if self.kind == "gla":
            reader = self.mixer.readers()
        dtype = x.dtype
        y, x = add_norm(self.mixer_norm, x, pending, words, reader)
        if self.kind == "attention":
            assert rope is not None
            stream, state = self.mixer(y, state, positions, lengths, rope, dtype, stream=x)
        else:
            stream, state = self.mixer(y, state, positions, lengths, stream=x)
        return *stream, state

    def feed(self, x: jax.Array, pending: jax.Array | None) -> Stream:
        """The second half: norm and feed-forward."""
        words, reader = input_words(self, "mlp", "gate_up"), weight_at(self, "mlp", "gate_up")
        dtype = x.dtype
        y, x = add_norm(self.mlp_norm, x, pending, words, reader)
        return self.mlp(y, dtype, stream=x)


def add_norm(
    norm: RMSNorm,
    x: jax.Array,
    pending: jax.Array | None,
    words: str | None = None,
    reader: Weight | tuple[Weight, ...] | None = None,
) -> tuple[jax.Array | QTensor | Normed, jax.Array | None]:
    """(norm(x + pending), x + pending); pending may be None, and the second is where the product
    with the first gives it.  words: the dtype to quantize the normed value to; reader: the weight
    or weights that it is multiplied with."""
    if pending is None:
        return norm(x, quantize=words, reader=reader), x
    if pending.dtype != x.dtype:  # a sum over devices
        return norm(x, quantize=words, reader=reader, pending=pending)
    return norm(pending, x, quantize=words)


def total(x: jax.Array, pending: jax.Array | None) -> jax.Array:
    """The residual stream as one array."""
    return x if pending is None else x + pending.astype(x.dtype)


class Decoder(nn.Module):
    """Token ids to hidden states; ``logits`` turns those into logits.

    dtype is the activations'.  Call with ``tokens[B, T]`` (right-padded), ``lengths[B]`` valid ones
    per row, and a cache that they are appended to, or None for a whole sequence by itself.
    """

    cfg: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        cfg = self.cfg
        self.embed = Embedding(cfg.vocab_size, cfg.d_model)
        for index, kind in enumerate(cfg.layer_types):
            layer_cfg = cfg.replace(sliding_window=cfg.window_of(index))
            setattr(self, f"layer_{index}", Block(layer_cfg, kind))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        if not cfg.tie_embeddings:
            self.head = Linear(cfg.vocab_size, cfg.d_model)

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **options: Any) -> Any:
        """linen's ``apply``; for parameters on a mesh, over that mesh (see ``parallel``)."""
        from jaxllama import parallel

        mesh = parallel.traced_mesh(variables["params"])
        if mesh is None:
            return super().apply(variables, *args, **options)
        return parallel.apply_decoder(self, mesh, variables, *args, **options)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: Cache | None = None,
        total_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """(hidden states after the final norm ``[B, T, D]``, cache).

        total_lengths[B]: tokens of each row when the whole prompt is in, where a call is one chunk
        of it (dynamic RoPE depends on it).
        """
        cfg = self.cfg
        start = jnp.zeros_like(lengths) if cache is None else cache.lengths
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        rope = None
        if "attention" in cfg.layer_types:
            total = start + lengths if total_lengths is None else total_lengths
            rope = rope_tables(cfg.rope, cfg.head_dim, positions, total)
        x = self.embed(tokens, self.dtype)
        if cfg.embedding_scale:
            x = x * jnp.asarray(cfg.d_model**0.5, x.dtype)
        pending, states = None, []
        for index in range(cfg.n_layers):
            state = None if cache is None else cache.layers[index]
            block = getattr(self, f"layer_{index}")
            x, pending, state = block(x, pending, state, positions, lengths, rope)
            states.append(state)
        x, _ = add_norm(self.norm, x, pending)
        return x, None if cache is None else Cache(tuple(states), start + lengths)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[..., D]`` to float32 logits ``[..., V]``."""
        logits = self.embed.attend(x) if self.cfg.tie_embeddings else self.head(x)
        return logits.astype(jnp.float32)

    def init_all(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Touch every parameter (linen's ``init`` creates what a method uses)."""
        return self.logits(self(tokens, lengths)[0])

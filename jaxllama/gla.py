"""GatedLinearAttention: the mixer of a GLA layer, chunkwise in prefill, one step in decode.

    q, k, v    = projections of x, each optionally through a short causal convolution and SiLU
    log_decay  = logsigmoid(low-rank projection of x) / gate_logit_normalizer, at least clamp_min
    o          = gla(q, k, v, log_decay)                       per head, scale Dk ** -0.5
    y          = out(norm(o) * silu(gate(x)))                  norm per head; the gate is optional

With fewer kv heads than heads, each key, value and decay serves ``n_heads // n_kv_heads``
consecutive query heads.  The state of a row does not grow with its context: one ``[Dk, Dv]`` matrix
a head, and with convolutions the last ``conv_size - 1`` inputs of each.

Source: arXiv 2312.06635, section 4.4; parameters and their order are those of
flash-linear-attention's ``gla`` layers.  Left out: feature maps, biases of the convolutions.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllama.cache import GLAState
from jaxllama.config import ModelConfig
from jaxllama.layers import Linear, Stream
from pallas_kernels.gla import gla, gla_step
from pallas_kernels.rms_norm import rms_norm


class GatedLinearAttention(nn.Module):
    """``x[B, T, D], state -> (y[B, T, D], state)``; a state of None starts from zero and is not
    returned.

    lengths int32 ``[B]``: valid tokens of x in each row.  The rest is padding: it reaches neither
    the valid tokens' y nor the state, and its own y means nothing.  stream: the residual stream
    that y belongs to; y is then that stream with it, as ``Linear`` gives it.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        state: GLAState | None,
        positions: jax.Array,
        lengths: jax.Array,
        *,
        stream: jax.Array | None = None,
    ) -> tuple[jax.Array | Stream, GLAState | None]:
        cfg = self.cfg.gla
        assert cfg is not None
        del positions  # the recursion itself knows the order
        batch, n_new, d_model = x.shape
        d_k, d_v = self.cfg.gla_head_dims
        heads, kv_heads = cfg.n_heads, cfg.n_kv_heads

        widths = {"q": heads * d_k, "k": kv_heads * d_k, "v": kv_heads * d_v}
        streams = [Linear(width, d_model, name=name)(x) for name, width in widths.items()]
        conv_state = None
        if cfg.use_short_conv:
            past = (None,) * 3 if state is None or state.conv is None else state.conv
            convolved = [
                ShortConvolution(width, cfg.conv_size, name=f"{name}_conv")(stream, old, lengths)
                for (name, width), stream, old in zip(widths.items(), streams, past, strict=True)
            ]
            streams = [y for y, _ in convolved]
            conv_state = tuple(new for _, new in convolved)
        q, k, v = (
            stream.reshape(batch, n_new, n, -1)
            for stream, n in zip(streams, (heads, kv_heads, kv_heads), strict=True)
        )
        logits = Linear(cfg.gate_low_rank_dim, d_model, name="gk_0")(x)
        logits = Linear(kv_heads * d_k, cfg.gate_low_rank_dim, True, name="gk_1")(logits)
        log_decay = jax.nn.log_sigmoid(logits.astype(jnp.float32)) / cfg.gate_logit_normalizer
        if cfg.clamp_min is not None:
            log_decay = jnp.maximum(log_decay, cfg.clamp_min)
        log_decay = log_decay.reshape(batch, n_new, kv_heads, d_k)
        if kv_heads < heads:
            k, v, log_decay = (
                jnp.repeat(stream, heads // kv_heads, axis=2) for stream in (k, v, log_decay)
            )

        before = None if state is None else state.state
        if n_new == 1 and before is not None:
            # A row that stands still: no decay and nothing added, so that the state can be updated
            # in place without a second copy of it to choose from.
            moves = (lengths > 0)[:, None, None]
            k, v, log_decay = (
                jnp.where(moves, x[:, 0], jnp.zeros((), x.dtype)) for x in (k, v, log_decay)
            )
            o, after = gla_step(q[:, 0], k, v, log_decay, before)
            o = o[:, None]
        else:
            # Padding comes last and so reaches no valid o; only a state to return must be kept
            # from it, at the price of masking every operand.
            o, after = gla(
                q, k, v, log_decay, initial_state=before,
                lengths=None if state is None else lengths, return_state=state is not None,
            )  # fmt: skip

        gate = None
        if cfg.use_output_gate:
            gate = Linear(heads * d_v, d_model, name="g")(x).reshape(o.shape)
        o = GatedNorm(d_v, cfg.norm_eps, name="g_norm")(o, gate)
        out = Linear(d_model, heads * d_v, split_inputs=True, name="o")
        y = out(o.reshape(batch, n_new, -1), stream=stream)
        return y, None if state is None else GLAState(after, conv_state)


class GatedNorm(nn.Module):
    """``rms_norm(o) * silu(gate)`` over the last axis, in float32 with one cast to o's dtype."""

    features: int
    eps: float

    @nn.compact
    def __call__(self, o: jax.Array, gate: jax.Array | None) -> jax.Array:
        ones = nn.initializers.ones_init()
        weight = self.param("weight", ones, (self.features,), jnp.float32)
        y = rms_norm(o, weight, self.eps, out_dtype=jnp.float32)
        if gate is not None:
            y = y * jax.nn.silu(gate.astype(jnp.float32))
        return y.astype(o.dtype)


class ShortConvolution(nn.Module):
    """``silu`` of a causal depthwise convolution over time: ``y_t = silu(sum_w weight[:, w] *
    x_{t - W + 1 + w})``, W = width.

    ``x[B, T, features]``, past ``[B, W - 1, features]`` (None: zeros) -> (y, the last W - 1 inputs
    after each row's ``lengths[B]`` valid ones).
    """

    features: int
    width: int

    @nn.compact
    def __call__(
        self, x: jax.Array, past: jax.Array | None, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        init = nn.initializers.normal(self.width**-0.5)
        weight = self.param("weight", init, (self.features, self.width), jnp.float32)
        batch, n_new, _ = x.shape
        keep = self.width - 1
        if past is None:
            past = jnp.zeros((batch, keep, self.features), x.dtype)
        inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
        taps = weight.astype(jnp.float32)
        y = jnp.zeros(x.shape, jnp.float32)
        for tap in range(self.width):
            y = y + inputs[:, tap : tap + n_new].astype(jnp.float32) * taps[:, tap]
        last = lengths[:, None] + jnp.arange(keep, dtype=lengths.dtype)[None, :]
        new = jnp.take_along_axis(inputs, last[:, :, None], axis=1)
        return jax.nn.silu(y).astype(x.dtype), new.astype(past.dtype)

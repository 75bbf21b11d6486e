"""GatedLinearAttention: the mixer of a GLA layer, chunkwise in prefill, one step in decode.

    q, k, v    = projections of x, each optionally through a short causal convolution and SiLU
    log_decay  = logsigmoid(low-rank projection of x) / gate_logit_normalizer, at least clamp_min
    o          = gla(q, k, v, log_decay)                       per head, scale Dk ** -0.5
    y          = out(norm(o) * silu(gate(x)))                  norm per head; the gate is optional

With fewer kv heads than heads, each key, value and decay serves ``n_heads // n_kv_heads``
consecutive query heads.  The state of a row does not grow with its context: one ``[Dk, Dv]`` matrix
a head, and with convolutions the last ``conv_size - 1`` inputs of each.

In a decode step of few rows on Hopper it is three kernels: the projections with the norm before
them, ``gla_token``, and the output product with the residual.

Source: arXiv 2312.06635, section 4.4; parameters and their order are those of
flash-linear-attention's ``gla`` layers.  Left out: feature maps, biases of the convolutions.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxllama.cache import GLAState
from jaxllama.config import ModelConfig
from jaxllama.layers import Linear, Normed, Stream, Weight, weight_at
from pallas_kernels.gla import gla, gla_step
from pallas_kernels.gla_token import gla_token, takes
from pallas_kernels.quantized_matmul_blocks import Columns, blocks_matmul
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
        x: jax.Array | Normed,
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
        streams = self.project(x)
        conv_state = None
        if cfg.use_short_conv:
            past = (None,) * 3 if state is None or state.conv is None else state.conv
            new = []
            for name, old in zip(("q", "k", "v"), past, strict=True):
                convolution = ShortConvolution(
                    streams[name].width, cfg.conv_size, name=f"{name}_conv"
                )
                y, last = convolution(streams[name].value, old, lengths)
                streams[name] = Columns(y, 0, y.shape[-1])
                new.append(last)
            conv_state = tuple(new)

        before = None if state is None else state.state
        fused = None
        if n_new == 1 and before is not None:
            fused = self.token(streams, lengths, before)
        o, after = self.mix(streams, lengths, before) if fused is None else fused
        out = Linear(d_model, cfg.n_heads * self.cfg.gla_head_dims[1], split_inputs=True, name="o")
        y = out(o.reshape(batch, n_new, -1), stream=stream)
        return y, None if state is None else GLAState(after, conv_state)

    @property
    def widths(self) -> dict[str, int]:
        """Of everything that is projected from the input."""
        cfg = self.cfg.gla
        d_k, d_v = self.cfg.gla_head_dims
        widths = {"q": cfg.n_heads * d_k, "k": cfg.n_kv_heads * d_k, "v": cfg.n_kv_heads * d_v}
        if cfg.use_output_gate:
            widths["g"] = cfg.n_heads * d_v
        return {**widths, "gk_0": cfg.gate_low_rank_dim}

    def readers(self) -> tuple[Weight, ...] | None:
        """The weights that read the input, in the order of ``widths``; None before ``init``."""
        weights = tuple(weight_at(self, name) for name in self.widths)
        return None if any(weight is None for weight in weights) else weights

    def project(self, x: jax.Array | Normed) -> dict[str, Columns]:
        """Queries, keys, values, gate and the decay's low-rank logits: columns of ``[B, T, N]``."""
        if isinstance(x, Normed):
            streams = blocks_matmul(x.x, self.readers(), norm=(x.weight, x.eps))
            return dict(zip(self.widths, streams, strict=True))
        return {
            name: Columns(Linear(width, self.cfg.d_model, name=name)(x), 0, width)
            for name, width in self.widths.items()
        }

    def token(
        self, streams: dict[str, Columns], lengths: jax.Array, before: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """``mix`` of one token as one kernel, or None where there is none."""
        cfg, params = self.cfg.gla, self.variables["params"]
        names = ("q", "k", "v", "gk_0", "g")[: 5 if cfg.use_output_gate else 4]
        rows = [streams[name]._replace(rows=streams[name].rows[:, 0]) for name in names]
        decay = params["gk_1"]["weight"], params["gk_1"]["bias"]
        given = rows, decay, params["g_norm"]["weight"]
        if not takes(*given, before):
            return None
        return gla_token(
            *given, lengths, before,
            eps=cfg.norm_eps, normalizer=cfg.gate_logit_normalizer, clamp_min=cfg.clamp_min,
        )  # fmt: skip

    def mix(
        self, streams: dict[str, Columns], lengths: jax.Array, before: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """(gated heads ``[B, T, H, Dv]``, state) of any number of tokens."""
        cfg = self.cfg.gla
        d_k, d_v = self.cfg.gla_head_dims
        heads, kv_heads = cfg.n_heads, cfg.n_kv_heads
        batch, n_new, _ = streams["q"].rows.shape
        q, k, v = (
            streams[name].value.reshape(batch, n_new, n, -1)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        logits = Linear(kv_heads * d_k, cfg.gate_low_rank_dim, True, name="gk_1")
        logits = logits(streams["gk_0"].value)
        log_decay = jax.nn.log_sigmoid(logits.astype(jnp.float32)) / cfg.gate_logit_normalizer
        if cfg.clamp_min is not None:
            log_decay = jnp.maximum(log_decay, cfg.clamp_min)
        log_decay = log_decay.reshape(batch, n_new, kv_heads, d_k)
        if kv_heads < heads:
            k, v, log_decay = (
                jnp.repeat(stream, heads // kv_heads, axis=2) for stream in (k, v, log_decay)
            )

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
                lengths=None if before is None else lengths, return_state=before is not None,
            )  # fmt: skip

        gate = None
        if cfg.use_output_gate:
            gate = streams["g"].value.reshape(o.shape)
        return GatedNorm(d_v, cfg.norm_eps, name="g_norm")(o, gate), after


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

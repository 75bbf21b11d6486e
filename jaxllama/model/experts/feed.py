"""A layer's second half with experts: norm, router, the chosen experts, the shared one.

    stream += sum_j weight_j down_j(act(gate_j x) * up_j x)  +  gate(x) * shared(x)

The two products with experts are ``grouped_matmul``'s; everything else is a dense layer's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.experts.route import route, router_logits
from jaxllama.model.linear import Params, Stream
from pallas_kernels.experts.gate import ClampedGate, Gate


def feed_experts(
    cfg: ModelConfig, p: Params, stream: Stream, ops: Any, before: Stream | None
) -> Stream:
    """``decoder.feed_half`` of a layer with experts; ``before`` as there."""
    options, own = cfg.experts, p["mlp"]
    assert options is not None
    if before is not None:
        normed, _ = linear.norm(before, p.get("mixer_norm"), cfg)
        stream = Stream(stream.total)
    else:
        normed, stream = linear.norm(stream, p.get("mlp_norm"), cfg)
    assert isinstance(normed, jax.Array)
    x = normed.reshape(-1, normed.shape[-1])
    experts, weights = route(options, x, own["router"])
    inner = ops.grouped(x, own["experts_gate_up"], experts, gated=gate_of(cfg, options))
    y = ops.grouped(inner, own["experts_down"], experts, weights=weights)
    y = y.reshape(normed.shape)
    if options.shared:
        y = y + _shared(cfg, own, normed, ops)
    scale = p.get("mlp_out_norm")
    return Stream(stream.x, y if scale is None else linear.norm(Stream(y), scale, cfg)[0])


def gate_of(cfg: ModelConfig, options: ExpertsConfig) -> Gate:
    """The experts' gated activation."""
    if options.gate_limit is None:
        return cfg.activation
    return ClampedGate(options.gate_limit, options.gate_alpha)


def _shared(cfg: ModelConfig, own: Params, x: jax.Array, ops: Any) -> jax.Array:
    inner = ops.product(x, own["gate_up"], x.dtype, cfg, into=own["down"])
    y = ops.product(inner, own["down"], x.dtype, cfg)
    if "shared_gate" not in own:
        return y
    logits = router_logits(x.reshape(-1, x.shape[-1]), own["shared_gate"]["weight"])
    gate = jax.nn.sigmoid(logits).reshape(*x.shape[:-1], 1)
    return (gate * y.astype(jnp.float32)).astype(y.dtype)

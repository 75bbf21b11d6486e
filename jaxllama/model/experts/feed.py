"""A layer's second half with experts: norm, router, the chosen experts, the shared one.

    stream += sum_j weight_j down_j(act(gate_j x) * up_j x)  +  gate(x) * shared(x)

Experts without a gate (Nemotron-H) are ``down_j(act(up_j x))``.
``grouped_matmul`` computes the two products with experts.  All else is as in a dense layer.  On a
mesh each device routes all tokens and computes the pairs of its own experts; then one sum.  Devices
of the "expert" axis have tokens of their own, and exchange them (``parallel.exchange``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import UNGATED, ExpertsConfig, ModelConfig
from jaxllama.model import linear
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.route import Routed, route, router_logits
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.parallel.collectives import row_parallel_matmul
from jaxllama.parallel.exchange import exchanged
from jaxllama.parallel.mesh import EXPERT_AXIS, expert_axes, is_split
from jaxllama.typing import Options, Params
from pallas_kernels.experts.gate import ClampedGate, Gate


def feed_experts(
    cfg: ModelConfig, p: Params, stream: Stream, ops: LayerOps, before: Stream | None
) -> Stream:
    """``decoder.feed_half`` of a layer with experts: add the mixture's output to the stream.

    before: the stream without the mixer's part, which a parallel block reads; None for others.
    """
    read, stream = inputs_of(cfg, p, stream, before, ops)
    y = _experts(cfg, p["mlp"], read.x, read.routed, ops)
    return with_output(cfg, p, stream, read.x, y, ops)


class MixtureInput(NamedTuple):
    """The input ``[..., D]`` of a layer's experts and shared expert, and what the router says."""

    x: jax.Array
    routed: Routed


def inputs_of(
    cfg: ModelConfig,
    p: Params,
    stream: Stream,
    before: Stream | None = None,
    ops: LayerOps = linear,
) -> tuple[MixtureInput, Stream]:
    """Return what a layer's mixture reads, and the stream; before: as for ``feed_experts``."""
    own, router = p["mlp"], p["mlp"]["router"]
    assert cfg.experts is not None
    if cfg.experts.beside:  # the router has a norm of its own
        stream = Stream(stream.total)
        x, _ = linear.norm(stream, own["norm"], cfg)
        _, _, routed = ops.norm_route(stream, own["router_norm"], router, cfg)
        return MixtureInput(x, routed), stream
    if before is not None:
        scale = p["mlp_norm" if cfg.parallel_norms else "mixer_norm"]
        x, _, routed = ops.norm_route(before, scale, router, cfg)
        return MixtureInput(x, routed), Stream(stream.total)
    x, stream, routed = ops.norm_route(stream, p.get("mlp_norm"), router, cfg)
    return MixtureInput(x, routed), stream


def with_output(
    cfg: ModelConfig,
    p: Params,
    stream: Stream,
    x: jax.Array,
    y: jax.Array,
    ops: LayerOps = linear,
) -> Stream:
    """Return the stream with the layer's output pending.

    x, y: the experts' input and output ``[..., D]``.  The expert that every token passes is added
    to y.  If it is ``beside``, each of the two has norms of its own.
    """
    options, own, scale = cfg.experts, p["mlp"], p.get("mlp_out_norm")
    assert options is not None
    if options.beside:
        dense, _ = linear.norm(stream, p.get("mlp_norm"), cfg)
        dense, _ = linear.norm(Stream(shared(cfg, own, dense, ops)), own["shared_norm"], cfg)
        y = linear.norm(Stream(y), own["out_norm"], cfg)[0] + dense
    elif options.shared:
        y = y + shared(cfg, own, x, ops)
    return Stream(stream.x, y if scale is None else linear.norm(Stream(y), scale, cfg)[0])


def mixture(cfg: ModelConfig, own: Params, x: jax.Array) -> jax.Array:
    """The mixture's output ``[..., D]`` for ``x[..., D]``; own: a layer's ``mlp`` parameters."""
    assert cfg.experts is not None and not cfg.experts.beside
    routed = route(cfg.experts, x.reshape(-1, x.shape[-1]), own["router"])
    y = _experts(cfg, own, x, routed, linear)
    return y + shared(cfg, own, x) if cfg.experts.shared else y


def _experts(
    cfg: ModelConfig, own: Params, x: jax.Array, routed: Routed, ops: LayerOps
) -> jax.Array:
    """The output of the chosen experts for ``x[..., D]``, in its shape."""
    options, tokens, (experts, weights) = cfg.experts, x.reshape(-1, x.shape[-1]), routed
    assert options is not None
    gated: Options = {"gated": gate_of(cfg, options)}
    summed: Options = {}
    axes = expert_axes()
    if axes:  # this device's experts, whose sums are added up before they are rounded
        first = lax.axis_index(axes) * own["experts_down"]["weight"].shape[0]
        gated |= {"first": first}
        summed |= {"first": first, "dtype": jnp.float32}

    def compute(tokens: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        inner = ops.grouped(tokens, own["experts_gate_up"], experts, **gated)
        inner = inner if cfg.gated_mlp else activated(inner, cfg.activation)
        return ops.grouped(inner, own["experts_down"], experts, weights=weights, **summed)

    if options.exchanges:
        per_group = options.n_experts // lax.axis_size(EXPERT_AXIS)
        y = exchanged(tokens, experts, weights, per_group, compute)
        axes = tuple(axis for axis in axes if axis != EXPERT_AXIS)
    else:
        y = compute(tokens, experts, weights)
    return (lax.psum(y, axes) if axes else y).reshape(x.shape).astype(x.dtype)


def gate_of(cfg: ModelConfig, options: ExpertsConfig) -> Gate | None:
    """Return the experts' gated activation; None where their first product has no gate."""
    if not cfg.gated_mlp:
        return None
    if options.gate_limit is None:
        assert cfg.activation not in UNGATED  # no family gates experts by them
        return cfg.activation
    return ClampedGate(options.gate_limit, options.gate_alpha)


def shared(cfg: ModelConfig, own: Params, x: jax.Array, ops: LayerOps = linear) -> jax.Array:
    """Return the shared expert's output for ``x[..., D]``."""
    if cfg.gated_mlp:
        inner = ops.product(x, own["gate_up"], x.dtype, cfg, into=own["down"])
    else:
        inner = activated(ops.product(x, own["up"], x.dtype, cfg), cfg.activation)
    if is_split():
        assert isinstance(inner, jax.Array)
        down = own["down"]
        y = row_parallel_matmul(inner, down["weight"], down.get("bias"), x.dtype).astype(x.dtype)
    else:
        y = ops.product(inner, own["down"], x.dtype, cfg)
    if "shared_gate" not in own:
        return y
    logits = router_logits(x.reshape(-1, x.shape[-1]), own["shared_gate"]["weight"])
    gate = jax.nn.sigmoid(logits).reshape(*x.shape[:-1], 1)
    return (gate * y.astype(jnp.float32)).astype(y.dtype)

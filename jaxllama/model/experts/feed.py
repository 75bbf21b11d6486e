"""A layer's second half with experts: norm, router, the chosen experts, the shared one.

    stream += sum_j weight_j down_j(act(gate_j x) * up_j x)  +  gate(x) * shared(x)

Experts without a gate are ``down_j(act(up_j x))``.
``grouped_matmul`` computes the two products with experts.  All else is as in a dense layer.  On a
mesh each device routes all tokens and computes the pairs of its own experts; then one sum.  Devices
of the "expert" axis have tokens of their own, and exchange them (``parallel.exchange``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import UNGATED, ExpertsConfig, LayerConfig
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
from pallas_kernels.experts.mixture import SharedMixture, WithShared, fused_mixture
from pallas_kernels.fixed_sums import by_blocks


def feed_experts(
    layer: LayerConfig, p: Params, stream: Stream, ops: LayerOps, before: Stream | None
) -> Stream:
    """A form's ``feed`` of a layer with experts: add the mixture's output to the stream.

    before: the stream without the mixer's part, which a parallel block reads; None for others.
    """
    read, stream = inputs_of(layer, p, stream, before, ops)
    if ops is linear:
        total = _fused(layer, p, stream, read)
        if total is not None:
            return Stream(total)
    y = _experts(layer, p["mlp"], read.x, read.routed, ops)
    return with_output(layer, p, stream, read.x, y, ops)


class MixtureInput(NamedTuple):
    """The input ``[..., D]`` of a layer's experts and shared expert, and what the router says."""

    x: jax.Array
    routed: Routed


def inputs_of(
    layer: LayerConfig,
    p: Params,
    stream: Stream,
    before: Stream | None = None,
    ops: LayerOps = linear,
) -> tuple[MixtureInput, Stream]:
    """Return (the normed input of a layer's experts and their choice, the stream).

    p: the layer's parameters.  before: as for ``feed_experts``; the experts then read its norm
    instead of the stream's.
    """
    mixture, router = p["mlp"], p["mlp"]["router"]
    assert layer.experts is not None
    if layer.experts.shared_norms:  # the router has a norm of its own
        stream = Stream(stream.total)
        x, _ = linear.norm(stream, mixture["norm"], layer)
        _, _, routed = ops.norm_route(stream, mixture["router_norm"], router, layer)
        return MixtureInput(x, routed), stream
    if before is not None:
        scale = p.get("mlp_norm", p.get("mixer_norm"))
        x, _, routed = ops.norm_route(before, scale, router, layer)
        return MixtureInput(x, routed), Stream(stream.total)
    x, stream, routed = ops.norm_route(stream, p.get("mlp_norm"), router, layer)
    return MixtureInput(x, routed), stream


def _fused(layer: LayerConfig, p: Params, stream: Stream, read: MixtureInput) -> jax.Array | None:
    """Return the stream with the output of experts like the shared one, if kernels do all of it."""
    options, params = layer.experts, p["mlp"]
    assert options is not None
    is_plain = options.shared == options.d_ff and not (options.shared_gate or options.shared_norms)
    has_more = options.bias or options.shared_bias or "mlp_out_norm" in p or not layer.gated_mlp
    if not is_plain or has_more or is_split() or expert_axes() or stream.pending is not None:
        return None
    if any("lora" in params[name] for name in ("gate_up", "down")):
        return None
    gate_up, down = (
        WithShared(params[f"experts_{name}"]["weight"], params[name]["weight"])
        for name in ("gate_up", "down")
    )
    rows, residual = (x.reshape(-1, x.shape[-1]) for x in (read.x, stream.x))
    gate = gate_of(layer, options)
    assert gate is not None
    y = fused_mixture(SharedMixture(rows, gate_up, down, *read.routed, residual), gate)
    return None if y is None else y.reshape(stream.x.shape)


def with_output(
    layer: LayerConfig,
    p: Params,
    stream: Stream,
    x: jax.Array,
    y: jax.Array,
    ops: LayerOps = linear,
) -> Stream:
    """Return the stream with the layer's output pending.

    x, y: the experts' input and output ``[..., D]``.  The expert that every token passes is added
    to y.  With ``shared_norms`` each of the two has norms of its own.
    """
    options, params, scale = layer.experts, p["mlp"], p.get("mlp_out_norm")
    assert options is not None
    if options.shared_norms:
        dense, _ = linear.norm(stream, p.get("mlp_norm"), layer)
        dense, _ = linear.norm(
            Stream(shared(layer, params, dense, ops)), params["shared_norm"], layer
        )
        y = linear.norm(Stream(y), params["out_norm"], layer)[0] + dense
    elif options.shared:
        y = y + shared(layer, params, x, ops)
    return Stream(stream.x, y if scale is None else linear.norm_behind(y, scale, layer))


def mixture(layer: LayerConfig, params: Params, x: jax.Array) -> jax.Array:
    """The mixture's output ``[..., D]`` for ``x[..., D]``; params: a layer's ``mlp`` parameters."""
    assert layer.experts is not None and not layer.experts.shared_norms
    routed = route(layer.experts, x.reshape(-1, x.shape[-1]), params["router"])
    y = _experts(layer, params, x, routed, linear)
    return y + shared(layer, params, x) if layer.experts.shared else y


def _experts(
    layer: LayerConfig, params: Params, x: jax.Array, routed: Routed, ops: LayerOps
) -> jax.Array:
    """The output of the chosen experts for ``x[..., D]``, in its shape."""
    options, tokens, (experts, weights) = layer.experts, x.reshape(-1, x.shape[-1]), routed
    assert options is not None
    gated: Options = {"gated": gate_of(layer, options)}
    summed: Options = {}
    axes = expert_axes()
    if axes:  # this device's experts, whose sums are added up before they are rounded
        first = lax.axis_index(axes) * params["experts_down"]["weight"].shape[0]
        gated |= {"first": first}
        summed |= {"first": first, "out_dtype": jnp.float32}

    def compute(tokens: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        inner = ops.grouped(tokens, params["experts_gate_up"], experts, **gated)
        inner = inner if layer.gated_mlp else activated(inner, layer.activation)
        return ops.grouped(inner, params["experts_down"], experts, weights=weights, **summed)

    if options.exchanges:
        per_group = options.n_experts // lax.axis_size(EXPERT_AXIS)
        y = exchanged(tokens, experts, weights, per_group, compute)
        axes = tuple(axis for axis in axes if axis != EXPERT_AXIS)
    else:
        y = compute(tokens, experts, weights)
    return (lax.psum(y, axes) if axes else y).reshape(x.shape).astype(x.dtype)


def gate_of(layer: LayerConfig, options: ExpertsConfig) -> Gate | None:
    """Return the experts' gated activation; None where their first product has no gate."""
    if not layer.gated_mlp:
        return None
    if options.gate_limit is None:
        assert layer.activation not in UNGATED  # no family gates experts by them
        return layer.activation
    return ClampedGate(options.gate_limit, options.gate_alpha)


def shared(layer: LayerConfig, params: Params, x: jax.Array, ops: LayerOps = linear) -> jax.Array:
    """Return the shared expert's output for ``x[..., D]``."""
    if layer.gated_mlp:
        inner = ops.product(x, params["gate_up"], x.dtype, layer, into=params["down"])
    else:
        inner = activated(ops.product(x, params["up"], x.dtype, layer), layer.activation)
    if is_split():
        assert isinstance(inner, jax.Array)
        down = params["down"]
        y = row_parallel_matmul(inner, down["weight"], down.get("bias"), x.dtype).astype(x.dtype)
    else:
        y = ops.product(inner, params["down"], x.dtype, layer)
    if "shared_gate" not in params:
        return y
    weight = params["shared_gate"]["weight"]
    gate_by = lambda x: jax.nn.sigmoid(router_logits(x, weight))  # noqa: E731
    gate = by_blocks(gate_by, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], 1)
    return (gate * y.astype(jnp.float32)).astype(y.dtype)

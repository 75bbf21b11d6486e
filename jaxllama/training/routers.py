"""Losses that keep the routers of a mixture of experts balanced and small.

    balance = E sum_e share_e probability_e      Switch Transformer (arXiv 2101.03961), eq. 4
    z       = mean (log sum_e exp logit_e)^2     ST-MoE (arXiv 2202.08906), eq. 5

``share_e`` is the mean number of times that a token takes expert e, and ``probability_e`` the mean
of its softmax.  Both means are over all tokens but padding and over all layers with experts, as
transformers takes them.  The share has no gradient.  So ``balance`` is the number of active experts
if all experts are taken equally often, and larger if not.

On a mesh the means are those of a device's own rows.  The softmax is that of the logits, whatever
function of them the router takes; a bias that only chooses experts is not in it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import LayerConfig, ModelConfig, StepConfig
from jaxllama.model import linear
from jaxllama.model.decoder import block, final_norm
from jaxllama.model.experts.route import route_by, router_logits
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.records import At
from jaxllama.model.stacked import embed, walk_with_results
from jaxllama.typing import Params


class Routed(NamedTuple):
    """Means over a layer's tokens: float32 share ``[E]``, probability ``[E]`` and z ``[]``."""

    share: jax.Array
    probability: jax.Array
    z: jax.Array


class _Watch:
    """The operations ``ops`` of a layer, with a record of what the router says."""

    def __init__(self, ops: LayerOps, segments: jax.Array | None) -> None:
        self.routed: Routed | None = None
        self.norm_linear, self.linear_add = ops.norm_linear, ops.linear_add
        self.product, self.grouped = ops.product, ops.grouped
        self._valid = None if segments is None else segments.reshape(-1) > 0

    def norm_route(
        self, stream: Stream, scale: Params | None, router: Params, cfg: StepConfig
    ) -> tuple[jax.Array, Stream, tuple[jax.Array, jax.Array]]:
        assert cfg.experts is not None
        x, stream = linear.norm(stream, scale, cfg)
        tokens = x.reshape(-1, x.shape[-1])
        logits = router_logits(tokens, router["weight"], router.get("bias"))
        experts, weights = route_by(cfg.experts, logits, router)
        self.routed = routed(logits, experts, self._valid)
        return x, stream, (experts, weights)


def routed(logits: jax.Array, experts: jax.Array, valid: jax.Array | None = None) -> Routed:
    """Return the means of a layer's float32 logits ``[T, E]`` and experts ``[T, k]``.

    valid: bool ``[T]``, the tokens that count; all by default.
    """
    taken = jnp.sum(jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32), axis=1)
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    weights = None if valid is None else valid.astype(jnp.float32)
    means = functools.partial(jnp.average, axis=0, weights=weights)
    return Routed(means(taken), means(jax.nn.softmax(logits, axis=-1)), means(z))


def losses(layers: list[Routed]) -> dict[str, jax.Array]:
    """Return {"balance", "z"}, float32 scalars, of the layers with experts.

    A layer's arrays may have a leading axis, of layers in a loop.
    """
    by_expert = (
        jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in parts])
        for parts in (
            [layer.share for layer in layers],
            [layer.probability for layer in layers],
        )
    )
    share, probability = (jnp.mean(x, axis=0) for x in by_expert)
    balance = share.size * jnp.sum(lax.stop_gradient(share) * probability)
    z = jnp.mean(jnp.concatenate([layer.z.reshape(-1) for layer in layers]))
    return {"balance": balance, "z": z}


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    remat: bool = False,
    segments: jax.Array | None = None,
    ops: LayerOps = linear,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return ``model.stacked.hidden_states`` and the routers' ``losses``.

    Parameters and shapes are those of that function; some layer of ``cfg`` has experts.
    """
    stream, at = embed(cfg, params, tokens, dtype, segments, begins)
    run_layer = functools.partial(_recomputed if remat else _watched, ops)
    stream, results = walk_with_results(cfg, params, stream, at, run_layer)
    return final_norm(cfg, params, stream), losses(
        [result for result in results if result is not None]
    )


def _watched(
    ops: LayerOps, layer: LayerConfig, params: Params, stream: Stream, state: None, at: At
) -> tuple[Stream, Routed | None]:
    """``decoder.block``, with what its router says."""
    watch = _Watch(ops, at.segments)
    stream, _ = block(layer, params, stream, state, at, watch)
    return stream, watch.routed


def _recomputed(
    ops: LayerOps, layer: LayerConfig, params: Params, stream: Stream, state: None, at: At
) -> tuple[Stream, Routed | None]:
    """As ``_watched``; for the backward pass only the layer's input is kept."""
    run = jax.checkpoint(lambda params, stream: _watched(ops, layer, params, stream, state, at))
    return run(params, stream)

"""The jitted programs of a layer whose experts lie one by one (``experts`` calls them).

    routed = routed_tokens(cfg, p, stream, lengths)      norm and router
    y = hot_pairs(...)                                   pairs of the experts on the device
    y = with_pairs(y, places, loaded_pairs(...))         pairs of loaded experts
    y = with_pairs(y, places, computed_pairs_of(...))    pairs of experts that the CPU computes
    stream = with_mixture(cfg, p, routed, y)             weighted sum, shared expert, residual

A pair is a token and one of its experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.model import linear
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.feed import gate_of, shared, with_output
from jaxllama.model.linear import Stream
from jaxllama.offload.experts import ExpertLayout, HotSlots, unpack, unpack_on_cpu
from jaxllama.typing import Options, Params, Tree
from pallas_kernels.experts.op import grouped_matmul, weighted_sum


class RoutedTokens(NamedTuple):
    """tokens ``[T, D]``, of which each passes ``experts [T, k]`` with ``weights``; index E is no
    expert, for a token that is none."""

    tokens: jax.Array
    experts: jax.Array
    weights: jax.Array
    stream: Stream


@functools.partial(jax.jit, static_argnums=0)
def routed_tokens(cfg: ModelConfig, p: Params, stream: Stream, lengths: jax.Array) -> RoutedTokens:
    assert cfg.experts is not None
    x, stream = linear.norm(stream, p.get("mlp_norm"), cfg)
    tokens = x.reshape(-1, x.shape[-1])
    experts, weights = linear.route(cfg.experts, tokens, p["mlp"]["router"])
    is_valid = jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None]
    experts = jnp.where(is_valid.reshape(-1, 1), experts, cfg.experts.n_experts)
    return RoutedTokens(tokens, experts, weights, stream)


@functools.partial(jax.jit, static_argnums=0)
def hot_pairs(
    cfg: ModelConfig,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    held: HotSlots,
    routed: RoutedTokens,
) -> jax.Array:
    """Return float32 ``[T k, D]``: the pairs of experts on the device, and zeros."""
    count, width = routed.experts.size, routed.tokens.shape[-1]
    if weights[0] is None:
        return jnp.zeros((count, width), jnp.float32)
    own = [None if bias is None else bias[held.experts] for bias in biases]
    y = _products(cfg, weights, own, held.slots[routed.experts], routed.tokens)
    return y.reshape(count, width)


@functools.partial(jax.jit, static_argnums=(0, 1))
def loaded_pairs(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    pieces: tuple[tuple[jax.Array, ...], ...],
    experts: jax.Array,
    biases: Sequence[jax.Array | None],
    tokens: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Return float32 ``[P, D]`` of pairs with loaded experts.

    pieces: the experts' bytes, of both products.  slots, rows ``[P]``: a pair's place among
    ``experts`` and its token.
    """
    up, down = (unpack(layout, jnp.stack(own)) for layout, own in zip(layouts, pieces, strict=True))
    own = [None if bias is None else bias[experts] for bias in biases]
    return _products(cfg, (up, down), own, slots[:, None], tokens[rows])[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def computed_pairs_of(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    ups: Sequence[tuple[jax.Array, ...]],
    downs: Sequence[tuple[jax.Array, ...]],
    biases: Sequence[np.ndarray | None],
    x: jax.Array,
) -> jax.Array:
    """Return float32 ``[experts, rows, D]`` of ``x [experts, rows, D]``, on the CPU."""
    found = []
    for index, leaves in enumerate(zip(ups, downs, strict=True)):
        weights = [unpack_on_cpu(*pair) for pair in zip(layouts, leaves, strict=True)]
        only = jnp.zeros((x.shape[1], 1), jnp.int32)
        own = [None if bias is None else jnp.asarray(bias)[index : index + 1] for bias in biases]
        found.append(_products(cfg, (weights[0], weights[1]), own, only, x[index])[:, 0])
    return jnp.stack(found)


def _products(
    cfg: ModelConfig,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    experts: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """Return float32 ``[T, k, D]``, unweighted; an index behind the last expert gives zeros."""
    assert cfg.experts is not None
    how: Options = {"gated": gate_of(cfg, cfg.experts), "bias": biases[0]}
    inner = grouped_matmul(x, weights[0], experts, first=0, **how)
    inner = inner if cfg.gated_mlp else activated(inner, cfg.activation)
    return grouped_matmul(
        inner, weights[1], experts, first=0, bias=biases[1], out_dtype=jnp.float32
    )


@functools.partial(jax.jit, donate_argnums=0)
def with_pairs(y: jax.Array, places: np.ndarray, found: jax.Array) -> jax.Array:
    """Return ``y [T k, D]`` with the rows ``found`` at ``places``; places past its end are none."""
    return y.at[places].set(found, mode="drop")


@functools.partial(jax.jit, static_argnums=0)
def with_mixture(cfg: ModelConfig, p: Params, routed: RoutedTokens, y: jax.Array) -> Stream:
    """Return the stream with the mixture's output, of the pairs' ``y [T k, D]``."""
    assert cfg.experts is not None
    stream, tokens = routed.stream, routed.tokens
    pairs = y.reshape(*routed.experts.shape, y.shape[-1])
    out = weighted_sum(pairs, routed.weights, tokens.dtype).reshape(stream.x.shape)
    if cfg.experts.shared:
        out = out + shared(cfg, p["mlp"], tokens.reshape(stream.x.shape))
    return with_output(cfg, p, stream, out)

"""The jitted programs of a layer whose experts lie one by one (``experts`` calls them).

    routed, y = routed_pairs(...)           norm, router; pairs of the experts on the device
    y = added_pairs(..., y, group)          and of a group of loaded experts
    computed_pairs_of(...)                  pairs of experts that the CPU computes
    stream = with_mixture(..., y, group, computed)
                                            the last group, the CPU's pairs, the weighted sum

A pair is a token and one of its experts. Dispatching a program costs a GPU's host more than most of
them take, so there are few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.model.decoder import scaled
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.feed import gate_of, inputs_of, with_output
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


class LoadedGroup(NamedTuple):
    """Loaded experts and their pairs.

    pieces: the experts' bytes, of both products.  places ``[P]``: the pairs, ``token * k + j``; one
    past the end is none.  slots, rows ``[P]``: a pair's place among ``experts`` and its token.
    """

    experts: np.ndarray
    pieces: tuple[tuple[jax.Array, ...], ...]
    places: np.ndarray
    slots: np.ndarray
    rows: np.ndarray


class ComputedPairs(NamedTuple):
    """Results ``found [P, D]`` of the CPU, and their places as in ``LoadedGroup``."""

    places: np.ndarray
    found: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def routed_pairs(
    cfg: ModelConfig,
    p: Params,
    stream: Stream,
    lengths: jax.Array,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    held: HotSlots,
) -> tuple[RoutedTokens, jax.Array]:
    """Return the routed tokens, and float32 ``[T k, D]``: the pairs of experts on the device, and
    zeros."""
    assert cfg.experts is not None
    (x, (experts, own_weights)), stream = inputs_of(cfg, p, stream)
    tokens = x.reshape(-1, x.shape[-1])
    is_valid = jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None]
    experts = jnp.where(is_valid.reshape(-1, 1), experts, cfg.experts.n_experts)
    routed = RoutedTokens(tokens, experts, own_weights, stream)
    if weights[0] is None:
        return routed, jnp.zeros((experts.size, tokens.shape[-1]), jnp.float32)
    own = [None if bias is None else bias[held.experts] for bias in biases]
    y = _products(cfg, weights, own, held.slots[experts], tokens)
    return routed, y.reshape(experts.size, -1)


def _with_group(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    biases: Sequence[jax.Array | None],
    tokens: jax.Array,
    y: jax.Array,
    group: LoadedGroup,
) -> jax.Array:
    pieces = zip(layouts, group.pieces, strict=True)
    up, down = (unpack(layout, jnp.stack(own)) for layout, own in pieces)
    own = [None if bias is None else bias[group.experts] for bias in biases]
    slots = jnp.asarray(group.slots)[:, None]
    found = _products(cfg, (up, down), own, slots, tokens[group.rows])[:, 0]
    return y.at[group.places].set(found, mode="drop")


added_pairs = jax.jit(_with_group, static_argnums=(0, 1))


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_mixture(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    p: Params,
    biases: Sequence[jax.Array | None],
    routed: RoutedTokens,
    y: jax.Array,
    group: LoadedGroup | None = None,
    computed: Sequence[ComputedPairs] = (),
) -> Stream:
    """Return the stream with the mixture's output, of the pairs' ``y [T k, D]`` and those of
    ``group`` and ``computed``."""
    assert cfg.experts is not None
    stream, tokens = routed.stream, routed.tokens
    if group is not None:
        y = _with_group(cfg, layouts, biases, tokens, y, group)
    for places, found in computed:
        y = y.at[places].set(found, mode="drop")
    pairs = y.reshape(*routed.experts.shape, y.shape[-1])
    out = weighted_sum(pairs, routed.weights, tokens.dtype).reshape(stream.x.shape)
    return scaled(p, with_output(cfg, p, stream, tokens.reshape(stream.x.shape), out))

"""Which experts a token goes through, and with which weights.  Everything is float32.

    logits  = x @ router.T (+ bias)
    softmax, normalized     the softmax over the chosen logits (Mixtral, Qwen3, Granite, gpt-oss)
    softmax                 the chosen entries of the softmax over all experts (OLMoE)
    sigmoid                 the chosen sigmoids, over their sum if normalized (DeepSeek-V3, GLM)
    sparsemixer             the best logit's softmax over the logits near it, then the same of the
                            logits that are left (Phi-3.5-MoE)

If scores are equal, the lowest index wins.  On a CPU a token's logits have the same bits in any
batch, so its experts depend on the token alone.

Sources: Mixtral (arXiv 2401.04088), DeepSeek-V3 (2412.19437), GRIN's SparseMixer-v2 (2409.12136)
as it infers.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import ExpertsConfig
from jaxllama.typing import Params
from pallas_kernels.experts.best import best as largest
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.fixed_sums import by_blocks

Routed = tuple[jax.Array, jax.Array]  # experts and weights, as from ``route``


def route(options: ExpertsConfig, x: jax.Array, router: Params) -> Routed:
    """Return the experts and weights of tokens ``x[T, D]``: int32 and float32 ``[T, k]``."""

    def of_tokens(x: jax.Array) -> Routed:
        return route_by(options, router_logits(x, router["weight"], router.get("bias")), router)

    # XLA chooses the shape of a softmax's kernel, and so the order of its sum, by the rows.
    return by_blocks(of_tokens, x)


def route_by(options: ExpertsConfig, logits: jax.Array, router: Params) -> Routed:
    """Return ``route`` of tokens whose float32 logits ``[T, E]`` are known."""
    experts, weights = choose(options, logits, router.get("choice_bias"))
    return experts, with_factors(weights, experts, router)


def with_factors(weights: jax.Array, experts: jax.Array, router: Params) -> jax.Array:
    """Return the weights ``[T, k]`` times their experts' factors, if the router has any."""
    if "expert_scale" not in router:
        return weights
    return weights * router["expert_scale"].astype(jnp.float32)[experts]


def router_logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return float32 logits ``[T, E]`` of ``x[T, D]`` and ``weight[E, D]``."""
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)

    def one_product(x: jax.Array, weight: jax.Array) -> jax.Array:
        # Float32 has the product of two numbers of 16 bits exactly.
        contracted = ((1,), (1,)), ((), ())
        product = functools.partial(
            lax.dot_general,
            dimension_numbers=contracted,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return by_blocks(product, x, weight)

    def as_expert(x: jax.Array, weight: jax.Array) -> jax.Array:
        # In one product of all rows, the rounding of a row would depend on the number of rows.
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        only = jnp.zeros((x.shape[0], 1), jnp.int32)
        return grouped_matmul(x, weight[None], only, implementation="xla")[:, 0]

    logits = lax.platform_dependent(x, weight, default=one_product, cpu=as_expert)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def has_plain_scores(options: ExpertsConfig, router: Params) -> bool:
    """Whether ``norm_and_route`` chooses as ``choose`` does."""
    if options.n_active_groups != options.n_groups:
        return False
    if options.scores == "sigmoid":
        return not options.choice_by_logits
    return options.scores == "softmax" and "choice_bias" not in router


def choose(
    options: ExpertsConfig, logits: jax.Array, choice_bias: jax.Array | None = None
) -> Routed:
    """(experts, weights) as from ``route``, for float32 logits ``[T, E]``.

    choice_bias: ``[E]``, added to the scores for the choice, but not for the weights.
    """
    if options.scores == "sparsemixer":
        return _sparsemixer(options, logits)
    is_softmax = options.scores == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
    by = logits if options.choice_by_logits else scores
    by = by if choice_bias is None else by + choice_bias.astype(jnp.float32)
    if is_softmax and choice_bias is None and options.n_active_groups == options.n_groups:
        by = logits  # the same order, and fewer ties
    by = _best_groups(options, by)
    best, experts = largest(by, options.n_active)
    if is_softmax and options.normalize:
        best = best if by is logits else jnp.take_along_axis(logits, experts, axis=-1)
        weights = jax.nn.softmax(best, axis=-1)
    else:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if options.normalize:
            # A sum of slices: XLA makes a kernel of each reduction.
            total = functools.reduce(operator.add, jnp.split(weights, options.n_active, axis=-1))
            weights = weights / (total + 1e-20)
    return experts.astype(jnp.int32), weights * options.scale


def _sparsemixer(options: ExpertsConfig, logits: jax.Array) -> Routed:
    """``choose`` for SparseMixer.

    Near the best logit are those whose distance from it is at most ``2 * jitter`` of the larger of
    it and their own magnitude.
    """
    left, experts, weights = logits, [], []
    for _ in range(options.n_active):
        best = jnp.max(left, axis=-1, keepdims=True)
        size = jnp.maximum(jnp.abs(logits), best)
        near = (best - logits) / size <= 2 * options.jitter
        expert = jnp.argmax(left, axis=-1)[:, None]
        shares = jax.nn.softmax(jnp.where(near, left, -jnp.inf), axis=-1)
        experts.append(expert)
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
        is_it = jnp.arange(logits.shape[-1]) == expert
        left = jnp.where(is_it, -jnp.inf, left)
    joined = (jnp.concatenate(x, axis=-1) for x in (experts, weights))
    chosen, share = joined
    return chosen.astype(jnp.int32), share * options.scale


def _best_groups(options: ExpertsConfig, by: jax.Array) -> jax.Array:
    """``by[T, E]`` with -inf for experts outside of a token's best groups.

    A group's score is the sum of its ``group_best`` best experts' scores.
    """
    if options.n_active_groups == options.n_groups:
        return by
    groups = by.reshape(by.shape[0], options.n_groups, -1)
    scores = groups.reshape(-1, groups.shape[-1])
    best, _ = largest(scores, min(options.group_best, groups.shape[-1]))
    best = jnp.sum(best.reshape(*groups.shape[:2], -1), axis=-1)
    _, kept = largest(best, options.n_active_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(options.n_groups), axis=1)
    return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(by.shape)

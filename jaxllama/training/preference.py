"""Learning from preferences: DPO, ORPO and KTO, as functions of sequences' log-probabilities.

Let l(y) be the sum of log p(token) over an answer's tokens under the model. Let r(y) be the same
under the reference, and m(y) = l(y) - r(y). w and l are the chosen and the rejected answer.

    dpo    -log sigmoid(beta (m(w) - m(l)))                               arXiv 2305.18290, eq. 7
    orpo   -a(w) - beta log sigmoid(odds(w) - odds(l))                    2403.07691, eq. 6 and 7
               a: mean of log p over the answer's tokens, odds = a - log(1 - exp(a))
    kto    desirable:   wd (1 - sigmoid(beta (m(y) - z)))                 2402.01306, eq. 8
           undesirable: wu (1 - sigmoid(beta (z - m(y))))
               z: mean of m over answers to other prompts, at least 0, without a gradient

The reference is the model before the first step. Its log-probabilities are computed once. ORPO
needs none. A unit of data is two sequences in one row: chosen and rejected, or for KTO an answer
and another line's answer to the same prompt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.training.tuning import ObjectiveConfig


def sequence_sums(
    logprobs: jax.Array, weights: jax.Array, segments: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return (sums of log-probabilities, numbers of tokens), float32 ``[B, count // 2, 2]`` each.

    logprobs, weights : ``[B, T]``, of each target and whether it belongs to an answer.
    segments : int32 ``[B, T]``, from 1 on; segments 2 k + 1 and 2 k + 2 are unit k.
    """
    is_segment = segments[..., None] == jnp.arange(1, count + 1, dtype=segments.dtype)  # [B, T, S]
    is_segment = is_segment.astype(jnp.float32) * weights[..., None]
    sums = jnp.sum(is_segment * logprobs[..., None], axis=1)
    tokens = jnp.sum(is_segment, axis=1)
    shape = len(logprobs), count // 2, 2
    return sums.reshape(shape), tokens.reshape(shape)


def objective(
    goal: ObjectiveConfig,
    sums: jax.Array,
    tokens: jax.Array,
    reference: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (mean loss, {"margin", "accuracy"}).

    sums, tokens, reference : float32 ``[B, K, 2]``.
    labels : float32 ``[B, K]``
        0: no unit. Otherwise its absolute value is the unit's weight, and for KTO its sign says
        whether the answer is desirable. The mean of absolute values over a step is 1.
    """
    weight, is_desirable = jnp.abs(labels), labels > 0
    ratios = sums - reference
    if goal.kind == "dpo":
        margin = goal.beta * (ratios[..., 0] - ratios[..., 1])
        loss = -jax.nn.log_sigmoid(margin)
    elif goal.kind == "orpo":
        mean = sums / jnp.maximum(tokens, 1.0)
        # An empty place has a mean of 0, whose odds are infinite.
        mean = jnp.where(tokens > 0, mean, -1.0)
        odds = mean - jnp.log(-jnp.expm1(mean))
        margin = odds[..., 0] - odds[..., 1]
        loss = -mean[..., 0] - goal.beta * jax.nn.log_sigmoid(margin)
    else:
        assert goal.kind == "kto", goal.kind
        has_unit = (weight > 0).astype(jnp.float32)
        others = jnp.sum(ratios[..., 1] * has_unit) / jnp.maximum(jnp.sum(has_unit), 1.0)
        z = jax.lax.stop_gradient(jnp.maximum(others, 0.0))
        sign = jnp.where(is_desirable, 1.0, -1.0)
        margin = goal.beta * sign * (ratios[..., 0] - z)
        share = jnp.where(is_desirable, goal.desirable_weight, goal.undesirable_weight)
        loss = share * (1.0 - jax.nn.sigmoid(margin))

    def mean_of(x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.where(weight > 0, x * weight, 0.0))

    hits = (margin > 0).astype(jnp.float32)
    return mean_of(loss), {"margin": mean_of(margin), "accuracy": mean_of(hits)}

"""Learning from rewards: advantages, and the loss as a function of log-probabilities.

Let ratio = exp(new - old) of an answer's token, A its advantage, and
clipped(ratio) = min(ratio A, clip(ratio, 1 - c, 1 + c) A).

    grpo         mean over answers of the mean over their tokens of        arXiv 2402.03300, eq. 3
                     clipped(ratio) - beta kl
                     A: reward less its group's mean, over the group's standard deviation
                     kl = exp(ref - new) - (ref - new) - 1
    rloo         mean over answers of clipped(ratio of the whole answer)   2402.14740, eq. 8
                     A: R less the mean of the group's other R
                     R = reward - beta sum of (old - ref)
    reinforce++  mean over all tokens of clipped(ratio)                    2501.03262, eq. 4 to 7
                     A: reward - beta sum of (old - ref) from this token on, normalized over all
                     tokens of the step

The loss is the negative of that. A token's gain has the weight min(exp(old - sampled), cap), where
``sampled`` is the engine's log-probability of the token that it drew: a truncated importance weight
for the difference between the engine's arithmetic and the trainer's (Yao et al. 2025).

A run computes log-probabilities by one program (``training.scores``), and the loss from their
values. ``coefficients`` is the gradient of the loss by each log-probability. It becomes the weights
of a cross entropy, so that the update is the same one as for conversations. New, old and reference
log-probabilities therefore have the same bits, whatever the microbatches of the update.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllama.training.tuning import ObjectiveConfig

# Beside a group's standard deviation, as TRL has it.
EPSILON = 1e-4


class Answers(NamedTuple):
    """A loss reads these beside the new log-probabilities; float32 ``[B, T]`` but for the rewards.

    is_answer : 1 where a token was sampled, else 0.
    old : log-probabilities before the first update with these answers.
    reference : log-probabilities under the first model; None if beta is 0.
    sampled : log-probabilities of the engine; None without importance weights.
    rewards : float32 ``[B]``; ``samples`` answers to one prompt follow each other.
    """

    is_answer: jax.Array
    old: jax.Array
    reference: jax.Array | None
    sampled: jax.Array | None
    rewards: jax.Array


def advantages(goal: ObjectiveConfig, samples: int, answers: Answers) -> jax.Array:
    """Return the advantage of every token, float32 ``[B, T]``; see the module docstring."""
    is_answer, rewards = answers.is_answer, answers.rewards
    drift = jnp.zeros_like(is_answer)
    if goal.kind != "grpo" and answers.reference is not None:
        drift = goal.beta * (answers.old - answers.reference) * is_answer
    if goal.kind == "reinforce++":
        behind = jnp.cumsum(drift[:, ::-1], axis=1)[:, ::-1]
        value = rewards[:, None] - behind
        count = jnp.sum(is_answer)
        mean = jnp.sum(value * is_answer) / count
        variance = jnp.sum(jnp.square(value - mean) * is_answer) / count
        return (value - mean) * jax.lax.rsqrt(variance + 1e-8)
    groups = (rewards - jnp.sum(drift, axis=1)).reshape(-1, samples)
    mean = jnp.mean(groups, axis=1, keepdims=True)
    if goal.kind == "rloo":
        value = (groups - mean) * (samples / (samples - 1))
    else:
        spread = jnp.std(groups, axis=1, keepdims=True, ddof=1)
        value = (groups - mean) / (spread + EPSILON)
    return value.reshape(-1, 1) * jnp.ones_like(is_answer)


def importance(cap: float, answers: Answers) -> jax.Array:
    """Return the weight of every token, float32 ``[B, T]``; ones with a cap of 0."""
    if not cap or answers.sampled is None:
        return jnp.ones_like(answers.is_answer)
    ratio = jnp.exp((answers.old - answers.sampled) * answers.is_answer)
    return jnp.minimum(ratio, cap)


def policy_loss(
    goal: ObjectiveConfig, cap: float, new: jax.Array, advantage: jax.Array, answers: Answers
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (loss, {"kl", "clipped"}).

    Parameters
    ----------
    goal : ObjectiveConfig
        Objective "grpo", "rloo" or "reinforce++".
    cap : float
        Largest importance weight; 0 weighs all tokens alike.
    new : jax.Array
        float32 ``[B, T]``, log-probabilities of the tokens.
    advantage : jax.Array
        float32 ``[B, T]``.
    answers : Answers
        The rest.

    Returns
    -------
    tuple
        The loss, and the means over tokens of kl (0 without a reference) and of whether a token's
        ratio was clipped.
    """
    is_answer = answers.is_answer
    count = jnp.maximum(jnp.sum(is_answer, axis=1), 1.0)
    difference = (new - answers.old) * is_answer
    if goal.kind == "rloo":
        difference = jnp.sum(difference, axis=1, keepdims=True) * jnp.ones_like(is_answer)
    ratio = jnp.exp(difference)
    inside = jnp.clip(ratio, 1.0 - goal.clip, 1.0 + goal.clip)
    gain = jnp.minimum(ratio * advantage, inside * advantage) * importance(cap, answers)
    kl = jnp.zeros_like(is_answer)
    if answers.reference is not None:
        above = (answers.reference - new) * is_answer
        kl = jnp.expm1(above) - above
    if goal.kind == "grpo":
        loss = -jnp.mean(jnp.sum((gain - goal.beta * kl) * is_answer, axis=1) / count)
    elif goal.kind == "rloo":
        loss = -jnp.mean(jnp.sum(gain * is_answer, axis=1) / count)
    else:
        loss = -_mean(gain, is_answer)
    clipped = (ratio * advantage > inside * advantage).astype(jnp.float32)
    return loss, {"kl": _mean(kl, is_answer), "clipped": _mean(clipped, is_answer)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def coefficients(
    goal: ObjectiveConfig, samples: int, cap: float, new: jax.Array, answers: Answers
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (gradient of the loss by ``new``, float32 ``[B, T]``; {"loss", "kl", "clipped"})."""
    advantage = advantages(goal, samples, answers)

    def loss(new: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return policy_loss(goal, cap, new, advantage, answers)

    (value, parts), found = jax.value_and_grad(loss, has_aux=True)(new)
    return found, {"loss": value, **parts}


@jax.jit
def gap(answers: Answers) -> dict[str, jax.Array]:
    """Return how far the trainer's log-probabilities are from the engine's.

    "gap_max": the largest absolute difference of a token. "gap_kl": an estimate of the divergence
    KL(engine || trainer) of a token, the mean of exp(d) - 1 - d with d = old - sampled.
    """
    assert answers.sampled is not None
    difference = (answers.old - answers.sampled) * answers.is_answer
    return {
        "gap_max": jnp.max(jnp.abs(difference)),
        "gap_kl": _mean(jnp.expm1(difference) - difference, answers.is_answer),
    }


def _mean(values: jax.Array, is_answer: jax.Array) -> jax.Array:
    """Return the mean over the answers' tokens."""
    return jnp.sum(values * is_answer) / jnp.maximum(jnp.sum(is_answer), 1.0)

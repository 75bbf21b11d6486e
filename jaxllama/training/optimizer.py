"""AdamW with clipping, linear warm-up and a cosine (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllama.generation import Params
from jaxllama.training.config import TrainConfig


def learning_rate(config: TrainConfig, update: jax.Array | int) -> jax.Array:
    """Of update number ``update``, from 0: the first is already above zero."""
    warmup, last = config.optimizer.warmup_steps, config.optimizer.final_share
    at = jnp.asarray(update, jnp.float32)
    rising = (at + 1) / max(warmup, 1)
    progress = jnp.clip((at - warmup) / (config.steps - warmup), 0, 1)
    falling = last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.float32(config.learning_rate) * jnp.where(at < warmup, rising, falling)


def optimizer(config: TrainConfig, learned: Any = True) -> optax.GradientTransformation:
    """learned: a tree prefix of booleans, or True for all; other parameters never change (not even
    by decay) and have no moments."""
    options = config.optimizer
    steps = []
    if options.clip_norm:
        steps.append(optax.clip_by_global_norm(options.clip_norm))
    steps.append(
        optax.adamw(
            lambda update: learning_rate(config, update),
            b1=options.b1,
            b2=options.b2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            mask=decays,
        )  # fmt: skip
    )
    rule = optax.chain(*steps)
    if learned is True:
        return rule
    labels = jax.tree.map(lambda flag: "learned" if flag else "still", learned)
    return optax.partition({"learned": rule, "still": optax.set_to_zero()}, labels)


def decays(params: Params) -> Any:
    """True at matrices: not at norms and biases, nor at a grid's scales and zeros."""

    def one(path: tuple[Any, ...], leaf: Any) -> bool:
        return leaf.ndim >= 2 and getattr(path[-1], "name", "w") == "w"

    return jax.tree_util.tree_map_with_path(one, params)

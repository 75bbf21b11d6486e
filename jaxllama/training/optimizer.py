"""AdamW with clipping, linear warm-up and a cosine (Loshchilov and Hutter, arXiv 1711.05101).

Adam moves every number by about the learning rate, whatever the size of its gradient. A grid's
scale is much smaller than the weights it spans. So a scale moves by the learning rate over the
largest code. Then the ends of the range move as fast as a weight (the balance of LSQ, arXiv
1902.08153).

Some families multiply activations by constants (Granite, Cohere, Gemma). Loading folds the
constants into weights, so a row here is a constant times the family's row. AdamW is not invariant
to that, so it gets the family's own parameters: ``times_multipliers`` converts gradients,
parameters and changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxllama.config import ModelConfig
from jaxllama.model.param import Path
from jaxllama.model.params import param_table
from jaxllama.model.stacked import one_layer_path
from jaxllama.training.config import TrainConfig
from jaxllama.training.fake_quantize import RANGES
from jaxllama.typing import Params, Tree

Multipliers = Mapping[Path, np.ndarray]


def learning_rate(config: TrainConfig, update: ArrayLike) -> jax.Array:
    """Return the learning rate of update number ``update``, from 0; the first is above zero."""
    warmup, last = config.optimizer.warmup_steps, config.optimizer.final_share
    updates = 1 if config.rollout is None else config.rollout.updates
    at = jnp.floor(jnp.asarray(update, jnp.float32) / updates)  # the step of the update
    rising = (at + 1) / max(warmup, 1)
    progress = jnp.clip((at - warmup) / (config.steps - warmup), 0, 1)
    falling = last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.float32(config.learning_rate) * jnp.where(at < warmup, rising, falling)


def times_multipliers(multipliers: Multipliers, tree: Tree, power: int = 1) -> Tree:
    """Return ``tree`` with each row of a folded parameter times its multiplier to the ``power``.

    multipliers: ``multipliers_of`` the model. tree: shaped as the parameters. Let m be the
    multiplier and ``ours = m * own + constant``, with the family's parameter ``own``. Power 1 turns
    a gradient with respect to ours into one with respect to own, and a change of own into one of
    ours. Power -1 turns ours into own, up to the constant (of norms, which do not decay).
    """

    def scaled(keys: tuple[Tree, ...], leaf: jax.Array) -> jax.Array:
        path, lead = one_layer_path(tuple(key.key for key in keys if hasattr(key, "key")))
        rows = multipliers.get(path)
        if rows is None:
            return leaf
        return leaf * (rows**power).reshape(-1, *(1,) * (leaf.ndim - lead - 1))

    return jax.tree_util.tree_map_with_path(scaled, tree) if multipliers else tree


def multipliers_of(cfg: ModelConfig) -> Multipliers:
    """Return the multipliers of each folded parameter, float32 ``[rows]``."""
    return {
        path: np.concatenate(
            [np.full(source.shape[0], source.scale, np.float32) for source in spec.sources]
        )
        for path, spec in param_table(cfg).items()
        if any(source.scale != 1.0 for source in spec.sources)
    }


def optimizer(config: TrainConfig, learned: Tree = True) -> optax.GradientTransformation:
    """Return the update rule.

    learned: a tree prefix of booleans, or True for all. Other parameters never change, not even by
    decay, and have no moments.
    """
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
        )
    )
    steps.append(optax.stateless(lambda changes, _: _slow_scales(changes)))
    rule = optax.chain(*steps)
    if learned is True:
        return rule
    labels = jax.tree.map(lambda flag: "learned" if flag else "still", learned)
    return optax.partition({"learned": rule, "still": optax.set_to_zero()}, labels)


def _slow_scales(changes: Tree) -> Tree:
    """Scale the changes of grids' scales; see the module docstring.

    A grid is a leaf with ``code_dtype`` and a ``scale``.
    """

    def is_grid(leaf: object) -> bool:
        return hasattr(leaf, "code_dtype")

    def slow_scale(leaf: Tree) -> Tree:
        if not is_grid(leaf):
            return leaf
        return dataclasses.replace(leaf, scale=leaf.scale / RANGES[leaf.code_dtype][1])

    return jax.tree.map(slow_scale, changes, is_leaf=is_grid)


def decays(params: Params) -> Tree:
    """Return True at matrices: not at norms and biases, nor at a grid's scales and zeros."""

    def decays_leaf(keys: tuple[Tree, ...], leaf: jax.Array) -> bool:
        _, lead = one_layer_path(tuple(key.key for key in keys if hasattr(key, "key")))
        return leaf.ndim - lead >= 2 and getattr(keys[-1], "name", "w") == "w"

    return jax.tree_util.tree_map_with_path(decays_leaf, params)

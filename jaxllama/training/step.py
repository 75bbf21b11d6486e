"""One compiled update: losses and gradients of the microbatches, their sum, AdamW.

A state is ``{"params", "moments", "step"}``, all arrays, donated at every update. Nothing is random
here: the same state and batch give the same bits. With ``scan`` the state's parameters and moments
are stacked (``model.stacked``); ``per_layer`` is the form on disk.

On a mesh every device holds the whole state and takes its part of every microbatch's rows. The
gradients are averaged once a step, and all devices make the same update.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxllama.model.decoder import head
from jaxllama.model.stacked import stack_layers, unstack_layers
from jaxllama.parallel.mesh import data_parallel
from jaxllama.training import distill
from jaxllama.training.forward import hidden_states
from jaxllama.training.loss import cross_entropy, distillation
from jaxllama.training.optimizer import learning_rate, optimizer, times_multipliers
from jaxllama.training.quantization_aware import prepare, rounded
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params, ParamsDict

State = ParamsDict  # params, optimizer, step


def init_state(setup: TrainingSetup, params: Params) -> State:
    """Return the state before the first update; ``params`` are per layer."""
    params = prepare(params, setup.config.quantize)
    params = stack_layers(setup.model, params) if setup.config.scan else params
    return {"params": params, "moments": _rule(setup, params).init(params), "step": jnp.int32(0)}


def per_layer(state: State) -> State:
    """Return the state in the form of checkpoints, with parameters and moments by layer."""
    return unstack_layers(state)


def in_memory(setup: TrainingSetup, state: State) -> State:
    """Undo ``per_layer``: return the state for ``update``."""
    return stack_layers(setup.model, state) if setup.config.scan else state


def _rule(setup: TrainingSetup, params: Params) -> optax.GradientTransformation:
    goal = setup.config.distill
    only_mixers = goal is not None and goal.objective == "mixers"
    learned = distill.learned(setup.model, params) if only_mixers else True
    return optimizer(setup.config, learned)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    setup: TrainingSetup, state: State, teacher_params: Params | None, batch: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """Make one update with ``batch int32 [microbatches, rows, T + 1]``.

    Returns (state, metrics). The metrics are float32 scalars: "loss", its parts, "grad_norm" before
    clipping, "learning_rate".
    """
    cfg, params = setup.model, state["params"]
    # The rows are the leading axis, which the devices of a mesh share.
    gradient = data_parallel(functools.partial(_gradient, setup))
    grads, metrics = gradient(params, teacher_params, jnp.swapaxes(batch, 0, 1))
    grads = times_multipliers(cfg, grads)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
    metrics["grad_norm"] = jnp.sqrt(sum(squares))
    metrics["learning_rate"] = learning_rate(setup.config, state["step"])
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        own = times_multipliers(cfg, params, -1)
        changes, moments = _rule(setup, params).update(grads, state["moments"], own)
    params = optax.apply_updates(params, times_multipliers(cfg, changes))
    return {"params": params, "moments": moments, "step": state["step"] + 1}, metrics


def _gradient(
    setup: TrainingSetup, params: Params, teacher_params: Params | None, rows: jax.Array
) -> tuple[Params, dict[str, jax.Array]]:
    """Return gradients and metrics, averaged over the microbatches.

    rows: ``[rows, microbatches, T + 1]``.
    """
    gradient = jax.value_and_grad(functools.partial(loss, setup), has_aux=True)

    def one(total: Params | None, tokens: jax.Array):
        (value, parts), grads = gradient(params, teacher_params, tokens)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        return total, {"loss": value, **parts}

    parts = rows.shape[1]
    if parts == 1:
        return one(None, rows[:, 0])
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, metrics = lax.scan(one, zeros, jnp.swapaxes(rows, 0, 1))
    return jax.tree.map(lambda g: g / parts, grads), jax.tree.map(jnp.mean, metrics)


def loss(
    setup: TrainingSetup, params: Params, teacher_params: Params | None, tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the objective on ``tokens[B, T + 1]``, its parts)."""
    config, cfg, goal = setup.config, setup.model, setup.config.distill
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    dtype = jnp.dtype(config.dtype)
    params = rounded(params)
    if goal is not None and goal.objective == "mixers":
        return distill.mixer_loss(
            cfg, setup.teacher, params, teacher_params, inputs, dtype, config.remat
        )
    x = hidden_states(cfg, params, inputs, dtype, config.remat)
    if goal is None:
        value, _ = cross_entropy(x, head(params)["weight"], targets, cfg.logit_softcap)
        return value, {}
    assert setup.teacher is not None
    teacher_x = hidden_states(setup.teacher, teacher_params, inputs, dtype)
    return distillation(
        x,
        head(params)["weight"],
        targets,
        teacher_x,
        head(teacher_params)["weight"],
        kl_weight=goal.kl_weight,
        ce_weight=goal.ce_weight,
        temperature=goal.temperature,
        cap=cfg.logit_softcap,
        teacher_cap=setup.teacher.logit_softcap,
    )


@functools.partial(jax.jit, static_argnums=0)
def validation_loss(setup: TrainingSetup, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy of ``tokens[B, T + 1]``, whatever the objective is."""

    def mean(params: Params, tokens: jax.Array) -> jax.Array:
        params = rounded(params)
        cfg = setup.model
        x = hidden_states(cfg, params, tokens[:, :-1], jnp.dtype(setup.config.dtype))
        return cross_entropy(x, head(params)["weight"], tokens[:, 1:], cfg.logit_softcap)[0]

    return data_parallel(mean)(params, tokens)

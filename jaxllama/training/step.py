"""One compiled update: losses and gradients of the microbatches, their sum, AdamW.

A state is ``{"params", "moments", "step"}``, all arrays, donated at every update. With adapters its
"params" are these alone. ``fixed`` is the tree that no update changes: the weights beneath
adapters, or a teacher's. Nothing is random here: the same state and batch give the same bits. With
``scan`` the state's parameters and moments are stacked (``model.stacked``); ``per_layer`` is the
form on disk.

On a mesh each device takes its part of every microbatch's rows. It keeps the whole state, or with
``fsdp`` its part. On a mesh with stages it has its part of the layers (``pipeline``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxllama.model import linear
from jaxllama.model.decoder import block, head
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.stacked import (
    hidden_states,
    recomputed_block,
    stack_layers,
    unstack_layers,
)
from jaxllama.parallel.mesh import is_staged
from jaxllama.training import adapters, distill, draft, fsdp, pipeline, preference, routers, served
from jaxllama.training.batch import Batch
from jaxllama.training.config import RouterConfig
from jaxllama.training.fp8 import Fp8
from jaxllama.training.loss import (
    cross_entropy,
    distillation,
    head_weight,
    token_logprobs,
    token_scores,
)
from jaxllama.training.optimizer import learning_rate, optimizer, times_multipliers
from jaxllama.training.quantization_aware import prepare, rounded
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params, ParamsDict

State = ParamsDict  # params, optimizer, step


def init_state(setup: TrainingSetup, params: Params) -> State:
    """Return the state before the first update; ``params`` are per layer."""
    params = first_weights(setup, params)
    return {"params": params, **without_weights(setup, params)}


def first_weights(setup: TrainingSetup, params: Params, *, release: bool = False) -> Params:
    """Return a state's "params"; release: delete arrays that are copied, as ``stack_layers``."""
    params = prepare(params, setup.config.quantize)
    return stack_layers(setup.model, params, release=release) if setup.config.scan else params


def without_weights(setup: TrainingSetup, params: Params) -> State:
    """Return the rest of the state before the first update."""
    return {"moments": _rule(setup, params).init(params), "step": jnp.int32(0)}


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
    setup: TrainingSetup, state: State, fixed: Params | None, batch: Batch | jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """Make one update with a Batch of ``[microbatches, rows, ...]``, or with its tokens alone.

    Returns (state, metrics). The metrics are float32 scalars: "loss", its parts, "grad_norm" before
    clipping, "learning_rate". A batch with ``prompts`` has
    "logprobs" and "entropies" ``[..., T]``.
    """
    multipliers, params = setup.multipliers, state["params"]
    if is_staged(params):
        run_layer = _each(setup, setup.config.remat)
        grads, metrics = pipeline.gradient(setup, run_layer, params, Batch.of(batch))
    else:
        # The rows are the leading axis, which the devices of a mesh share.
        gradient = fsdp.gradient_on_rows(setup, functools.partial(_gradient, setup))
        rows = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), Batch.of(batch))
        grads, metrics = gradient(params, fixed, rows)
    grads = times_multipliers(multipliers, grads)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
    metrics["grad_norm"] = jnp.sqrt(sum(squares))
    metrics["learning_rate"] = learning_rate(setup.config, state["step"])
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        multiplied = times_multipliers(multipliers, params, -1)
        changes, moments = _rule(setup, params).update(grads, state["moments"], multiplied)
    params = optax.apply_updates(params, times_multipliers(multipliers, changes))
    return {"params": params, "moments": moments, "step": state["step"] + 1}, metrics


def _gradient(
    setup: TrainingSetup, params: Params, fixed: Params | None, rows: Batch | jax.Array
) -> tuple[Params, dict[str, jax.Array]]:
    """Return gradients and metrics, averaged over the microbatches.

    rows: a Batch of ``[rows, microbatches, ...]``.
    """
    gradient = jax.value_and_grad(functools.partial(loss, setup), has_aux=True)

    def part_gradient(part: Batch) -> tuple[Params, dict[str, jax.Array]]:
        (value, parts), grads = gradient(params, fixed, part)
        return grads, {"loss": value, **parts}

    def add(total: Params, part: Batch) -> tuple[Params, dict[str, jax.Array]]:
        grads, metrics = part_gradient(part)
        return jax.tree.map(jnp.add, total, grads), metrics

    rows = Batch.of(rows)
    parts = rows.tokens.shape[1]
    if parts == 1:
        return part_gradient(jax.tree.map(lambda leaf: leaf[:, 0], rows))
    zeros = jax.tree.map(jnp.zeros_like, params)
    microbatches = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows)
    grads, metrics = lax.scan(add, zeros, microbatches)
    metrics = jax.tree.map(lambda x: jnp.mean(x) if x.ndim == 1 else x, metrics)
    return jax.tree.map(lambda g: g / parts, grads), metrics


def loss(
    setup: TrainingSetup, params: Params, fixed: Params | None, batch: Batch | jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the objective on a Batch of ``[B, ...]``, its parts)."""
    config, cfg, goal = setup.config, setup.model, setup.config.distill
    batch = Batch.of(batch)
    inputs, targets = batch.inputs, batch.targets
    dtype = jnp.dtype(config.dtype)
    if goal is None:
        params = _weights(setup, params, fixed, len(inputs))
        if batch.prompts is not None:
            return served.objective(setup, params, batch)
        if config.router is not None:
            return _with_routers(setup, config.router, params, batch)
        return _objective(setup, params, batch, config.remat)
    teacher = setup.teacher
    assert teacher is not None and fixed is not None
    params = rounded(params) if config.quantize else params
    if goal.objective == "mixers":
        return distill.mixer_loss(cfg, teacher, params, fixed, inputs, dtype, config.remat)
    params = _outside_of_layers(setup, params)
    x = hidden_states(cfg, params, inputs, dtype, run_layer=_each(setup, config.remat))
    teacher_x = hidden_states(teacher, fixed, inputs, dtype)
    return distillation(
        x,
        head(params)["weight"],
        targets,
        teacher_x,
        head(fixed)["weight"],
        kl_weight=goal.kl_weight,
        ce_weight=goal.ce_weight,
        temperature=goal.temperature,
        cap=cfg.logit_softcap,
        teacher_cap=teacher.logit_softcap,
    )


def _weights(setup: TrainingSetup, params: Params, fixed: Params | None, rows: int) -> Params:
    """Return the floats or frozen weights that the model multiplies ``rows`` rows by.

    For a head that drafts: what does not learn, with the head's parameters as "head".
    """
    config = setup.config
    if setup.head is not None:
        assert fixed is not None
        return {**fixed, "head": params}
    if config.lora is None:
        return rounded(params) if config.quantize else params
    assert fixed is not None
    return adapters.joined(setup.model, config.lora, fixed, params, rows, jnp.dtype(config.dtype))


def _objective(
    setup: TrainingSetup, params: Params, batch: Batch, remat: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the mean over a Batch's places of weight times cross entropy, or over its pairs of a
    preference's loss; its parts).
    """
    if setup.head is not None:
        assert setup.teacher is not None
        own = params["head"]
        return draft.objective(setup.head, setup.teacher, setup.config, own, params, batch)
    if batch.labels is not None:
        sums, tokens = _pair_sums(setup, params, batch, remat)
        goal, reference = setup.config.goal, jnp.asarray(batch.reference)
        return preference.objective(goal, sums, tokens, reference, jnp.asarray(batch.labels))
    x, weight, is_frozen = _states_and_head(setup, params, batch, remat)
    cap = setup.model.logit_softcap
    weights = None if batch.weights is None else jnp.asarray(batch.weights)
    return cross_entropy(x, weight, batch.targets, cap, weights, is_frozen=is_frozen)[0], {}


def _with_routers(
    setup: TrainingSetup, router: RouterConfig, params: Params, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the weighted cross entropy with the routers' losses added; its parts)."""
    cfg, dtype = setup.model, jnp.dtype(setup.config.dtype)
    remat, segments = setup.config.remat, batch.input_segments
    x, parts = routers.hidden_states(
        cfg, params, batch.inputs, dtype, remat, segments, _ops(setup), batch.input_begins
    )
    weight, is_frozen = _head(setup, params)
    weights = None if batch.weights is None else jnp.asarray(batch.weights)
    ce, _ = cross_entropy(x, weight, batch.targets, cfg.logit_softcap, weights, is_frozen=is_frozen)
    return ce + router.balance * parts["balance"] + router.z * parts["z"], {"ce": ce, **parts}


def _states_and_head(
    setup: TrainingSetup, params: Params, batch: Batch, remat: bool
) -> tuple[jax.Array, jax.Array, bool]:
    """Return (states before the head, its weight, whether that is frozen)."""
    cfg, dtype = setup.model, jnp.dtype(setup.config.dtype)
    params, segments = _outside_of_layers(setup, params), batch.input_segments
    run_layer, begins = _each(setup, remat), batch.input_begins
    x = hidden_states(cfg, params, batch.inputs, dtype, segments, run_layer, begins)
    return x, *_head(setup, params)


def _head(setup: TrainingSetup, params: Params) -> tuple[jax.Array, bool]:
    """Return (the head's weight in floats, whether it is frozen)."""
    return head_weight(params, jnp.dtype(setup.config.dtype)), setup.config.lora is not None


def _ops(setup: TrainingSetup) -> LayerOps:
    """Return who does the layers' products."""
    return Fp8() if setup.config.products == "fp8" else linear


def _each(setup: TrainingSetup, remat: bool) -> Callable[..., tuple[Stream, LayerState]]:
    """Return what a layer does: with FP8 products, with parts of its weights, or neither."""
    config = setup.config
    ops = _ops(setup)
    if fsdp.has_parts(config):
        dtype = config.dtype if config.products is None else None
        return functools.partial(fsdp.gathered_block, ops=ops, dtype=dtype, remat=remat)
    return functools.partial(recomputed_block if remat else block, ops=ops)


def _outside_of_layers(setup: TrainingSetup, params: Params) -> Params:
    """Return the parameters with embedding and head whole."""
    if not fsdp.has_parts(setup.config):
        return params
    layers = {name: node for name, node in params.items() if name.startswith("layer")}
    rest = {name: node for name, node in params.items() if name not in layers}
    return {**layers, **fsdp.gathered(setup.model, rest)}


def _pair_sums(
    setup: TrainingSetup, params: Params, batch: Batch, remat: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities of the pairs' answers, their numbers of tokens), ``[B, K, 2]``."""
    assert batch.segments is not None and batch.labels is not None
    x, weight, is_frozen = _states_and_head(setup, params, batch, remat)
    cap = setup.model.logit_softcap
    logprobs = token_logprobs(x, weight, batch.targets, cap, is_frozen=is_frozen)
    count, segments = 2 * batch.labels.shape[-1], jnp.asarray(batch.segments[..., 1:])
    return preference.sequence_sums(logprobs, jnp.asarray(batch.weights), segments, count)


@functools.partial(jax.jit, static_argnums=0)
def pair_logprobs(
    setup: TrainingSetup, params: Params, batch: Batch, fixed: Params | None = None
) -> jax.Array:
    """Return the log-probabilities of the answers of a Batch of pairs, float32 ``[B, K, 2]``."""
    params = _weights(setup, params, fixed, len(batch.tokens))
    return _pair_sums(setup, params, batch)[0]


@functools.partial(jax.jit, static_argnums=0)
def row_scores(
    setup: TrainingSetup, params: Params, tokens: jax.Array, fixed: Params | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities, entropies) of rows ``[B, T + 1]``, float32 ``[B, T]`` each."""
    batch = Batch(tokens)
    params = _weights(setup, params, fixed, len(tokens))
    x, weight, _ = _states_and_head(setup, params, batch, False)
    return token_scores(x, weight, batch.targets, setup.model.logit_softcap)


@functools.partial(jax.jit, static_argnums=0)
def validation_loss(
    setup: TrainingSetup,
    params: Params,
    batch: Batch | jax.Array,
    fixed: Params | None = None,
) -> jax.Array:
    """Return the mean over places of weight times cross entropy, or a preference's loss.

    batch: a Batch of ``[B, ...]``, or its tokens alone. fixed: the weights beneath adapters.
    """

    if is_staged(params):
        return pipeline.mean_loss(setup, _each(setup, False), params, Batch.of(batch))

    def mean(params: Params, fixed: Params | None, rows: Batch) -> jax.Array:
        return _objective(setup, _weights(setup, params, fixed, len(rows.tokens)), rows)[0]

    return fsdp.mean_on_rows(setup, mean)(params, fixed, Batch.of(batch))

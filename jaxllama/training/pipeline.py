"""Training with the layers divided among the devices of the "stage" axis (GPipe).

    state = jax.device_put(state, shardings(state, mesh))       1/S of the state on a device
    gradient(setup, each, params, batch)                        of a Batch of [M, rows, ...]

The M microbatches of a step pass the S stages one behind the other.  In every tick each stage runs
its layers on one microbatch and hands the result to the next stage.  Autodiff gives the backward
pass: the same ticks in reverse order.  With M = 4 and S = 3, a row for each stage:

    forward                      backward
    0 1 2 3 . .                  . . 3 2 1 0
    . 0 1 2 3 .                  . 3 2 1 0 .
    . . 0 1 2 3                  3 2 1 0 . .

A stage idles in S - 1 of M + S - 1 ticks (``idle_share``).  The last stage's results are then
divided among all stages by tokens, so that each computes 1/S of the loss and of the head's product.

Layers are stacked (``scan``).  A stage has its part of their leading axis: weights, gradients and
moments.  Embedding and head are divided by rows or columns and gathered once a step.  With "data"
above 1 every group of S devices has its own rows, and gradients are averaged.

Source: GPipe (arXiv 1811.06965).  Left out: schedules that begin the backward pass earlier, several
hosts, adapters, distillation, preferences and rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import stacked
from jaxllama.model.decoder import embed_tokens, final_norm, head
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import whole_rows
from jaxllama.parallel.mesh import DATA_AXIS, STAGE_AXIS
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.loss import cross_entropy
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params, ParamsDict, Tree

Each = Callable[..., tuple[Stream, LayerState]]  # what a layer does, as ``stacked.walk`` takes it


# What runs


def check_config(config: TrainConfig, stages: int) -> None:
    """Raise JaxLlamaError naming a setting that excludes stages."""
    where = f"mesh: stage={stages}"
    if not config.scan:
        raise JaxLlamaError(f"{where}: needs scan = true, which stacks the layers")
    if config.goal.kind not in ("pretrain", "sft"):
        raise JaxLlamaError(
            f"{where}: is for the objectives pretrain and sft, not {config.goal.kind}"
        )
    for key in ("fsdp", "lora", "quantize", "router", "samples"):
        if getattr(config, key):
            raise JaxLlamaError(f"{where}: excludes {key}")


def check_model(cfg: ModelConfig, stages: int) -> None:
    """Raise JaxLlamaError for a model whose layers the stages cannot share evenly."""
    found = list(stacked.runs(cfg))
    run = found[0]
    if len(found) > 1 or run.count == 1:
        raise JaxLlamaError(
            f"mesh: stage={stages}: the layers of {cfg.name} differ, so stages would differ: "
            f"{', '.join(name for part in found for name in part.names)[:80]}"
        )
    if run.count % stages:
        layers = "layers" if run.period == 1 else f"groups of {run.period} layers"
        raise JaxLlamaError(
            f"mesh: stage={stages} does not divide the {run.count} {layers} of {cfg.name}"
        )


def schedule(microbatches: int, stages: int) -> np.ndarray:
    """Return the microbatch of each stage in each tick, int32 ``[ticks, stages]``; idle is -1."""
    ticks = np.arange(microbatches + stages - 1, dtype=np.int32)
    numbers = ticks[:, None] - np.arange(stages, dtype=np.int32)
    return np.where((numbers >= 0) & (numbers < microbatches), numbers, np.int32(-1))


def idle_share(microbatches: int, stages: int) -> float:
    """Return the share of its time that a stage idles."""
    return float(np.mean(schedule(microbatches, stages) < 0))


# Where arrays lie


def shardings(tree: Tree, mesh: Mesh) -> Tree:
    """Return a NamedSharding for each leaf of stacked parameters, or of a pytree that has some."""
    specs = _specs(tree, mesh.shape[STAGE_AXIS])
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def _is_spec(leaf: Tree) -> bool:
    return isinstance(leaf, P)


def _specs(tree: Tree, stages: int) -> Tree:
    """Layers are divided by their number, and matrices outside of layers along their first axis
    that the stages divide."""

    def leaf_spec(keys: tuple[Tree, ...], leaf: jax.Array) -> P:
        names = [key.key for key in keys if hasattr(key, "key")]
        if any(str(name).startswith(stacked.PREFIX) for name in names):
            return P(STAGE_AXIS)
        if leaf.ndim < 2:
            return P()
        axis = next((i for i, size in enumerate(leaf.shape) if size % stages == 0), None)
        return P() if axis is None else P(*(None,) * axis, STAGE_AXIS)

    return jax.tree_util.tree_map_with_path(leaf_spec, tree)


# The computation


def gradient(
    setup: TrainingSetup, run_layer: Each, params: Params, batch: Batch
) -> tuple[Params, dict[str, jax.Array]]:
    """Return (gradients, {"loss"}) of a Batch of ``[microbatches, rows, ...]``.

    params: stacked, on a mesh with stages. run_layer: what a layer does. Raises JaxLlamaError if
    "data" does not divide the rows.
    """

    def run(params: Params, batch: Batch, specs: Tree) -> tuple[Params, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(
            lambda local: _loss(setup, run_layer, local, specs, batch)
        )(params)

        def averaged(spec: P, leaf: jax.Array) -> jax.Array:
            whole = leaf if STAGE_AXIS in spec else lax.psum(leaf, STAGE_AXIS)
            return lax.pmean(whole, DATA_AXIS)

        grads = jax.tree.map(averaged, specs, grads, is_leaf=_is_spec)
        return grads, {"loss": _total(value)}

    return _over_stages(run, params, batch, lambda specs: (specs, P()))


def mean_loss(setup: TrainingSetup, run_layer: Each, params: Params, rows: Batch) -> jax.Array:
    """Return the loss of a Batch of ``[rows, ...]``; arguments are ``gradient``'s."""

    def run(params: Params, batch: Batch, specs: Tree) -> jax.Array:
        stages, count = lax.axis_size(STAGE_AXIS), batch.tokens.shape[1]
        parts = math.gcd(count, stages)
        split = jax.tree.map(lambda leaf: leaf[0].reshape(parts, -1, *leaf.shape[2:]), batch)
        return _total(_loss(setup, run_layer, params, specs, split))

    batch = jax.tree.map(lambda leaf: leaf[None], rows)
    return _over_stages(run, params, batch, lambda specs: P())


def _total(value: jax.Array) -> jax.Array:
    return lax.pmean(lax.psum(value, STAGE_AXIS), DATA_AXIS)


def _over_stages(
    run: Callable[..., Tree], params: Params, batch: Batch, out: Callable[[Tree], Tree]
) -> Tree:
    """Return ``run(params, batch, specs)`` of each device's part."""
    mesh = jax.typeof(jax.tree.leaves(params)[0]).sharding.mesh
    data, rows = mesh.shape[DATA_AXIS], batch.tokens.shape[1]
    if rows % data:
        raise JaxLlamaError(f"mesh: data={data} does not divide the {rows} rows of a batch")
    specs = _specs(params, mesh.shape[STAGE_AXIS])
    return jax.shard_map(
        lambda params, batch: run(params, batch, specs),
        mesh=mesh,
        in_specs=(specs, P(None, DATA_AXIS)),
        out_specs=out(specs),
        check_vma=False,
    )(params, batch)


def _loss(
    setup: TrainingSetup, run_layer: Each, params: Params, specs: Tree, batch: Batch
) -> jax.Array:
    """Return this device's part of the loss: the parts' sum over the stages is the loss.

    batch: a Batch of ``[microbatches, rows, ...]``.
    """
    cfg, dtype = setup.model, jnp.dtype(setup.config.dtype)
    layers = {name: node for name, node in params.items() if name.startswith(stacked.PREFIX)}
    rest = {name: node for name, node in params.items() if name not in layers}
    whole = jax.tree.map(_gathered, {name: specs[name] for name in rest}, rest, is_leaf=_is_spec)
    embedded = embed_tokens(cfg, whole, batch.inputs, dtype)
    y = _through_stages(cfg, layers, embedded, batch.input_segments, run_layer)
    # Each stage takes an equal part of the last one's tokens.
    stages, stage = lax.axis_size(STAGE_AXIS), lax.axis_index(STAGE_AXIS)
    count = math.prod(y.shape[:-1])
    share = -(-count // stages)

    def flat(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(count, *leaf.shape[3:])
        return jnp.pad(leaf, [(0, share * stages - count)] + [(0, 0)] * (leaf.ndim - 1))

    def stage_leaf(leaf: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(flat(leaf), stage * share, share)[None]

    y = jnp.where(stage == stages - 1, y, jnp.zeros_like(y))
    x = lax.psum_scatter(flat(y), STAGE_AXIS, scatter_dimension=0, tiled=True)[None]
    x = final_norm(cfg, whole, Stream(x))
    weights = None if batch.weights is None else stage_leaf(jnp.asarray(batch.weights))
    if weights is None and share * stages > count:
        weights = stage_leaf(jnp.ones(batch.targets.shape, jnp.float32))
    weight = head(whole)["weight"]
    mean, _ = cross_entropy(x, weight, stage_leaf(batch.targets), cfg.logit_softcap, weights)
    return mean * (share / count)


def _gathered(spec: P, part: jax.Array) -> jax.Array:
    """Return a whole matrix; the gradients of its parts are summed over the stages."""
    if STAGE_AXIS not in spec:
        return part
    return lax.all_gather(part, STAGE_AXIS, axis=tuple(spec).index(STAGE_AXIS), tiled=True)


def _through_stages(
    cfg: ModelConfig,
    layers: ParamsDict,
    embedded: jax.Array,
    segments: jax.Array | None,
    run_layer: Each,
) -> jax.Array:
    """Return the last stage's results ``[M, B, T, D]``; other stages' have no meaning.

    layers: this stage's. embedded: ``[M, B, T, D]``. segments: int32 ``[M, B, T]`` or None.
    """
    stages, stage = lax.axis_size(STAGE_AXIS), lax.axis_index(STAGE_AXIS)
    microbatches, batch, length, _ = embedded.shape
    onward = [(i, i + 1) for i in range(stages - 1)]

    def tick(received: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        entering, numbers = now
        tick_segments = None if segments is None else segments[jnp.maximum(numbers[stage], 0)]
        at = whole_rows(cfg, batch, length, tick_segments)
        x = jnp.where(stage == 0, entering, received)
        y = stacked.walk(cfg, layers, Stream(x), at, run_layer).total
        return lax.ppermute(y, STAGE_AXIS, onward), y

    # Idle stages compute, too: on the last microbatch again, or on the first one's embeddings.
    again = jnp.broadcast_to(embedded[-1:], (stages - 1, *embedded.shape[1:]))
    numbers = jnp.asarray(schedule(microbatches, stages))
    entering = jnp.concatenate((embedded, again))
    _, found = lax.scan(tick, lax.stop_gradient(embedded[0]), (entering, numbers))
    return found[stages - 1 :]

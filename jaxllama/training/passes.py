"""Batches through the compiled functions: one update, a validation, a reference's pass.

Rows lie on the devices of a mesh, if there is one. Parameters lie on each, or with ``fsdp`` in
parts.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxllama.parallel.mesh import DATA_AXIS, STAGE_AXIS, is_staged
from jaxllama.training import fsdp, pipeline
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.packing import PackedRows
from jaxllama.training.prompts import PromptFile
from jaxllama.training.sampler import Rewarded, Sampler
from jaxllama.training.start import Data, TrainingSetup
from jaxllama.training.step import (
    State,
    first_weights,
    init_state,
    pair_logprobs,
    per_layer,
    update,
    validation_loss,
    without_weights,
)
from jaxllama.typing import Params, ParamsDict, Tree

Rows = TokenFile | PackedRows | Rewarded


def sharding(mesh: Mesh | None, rows: int | None = None) -> Sharding:
    """Return a sharding: replicated, or with the rows along axis ``rows`` split over devices."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    axes = () if rows is None else (None,) * rows + (DATA_AXIS,)
    return NamedSharding(mesh, PartitionSpec(*axes))


def placed(setup: TrainingSetup, tree: Tree, mesh: Mesh | None) -> Tree:
    """Return where each leaf of a state or of parameters lies: shardings in the tree's form."""
    if mesh is None:
        return jax.tree.map(lambda _: sharding(None), tree)
    if STAGE_AXIS in mesh.shape:
        return pipeline.shardings(tree, mesh)
    return fsdp.shardings(setup, tree, mesh)


def first_state(setup: TrainingSetup, params: Params, mesh: Mesh | None) -> State:
    """Return the state before the first update, on its devices.

    On a mesh no device has the whole state at any time: the moments are made where they lie.
    params: per layer; on a mesh arrays that ``scan`` stacks are deleted as they are copied. Raises
    JaxLlamaError as ``pipeline.check_model`` does.
    """
    if mesh is not None and STAGE_AXIS in mesh.shape:
        pipeline.check_model(setup.model, mesh.shape[STAGE_AXIS])
    if mesh is None:
        # The device is explicit, as in a restored state, so that both run the same program.
        return jax.device_put(init_state(setup, params), sharding(None))
    where = placed(setup, jax.eval_shape(functools.partial(init_state, setup), params), mesh)
    leaves, tree = jax.tree.flatten(first_weights(setup, params, release=True))
    for number, place in enumerate(jax.tree.leaves(where["params"])):
        leaves[number] = jax.block_until_ready(jax.device_put(leaves[number], place))
    weights = jax.tree.unflatten(tree, leaves)
    rest = {name: place for name, place in where.items() if name != "params"}
    state = jax.jit(functools.partial(without_weights, setup), out_shardings=rest)(weights)
    return {"params": weights, **state}


def stored(state: Tree) -> Tree:
    """Return a state or its parameters as checkpoints have them.

    Stages' layers are first brought to the host, because no device has room for all of them.
    """
    if not is_staged(state):
        return per_layer(state)
    return jax.device_put(per_layer(jax.device_get(state)), _host())


def on_disk(setup: TrainingSetup, tree: Tree, mesh: Mesh | None) -> Tree:
    """Return where the leaves of a state in the form of ``stored`` are restored to."""
    if mesh is not None and STAGE_AXIS in mesh.shape:
        return jax.tree.map(lambda _: _host(), tree)
    return placed(setup, tree, mesh)


def _host() -> Sharding:
    return SingleDeviceSharding(jax.devices("cpu")[0])


def rows_of(setup: TrainingSetup, params: ParamsDict, fixed: Tree, data: Data) -> tuple[Rows, Rows]:
    """Return the rows to learn from and the held-out ones.

    params: the first ones. Pairs get their reference's log-probabilities, and prompts an engine.
    """
    training, held_out = data.split(setup.config.data.held_out)
    if isinstance(training, PromptFile) and isinstance(held_out, PromptFile):
        sampler = Sampler(setup, params, fixed, training.tokenizer)
        return Rewarded(sampler, training), Rewarded(sampler, held_out)
    assert not isinstance(training, PromptFile) and not isinstance(held_out, PromptFile)
    if setup.config.goal.has_reference:
        assert isinstance(training, PackedRows) and isinstance(held_out, PackedRows)
        training = _with_reference(setup, params, fixed, training)
        held_out = _with_reference(setup, params, fixed, held_out)
    return training, held_out


def _with_reference(
    setup: TrainingSetup, params: Params, fixed: Tree, rows: PackedRows
) -> PackedRows:
    """Return rows of pairs with their log-probabilities under the first parameters."""
    config = setup.config
    params, fixed = jax.device_put((params, fixed), jax.devices()[0])
    found = np.zeros((len(rows.units), 2), np.float32)
    size = config.batch_size // config.microbatches
    for number, batch in enumerate(rows.validation(size, config.sequence_length)):
        values = np.asarray(pair_logprobs(setup, params, batch, fixed))
        for members, value in zip(rows.members[number * size :], values, strict=False):
            found[members] = value[: len(members)]
    return dataclasses.replace(rows, reference=found)


def _batch(config: TrainConfig, data: TokenFile | PackedRows, step: int) -> Batch:
    """Return the Batch of a step, ``[microbatches, rows, ...]``."""
    rows = data.batch(step, config.batch_size, config.sequence_length, config.seed)
    parts = config.microbatches
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), Batch.of(rows))


def run_step(
    setup: TrainingSetup,
    state: State,
    fixed: Tree,
    data: Rows,
    step: int,
    mesh: Mesh | None,
) -> tuple[State, Tree]:
    """Return (state after the step, its metrics); ``state`` is donated."""
    if isinstance(data, Rewarded):
        return data.sampler.step(state, fixed, data.prompts, step)
    batch = _placed_batch(_batch(setup.config, data, step), mesh, 1)
    return update(setup, state, fixed, batch)


def _placed_batch(batch: Batch, mesh: Mesh | None, rows: int) -> Batch:
    """Return the batch on the devices; rows: the axis that they share.

    cuDNN's calls of single segments are not divided, so a batch on a mesh has no ``begins``.
    """
    batch = batch if mesh is None else batch._replace(begins=None)
    return jax.device_put(batch, sharding(mesh, rows))


def validate(
    setup: TrainingSetup,
    params: ParamsDict,
    data: Rows,
    mesh: Mesh | None,
    fixed: Tree = None,
) -> float:
    """Return the mean loss over the held-out tokens that count, in batches as large as a
    microbatch. For prompts it is the mean reward of greedy answers.
    """
    if isinstance(data, Rewarded):
        return data.sampler.mean_reward(params, fixed, data.prompts)
    config = setup.config
    size = config.batch_size // config.microbatches
    devices = 1 if mesh is None else mesh.shape[DATA_AXIS]
    losses, shares = [], []
    for rows in data.validation(size, config.sequence_length, devices):
        batch = Batch.of(rows)
        counted = batch.weights if batch.labels is None else batch.labels
        shares.append(1.0 if counted is None else float(np.mean(np.abs(counted))))
        batch = _placed_batch(batch, mesh, 0)
        losses.append(validation_loss(setup, params, batch, fixed))
    return float(np.mean(jax.device_get(losses)) / np.mean(shares))

"""Estimate the time and memory of a training run from a few of its own steps.

    estimate(config, data) -> Estimate

The steps are compiled and run as in ``loop``, on the run's first batches. Nothing is written, and a
later run takes their programs from jax's cache. Left out: writing checkpoints and the model.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxllama.model.flops import parameters
from jaxllama.training import draft
from jaxllama.training.config import TrainConfig
from jaxllama.training.packing import Conversations
from jaxllama.training.passes import first_state, rows_of, run_step, sharding, validate
from jaxllama.training.prompts import PromptFile
from jaxllama.training.start import Data, begin
from jaxllama.typing import Tree

STEPS = 3  # steps that are timed after the first, which compiles


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a run.

    start_seconds: for weights and compiling. step_seconds, validation_seconds: for one of each.
    seconds: for the whole run. state_bytes: weights and optimizer state on each device.
    """

    parameters: int
    tokens: int
    state_bytes: int
    start_seconds: float
    step_seconds: float
    validation_seconds: float
    seconds: float


def estimate(config: TrainConfig, data: Data, mesh: Mesh | None = None) -> Estimate:
    """Return the estimate of a run. Raises JaxLlamaError as ``loop.train`` does for wrong data."""
    answering = 0.0
    if isinstance(data, PromptFile) and config.goal.kind == "draft":
        data, answering = _with_answers(config, data)
    begun = time.perf_counter()
    setup, params, fixed = begin(config, data, False)
    state = first_state(setup, params, mesh)
    fixed = jax.device_put(fixed, sharding(mesh))
    training, held_out = rows_of(setup, state["params"], fixed, data)
    marks = []
    for step in range(STEPS + 1):
        state, metrics = run_step(setup, state, fixed, training, step, mesh)
        jax.block_until_ready((state, metrics))
        marks.append(time.perf_counter())
    a_step = (marks[-1] - marks[0]) / STEPS
    start = marks[0] - begun - a_step
    times, once = 0, 0.0
    if len(held_out):
        every = config.validate_every
        times = -(-config.steps // every) if every else 1
        compiled = time.perf_counter()
        validate(setup, state["params"], held_out, mesh, fixed)
        middle = time.perf_counter()
        validate(setup, state["params"], held_out, mesh, fixed)
        once = time.perf_counter() - middle
        start += max(0.0, middle - compiled - once)
    count = parameters(setup.model)
    if setup.head is not None:
        count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    return Estimate(
        parameters=count,
        tokens=config.steps * config.batch_size * config.sequence_length,
        state_bytes=_bytes_of_a_device((state, fixed) if config.lora or setup.head else state),
        start_seconds=start + answering,
        step_seconds=a_step,
        validation_seconds=once,
        seconds=start + answering + config.steps * a_step + times * once,
    )


def _with_answers(config: TrainConfig, data: PromptFile) -> tuple[Conversations, float]:
    """Return the answers to some prompts, and an estimate of the seconds for all of them."""
    few = config.data.held_out + config.batch_size
    some = dataclasses.replace(data, prompts=data.prompts[:few])
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answers = draft.answered(config, some, Path(folder), progress=False)
    return answers, (time.perf_counter() - begun) * len(data) / len(some)


def _bytes_of_a_device(tree: Tree) -> int:
    """Return the bytes that the first device has of a tree's arrays."""
    return sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
    )

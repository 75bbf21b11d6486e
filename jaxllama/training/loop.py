"""train: from a TrainConfig and a folder to a trained model, through any number of interruptions.

    update, log, now and then validate and save; at the end write model/

A run is a function of its configuration and its data. A step's number determines its batch and
learning rate, so a checkpoint needs only parameters, moments and step. On a CPU the curve after a
resume equals the curve of an uninterrupted run to the last bit. (On a GPU that needs
XLA_FLAGS=--xla_gpu_deterministic_ops=true, because scatters there add in any order.)

Metrics are fetched one step late, so that the device never waits for the host. Ctrl-C saves the
current step before it ends the run. A run whose ``steps`` have grown continues under the longer
schedule.

The devices of a mesh share the rows of every step, and each holds all weights and moments. A mesh
is not part of a run: the run may resume on another mesh, with the same curve up to the order in
which gradients are added. Left out: several hosts, splitting the weights or moments, early
stopping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import load as packed
from jaxllama.errors import JaxLlamaError
from jaxllama.loading import enable_compilation_cache
from jaxllama.model.flops import flops_per_token, peak_flops
from jaxllama.parallel.mesh import DATA_AXIS, make_mesh
from jaxllama.progress import Working, working
from jaxllama.training import report
from jaxllama.training.checkpoint import Checkpoints
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.quantization_aware import quantized
from jaxllama.training.run_directory import RunDirectory
from jaxllama.training.start import TrainingSetup, begin
from jaxllama.training.step import (
    State,
    in_memory,
    init_state,
    per_layer,
    update,
    validation_loss,
)
from jaxllama.typing import JsonObject, Params, Tree


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    metrics: one dict a step (step, tokens, loss and its parts, grad_norm, learning_rate, seconds,
    tokens_per_second, mfu or None). validation: dicts of step, tokens and validation_loss. model:
    the folder for ``jaxllama.load``.
    """

    directory: Path
    metrics: list[JsonObject]
    validation: list[JsonObject]

    @property
    def model(self) -> Path:
        return self.directory / "model"


def train(
    config: TrainConfig,
    directory: str | Path,
    *,
    mesh: str | Mesh | None = None,
    progress: bool = False,
) -> TrainResult:
    """Train a model, resume its training, or return the result of a finished run.

    Parameters
    ----------
    config : TrainConfig
        The settings.
    directory : str or Path
        Folder of the run.
    mesh : str, Mesh or None
        Devices that share every step's rows, such as "data=2".
    progress : bool
        Whether to show a bar on stderr.

    Returns
    -------
    TrainResult

    Raises
    ------
    JaxLlamaError
        For a folder of another run; for data, a checkpoint or a mesh that contradicts the
        configuration; and for a loss that is not finite.
    """
    report.new_figure()  # a missing package is reported now and not at the end
    enable_compilation_cache()
    grid = None if mesh is None else data_mesh(config, mesh)
    data = TokenFile.open(config.data.tokens)
    run = RunDirectory(directory, config, data.sha256)
    try:
        if not run.model.exists():
            _run(config, data, run, grid, progress)
        return _result(run)
    finally:
        run.close()


def _result(run: RunDirectory) -> TrainResult:
    rows = run.rows()
    return TrainResult(
        run.path,
        [row for row in rows if "loss" in row],
        [row for row in rows if "validation_loss" in row],
    )


def data_mesh(config: TrainConfig, mesh: str | Mesh) -> Mesh:
    """Return the mesh. Raises JaxLlamaError naming a size that the mesh does not divide."""
    grid = make_mesh(mesh)
    data, model = grid.shape.values()
    rows = config.batch_size // config.microbatches
    if model > 1:
        raise JaxLlamaError(f"mesh: model={model}: training splits the data only; allowed: 1")
    if rows % data:
        raise JaxLlamaError(f"mesh: data={data} does not divide the {rows} rows of a microbatch")
    if len({device.process_index for device in grid.devices.flat}) > 1:
        raise JaxLlamaError("mesh: training runs on the devices of one host")
    held_out = max(config.data.validation_tokens - 1, 0) // config.sequence_length
    if 0 < held_out < data:
        raise JaxLlamaError(
            f"mesh: data={data}: data.validation_tokens are {held_out} rows; each device needs one"
        )
    return grid


def _run(
    config: TrainConfig, data: TokenFile, run: RunDirectory, mesh: Mesh | None, progress: bool
) -> None:
    checkpoints = Checkpoints(run.path / "checkpoints", config.keep_checkpoints)
    try:
        setup, params, teacher = begin(config, data, progress)
        # The devices are explicit, as in a restored state, so that both run the same program.
        whole = sharding(mesh)
        state = jax.device_put(init_state(setup, params), whole)
        teacher = jax.device_put(teacher, whole)
        del params
        first = checkpoints.latest() or 0
        if first:
            shapes = jax.eval_shape(per_layer, state)
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
            )
            state = jax.device_put(in_memory(setup, checkpoints.restore(first, like)), whole)
        run.keep_until(first)
        training, held_out = data.split(config.data.validation_tokens)
        log = _Log(setup, run, first, 1 if mesh is None else mesh.size)
        bar = working(str(run.path), config.steps, progress, unit="steps", done=first)
        with bar as bar, _interruptible(bar) as asked_to_stop:
            if first:
                bar.say(f"{run.path}: goes on after step {first} of {config.steps}")
            bar.note("compiling")
            for step in range(first, config.steps):
                state, metrics = run_step(setup, state, teacher, training, step, mesh)
                log.put(step + 1, metrics, bar)
                done = step + 1
                last = done == config.steps
                if _is_due(done, config.validate_every, last) and len(held_out):
                    log.flush(bar)
                    log.validation(done, validate(setup, state["params"], held_out, mesh), bar)
                if _is_due(done, config.checkpoint_every, last) or asked_to_stop.is_set():
                    log.flush(bar)
                    run.sync()
                    checkpoints.save(done, per_layer(state))
                if asked_to_stop.is_set() and not last:
                    bar.say(
                        f"{run.path}: step {done} is saved; the same command goes on from there"
                    )
                    raise KeyboardInterrupt
        with working("writing the model", show=progress):
            _finish(setup, state, data, run)
    finally:
        checkpoints.close()


@contextlib.contextmanager
def _interruptible(bar: Working) -> Generator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that the current step is not lost.

    A second Ctrl-C, or one outside of the main thread, raises as usual.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        asked.set()
        bar.say("stopping after this step; Ctrl-C again stops at once and loses it")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def sharding(mesh: Mesh | None, rows: int | None = None) -> Sharding:
    """Return a sharding: replicated, or with the rows along axis ``rows`` split over devices."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    axes = () if rows is None else (None,) * rows + (DATA_AXIS,)
    return NamedSharding(mesh, PartitionSpec(*axes))


def _is_due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _batch(config: TrainConfig, data: TokenFile, step: int) -> np.ndarray:
    """Return the batch of a step, int32 ``[microbatches, rows, T + 1]``."""
    rows = data.batch(step, config.batch_size, config.sequence_length, config.seed)
    return rows.reshape(config.microbatches, -1, rows.shape[-1])


def run_step(
    setup: TrainingSetup, state: State, teacher: Tree, data: TokenFile, step: int, mesh: Mesh | None
) -> tuple[State, Tree]:
    """Return (state after the step, its metrics); ``state`` is donated."""
    batch = jax.device_put(_batch(setup.config, data, step), sharding(mesh, 1))
    return update(setup, state, teacher, batch)


def validate(setup: TrainingSetup, params: Params, data: TokenFile, mesh: Mesh | None) -> float:
    """Return the mean loss over the held-out windows, in whole batches as large as a microbatch."""
    config = setup.config
    length = config.sequence_length
    count = data.windows(length)
    size = min(config.batch_size // config.microbatches, count)
    size -= size % (1 if mesh is None else mesh.shape[DATA_AXIS])
    losses = []
    for first in range(0, count - size + 1, size):
        rows = np.stack([data.window(first + row, length) for row in range(size)])
        rows = jax.device_put(rows, sharding(mesh, 0))
        losses.append(validation_loss(setup, params, rows))
    return float(np.mean(jax.device_get(losses)))


def _finish(setup: TrainingSetup, state: State, data: TokenFile, run: RunDirectory) -> None:
    """Draw the loss, and then write the model, whose presence ends the run."""
    result = _result(run)
    report.draw(run.path / "loss.png", result.metrics, result.validation)
    params = per_layer(state)["params"]
    if setup.config.quantize is not None:
        packed.save(run.model, setup.model, quantized(params), data.tokenizer_files)
        return
    params = jax.tree.map(lambda leaf: leaf.astype(setup.config.dtype), params)
    hf.save(run.model, setup.model, params, data.tokenizer_files)


class _Log:
    """Writes a step's metrics while the next step runs."""

    def __init__(self, setup: TrainingSetup, run: RunDirectory, first: int, devices: int) -> None:
        config = setup.config
        self._run = run
        self._tokens = config.batch_size * config.sequence_length
        self._flops = flops_per_token(setup.model, config.sequence_length)
        peak = peak_flops(config.peak_tflops)
        self._peak = None if peak is None else peak * devices
        self._waiting: tuple[int, dict[str, jax.Array]] | None = None
        self._began = time.perf_counter()

    def put(self, step: int, metrics: dict[str, jax.Array], bar: Working) -> None:
        self.flush(bar)
        self._waiting = (step, metrics)

    def flush(self, bar: Working) -> None:
        if self._waiting is None:
            return
        (step, metrics), self._waiting = self._waiting, None
        values = {key: float(value) for key, value in jax.device_get(metrics).items()}
        seconds = time.perf_counter() - self._began
        self._began = time.perf_counter()
        if not math.isfinite(values["loss"]):
            raise JaxLlamaError(
                f"{self._run.path}: the loss is {values['loss']} at step {step}; a lower "
                "learning_rate, or more optimizer.warmup_steps, may help"
            )
        rate = self._tokens / seconds
        row = {
            "step": step,
            "tokens": step * self._tokens,
            **values,
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": None if self._peak is None else rate * self._flops / self._peak,
        }
        self._run.append([row])
        bar()
        bar.note(report.told(row))

    def validation(self, step: int, loss: float, bar: Working) -> None:
        tokens = step * self._tokens
        self._run.append([{"step": step, "tokens": tokens, "validation_loss": loss}])
        bar.say(f"step {step}: validation loss {loss:.4f}")
        self._began = time.perf_counter()  # the time of validating does not count as training

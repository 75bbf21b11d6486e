"""train: from a TrainConfig and a folder to a trained model, through any number of interruptions.

    update, log, now and then validate and save; at the end write model/

A run is a function of its configuration and its data. A step's number determines its batch and
learning rate, so a checkpoint needs only parameters, moments and step. On a CPU the curve after a
resume equals the curve of an uninterrupted run to the last bit. (On a GPU that needs
XLA_FLAGS=--xla_gpu_deterministic_ops=true, because scatters there add in any order.)

Metrics are fetched one step late, so that the device never waits for the host. Ctrl-C saves the
current step before it ends the run. A run whose ``steps`` have grown continues under the longer
schedule.

The devices of a mesh share the rows of every step, and with ``fsdp`` the weights and moments too.
Those of a mesh with stages share the layers (``pipeline``). A mesh is not part of a run: the run
may resume on another mesh, with the same curve up to the order in which gradients are added. Left
out: several hosts, early stopping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Generator
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxllama.checkpoints.hf import eagle3
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.errors import JaxLlamaError
from jaxllama.loading import enable_compilation_cache, load
from jaxllama.model.flops import flops_per_token, peak_flops
from jaxllama.parallel.mesh import DATA_AXIS, STAGE_AXIS, check_axes, make_mesh, make_stages
from jaxllama.progress import Working, working
from jaxllama.training import adapters, draft, pipeline, report, samples
from jaxllama.training.checkpoint import Checkpoints, CheckpointWarning
from jaxllama.training.config import TrainConfig
from jaxllama.training.packing import PackedRows
from jaxllama.training.passes import (
    Rows,
    first_state,
    on_disk,
    placed,
    rows_of,
    run_step,
    sharding,
    stored,
    validate,
)
from jaxllama.training.prompts import PromptFile
from jaxllama.training.quantization_aware import quantized
from jaxllama.training.run_directory import RunDirectory
from jaxllama.training.sampler import Rewarded
from jaxllama.training.start import Data, TrainingSetup, begin, open_data, tokenizer_of
from jaxllama.training.step import State, in_memory, per_layer
from jaxllama.typing import JsonObject, Params, ParamsDict


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    metrics: one dict a step (step, tokens, loss and its parts, grad_norm, learning_rate, seconds,
    tokens_per_second, mfu or None). validation: dicts of step, tokens and validation_loss, or with
    [rollout] validation_reward. model: the folder for ``jaxllama.load``, or with [lora] the one for
    its ``adapters``.
    """

    directory: Path
    metrics: list[JsonObject]
    validation: list[JsonObject]
    model: Path


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
        Devices that share every step's rows, such as "data=2", or the layers, "stage=4".
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
    data = open_data(config)
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
        [row for row in rows if "validation_loss" in row or "validation_reward" in row],
        run.model,
    )


def data_mesh(config: TrainConfig, mesh: str | Mesh) -> Mesh:
    """Return the mesh. Raises JaxLlamaError naming a size that the mesh does not divide."""
    stages = make_stages(mesh)
    grid = make_mesh(mesh) if stages is None else stages
    if stages is not None:
        pipeline.check_config(config, stages.shape[STAGE_AXIS])
    check_axes(grid)
    data = grid.shape[DATA_AXIS]
    rows = config.batch_size // config.microbatches
    if config.data.prompts is not None:
        raise JaxLlamaError("mesh: a run with data.prompts uses one device")
    if rows % data:
        raise JaxLlamaError(
            f"mesh: data={data} does not divide the {rows} rows of a microbatch: make batch_size / "
            f"microbatches a multiple of {data}"
        )
    if len({device.process_index for device in grid.devices.flat}) > 1:
        raise JaxLlamaError("mesh: training runs on the devices of one host")
    held_out = max(config.data.validation_tokens - 1, 0) // config.sequence_length
    if 0 < held_out < data:
        raise JaxLlamaError(
            f"mesh: data={data}: data.validation_tokens are {held_out} rows; each device needs one"
        )
    return grid


def _run(
    config: TrainConfig, data: Data, run: RunDirectory, mesh: Mesh | None, progress: bool
) -> None:
    checkpoints = Checkpoints(run.path / "checkpoints", config.keep_checkpoints)
    # The best, and the best up to the checkpoint from which a stopped run goes on.
    best = Checkpoints(run.path / "best", 2) if config.keep_best else None
    first, sizes = _whole(checkpoints, best)
    if config.goal.kind == "draft":
        assert isinstance(data, PromptFile)
        data = draft.answered(config, data, run.path, progress)
    setup, params, fixed = begin(config, data, progress)
    state = first_state(setup, params, mesh)
    fixed = jax.device_put(fixed, sharding(mesh))
    training, held_out = rows_of(setup, state["params"], fixed, data)
    if best is not None and not len(held_out):
        raise JaxLlamaError("keep_best = True: no held-out answer begins within sequence_length")
    shows = config.samples is not None or config.rollout is not None
    del params
    if first:
        shapes = jax.eval_shape(per_layer, state)
        like = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            on_disk(setup, shapes, mesh),
        )
        where = placed(setup, state, mesh)
        state = jax.device_put(in_memory(setup, checkpoints.restore(first, like)), where)
    run.keep(sizes)
    checkpoints.keep_until(first)
    if best is not None:
        best.keep_until(first)
    log = _Log(setup, run, first, 1 if mesh is None else mesh.size, training.density)
    bar = working(str(run.path), config.steps, progress, unit="steps", done=first)
    with bar as bar, _interruptible(bar) as asked_to_stop:
        if first:
            bar.say(f"{run.path}: goes on after step {first} of {config.steps}")
        if isinstance(training, PackedRows) and training.cut:
            bar.say(f"{training.cut} conversations are longer than a row and lose their end")
        if config.rollout is not None and len(held_out) and not first:
            log.validation(0, validate(setup, state["params"], held_out, mesh, fixed), bar)
        if shows and not first:
            _sample(setup, state, fixed, data, _shown(training, held_out), run, 0, bar)
        bar.note("compiling")
        for step in range(first, config.steps):
            state, metrics = run_step(setup, state, fixed, training, step, mesh)
            log.put(step + 1, metrics, bar)
            done = step + 1
            last = done == config.steps
            is_due = _is_due(done, config.validate_every, last)
            if is_due and len(held_out):
                log.flush(bar)
                value = validate(setup, state["params"], held_out, mesh, fixed)
                is_best = run.is_best(value, log.validated)
                is_best = is_best or (best is not None and best.latest() is None)
                log.validation(done, value, bar)
                if not last:
                    _draw(config, run)
                    log.restart_clock()
                if best is not None and is_best:
                    best.keep_until(checkpoints.latest() or 0)
                    best.save(done, stored(state["params"]))
            if is_due and shows and (len(held_out) or config.rollout):
                log.flush(bar)
                _sample(setup, state, fixed, data, _shown(training, held_out), run, done, bar)
                log.restart_clock()
            if _is_due(done, config.checkpoint_every, last) or asked_to_stop.is_set():
                log.flush(bar)
                checkpoints.save(done, stored(state), run.synced())
            if asked_to_stop.is_set() and not last:
                bar.say(f"{run.path}: step {done} is saved; the same command goes on from there")
                raise KeyboardInterrupt
    with working("writing the model", show=progress):
        learned = stored(state["params"])
        if best is not None:
            learned = best.restore(best.latest_or_raise(), learned)
        _finish(setup, learned, fixed, data, run)


def _whole(checkpoints: Checkpoints, best: Checkpoints | None) -> tuple[int, dict[str, int]]:
    """Return the step to go on from, and the sizes of the run's files then."""
    first, sizes = checkpoints.newest_whole()
    steps = [] if best is None else [step for step in best.steps() if step <= first]
    if best is None or not steps or (damage := best.damage(step := steps[-1])) is None:
        return first, sizes
    warnings.warn(f"{damage}: made again", CheckpointWarning, stacklevel=2)
    return checkpoints.newest_whole(before=step)


def _shown(training: Rows, held_out: Rows) -> Rows:
    """Return the rows whose answers are shown: held-out ones, if there are any."""
    return held_out if len(held_out) else training


def _sample(
    setup: TrainingSetup,
    state: State,
    fixed: ParamsDict | None,
    data: Data,
    rows: Rows,
    run: RunDirectory,
    step: int,
    bar: Working,
) -> None:
    """Let the model answer the configuration's questions, or the first of its prompts."""
    if isinstance(rows, Rewarded):
        lines = rows.sampler.shown(state["params"], fixed, rows.prompts, step)
        samples.write_rewarded(run.path, lines)
        return
    tokenizer = tokenizer_of(data)
    device = jax.devices()[0]
    params, frozen = per_layer(state)["params"], None if fixed is None else per_layer(fixed)
    params, frozen = jax.device_put((params, frozen), device)
    lm = samples.model_of(setup, params, frozen, tokenizer)
    for answer in samples.write(run.path, setup, lm, step):
        bar.say(f"step {step}: {answer[:100]!r}")


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


def _is_due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _draw(config: TrainConfig, run: RunDirectory) -> None:
    """Draw what the run has measured so far."""
    result = _result(run)
    if config.rollout is not None:
        report.draw_rewards(run.path / "rewards.png", result.metrics, result.validation)
    report.draw(run.path / "loss.png", result.metrics, result.validation)


def _finish(
    setup: TrainingSetup, params: Params, fixed: Params | None, data: Data, run: RunDirectory
) -> None:
    """Draw the loss, and then write the model or adapter, whose presence ends the run."""
    config = setup.config
    _draw(config, run)
    if setup.head is not None:
        assert fixed is not None
        eagle3.save(run.model, draft.drafter_of(config, setup.head, params, fixed))
        return
    if config.lora is not None:
        if config.lora.merge:
            _save_merged(setup, params, run)
        adapters.save(run.model, setup.model, config.lora, params, config.init_from)
        return
    with tempfile.TemporaryDirectory() as scratch:
        files = data.save_tokenizer(Path(scratch))
        if config.quantize is not None:
            packed.save(run.model, setup.model, quantized(params), files)
            return
        params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
        hf.save(run.model, setup.model, params, files)


def _save_merged(setup: TrainingSetup, params: Params, run: RunDirectory) -> None:
    """Write the base model in floats with the adapter added, as merged/."""
    config, merged = setup.config, run.path / "merged"
    assert config.lora is not None and config.init_from is not None
    if merged.exists():  # an interrupted end of this run wrote it
        return
    with tempfile.TemporaryDirectory(dir=run.path) as scratch:
        adapter = Path(scratch) / "adapter"
        adapters.save(adapter, setup.model, config.lora, params, config.init_from)
        lm = load(config.init_from, config.dtype, adapters={"run": adapter}, merge=True)
        lm.save(merged)


class _Log:
    """Writes a step's metrics while the next step runs."""

    def __init__(
        self, setup: TrainingSetup, run: RunDirectory, first: int, devices: int, density: float
    ) -> None:
        """density: share of a batch's places that hold tokens."""
        config = setup.config
        self._run = run
        self._tokens = round(config.batch_size * config.sequence_length * density)
        is_frozen = config.lora is not None
        self._flops = flops_per_token(setup.model, config.sequence_length, is_frozen)
        # Such a step spends its time on more than its update.
        has_more = config.rollout is not None or setup.head is not None
        peak = None if has_more else peak_flops(config.peak_tflops)
        self.validated = "validation_reward" if config.rollout else "validation_loss"
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
        bar.note(report.metrics_line(row))

    def validation(self, step: int, value: float, bar: Working) -> None:
        tokens = step * self._tokens
        self._run.append([{"step": step, "tokens": tokens, self.validated: value}])
        bar.say(f"step {step}: {self.validated.replace('_', ' ')} {value:.4f}")
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out the time of validating and sampling, which does not count as training."""
        self._began = time.perf_counter()

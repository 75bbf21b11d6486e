"""``jaxllama plan``: the best policy for this machine, with its prediction and a measurement.

    run(PlanRequest(source, task, ...)) -> report (a dict)        table(report) -> text

A task that fits on the device runs there, and only computation is calibrated for it. Otherwise the
machine is calibrated for the model's layers once (``planner.calibrate``), and ``planner.solve``
finds the policy, unless it is given. The model is loaded under the policy, and the task runs with
every load, store and computation timed. The figures are stored, so that a machine measures the same
task once.

At most ``MEASURED`` of ``new_tokens`` steps run. The rate is extrapolated from the prefill and the
mean step, as in the prediction. If everything stays on the device and the predicted prefill exceeds
``LONG`` seconds, the measured prompts are shorter. The measured prefill is then scaled by the ratio
of both lengths' operations, and the report says so.

If measuring would take more than ``LONGEST`` seconds, by the prediction, only the prediction is
reported. A policy that is given, ``timeline`` and ``recalibrate`` measure always. A preset without
published weights has random ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints import hub
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded.executor import kv_dtype_of, offloaded
from jaxllama.files import text_digest, write_text
from jaxllama.language_model import LanguageModel
from jaxllama.loading import (
    default_dtype,
    enable_compilation_cache,
    load,
    read_config,
    stored_scheme,
)
from jaxllama.model.flops import flops_per_token
from jaxllama.offload.expert_places import ExpertUse
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import available_memory
from jaxllama.offload.timeline import NO_RECORD, Recorder, TimelineBar, draw
from jaxllama.placement import disk_folder, scheme_of
from jaxllama.planner.accounting import batches_of, model_bytes
from jaxllama.planner.calibrate import Progress, calibrate
from jaxllama.planner.calibrate_experts import measured_use
from jaxllama.planner.cost import (
    LANES,
    MemoryLimits,
    PlannerSettings,
    Prediction,
    Task,
    need_of,
    predict,
)
from jaxllama.planner.experts import expert_counts, experts_step, shares_of
from jaxllama.planner.fitting import Calibration
from jaxllama.planner.solve import check_fits, solve
from jaxllama.planner.trial import Watch, start_run, timed_step
from jaxllama.typing import JsonObject
from pallas_kernels.qtensor import packed_bytes

MEASURED = 8  # number of decode steps that are timed
WARM = 3  # number of steps that compile the programs, the prefill among them
LONG = 1.5  # seconds: a longer prefill is measured with shorter prompts
LONGEST = 120.0  # seconds
USE_ROWS, USE_WIDTH = 16, 128  # rows and tokens a row that measure the experts' use
SHORTEST = 64  # smallest number of tokens of those prompts


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The task that is planned, and the resources that it may use.

    source, random, revision, dtype, scheme, kv_dtype: the model, as for ``load``; the scheme of a
    packed checkpoint is its own. policy: the policy to measure, by default the solver's. base:
    fields that the solver does not search (``planner.solve``). limits: by default those of the
    device, the system and the disk.
    timeline: file of a picture of a step. recalibrate: measure the machine and the task again.
    calibrate_on: a text that measures the use of a mixture's experts, which ranks them. The table
    is stored, and the policy names its file. expert_use: such a table.
    """

    source: str | Path
    task: Task = Task(8, 512, 32)
    policy: Policy | None = None
    base: Policy | None = None
    limits: MemoryLimits = MemoryLimits()
    random: bool = False
    revision: str | None = None
    dtype: DTypeLike | None = None
    scheme: str | None = None
    kv_dtype: DTypeLike | None = None
    timeline: Path | None = None
    recalibrate: bool = False
    calibrate_on: Path | None = None
    expert_use: Path | None = None


def run(asked: PlanRequest, progress: Progress = lambda _: None) -> JsonObject:
    """Plan a task and measure it; see the module docstring."""
    enable_compilation_cache()
    dtype = jnp.dtype(default_dtype() if asked.dtype is None else asked.dtype)
    source, revision = asked.source, asked.revision
    random = asked.random or hub.is_unpublished(source)
    policy, expert_use, timeline = asked.policy, asked.expert_use, asked.timeline
    base = policy or asked.base or Policy()
    task = asked.task
    task = dataclasses.replace(task, chunk=base.prefill_batch_size or task.chunk)
    cfg = read_config(source, random, revision).replace(attn_sparsity=base.attn_sparsity)
    if task.capacity > cfg.max_position:
        raise JaxLlamaError(
            f"plan: {task.prompt} + {task.new} tokens exceed the context of {cfg.max_position}"
        )
    if cfg.experts is None and (asked.calibrate_on or expert_use):
        raise JaxLlamaError(
            f"plan: {cfg.name} is no mixture, so no experts are placed by their use"
        )
    stored = None if random else stored_scheme(source, revision)
    scheme = scheme_of(base, asked.scheme)
    if None not in (scheme, stored):
        raise JaxLlamaError(
            f"{source}: its weights are already quantized, so {scheme} is not for it"
        )
    scheme = scheme or stored
    if asked.calibrate_on is not None:
        progress(f"measuring the experts' use: {asked.calibrate_on}")
        expert_use = use_on(source, asked.calibrate_on, dtype, asked.scheme, random, revision)
    if expert_use is not None:
        ExpertUse.load(expert_use)  # a file that is none is an error before anything is measured
    settings = PlannerSettings(dtype, kv_dtype_of(base, asked.kv_dtype, dtype), scheme)
    limits = _limits(asked.limits)
    if policy is None:
        check_fits(cfg, base, task, limits, settings)
        policy = resident(cfg, task, limits, settings, base)
    costs = calibrate(
        cfg,
        settings,
        chunk=task.chunk,
        moves=policy is None or policy.moves,
        fresh=asked.recalibrate,
        progress=progress,
    )
    memory = available_memory()
    if memory is not None and model_bytes(cfg, dtype, scheme) > memory:
        costs = costs.cold()  # the page cache will not hold the disk's share
    if policy is None:
        use = "" if expert_use is None else str(expert_use)
        policy = solve(cfg, costs, task, limits, settings, base, use)
    expected = predict(cfg, policy, costs, task, settings)
    need = need_of(cfg, policy, task, settings)
    trial, prefill = shortened(cfg, policy, task, expected)
    seconds = 2 * prefill + (WARM + MEASURED) * expected.step
    known = measured_file(cfg, policy, task, settings)
    anew = timeline is not None or asked.recalibrate
    found: JsonObject = {}
    if known.is_file() and not anew:
        progress(f"measured before: {policy}; --recalibrate measures anew")
        found = json.loads(known.read_text(encoding="utf-8"))
    elif seconds > LONGEST and not anew and asked.policy is None:
        progress(f"not measured, which takes {seconds / 60:.0f} minutes: --policy '{policy}' does")
    else:
        progress(
            f"measuring: {policy}; predicted: prefill {expected.prefill:.3g} s, step "
            f"{expected.step:.3g} s, {expected.tokens_per_second:.3g} tokens/s; about "
            f"{seconds:.0f} s after the weights"
        )
        rounding = None if policy.compress_weight else asked.scheme
        lm = load(source, dtype, rounding, policy=policy, random=random, revision=revision)
        found, events = measure(lm, trial, settings, progress)
        found["prompt_tokens"] = trial.prompt
        write_text(known, json.dumps(found))
        if timeline is not None:
            draw(events, timeline, f"{cfg.name}: {policy}")
    measured_prompt = found.get("prompt_tokens", task.prompt)
    scale = _operations(cfg, task.prompt) / _operations(cfg, measured_prompt)
    prefill = rate = None
    if found:
        prefill = found["prefill"] * scale
        block_seconds = prefill + (task.new - 1) * found["step"]
        rate = task.rows * task.new / (expected.blocks * block_seconds)
    lanes = found.get("lanes", {})
    return {
        "model": cfg.name,
        "policy": str(policy),
        "rows": task.rows,
        "prompt_tokens": task.prompt,
        "new_tokens": task.new,
        "measured_prompt_tokens": measured_prompt,
        "prefill_scale": scale,
        "prefill_seconds": {"predicted": expected.prefill, "measured": prefill},
        "step_seconds": {"predicted": expected.step, "measured": found.get("step")},
        "tokens_per_second": {"predicted": expected.tokens_per_second, "measured": rate},
        "lanes": {
            lane: {"predicted": expected.lanes[lane], "measured": lanes.get(lane)} for lane in LANES
        },
        "experts": _experts(cfg, policy, costs, task, found),
        "bytes": {
            "device": {
                "predicted": need.device,
                "measured": found.get("device_bytes"),
                "in_programs": need.programs,
                "sees_programs": found.get("sees_programs", True),
            },
            "host": {"predicted": need.host, "measured": None},
            "disk": {"predicted": need.disk, "measured": found.get("disk_bytes")},
        },
    }


def _experts(
    cfg: ModelConfig, policy: Policy, costs: Calibration, task: Task, found: JsonObject
) -> JsonObject | None:
    """Return means of a layer and step, of experts that lie one by one: their number, their slots
    on the device, and how many a step loads and leaves to the CPU.
    """
    if not policy.experts or costs.experts is None:
        return None
    batches, rows = batches_of(policy, min(policy.block_size, task.rows))
    steps = experts_step(cfg, costs.experts, policy, (rows,) * batches, rows)
    places = [place for place, _ in shares_of(cfg, policy)]
    return {
        "count": statistics.fmean(expert_counts(cfg).values()),
        "slots": statistics.fmean(len(place.device) for place in places),
        "loaded": {
            "predicted": statistics.fmean(step.loads for step in steps),
            "measured": found.get("experts_loaded"),
        },
        "computed": {
            "predicted": statistics.fmean(step.computed for step in steps),
            "measured": found.get("experts_computed"),
        },
    }


def use_on(
    source: str | Path,
    text: Path,
    dtype: DTypeLike,
    scheme: str | None,
    random: bool,
    revision: str | None,
) -> Path:
    """Return the file of the experts' use on the beginning of a text, measured with a model whose
    weights stream.

    Raises JaxLlamaError if the text cannot be read, or is shorter than two tokens.
    """
    try:
        words = text.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise JaxLlamaError(f"{text}: {error.strerror or error}") from None
    streams = Policy.parse(f"0 100 100 0 100 0 experts=0/100 gpu_batch_size={USE_ROWS}")
    lm = load(source, dtype, scheme, policy=streams, random=random, revision=revision)
    most = USE_ROWS * USE_WIDTH
    tokens = (
        list(words.encode()[:most])
        if lm.tokenizer is None
        else lm.tokenizer.encode(words[: 16 * most])
    )
    tokens = np.asarray(tokens[:most], np.int64) % lm.config.vocab_size
    width = min(USE_WIDTH, len(tokens))
    if width < 2:
        raise JaxLlamaError(f"{text}: too short to measure the use of experts")
    rows = tokens[: len(tokens) // width * width].reshape(-1, width)
    name = text_digest(repr((lm.config, words[: 16 * most], scheme)))
    path = hub.cache_dir() / "offload" / f"expert-use-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured_use(lm, rows).save(path)
    return path


def _operations(cfg: ModelConfig, tokens: int) -> float:
    """Return a number to which a prefill's operations are proportional."""
    return flops_per_token(cfg, tokens) * tokens


def shortened(
    cfg: ModelConfig, policy: Policy, task: Task, expected: Prediction
) -> tuple[Task, float]:
    """Return the task that is measured, and the seconds of its prefill.

    It has shorter prompts in a cache of the same capacity if the policy moves nothing and the
    prefill would take more than ``LONG`` seconds. expected: the prediction for ``task``.
    """
    prompt, seconds = task.prompt, expected.prefill
    while not policy.moves and prompt // 2 >= SHORTEST and seconds > LONG:
        prompt //= 2
        seconds = expected.prefill * _operations(cfg, prompt) / _operations(cfg, task.prompt)
    return dataclasses.replace(task, prompt=prompt, new=task.capacity - prompt), seconds


def measured_file(cfg: ModelConfig, policy: Policy, task: Task, settings: PlannerSettings) -> Path:
    """Return the file of a task's measurement. Its speed depends on shapes, not on weights."""
    words = (cfg.replace(name=""), str(policy), task, settings)
    words += (jax.devices()[0].device_kind, os.cpu_count(), jax.__version__, LONG)
    if policy.expert_use:
        words += (hashlib.sha256(Path(policy.expert_use).read_bytes()).hexdigest(),)
    name = text_digest(repr(words))
    folder = hub.cache_dir() / "offload"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"measured-{name}.json"


def resident(
    cfg: ModelConfig, task: Task, limits: MemoryLimits, settings: PlannerSettings, base: Policy
) -> Policy | None:
    """Return the policy that keeps everything on the device, in one batch.

    Returns None if that does not fit or ``base`` moves something.
    """
    one_batch = min(128, 1 << (task.rows - 1).bit_length())
    policy = dataclasses.replace(base, gpu_batch_size=one_batch)
    if limits.device is None:  # a CPU's memory is the host's
        limits = dataclasses.replace(limits, device=available_memory())
    # Only a policy whose arrays fit compiles the programs, whose bytes count too.
    needs = (need_of(cfg, policy, task, settings, programs) for programs in (0, None))
    return None if policy.moves or not all(map(limits.allow, needs)) else policy


def measure(
    lm: LanguageModel,
    task: Task,
    settings: PlannerSettings,
    progress: Progress = lambda _: None,
    steps: int = MEASURED,
) -> tuple[JsonObject, list[TimelineBar]]:
    """Measure a block of the task.

    Returns (report, events of a step). The report has seconds of the prefill, of a step and of its
    lanes, and bytes. Device bytes are the allocator's peak. If the allocator keeps no count, they
    are the peak of live arrays, without the memory inside programs.
    """
    executor = offloaded(lm.executor)
    rows = min(executor.policy.block_size, task.rows)
    warm = start_run(lm, rows, task, settings.kv_dtype)
    progress("measuring: first prefill and steps, which compile the programs")
    with Watch(functools.partial(held_on_device, lm)) as watch:
        taken = [timed_step(warm) for _ in range(min(WARM, task.new))]
    del warm
    run = start_run(lm, rows, task, settings.kv_dtype)
    count = max(1, min(steps, task.new - 2))
    left = taken[0] + (count + 1) * taken[-1]
    progress(f"measuring: prefill and {count} steps, at most {left:.1f} s more")
    prefill = timed_step(run)
    run.experts.reset()
    step = statistics.fmean(timed_step(run) for _ in range(count))
    layers = count * max(1, len(expert_counts(lm.config)))
    loaded, computed = run.experts.loads / layers, run.experts.computed[0] / layers
    run.record = Recorder()
    timed_step(run)
    events, run.record = run.record.finish(), NO_RECORD
    lanes = {lane: sum(event.seconds for event in events if event.lane == lane) for lane in LANES}
    disk = executor.store.disk.nbytes if need_disk(executor.policy) else 0
    report = {
        "prefill": prefill,
        "step": step,
        "lanes": lanes,
        "experts_loaded": loaded,
        "experts_computed": computed,
        "disk_bytes": disk,
        "device_bytes": max(watch.most, held_on_device(lm)),
        "sees_programs": sees_programs(lm),
    }
    return report, events


def need_disk(policy: Policy) -> bool:
    return any(share.disk > 0 for share in (policy.weights, policy.cache, policy.activations))


def held_on_device(lm: LanguageModel) -> int:
    if sees_programs(lm):
        stats = offloaded(lm.executor).store.device.memory_stats() or {}
        return stats["peak_bytes_in_use"]
    kind = offloaded(lm.executor).store.on_device.memory_kind
    return sum(
        packed_bytes(array.size, array.dtype)
        for array in jax.live_arrays()
        if array.sharding.memory_kind == kind and jnp.issubdtype(array.dtype, np.number)
    )


def sees_programs(lm: LanguageModel) -> bool:
    """Return whether the device's measured bytes include the memory inside programs."""
    return "peak_bytes_in_use" in (offloaded(lm.executor).store.device.memory_stats() or {})


def _limits(asked: MemoryLimits) -> MemoryLimits:
    """Return the limits, those that are None from the device, the system and the disk."""
    stats = jax.devices()[0].memory_stats() or {}
    folder = disk_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return MemoryLimits(
        stats.get("bytes_limit") if asked.device is None else asked.device,
        available_memory() if asked.host is None else asked.host,
        shutil.disk_usage(folder).free if asked.disk is None else asked.disk,
    )


def table(report: JsonObject) -> str:
    """Return the report as text."""

    def row(name: str, pair: JsonObject, unit: float, words: str) -> str:
        both = [
            f"{pair[key] / unit:12.2f}" if pair[key] is not None else f"{'':>12}"
            for key in ("predicted", "measured")
        ]
        return f"{name:18}{''.join(both)}  {words}"

    lines = [f"policy            {report['policy']}", f"{'':18}{'predicted':>12}{'measured':>12}"]
    lines.append(row("prefill", report["prefill_seconds"], 1e-3, "ms"))
    lines.append(row("step", report["step_seconds"], 1e-3, "ms"))
    for lane, pair in report["lanes"].items():
        lines.append(row(f"  {lane}", pair, 1e-3, "ms a step"))
    if (experts := report["experts"]) is not None:
        slots = f"{experts['slots']:g} slots for {experts['count']:g} experts"
        lines.append(row("experts loaded", experts["loaded"], 1, f"a layer and step; {slots}"))
        lines.append(row("experts on CPU", experts["computed"], 1, "a layer and step"))
    lines.append(row("throughput", report["tokens_per_second"], 1, "tokens/s"))
    for tier, pair in report["bytes"].items():
        words = "MB"
        if not pair.get("sees_programs", True):
            words += f"; {pair['in_programs'] / 1e6:.2f} of them in programs, not measured here"
        lines.append(row(f"{tier} memory" if tier != "disk" else tier, pair, 1e6, words))
    if report["measured_prompt_tokens"] != report["prompt_tokens"]:
        lines.append(
            f"measured with prompts of {report['measured_prompt_tokens']} tokens; the prefill of "
            f"{report['prompt_tokens']} is {report['prefill_scale']:.1f} times that, by operations"
        )
    return "\n".join(lines)

"""The solver beside a sweep: ``python -m benchmarks.offload_sweep [--points 200] [--out
JSON]``.

The machine is calibrated for a small model, and four fifths of its needs are allowed on the
device; the solver chooses a policy, and ``--points`` others drawn from a grid are run: a prefill
and ``STEPS`` decode steps each, and once before where they need other programs.  The best few and
the solver's then run again in turns, because the best of many noisy figures is a lucky one.  Told
are

    best, solver     tokens a second of the task in those turns, medians, and their ratio
    errors           predicted / measured - 1 of a decode step, a prefill and the task's rate: the
                     solver's, and of all points the median and the worst size and quantiles
    peak             policies that held more device memory than was predicted

Policies with the same shares of weights run on one model, one after the other.  Peaks are the
allocator's where it keeps count: that is a process's, so a policy's is known only when it is a new
one; policies are run in order of what is predicted for them, and the calibration is a process of
its own.  Elsewhere peaks are those of live arrays, looked at whenever a load, a store or a dispatch
ends.

On a GPU most of the time would go into compiling.  ``--programs I/N`` compiles the I-th of N parts
of what the points need, and ends: run N processes of it first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllama.config import ModelConfig, load_config
from jaxllama.evaluation.plan import held_on_device
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.offload.policy import PERCENTAGES, Policy, Shares
from jaxllama.planner.accounting import Footprint
from jaxllama.planner.calibrate import calibrate, lower
from jaxllama.planner.cost import (
    MemoryLimits,
    PlannerSettings,
    Task,
    need_of,
    predict,
    program_bytes,
)
from jaxllama.planner.fitting import Calibration
from jaxllama.planner.solve import solve
from jaxllama.planner.trial import repeated_model, start_run, timed_step

TASK = Task(32, 128, 16)
STEPS = 4
FINALISTS, TURNS = 5, 3
MEASURES = ("step", "prefill", "rate")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_WEIGHTS = [(d, host) for d in (0, 10, 20, 30, 40, 50, 60, 70) for host in (100 - d, 90 - d)]
_CACHE = ((100, 0), (50, 50), (0, 100), (0, 50))
_HIDDEN = ((100, 0), (0, 100))
_BATCHES = ((8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (32, 1))


def model_of(width: int, layers: int = 8) -> ModelConfig:
    return load_config("llama-3.1-8b").replace(
        name="sweep",
        n_layers=layers,
        layer_types=("attention",) * layers,
        d_model=width,
        d_ff=3 * width,
        n_heads=width // 64,
        n_kv_heads=width // 128,
        head_dim=64,
        vocab_size=8192,
    )


def grid() -> Iterator[Policy]:
    for *shares, (size, count) in itertools.product(_WEIGHTS, _CACHE, _HIDDEN, _BATCHES):
        values = dict(zip(PERCENTAGES, map(float, itertools.chain(*shares)), strict=True))
        yield Policy(**values, gpu_batch_size=size, num_gpu_batches=count)


class _Peak:
    """A recorder that looks at live device bytes whenever something ends."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.bytes = lm, 0

    def _look(self) -> None:
        self.bytes = max(self.bytes, held_on_device(self.lm))

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[None]:
        yield
        self._look()

    @contextlib.contextmanager
    def watching(self, *_: Any) -> Iterator[list[Any]]:
        yield []
        self._look()


def run_point(
    lm: LanguageModel, settings: PlannerSettings, before: int, is_new: bool
) -> dict[str, Any]:
    """Measured seconds of the prefill and of a step, tokens a second of the task, peak.

    before: the allocator's peak until now, that of making the model not counted.  is_new: run once
    before, so that nothing is left to be compiled.
    """
    policy = offloaded(lm.executor).policy
    rows = min(policy.block_size, TASK.rows)
    peak = _Peak(lm)
    if is_new:
        run = start_run(lm, rows, TASK, settings.kv_dtype)
        timed_step(run)
        timed_step(run)
    run = start_run(lm, rows, TASK, settings.kv_dtype)
    run.record = peak
    prefill = timed_step(run)
    step = lower([timed_step(run) for _ in range(STEPS)][1:])
    held = max(peak.bytes, held_on_device(lm))
    blocks = -(-TASK.rows // rows)
    seconds = blocks * (prefill + (TASK.new - 1) * step)
    return {
        "prefill": prefill,
        "step": step,
        "rate": TASK.rows * TASK.new / seconds,
        "peak": held if held > before else None,
    }


def _need(cfg: ModelConfig, policy: Policy, settings: PlannerSettings) -> Footprint:
    """As the solver counts."""
    return need_of(cfg, policy, TASK, settings, program_bytes(cfg, policy, TASK, settings))


def compile_programs(cfg: ModelConfig, settings: PlannerSettings, part: int, parts: int) -> None:
    """Fill the compilation cache with a part of the programs: the first is those of calibrating,
    and in the others two layers run under policies that have everything that the grid has."""
    if part == 0:
        _calibrate(cfg, settings)
        if parts > 1:
            _programs_of(cfg, settings, {size for size, _ in _BATCHES})
        return
    layers = ("attention",) * 2
    small = cfg.replace(n_layers=len(layers), layer_types=layers)

    def work(policy: Policy) -> None:
        lm = repeated_model(small, settings.dtype, policy, settings.scheme)
        run = start_run(lm, min(policy.block_size, TASK.rows), TASK, settings.kv_dtype)
        for _ in range(3):
            timed_step(run)

    found = {(p.cache, p.activations, p.gpu_batch_size, p.num_gpu_batches): p for p in grid()}
    weights = itertools.cycle(dict.fromkeys(policy.weights for policy in grid()))
    for index, (policy, shares) in enumerate(zip(found.values(), weights)):  # noqa: B905
        if index % (parts - 1) == part - 1:
            work(
                dataclasses.replace(policy, weights_device=shares.device, weights_host=shares.host)
            )


def _programs_of(cfg: ModelConfig, settings: PlannerSettings, sizes: set[int]) -> dict[int, int]:
    """Bytes of the largest program, by rows of a batch."""
    return {
        size: need_of(cfg, Policy(gpu_batch_size=size), TASK, settings).programs
        for size in sorted(sizes)
    }


def _calibrate(cfg: ModelConfig, settings: PlannerSettings, fresh: bool = True) -> Calibration:
    return calibrate(
        cfg,
        settings,
        chunk=TASK.chunk,
        fresh=fresh,
        progress=lambda text: print(text, file=sys.stderr),
    )


def _order(policies: list[Policy], needs: dict[Policy, int]) -> list[Policy]:
    """See the module docstring."""
    least: dict[Shares, int] = {}
    for policy in policies:
        least[policy.weights] = min(needs[policy], least.get(policy.weights, needs[policy]))
    return sorted(policies, key=lambda p: (least[p.weights], p.weights, needs[p]))


class _Models:
    """The model of a policy: the last one if the weights are where that one has them."""

    def __init__(self, cfg: ModelConfig, settings: PlannerSettings) -> None:
        self._cfg, self._settings = cfg, settings
        self._last: LanguageModel | None = None

    def __call__(self, policy: Policy) -> LanguageModel:
        if self._last is None or offloaded(self._last.executor).policy.weights != policy.weights:
            self._last = None
            gc.collect()
            self._last = repeated_model(self._cfg, self._settings.dtype, policy)
        executor = dataclasses.replace(offloaded(self._last.executor), policy=policy)
        return dataclasses.replace(self._last, executor=executor)


def allocator_peak() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--points", type=int, default=200)
    options.add_argument("--width", type=int, help="of the model: 512 on a CPU, or 2048")
    options.add_argument("--layers", type=int, default=12, help="1.3 GB of weights on a GPU")
    options.add_argument("--seconds", type=float, default=1e9, help="points stop then")
    options.add_argument("--programs", metavar="I/N", help="compile only; 0/1 only calibrates")
    options.add_argument("--calibrated", action="store_true", help="before, so not anew")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    begun = time.perf_counter()
    enable_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    dtype, on_cpu = default_dtype(), jax.default_backend() == "cpu"
    cfg = model_of(args.width or (512 if on_cpu else 2048), args.layers)
    settings = PlannerSettings(dtype, dtype)
    if args.programs:
        part, _, parts = args.programs.partition("/")
        compile_programs(cfg, settings, int(part), int(parts))
        print(f"compiled after {time.perf_counter() - begun:.0f} s")
        return
    resident = need_of(cfg, Policy(gpu_batch_size=8, num_gpu_batches=4), TASK, settings, 0)
    limits = MemoryLimits(device=4 * resident.device // 5)
    if not args.calibrated:
        shape = ["--width", str(cfg.d_model), "--layers", str(cfg.n_layers)]
        command = [
            sys.executable,
            "-m",
            "benchmarks.offload_sweep",
            "--programs",
            "0/1",
            *shape,
        ]
        subprocess.run(command, check=True)
    costs = _calibrate(cfg, settings, fresh=False)
    print(f"calibrated after {time.perf_counter() - begun:.0f} s: {costs}")
    chosen = solve(cfg, costs, TASK, limits, settings)
    print(f"solved after {time.perf_counter() - begun:.0f} s: {chosen}")
    policies = [policy for policy in grid() if limits.allow(_need(cfg, policy, settings))]
    if not policies:
        raise SystemExit("no policy of the grid fits: a wider or deeper model has more to choose")
    policies = random.Random(0).sample(policies, min(args.points, len(policies)))
    sizes = {min(policy.gpu_batch_size, TASK.rows) for policy in [chosen, *policies]}
    programs = _programs_of(cfg, settings, sizes)
    needs = {
        policy: need_of(
            cfg, policy, TASK, settings, programs[min(policy.gpu_batch_size, TASK.rows)]
        ).device
        for policy in {chosen, *policies}
    }
    print(f"needs known after {time.perf_counter() - begun:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "model": repr(cfg),
        "limit": limits.device,
        "programs": programs,
        "calibration": dataclasses.asdict(costs),
    }

    models = _Models(cfg, settings)
    compiled: set[Any] = set()

    def run(policy: Policy) -> None:
        expected = predict(cfg, policy, costs, TASK, settings)
        lm = models(policy)
        shapes = {policy.weights, (policy.cache, policy.activations, policy.gpu_batch_size)}
        is_new = not shapes <= compiled
        compiled.update(shapes)
        found.append(
            {
                "policy": str(policy),
                "solver": policy == chosen,
                "need": needs[policy],
                **run_point(lm, settings, allocator_peak(), is_new),
                "predicted_step": expected.step,
                "predicted_prefill": expected.prefill,
                "predicted_rate": expected.tokens_per_second,
            }
        )
        report["points"] = found
        if args.out is not None:
            args.out.write_text(json.dumps(report))

    for policy in _order(policies, needs):
        if time.perf_counter() - begun < args.seconds:
            run(policy)
    count = len(found)
    print(f"{count} points after {time.perf_counter() - begun:.0f} s", flush=True)
    ranked = sorted(found, key=lambda point: -point["rate"])
    finalists = [chosen, *(Policy.parse(point["policy"]) for point in ranked[:FINALISTS])]
    for _ in range(TURNS):
        for policy in finalists:
            run(policy)
    report["summary"] = summary(found[:count], found[count:])
    print(json.dumps(report["summary"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report))
    print(f"done after {time.perf_counter() - begun:.0f} s")


def summary(points: list[dict[str, Any]], finals: list[dict[str, Any]]) -> dict[str, Any]:
    """See the module docstring."""

    def median(name: str, policy: str) -> float:
        return statistics.median(point[name] for point in finals if point["policy"] == policy)

    def errors(name: str) -> dict[str, float]:
        found = np.array([point[f"predicted_{name}"] / point[name] - 1 for point in points])
        quantiles = np.quantile(found, QUANTILES)
        return {
            "median_size": float(np.median(np.abs(found))),
            "worst_size": float(np.abs(found).max()),
            "within_20_percent": float(np.mean(np.abs(found) <= 0.2)),
            **{f"{q:.0%}": float(x) for q, x in zip(QUANTILES, quantiles, strict=True)},
        }

    [own] = {point["policy"] for point in finals if point["solver"]}
    others = {point["policy"] for point in finals if not point["solver"]} or {own}
    best = max(others, key=lambda policy: median("rate", policy))
    shares = [
        point["peak"] / point["need"] for point in points + finals if point["peak"] is not None
    ]
    return {
        "points": len(points),
        "best": {"policy": best, "rate": median("rate", best)},
        "solver": {
            "policy": own,
            "rate": median("rate", own),
            "share_of_best": median("rate", own) / median("rate", best),
            "step": median("step", own),
            **{
                f"{name}_error": median(f"predicted_{name}", own) / median(name, own) - 1
                for name in MEASURES
            },
        },
        "errors": {name: errors(name) for name in MEASURES},
        "peaks": len(shares),
        "most_used_of_prediction": max(shares, default=None),
        "over_prediction": sum(share > 1 for share in shares),
    }


if __name__ == "__main__":
    main()

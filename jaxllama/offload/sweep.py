"""The solver beside a sweep: ``python -m jaxllama.offload.sweep [--points 200] [--out JSON]``.

The machine is calibrated for a small model, and three quarters of its needs are allowed on the
device; the solver chooses a policy, and ``--points`` others drawn from a grid are run: prefill and
``STEPS`` decode steps each.  The best few and the solver's then run again in turns, because the
best of many noisy figures is a lucky one.  Told are

    best, solver     tokens a second of the task in those turns, medians, and their ratio
    step error       predicted / measured - 1 of a decode step: the solver's, and quantiles of all
    peak             policies that held more device memory than was predicted

Peaks are the allocator's where it keeps count: that is a process's, so a policy's is known only
when it is a new one, and policies are run in order of what is predicted for them (in passes,
each through a part of them).  Elsewhere peaks are those of live arrays, looked at whenever a load,
a store or a dispatch ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllama.config import ModelConfig, load_config
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.offload.accounting import Footprint
from jaxllama.offload.bench import repeated_model, start_run
from jaxllama.offload.calibration import calibrate, lower
from jaxllama.offload.cost_model import (
    Limits,
    Settings,
    Task,
    need_of,
    predict,
    program_bytes,
    solve,
)  # fmt: skip
from jaxllama.offload.model import OffloadedModel
from jaxllama.offload.plan import held_on_device
from jaxllama.offload.policy import PERCENTAGES, Policy
from jaxllama.offload.run import Run

TASK = Task(32, 64, 16)
STEPS = 6
PASSES = 8
FINALISTS, TURNS = 5, 5
_WEIGHTS = [(device, host) for device in (0, 10, 20, 30, 40, 60) for host in (100 - device, 40)]
_CACHE = ((100, 0), (50, 50), (0, 100), (0, 50))
_HIDDEN = ((100, 0), (0, 100))
_BATCHES = ((8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (32, 1))


def model_of(width: int) -> ModelConfig:
    return load_config("llama-3.1-8b").replace(
        name="sweep", n_layers=8, layer_types=("attention",) * 8, d_model=width, d_ff=3 * width,
        n_heads=width // 64, n_kv_heads=width // 128, head_dim=64, vocab_size=8192,
    )  # fmt: skip


def grid() -> Iterator[Policy]:
    for *shares, (size, count) in itertools.product(_WEIGHTS, _CACHE, _HIDDEN, _BATCHES):
        values = dict(zip(PERCENTAGES, map(float, itertools.chain(*shares)), strict=True))
        yield Policy(**values, gpu_batch_size=size, num_gpu_batches=count)


class _Peak:
    """A recorder that looks at live device bytes whenever something ends."""

    def __init__(self, lm: OffloadedModel) -> None:
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


def run_point(cfg: ModelConfig, policy: Policy, settings: Settings) -> dict[str, Any]:
    """Measured seconds of the prefill and of a step, tokens a second of the task, peak."""
    lm = repeated_model(cfg, settings.dtype, policy, settings.scheme)
    before = (lm.store.device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    rows = min(policy.block_size, TASK.rows)
    peak = _Peak(lm)
    warm = start_run(lm, rows, TASK, settings.kv_dtype)
    warm.record = peak
    for _ in range(2):
        _step(warm)
    del warm
    prefills = []
    for _ in range(2):
        run = start_run(lm, rows, TASK, settings.kv_dtype)
        prefills.append(_step(run))
    prefill = min(prefills)
    step = lower([_step(run) for _ in range(STEPS)][1:])
    held = max(peak.bytes, held_on_device(lm))
    blocks = -(-TASK.rows // rows)
    seconds = blocks * (prefill + (TASK.new - 1) * step)
    return {
        "prefill": prefill, "step": step, "rate": TASK.rows * TASK.new / seconds,
        "peak": held if held > before else None,
    }  # fmt: skip


def _step(run: Run) -> float:
    begin = time.perf_counter()
    run.step()
    run.end_rows()
    return time.perf_counter() - begin


def _need(cfg: ModelConfig, policy: Policy, settings: Settings) -> Footprint:
    """As the solver counts."""
    return need_of(cfg, policy, TASK, settings, program_bytes(cfg, policy, TASK, settings))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--points", type=int, default=200)
    options.add_argument("--width", type=int, help="of the model: 512 on a CPU, or 2048")
    options.add_argument("--seconds", type=float, default=1e9, help="points stop then")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    begun = time.perf_counter()
    enable_compilation_cache()
    dtype = default_dtype()
    width = args.width or (512 if jax.default_backend() == "cpu" else 2048)
    cfg, settings = model_of(width), Settings(dtype, dtype)
    resident = need_of(cfg, Policy(gpu_batch_size=8, num_gpu_batches=4), TASK, settings, 0)
    limits = Limits(device=3 * resident.device // 4)
    costs = calibrate(
        cfg, dtype, chunk=TASK.chunk, fresh=True, progress=lambda text: print(text, file=sys.stderr)
    )
    chosen = solve(cfg, costs, TASK, limits, settings)
    print(f"calibrated after {time.perf_counter() - begun:.0f} s; solved: {chosen}\n{costs}")
    policies = [policy for policy in grid() if limits.allow(_need(cfg, policy, settings))]
    policies = random.Random(0).sample(policies, min(args.points, len(policies)))
    programs = {  # compiled once for batches of one size
        size: need_of(cfg, Policy(gpu_batch_size=size), TASK, settings).programs
        for size in {min(policy.gpu_batch_size, TASK.rows) for policy in [chosen, *policies]}
    }
    needs = {
        policy: need_of(
            cfg, policy, TASK, settings, programs[min(policy.gpu_batch_size, TASK.rows)]
        ).device
        for policy in {chosen, *policies}
    }
    print(f"needs known after {time.perf_counter() - begun:.0f} s", flush=True)
    found: list[dict[str, Any]] = []

    def run(policy: Policy) -> None:
        expected = predict(cfg, policy, costs, TASK, settings)
        gc.collect()
        found.append({
            "policy": str(policy), "solver": policy == chosen, "need": needs[policy],
            **run_point(cfg, policy, settings),
            "predicted_step": expected.step, "predicted_prefill": expected.prefill,
            "predicted_rate": expected.tokens_per_second,
        })  # fmt: skip
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=0))

    for first in range(PASSES):
        for policy in sorted(policies[first::PASSES], key=needs.__getitem__):
            if time.perf_counter() - begun < args.seconds:
                run(policy)
    count = len(found)
    ranked = sorted(found, key=lambda point: -point["rate"])
    finalists = [chosen, *(Policy.parse(point["policy"]) for point in ranked[:FINALISTS])]
    for _ in range(TURNS):
        for policy in finalists:
            run(policy)
    print(json.dumps(summary(found[:count], found[count:]), indent=1))
    print(f"{count} points, {time.perf_counter() - begun:.0f} s")


def summary(points: list[dict[str, Any]], finals: list[dict[str, Any]]) -> dict[str, Any]:
    """See the module docstring."""

    def median(name: str, policy: str) -> float:
        return statistics.median(point[name] for point in finals if point["policy"] == policy)

    [own] = {point["policy"] for point in finals if point["solver"]}
    others = {point["policy"] for point in finals if not point["solver"]} or {own}
    best = max(others, key=lambda policy: median("rate", policy))
    error = [point["predicted_step"] / point["step"] - 1 for point in points]
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
            "predicted_rate": median("predicted_rate", own),
            "step": median("step", own),
            "step_error": median("predicted_step", own) / median("step", own) - 1,
        },
        "step_error_quantiles": dict(
            zip(("5%", "25%", "50%", "75%", "95%"),
                np.quantile(error, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist(), strict=True)
        ),
        "within_20_percent": float(np.mean(np.abs(error) <= 0.2)),
        "peaks": len(shares),
        "most_used_of_prediction": max(shares, default=None),
        "over_prediction": sum(share > 1 for share in shares),
    }  # fmt: skip


if __name__ == "__main__":
    main()

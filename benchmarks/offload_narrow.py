"""Narrowed calibration beside a full one: ``python -m benchmarks.offload_narrow [--rounds 2]``.

Each round calibrates the CPU with the narrower form of a model, then computation alone with the
model's own widths, and then measures each policy, so that a busy machine slows all three alike. The
model has four layers of Llama 3.2 1B. It prints predicted and measured milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import jax.numpy as jnp

from jaxllama.config import load_config
from jaxllama.loading import enable_compilation_cache
from jaxllama.offload.policy import Policy
from jaxllama.planner import calibrate
from jaxllama.planner.cost import PlannerSettings, Task, predict
from jaxllama.planner.trial import repeated_model, start_run, timed_step

POLICIES = ("100 0 100 0 100 0", "0 100 100 0 100 0", "50 50 100 0 100 0")
TASK, STEPS = Task(4, 64, 9), 6
SETTINGS = PlannerSettings(jnp.float32, jnp.float32)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="llama-3.2-1b")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--rounds", type=int, default=2)
    args = options.parse_args()
    enable_compilation_cache()
    cfg = load_config(args.model).first_layers(args.layers)
    narrower = calibrate.narrower
    forms: dict[str, Any] = {"narrow": narrower, "full": lambda cfg, *_: (cfg, calibrate.Widths())}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for form, calibrate.narrower in forms.items():
            begin, used = time.perf_counter(), time.process_time()
            moves = form == "narrow"
            costs = calibrate.calibrate(cfg, SETTINGS, moves=moves, fresh=True)
            wall, cpu = time.perf_counter() - begin, time.process_time() - used
            print(f"{form}: calibrated in {wall:.0f} s, {cpu:.0f} s of CPU", flush=True)
            for text in POLICIES if moves else POLICIES[:1]:
                policy = Policy.parse(text + " gpu_batch_size=4")
                expected = predict(cfg, policy, costs, TASK, SETTINGS)
                found.setdefault((text, form), []).append((expected.prefill, expected.step))
            gc.collect()
        for text in POLICIES:
            lm = repeated_model(cfg, jnp.float32, Policy.parse(text + " gpu_batch_size=4"))
            warm, run = (start_run(lm, TASK.rows, TASK, jnp.float32) for _ in range(2))
            for _ in range(2):
                timed_step(warm)
            prefill = timed_step(run)
            step = statistics.median(timed_step(run) for _ in range(STEPS))
            found.setdefault((text, "measured"), []).append((prefill, step))
            del lm, warm, run
            gc.collect()
    print("policy, by, prefill ms, step ms, tokens/s of each round")
    for (text, form), rounds in sorted(found.items()):
        words = [
            f"{1e3 * p:.0f} {1e3 * s:.0f} {TASK.rows * TASK.new / (p + (TASK.new - 1) * s):.2f}"
            for p, s in rounds
        ]
        print(f"{text} | {form} | {' | '.join(words)}", flush=True)


if __name__ == "__main__":
    main()

"""A mixture whose experts lie one by one: ``python -m benchmarks.offload_experts [--out JSON]``.

gpt-oss-120b's shape with experts in MXFP4, under a budget of 16 GB of device memory: tokens a
second of the solver's placement, beside all experts streamed and all computed by the CPU, for 1 and
16 rows. Then the same with skewed use: the routers have a bias of ``-power * log(rank)``, in an
order of its own in each layer, beside logits of deviation 1. A run measures the table of use.

Every layer has its own pinned buffers for each expert (``--distinct N``: N layers have, and the
others share them). All hold the same random bytes, those of one expert. The embedding and the
routers are random and so large that tokens choose all experts about equally often
(``planner.trial.spread_routes``). The costs of the prediction are measured with a model of four
layers without windows, as ``jaxllama plan`` does. ``--sent``: the host sends the experts, though
the device could read them. The allocator should keep the budget, and XLA must be allowed to pin
the experts:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.19 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=80 \\
        python -m benchmarks.offload_experts

The parts of a layer are timed too: what the link, a wait of the host and an expert of the CPU take
alone, and the host's time in each program.

``--small`` runs the same code on a small shape, which is what a CPU can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.offload_experts_host import SCHEME, Host, parts_of, timed_programs
from jaxllama.config import ModelConfig, load_config
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.offload.expert_places import ExpertUse
from jaxllama.offload.experts import host_view
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.planner.calibrate_experts import (
    CPU_ROWS,
    EXPERT_ROWS,
    StepPoint,
    measure_experts,
)
from jaxllama.planner.cost import MemoryLimits, PlannerSettings, Task, need_of, predict
from jaxllama.planner.experts import ExpertCosts, expert_counts, experts_step
from jaxllama.planner.fitting import Calibration, Moving, nnls
from jaxllama.planner.solve import one_by_one
from jaxllama.planner.trial import random_run, timed_step
from pallas_kernels.cpu import unavailable

BUDGET = 16 * 10**9
PROMPT, NEW, WARM, STEPS = 1, 63, 6, 10
DEPTH, FIRST = 4, 4  # layers of the model that is calibrated, and that are pinned at first
EVERY = "100 0 100 0 100 0"
ON_CPU, SHARED = {"cpu_expert": 1e-6}, {"cpu_expert": 1.0}


def warm(runs: Sequence[tuple[LanguageModel, int, bool]]) -> None:
    """Compile the programs of several runs at once: (model, rows, whether it waits for routers)."""

    def one(run: tuple[LanguageModel, int, bool]) -> None:
        lm, rows, waits = run
        own = random_run(
            lm, rows, PROMPT, NEW, PROMPT + NEW, lm.dtype, 512, Sampling(temperature=100.0)
        )
        own.experts.counts_all = waits
        for _ in range(3):
            timed_step(own)

    with ThreadPoolExecutor(len(runs)) as threads:
        list(threads.map(one, runs))


def measured(lm: LanguageModel, rows: int) -> dict[str, Any]:
    """Return tokens a second of a step of ``rows`` rows, and what the experts took.

    host_ms_a_layer: the host's milliseconds in each program, of further steps.
    """
    run = random_run(
        lm, rows, PROMPT, NEW, PROMPT + NEW, lm.dtype, 512, Sampling(temperature=100.0)
    )
    _, *_ = [timed_step(run) for _ in range(WARM)]
    run.experts.reset()
    times = [timed_step(run) for _ in range(STEPS)]
    step, layers = sorted(times)[len(times) // 2], lm.config.n_layers
    stats = offloaded(lm.executor).store.device.memory_stats() or {}
    loads, computed = (x / layers / STEPS for x in (run.experts.loads, run.experts.tally.computed))
    with timed_programs() as taken:
        again = [timed_step(run) for _ in range(4)]
    by_name = {name: [n / 4 / layers, 1e3 * own / 4 / layers] for name, (n, own) in taken.items()}
    return {
        "step_ms": 1e3 * step,
        "fastest_ms": 1e3 * min(times),
        "slowest_ms": 1e3 * max(times),
        "tokens_per_second": rows / step,
        "loads_a_layer": loads,
        "computed_a_layer": computed,
        "calls_and_host_ms_a_layer": by_name,
        "ms_a_layer": 1e3 * min(again) / layers,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }


def table_of(lm: LanguageModel, rows: int, tokens: int) -> ExpertUse:
    """Return the use that a run of random prompts measures."""
    run = random_run(lm, rows, tokens, 8, tokens + 8, lm.dtype, 512, Sampling(temperature=100.0))
    run.experts.counts_all = True
    timed_step(run)
    assert lm.config.experts is not None
    return ExpertUse.of_counts(run.experts.counts, lm.config.experts.n_active)


def views_are_right() -> bool:
    """Whether the host reads pinned memory in place."""
    data = np.arange(4096, dtype=np.uint8)
    pinned = Store(".").pin(data)  # kept while its view is read
    return bool(np.array_equal(host_view(pinned), data))


def zipf_bias(cfg: ModelConfig, power: float = 0.5) -> dict[int, np.ndarray]:
    """Return for each layer ``-power * log(rank)`` of its experts, in a random order."""
    found, rng = {}, np.random.default_rng(0)
    for layer, count in expert_counts(cfg).items():
        found[layer] = -power * np.log1p(rng.permutation(count)).astype(np.float32)
    return found


def machine(costs: ExpertCosts, head: tuple[float, ...]) -> Calibration:
    """Return a machine with these costs of experts and of a step's head."""
    free = Moving(0.0, 0.0, 0.0, 0.0)
    fixed: Any = {name.name: free for name in dataclasses.fields(Calibration)}
    fixed |= {"join": (0.0,) * 2, "push_cache": 0.0, "look_up": (0.0,) * 2, "disk_cold": 0.0}
    fixed |= {"contention": (1.0,) * 4, "cpu": (0.0,) * 3, "decode": (0.0,) * 3}
    # Streaming dense parts is not measured here, so the plan must not choose it.
    slow = Moving(1.0, 1e-9, 1e-9, 0.0)
    fixed |= {"load_weights": slow, "load_cache": slow, "prefill": (1e-3, 0.0, 0.0)}
    return Calibration(**{**fixed, "head": head, "experts": costs})


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path)
    options.add_argument("--rows", default="1,16")
    options.add_argument("--distinct", type=int, default=10**6)
    options.add_argument("--sent", action="store_true")
    options.add_argument("--kinds", default="uniform,zipf")
    args = options.parse_args()
    enable_compilation_cache()
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    begin = time.perf_counter()

    def tell(name: str, value: Any) -> None:
        report[name] = value
        print(f"{time.perf_counter() - begin:6.1f} s", json.dumps({name: value}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1))

    def attempt(name: str, work: Any, *arguments: Any) -> Any:
        """Run one part; a failure is told, and does not stop the rest."""
        try:
            found = work(*arguments)
        except Exception as error:  # noqa: BLE001
            tell(name, f"{type(error).__name__}: {str(error)[:300]}")
            return None
        if isinstance(found, dict):
            tell(name, found)
        return found

    cfg = load_config("gpt-oss-120b").replace(eos_token_ids=())
    assert cfg.experts is not None
    n_active = cfg.experts.n_active
    if args.small:
        cfg = cfg.replace(
            n_layers=3,
            layer_types=("attention",) * 3,
            window_layers=(0, 2),
            d_model=128,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            vocab_size=1024,
            experts=dataclasses.replace(cfg.experts, d_ff=128, n_experts=64),
        )
    dtype = default_dtype()
    reason = unavailable()
    tell("cpu_handlers", "available" if reason is None else reason.text)
    computes = reason is None and bool(attempt("view", views_are_right))
    distinct = min(args.distinct, cfg.n_layers)
    host = Host(cfg, computes, min(FIRST, distinct), args.sent)
    attempt("parts", parts_of, host, computes)
    settings = PlannerSettings(dtype, dtype, SCHEME)
    total = int(0.96 * BUDGET)  # the rest is for the allocator's gaps
    if args.small:
        whole = cfg.n_layers / min(FIRST, distinct) * host.pinned_bytes
        total = int(0.6 * whole) + 4 * 1024 * 128 * 4
    limits = MemoryLimits(total, 10**12, 0)
    alike = cfg.replace(window_layers=()).first_layers(min(DEPTH, cfg.n_layers))
    all_rows = [int(rows) for rows in args.rows.split(",")]

    def task(rows: int) -> Task:
        return Task(rows, PROMPT, NEW)

    def planned(rows: int, use: str, calibration: Calibration) -> Policy:
        base = Policy(gpu_batch_size=rows)  # the solver's part for one batch of all rows
        found = one_by_one(cfg, base, use, calibration, task(rows), limits, settings)

        def rate(policy: Policy) -> float:
            return predict(cfg, policy, calibration, task(rows), settings).tokens_per_second

        return max(found, key=rate)

    def variants(lm: LanguageModel, rows: Iterable[int], waits: bool = False, **own: Any) -> Any:
        """Return the runs of a model with other fields of its policy."""
        executor = offloaded(lm.executor).with_policy(**own)
        return [(dataclasses.replace(lm, executor=executor), count, waits) for count in rows]

    def warm_up() -> None:
        """Compile what the calibration and the runs need, while further layers are pinned."""
        few = cfg.first_layers(min(8, cfg.n_layers))
        cold = Policy.parse(f"{EVERY} experts=0/100 gpu_batch_size=16")
        hot = dataclasses.replace(cold, experts="100/0")
        half = dataclasses.replace(cold, experts="50/50")
        whole, none = host.model(hot, cfg=alike.first_layers(2)), host.model(cold, cfg=alike)
        runs = variants(host.model(half, cfg=alike.first_layers(2)), EXPERT_ROWS)
        runs += variants(whole, EXPERT_ROWS) + variants(whole, CPU_ROWS, True)
        runs += variants(none, EXPERT_ROWS) + variants(host.model(cold, cfg=few), all_rows)
        if computes:
            runs += variants(none, CPU_ROWS, **ON_CPU) + variants(none, CPU_ROWS, **SHARED)
            runs += variants(host.model(cold, cfg=few), all_rows, **ON_CPU)
        guess = ExpertCosts((1e-3, 0.0), (1e-3, 0.0), (0.0, 3e-4), (), ())
        for rows in all_rows:
            placed = host.model(planned(rows, "", machine(guess, (0.0, 0.0))), cfg=few)
            runs += variants(placed, [rows])
            if computes:
                runs += variants(placed, [rows], **SHARED)
        with ThreadPoolExecutor(1) as thread:
            pinning = thread.submit(host.pin, range(FIRST, distinct))
            warm(runs)
            tell("compiled", len(runs))
            pinning.result()
        tell("pinned_bytes", host.pinned_bytes)

    attempt("warming", warm_up)
    points: dict[str, list[StepPoint]] = {}

    def point(name: str, own: list[StepPoint]) -> None:
        points[name] = own
        tell(f"calibrated: {name}", own)

    small = functools.partial(host.model, cfg=alike)
    costs = measure_experts(alike, small, dtype, 512, point, computes)
    short = zip(points["link"], points["link, one layer"], strict=True)
    rest = [
        max(1e-9, one.seconds - (own.seconds - one.seconds) / (alike.n_layers - 1))
        for own, one in short
    ]
    head = nnls([(1.0, rows) for rows in EXPERT_ROWS], rest)
    tell("costs", {**dataclasses.asdict(costs), "head": head})
    calibration = machine(costs, head)

    def compared(name: str, policy: Policy, rows: int, lm: LanguageModel) -> None:
        expected = predict(cfg, policy, calibration, task(rows), settings).step
        need = need_of(cfg, policy, task(rows), settings, 0)
        steps = experts_step(cfg, costs, policy, (rows,), rows)

        def one() -> dict[str, Any]:
            found = measured(lm, rows)
            return {
                "policy": str(policy),
                **found,
                "predicted_ms": 1e3 * expected,
                "prediction_error": expected / (found["step_ms"] * 1e-3) - 1,
                "predicted_loads": sum(x.loads for x in steps) / len(steps),
                "predicted_computed": sum(x.computed for x in steps) / len(steps),
                "predicted_device_bytes": need.device,
                "host_bytes": need.host,
            }

        attempt(name, one)

    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(","):
            bias, use, path = None, None, ""
            if kind == "zipf":
                bias = zipf_bias(cfg)
                cold = Policy.parse("100 0 100 0 100 0 experts=0/100 gpu_batch_size=8")
                lm = host.model(cold, None, bias)
                use = attempt("zipf table", table_of, lm, 8, 64 if args.small else 256)
                if use is None:
                    continue
                path = str(Path(folder) / "use.json")
                use.save(path)
                top = [
                    float(np.sort(own)[::-1][: len(own) // 5].sum()) for own in use.layers.values()
                ]
                share = np.mean(top) / n_active
                tell("zipf: share of pairs with a fifth of the experts", float(share))
            for rows in all_rows:
                policy = attempt(f"{kind} plan {rows}", planned, rows, path, calibration)
                if policy is not None:
                    lm = host.model(policy, use, bias)
                    compared(f"{kind}, {rows} rows, solver", policy, rows, lm)
                    del lm
                cold = Policy.parse(f"{EVERY} gpu_batch_size={rows} experts=0/100")
                if path:
                    cold = dataclasses.replace(cold, expert_use=path)
                lm = host.model(cold, use, bias)
                compared(f"{kind}, {rows} rows, all streamed", cold, rows, lm)
                if computes:
                    on_cpu = dataclasses.replace(cold, **ON_CPU)
                    [(lm, _, _)] = variants(lm, [rows], **ON_CPU)
                    compared(f"{kind}, {rows} rows, all on the CPU", on_cpu, rows, lm)
                del lm


if __name__ == "__main__":
    main()

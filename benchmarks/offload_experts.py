"""A mixture whose experts lie one by one: ``python -m benchmarks.offload_experts [--out JSON]``.

gpt-oss-120b's shape with experts in MXFP4, under a budget of 16 GB of device memory: tokens a
second of the solver's placement, beside all experts streamed and all computed by the CPU, for 1 and
16 rows. Then the same with skewed use: the routers have a bias of ``-power * log(rank)``, in an
order of its own in each layer, beside logits of deviation 1. A run measures the table of use.

Every layer has its own pinned buffers for each expert (``--distinct N``: N layers have, and the
others share them). All hold the same random bytes, those of one expert. The embedding and the
routers are random and so large that tokens choose all experts about equally often
(``planner.trial.spread_routes``). The costs of the prediction are measured with a model of four
layers. ``--sent``: the host sends the experts, though the device could read them. ``--alike``: all
layers have a window, which no row fills, so fewer programs are compiled. The allocator should keep
the budget, and XLA must be allowed to pin the experts:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.19 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=80 \\
        python -m benchmarks.offload_experts

The parts of a layer are timed too: what the link, a wait of the host and an expert of the CPU take
alone, and the host's time in each program.

``--small`` runs the same code on a small shape, which is what a CPU can do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxllama.config import ModelConfig, load_config
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded.executor import Offloaded, offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.model.decoder import layer_config
from jaxllama.offload.expert_places import ExpertPlace, ExpertUse, places
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
    HotSlots,
    fetched_from,
    host_view,
    layout_of,
    pack,
    unpack,
    views_of,
)
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.placement import Placement
from jaxllama.planner.accounting import weight_shapes
from jaxllama.planner.calibrate_experts import EXPERT_ROWS, StepPoint, measure_experts
from jaxllama.planner.cost import MemoryLimits, PlannerSettings, Task, need_of, predict
from jaxllama.planner.experts import expert_counts, experts_step
from jaxllama.planner.fitting import Calibration, Moving, nnls
from jaxllama.planner.solve import one_by_one
from jaxllama.planner.trial import random_run, random_tree, spread_routes, timed_step
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.cpu import prepare_tree, unavailable

BUDGET = 16 * 10**9
SCHEME = "none,experts_*=mxfp4"
PROMPT, NEW, WARM, STEPS = 1, 63, 6, 10
EXPERTS = ("experts_gate_up", "experts_down")


class Host:
    """The experts of all layers in pinned memory, from which models of any placement are made."""

    def __init__(self, cfg: ModelConfig, computes: bool, distinct: int, sent: bool) -> None:
        self.cfg, self.dtype = cfg, default_dtype()
        self.place = Placement(Policy.parse("100 0 100 0 100 0"), self.dtype, SCHEME)
        self.store = self.place.store
        self.store.fetches &= not sent
        self.shapes = weight_shapes(cfg, self.dtype, SCHEME)
        dense = self.place.model(cfg, self._dense(self.shapes), None).params
        self.params = spread_routes(dense, cfg)
        own, self.packed, self.layouts = self.shapes["layer_0"]["mlp"], {}, {}
        self.tensors: dict[tuple[int, str], dict[int, jax.Array]] = {}
        self.views: dict[tuple[int, str], dict[int, tuple[jax.Array, ...]]] = {}
        for name in EXPERTS:
            one = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), own[name]["weight"]
            )
            weight = jax.tree.map(np.asarray, random_tree(one))
            weight = prepare_tree(weight) if computes else weight
            parts, structure = jax.tree.flatten(weight)
            self.layouts[name] = layout_of(parts, structure, self.store.device.platform)
            self.packed[name] = pack(self.layouts[name], [np.asarray(x) for x in parts])
            source = jax.device_put(self.packed[name], self.store.on_device)
            for layer, count in expert_counts(cfg).items():
                if layer < distinct:
                    pinned = {e: self.store.pin(source) for e in range(count)}
                    views = views_of(self.layouts[name], pinned) if computes else {}
                    self.tensors[layer, name], self.views[layer, name] = pinned, views
                else:
                    self.tensors[layer, name] = self.tensors[layer % distinct, name]
                    self.views[layer, name] = self.views[layer % distinct, name]

    def _dense(self, shapes: Params) -> ParamsDict:
        """Return all other parameters; layers share one layer's arrays."""
        found: dict[tuple[str, ...], Any] = {}
        for name in [name for name in shapes if not name.startswith("layer_")] + ["layer_0"]:
            leaves: dict[tuple[str, ...], Any] = flatten_dict(shapes[name])
            for path, shape in leaves.items():
                if path[1:2] and path[1] in EXPERTS and path[-1] == "weight":
                    continue
                leaf = random_tree(shape)
                if path[-1] == "bias" and path[1] in EXPERTS:
                    leaf = ExpertBias(0 * leaf, np.zeros(shape.shape, shape.dtype))
                elif len(path) > 1 and path[-2] == "router" and path[-1] == "bias":
                    leaf = 0 * leaf
                else:
                    leaf = self.place((name, *path), leaf)
                layers = range(self.cfg.n_layers) if name == "layer_0" else (None,)
                for layer in layers:
                    target = name if layer is None else f"layer_{layer}"
                    found[target, *path] = leaf
        return unflatten_dict(found)

    def model(
        self,
        policy: Policy,
        use: ExpertUse | None = None,
        bias: dict[int, np.ndarray] | None = None,
        layers: int | None = None,
    ) -> LanguageModel:
        """Return a model of the policy, perhaps with fewer layers.

        bias: of the routers, by layer.
        """
        cfg = self.cfg if layers is None else self.cfg.first_layers(layers)
        counts = expert_counts(cfg)
        where = places(policy, counts, use)
        kept = [name for name in self.params if not name.startswith("layer_")]
        params = {name: self.params[name] for name in kept}
        for layer in range(cfg.n_layers):
            own = self.params[f"layer_{layer}"]
            mlp = dict(own["mlp"])
            for name in EXPERTS:
                mlp[name] = {**mlp[name], "weight": self._tensor(layer, name, where[layer])}
            if bias is not None:
                mlp["router"] = {**mlp["router"], "bias": jnp.asarray(bias[layer], self.dtype)}
            params[f"layer_{layer}"] = {**own, "mlp": mlp}
        return LanguageModel(cfg, params, None, executor=Offloaded(policy, self.store))

    def _tensor(self, layer: int, name: str, place: ExpertPlace) -> ExpertTensor:
        shape = self.shapes["layer_0"]["mlp"][name]["weight"]
        layout, hot = self.layouts[name], None
        if place.device:
            source = jax.device_put(self.packed[name], self.store.on_device)
            hot = _unpacked(layout, source, len(place.device))
        held = HotSlots.of(self.store, shape.shape[0], place)
        host = {expert: self.tensors[layer, name][expert] for expert in place.host}
        return ExpertTensor(
            shape.shape,
            np.dtype(shape.dtype),
            layout,
            hot,
            held,
            place,
            host,
            {},
            self.views[layer, name],
            fetched_from(self.store, host, shape.shape[0]),
        )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _unpacked(layout: ExpertLayout, source: jax.Array, count: int) -> Tree:
    return unpack(layout, jnp.broadcast_to(source[None], (count, source.size)))


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
    loads, computed = (x / layers / STEPS for x in (run.experts.loads, run.experts.computed))
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


PROGRAMS = (
    (programs, ("fetched", "routed_layer", "fetch_each", "added_pairs", "with_mixture")),
    (programs, ("computed_pairs_of",)),
    (np, ("asarray",)),  # the host's waits, for the router, the tokens and the CPU
)


@contextlib.contextmanager
def timed_programs() -> Iterator[dict[str, list[float]]]:
    """Yield the number of calls and the host's seconds of each program."""
    taken: dict[str, list[float]] = {}
    with contextlib.ExitStack() as patches:
        for owner, names in PROGRAMS:
            for name in names:
                inner = getattr(owner, name)

                def timed(*args: Any, _inner: Any = inner, _name: str = name, **named: Any) -> Any:
                    begin = time.perf_counter()
                    found = _inner(*args, **named)
                    own = taken.setdefault(_name, [0, 0.0])
                    own[0], own[1] = own[0] + 1, own[1] + time.perf_counter() - begin
                    return found

                patches.enter_context(mock.patch.object(owner, name, timed))
        yield taken


def parts_of(host: Host, computes: bool) -> dict[str, Any]:
    """Return what the parts of a layer take alone, each the fastest of several runs."""
    store, layouts = host.store, tuple(host.layouts[name] for name in EXPERTS)
    each, found = sum(layout.nbytes for layout in layouts), {"expert_bytes": 0}
    found["expert_bytes"] = each

    def best(work: Callable[[], Any], times: int = 8) -> float:
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            jax.block_until_ready(work())
            taken.append(time.perf_counter() - begin)
        return min(taken[1:])

    pinned = [host.tensors[0, name] for name in EXPERTS]
    if store.fetches:
        tables = [fetched_from(store, own, len(own)) for own in pinned]
        for count in (1, 4, 16):
            experts = jnp.arange(count, dtype=jnp.int32)
            seconds = best(lambda: programs.fetch_each(layouts, tables, experts))  # noqa: B023
            found[f"fetch {count}"] = [1e3 * seconds, count * each / seconds / 1e9]
        got = programs.fetch_each(layouts, tables, jnp.asarray([5], jnp.int32))
        same = [
            np.array_equal(np.asarray(x), host.packed[n])
            for x, n in zip(got[0], EXPERTS, strict=True)
        ]
        found["fetched bytes are right"] = bool(all(same))
    for count in (1, 4):
        pieces = [own[e] for e in range(count) for own in pinned]
        seconds = best(lambda: jax.device_put(pieces, store.on_device))  # noqa: B023
        found[f"device_put {count}"] = [1e3 * seconds, count * each / seconds / 1e9]
    begin_put = time.perf_counter()
    sent = jax.device_put(pieces, store.on_device)
    found["device_put 4, the host alone"] = 1e3 * (time.perf_counter() - begin_put)
    jax.block_until_ready(sent)
    small = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.zeros(4, np.int32), store.on_device)
    found["program and wait"] = 1e3 * best(lambda: np.asarray(small(x)), 30)
    if computes:
        cfg = layer_config(host.cfg, 0)[0]
        views = [host.views[0, name] for name in EXPERTS]
        biases = [np.zeros((4, w), host.dtype) for w in (2 * cfg.experts.d_ff, cfg.d_model)]
        for count, rows in ((1, 1), (4, 1), (4, 4)):
            x = np.zeros((count, rows, cfg.d_model), host.dtype)
            own = [[view[e] for e in range(count)] for view in views]
            given = [bias[:count] for bias in biases]
            with jax.default_device(jax.devices("cpu")[0]):
                seconds = best(lambda: programs.computed_pairs_of(cfg, layouts, *own, given, x))  # noqa: B023
            found[f"CPU: {count} experts of {rows} tokens"] = 1e3 * seconds
    return found


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


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path)
    options.add_argument("--rows", default="1,16")
    options.add_argument("--distinct", type=int, default=10**6)
    options.add_argument("--sent", action="store_true")
    options.add_argument("--alike", action="store_true")
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
    if args.alike:
        cfg = cfg.replace(window_layers=tuple(range(cfg.n_layers)))
    dtype = default_dtype()
    reason = unavailable()
    tell("cpu_handlers", "available" if reason is None else reason.text)
    computes = reason is None and bool(attempt("view", views_are_right))
    host = Host(cfg, computes, args.distinct, args.sent)
    tell(
        "handlers' layout",
        type(
            host.layouts[EXPERTS[0]].structure.unflatten(
                [None] * len(host.layouts[EXPERTS[0]].leaves)
            )
        ).__name__,
    )
    tell("pinned_bytes", sum(x.nbytes for own in host.tensors.values() for x in own.values()))
    attempt("parts", parts_of, host, computes)
    points: dict[str, list[StepPoint]] = {}

    def point(name: str, own: list[StepPoint]) -> None:
        points[name] = own
        tell(f"calibrated: {name}", own)

    depth = min(4, cfg.n_layers)
    small = functools.partial(host.model, layers=depth)
    costs = measure_experts(cfg.first_layers(depth), small, dtype, 512, point, computes)
    short = zip(points["link"], points["link, one layer"], strict=True)
    rest = [
        max(1e-9, one.seconds - (own.seconds - one.seconds) / (depth - 1)) for own, one in short
    ]
    head = nnls([(1.0, rows) for rows in EXPERT_ROWS], rest)
    tell("costs", {**dataclasses.asdict(costs), "head": head})
    free = Moving(0.0, 0.0, 0.0, 0.0)
    fixed: Any = {name.name: free for name in dataclasses.fields(Calibration)}
    fixed |= {"join": (0.0,) * 2, "push_cache": 0.0, "look_up": (0.0,) * 2, "disk_cold": 0.0}
    fixed |= {"contention": (1.0,) * 4, "cpu": (0.0,) * 3, "decode": (0.0,) * 3}
    # Streaming dense parts is not measured here, so the plan must not choose it.
    fixed |= {
        "load_weights": Moving(1.0, 1e-9, 1e-9, 0.0),
        "load_cache": Moving(1.0, 1e-9, 1e-9, 0.0),
    }
    fixed |= {"prefill": (1e-3, 0.0, 0.0), "head": head, "experts": costs}
    calibration = Calibration(**fixed)
    settings = PlannerSettings(dtype, dtype, SCHEME)
    total = int(0.96 * BUDGET)  # the rest is for the allocator's gaps
    if args.small:
        total = int(0.6 * sum(x.nbytes for own in host.tensors.values() for x in own.values()))
        total += 4 * 1024 * 128 * 4
    limits = MemoryLimits(total, 10**12, 0)

    def task(rows: int) -> Task:
        return Task(rows, PROMPT, NEW)

    def planned(rows: int, use: str) -> Policy:
        base = Policy(gpu_batch_size=rows)  # the solver's part for one batch of all rows
        found = one_by_one(cfg, base, use, calibration, task(rows), limits, settings)

        def rate(policy: Policy) -> float:
            return predict(cfg, policy, calibration, task(rows), settings).tokens_per_second

        return max(found, key=rate)

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
            for rows in map(int, args.rows.split(",")):
                policy = attempt(f"{kind} plan {rows}", planned, rows, path)
                if policy is not None:
                    lm = host.model(policy, use, bias)
                    compared(f"{kind}, {rows} rows, solver", policy, rows, lm)
                    del lm
                cold = Policy.parse(f"100 0 100 0 100 0 gpu_batch_size={rows} experts=0/100")
                if path:
                    cold = dataclasses.replace(cold, expert_use=path)
                lm = host.model(cold, use, bias)
                compared(f"{kind}, {rows} rows, all streamed", cold, rows, lm)
                if computes:
                    on_cpu = dataclasses.replace(cold, cpu_expert=1e-6)
                    own = dataclasses.replace(offloaded(lm.executor), policy=on_cpu)
                    lm = dataclasses.replace(lm, executor=own)
                    compared(f"{kind}, {rows} rows, all on the CPU", on_cpu, rows, lm)
                del lm


if __name__ == "__main__":
    main()

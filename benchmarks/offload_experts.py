"""A mixture whose experts lie one by one: ``python -m benchmarks.offload_experts [PART ...]``.

gpt-oss-120b's shape, experts in MXFP4, in 16 GB of an H200; ``--model``, ``--scheme`` and ``--gb``
name others for ``solver``. All experts are the same random bytes.
``--distinct`` layers have pinned experts of their own, and the others share them. The embedding
and the routers are random and so large that tokens choose all experts about equally often
(``planner.trial.spread_routes``). Skewed use: the routers have a bias of ``-log(rank) / 2``, in an
order of its own in each layer. A JSON line after each measurement. The parts:

    decode    1 and 16 rows, even and skewed use that no table tells; 24 of each layer's 128
              experts have slots, which learn or stay; what the link reaches alone
    prompt    512 and 8,192 tokens
    cpu       the same where the CPU computes a part, and where it computes all; the rate at which
              a handler reads the host's memory
    solver    the solver's placement beside all loaded and all computed; predicted, measured; and
              prompts of 512 and 8,192 tokens under its placement for each
    schemes   the CPU's experts beside its memory, in other schemes

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.114 python -m benchmarks.offload_experts decode prompt cpu
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.19 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=80 \\
        python -m benchmarks.offload_experts solver --distinct 36

``--small`` runs the same code on a small shape, which is what a CPU can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.kernels.cpu import reading, rounds
from jaxllama.config import LayerConfig, ModelConfig, load_config
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors.offloaded.executor import Offloaded, offloaded
from jaxllama.executors.offloaded.expert_programs import computed_pairs_of
from jaxllama.executors.offloaded.experts import ON_CPU as AT_ONCE
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.offload.expert_places import ExpertPlace, ExpertUse, places
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
    HotSlots,
    fetched,
    fetched_from,
    layout_of,
    pack,
    unpack,
    views_of,
)
from jaxllama.offload.policy import ALL_ON_CPU, Policy
from jaxllama.offload.store import Store
from jaxllama.offload.units import SPAN
from jaxllama.placement import Placement
from jaxllama.planner.accounting import weight_shapes
from jaxllama.planner.calibrate_experts import (
    EXPERT_ROWS,
    TURNS,
    StepPoint,
    depths,
    measure_experts,
)
from jaxllama.planner.cost import MemoryLimits, PlannerSettings, Task, need_of, predict
from jaxllama.planner.experts import ExpertCosts, expert_counts, experts_step
from jaxllama.planner.fitting import Calibration, Moving, nnls
from jaxllama.planner.solve import one_by_one
from jaxllama.planner.trial import random_expert, random_run, random_tree, spread_routes, timed_step
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.cpu import prepare_tree, unavailable

PARTS = ("decode", "prompt", "cpu", "solver", "schemes")
SCHEME = "none,experts_*=mxfp4"
EXPERTS = ("experts_gate_up", "experts_down")
EVERY = "100 0 100 0 100 0"
ON_CPU = {"cpu_expert": ALL_ON_CPU, "cpu_token": 0.0}
COSTS = ((0.5, 0.15), (0.8, 0.2), (0.3, 0.1))  # of an expert on the CPU, and of each further token
SPREAD, WARM, LONG = Sampling(temperature=100.0), 40, 8192
CAPACITY = 128  # tokens of a row that decodes: one number, so that phases share programs
DEPTH = 4  # least number of layers of the model that is calibrated
Views = dict[int, tuple[jax.Array, ...]]
BYTES = 450e6  # of experts; more than the last-level cache that one of many machines may use


class Host:
    """The experts of all layers in pinned memory, from which models of any placement are made."""

    def __init__(self, cfg: ModelConfig, computes: bool, first: int, scheme: str = SCHEME) -> None:
        """Pin the experts of the ``first`` layers, which the others share until they are pinned."""
        self.cfg, self.computes, self.dtype = cfg, computes, default_dtype()
        self.place = Placement(Policy.parse("100 0 100 0 100 0"), self.dtype, scheme)
        self.store = self.place.store
        self.shapes = weight_shapes(cfg, self.dtype, scheme)
        dense = self.place.model(cfg, self._dense(self.shapes), None).params
        self.params = spread_routes(dense, cfg)
        own = self.shapes["layer_0"]["mlp"]  # the weights are those of one expert
        self.packed, self.layouts = {}, {}
        self.tensors: dict[tuple[int, str], dict[int, jax.Array]] = {}
        self.views: dict[tuple[int, str], dict[int, tuple[jax.Array, ...]]] = {}
        for name in EXPERTS:
            weight = random_expert(own[name]["weight"])
            weight = prepare_tree(weight) if computes else weight
            parts, structure = jax.tree.flatten(weight)
            self.layouts[name] = layout_of(parts, structure, self.store.device.platform)
            self.packed[name] = pack(self.layouts[name], [np.asarray(x) for x in parts])
        self.pin(range(min(first, cfg.n_layers)))
        for layer in range(first, cfg.n_layers):
            for name in EXPERTS:
                self.tensors[layer, name] = self.tensors[layer % first, name]
                self.views[layer, name] = self.views[layer % first, name]

    def pin(self, layers: Iterable[int]) -> None:
        """Give these layers pinned buffers of their own."""
        for name in EXPERTS:
            source = jax.device_put(self.packed[name], self.store.on_device)
            for layer in layers:
                count = expert_counts(self.cfg)[layer]
                pinned = {expert: self.store.pin(source) for expert in range(count)}
                views = views_of(self.layouts[name], pinned) if self.computes else {}
                self.tensors[layer, name], self.views[layer, name] = pinned, views

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
        cfg: ModelConfig | None = None,
    ) -> LanguageModel:
        """Return a model of the policy.

        bias: of the routers, by layer.  cfg: perhaps one with fewer layers.
        """
        cfg = cfg or self.cfg
        counts = expert_counts(cfg)
        where = places(policy, counts, use)
        kept = [name for name in self.params if not name.startswith("layer_")]
        params = {name: self.params[name] for name in kept}
        for layer in range(cfg.n_layers):
            own = self.params[f"layer_{layer}"]
            mlp = dict(own["mlp"])
            for name in EXPERTS:
                mlp[name] = {**mlp.get(name, {}), "weight": self._tensor(layer, name, where[layer])}
            if bias is not None:
                mlp["router"] = {**mlp["router"], "bias": jnp.asarray(bias[layer], self.dtype)}
            params[f"layer_{layer}"] = {**own, "mlp": mlp}
        return LanguageModel(cfg, params, None, executor=Offloaded(policy, self.store))

    def _tensor(self, layer: int, name: str, place: ExpertPlace) -> ExpertTensor:
        shape = self.shapes["layer_0"]["mlp"][name]["weight"]
        layout, hot = self.layouts[name], None
        if place.device and self.store.fetches:
            table = fetched_from(self.store, self.tensors[layer, name], shape.shape[0])
            [hot] = _fetched((layout,), [table], jnp.zeros(len(place.device), jnp.int32))
        elif place.device:
            source = jax.device_put(self.packed[name], self.store.on_device)
            hot = _unpacked(layout, source, len(place.device))
        held = HotSlots.of(self.store, shape.shape[0], place)
        host = {expert: self.tensors[layer, name][expert] for expert in place.pinned}
        return ExpertTensor(
            shape.shape,
            np.dtype(shape.dtype),
            layout,
            hot,
            held,
            host,
            {},
            self.views[layer, name],
            fetched_from(self.store, host, shape.shape[0]),
        )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _unpacked(layout: ExpertLayout, source: jax.Array, count: int) -> Tree:
    return unpack(layout, jnp.broadcast_to(source[None], (count, source.size)))


@functools.partial(jax.jit, static_argnums=0)
def _fetched(
    layouts: tuple[ExpertLayout, ...], tables: list[jax.Array], experts: jax.Array
) -> list[Tree]:
    return [fetched(*own, experts) for own in zip(layouts, tables, strict=True)]


def zipf_bias(cfg: ModelConfig, power: float = 0.5) -> dict[int, np.ndarray]:
    """Return for each layer ``-power * log(rank)`` of its experts, in a random order."""
    found, rng = {}, np.random.default_rng(0)
    for layer, count in expert_counts(cfg).items():
        found[layer] = -power * np.log1p(rng.permutation(count)).astype(np.float32)
    return found


def skewed(lm: LanguageModel) -> LanguageModel:
    """Return the model with routers that prefer some experts; the slots are the same."""
    params = dict(lm.params)
    for layer, bias in zipf_bias(lm.config).items():
        own = params[f"layer_{layer}"]
        router = {**own["mlp"]["router"], "bias": jnp.asarray(bias, lm.dtype)}
        params[f"layer_{layer}"] = {**own, "mlp": {**own["mlp"], "router": router}}
    return dataclasses.replace(lm, params=params)


def changed(lm: LanguageModel, **fields: Any) -> LanguageModel:
    """Return the model with other fields of its policy."""
    return dataclasses.replace(lm, executor=offloaded(lm.executor).with_policy(**fields))


def forget(lm: LanguageModel, learns: bool = True) -> None:
    """Let every expert be as hot as any other; or let the slots stay."""
    for layer in range(lm.config.n_layers):
        for name in EXPERTS:
            tensor = lm.params[f"layer_{layer}"]["mlp"][name]["weight"]
            heat = np.zeros(tensor.shape[0], np.float32)
            place = offloaded(lm.executor).store.on_device
            heat = jax.device_put(heat, place) if learns else None
            tensor.held = tensor.held._replace(heat=heat)


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


def table_of(lm: LanguageModel, rows: int, tokens: int) -> ExpertUse:
    """Return the use that a run of random prompts measures."""
    run = random_run(lm, rows, tokens, 8, tokens + 8, lm.dtype, 512, SPREAD)
    run.experts.counts_all = True
    timed_step(run)
    assert lm.config.experts is not None
    return ExpertUse.of_counts(run.experts.counts, lm.config.experts.n_active)


def pinned(model: str, scheme: str) -> tuple[LayerConfig, list[ExpertLayout], list[Views]]:
    """Return (layer, layouts of the two products, their experts as the CPU sees them)."""
    cfg, store = load_config(model), Store(".")
    mlp = weight_shapes(cfg, jnp.bfloat16, f"none,experts_*={scheme}")["layer_0"]["mlp"]
    layouts, packed = [], []
    for name in ("experts_gate_up", "experts_down"):
        weight = prepare_tree(random_expert(mlp[name]["weight"]))
        parts, structure = jax.tree.flatten(weight)
        layouts.append(layout_of(parts, structure, "cpu"))
        packed.append(pack(layouts[-1], [np.asarray(part) for part in parts]))
    count = int(BYTES / sum(layout.nbytes for layout in layouts)) // AT_ONCE * AT_ONCE
    views = [
        views_of(layout, {expert: store.pin(data) for expert in range(count)})
        for layout, data in zip(layouts, packed, strict=True)
    ]
    return cfg.layers[0], layouts, views


def computed(
    layer: LayerConfig, layouts: Sequence[ExpertLayout], views: Sequence[Views], rows: int
) -> list[jax.Array]:
    """Return every expert's results for ``rows`` tokens of its own."""
    x = np.random.default_rng(0).standard_normal((AT_ONCE, rows, layer.d_model)).astype(np.float32)
    found, (up, down) = [], views
    for first in range(0, len(up), AT_ONCE):
        group = range(first, first + AT_ONCE)
        own = [up[expert] for expert in group], [down[expert] for expert in group]
        found.append(computed_pairs_of(layer, tuple(layouts), *own, (None, None), x))
    return found


class Report:
    """Prints a JSON line for each phase. A failure is told, and does not stop the rest."""

    def __init__(self, limit: float) -> None:
        self.begin, self.limit = time.perf_counter(), limit

    def __call__(self, name: str, work: Callable[..., Any], *what: Any) -> Any:
        now = time.perf_counter() - self.begin
        if now > self.limit:
            return None
        try:
            found = told = work(*what)
        except Exception as error:  # noqa: BLE001
            found, told = None, f"{type(error).__name__}: {str(error)[:400]}"
        print(json.dumps({"at": round(now, 1), name: told}), flush=True)
        return found


def together(calls: Iterable[Callable[[], Any]]) -> str:
    """Compile the programs of several phases at once."""
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()
    return "compiled"


def best(work: Callable[[], Any], times: int = 8) -> float:
    """Return the seconds of the fastest run but the first."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def link(host: Host) -> dict[str, Any]:
    """Return GB/s of experts that the host sends, and that the device's kernel reads."""
    layouts, pinned = tuple(host.layouts.values()), [host.tensors[0, name] for name in EXPERTS]
    each, found = sum(layout.nbytes for layout in layouts), {}
    for count in (1, 4, 16):
        pieces = [own[e] for e in range(count) for own in pinned]
        seconds = best(lambda: jax.device_put(pieces, host.store.on_device))  # noqa: B023
        found[f"{count} sent"] = count * each / seconds / 1e9
        if host.store.fetches:
            tables = [fetched_from(host.store, own, len(own)) for own in pinned]
            experts = jnp.arange(count, dtype=jnp.int32)
            seconds = best(lambda: _fetched(layouts, tables, experts))  # noqa: B023
            found[f"{count} read"] = count * each / seconds / 1e9
    return found


def memory(host: Host) -> dict[str, float]:
    """Return GB/s of a handler that only reads the experts of two layers, median and best."""
    views = [own for layer in (0, 1) for name in EXPERTS for own in [host.views[layer, name]]]
    codes = [leaves[0].reshape(-1, 64) for own in views for leaves in own.values()]
    read, nbytes = reading(codes)
    median, least = rounds({"read": read}, 3)["read"]
    return {"median": nbytes / median / 1e9, "best": nbytes / least / 1e9}


def decode(lm: LanguageModel, rows: int, warm: int, steps: int = 16) -> dict[str, Any]:
    """Time steps. step_ms: their median; quiet_ms: that of the fastest of ``TURNS`` parts."""
    run = random_run(lm, rows, 1, warm + steps, CAPACITY, lm.dtype, 512, SPREAD)
    for _ in range(warm):
        timed_step(run)
    run.experts.reset()
    times = [timed_step(run) for _ in range(steps)]
    size = -(-steps // TURNS)
    turns = [times[first : first + size] for first in range(0, steps, size)]
    step, count = statistics.median(times), lm.config.n_layers * steps
    stats = offloaded(lm.executor).store.device.memory_stats() or {}
    return {
        "tokens_per_second": rows / step,
        "step_ms": 1e3 * step,
        "quiet_ms": 1e3 * min(statistics.median(own) for own in turns),
        "fastest_ms": 1e3 * min(times),
        "slowest_ms": 1e3 * max(times),
        "loads_a_layer": run.experts.loads / count,
        "computed_a_layer": run.experts.computed[0] / count,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }


def prompt(lm: LanguageModel, tokens: int) -> dict[str, Any]:
    run = random_run(lm, 1, tokens, 2, tokens + 2, lm.dtype, LONG, SPREAD)
    seconds = timed_step(run)
    tally, layers = run.experts.tally, lm.config.n_layers
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "loads_a_layer": run.experts.loads / layers,
        "ahead_a_layer": tally.ahead / layers,
        "computed_a_layer": run.experts.computed[0] / layers,
    }


def on_device(tell: Report, cfg: ModelConfig, distinct: int, parts: set[str], small: bool) -> None:
    """The parts ``decode`` and ``prompt``."""
    host = Host(cfg, False, distinct)
    tell("pinned layers", lambda: distinct)
    policy = Policy.parse(f"{EVERY} experts=18.75/81.25 gpu_batch_size=16")

    def few(count: int, learns: bool, work: Callable[..., Any], *how: Any) -> Callable[[], Any]:
        """Return a call for the programs of the first layers, of a model of its own."""

        def call() -> None:
            lm = host.model(policy, cfg=cfg.first_layers(min(count, cfg.n_layers)))
            forget(lm, learns)
            work(lm, *how)

        return call

    lengths = (64, 128) if small else (512, LONG)
    if "decode" in parts:
        calls = [few(2 * SPAN, True, decode, 1, 2, 1), few(2 * SPAN, False, decode, 1, 2, 1)]
        tell("warm, 1 row", together, calls)
        lm = host.model(policy)
        forget(lm, learns=False)
        uneven = skewed(lm)
        tell("decode 1, even, slots that stay", decode, lm, 1, WARM // 2)
        tell("decode 1, skewed, slots that stay", decode, uneven, 1, WARM // 2)
        forget(lm)
        tell("decode 1, even, learned", decode, lm, 1, WARM // 2)
        tell("decode 1, skewed, learned", decode, uneven, 1, 2 * WARM)
        del lm, uneven
        tell("GB/s of the link", link, host)
    calls = [few(2 * SPAN, True, decode, 16, 2, 1)] if "decode" in parts else []
    if "prompt" in parts:
        calls += [few(2, True, prompt, length) for length in lengths]
    tell("warm, prompts and 16 rows", together, calls)
    lm = host.model(policy)
    uneven = skewed(lm)
    for length in reversed(lengths) if "prompt" in parts else ():
        tell(f"prompt {length}", prompt, lm, length)
    if "decode" in parts:
        forget(lm)
        tell("decode 16, skewed, learned", decode, uneven, 16, WARM // 2)
        forget(lm)
        tell("decode 16, even, learned", decode, lm, 16, WARM // 4)


def with_cpu(tell: Report, cfg: ModelConfig, distinct: int, small: bool) -> None:
    """The part ``cpu``."""
    host = Host(cfg, True, distinct)
    tell("pinned layers, in the CPU's layout", lambda: distinct)
    tell("GB/s of the host's memory", memory, host)
    lm = host.model(Policy.parse(f"{EVERY} experts=18.75/81.25 gpu_batch_size=16"))
    length = 64 if small else 512
    shared = [(costs, changed(lm, cpu_expert=costs[0], cpu_token=costs[1])) for costs in COSTS]
    (_, first), alone, uneven = shared[0], changed(lm, **ON_CPU), skewed(shared[0][1])
    tell("warm, 1 row", decode, alone, 1, 2, 2)
    tell("CPU alone: decode 1", decode, alone, 1, 6)
    tell("by mail, but none: decode 1", decode, changed(lm, cpu_expert=1e6), 1, 6)
    for costs, own in shared:
        tell(f"with CPU, costs {costs}: decode 1, even", decode, own, 1, WARM // 2)
    tell("warm, 16 rows", decode, first, 16, 2, 2)
    for costs, own in shared:
        tell(f"with CPU, costs {costs}: decode 16, even", decode, own, 16, WARM // 4)
    tell("CPU alone: decode 16", decode, alone, 16, 4, 8)
    forget(lm)
    tell("with CPU: decode 1, skewed, learned", decode, uneven, 1, 2 * WARM)
    forget(lm)
    tell("with CPU: decode 16, skewed, learned", decode, uneven, 16, WARM // 2)
    tell("warm, prompt", prompt, first, length)
    tell(f"with CPU: prompt {length}", prompt, first, length)


def solver(
    tell: Report, cfg: ModelConfig, distinct: int, small: bool, scheme: str, gb: float
) -> None:
    """The part ``solver``: predictions are of costs measured with few layers without windows."""
    assert cfg.experts is not None
    computes = unavailable() is None
    host, dtype = Host(cfg, computes, distinct, scheme), default_dtype()
    settings = PlannerSettings(dtype, dtype, scheme)
    total = int(0.96e9 * gb)  # the rest is for the allocator's gaps
    layer = sum(layout.nbytes for layout in host.layouts.values()) * cfg.experts.n_experts
    if small:
        total = int(0.6 * layer * cfg.n_layers) + 4 * 1024 * 128 * 4
    limits = MemoryLimits(total, 10**12, 0)
    # Layers that are all on the device; a span of four layers is one program.
    held = max(DEPTH, int(0.6 * total / layer) // DEPTH * DEPTH)
    alike = cfg.replace(window_layers=()).first_layers(min(held, 3 * DEPTH, cfg.n_layers))
    points: dict[str, list[StepPoint]] = {}
    model = functools.partial(host.model, cfg=alike)
    few, deep = depths(alike)
    costs = measure_experts(alike, model, dtype, 512, points.__setitem__, computes)
    pairs = zip(points["link"], points["link, shallow"], strict=True)
    each = [
        (short.seconds, (whole.seconds - short.seconds) / (deep - few)) for whole, short in pairs
    ]
    rest = [max(1e-9, seconds - few * further) for seconds, further in each]
    calibration = machine(costs, nnls([(1.0, rows) for rows in EXPERT_ROWS], rest))
    tell("costs", lambda: {**dataclasses.asdict(costs), "points": points})

    def task(rows: int, length: int = 1) -> Task:
        return Task(rows, length, 63)

    def planned(rows: int, use: str, length: int = 1) -> Policy:
        base = Policy(gpu_batch_size=rows)  # the solver's part for one batch of all rows
        found = one_by_one(cfg, base, use, calibration, task(rows, length), limits, settings)

        def rate(policy: Policy) -> float:
            return predict(cfg, policy, calibration, task(rows, length), settings).tokens_per_second

        return max(found, key=rate)

    def compared(policy: Policy, rows: int, lm: LanguageModel) -> dict[str, Any]:
        found = decode(lm, rows, 6, max(12, 112 // rows))
        expected = 1e3 * predict(cfg, policy, calibration, task(rows), settings).step
        steps = experts_step(cfg, costs, policy, (rows,), rows)
        need = need_of(cfg, policy, task(rows), settings, 0)
        return {
            "policy": str(policy),
            **found,
            "predicted_ms": expected,
            "prediction_error": expected / found["step_ms"] - 1,
            "prediction_error_quiet": expected / found["quiet_ms"] - 1,
            "predicted_loads": sum(x.loads for x in steps) / len(steps),
            "predicted_computed": sum(x.computed for x in steps) / len(steps),
            "predicted_device_bytes": need.device,
        }

    with tempfile.TemporaryDirectory() as folder:
        for kind, bias in (("even", None), ("skewed", zipf_bias(cfg))):
            use, path = None, ""
            if bias is not None:
                cold = Policy.parse(f"{EVERY} experts=0/100 gpu_batch_size=8")
                use = table_of(host.model(cold, None, bias), 8, 64 if small else 256)
                path = str(Path(folder) / "use.json")
                use.save(path)
            for rows in EXPERT_ROWS:
                name, policy = f"{kind}, {rows} rows", planned(rows, path)
                lm = host.model(policy, use, bias)
                tell(f"{name}, solver", compared, policy, rows, lm)
                for length in (32, 64) if small else (512, LONG):
                    if rows == EXPERT_ROWS[0] and bias is None:
                        del lm
                        lm = host.model(planned(rows, path, length))
                        tell(f"warm, prompt {length}", prompt, lm, length)
                        tell(f"solver, prompt {length}", prompt, lm, length)
                cold = Policy.parse(f"{EVERY} gpu_batch_size={rows} experts=0/100")
                cold = dataclasses.replace(cold, expert_use=path)
                lm = host.model(cold, use, bias)
                tell(f"{name}, all loaded", compared, cold, rows, lm)
                if computes:
                    cold = dataclasses.replace(cold, **ON_CPU)
                    tell(f"{name}, all on the CPU", compared, cold, rows, changed(lm, **ON_CPU))
                del lm


def schemes(tell: Report, count: int = 5) -> None:
    """The part ``schemes``: four experts a program, over more than a cache holds, in turns."""
    for scheme in ("mxfp4", "w4a16", "w8a16", "fp8-block"):
        layer, layouts, views = pinned("gpt-oss-120b", scheme)
        each = sum(layout.nbytes for layout in layouts)
        codes = [leaves[0].reshape(-1, 64) for own in views for leaves in own.values()]
        read, to_read = reading(codes)
        for rows in (1, 2, 4, 8, 16):
            work = functools.partial(computed, layer, layouts, views, rows)
            seconds = rounds({"read": read, "experts": work}, count)
            reads = [to_read / taken / 1e9 for taken in seconds["read"]]
            rates = [len(views[0]) * each / taken / 1e9 for taken in seconds["experts"]]
            found = {"GB/s: median, best": rates, "reading alone": reads}
            tell(f"{scheme}, {rows} tokens an expert", lambda: found)  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, default=["decode", "prompt", "cpu"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--distinct", type=int, default=2)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--scheme", default=SCHEME)
    parser.add_argument("--gb", type=float, default=16.0, help="of the device, for solver")
    args = parser.parse_args()
    enable_compilation_cache()
    cfg = load_config(args.model).replace(eos_token_ids=())
    assert cfg.experts is not None
    if args.small:
        experts = dataclasses.replace(cfg.experts, d_ff=128, n_experts=64)
        cfg = cfg.first_layers(3).replace(
            d_model=128, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=1024, experts=experts
        )
    parts, tell = set(args.parts), Report(args.limit)
    tell("device", lambda: [jax.devices()[0].device_kind, jax.__version__])
    if parts & {"decode", "prompt"}:
        on_device(tell, cfg, args.distinct, parts, args.small)
    if "cpu" in parts and unavailable() is None:
        with_cpu(tell, cfg, args.distinct, args.small)
    if "solver" in parts:
        solver(tell, cfg, args.distinct, args.small, args.scheme, args.gb)
    if "schemes" in parts:
        schemes(tell)


if __name__ == "__main__":
    main()

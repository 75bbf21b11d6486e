"""Offloading against the link: ``python -m benchmarks.offload [--only PART] [--out JSON]``.

Parts, each printed and written as it is ready:

    link     bytes a second between pinned host memory and the device, each way, by size of copy
    stream   Llama-3.1-8B's shape, bfloat16, weights in host memory: bytes a second beside those of
             one large copy in the same run, and the overlap
             max(loading alone, computing alone) / step
    zigzag   the same model: tokens a second with 8 batches a block and with 1
    budget   a 70B shape in 4 bit under a device budget of 16 GB, prompt 512, 32 new, 144 rows: a
             whole run, the allocator's peak and the link's bound
    cpu      the same 70B shape on the CPU alone (JAX_PLATFORMS=cpu): one layer and the head are
             timed and counted as often as they occur
    disk     Llama-3.2-3B's shape with its weights on disk: see ``offload_disk``

``link``, ``stream`` and ``zigzag`` run by default.  The allocator's peak is that of a process, so
``budget`` wants one of its own, which its allocator keeps to the budget:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.106 python -m benchmarks.offload --only budget

Weights are random bytes, one layer's repeated: what they say does not change how long they take.
``--small`` runs the same code on a small shape, which is what a CPU can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.offload_disk import from_disk
from jaxllama.config import ModelConfig, load_config
from jaxllama.evaluation.plan import measure
from jaxllama.evaluation.speed.harness import timed
from jaxllama.executors.offloaded.executor import SCHEME, offloaded
from jaxllama.executors.offloaded.room import layer_shapes
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache
from jaxllama.model.linear import Stream
from jaxllama.model.records import Hidden
from jaxllama.offload import units as programs
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.planner.accounting import unit_shapes
from jaxllama.planner.cost import PlannerSettings, Task, need_of
from jaxllama.planner.trial import (
    Tell,
    random_tree,
    repeated_model,
    start_run,
    streamed_bytes,
    timed_step,
)

BUDGET = 16 * 10**9  # bytes of device memory for the 70B shape


def link_rate(store: Store, nbytes: int, repeats: int = 5, up: bool = True) -> float:
    """Bytes a second from pinned host memory to the device, or down: the best of a few copies."""
    source, target = (store.on_host, store.on_device) if up else (store.on_device, store.on_host)
    array = jax.block_until_ready(jax.device_put(jnp.zeros((nbytes >> 10, 1024), jnp.int8), source))
    return array.nbytes / min(timed(jax.device_put, array, target)[1] for _ in range(repeats))


def links(store: Store, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Gigabytes a second each way, by megabytes a copy."""
    return {
        f"{size >> 20} MB": {
            name: link_rate(store, size, up=up) / 1e9
            for name, up in (("up", True), ("down", False))
        }
        for size in sizes
    }


def stream(lm: LanguageModel, task: Task, settings: PlannerSettings, link: float) -> dict[str, Any]:
    """How much of the link an overlapped step uses, and how much of the other work it hides.  The
    peak is known where it is above that of the process until now."""
    before = _memory(offloaded(lm.executor).store, "peak_bytes_in_use")
    found, _ = measure(lm, task, settings)
    is_new = before is None or found["device_bytes"] > before
    policy = offloaded(lm.executor).policy
    moved = streamed_bytes(lm.config, policy, settings)
    serial = dataclasses.replace(lm, executor=offloaded(lm.executor).with_policy(overlap=False))
    alone, _ = measure(serial, task, settings, steps=2)
    loading, computing = alone["lanes"]["load weights"], alone["lanes"]["compute"]
    rows = min(policy.block_size, task.rows)
    return {
        "step_seconds": found["step"],
        "tokens_per_second": rows / found["step"],
        "link_gigabytes_per_second": link / 1e9,
        "streamed_gigabytes_per_second": moved / found["step"] / 1e9,
        "share_of_link": moved / found["step"] / link,
        "overlap": max(loading, computing) / found["step"],
        "loading_alone_seconds": loading,
        "computing_alone_seconds": computing,
        "serial_step_seconds": alone["step"],
        "peak_device_bytes": found["device_bytes"] if is_new else None,
        "predicted_device_bytes": need_of(lm.config, policy, task, settings).device,
    }


def budget(
    cfg: ModelConfig, task: Task, settings: PlannerSettings, policy: Policy, link: float, tell: Tell
) -> None:
    """The large model under the budget: a whole run's rate, the peak and the bounds."""
    need, compiling = timed(need_of, cfg, policy, task, settings)
    lm, creating = timed(repeated_model, cfg, settings.dtype, policy, settings.scheme)
    stats = functools.partial(_memory, offloaded(lm.executor).store)
    about: dict[str, Any] = {
        "policy": str(policy),
        "weights_bytes": dataclasses.asdict(need.weights),
        "predicted_device_bytes": need.device,
        "allocator_limit": stats("bytes_limit"),
        "compile_seconds": compiling,
        "creation_seconds": creating,
        "peak_after_creation": stats("peak_bytes_in_use"),
    }
    tell("budget", about)
    begin = time.perf_counter()
    warm = start_run(lm, policy.gpu_batch_size, task, settings.kv_dtype)  # one batch's programs
    for _ in range(2):
        timed_step(warm)
    del warm
    about["warm_up_seconds"] = time.perf_counter() - begin
    tell("budget", about)
    run, seconds = start_run(lm, task.rows, task, settings.kv_dtype), []
    moved = streamed_bytes(cfg, policy, settings)
    for done in range(1, task.new + 1):
        seconds.append(timed_step(run))
        if done in (1, 2, 4, 8, 16, task.new):
            step = statistics.median(seconds[1:]) if done > 1 else None
            peak = stats("peak_bytes_in_use")
            about |= {
                "new_tokens": done,
                "prefill_seconds": seconds[0],
                "step_seconds": step,
                "total_seconds": sum(seconds),
                "tokens_per_second": task.rows * done / sum(seconds),
                "decode_tokens_per_second": step and task.rows / step,
                "link_bound_tokens_per_second": task.rows * link / moved,
                "peak_device_bytes": peak,
                "within_budget": peak and peak <= BUDGET,
                "within_prediction": peak and peak <= about["predicted_device_bytes"],
            }
            tell("budget", about)


def _memory(store: Store, name: str) -> int | None:
    return (store.device.memory_stats() or {}).get(name)


def on_cpu(cfg: ModelConfig, task: Task, settings: PlannerSettings) -> dict[str, Any]:
    """A decode step without a GPU, for all rows in one program."""
    units = unit_shapes(cfg, jnp.dtype(settings.dtype).name, settings.scheme, False)
    weights = {unit.kind: random_tree(tree) for unit, tree in units[1:2] + units[-1:]}
    rows = task.rows
    state = layer_shapes(cfg.layers[0], rows, task.capacity, settings.kv_dtype)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    layer = cfg.layers[units[1][0].layer]
    at = jnp.full((rows,), task.prompt, jnp.int32)
    one = jnp.ones_like(at)
    positions, rope = programs.positions_of(cfg, at, at + one, 1)
    x = jnp.ones((rows, 1, cfg.d_model), settings.dtype)
    times: dict[str, list[float]] = {"layer": [], "head": []}
    for _ in range(3):
        (_, state), seconds = timed(
            programs.run_layer,
            layer,
            "layer",
            weights["layer"],
            Stream(x, x),
            state,
            positions,
            one,
            rope,
        )
        times["layer"].append(seconds)
        times["head"].append(timed(programs.head_logits, cfg, weights["head"], Hidden(x[:, 0]))[1])
    step = cfg.n_layers * min(times["layer"]) + min(times["head"])
    return {
        "device": jax.devices()[0].device_kind,
        "layer_seconds": times["layer"],
        "head_seconds": times["head"],
        "step_seconds": step,
        "decode_tokens_per_second": rows / step,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path)
    options.add_argument("--only", choices=("link", "stream", "zigzag", "budget", "cpu", "disk"))
    options.add_argument("--policy", type=Policy.parse, help="of the budget part")
    args = options.parse_args()
    enable_compilation_cache()
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def tell(name: str, value: Any) -> None:
        report[name] = value
        print(json.dumps({name: value}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1))

    dtype = default_dtype()
    packed = PlannerSettings(dtype, "int4", SCHEME)
    task = Task(8, 32, 6) if args.small else Task(144, 512, 32)
    large = load_config("smollm2-135m" if args.small else "llama-3.1-70b")
    if args.only == "cpu":
        tell("cpu", on_cpu(large, task, packed))
        return
    if args.only == "disk":
        cfg = load_config("smollm2-135m" if args.small else "llama-3.2-3b")
        from_disk(cfg, dtype, tell)
        return
    store = Store(".")
    link = link_rate(store, 1 << (26 if args.small else 30))
    tell("link_gigabytes_per_second", link / 1e9)
    if args.only == "budget":
        policy = args.policy or Policy.parse(
            "0 100 100 0 100 0 compress_weight=true compress_cache=true "
            + (
                "gpu_batch_size=4 num_gpu_batches=2"
                if args.small
                else "gpu_batch_size=24 num_gpu_batches=6 prefill_batch_size=128"
            )
        )
        budget(large, task, packed, policy, link, tell)
        return
    if args.only in (None, "link"):
        tell("links", links(store, (1 << 20, 1 << 23, 1 << (25 if args.small else 27))))
    if args.only == "link":
        return
    small = load_config("smollm2-135m" if args.small else "llama-3.1-8b")
    prompt, rows, new = (32, 4, 6) if args.small else (128, 16, 12)
    plain = PlannerSettings(dtype, dtype)
    host = Policy(weights_device=0, weights_host=100, gpu_batch_size=rows)
    lm, creating = timed(repeated_model, small, dtype, host)
    tell("creation_seconds", creating)
    one = stream(lm, Task(rows, prompt, new), plain, link)
    tell("stream", one)
    if args.only in (None, "zigzag"):
        eight = dataclasses.replace(
            lm, executor=offloaded(lm.executor).with_policy(num_gpu_batches=8)
        )
        found = stream(eight, Task(8 * rows, prompt, new), plain, link)
        gain = found["tokens_per_second"] / one["tokens_per_second"]
        tell("zigzag", {**found, "times_one_batch": gain})


if __name__ == "__main__":
    main()

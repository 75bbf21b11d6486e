"""Offloading against the link: ``python -m jaxllama.offload.bench [--small] [--out JSON]``.

Three results, each printed as it is ready, in about eight minutes on one H200:

    stream   Llama-3.1-8B's shape, bfloat16, weights in host memory: bytes a second beside those of
             one large copy over the same link in the same run, and the overlap
             max(loading alone, computing alone) / step
    zigzag   the same model: tokens a second with 8 batches a block and with 1
    budget   a 70B shape in 4 bit under a device budget of 16 GB, prompt 512, 32 new, 144 rows:
             tokens a second, the allocator's peak, the link's bound, and attention's share

``--small`` runs the same code on a small shape, which is what a CPU can do.  Start the process with
``XLA_PYTHON_CLIENT_PREALLOCATE=false``, or the allocator's peak is not the model's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig, load_config
from jaxllama.language_model import default_dtype, enable_compilation_cache, load
from jaxllama.offload.accounting import unit_shapes, weights_footprint
from jaxllama.offload.calibration import moving
from jaxllama.offload.cost_model import Settings, Task, need_of
from jaxllama.offload.model import OffloadedModel
from jaxllama.offload.plan import measure
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store

BUDGET = 16 * 10**9  # bytes of device memory for the 70B shape


def link_rate(store: Store, nbytes: int, repeats: int = 5) -> float:
    """Bytes a second of pinned host memory to the device: the best of a few large copies."""
    source = jax.device_put(jnp.zeros((nbytes // 1024, 1024), jnp.int8), store.on_host)
    times = []
    for _ in range(repeats):
        jax.block_until_ready(source)
        begin = time.perf_counter()
        jax.block_until_ready(jax.device_put(source, store.on_device))
        times.append(time.perf_counter() - begin)
    return source.nbytes / min(times)


def streamed_bytes(cfg: ModelConfig, policy: Policy, settings: Settings) -> float:
    """Bytes of weights that one step loads."""
    shapes = unit_shapes(cfg, jnp.dtype(settings.dtype).name, settings.scheme, policy.sep_layer)
    units = [tree for unit, tree in shapes if unit.kind != "embed"]
    return sum(sum(moving(tree, policy.weights)[:2]) for tree in units)


def stream(lm: OffloadedModel, task: Task, settings: Settings, link: float) -> dict[str, Any]:
    """How much of the link an overlapped step uses, and how much of the other work it hides."""
    found, events = measure(lm, task, settings)
    moved = streamed_bytes(lm.config, lm.policy, settings)
    serial = dataclasses.replace(lm, policy=dataclasses.replace(lm.policy, overlap=False))
    alone, _ = measure(serial, task, settings, steps=2)
    loading, computing = alone["lanes"]["load weights"], alone["lanes"]["compute"]
    rows = min(lm.policy.block_size, task.rows)
    del events
    return {
        "step_seconds": found["step"],
        "tokens_per_second": rows / found["step"],
        "link_gigabytes_per_second": link / 1e9,
        "streamed_gigabytes_per_second": moved / found["step"] / 1e9,
        "share_of_link": moved / found["step"] / link,
        "overlap": max(loading, computing) / found["step"],
        "serial_step_seconds": alone["step"],
        "peak_device_bytes": found["device_bytes"],
    }


def budget(source: str, task: Task, settings: Settings, policy: Policy, link: float) -> Any:
    """The large model under the budget: rate, peak and bounds."""
    cfg = load_config(source)
    need = need_of(cfg, policy, task, settings)
    lm = load(source, settings.dtype, policy=policy, random=True)
    assert isinstance(lm, OffloadedModel)
    found, _ = measure(lm, task, settings, steps=3)
    moved = streamed_bytes(cfg, policy, settings)
    rows = min(policy.block_size, task.rows)
    seconds = found["prefill"] + (task.new - 1) * found["step"]
    return {
        "policy": str(policy),
        "weights_bytes": dataclasses.asdict(weights_footprint(cfg, policy, *_words(settings))[0]),
        "predicted_device_bytes": need.device,
        "peak_device_bytes": found["device_bytes"],
        "within_budget": found["device_bytes"] <= BUDGET,
        "prefill_seconds": found["prefill"],
        "step_seconds": found["step"],
        "tokens_per_second": rows * task.new / seconds,
        "decode_tokens_per_second": rows / found["step"],
        "link_bound_tokens_per_second": rows / (moved / link),
        "lanes": found["lanes"],
    }


def _words(settings: Settings) -> tuple[Any, str | None]:
    return settings.dtype, settings.scheme


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--small", action="store_true")
    options.add_argument("--out", type=Path)
    options.add_argument("--only", choices=("stream", "zigzag", "budget"))
    args = options.parse_args()
    enable_compilation_cache()
    dtype = default_dtype()
    plain, packed = Settings(dtype, dtype), Settings(dtype, "int4", "w4a16")
    small, large = ("smollm2-135m", "smollm2-135m") if args.small else (
        "llama-3.1-8b", "llama-3.1-70b"
    )  # fmt: skip
    prompt, rows, new = (32, 4, 6) if args.small else (128, 16, 12)
    host = Policy(weights_device=0, weights_host=100, gpu_batch_size=rows)
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def tell(name: str, value: Any) -> None:
        report[name] = value
        print(json.dumps({name: value}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1))

    lm = None
    link = link_rate(Store("."), 1 << (26 if args.small else 30))
    # First, because the allocator's peak is that of the whole process.
    if args.only in (None, "budget"):
        task = Task(8, 32, 6) if args.small else Task(144, 512, 32)
        policy = Policy.parse(
            "0 100 0 100 100 0 compress_weight=true compress_cache=true sep_layer=true "
            + ("gpu_batch_size=4 num_gpu_batches=2" if args.small
               else "gpu_batch_size=24 num_gpu_batches=6 prefill_batch_size=128")
        )  # fmt: skip
        tell("budget", budget(large, task, packed, policy, link))
    if args.only in (None, "stream", "zigzag"):
        lm = load(small, dtype, policy=host, random=True)
        one = stream(lm, Task(rows, prompt, new), plain, link)
        tell("stream", one)
    if args.only in (None, "zigzag"):
        assert isinstance(lm, OffloadedModel)
        eight = dataclasses.replace(lm, policy=dataclasses.replace(host, num_gpu_batches=8))
        found = stream(eight, Task(8 * rows, prompt, new), plain, link)
        gain = found["tokens_per_second"] / one["tokens_per_second"]
        tell("zigzag", {**found, "times_one_batch": gain})


if __name__ == "__main__":
    main()

"""How fast a model decodes on a mesh, beside one device of it, and what its collectives cost.

    python -m jaxllama.parallel_bench --model llama-3.1-70b --quantize w4a16 --mesh model=2
    python -m jaxllama.parallel_bench --model llama-3.1-8b --mesh model=1 model=2 model=4 --batch 1

Weights are random, drawn leaf by leaf and put on the mesh at once, so a model that fits no single
device can be measured.  One JSON line per mesh and batch: tokens a second, scaling efficiency
against the first mesh of the call (speed-up over devices), the bytes a device moves per step and
their share of its memory's measured rate, the collectives of the compiled loop, and the time in
them from a profiler trace of a few steps (None where the trace names none).

The profiler makes XLA launch op by op, unless XLA_FLAGS has
--xla_enable_command_buffers_during_profiling=true, and the time in a collective is also that of
waiting for the device that comes last.  ``compiler_options`` says how the loop is compiled.

Left out: prefill, and anything a CPU's numbers would say of a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import generation
from jaxllama.cache import init_cache
from jaxllama.decode_program import cache_bytes_per_step, memory_bandwidth
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.sampling import Sampling, SamplingParams
from pallas_kernels.qtensor import packed_bytes

_COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_PROMPT = 8


def measure(lm: LanguageModel, batch: int, steps: int, runs: int, kv_dtype: str | None) -> dict:
    """Greedy decoding of ``batch`` rows; medians."""
    cfg, mesh = lm.config, lm.mesh
    assert mesh is not None
    sampling = SamplingParams.stack([Sampling()] * batch, cfg.vocab_size)
    stop_ids = jnp.zeros((0,), jnp.int32)
    tokens = jnp.ones((batch, _PROMPT), jnp.int32)
    lengths = jnp.full((batch,), _PROMPT, jnp.int32)
    dtype = kv_dtype or lm.dtype
    loop = generation.loop_for(lm.params)

    def start() -> generation.GenerateState:
        cache = init_cache(cfg, batch, _PROMPT + steps, dtype, mesh=mesh)
        state = generation.start(
            cfg, lm.params, tokens, lengths, cache, sampling, stop_ids, max_new_tokens=steps
        )
        return jax.block_until_ready(state)

    def advance(state: generation.GenerateState, until: int) -> None:
        jax.block_until_ready(loop(cfg, lm.params, state, sampling, stop_ids, np.int32(until)))

    times = []
    for _ in range(runs + 2):  # the first compiles, the second fills the allocator
        state = start()
        begun = time.perf_counter()
        advance(state, steps)
        times.append((time.perf_counter() - begun) / (steps - 1))
    seconds = statistics.median(times[2:])
    state = start()
    program = loop.lower(cfg, lm.params, state, sampling, stop_ids, np.int32(steps)).compile()
    moved = _device_bytes(lm) + _cache_share(lm, state, steps)
    traced = min(steps, 9)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            advance(state, traced)
        in_collectives = collective_seconds(Path(folder))
    return {
        "mesh": dict(mesh.shape), "batch": batch, "step_seconds": seconds,
        "tokens_per_second": batch / seconds, "bytes_per_device": moved,
        "gigabytes_per_second_per_device": moved / seconds / 1e9,
        "share_of_ceiling": moved / seconds / memory_bandwidth(),
        "collectives": dict(Counter(re.findall(rf" ({_COLLECTIVES})(?:-start)?\(",
                                               program.as_text()))),
        "collective_seconds_per_step": (
            None if in_collectives is None else in_collectives / (traced - 1) / mesh.size
        ),
    }  # fmt: skip


def _device_bytes(lm: LanguageModel) -> int:
    """Bytes of weights that the fullest device reads a step; of an embedding only some rows."""
    held: Counter[int] = Counter()
    params = dict(lm.params)
    if not lm.config.tie_embeddings:
        del params["embed"]
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += packed_bytes(shard.data.size, leaf.dtype)
    return max(held.values())


def _cache_share(lm: LanguageModel, state: generation.GenerateState, steps: int) -> int:
    assert lm.mesh is not None
    return cache_bytes_per_step(lm.config, state.cache, _PROMPT + steps // 2) // lm.mesh.size


def collective_seconds(folder: Path) -> float | None:
    """Seconds of the kernels that are collectives in a trace (NCCL's, or XLA's own, which it names
    after the sum), all devices together; None where it has no such kernel on a device."""
    total, found = 0.0, False
    for path in folder.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes())).get("traceEvents", [])
        # The host has rows of the same names; what counts is what a stream of a device ran.
        labels = {
            (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
            for event in events
            if event.get("name") in ("process_name", "thread_name")
        }
        devices = {pid for (kind, pid, _), label in labels.items()
                   if kind == "process_name" and "/device:" in label}  # fmt: skip
        streams = {(pid, tid) for (kind, pid, tid), label in labels.items()
                   if kind == "thread_name" and pid in devices and "Stream" in label}  # fmt: skip
        for event in events:
            if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams:
                if re.search(r"nccl|allreducekernel|^psum", event["name"], re.IGNORECASE):
                    total, found = total + event["dur"] / 1e6, True
    return total if found else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jaxllama.parallel_bench", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset; weights are random")
    parser.add_argument("--mesh", nargs="+", required=True, help="one or more, as model=2")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--dtype", help="of weights and activations")
    parser.add_argument("--quantize", help="a scheme")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    if args.steps < 2 or args.runs < 1:
        raise JaxLlamaError("parallel_bench: --steps from 2 on, --runs from 1 on")
    first: dict[int, dict[str, Any]] = {}
    for mesh in args.mesh:
        lm = load(args.model, args.dtype, args.quantize, mesh=mesh, random=True)
        for batch in args.batch:
            row = measure(lm, batch, args.steps, args.runs, args.kv_dtype)
            base = first.setdefault(batch, row)
            row["speedup"] = base["step_seconds"] / row["step_seconds"]
            devices = lm.mesh.size / np.prod(list(base["mesh"].values()))
            row["scaling_efficiency"] = row["speedup"] / float(devices)
            report = {"model": args.model, "quantize": args.quantize, "dtype": lm.dtype.name, **row}
            print(json.dumps(report), flush=True)
        del lm  # before the next one is drawn


if __name__ == "__main__":
    main()

"""How a model decodes on a mesh, beside one device of it, and what its collectives cost.

    python -m benchmarks.parallel --model llama-3.1-70b --quantize w4a16 --mesh model=2
    python -m benchmarks.parallel --model llama-3.1-8b --mesh model=1 model=2 model=4 --batch 1

Weights are random, drawn leaf by leaf and put on the mesh at once, so a model that fits no single
device can be measured; the loop is ``generate``'s own.  Two JSON lines per mesh and batch, as they
are known: tokens a second, scaling efficiency against the first mesh of the call (speed-up over
devices), the bytes a device moves per step and their share of its memory's measured rate, bytes of
weights predicted and held; then where the time of a step goes, from a profiler's trace
(``evaluation.speed.trace``; null on a CPU).  A call has 256 steps, since starting one costs 9 ms
on four H200s.

Left out: prefill, long contexts (a row has only what it writes), and anything a CPU's numbers would
say of a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed.harness import (
    Decoding,
    cache_bytes_per_step,
    median,
    memory_bandwidth,
    read_in_step,
    timed,
)
from jaxllama.evaluation.speed.trace import profiled_graphs, step_parts
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.model.shardings import specs
from jaxllama.progress import working
from pallas_kernels.qtensor import packed_bytes

_TRACED = 8  # steps


def _held(params: Any) -> Counter[int]:
    """Bytes by device."""
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += packed_bytes(shard.data.size, leaf.dtype)
    return held


def memory(lm: LanguageModel) -> dict[str, Any]:
    """Bytes of weights a device: what the way they are split says, the most that one holds, and
    what each device's allocator has in use (null on a CPU)."""
    assert lm.mesh is not None
    splits: list[PartitionSpec] = jax.tree.leaves(
        specs(lm.params, lm.mesh), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    predicted = 0
    for leaf, split in zip(jax.tree.leaves(lm.params), splits, strict=True):
        names = [
            name for axis in split if axis for name in ((axis,) if isinstance(axis, str) else axis)
        ]
        shards = math.prod(lm.mesh.shape[name] for name in names)
        predicted += packed_bytes(leaf.size, leaf.dtype) // shards
    return {
        "predicted_weight_bytes": predicted,
        "weight_bytes": max(_held(lm.params).values()),
        "bytes_in_use": [
            (device.memory_stats() or {}).get("bytes_in_use") for device in lm.mesh.devices.flat
        ],
    }


def run(decoding: Decoding, room: int, steps: int) -> float:
    """Seconds of so many steps of rows with room for ``room``."""
    return decoding.run(decoding.begun(room), 1 + steps)


def measure(decoding: Decoding, steps: int, runs: int) -> dict[str, Any]:
    lm = decoding.lm
    assert lm.mesh is not None
    found = memory(lm)
    seconds = median(lambda: run(decoding, steps, steps), runs, warm=1) / steps
    cache = cache_bytes_per_step(lm.config, decoding.begun(steps).cache, steps // 2)
    # What the fullest device reads a step.
    moved = max(_held(read_in_step(lm)).values()) + cache // lm.mesh.size
    return {
        "step_seconds": seconds,
        "tokens_per_second": decoding.batch / seconds,
        "bytes_per_device": moved,
        "gigabytes_per_second_per_device": moved / seconds / 1e9,
        "share_of_ceiling": moved / seconds / memory_bandwidth(),
        **found,
    }


def trace(decoding: Decoding, steps: int) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        decoding.trace(folder, decoding.begun(steps), 1 + _TRACED)
        return step_parts(Path(folder), _TRACED)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.parallel", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset; weights are random")
    parser.add_argument("--mesh", nargs="+", required=True, help="one or more, as model=2")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--dtype", help="of weights and activations")
    parser.add_argument("--quantize", help="a scheme")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    if args.steps < _TRACED or args.runs < 1:
        raise JaxLlamaError(f"benchmarks.parallel: --steps from {_TRACED} on, --runs from 1 on")
    profiled_graphs()
    first: dict[int, dict[str, Any]] = {}
    for mesh in args.mesh:
        begun = time.perf_counter()
        lm = load(args.model, args.dtype, args.quantize, mesh=mesh, random=True, progress=True)
        jax.block_until_ready(lm.params)
        print(f"{mesh}: loaded in {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
        assert lm.mesh is not None
        for batch in args.batch:
            about = {
                "model": args.model,
                "quantize": args.quantize,
                "dtype": lm.dtype.name,
                "mesh": dict(lm.mesh.shape),
                "batch": batch,
            }
            with working(f"{mesh}, batch {batch}: compiling"):
                decoding = Decoding(lm, batch, args.kv_dtype)
                _, compiling = timed(run, decoding, args.steps, 2)
            row = {
                "devices": lm.mesh.size,
                "compile_seconds": compiling,
                **measure(decoding, args.steps, args.runs),
            }
            base = first.setdefault(batch, row)
            row["speedup"] = base["step_seconds"] / row["step_seconds"]
            row["scaling_efficiency"] = row["speedup"] * base["devices"] / row["devices"]
            print(json.dumps({**about, **row}), flush=True)
            print(json.dumps({**about, "step_parts": trace(decoding, args.steps)}), flush=True)
        del lm, decoding  # before the next one is drawn


if __name__ == "__main__":
    main()

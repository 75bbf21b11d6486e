"""How a model decodes on a mesh, beside one device of it, and what its collectives cost.

    python -m jaxllama.bench.parallel --model llama-3.1-70b --quantize w4a16 --mesh model=2
    python -m jaxllama.bench.parallel --model llama-3.1-8b --mesh model=1 model=2 model=4 --batch 1

Weights are random, drawn leaf by leaf and put on the mesh at once, so a model that fits no single
device can be measured; the loop is ``generate``'s own.  Two JSON lines per mesh and batch, as they
are known: tokens a second, scaling efficiency against the first mesh of the call (speed-up over
devices), the bytes a device moves per step and their share of its memory's measured rate, bytes of
weights predicted and held; then where the time of a step goes, from a profiler's trace
(``bench.trace``; null on a CPU).  A call has 256 steps, since starting one costs 9 ms on four
H200s.

Left out: prefill, long contexts (a row has only what it writes), and anything a CPU's numbers would
say of a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllama import generation
from jaxllama.bench.decode_program import cache_bytes_per_step, memory_bandwidth
from jaxllama.bench.trace import profiled_graphs, step_parts
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.model.cache import init_cache
from jaxllama.parallel.collectives import MODEL_AXIS
from jaxllama.parallel.shardings import specs
from jaxllama.progress import working
from jaxllama.sampling import Sampling, SamplingParams
from pallas_kernels.qtensor import packed_bytes

_TRACED = 8  # steps


class Decoding:
    """Greedy decoding of ``batch`` rows, ``steps`` tokens each, compiled when it is made."""

    def __init__(self, lm: LanguageModel, batch: int, steps: int, kv_dtype: str | None) -> None:
        self.lm, self.batch, self.steps = lm, batch, steps
        self.kv_dtype = kv_dtype or lm.dtype
        assert lm.mesh is not None
        # Where the loop wants them: a call would copy each from the first device.
        self.everywhere = NamedSharding(lm.mesh, PartitionSpec())
        self.sampling, self.stop_ids = jax.device_put(
            (SamplingParams.stack([Sampling()] * batch, lm.config.vocab_size),
             jnp.zeros((0,), jnp.int32)),
            self.everywhere,
        )  # fmt: skip
        self.loop = generation.loop_for(lm.params)
        begun = time.perf_counter()
        self.run(2)
        self.compile_seconds = time.perf_counter() - begun

    def state(self) -> generation.GenerateState:
        """One token a row and an empty cache: a prompt's program would cost a compilation."""
        shape = self.batch, self.steps + 1
        cfg, mesh = self.lm.config, self.lm.mesh
        rows = (
            jnp.ones(shape, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            jnp.ones((self.batch,), jnp.int32),
            jnp.zeros((self.batch,), bool),
            jnp.int32(1),
        )
        return jax.block_until_ready(generation.GenerateState(
            *jax.device_put(rows, self.everywhere),
            cache=init_cache(cfg, self.batch, self.steps, self.kv_dtype, mesh=mesh),
            history=None,
        ))  # fmt: skip

    def run(self, steps: int) -> float:
        """Seconds of so many."""
        cfg, params, state = self.lm.config, self.lm.params, self.state()
        begun = time.perf_counter()
        jax.block_until_ready(
            self.loop(cfg, params, state, self.sampling, self.stop_ids, np.int32(1 + steps))
        )
        return time.perf_counter() - begun

    def bytes_per_device(self) -> int:
        """What the fullest device reads a step: of an embedding only some rows."""
        params = dict(self.lm.params)
        if not self.lm.config.tie_embeddings:
            del params["embed"]
        assert self.lm.mesh is not None
        cache = cache_bytes_per_step(self.lm.config, self.state().cache, self.steps // 2)
        return max(_held(params).values()) + cache // self.lm.mesh.size

    def memory(self) -> dict[str, Any]:
        """Bytes of weights a device: what the way they are split says, the most that one holds, and
        what each device's allocator has in use (null on a CPU)."""
        assert self.lm.mesh is not None
        n, params = self.lm.mesh.shape[MODEL_AXIS], self.lm.params
        splits = jax.tree.leaves(
            specs(params), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        predicted = sum(
            packed_bytes(leaf.size, leaf.dtype) // (n if MODEL_AXIS in split else 1)
            for leaf, split in zip(jax.tree.leaves(params), splits, strict=True)
        )
        return {
            "predicted_weight_bytes": predicted,
            "weight_bytes": max(_held(params).values()),
            "bytes_in_use": [
                (device.memory_stats() or {}).get("bytes_in_use")
                for device in self.lm.mesh.devices.flat
            ],
        }

    def trace(self) -> dict[str, Any] | None:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(_TRACED)
            return step_parts(Path(folder), _TRACED)


def _held(params: Any) -> Counter[int]:
    """Bytes by device."""
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += packed_bytes(shard.data.size, leaf.dtype)
    return held


def measure(decoding: Decoding, runs: int) -> dict[str, Any]:
    memory = decoding.memory()
    decoding.run(decoding.steps)  # warms up
    seconds = statistics.median(decoding.run(decoding.steps) for _ in range(runs)) / decoding.steps
    moved = decoding.bytes_per_device()
    return {
        "compile_seconds": decoding.compile_seconds,
        "step_seconds": seconds,
        "tokens_per_second": decoding.batch / seconds,
        "bytes_per_device": moved,
        "gigabytes_per_second_per_device": moved / seconds / 1e9,
        "share_of_ceiling": moved / seconds / memory_bandwidth(),
        **memory,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jaxllama.bench.parallel", allow_abbrev=False)
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
        raise JaxLlamaError(f"parallel_bench: --steps from {_TRACED} on, --runs from 1 on")
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
                "model": args.model, "quantize": args.quantize, "dtype": lm.dtype.name,
                "mesh": dict(lm.mesh.shape), "batch": batch,
            }  # fmt: skip
            with working(f"{mesh}, batch {batch}: compiling"):
                decoding = Decoding(lm, batch, args.steps, args.kv_dtype)
            row = {"devices": lm.mesh.size, **measure(decoding, args.runs)}
            base = first.setdefault(batch, row)
            row["speedup"] = base["step_seconds"] / row["step_seconds"]
            row["scaling_efficiency"] = row["speedup"] * base["devices"] / row["devices"]
            print(json.dumps({**about, **row}), flush=True)
            print(json.dumps({**about, "step_parts": decoding.trace()}), flush=True)
        del lm, decoding  # before the next one is drawn


if __name__ == "__main__":
    main()

"""The products of a decode step on the CPU, in codes and in float32, beside memory's rate.

    python -m benchmarks.kernels.cpu [--model smollm2|1b] [--schemes int4-32,int8] [--rows 1]
                                       [--rounds 7]

All products of all layers and the head, one behind the other, each with its own weights: nothing
stays in a cache from step to step (except what fits one).  Rounds alternate in one process.
Memory's rate is that of a handler that only loads the largest set of codes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.shapes import LLAMA_1B, SMOLLM2_135M
from pallas_kernels.cpu import CpuWeight, jit, prepare
from pallas_kernels.cpu.handler import Phase, Program
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import FLOAT4, QTensor, tree_bytes
from pallas_kernels.rounding import E4M3, E8M0, FORMATS

MODELS = {"smollm2": (SMOLLM2_135M, 30), "1b": (LLAMA_1B, 16)}
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Read(Program):
    """Loads ``q[tiles, bytes]``, whole chunks of 64 KB, and keeps a number of each."""

    arguments = 1
    results = 1

    def phases(self, target: Any) -> Sequence[Phase]:
        def count(e, call):
            size = e.b.mul(call.argument_dim(0, 0), call.argument_dim(0, 1))
            return e.b.udiv(size, e.i64(_CHUNK))

        def chunk(e, call, i):
            start = e.at(call.argument(0), e.b.mul(i, e.i64(_CHUNK)))

            def body(at, *sums):
                return [
                    e.b.xor(s, e.load(start, e.vector(e.I32), e.b.add(at, e.i64(64 * j))))
                    for j, s in enumerate(sums)
                ]

            sums = e.loop(_CHUNK, body, [e.splat(e.i32(0))] * 4, step=256)
            total = e.b.xor(e.b.xor(sums[0], sums[1]), e.b.xor(sums[2], sums[3]))
            e.store(e.sum(total), call.result(0), e.b.mul(i, e.i64(4)))

        return [Phase(count, chunk)]


def weights(shapes: Sequence[tuple[str, int, int]], layers: int, scheme: str) -> list[Any]:
    """Of each product in its order.  scheme: float32, mxfp4, nvfp4, or a dtype and a group,
    "int4-32", "float8_e4m3fn-64"."""
    rng = np.random.default_rng(0)
    *of_layer, head = shapes
    found = []
    for _, n, k in [*(of_layer * layers), head]:
        if scheme == "float32":
            found.append(jnp.asarray(np.broadcast_to(np.float32(0.01), (n, k)).copy()))
            continue
        if scheme in FORMATS:
            w = prepare(_float4(rng, n, k, scheme))
            assert isinstance(w, CpuWeight), w
            found.append(jax.device_put(w))
            continue
        dtype, _, group = scheme.partition("-")
        low, high = (-8, 8) if dtype == "int4" else (-127, 128)
        q = rng.integers(low, high, (n, k), dtype=np.int8).astype(jnp.dtype(dtype))
        scale = np.full((n, k // int(group) if group else 1), 2.0**-8, np.float32)
        w = prepare(QTensor(q, scale))
        assert isinstance(w, CpuWeight), w
        found.append(jax.device_put(w))
    return found


def _float4(rng: np.random.Generator, n: int, k: int, scheme: str) -> QTensor:
    """Random codes; scales of 2^-8."""
    q = rng.integers(0, 16, (n, k), dtype=np.uint8).view(FLOAT4)
    groups = (n, k // FORMATS[scheme].group)
    if scheme == "mxfp4":
        return QTensor(q, np.full(groups, 2.0**-8, jnp.dtype(E8M0)))
    unit = np.full((n, 1), 2.0**-8, np.float32)
    return QTensor(q, np.ones(groups, jnp.dtype(E4M3)), unit=unit)


def step(x: jax.Array, found: list[Any]) -> jax.Array:
    """Each product reads what the one before has made, in the shape it wants."""
    for w in found:
        x = jnp.resize(x, (x.shape[0], w.shape[1])) if x.shape[1] < w.shape[1] else x
        x = quantized_matmul(x[:, : w.shape[1]] * 0.01, w)
    return x


def reading(codes: Sequence[jax.Array]) -> tuple[Callable[[], Any], int]:
    """What reads these arrays ``[tiles, bytes]`` and does nothing else, on XLA's threads, and the
    number of bytes that it reads: whole chunks."""
    name = jit.register(Read())

    @jax.jit
    def read(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        sizes = [jax.ShapeDtypeStruct((q.size // _CHUNK,), jnp.int32) for q in arrays]
        return [jax.ffi.ffi_call(name, out)(q) for q, out in zip(arrays, sizes, strict=True)]

    return functools.partial(read, codes), sum(q.size // _CHUNK * _CHUNK for q in codes)


def rounds(timed: dict[str, Callable[[], Any]], count: int) -> dict[str, tuple[float, float]]:
    """(median, least) seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for f in timed.values():
        jax.block_until_ready(f())
    for _ in range(count):
        for name, f in timed.items():
            start = time.perf_counter()
            jax.block_until_ready(f())
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(found), min(found)) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--schemes", default="float32,int8,int4-32")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    shapes, layers = MODELS[args.model]
    sets = {scheme: weights(shapes, layers, scheme) for scheme in args.schemes.split(",")}
    of_codes = [ws for ws in sets.values() if isinstance(ws[0], CpuWeight)]
    if not of_codes:
        parser.error("--schemes: name one of codes too: memory's rate is that of reading them")
    read, n_bytes = reading([w.q for w in max(of_codes, key=tree_bytes)])
    steps = {scheme: jax.jit(step) for scheme in sets}
    for rows in map(int, args.rows.split(",")):
        x = jnp.ones((rows, shapes[0][2]), jnp.float32)
        timed: dict[str, Callable[[], Any]] = {"read": read}
        for scheme, found in sets.items():
            timed[scheme] = functools.partial(steps[scheme], x, found)
        seconds = rounds(timed, args.rounds)
        rates = [n_bytes / took for took in seconds["read"]]
        print(f"{args.model}, {rows} rows; of {args.rounds} rounds the median and the best")
        print(f"  memory   {rates[0] / 1e9:27.1f} {rates[1] / 1e9:27.1f} GB/s")
        for scheme, found in sets.items():
            size = tree_bytes(found)
            columns = (
                f"{1e3 * took:8.2f} ms {size / took / 1e9:5.1f} GB/s {size / took / rate:5.0%}"
                for took, rate in zip(seconds[scheme], rates, strict=True)
            )
            print(f"  {scheme:8} {' '.join(columns)}")


if __name__ == "__main__":
    main()

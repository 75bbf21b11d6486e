"""Times the prefill kernels on this GPU: ``python -m pallas_kernels.bench_prefill [--tiles]``.

Every row is the sum of the device time of all kernels of one jitted call, over distinct weights,
so that what XLA adds around a kernel is counted.  ``--tiles`` prints the sweep that the table in
``quantized_matmul_prefill_mosaic`` came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import quantized_matmul_prefill_mosaic as prefill
from pallas_kernels.qtensor import QTensor

MAIN = (14336, 4096)
OTHERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SCHEMES = ("w8a8", "fp8", "w4a16", "w4a16_zeros", "w8a16")
_LAST = (((1,), (1,)), ((), ()))


def operands(scheme: str, m: int, n: int, k: int, seed: int = 0):
    """(x, w, bias) of one product, random."""
    keys = jax.random.split(jax.random.key(seed), 5)
    bias = jax.random.normal(keys[4], (n,)).astype(jnp.bfloat16)
    if scheme in ("w8a8", "fp8"):
        dtype = jnp.int8 if scheme == "w8a8" else jnp.float8_e4m3fn

        def words(key, rows):
            x = jax.random.normal(key, (rows, k))
            x = jnp.round(x * 40) if dtype == jnp.int8 else x * 100
            return jnp.clip(x, -127, 127).astype(dtype)

        def scales(key, rows):
            return 0.01 * jnp.exp(jax.random.normal(key, (rows, 1)))

        x = QTensor(words(keys[0], m), scales(keys[1], m))
        return x, QTensor(words(keys[2], n), scales(keys[3], n)), bias
    x = jax.random.normal(keys[0], (m, k)).astype(jnp.bfloat16)
    low, high, dtype = (-127, 128, jnp.int8) if scheme == "w8a16" else (-8, 8, jnp.int4)
    q = jax.random.randint(keys[1], (n, k), low, high).astype(dtype)
    groups = 1 if scheme == "w8a16" else k // 128
    scale = (0.01 * jnp.exp(jax.random.normal(keys[2], (n, groups)))).astype(jnp.bfloat16)
    zero = None
    if scheme == "w4a16_zeros":
        zero = jax.random.randint(keys[3], scale.shape, -8, 8).astype(jnp.int8)
    return x, QTensor(q, scale, zero), bias


def kernel(x, w, bias, tile=None):
    op = prefill.matmul_w8a8 if isinstance(x, QTensor) else prefill.matmul_weight_only
    return op(x, w, bias, jnp.bfloat16, tile)


def xla(x, w, bias):
    """What XLA makes of the same product: its 8-bit dot, or a bf16 dot with a bf16 weight."""
    if not isinstance(x, QTensor):
        return lax.dot_general(x, w, _LAST)
    kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    acc = lax.dot_general(x.q, w.q, _LAST, preferred_element_type=kind).astype(jnp.float32)
    return (acc * x.scale * w.scale[:, 0] + bias.astype(jnp.float32)).astype(jnp.bfloat16)


def microseconds(f, sets, iterations: int = 6) -> float:
    """Median device time of one ``f(*operands)``."""
    run = jax.jit(lambda all_sets: [f(*s) for s in all_sets])
    jax.block_until_ready(run(sets))
    _, times = profiler.measure(run, iterations=iterations)(sets)
    return sorted(times)[len(times) // 2] * 1e3 / len(sets)


def row(label: str, f, sets, m: int, n: int, k: int) -> None:
    us = microseconds(f, sets)
    print(f"{label:44s} {n:6d} {k:6d} {m:5d} {us:9.1f} us {2 * m * n * k / us / 1e6:6.0f} T",
          flush=True)  # fmt: skip


def copies(m: int) -> int:
    return 3 if m <= 512 else 1


def table(shapes, rows, schemes, with_xla: bool) -> None:
    for (n, k), m in ((shape, m) for shape in shapes for m in rows):
        for scheme in schemes:
            sets = [operands(scheme, m, n, k, seed) for seed in range(copies(m))]
            row(scheme, kernel, sets, m, n, k)
            if with_xla and scheme in ("w8a8", "fp8"):
                row(f"  XLA {scheme}", xla, sets, m, n, k)
            if with_xla and scheme == "w8a16":
                sets = [(x, w.q.astype(jnp.bfloat16), b) for x, w, b in sets]
                row("  XLA bf16", xla, sets, m, n, k)


def tiles(rows=(64, 128, 256, 1024, 8192)) -> None:
    n, k = MAIN
    for m in rows:
        for scheme, options in (("w8a8", prefill._PAIR), ("w4a16", prefill._WEIGHT)):
            sets = [operands(scheme, m, n, k, seed) for seed in range(copies(m))]
            for tile, _ in options:
                label = f"{scheme} {'/'.join(str(v) for v in dataclasses.astuple(tile))}"
                row(label, functools.partial(kernel, tile=tile), sets, m, n, k)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="sweep the tiles instead")
    if parser.parse_args().tiles:
        tiles()
    else:
        table([MAIN], (1, 16, 64), ("w8a8", "fp8"), with_xla=True)
        table([MAIN], (128, 256, 512, 1024, 2048, 8192), SCHEMES, with_xla=True)
        table(OTHERS, (2048, 8192), SCHEMES, with_xla=False)

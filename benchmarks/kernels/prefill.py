"""Times the prefill kernels on this GPU: ``python -m benchmarks.kernels.prefill [--tiles]``.

Every row is the sum of the device time of all kernels of one jitted call, over distinct weights,
so that what XLA adds around a kernel is counted.  ``--tiles`` prints the sweep that the tiles in
the card's table came from.  ``--shares`` prints what share of its floor every
Llama-3.1-8B shape reaches, beside the share of 14336 x 4096 in the same row; ``--few`` the products
of 64 rows beside XLA's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu, timed_tiles
from pallas_kernels.dispatch import named_plan
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.many_rows import kernel as prefill
from pallas_kernels.matmul.many_rows import plan as plans
from pallas_kernels.qtensor import QTensor

MAIN = (14336, 4096)
OTHERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SCHEMES = ("w8a8", "fp8", "w4a16-sym", "w4a16", "w8a16")
BITS = {"w8a8": 8, "fp8": 8, "w4a16-sym": 4, "w4a16": 4, "w8a16": 8, "bf16": 16}
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
    if scheme == "bf16":
        return x, jax.random.normal(keys[1], (n, k), jnp.bfloat16), bias
    low, high, dtype = (-127, 128, jnp.int8) if scheme == "w8a16" else (-8, 8, jnp.int4)
    q = jax.random.randint(keys[1], (n, k), low, high).astype(dtype)
    groups = 1 if scheme == "w8a16" else k // 128
    scale = (0.01 * jnp.exp(jax.random.normal(keys[2], (n, groups)))).astype(jnp.bfloat16)
    zero = None
    if scheme == "w4a16":
        zero = jax.random.randint(keys[3], scale.shape, -8, 8).astype(jnp.int8)
    return x, QTensor(q, scale, zero), bias


def kernel(x, w, bias, tile=None):
    """With the kernel's own tile, or another."""
    call = MatmulCall.of(x, w, jnp.bfloat16, bias=bias)
    if isinstance(tile, plans.WeightTile):
        tile = plans.weight_plan(call, tile)
    elif tile is None:
        by_form = plans.weight_plan if isinstance(w, QTensor) else plans.plain_plan
        tile = named_plan((plans.quantized_plan if isinstance(x, QTensor) else by_form)(call))
    return prefill.matmul(x, w, bias, jnp.bfloat16, tile.divide(call))


def xla(x, w, bias):
    """What XLA makes of the same product: its 8-bit dot, or a bf16 dot with a bf16 weight."""
    if not isinstance(x, QTensor):
        return lax.dot_general(x, w, _LAST)
    kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    acc = lax.dot_general(x.q, w.q, _LAST, preferred_element_type=kind).astype(jnp.float32)
    return (acc * x.scale * w.scale[:, 0] + bias.astype(jnp.float32)).astype(jnp.bfloat16)


def microseconds(f, sets, iterations: int = 6) -> float:
    """Median device time of one ``f(*operands)``."""
    return device_us(lambda sets: [f(*s) for s in sets], [(sets,)], iterations) / len(sets)


def row(label: str, f, sets, m: int, n: int, k: int) -> None:
    us = microseconds(f, sets)
    print(
        f"{label:44s} {n:6d} {k:6d} {m:5d} {us:9.1f} us {2 * m * n * k / us / 1e6:6.0f} T",
        flush=True,
    )


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
        sweeps = ("w8a8", "pair int8", plans.PairTile), ("w4a16-sym", "weight", plans.WeightTile)
        for scheme, family, kind in sweeps:
            sets = [operands(scheme, m, n, k, seed) for seed in range(copies(m))]
            for tile, _ in timed_tiles(family, kind):
                label = f"{scheme} {tile}"
                row(label, functools.partial(kernel, tile=tile), sets, m, n, k)


def measured(jobs):
    """Yields microseconds of each (scheme, f, M, N, K), compiled side by side; as many distinct
    weights as pass the L2 twice."""
    make = jax.jit(operands, static_argnums=range(4))

    def compiled(job):
        scheme, f, m, n, k = job
        count = max(1 if m > 512 else 2, min(6, int(120e6) // (n * k * BITS[scheme] // 8) + 1))
        shapes = [jax.eval_shape(functools.partial(operands, scheme, m, n, k))] * count
        return jax.jit(lambda all_sets: [f(*s) for s in all_sets]).lower(shapes).compile(), count

    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(compiled, jobs))
    for (scheme, _, m, n, k), (run, count) in zip(jobs, programs, strict=True):
        sets = [make(scheme, m, n, k, seed) for seed in range(count)]
        yield device_us(run, [(sets,)], 6) / count


def floor_us(scheme: str, m: int, n: int, k: int) -> float:
    """The larger of the bytes over the memory's speed and the operations over the rate that XLA
    reaches with them."""
    rate = gpu().product_rates[{"w8a8": "int8", "fp8": "float8_e4m3fn"}.get(scheme, "bfloat16")]
    moved = n * k * BITS[scheme] / 8 + m * k * (1 if scheme in ("w8a8", "fp8") else 2) + 2 * m * n
    return 1e6 * max(moved / gpu().copy_rate, 2 * m * n * k / rate)


def shares() -> None:
    """Every shape's share of its floor beside that of 14336 x 4096: marked where 15% below."""
    rows = [(s, m) for s in ("w4a16-sym", "w8a8", "fp8") for m in (256, 512, 1024, 2048, 8192)]
    wanted = [(s, m, MAIN) for s, m in (("w4a16-sym", 64), ("w8a16", 64), *rows)]
    others = [("w8a16", 64), ("w8a8", 8192), *(("w4a16-sym", m) for m in (64, 2048, 8192))]
    wanted += [(s, m, shape) for s, m in [*others, ("fp8", 8192)] for shape in OTHERS]
    reference: dict[tuple[str, int], float] = {}
    times = measured([(s, kernel, m, *shape) for s, m, shape in wanted])
    for (scheme, m, (n, k)), us in zip(wanted, times, strict=True):
        share = floor_us(scheme, m, n, k) / us
        first = reference.setdefault((scheme, m), share)
        mark = "  15% below" if share < 0.85 * first else ""
        rate = 2 * m * n * k / us / 1e6
        label = f"{scheme:8s} {m:5d} {n:6d} x {k:5d}"
        print(f"{label} {us:9.1f} us {rate:6.0f} T {share:5.0%} of {first:4.0%}{mark}", flush=True)


def few(m: int = 64) -> None:
    """Products of up to 64 rows beside XLA's bf16 and int8 ones, microseconds."""
    schemes = ("bf16", "w8a16", "w4a16-sym", "w8a8")
    jobs = [(s, kernel, m, *shape) for shape in (MAIN, *OTHERS) for s in schemes]
    jobs += [(s, xla, m, *shape) for shape in (MAIN, *OTHERS) for s in ("bf16", "w8a8")]
    times = {(s, f, n, k): us for (s, f, _, n, k), us in zip(jobs, measured(jobs), strict=True)}
    print(f"M = {m}" + "".join(f"{s:>18s}" for s in schemes))
    for shape in (MAIN, *OTHERS):
        print("{:6d} x {:5d}".format(*shape), end="")
        for s in schemes:
            beside = times.get((s, xla, *shape))
            beside = "" if beside is None else f" ({beside:.1f})"
            print(f"{times[s, kernel, *shape]:9.1f}{beside:9s}", end="")
        print(flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="sweep the tiles instead")
    parser.add_argument("--shares", action="store_true", help="all shapes' shares of their floors")
    parser.add_argument("--few", type=int, metavar="M", help="products of M <= 64 rows beside XLA")
    args = parser.parse_args()
    if args.tiles:
        tiles()
    elif args.shares:
        shares()
    elif args.few:
        few(args.few)
    else:
        table([MAIN], (1, 16, 64), ("w8a8", "fp8"), with_xla=True)
        table([MAIN], (128, 256, 512, 1024, 2048, 8192), SCHEMES, with_xla=True)
        table(OTHERS, (2048, 8192), SCHEMES, with_xla=False)

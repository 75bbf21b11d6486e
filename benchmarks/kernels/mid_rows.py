"""Values and device times of the products of 17 to 256 rows that need no wgmma.

    JAXLLAMA_TARGET=sm_80 python -m benchmarks.kernels.mid_rows            a table in Markdown
    JAXLLAMA_TARGET=sm_80 python -m benchmarks.kernels.mid_rows --tiles 8  the best of 8 tiles too

Each row has one product: its error against float32 (relative RMS; WRONG over the tests' bound),
microseconds of the kernel, of the few-rows kernel in passes where there is one, and of XLA's form
(CUPTI, every kernel of a call, median of ten, four weights in turn), the predicted times, and which
form is chosen.  A line behind the table says how many rows are wrong, faster than XLA's form, and
chosen.  Needs a GPU, and a target without wgmma.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import device_us
from pallas_kernels import quantize
from pallas_kernels.device import gpu
from pallas_kernels.matmul import choice, predict
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows import kernel as few_rows
from pallas_kernels.matmul.few_rows.plan import TilePlan
from pallas_kernels.matmul.mid_rows import kernel
from pallas_kernels.matmul.mid_rows import plan as planning
from pallas_kernels.matmul.mid_rows.plan import MidTile
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.quantize_tokens import quantize_tokens

BF16 = jnp.dtype(jnp.bfloat16)
SCHEMES = {"W4A16": ("int4", 128), "W8A16": ("int8", None), "W8A8": ("int8", None)}
FORMATS = ("mxfp4", "nvfp4", "fp8-block")
BOUND = 4e-3  # relative RMS of a bfloat16 output
COPIES = 4
HEADER = (
    "| scheme | rows | N x K | error | us | few rows | XLA | XLA / us "
    "| predicted | XLA | chosen | tile |"
)


def operands(scheme: str, m: int, n: int, k: int) -> list[tuple[Any, QTensor]]:
    words, group = SCHEMES.get(scheme, (scheme, None))

    @jax.jit
    def weight(key: jax.Array) -> QTensor:
        w = jax.random.normal(key, (n, k), BF16) * 0.02
        if scheme in FORMATS:
            return quantize(w, words)
        return quantize(w, words, group_size=group or k, symmetric=True)

    x: Any = jax.random.normal(jax.random.key(99), (m, k), BF16)
    if scheme == "W8A8":
        x = quantize_tokens(x, dtype="int8")
    return [(x, weight(jax.random.key(i))) for i in range(COPIES)]


@jax.jit
def relative_error(y: jax.Array, x: Any, w: QTensor) -> jax.Array:
    """Relative RMS of the difference from a float32 product."""
    wide = x.floats(jnp.float32) if isinstance(x, QTensor) else x.astype(jnp.float32)
    want = jnp.dot(wide, w.floats(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    difference = y.astype(jnp.float32) - want
    return jnp.sqrt(jnp.sum(difference**2) / jnp.sum(want**2))


def others(tile: MidTile, call: MatmulCall, count: int) -> Iterator[MidTile]:
    """Yield the ``count`` tiles with the shortest predicted times but the first."""
    scheme = planning.scheme_of(call)
    us = functools.partial(predict.kernel_us, call=call)
    found = planning.tiles(call.m, call.n, call.k, scheme, gpu())
    yield from [x for x in sorted(found, key=us) if x != tile][:count]


def run(tile: MidTile) -> Callable[..., jax.Array]:
    return lambda x, w: kernel.matmul(x, w, None, BF16, tile)


def few_rows_us(call: MatmulCall, turns: list[tuple[Any, QTensor]]) -> float | None:
    plans = [plan for plan in choice.plans(call) if isinstance(plan, TilePlan)]
    if not plans:
        return None
    plan = min(plans, key=lambda plan: predict.kernel_us(plan, call))
    own = plan.divide(call)
    return device_us(lambda x, w: few_rows.matmul(x, w, out_dtype=BF16, plan=own), turns)


def row(scheme: str, m: int, n: int, k: int, count: int) -> tuple[str, bool, bool, bool]:
    """Return a line of the table; whether its values are right, it is faster, it is chosen."""
    turns = operands(scheme, m, n, k)
    call = MatmulCall.of(*turns[0], BF16)
    tile = planning.plan(call)
    if not isinstance(tile, MidTile):
        return f"| {scheme} | {m} | {n} x {k} | {tile.text or 'no kernel'} |", False, False, False
    y = run(tile)(*turns[0])
    error = float(relative_error(y, *turns[0]))
    us = device_us(run(tile), turns)
    xla = device_us(functools.partial(quantized_matmul, implementation="xla"), turns)
    few = few_rows_us(call, turns)
    chosen = choice.plan(call)
    name = {MidTile: "mid", TilePlan: "few"}.get(type(chosen), "XLA")
    cells = [
        scheme,
        m,
        f"{n} x {k}",
        f"{error:.1e}" if error < BOUND else f"WRONG {error:.1e}",
        f"{us:.1f}",
        "" if few is None else f"{few:.1f}",
        f"{xla:.1f}",
        f"{xla / us:.2f}",
        f"{predict.kernel_us(tile, call):.1f}",
        f"{predict.xla_us(call):.1f}",
        name,
        f"{tile.tokens} x {tile.rows}, {tile.k_warps}, {tile.parts}, {tile.stages}",
    ]
    line = f"| {' | '.join(map(str, cells))} |"
    timed = [(device_us(run(other), turns), other) for other in others(tile, call, count)]
    if timed:
        best, other = min(timed, key=lambda pair: pair[0])
        line += f" best of {count}: {best:.1f} {other}"
    return line, error < BOUND, us < xla, name == "mid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES], choices=[*SCHEMES, *FORMATS])
    parser.add_argument("--rows", nargs="+", type=int, default=[17, 64, 128, 256])
    parser.add_argument(
        "--shapes", nargs="+", default=["14336x4096", "4096x14336", "4096x4096"], metavar="NxK"
    )
    parser.add_argument("--tiles", type=int, default=0, help="further tiles to time")
    given = parser.parse_args()
    if gpu().wgmma:
        sys.exit("set JAXLLAMA_TARGET=sm_80: with wgmma these products have other kernels")
    print(f"{jax.devices()[0].device_kind}, kernels of {gpu().arch}, jax {jax.__version__}")
    print(HEADER, "|---" * (HEADER.count("|") - 1) + "|", sep="\n", flush=True)
    found = []
    for scheme in given.schemes:
        for shape in given.shapes:
            for m in given.rows:
                n, k = map(int, shape.split("x"))
                line, *facts = row(scheme, m, n, k, given.tiles)
                found.append(facts)
                print(line, flush=True)
    right, faster, chosen = (sum(facts) for facts in zip(*found, strict=True))
    print(f"{len(found)} products: {len(found) - right} wrong, {faster} faster, {chosen} chosen")


if __name__ == "__main__":
    main()

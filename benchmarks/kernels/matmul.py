"""Device times of the kernels at real shapes: ``python -m benchmarks.kernels.matmul
quantized_matmul``, and of the backward pass beside that of a bf16 weight: ``... backward --tokens
4096``.

Prints one row per scheme, shape and number of tokens: microseconds of the kernel (CUPTI, median of
ten, every kernel the call launches), bytes or operations per second, the share of the floor, and in
the same run XLA's form of the same product and its dot with a bf16 weight.  A row whose XLA form is
the faster is marked.  Cold L2: distinct weights are rotated, more than 100 MB of them.  The floor
is the larger of bytes over 4.3 TB/s and operations over the matrix units' rate.  Needs a Hopper
GPU; the tables in ``quantized_matmul`` and docs/lab come from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp

from benchmarks.kernels.shapes import LLAMA_8B
from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import hopper_reason, named_plan
from pallas_kernels.matmul.interleave import interleaved
from pallas_kernels.matmul.op import product_plan, quantized_matmul
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import FORMATS, NIBBLES

ROTATED_BYTES = 110e6  # at least twice the L2

SCHEMES = {  # words, group, symmetric, quantized activations
    "w4a16-g128-sym": ("int4", 128, True, False),
    "w4a16-g128": ("int4", 128, False, False),
    "w8a16": ("int8", None, True, False),
    "w8a8": ("int8", None, True, True),
    "w4a8": ("int4", 128, False, True),
    "fp8": ("float8_e4m3fn", None, True, True),
    "mxfp4": ("mxfp4", None, True, False),
    "nvfp4": ("nvfp4", None, True, False),
    "fp8-block": ("fp8-block", None, True, False),
    "fp8-block-a8": ("fp8-block", None, True, True),
}


def _weights(scheme: str, n: int, k: int, copies: int) -> list[QTensor]:
    words, group, symmetric, quantized = SCHEMES[scheme]

    @jax.jit
    def one(key):
        w = jax.random.normal(key, (n, k), jnp.float32)
        if words in FORMATS:
            return quantize(w.astype(jnp.bfloat16), words)
        scale_dtype = jnp.float32 if group is None else jnp.int8 if quantized else jnp.bfloat16
        made = quantize(w, words, group_size=group, symmetric=symmetric, scale_dtype=scale_dtype)
        return (
            dataclasses.replace(made, activations="int8") if words == "int4" and quantized else made
        )

    return [one(jax.random.key(i)) for i in range(copies)]


@functools.cache
def dense_us(m: int, n: int, k: int) -> float:
    """XLA's dot of bf16 operands."""
    count = max(2, min(8, -(-int(ROTATED_BYTES) // (2 * n * k))))
    ws = [jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16) for i in range(count)]
    x = jax.random.normal(jax.random.key(99), (m, k), jnp.bfloat16)
    return device_us(lambda x, ws: [x @ w.T for w in ws], [(x, ws)]) / count


def quantized_matmul_rows(schemes, shapes, tokens, copies=None):
    """Yields (scheme, shape name, M, kernel us or reason, XLA us, bf16 us, floor us)."""
    for scheme in schemes:
        words, _, _, quantized = SCHEMES[scheme]
        codes = FORMATS[words].codes if words in FORMATS else words
        is_half, group = codes in NIBBLES, 128 if words == "fp8-block" else None
        codes = "int8" if is_half else codes
        for name, n, k in shapes:
            size = n * k // (2 if is_half else 1)
            count = copies or max(2, min(8, -(-int(ROTATED_BYTES) // size)))
            ws = _weights(scheme, n, k, count)
            for m in tokens:
                x = jax.random.normal(jax.random.key(99), (m, k), jnp.bfloat16)
                if quantized:
                    x = quantize(x, codes, group_size=group, scale_dtype=jnp.float32)

                def times(implementation, ws, x=x):
                    def run(x, ws):
                        return [
                            quantized_matmul(
                                x, w, out_dtype=jnp.bfloat16, implementation=implementation
                            )
                            for w in ws
                        ]

                    return device_us(run, [(x, ws)]) / len(ws)

                found = product_plan(x, ws[0], out_dtype=jnp.bfloat16)
                has_kernel = named_plan(found) is not None
                rate = gpu().product_rates[codes if quantized else "bfloat16"]
                moved = ws[0].nbytes + x.nbytes + 2 * m * n
                floor = 1e6 * max(moved / gpu().copy_rate, 2 * m * n * k / rate)
                laid_out = [interleaved(w) for w in ws]  # as models are loaded
                ours = times("mosaic", laid_out) if has_kernel else found.text
                yield scheme, name, m, ours, times("xla", ws), dense_us(m, n, k), floor


def backward_rows(schemes, shapes, tokens):
    """Yields (scheme, shape name, M, our backward's us, XLA's of a bf16 weight, both with the
    gradient of the scales and of that weight)."""
    for scheme in schemes:
        if SCHEMES[scheme][-1]:
            continue  # quantized x: its backward is that of two scales
        for name, n, k in shapes:
            (ours,), plain = _weights(scheme, n, k, 1), jnp.ones((n, k), jnp.bfloat16)
            for m in tokens:
                x = jax.random.normal(jax.random.key(99), (m, k), jnp.bfloat16)
                dy = jax.random.normal(jax.random.key(98), (m, n), jnp.bfloat16)

                def x_only(x, w, dy, product):
                    return jax.vjp(lambda x: product(x, w), x)[1](dy)

                def scales_too(x, w, dy, product):
                    moving = w if isinstance(w, jax.Array) else w.scale

                    def f(x, moving):
                        whole = isinstance(w, jax.Array)
                        return product(x, moving if whole else dataclasses.replace(w, scale=moving))

                    return jax.vjp(f, x, moving)[1](dy)

                times = [
                    device_us(functools.partial(back, product=product), [(x, w, dy)])
                    for back in (x_only, scales_too)
                    for w, product in ((ours, quantized_matmul), (plain, lambda x, w: x @ w.T))
                ]
                yield scheme, name, m, *times


def print_backward(schemes, shapes, tokens) -> None:
    columns = f"{'dx us':>9s} {'bf16 dx':>9s} {'':5s} {'+dscale':>9s} {'bf16 +dw':>9s}"
    print(f"{'scheme':16s} {'shape':22s} {'M':>5s} {columns}")
    for scheme, name, m, dx, bf16_dx, both, bf16_both in backward_rows(schemes, shapes, tokens):
        n, k = next((n, k) for s, n, k in shapes if s == name)
        label = f"{scheme:16s} {name + f' {n}x{k}':22s} {m:5d}"
        print(
            f"{label} {dx:9.2f} {bf16_dx:9.2f} {dx / bf16_dx:4.2f}x {both:9.2f} {bf16_both:9.2f} "
            f"{both / bf16_both:4.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("op", choices=["quantized_matmul", "backward"])
    parser.add_argument("--tokens", default="1,8,16,64,2048")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--shapes", default=",".join(s[0] for s in LLAMA_8B))
    parser.add_argument("--copies", type=int, help="distinct weights; by default 110 MB of them")
    args = parser.parse_args()
    if reason := hopper_reason():
        raise SystemExit(f"no Hopper GPU to measure: {reason}")
    shapes = [s for s in LLAMA_8B if s[0] in args.shapes.split(",")]
    tokens = [int(m) for m in args.tokens.split(",")]
    if args.op == "backward":
        print_backward(args.schemes.split(","), shapes, tokens)
        return
    columns = f"{'us':>9s} {'rate':>13s} {'floor':>6s} {'XLA us':>9s} {'bf16':>9s}"
    print(f"{'scheme':16s} {'shape':22s} {'M':>5s} {columns}")
    rows = quantized_matmul_rows(args.schemes.split(","), shapes, tokens, args.copies)
    for scheme, name, m, ours, xla, dense, floor in rows:
        n, k = next((n, k) for s, n, k in LLAMA_8B if s == name)
        label = f"{scheme:16s} {name + f' {n}x{k}':22s} {m:5d}"
        if isinstance(ours, str):
            print(f"{label} {'-':>9s} {'':13s} {'':6s} {xla:9.2f} {dense:9.2f}  {ours}", flush=True)
            continue
        size = n * k / (2 if scheme.startswith("w4") or scheme.endswith("fp4") else 1)
        rate = f"{size / ours / 1e6:.2f} TB/s"
        if m > 64:
            rate = f"{2 * m * n * k / ours / 1e6:.0f} TFLOP/s"
        mark = "  XLA is faster" if xla < ours else ""
        times = f"{ours:9.2f} {rate:>13s} {floor / ours:6.0%} {xla:9.2f} {dense:9.2f}"
        print(f"{label} {times}{mark}", flush=True)


if __name__ == "__main__":
    main()

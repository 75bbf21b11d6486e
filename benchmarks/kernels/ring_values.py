"""Values and device times of one row's products with settled weights, beside those without.

    python -m benchmarks.kernels.ring_values

Prints, for each scheme and shape, the relative RMS difference of the two kernels' results, whether
three runs gave the same bits, and microseconds of each kernel alone (CUPTI, a cold L2).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.matmul import ROTATED_BYTES
from benchmarks.kernels.timing import device_us
from pallas_kernels import quantize
from pallas_kernels.matmul.call import settled_weights
from pallas_kernels.matmul.op import quantized_matmul

SHAPES = {  # name: N, K, what is fused
    "1b qkv": (3072, 2048, "norm"),
    "1b gate_up": (16384, 2048, "swiglu"),
    "1b down": (2048, 8192, "residual"),
    "8b qkv": (6144, 4096, "norm"),
    "8b o": (4096, 4096, "residual"),
    "8b gate_up": (28672, 4096, "swiglu"),
    "8b down": (4096, 14336, "residual"),
}
SCHEMES = {  # words, group, symmetric
    "w4a16": ("int4", 128, False),
    "w4a16-sym": ("int4", 128, True),
    "w8a16": ("int8", None, True),
    "bf16": (None, None, True),
}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def weight(key, n: int, k: int, scheme: str):
    words, group, symmetric = SCHEMES[scheme]
    w = jax.random.normal(key, (n, k), jnp.bfloat16) * jnp.bfloat16(k**-0.5)
    if words is None:
        return w
    return quantize(w, words, group_size=group, symmetric=symmetric, scale_dtype=jnp.bfloat16)


def product(x, w, more, kind: str, settled: bool):
    with settled_weights(settled):
        if kind == "residual":
            return quantized_matmul(x, w, residual=more, implementation="mosaic")
        norm = more, 1e-5
        return quantized_matmul(x, w, norm=norm, swiglu=kind == "swiglu", implementation="mosaic")


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for scheme in SCHEMES:
        for name, (n, k, kind) in SHAPES.items():
            bits = {"int4": 4, "int8": 8}.get(SCHEMES[scheme][0] or "", 16)
            count = max(2, min(12, round(ROTATED_BYTES * 8 / (bits * n * k))))
            ws = [weight(jax.random.key(i), n, k, scheme) for i in range(count)]
            x = jax.random.normal(jax.random.key(99), (1, k), jnp.bfloat16)
            more = jnp.ones((1, n) if kind == "residual" else (k,), jnp.bfloat16)
            found, us = {}, {}
            for settled in (False, True):
                call = jax.jit(functools.partial(product, kind=kind, settled=settled))
                runs = [np.asarray(call(x, ws[0], more), np.float32) for _ in range(3)]
                same = all((run == runs[0]).all() for run in runs)
                found[settled] = runs[0]
                us[settled] = device_us(call, [(x, w, more) for w in ws])
            error = np.linalg.norm(found[True] - found[False]) / np.linalg.norm(found[False])
            print(
                f"{scheme:10s} {name:10s} {n}x{k}: rows {us[False]:.2f}, ring {us[True]:.2f} us, "
                f"difference {error:.1e}, same bits {same}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Time rms_norm, swiglu and quantize_tokens with int8 rows: kernel, XLA, share of the memory speed.

    python -m benchmarks.kernels.rows [form ...]          forms: norm residual gate tokens plain

Device time of all kernels of one call (CUPTI), median over calls that rotate several inputs, so
that large shapes come from device memory.  Bytes are counted once: rows in, codes, scales and sum
out.  Small shapes (1 to 64 rows) stay in L2, as they do between two layers of a model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu

FORMS: dict[str, tuple[Callable[..., object], int, int]] = {  # call, width, bytes per column
    "norm": (lambda x, w, **kw: rms_norm(x, w, 1e-5, quantize="int8", **kw), 4096, 3),
    "residual": (
        lambda x, r, w, **kw: rms_norm(x, w, 1e-5, residual=r, quantize="int8", **kw),
        4096,
        7,
    ),
    "gate": (lambda x, **kw: swiglu(x, quantize="int8", **kw), 14336, 5),
    "tokens": (lambda x, **kw: quantize_tokens(x, "int8", **kw), 4096, 3),
    "plain": (lambda x, w, **kw: rms_norm(x, w, 1e-5, **kw), 4096, 4),
    "plain_residual": (lambda x, r, w, **kw: rms_norm(x, w, 1e-5, residual=r, **kw), 4096, 8),
}
ROWS = (1, 16, 64, 1024, 8192, 65536)


def inputs_of(form: str, rows: int, width: int) -> list[tuple[jax.Array, ...]]:
    count = 4 if rows <= 8192 else 2
    columns = 2 * width if form == "gate" else width
    make = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (rows, columns)).astype(jnp.bfloat16)
    )
    arrays = 2 if "residual" in form else 1
    weight = () if form in ("gate", "tokens") else (jnp.ones((width,), jnp.bfloat16),)
    return [(*(make(2 * i + j) for j in range(arrays)), *weight) for i in range(count)]


def main(forms: list[str]) -> None:
    memory = gpu().sum_rate / 1e12
    print(
        f"{'op':15s} {'rows':>6s} {'kernel us':>10s} {'XLA us':>8s} {'ratio':>6s} "
        f"{'TB/s':>6s} {f'of {memory}':>7s} {'XLA TB/s':>9s}"
    )
    for form in forms or FORMS:
        call, width, per_column = FORMS[form]
        for rows in ROWS:
            if form == "gate" and rows > 8192:
                continue
            inputs = inputs_of(form, rows, width)
            us = {
                name: device_us(jax.jit(functools.partial(call, implementation=name)), inputs, 24)
                for name in ("mosaic", "xla")
            }
            size = rows * (per_column * width + 4 * ("plain" not in form))
            speed = {name: size / t * 1e-6 for name, t in us.items()}
            print(
                f"{form:15s} {rows:6d} {us['mosaic']:10.2f} {us['xla']:8.2f} "
                f"{us['xla'] / us['mosaic']:6.2f} {speed['mosaic']:6.2f} "
                f"{speed['mosaic'] / memory:7.0%} {speed['xla']:9.2f}",
                flush=True,
            )
            del inputs


if __name__ == "__main__":
    main(sys.argv[1:])

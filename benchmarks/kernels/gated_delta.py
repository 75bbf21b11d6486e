"""Times the gated delta rule's kernels on the local GPU: ``python -m
benchmarks.kernels.gated_delta [--check]``.

Prints one line per figure: the shape (B, T, key heads, value heads, Dk, Dv); microseconds as the
sum of the kernels of one jitted call (median of ten, from the driver's activity records), and of
each kernel; for a step the bytes that must move over 4.3 TB/s.  ``--check`` adds relative RMS
errors against the float64 recursion on the same GPU.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.gla import errors64
from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.gated_delta import kernel, step_kernel
from pallas_kernels.gated_delta.op import gated_delta
from pallas_kernels.recurrence.op import Heads

SHAPES = (  # B, T, Hk, H, Dk, Dv
    (8, 4096, 16, 16, 128, 128),
    (8, 4096, 4, 16, 128, 128),
    (8, 4096, 8, 16, 128, 128),
    (1, 16384, 16, 16, 128, 128),
    (8, 4096, 6, 6, 256, 512),
)
BY_CHANNEL = (1, 8192, 64, 64, 128, 128)  # with a decay of every key channel
STEPS = ((64, 16, 32, 128), (1, 16, 32, 128))  # B, Hk, H, Dk = Dv
FORWARD = ("chunks", "scan")
FORWARD_BY_CHANNEL = ("channels", "scan")
BACKWARD = ("chunks", "scan", "reverse", "gradients")
BACKWARD_BY_CHANNEL = ("channels", "scan", "reverse", "products", "gradients")


def inputs(
    b: int, t: int, hk: int, h: int, dk: int, dv: int, by_channel: bool = False
) -> tuple[jax.Array, ...]:
    """q and k of length one and v in bf16; the layer's kind of decay and beta in float32."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (b, t, hk, dk)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (b, t, h, dv), jnp.bfloat16)
    gates = (b, t, h, dk) if by_channel else (b, t, h)
    decay = jax.nn.log_sigmoid(jax.random.normal(keys[3], gates)) / 16
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (b, t, h)))
    return q.astype(v.dtype), k.astype(v.dtype), v, decay, beta


def report(shape: tuple, what: str, f: Callable[..., Any], args: tuple, names: tuple) -> None:
    parts = [f"{x} {device_us(f, [args], only='gated_delta_' + x):.1f}" for x in names]
    print(f"{shape} {what} {device_us(f, [args]):.1f} us:", *parts, flush=True)


def bench_shape(shape: tuple[int, ...], check: bool, by_channel: bool = False) -> None:
    x, scale = inputs(*shape, by_channel=by_channel), shape[-2] ** -0.5
    forward = jax.jit(lambda *x: kernel.gated_delta_forward(Heads(*x), scale=scale))
    report(shape, "forward", forward, x, FORWARD_BY_CHANNEL if by_channel else FORWARD)
    xla = jax.jit(functools.partial(gated_delta, scale=scale, implementation="xla"))
    print(f"{shape} forward of the XLA form {device_us(xla, [x], 3):.1f} us", flush=True)
    if check:
        print(shape, errors64(forward(*x), x, scale), flush=True)
    plan = kernel.plan(Heads(*x))
    if isinstance(plan, kernel.DeltaPlan) and plan.backward:
        backward = jax.jit(
            lambda *x: kernel.gated_delta_backward(Heads(*x[:5]), x[5], None, scale=scale)
        )
        names = BACKWARD_BY_CHANNEL if by_channel else BACKWARD
        report(shape, "backward", backward, (*x, x[2]), names)


def bench_step(b: int, hk: int, h: int, d: int, by_channel: bool) -> None:
    x = [y[:, 0] for y in inputs(b, 1, hk, h, d, d, by_channel)]
    state = jax.random.normal(jax.random.key(2), (b, h, d, d))
    plan = step_kernel.plan(*x[:3])
    f = functools.partial(step_kernel.gated_delta_step, scale=0.1, plan=plan)
    us = device_us(f, [(*x, state)], only="gated_delta_step")
    floor = 1e6 * 2 * state.nbytes / gpu().copy_rate
    kind = ", a decay a channel" if by_channel else ""
    print(f"step {(b, hk, h, d)}{kind} {us:.1f} us (floor {floor:.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="values against float64")
    options = parser.parse_args()
    for shape in STEPS:
        for by_channel in (False, True):
            bench_step(*shape, by_channel)
    for shape in SHAPES:
        bench_shape(shape, options.check)
    bench_shape(BY_CHANNEL, options.check, by_channel=True)


if __name__ == "__main__":
    main()

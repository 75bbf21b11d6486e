"""Times the GLA kernels on the local GPU: ``python -m benchmarks.kernels.gla [--lengths]``.

Prints one line per figure: the shape; milliseconds, as the sum of the kernels of one jitted call
(median of ten, from the driver's activity records) and as host time per call of a queue of twenty;
the bytes that must move over 4.3 TB/s as a share of that.  ``--check`` adds relative RMS errors
against the float64 recurrence computed on the same GPU, ``--lengths`` the table over T with cuDNN's
causal attention of the same width beside it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.gla import kernel as gla_mosaic
from pallas_kernels.recurrence.op import Heads

SHAPES = (  # B, T, H, Dk, Dv; bars in ms: forward, forward + backward
    ((8, 4096, 16, 128, 128), 0.45, 2.0),
    ((1, 16384, 16, 128, 128), 0.35, 1.3),
    ((1, 8192, 96, 128, 128), 0.69, 3.0),
    ((32, 2048, 4, 256, 512), 0.80, 4.0),
)
STEPS = ((64, 32, 128, 128), (64, 4, 256, 512), (1, 16, 128, 128))  # B, H, Dk, Dv


def inputs(b: int, t: int, h: int, dk: int, dv: int) -> tuple[jax.Array, ...]:
    """q, k, v in bf16 and the layer's kind of gate, logsigmoid(x) / 16, in float32."""
    kq, kk, kv, kg = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(kq, (b, t, h, dk), jnp.bfloat16)
    k = jax.random.normal(kk, (b, t, h, dk), jnp.bfloat16)
    v = jax.random.normal(kv, (b, t, h, dv), jnp.bfloat16)
    return q, k, v, jax.nn.log_sigmoid(jax.random.normal(kg, (b, t, h, dk))) / 16


@functools.partial(jax.jit, static_argnames="scale")
def recurrence64(q, k, v, g, *beta, scale=1.0):
    """The recursion in float64 (inside ``jax.enable_x64``); float32 o and state.

    beta: of the delta rule.  A decay of every head or key channel; keys may be shared by heads.
    """

    def step(state, x):
        q, k, v, g, *beta = (y.astype(jnp.float64) for y in x)
        q, k = (jnp.repeat(y, v.shape[1] // y.shape[1], axis=1) for y in (q, k))
        state = jnp.exp(g).reshape(*v.shape[:2], -1, 1) * state
        for strength in beta:
            v = strength[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * v[..., None, :]
        return state, (scale * jnp.einsum("bhk,bhkv->bhv", q, state)).astype(jnp.float32)

    start = jnp.zeros((*v.shape[::2], q.shape[-1], v.shape[-1]), jnp.float64)
    state, o = lax.scan(step, start, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, *beta)))
    return jnp.moveaxis(o, 0, 1), state.astype(jnp.float32)


def errors64(got: tuple[jax.Array, ...], x: tuple[jax.Array, ...], scale: float = 1.0) -> str:
    """Return the relative RMS errors of o and state, as text."""
    with jax.enable_x64(True):
        want = recurrence64(*x, scale=scale)
    o, state = (relative_rms(a, b) for a, b in zip(got, want, strict=True))
    return f"rms o {o:.2e} state {state:.2e}"


def relative_rms(x: jax.Array, reference: jax.Array) -> float:
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))


def wall_ms(f: Callable[..., Any], *args: Any, calls: int = 20) -> float:
    for _ in range(3):
        out = f(*args)
    jax.block_until_ready(out)
    start = time.perf_counter()
    for _ in range(calls):
        out = f(*args)
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / calls


def forward(scale: float) -> Callable[..., Any]:
    return jax.jit(lambda *x: gla_mosaic.gla_forward(Heads(*x), scale=scale))


def forward_backward(scale: float, save: Any) -> Callable[..., Any]:
    """Forward, then all gradients from d_out."""

    def run(q, k, v, g, d_out):
        heads = Heads(q, k, v, g)
        o, state, saved = gla_mosaic.gla_forward(heads, scale=scale, save=save)
        grads = gla_mosaic.gla_backward(heads, d_out, None, scale=scale, saved=saved)
        return o, state, grads

    return jax.jit(run)


def bench_shape(shape: tuple[int, ...], bar: float, bar_both: float, check: bool) -> None:
    b, t, h, dk, dv = shape
    scale = dk**-0.5
    q, k, v, g = inputs(*shape)
    moved = sum(x.nbytes for x in (q, k, v, g)) + v.nbytes
    f = forward(scale)
    ms, wall = device_us(f, [(q, k, v, g)]) / 1e3, wall_ms(f, q, k, v, g)
    share = 1e3 * moved / gpu().copy_rate / ms
    line = f"{shape} forward {ms:.4f} ms (bar {bar}; wall {wall:.4f}; {share:.0%} of memory)"
    if check:
        line += f" {errors64(f(q, k, v, g), (q, k, v, g), scale)}"
    print(line, flush=True)
    d_out = jax.random.normal(jax.random.key(1), v.shape, v.dtype)
    for save in ("states", "all"):
        f = forward_backward(scale, save)
        args = q, k, v, g, d_out
        ms, wall = device_us(f, [args]) / 1e3, wall_ms(f, *args)
        line = f"{shape} forward+backward, saving {save}: {ms:.4f} ms"
        print(f"{line} (bar {bar_both}; wall {wall:.4f})", flush=True)


def step_times(f: Callable[..., Any], x: Sequence[jax.Array], state: jax.Array) -> list[float]:
    """Return the microseconds of a step ``f(*x, state)``, of one in a queue, and of its bytes."""
    # The state is not donated here, so that it can be given again; its copy does not count.
    us = device_us(f, [(*x, state)], only="gla_step")
    floor, calls = 1e6 * 2 * state.nbytes / gpu().copy_rate, 200
    step = jax.jit(f, donate_argnums=len(x))
    for _ in range(5):
        _, state = step(*x, state)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(calls):
        _, state = step(*x, state)
    jax.block_until_ready(state)
    return [us, 1e6 * (time.perf_counter() - start) / calls, floor]


def bench_step(shape: tuple[int, ...]) -> None:
    b, h, dk, dv = shape
    x = [y[:, 0] for y in inputs(b, 1, h, dk, dv)]
    state = jax.random.normal(jax.random.key(2), (b, h, dk, dv))
    us, wall, floor = step_times(lambda *x: gla_mosaic.gla_step(*x, 0.1), x, state)
    print(f"step {shape} {us:.1f} us (wall {wall:.1f}, floor {floor:.1f})", flush=True)


def bench_lengths(heads: int = 16, d: int = 128) -> None:
    """GLA against cuDNN's causal attention, one row, over T."""
    for exponent in range(10, 19):
        t = 2**exponent
        q, k, v, g = inputs(1, t, heads, d, d)
        line = f"T {t} gla {device_us(forward(d**-0.5), [(q, k, v, g)], 5) / 1e3:.4f} ms"
        if t <= 131072:
            attend = jax.jit(
                lambda q, k, v: jax.nn.dot_product_attention(
                    q, k, v, is_causal=True, implementation="cudnn"
                )
            )
            line += f", cuDNN causal {device_us(attend, [(q, k, v)], 3) / 1e3:.4f} ms"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", action="store_true", help="the table over T")
    parser.add_argument("--check", action="store_true", help="values against float64")
    options = parser.parse_args()
    for shape, bar, bar_both in SHAPES:
        bench_shape(shape, bar, bar_both, options.check)
    for shape in STEPS:
        bench_step(shape)
    if options.lengths:
        bench_lengths()


if __name__ == "__main__":
    main()

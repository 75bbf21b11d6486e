"""Times Mamba-2's recursion on the local GPU: ``python -m benchmarks.kernels.ssd [--check]``.

Prints one line per figure: the shape (B, T, groups, heads, Dk, Dv); milliseconds of all kernels of
one jitted call (median of ten, from the driver's activity records); the bytes that must move over
the device's copy rate as a share of that.  Beside it are XLA's form by chunks, the kernels of GLA
with a decay for every key channel, and flash-linear-attention's ``chunk_simple_gla``, which a
process of its own times if the package is there.  A step of 64 rows is beside the time of its
bytes.  ``--check`` adds relative RMS errors against the float64 recursion on the same GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels.gla import errors64, step_times
from benchmarks.kernels.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.gla.kernel import gla_forward
from pallas_kernels.gla.op import gla_step
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.ssd.kernel import SSDPlan, plan, ssd_forward
from pallas_kernels.ssd.op import ssd_as_gla

SHAPES = (  # B, T, groups, heads, Dk, Dv
    (8, 4096, 8, 64, 128, 64),
    (8, 4096, 8, 128, 128, 64),
    (1, 16384, 8, 64, 128, 64),
    (8, 4096, 1, 48, 256, 64),
    (8, 4096, 1, 48, 128, 32),
    (8, 4096, 1, 64, 128, 64),
    (1, 16384, 1, 48, 128, 64),
)
STEPS = (  # B, groups, heads, Dk, Dv
    (64, 8, 64, 128, 64),
    (64, 8, 128, 128, 64),
    (64, 1, 48, 128, 32),
    (1, 8, 128, 128, 64),
    (1, 1, 48, 128, 32),
)


def inputs(b: int, t: int, groups: int, h: int, dk: int, dv: int) -> tuple[jax.Array, ...]:
    """q, k, v in bf16 and the layer's kind of decay in float32."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k = (jax.random.normal(key, (b, t, groups, dk), jnp.bfloat16) for key in keys[:2])
    v = jax.random.normal(keys[2], (b, t, h, dv), jnp.bfloat16)
    decay = -8 * jax.nn.softplus(jax.random.normal(keys[3], (b, t, h)) - 4.6)
    return q, k, v, decay


@functools.partial(jax.jit, static_argnames="chunk")
def by_chunks(q, k, v, g, chunk: int = 128):
    """XLA's form: the products of Mamba-2's paper (listing 1), bf16 with float32 sums."""
    b, t, groups, dk = q.shape
    h, dv = v.shape[2:]
    n, per = t // chunk, h // groups
    q, k = (x.reshape(b, n, chunk, groups, dk) for x in (q, k))
    v = v.reshape(b, n, chunk, groups, per, dv)
    sums = jnp.cumsum(g.reshape(b, n, chunk, groups, per), axis=2)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    between = sums[:, :, :, None] - sums[:, :, None]  # b n i j g p
    is_before = jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None, None]
    decays = jnp.where(is_before, jnp.exp(jnp.where(is_before, between, 0.0)), 0.0)
    scores = dot("bnigk,bnjgk->bnijg", q, k)[..., None] * decays
    o = dot("bnijgp,bnjgpv->bnigpv", scores.astype(v.dtype), v)
    to_end = jnp.exp(sums[:, :, -1:] - sums)
    late = (v * to_end[..., None]).astype(v.dtype)
    local = dot("bnjgk,bnjgpv->bngpkv", k, late)
    whole = jnp.exp(sums[:, :, -1])[..., None, None]

    def step(state, x):
        return x[0] * state + x[1], state

    last, before = lax.scan(
        step, jnp.zeros_like(local[:, 0]), tuple(jnp.moveaxis(x, 1, 0) for x in (whole, local))
    )
    before = jnp.moveaxis(before, 0, 1).astype(v.dtype)
    o += dot("bnigk,bngpkv->bnigpv", q, before) * jnp.exp(sums)[..., None]
    return o.reshape(b, t, h, dv).astype(v.dtype), last.reshape(b, h, dk, dv)


def by_gla(q, k, v, g):
    """The kernels of GLA."""
    return gla_forward(Heads(*ssd_as_gla(q, k, v, g)), scale=1.0)


def ssd_step(q, k, v, g, state):
    """A layer's step."""
    return gla_step(*ssd_as_gla(q, k, v, g), state, scale=1.0)


def guarded(f: Callable[..., Any], *args: Any) -> None:
    """A failure must not take the other figures."""
    try:
        f(*args)
    except Exception as error:
        print(f"{args}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def bench_kernel(shape: tuple[int, ...], check: bool) -> None:
    x = inputs(*shape)
    moved = sum(y.nbytes for y in x) + x[2].nbytes
    found = plan(Heads(*x))
    assert isinstance(found, SSDPlan)
    forward = lambda *x: ssd_forward(Heads(*x), segments=found.segments)  # noqa: E731
    ms, scan = (device_us(jax.jit(forward), [x], only=name) / 1e3 for name in ("", "ssd_scan"))
    share = 1e3 * moved / gpu().copy_rate / ms
    line = f"{shape} kernel {ms:.4f} ms (scan {scan:.4f}, {found}, {share:.0%} of memory)"
    if check:
        line += f" {errors64(forward(*x), x)}"
    print(line, flush=True)


def bench_peer(shape: tuple[int, ...], name: str, f: Callable[..., Any]) -> None:
    x = inputs(*shape)
    print(f"{shape} {name} {device_us(jax.jit(f), [x], 5) / 1e3:.4f} ms", flush=True)


def bench_step(b: int, groups: int, h: int, dk: int, dv: int) -> None:
    x = [y[:, 0] for y in inputs(b, 1, groups, h, dk, dv)]
    state = jax.random.normal(jax.random.key(2), (b, h, dk, dv))
    us, wall, floor = step_times(ssd_step, x, state)
    line = f"step {(b, groups, h, dk, dv)} kernel {us:.1f} us, {us / floor:.2f} of its bytes'"
    print(f"{line} {floor:.1f} us (one call of a queue {wall:.1f})", flush=True)


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy on this device."""
    x = jnp.zeros((1 << 28,), jnp.float32)
    return 2 * x.nbytes / (1e-6 * device_us(lambda x: x + 1, [(x,)], 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="values against float64")
    every = range(len(SHAPES))
    parser.add_argument(
        "--shapes", type=int, nargs="*", default=every, help="numbers of the shapes"
    )
    parser.add_argument("--without-fla", action="store_true", help="without the other process")
    options = parser.parse_args()
    shapes = [SHAPES[index] for index in options.shapes]
    print(
        f"copy {copy_rate() / 1e12:.2f} TB/s; floors use {gpu().copy_rate / 1e12:.2f}", flush=True
    )
    for shape in shapes:
        guarded(bench_kernel, shape, options.check)
    for shape in STEPS:
        guarded(bench_step, *shape)
    for shape in shapes:
        guarded(bench_peer, shape, "XLA by chunks", by_chunks)
        guarded(bench_peer, shape, "kernels of GLA", by_gla)
    if options.without_fla:
        return
    peer = [sys.executable, "-m", "benchmarks.peers.fla_simple_gla", json.dumps(shapes)]
    subprocess.run(peer, check=False)


if __name__ == "__main__":
    main()

"""Times the gated delta rule's kernels on the local GPU: ``python -m
pallas_kernels.bench.gated_delta``.

Prints one line per figure: the shape (B, T, key heads, value heads, Dk, Dv); milliseconds, as the
sum of the kernels of one jitted call (median of ten, from the driver's activity records), and each
kernel's share of it.  ``--check`` compares small calls with the float64 recursion instead.
"""

from __future__ import annotations

import argparse
import functools
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.gated_delta import kernel, step_kernel

SHAPES = (
    (8, 4096, 16, 16, 128, 128),
    (8, 4096, 4, 16, 128, 128),
    (8, 4096, 8, 16, 128, 128),
    (1, 16384, 16, 16, 128, 128),
)
KERNELS = ("gated_delta_chunks", "gated_delta_scan")


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def case(shape: tuple[int, ...], kind: str, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v, log_decay, beta and a first state.  kind: of the decay ("weak", "mixed", which has
    -inf) or of the keys ("near" or "equal", with beta = 1 and no decay)."""
    b, t, hk, h, dk, dv = shape
    rng = np.random.default_rng(seed)
    q, k = (unit(rng.normal(size=(b, t, hk, dk))) for _ in range(2))
    v, state = rng.normal(size=(b, t, h, dv)), rng.normal(size=(b, h, dk, dv))
    g = -np.abs(rng.normal(size=(b, t, h))) * 0.05
    beta = rng.uniform(size=(b, t, h))
    if kind == "mixed":
        g = np.array([0.0, -1e-3, -1.0, -20.0, -1e4, -np.inf])[rng.integers(0, 6, size=(b, t, h))]
        beta = np.array([0.0, 0.3, 1.0])[rng.integers(0, 3, size=(b, t, h))]
    if kind in ("near", "equal"):
        spread = 0.0 if kind == "equal" else 0.3
        k = unit(k[:, :1] + spread * k)
        g, beta = np.zeros_like(g), np.ones_like(beta)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return q, k, v, *(jnp.asarray(x, jnp.float32) for x in (g, beta, state))


def recurrence(q, k, v, g, beta, state, scale):
    """float64 o and state, by the definition."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    out = []
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None, None] * state
        seen = np.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t][..., None] * (v[:, t] - seen)
        state = state + k[:, t][..., None] * change[..., None, :]
        out.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(out, axis=1), state


def gradients(q, k, v, g, beta, d_out, d_last, state, scale):
    """float64 dq, dk (of every value head, then summed), dv, dg, dbeta, dstate, by the definition."""
    given = (q, k, v, g, beta, d_out, d_last, state)
    q, k, v, g, beta, d_out, d_state, state = (np.asarray(x, np.float64) for x in given)
    heads, group = q.shape[2], v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, group, axis=2) for x in (q, k))
    states, out = [], [np.zeros_like(x) for x in (q, k, v, g, beta)]
    for t in range(q.shape[1]):
        decayed = np.exp(g[:, t])[..., None, None] * state
        rest = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], decayed)
        change = beta[:, t][..., None] * rest
        state = decayed + k[:, t][..., None] * change[..., None, :]
        states.append((decayed, rest, change, state))
    for t in reversed(range(q.shape[1])):
        decayed, rest, change, state = states[t]
        out[0][:, t] = scale * np.einsum("bhkv,bhv->bhk", state, d_out[:, t])
        d_state = d_state + scale * q[:, t][..., None] * d_out[:, t][..., None, :]
        d_change = np.einsum("bhk,bhkv->bhv", k[:, t], d_state)
        out[4][:, t] = np.sum(d_change * rest, axis=-1)
        d_v = beta[:, t][..., None] * d_change
        out[2][:, t] = d_v
        out[1][:, t] = np.einsum("bhkv,bhv->bhk", d_state, change)
        out[1][:, t] -= np.einsum("bhkv,bhv->bhk", decayed, d_v)
        d_state = d_state - k[:, t][..., None] * d_v[..., None, :]
        decay = np.exp(g[:, t])
        out[3][:, t] = np.where(decay == 0, 0, np.sum(d_state * decayed, axis=(-1, -2)))
        d_state = decay[..., None, None] * d_state
    for i in range(2):
        out[i] = out[i].reshape(*out[i].shape[:2], heads, group, -1).sum(axis=3)
    return (*out, d_state)


def check_backward() -> None:
    for shape, kind in (
        ((1, 64, 1, 1, 128, 128), "weak"),
        ((2, 300, 1, 2, 128, 128), "mixed"),
        ((1, 515, 1, 2, 64, 64), "weak"),
        ((1, 512, 1, 1, 128, 128), "near"),
        ((1, 512, 1, 1, 128, 128), "equal"),
    ):
        try:
            *x, state = case(shape, kind)
            rng = np.random.default_rng(9)
            d_out = jnp.asarray(rng.normal(size=x[2].shape), jnp.bfloat16)
            d_last = jnp.asarray(rng.normal(size=state.shape), jnp.float32)
            scale = shape[4] ** -0.5
            f = functools.partial(kernel.gated_delta_backward, scale=scale, initial_state=state)
            got = f(*x, d_out, d_last)
            want = gradients(*x, d_out, d_last, state, scale)
            names = ("q", "k", "v", "g", "beta", "state")
            errors = (
                f"{n} {relative_rms(a, b):.1e}" for n, a, b in zip(names, got, want, strict=True)
            )
            print("backward", shape, kind, *errors, flush=True)
        except Exception:
            traceback.print_exc()


def relative_rms(x: Any, want: np.ndarray) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)))


CASES = (  # and segments
    ((2, 10, 1, 2, 128, 128), "mixed", 1),
    ((1, 1000, 1, 2, 128, 128), "weak", 4),
    ((1, 512, 1, 2, 128, 128), "near", 4),
)


def step_operands(b: int, hk: int, h: int, d: int) -> tuple[Any, ...]:
    q, k, v, g, beta, state = case((b, 1, hk, h, d, d), "mixed")
    return q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state


def bench_step() -> None:
    for shape in ((64, 16, 32, 128), (64, 4, 16, 128), (1, 16, 32, 128)):
        try:
            x = step_operands(*shape)
            plan = step_kernel.plan(*x[:3])
            for p in (plan,):
                f = functools.partial(step_kernel.gated_delta_step, scale=0.1, plan=p)
                o, state = f(*x)
                full = [y[:, None] for y in x[:5]]
                want, want_state = recurrence(*full, x[5], 0.1)
                errors = relative_rms(o, want[:, 0]), relative_rms(state, want_state)
                us = device_us(f, [x], only="gated_delta_step")
                floor = 1e6 * 2 * state.nbytes / gpu().copy_rate
                errors = " ".join(f"{e:.1e}" for e in errors)
                print(f"step {shape} {p}: {us:.1f} us, floor {floor:.1f}; {errors}", flush=True)
        except Exception:
            traceback.print_exc()


def check() -> None:
    for shape, kind, segments in CASES:
        try:
            *x, state = case(shape, kind)
            scale = shape[4] ** -0.5
            f = functools.partial(kernel.gated_delta_forward, scale=scale, segments=segments)
            o, last = f(*x, initial_state=state)
            want, want_last = recurrence(*x, state, scale)
            errors = relative_rms(o, want), relative_rms(last, want_last)
            o, last = f(*x)
            want, want_last = recurrence(*x, 0 * state, scale)
            errors += relative_rms(o, want), relative_rms(last, want_last)
            print(shape, kind, segments, *(f"{e:.2e}" for e in errors), flush=True)
        except Exception:
            traceback.print_exc()
    try:
        shape = (3, 330, 2, 4, 128, 128)
        *x, state = case(shape, "mixed")
        lengths = np.array([330, 129, 20], np.int32)
        valid = np.arange(330)[None] < lengths[:, None]
        shaped = [valid.reshape(3, 330, *[1] * (y.ndim - 2)) for y in x]
        poison = [jnp.where(m, y, jnp.nan).astype(y.dtype) for m, y in zip(shaped, x, strict=True)]
        clean = [jnp.where(m, y, 0).astype(y.dtype) for m, y in zip(shaped, x, strict=True)]
        o, last = kernel.gated_delta_forward(
            *poison, scale=0.1, initial_state=state, lengths=jnp.asarray(lengths), segments=2
        )
        want, want_last = recurrence(*clean, state, 0.1)
        want = np.where(valid[..., None, None], want, 0)
        zeros = np.all(np.where(valid[..., None, None], 0, np.asarray(o, np.float32)) == 0)
        errors = relative_rms(o, want), relative_rms(last, want_last)
        print("ragged", *(f"{e:.2e}" for e in errors), "zeros" if zeros else "NOT ZERO", flush=True)
    except Exception:
        traceback.print_exc()


def bench() -> None:
    for shape in SHAPES:
        try:
            b, t, hk, h, dk, dv = shape
            keys = jax.random.split(jax.random.key(0), 5)
            q, k = (jax.random.normal(key, (b, t, hk, dk)) for key in keys[:2])
            q, k = (
                (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)
                for x in (q, k)
            )
            v = jax.random.normal(keys[2], (b, t, h, dv), jnp.bfloat16)
            g = jax.nn.log_sigmoid(jax.random.normal(keys[3], (b, t, h))) / 16
            beta = jax.nn.sigmoid(jax.random.normal(keys[4], (b, t, h)))
            f = jax.jit(lambda *x: kernel.gated_delta_forward(*x, scale=0.088))  # noqa: B023
            args = [(q, k, v, g, beta)]
            parts = [f"{name} {device_us(f, args, only=name):.1f}" for name in KERNELS]
            print(f"{shape} forward {device_us(f, args):.1f} us:", *parts, flush=True)
            f = jax.jit(  # noqa: B023
                lambda *x: kernel.gated_delta_backward(*x, None, scale=0.088)
            )
            args = [(q, k, v, g, beta, v)]
            names = ("chunks", "scan", "reverse", "gradients")
            parts = [f"{name} {device_us(f, args, only='gated_delta_' + name):.1f}"
                     for name in names]  # fmt: skip
            print(f"{shape} backward {device_us(f, args):.1f} us:", *parts, flush=True)
        except Exception:
            traceback.print_exc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="values against float64")
    parser.add_argument("--gradients", action="store_true", help="their values against float64")
    parser.add_argument("--step", action="store_true", help="one token")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.gradients:
        check_backward()
    check() if options.check else bench_step() if options.step else None if options.gradients else bench()
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()

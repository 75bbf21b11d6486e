"""A decode step's chain of weight-reading kernels, in blocks of half an SM with a deep ring.

    python -m benchmarks.kernels.ring_probe [--schemes w4a16,bf16] [--only LABEL ...]

Question.  Between two kernels of a decode step memory is idle: the next kernel's first bytes come
behind the end of the one before.  Here a block has 12 warps and half of an SM's shared memory, so
two kernels in succession live on one SM, and the second fills its ring before it waits.

Variants: the kernels that the project chooses now, and ``ring_kernel`` by order and size.

The chain is Llama-3.2-1B's: 16 layers of qkv, attention, o, gate_up, down, then the head (int8
beside int4).  Prints microseconds of a turn of a loop on the device, (long - short) / turns.  Needs
jax >= 0.12: before, no kernel begins early, and all variants are one program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.kernels.ring_kernel import EPS, allow_next, plan_of, ring_matmul
from pallas_kernels import ptx as p
from pallas_kernels import quantize
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import tree_bytes

WIDTH, FFN, VOCABULARY, LAYERS = 2048, 8192, 128256, 16
HEADS = 32, 8, 64
CONTEXT, CAPACITY = 1000, 1152
SHAPES = {
    "qkv": ((HEADS[0] + 2 * HEADS[1]) * HEADS[2], WIDTH),
    "o": (WIDTH, HEADS[0] * HEADS[2]),
    "gate_up": (2 * FFN, WIDTH),
    "down": (WIDTH, FFN),
}


def product(x, w, ring, *, gamma=None, residual=None, swiglu=False):
    """ring: None for the project's choice, else (KB, order, further fields of the plan)."""
    if ring is None:
        norm = None if gamma is None else (gamma, EPS)
        return quantized_matmul(
            x, w, norm=norm, residual=residual, swiglu=swiglu, implementation="mosaic"
        )
    size, order, changes = ring
    plan = plan_of(w, swiglu, size, order, **dict(changes))
    return ring_matmul(x, w, plan=plan, gamma=gamma, residual=residual, swiglu=swiglu)


def layer(x, w, attention, ring, with_attention):
    gamma = w["gamma"]
    qkv = product(x, w["qkv"], ring, gamma=gamma)
    if with_attention:
        heads, k, v = rope_and_attend(
            qkv.reshape(1, -1, HEADS[2]), *attention, implementation="mosaic"
        )
        attention = (*attention[:2], k, v, *attention[4:])
        heads = heads.reshape(1, -1)
    else:
        heads = qkv[:, : HEADS[0] * HEADS[2]]
    x = product(heads, w["o"], ring, residual=x)
    up = product(x, w["gate_up"], ring, gamma=gamma, swiglu=True)
    return product(up, w["down"], ring, residual=x), attention


def step(x0, weights, caches, tables, ring, with_attention):
    """One turn: (the next turn's x, caches)."""
    x, new = x0, []
    for w, (k, v) in zip(weights["layers"], caches, strict=True):
        cos, sin, slots = tables
        x, attention = layer(x, w, (cos, sin, k, v, slots), ring, with_attention)
        new.append(attention[2:4])
    logits = product(x, weights["head"], ring, gamma=weights["gamma"])
    return x0 + logits[:, : x0.shape[1]] * jnp.bfloat16(1e-3), new


def make_weights(scheme: str) -> dict[str, Any]:
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def one(key, shape, head):
        w = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[1] ** -0.5)
        if scheme == "bf16":
            return w
        words, group = ("int8", shape[1]) if head else ("int4", 128)
        scale = jnp.float32 if head else jnp.bfloat16
        return quantize(w, words, group_size=group, symmetric=True, scale_dtype=scale)

    gamma = jnp.ones((WIDTH,), jnp.bfloat16)
    layers = []
    for i in range(LAYERS):
        keys = jax.random.split(jax.random.key(i), len(SHAPES))
        products = {n: one(key, s, False) for key, (n, s) in zip(keys, SHAPES.items(), strict=True)}
        layers.append(products | {"gamma": gamma})
    head = one(jax.random.key(99), (VOCABULARY, WIDTH), True)
    return {"layers": layers, "head": head, "gamma": gamma}


def operands() -> tuple[Any, ...]:
    """x, caches, tables of a turn."""
    x = jax.random.normal(jax.random.key(7), (1, WIDTH), jnp.bfloat16)
    shape = (1, CAPACITY, *HEADS[1:])
    caches = [(jnp.zeros(shape, jnp.bfloat16),) * 2 for _ in range(LAYERS)]
    angle = jnp.linspace(0.0, 6.0, HEADS[2] // 2)[None]
    return x, caches, (jnp.cos(angle), jnp.sin(angle), jnp.full((1,), CONTEXT, jnp.int32))


@contextlib.contextmanager
def nobody_waits(wanted: bool):
    """Within, and if so wanted, no kernel waits for the one before: wrong values."""
    jax.clear_caches()
    with mock.patch.object(p, "await_kernel", allow_next if wanted else p.await_kernel):
        yield


def loop_of(ring, with_attention):
    from jaxllama import compiler_options

    @functools.partial(jax.jit, compiler_options=compiler_options.for_device())
    def loop(x, weights, caches, tables, turns):
        def turn(_, state):
            return step(*state[:1], weights, state[1], tables, ring, with_attention)

        return jax.lax.fori_loop(0, turns, turn, (x, caches))

    return loop


def seconds(loop, args, turns: int) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(loop(*args, jnp.int32(turns)))
    return time.perf_counter() - begin


def turn_us(ring, weights, with_attention: bool, nobody: bool) -> dict[str, Any]:
    x, caches, tables = operands()
    begin = time.perf_counter()
    with nobody_waits(nobody):
        loop, args = loop_of(ring, with_attention), (x, weights, caches, tables)
        seconds(loop, args, 3)
        made = time.perf_counter() - begin
        runs = [(seconds(loop, args, 200), seconds(loop, args, 40)) for _ in range(5)]
    us = statistics.median(1e6 * (long - short) / 160 for long, short in runs)
    return {"us": round(us, 1), "compile_s": round(made, 1)}


def check_values(scheme: str, weights) -> dict[str, float]:
    """Relative RMS difference of each product from that of the project's kernel."""
    found, w = {}, weights["layers"][0]
    for name, (n, k) in {**SHAPES, "head": (VOCABULARY, WIDTH)}.items():
        x = jax.random.normal(jax.random.key(n), (1, k), jnp.bfloat16)
        more: dict[str, Any] = {"swiglu": name == "gate_up"}
        if k == WIDTH and name != "o":
            more["gamma"] = weights["gamma"]
        else:
            more["residual"] = jnp.ones((1, n), x.dtype)
        one = weights["head"] if name == "head" else w[name]
        got, want = (
            jax.jit(functools.partial(product, ring=ring, **more))(x, one).astype(jnp.float32)
            for ring in ((96, "before", ()), None)
        )
        found[name] = float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)))
    return found


VARIANTS: dict[str, Any] = {
    "today": None,
    "before 96": (96, "before", ()),
    "nobody 96": (96, "nobody", ()),
    "after 96": (96, "after", ()),
    "early 96": (96, "early", ()),
    "half 96": (96, "half", ()),
    "x first 96": (96, "x first", ()),
    "today, nobody waits": None,
    "before 64": (64, "before", ()),
    "before 32": (32, "before", ()),
    "before 128": (128, "before", ()),
    "before 96, 8 warps": (96, "before", (("warps", 8),)),
    "before 96, 16 warps": (96, "before", (("warps", 16), ("piece", 512))),
    "before 96, 2 KB pieces": (96, "before", (("piece", 2048),)),
    "today again": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemes", default="w4a16,bf16")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--without-attention", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if jax.__version_info__ < (0, 12):
        raise SystemExit(f"jax {jax.__version__}: no kernel begins before the one before has ended")
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def note(key: str, value: Any) -> None:
        results[key] = value
        print(f"{key}: {value}", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)

    for scheme in args.schemes.split(","):
        weights = jax.block_until_ready(make_weights(scheme))
        note(f"{scheme} bytes us", round(tree_bytes(weights) / 4.3e6, 1))
        try:
            note(f"{scheme} values", check_values(scheme, weights))
        except Exception as error:
            note(f"{scheme} values", repr(error)[:300])
        for label in args.only:
            try:
                ring, nobody = VARIANTS[label], "nobody" in label
                found = turn_us(ring, weights, not args.without_attention, nobody)
                note(f"{scheme} {label}", found)
            except Exception as error:
                note(f"{scheme} {label}", repr(error)[:300])
        del weights


if __name__ == "__main__":
    main()

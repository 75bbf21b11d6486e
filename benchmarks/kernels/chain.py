"""A decode step's chain of weight-reading kernels as it is, and with no kernel waiting for another.

    python -m benchmarks.kernels.chain [--schemes w4a16,bf16] [--json FILE]

The chain is Llama-3.2-1B's: 16 layers of qkv, attention, o, gate_up and down, then the head (int8
beside int4).  It runs in a loop on the device.  "today" has the kernels that the project chooses.
In "nobody waits" they are the same without ``griddepcontrol.wait``: the values are wrong, and the
time bounds what any earlier start of a kernel can bring.  Prints microseconds a turn, which are
(200 turns - 40 turns) / 160, and those of the weights' bytes at 4.3 TB/s.

Needs jax >= 0.12: before, no kernel begins early, so both are one program.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxllama import compiler_options
from pallas_kernels import ptx as p
from pallas_kernels import quantize
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.jax_internals import ir
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import tree_bytes

WIDTH, FFN, VOCABULARY, LAYERS = 2048, 8192, 128256, 16
HEADS = 32, 8, 64
CONTEXT, CAPACITY = 1000, 1152
EPS = 1e-5
LONG, SHORT, RUNS = 200, 40, 5
SHAPES = {
    "qkv": ((HEADS[0] + 2 * HEADS[1]) * HEADS[2], WIDTH),
    "o": (WIDTH, HEADS[0] * HEADS[2]),
    "gate_up": (2 * FFN, WIDTH),
    "down": (WIDTH, FFN),
}
Params = dict[str, Any]


def product(x: jax.Array, w: Any, **around: Any) -> jax.Array:
    return quantized_matmul(x, w, **around, implementation="mosaic")


def layer(x: jax.Array, w: Params, attention: tuple) -> tuple[jax.Array, tuple]:
    """Return the layer's output and its cache."""
    norm = w["gamma"], EPS
    qkv = product(x, w["qkv"], norm=norm).reshape(1, -1, HEADS[2])
    heads, *cache = rope_and_attend(qkv, *attention, implementation="mosaic")
    x = product(heads.reshape(1, -1), w["o"], residual=x)
    up = product(x, w["gate_up"], norm=norm, swiglu=True)
    return product(up, w["down"], residual=x), tuple(cache)


def step(x0: jax.Array, weights: Params, caches: list, tables: tuple) -> tuple[jax.Array, list]:
    """One turn: (the next turn's x, caches)."""
    x, new, (cos, sin, slots) = x0, [], tables
    for w, (k, v) in zip(weights["layers"], caches, strict=True):
        x, cache = layer(x, w, (cos, sin, k, v, slots))
        new.append(cache)
    logits = product(x, weights["head"], norm=(weights["gamma"], EPS))
    return x0 + logits[:, : x0.shape[1]] * jnp.bfloat16(1e-3), new


def make_weights(scheme: str) -> Params:
    """scheme: "bf16" or "w4a16"."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def one(key: jax.Array, shape: tuple[int, int], head: bool) -> Any:
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
        made = {n: one(key, s, False) for key, (n, s) in zip(keys, SHAPES.items(), strict=True)}
        layers.append(made | {"gamma": gamma})
    head = one(jax.random.key(99), (VOCABULARY, WIDTH), True)
    return {"layers": layers, "head": head, "gamma": gamma}


def state() -> tuple[jax.Array, list, tuple]:
    """Return x, caches, and the tables of a turn."""
    x = jax.random.normal(jax.random.key(7), (1, WIDTH), jnp.bfloat16)
    shape = (1, CAPACITY, *HEADS[1:])
    caches = [(jnp.zeros(shape, jnp.bfloat16),) * 2 for _ in range(LAYERS)]
    angle = jnp.linspace(0.0, 6.0, HEADS[2] // 2)[None]
    return x, caches, (jnp.cos(angle), jnp.sin(angle), jnp.full((1,), CONTEXT, jnp.int32))


def allow_next() -> None:
    """The kernel behind this one may begin, and this one waits for none."""
    if not p._overlaps():
        return
    p.ptx("griddepcontrol.launch_dependents;")
    owner = ir.InsertionPoint.current.block.owner
    while owner.parent is not None:
        owner = owner.parent
    owner.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()


@contextlib.contextmanager
def nobody_waits() -> Iterator[None]:
    """Within, kernels that are traced and compiled wait for none before them."""
    jax.clear_caches()
    with mock.patch.object(p, "await_kernel", allow_next):
        yield
    jax.clear_caches()


def turn_us(weights: Params, waits: Callable[[], Any]) -> float:
    """Return a turn's microseconds; waits: a context in which the loop is compiled and runs."""
    x, caches, tables = state()

    @functools.partial(jax.jit, compiler_options=compiler_options.for_device())
    def loop(x, caches, weights, tables, turns):
        return jax.lax.fori_loop(
            0, turns, lambda _, now: step(now[0], weights, now[1], tables), (x, caches)
        )

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(loop(x, caches, weights, tables, jnp.int32(turns)))
        return time.perf_counter() - begin

    with waits():
        seconds(3)
        runs = [seconds(LONG) - seconds(SHORT) for _ in range(RUNS)]
    return 1e6 * statistics.median(runs) / (LONG - SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemes", default="w4a16,bf16")
    parser.add_argument("--json", help="a file for the results")
    args = parser.parse_args()
    if jax.__version_info__ < (0, 12):
        raise SystemExit(f"jax {jax.__version__}: no kernel begins before the one before has ended")
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for scheme in args.schemes.split(","):
        weights = jax.block_until_ready(make_weights(scheme))
        us = {
            "bytes": tree_bytes(weights) / 4.3e6,
            "today": turn_us(weights, contextlib.nullcontext),
            "nobody waits": turn_us(weights, nobody_waits),
            "today again": turn_us(weights, contextlib.nullcontext),
        }
        results[scheme] = {name: round(value, 1) for name, value in us.items()}
        print(f"{scheme}, us a turn: {results[scheme]}", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)
        del weights


if __name__ == "__main__":
    main()

"""Device times of the ops that have a kernel on every GPU from sm_80 on, as JSON lines.

    python -m benchmarks.kernels.portable                           the device's own kernels
    JAXLLAMA_TARGET=sm_80 python -m benchmarks.kernels.portable     those that an A100 would run
    python -m benchmarks.kernels.portable --beside A.jsonl B.jsonl  both as a table

Each line has the op, what it chose, the microseconds of all its kernels (CUPTI, median of ten), its
bytes, and their share of the rate at which a sum over memory runs.  Products are of Llama-3.1-8B's
width, over several weights, so that none is in L2.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import device_us
from pallas_kernels import quantize
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import quantize_kv
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import choices
from pallas_kernels.gated_delta.op import gated_delta_step
from pallas_kernels.gla.op import gla_step
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import tree_bytes
from pallas_kernels.rows.greedy import append_greedy
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
N_HEADS, N_KV, HEAD = 32, 8, 128
COPIES = 4  # distinct weights of a product
Case = tuple[Callable[..., Any], list[tuple], int]  # op, operands of each turn, bytes


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def product(rows: int, scheme: str, words: str | None = None, shape=(14336, 4096)) -> Case:
    n, k = shape

    def weight(seed: int) -> Any:
        w = _normal(seed, n, k)
        if scheme == "bfloat16":
            return w
        return quantize(w, scheme, group_size=128 if scheme == "int4" else k)

    x = _normal(9, rows, k)
    given = x if words is None else quantize_tokens(x, dtype=words)
    turns = [(given, jax.jit(weight, static_argnums=0)(i)) for i in range(COPIES)]
    return quantized_matmul, turns, tree_bytes(turns[0][1]) + 2 * rows * (n + k)


def cache(kind: str, rows: int, capacity: int) -> list[Any]:
    def make(seed: int) -> Any:
        x = _normal(seed, rows, capacity, N_KV, HEAD)
        return x if kind == "bfloat16" else quantize_kv(x, kind)

    return [jax.jit(make, static_argnums=0)(seed) for seed in (0, 1)]


def attention(kind: str, rows: int, capacity: int) -> Case:
    kv, q = cache(kind, rows, capacity), _normal(2, rows, N_HEADS, HEAD)
    lengths = jnp.full((rows,), capacity, I32)
    return decode_attention, [(q, *kv, lengths)], tree_bytes(kv)


def step_attention(rows: int, capacity: int) -> Case:
    kv, qkv = cache("bfloat16", rows, capacity), _normal(2, rows, N_HEADS + 2 * N_KV, HEAD)
    tables = [jnp.ones((rows, HEAD // 2), F32)] * 2
    slots = jnp.full((rows,), capacity - 1, I32)

    def attend(*operands: Any) -> jax.Array:
        return rope_and_attend(*operands)[0]

    return attend, [(qkv, *tables, *kv, slots)], tree_bytes(kv)


def norm(rows: int, width: int, words: str | None) -> Case:
    x, weight = _normal(0, rows, width), jnp.ones((width,), BF16)
    op = functools.partial(rms_norm, eps=1e-5, quantize=words)
    return op, [(x, weight)], rows * width * (4 if words is None else 3)


def gate(rows: int, width: int) -> Case:
    op = functools.partial(swiglu, quantize="int8")
    return op, [(_normal(0, rows, 2 * width),)], rows * width * 5


def recurrent(op: Callable[..., Any], rows: int, heads: int, dk: int, dv: int) -> Case:
    q, v = _normal(0, rows, heads, dk), _normal(1, rows, heads, dv)
    decay, state = -jnp.ones((rows, heads, dk), F32), jnp.zeros((rows, heads, dk, dv), F32)
    given = (q, q, v, decay, state)
    if op is gated_delta_step:
        given = (q, q, v, decay[..., 0], jnp.ones((rows, heads), F32), state)
    return op, [given], 2 * state.nbytes


def greedy(vocabulary: int) -> Case:
    given = _normal(0, 1, vocabulary), jnp.zeros((5, 1), I32), jnp.zeros((2, 1, 64), I32)
    return (
        functools.partial(append_greedy, capacity=None),
        [(*given, jnp.zeros((2,), I32))],
        2 * vocabulary,
    )


CASES: dict[str, Callable[[], Case]] = {
    "1 row, int4": lambda: product(1, "int4"),
    "1 row, int4, wide K": lambda: product(1, "int4", shape=(4096, 14336)),
    "1 row, int8": lambda: product(1, "int8"),
    "1 row, bfloat16": lambda: product(1, "bfloat16"),
    "8 rows, int4": lambda: product(8, "int4"),
    "16 rows, int4": lambda: product(16, "int4"),
    "16 rows, int4, wide K": lambda: product(16, "int4", shape=(4096, 14336)),
    "16 rows, int8": lambda: product(16, "int8"),
    "64 rows, W4A16": lambda: product(64, "int4"),
    "64 rows, W8A16": lambda: product(64, "int8"),
    "64 rows, W8A8": lambda: product(64, "int8", "int8"),
    "64 rows, W8A8, wide K": lambda: product(64, "int8", "int8", (4096, 14336)),
    "attention 1 x 1152": lambda: attention("bfloat16", 1, 1152),
    "attention 1 x 32768": lambda: attention("bfloat16", 1, 32768),
    "attention 64 x 1152, int8": lambda: attention("int8", 64, 1152),
    "attention 64 x 8192": lambda: attention("bfloat16", 64, 8192),
    "attention 64 x 8192, int4": lambda: attention("int4", 64, 8192),
    "RoPE, cache, attention 1 x 1152": lambda: step_attention(1, 1152),
    "norm 64 x 4096": lambda: norm(64, 4096, None),
    "norm 8192 x 4096 to int8": lambda: norm(8192, 4096, "int8"),
    "gate 64 x 14336 to int8": lambda: gate(64, 14336),
    "gate 8192 x 14336 to int8": lambda: gate(8192, 14336),
    "GLA step 64 x 32 x 128 x 128": lambda: recurrent(gla_step, 64, 32, 128, 128),
    "delta step 64 x 32 x 128 x 128": lambda: recurrent(gated_delta_step, 64, 32, 128, 128),
    "greedy 128256": lambda: greedy(128256),
}


def measured(name: str) -> dict[str, Any]:
    op, turns, size = CASES[name]()
    made = choices(op, *turns[0])
    us = device_us(jax.jit(op), turns)
    return {
        "op": name,
        "target": gpu().arch,
        "us": us,
        "bytes": size,
        "share": size / us * 1e6 / gpu().sum_rate,
        "chosen": [f"{x.implementation} {x.kernel or x.reason or ''}".strip() for x in made],
    }


def beside(files: list[Path]) -> str:
    """Return the shares of both files by op, as a table in Markdown."""
    both = [{x["op"]: x for x in map(json.loads, file.read_text().splitlines())} for file in files]
    first, second = both
    lines = ["| op | us | of memory's rate | us | of memory's rate | times |", "|---|" + "---|" * 5]
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        cells = name, f"{a['us']:.1f}", f"{a['share']:.0%}", f"{b['us']:.1f}", f"{b['share']:.0%}"
        lines.append(f"| {' | '.join(cells)} | {b['us'] / a['us']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="ops whose names hold one of these")
    parser.add_argument("--beside", nargs=2, type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.beside:
        print(beside(given.beside))
        return
    for name in CASES:
        if not given.ops or any(x in name for x in given.ops):
            print(json.dumps(measured(name)), flush=True)


if __name__ == "__main__":
    main()

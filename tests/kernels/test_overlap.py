"""Kernels that begin while the one before still runs (``ptx.await_kernel``): which say so, and that
a graph of them gives the bits of each alone.

That none touches device memory before it waits is checked by every emulated run of them
(``helpers.warp_emulator``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import quantize
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import rope_and_write
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import newest
from tests.kernels.attention.test_rope_attention import case

WIDTH, FFN = 2048, 8192
HEADS = 32, 8, 64
EPS = 1e-5


def weights(scheme):
    heads, kv_heads, width = HEADS
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * width, WIDTH),
        "o": (WIDTH, heads * width),
        "gate_up": (2 * FFN, WIDTH),
        "down": (WIDTH, FFN),
    }
    out = {}
    for i, (name, (n, k)) in enumerate(shapes.items()):
        w = jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16) * k**-0.5
        group = {"int4": 128, "int8": k}.get(scheme)
        out[name] = w if group is None else quantize(w, scheme, group_size=group)
    return out


def norm():
    return jnp.ones((WIDTH,), jnp.bfloat16), EPS


def normed(x, w):
    return quantized_matmul(x, w, norm=norm(), implementation="mosaic")


def gated(x, w):
    return quantized_matmul(x, w, norm=norm(), swiglu=True, implementation="mosaic")


def added(y, w, x):
    return quantized_matmul(y, w, residual=x, implementation="mosaic")


def attend(qkv, *rest):
    return rope_and_attend(qkv, *rest, implementation="mosaic")


def layer(x, w, rest, one=lambda f, *operands: f(*operands)):
    """A layer's five kernels of one row, each by ``one``; (x, k, v)."""
    qkv = one(normed, x, w["qkv"])
    heads, k, v = one(attend, qkv.reshape(1, -1, HEADS[2]), *rest)
    x = one(added, heads.reshape(1, -1), w["o"], x)
    return one(added, one(gated, x, w["gate_up"]), w["down"], x), k, v


def mosaic(op, *fixed, **named):
    """The op's kernel, of some operands fixed."""
    return lambda *operands: op(*operands, *fixed, **named, implementation="mosaic")


def layer_of_many_rows(x, w, rest, one=lambda f, *operands: f(*operands)):
    """A layer's ten kernels of 64 rows in 8-bit codes, each by ``one``; (x, k, v)."""
    product, codes = mosaic(quantized_matmul), mosaic(quantize_tokens)
    norm_codes, (*tables, k, v, slots) = mosaic(rms_norm, *norm(), quantize="int8"), rest
    qkv = one(product, one(norm_codes, x), w["qkv"])
    qkv = qkv.reshape(len(x), -1, HEADS[2])
    q, k, v = one(mosaic(rope_and_write), qkv, *tables, k, v, slots)
    heads = one(mosaic(decode_attention), q, k, v, slots + 1).reshape(len(x), -1)
    o = one(product, one(codes, heads), w["o"])

    def sum_and_codes(x, o):
        return rms_norm(x, *norm(), residual=o, quantize="int8", implementation="mosaic")

    y, x = one(sum_and_codes, x, o)
    gates = one(mosaic(swiglu, quantize="int8"), one(product, y, w["gate_up"]))
    return x + one(product, gates, w["down"]), k, v


def rest_of(rows):
    """cos, sin, k, v, slots: of every row the same."""
    _, *rest = case(1152, HEADS, "bfloat16", 1)
    return [jnp.repeat(leaf, rows, 0) for leaf in rest]


def in_turns(w, i):
    """As they are, or the rows (of int4 the scales) the other way round: computed just before they
    are read, by a kernel of XLA's."""
    return jax.tree.map(
        lambda a: a if a.dtype == jnp.int4 else jnp.where(i % 2 == 0, a, jnp.flip(a, 0)), w
    )


@newest
def test_the_kernels_of_a_step_say_that_they_wait():
    overlaps = jax.__version_info__ >= (0, 12)
    layers = (layer, 1, "int4", 5), (layer_of_many_rows, 64, "int8", 10)
    for of, rows, scheme, kernels in layers:
        x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
        w = jax.eval_shape(functools.partial(weights, scheme))
        step = jax.jit(of).trace(x, w, rest_of(rows))
        calls = step.lower(lowering_platforms=("cuda",)).as_text()
        assert calls.count("uses_pdl") == kernels * overlaps


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("of", "rows", "scheme"),
    [(layer, 1, "int4"), (layer, 1, "int8"), (layer, 1, "bfloat16")]
    + [(layer_of_many_rows, 64, scheme) for scheme in ("int4", "int8")],
)
def test_a_graph_gives_the_bits_of_each_kernel_alone(of, rows, scheme):
    turns, w = 8, jax.jit(weights, static_argnums=0)(scheme)
    cos, sin, k, v, slots = rest_of(rows)
    x = as_jax(np.random.default_rng(1).standard_normal((rows, WIDTH)), jnp.bfloat16)

    @jax.jit
    def graph(*state):
        def turn(i, state):
            x, k, v = state
            return of(x, in_turns(w, i), (cos, sin, k, v, slots))

        return lax.fori_loop(0, turns, turn, state)

    def alone(f, *operands):
        return jax.block_until_ready(jax.jit(f)(*operands))

    want = x, k, v
    for i in range(turns):
        (y, *cache), now = want, jax.block_until_ready(in_turns(w, i))
        want = of(y, now, (cos, sin, *cache, slots), alone)
    for _ in range(4):
        for got, expected in zip(graph(x, k, v), want, strict=True):
            got, expected = (np.asarray(a, np.float32) for a in (got, expected))
            np.testing.assert_array_equal(got, expected)

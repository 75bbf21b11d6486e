"""Kernels that begin while the one before still runs (``ptx.await_kernel``): which say so, and that
a graph of them gives the bits of each alone.

That none touches device memory before it waits is checked by every emulated run of them
(``helpers.warp_emulator``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import quantize
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.rows.rms_norm import rms_norm
from tests.kernels.attention.test_rope_attention import case
from tests.kernels.matmul.test_blocks_matmul import newest

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
    """A layer's five kernels, each by ``one``; (x, k, v)."""
    qkv = one(normed, x, w["qkv"])
    heads, k, v = one(attend, qkv.reshape(1, -1, HEADS[2]), *rest)
    x = one(added, heads.reshape(1, -1), w["o"], x)
    return one(added, one(gated, x, w["gate_up"]), w["down"], x), k, v


def in_turns(w, i):
    """As they are, or the rows (of int4 the scales) the other way round: computed just before they
    are read, by a kernel of XLA's."""
    return jax.tree.map(
        lambda a: a if a.dtype == jnp.int4 else jnp.where(i % 2 == 0, a, jnp.flip(a, 0)), w
    )


@newest
def test_the_kernels_of_a_step_say_that_they_wait():
    _, *rest = case(100, HEADS, "bfloat16", 1)
    x, w = jnp.ones((1, WIDTH), jnp.bfloat16), jax.eval_shape(lambda: weights("int4"))

    def alone(x, w):
        return rms_norm(x, x[0], EPS, implementation="mosaic")

    overlaps = jax.__version_info__ >= (0, 12)
    for f, kernels in ((lambda x, w: layer(x, w, rest)[0], 5 * overlaps), (alone, 0)):
        text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("uses_pdl") == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int4", "int8", "bfloat16"])
def test_a_graph_gives_the_bits_of_each_kernel_alone(scheme):
    turns, w = 8, jax.jit(weights, static_argnums=0)(scheme)
    _, cos, sin, k, v, slots = case(1152, HEADS, "bfloat16", 1)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, WIDTH)), jnp.bfloat16)

    @jax.jit
    def graph(*state):
        def turn(i, state):
            x, k, v = state
            return layer(x, in_turns(w, i), (cos, sin, k, v, slots))

        return lax.fori_loop(0, turns, turn, state)

    def alone(f, *operands):
        return jax.block_until_ready(jax.jit(f)(*operands))

    want = x, k, v
    for i in range(turns):
        (y, *cache), now = want, jax.block_until_ready(in_turns(w, i))
        want = layer(y, now, (cos, sin, *cache, slots), alone)
    for _ in range(4):
        for got, expected in zip(graph(x, k, v), want, strict=True):
            got, expected = (np.asarray(a, np.float32) for a in (got, expected))
            np.testing.assert_array_equal(got, expected)

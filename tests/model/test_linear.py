"""The operations of layers: how many kernels a decode step on Hopper has for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.model import linear
from jaxllama.model.linear import Stream
from pallas_kernels import dispatch, quantize
from pallas_kernels.matmul import op
from pallas_kernels.matmul.call import Around, Static
from pallas_kernels.operands import Columns
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.models import LATENT

LAYER = LATENT.layers[0]


@pytest.fixture
def planned(monkeypatch):
    """Programs are lowered for a GPU as one would choose its kernels."""
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)


def layers(*rows: int, k: int) -> list[dict[str, jax.Array]]:
    return [{"weight": activations((n, k), jnp.bfloat16, seed)} for seed, n in enumerate(rows)]


@newest
def test_a_pending_sum_joins_the_norm_before_several_products(planned):
    """XLA adds it; the norm and all products are one kernel."""
    x, pending = (activations((1, 1, 256), jnp.bfloat16, seed) for seed in (7, 8))
    scale, weights = {"weight": jnp.ones(256, jnp.bfloat16)}, layers(96, 64, k=256)

    def products(x, pending):
        outs, stream = linear.norm_linear(Stream(x, pending), scale, weights, LAYER)
        return [y.value for y in outs], stream.total

    assert kernels_in(lowered(products, x, pending)) == ["quantized_matmul_blocks"]


@newest
def test_a_norm_and_a_product_of_short_rows_are_one_kernel(planned):
    w = quantize(activations((48, 768), jnp.bfloat16), "int4", group_size=128, symmetric=False)
    scale, rows = jnp.ones(768, jnp.bfloat16), activations((1, 1, 1344), jnp.bfloat16)

    def f(rows, start):
        x = Columns(rows, start, 768)
        return linear.linear_of_norm(x, scale, 1e-5, {"weight": w})

    for start, copies in ((0, 0), (576, 1)):  # the kernel reads the first columns where they are
        text = lowered(functools.partial(f, start=start), rows)
        assert kernels_in(text) == ["quantized_matmul_row"]
        assert text.count("stablehlo.slice") == copies
    # The XLA form of a call with a longer row, as jax takes it on several devices.
    around = Around(rows.dtype, gamma=scale, eps=1e-5)
    want = op._fused_xla(Static(rows.dtype), rows[0, :, :768], w, around)
    np.testing.assert_array_equal(op._fused_xla(Static(rows.dtype), rows[0], w, around), want)


def test_a_product_of_a_norm_is_both_in_turn():
    x, scale = activations((2, 3, 64), jnp.float32), activations((64,), jnp.float32, 2)
    [params] = layers(16, k=64)
    params = {"weight": params["weight"].astype(jnp.float32), "bias": jnp.ones(16)}
    normed = np.asarray(x) / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5) * scale
    want = normed @ np.asarray(params["weight"]).T + 1
    found = linear.linear_of_norm(Columns.whole(x), scale, 1e-5, params)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)

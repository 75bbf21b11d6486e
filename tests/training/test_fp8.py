"""FP8 products of training: within their format's rounding of the exact ones, and they train."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.quantization.random_params import random_params
from jaxllama.training.config import train_config_from_dict
from jaxllama.training.fp8 import fp8_product
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update


def rounding(v, axis):
    """The largest error of each value: half a step of e4m3 at its size, or of its smallest step."""
    scale = np.abs(v).max(axis, keepdims=True) / 448
    return np.maximum(np.abs(v) * 2**-4, scale * 2**-10)


def bound(a, b, a_axis, b_axis):
    """The largest error of the product of ``a [M, K]`` and ``b [K, N]``."""
    da, db = rounding(a, a_axis), rounding(b, b_axis)
    return np.abs(a) @ db + da @ np.abs(b) + da @ db


def test_a_product_and_its_gradients_are_within_the_rounding_of_e4m3():
    draw = np.random.default_rng(0)
    x, dy = draw.standard_normal((48, 96)), draw.standard_normal((48, 80))
    w = draw.standard_normal((80, 96)) * 0.02
    x[:, 3] *= 50  # a channel of outliers; each token's scale sees it
    x, w, dy = (v.astype(np.float32) for v in (x, w, dy))
    y, pull = jax.vjp(fp8_product, jnp.asarray(x), jnp.asarray(w))
    dx, dw = pull(jnp.asarray(dy))
    x, w, dy = (v.astype(np.float64) for v in (x, w, dy))
    for found, want, most in (
        (y, x @ w.T, bound(x, w.T, 1, 0)),
        (dx, dy @ w, bound(dy, w, 1, 0)),
        (dw, dy.T @ x, bound(dy.T, x, 1, 0)),
    ):
        error = np.abs(np.asarray(found, np.float64) - want)
        assert (error <= most * 1.0001).all()
        # They are rounded at all, and independent errors cancel.
        assert 1e-3 < error.mean() / most.mean() < 0.25


SIZES = {"vocab_size": 256, "n_layers": 2, "d_model": 64, "d_ff": 128}


def losses(name, products, steps=12):
    if name == "gla":
        cfg = load_config("gla-340m").replace(**SIZES, layer_types=("gla",) * 2)
    else:
        cfg = load_config("smollm2-135m").replace(
            **SIZES, n_heads=4, n_kv_heads=4, head_dim=16, layer_types=("attention",) * 2
        )
    table = {
        "steps": 100,
        "batch_size": 4,
        "sequence_length": 32,
        "learning_rate": 3e-3,
        "dtype": "bfloat16",
        "init_from": "x",
        "data": {"tokens": "x"},
        "optimizer": {"warmup_steps": 0},
    }
    setup = TrainingSetup(train_config_from_dict(table | products, "x"), cfg)
    state = init_state(setup, random_params(cfg, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(1, cfg.vocab_size, (1, 4, 33)).astype(np.int32)
    found = []
    for _ in range(steps):
        state, metrics = update(setup, state, None, tokens)
        found.append(metrics["loss"])
    return np.array([float(loss) for loss in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gla"])
def test_losses_follow_those_in_bfloat16(name):
    ours, floats = losses(name, {"products": "fp8"}), losses(name, {})
    assert floats[-1] < 0.8 * floats[0]
    assert not np.array_equal(ours, floats)
    np.testing.assert_allclose(ours, floats, rtol=0.01)  # 0.004 seen


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lora": {"rank": 4}}, "excludes lora"),
        ({"quantize": {"scheme": "w8a16"}}, "excludes quantize"),
    ],
)
def test_products_in_fp8_and_parts_are_of_floats_that_learn(more, why):
    table = {
        "steps": 1,
        "batch_size": 1,
        "sequence_length": 8,
        "learning_rate": 1.0,
        "init_from": "x",
        "data": {"tokens": "x"},
    }
    for key, value in (("products", "fp8"), ("fsdp", True)):
        with pytest.raises(JaxLlamaError, match=f"{key} = {value!r}: {why}"):
            train_config_from_dict(table | more | {key: value}, "x")

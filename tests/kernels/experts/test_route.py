"""The Mosaic kernel of a token's norm and choice of experts: its code on numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import route_kernel
from pallas_kernels.matmul.few_rows import operands
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.warp_emulator import emulated


@newest
@pytest.mark.parametrize(
    "n,d,k,has_bias,normalize",
    [(128, 512, 8, False, True), (32, 320, 4, True, True), (60, 64, 6, False, False)],
    ids=str,
)
def test_emulated(n, d, k, has_bias, normalize) -> None:
    drawn = np.random.default_rng(0).normal(size=(n, d)) * d**-0.5
    drawn[5] = drawn[2]  # equal logits: the lower index comes first
    x, router = activations((2, d), jnp.bfloat16), as_jax(drawn, jnp.bfloat16)
    gamma = 1 + 0.1 * activations((d,), jnp.float32, 2)
    bias = activations((n,), jnp.float32, 3).at[5].set(0).at[2].set(0) if has_bias else None
    plan = route_kernel.route_plan(x, router, k, normalize=normalize, scale=2.0, eps=1e-6)
    assert not isinstance(plan, Reason)
    with emulated(route_kernel, operands):
        y, experts, weights = route_kernel.route_tokens(x, gamma, router, bias, plan=plan)
    floats = np.asarray(x, np.float64)
    want = floats / np.sqrt(np.mean(floats**2, -1, keepdims=True) + 1e-6) * np.asarray(gamma)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1e-2, atol=1e-6)
    logits = np.asarray(y, np.float64) @ np.asarray(router, np.float64).T
    logits = logits if bias is None else logits + np.asarray(bias)
    order = np.argsort(-np.round(logits, 6), -1, kind="stable")[:, :k]
    np.testing.assert_array_equal(experts, order)
    powers = np.exp(logits)
    best = np.take_along_axis(powers, order, -1)
    shares = best / (best if normalize else powers).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, 2 * shares, rtol=1e-4)


def test_what_it_takes() -> None:
    x, router = jnp.zeros((1, 64), jnp.bfloat16), jnp.zeros((16, 64), jnp.bfloat16)
    options = {"normalize": True, "scale": 1.0, "eps": 1e-6}
    for reason, *changed in (
        ("9 tokens", jnp.zeros((9, 64), jnp.bfloat16), router, 2),
        ("x is float32", x.astype(jnp.float32), router, 2),
        ("17 of 16 experts", x, router, 17),
    ):
        assert reason in route_kernel.route_plan(*changed, **options).text

"""The norm and choice of experts: XLA's form, and the Mosaic kernel's code on numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import best_kernel, route_kernel
from pallas_kernels.experts.route import norm_and_route
from pallas_kernels.experts.route_plan import RoutePlan, RouteStatic, SigmoidRoutePlan, route_plan
from pallas_kernels.matmul.few_rows import operands
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.warp_emulator import emulated

CASES = [(128, 512, 8, None, True), (32, 320, 4, "bfloat16", True), (60, 64, 6, None, False)]
SIGMOIDS = [(64, 320, 4, None, True, 2, True), (60, 64, 6, "float32", False, 2, True)]


def case(n, d, k, bias, normalize, tokens=2, sigmoid=False):
    drawn = np.random.default_rng(0).normal(size=(n, d)) * d**-0.5
    drawn[5] = drawn[2]  # equal logits: the lower index comes first
    x, router = activations((tokens, d), jnp.bfloat16), as_jax(drawn, jnp.bfloat16)
    gamma = as_jax(1 + 0.1 * np.asarray(activations((d,), jnp.float32, 2)))
    if bias is not None:
        drawn = np.array(activations((n,), jnp.float32, 3))
        drawn[[2, 5]] = 0
        bias = as_jax(drawn, jnp.dtype(bias))
    choice_bias = None
    if sigmoid:
        drawn = np.array(activations((n,), jnp.float32, 4))
        drawn[[2, 5]] = 0.5
        choice_bias = jnp.asarray(drawn)
    return x, gamma, router, bias, choice_bias, RouteStatic(k, normalize, 2.0, 1e-6, sigmoid)


def check(found, x, gamma, router, bias, choice_bias, static) -> None:
    y, experts, weights = found
    floats = np.asarray(x, np.float64)
    want = floats / np.sqrt(np.mean(floats**2, -1, keepdims=True) + 1e-6) * np.asarray(gamma)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1e-2, atol=1e-6)
    logits = np.asarray(y, np.float64) @ np.asarray(router, np.float64).T
    logits = logits if bias is None else logits + np.asarray(bias, np.float64)
    powers = 1 / (1 + np.exp(-logits)) if static.sigmoid else np.exp(logits)
    by = powers + np.asarray(choice_bias, np.float64) if static.sigmoid else logits
    order = np.argsort(-np.round(by, 6), -1, kind="stable")[:, : static.k]
    np.testing.assert_array_equal(experts, order)
    shares = best = np.take_along_axis(powers, order, -1)
    if static.normalize or not static.sigmoid:
        shares = best / (best if static.normalize else powers).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, static.scale * shares, rtol=1e-4)


@pytest.mark.parametrize(
    "given", [CASES[1], SIGMOIDS[0], pytest.param(CASES[2], marks=pytest.mark.slow)], ids=str
)
def test_xla(given) -> None:
    *arrays, static = case(*given)
    k, normalize, scale, eps, sigmoid = static
    how = {"k": k, "normalize": normalize, "scale": scale, "sigmoid": sigmoid}
    run = jax.jit(lambda x, gamma, *rest: norm_and_route(x, (gamma, eps), *rest, **how))
    check(run(*arrays), *arrays, static)


@newest
@pytest.mark.parametrize("given", CASES + SIGMOIDS, ids=str)
def test_emulated(given) -> None:
    *arrays, static = case(*given)
    plan = route_plan(arrays[0], arrays[2], static)
    with emulated(route_kernel, best_kernel, operands):
        found = route_kernel.route_tokens(*arrays, static=static, plan=plan)
    check(found, *arrays, static)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(
    "n,d,k,bias,normalize,sigmoid",
    [
        (128, 2048, 8, None, True, False),
        (32, 2880, 4, "bfloat16", True, False),
        (60, 2048, 4, None, False, False),
        (64, 2048, 4, None, True, True),
    ],
)
def test_values_on_the_gpu(tokens, n, d, k, bias, normalize, sigmoid) -> None:
    """A token has the same bits alone and beside others."""
    x, gamma, *rest, static = case(n, d, k, bias, normalize, tokens, sigmoid)
    options = {"k": k, "normalize": normalize, "scale": static.scale, "sigmoid": sigmoid}
    options |= {"implementation": "mosaic"}
    run = jax.jit(lambda x: norm_and_route(x, (gamma, static.eps), *rest, **options))
    found = run(x)
    check(found, x, gamma, *rest, static)
    for alone, together in zip(run(x[:1]), found, strict=True):
        np.testing.assert_array_equal(alone, together[:1])


@newest
def test_lowers_for_cuda() -> None:
    x, gamma, router, bias, *_ = case(*CASES[1])
    f = functools.partial(norm_and_route, k=4, normalize=True, implementation="mosaic")
    call = jax.jit(lambda x, gamma, router, bias: f(x, (gamma, 1e-6), router, bias))
    text = call.trace(x, gamma, router, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


def test_what_it_takes() -> None:
    x, router = jnp.zeros((1, 64), jnp.bfloat16), jnp.zeros((16, 64), jnp.bfloat16)
    static = RouteStatic(2, True, 1.0, 1e-6)
    assert route_plan(x, router, static) == RoutePlan(1, 16, 64)
    sigmoid = static._replace(sigmoid=True)
    assert route_plan(x, router, sigmoid) == SigmoidRoutePlan(1, 16, 64) != RoutePlan(1, 16, 64)
    with pytest.raises(ValueError, match="choice_bias needs sigmoid"):
        given = x, (jnp.ones(64), 1e-6), router, None, jnp.zeros(16)
        norm_and_route(*given, k=2, normalize=True)
    assert "9 tokens" in route_plan(jnp.zeros((9, 64), jnp.bfloat16), router, static).text
    assert "x is float32" in route_plan(x.astype(jnp.float32), router, static).text
    with pytest.raises(ValueError, match="k = 17 of 16 experts"):
        norm_and_route(x, (jnp.ones(64), 1e-6), router, k=17, normalize=True)

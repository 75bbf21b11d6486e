"""The head of floats by the CPU's handler: a row's bits depend on no other row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import frame, head, jit
from tests.helpers.cpu_cases import native


def case(rows, n=48, k=80, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in ((rows, k), (k,), (n, k))]


def oracle(x, gamma, w):
    x, gamma, w = (v.astype(np.float64) for v in (x, gamma, w))
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma @ w.T


@pytest.mark.core
@pytest.mark.parametrize("target", native(), ids=lambda t: t.name)
def test_it_is_the_norm_and_the_product_row_by_row(target):
    x, gamma, w = case(7)
    want, program = oracle(x, gamma, w), head.Head(4 if target.rows == 8 else 1)
    address = jit.compiled(program, target).address

    def by_hand(x, threads):
        y = np.full((len(x), len(w)), np.nan, np.float32)
        eps = {"eps": np.asarray(1e-5, np.float32)}
        frame.call(address, [x, w, gamma], [y, np.empty_like(x)], eps, threads=threads)
        return y

    whole = by_hand(x, 2)
    np.testing.assert_allclose(whole, want, 1e-5, 1e-5)
    for i in range(len(x)):
        np.testing.assert_array_equal(by_hand(x[i : i + 1], 1)[0], whole[i])


def test_it_is_an_op():
    x, gamma, w = case(3)
    got = jax.jit(lambda x: head.norm_matmul(x[:, None], gamma, w, 1e-5))(x)
    assert got.shape == (3, 1, 48)
    np.testing.assert_allclose(got[:, 0], oracle(x, gamma, w), 1e-5, 1e-5)
    grads = [
        jax.jit(
            jax.grad(lambda x, how=how: jnp.sum(head.norm_matmul(x, gamma, w, 1e-5, how) ** 2))
        )(x)
        for how in ("cpu", "xla")
    ]
    np.testing.assert_allclose(*grads, 1e-4, 1e-3)


def test_what_it_refuses_is_said():
    x, _, w = map(jnp.asarray, case(1))
    assert "multiples of 16" in head.plan(x, w[:47]).text
    assert "bfloat16" in head.plan(x, w.astype(jnp.bfloat16)).text

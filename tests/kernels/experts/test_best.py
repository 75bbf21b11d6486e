"""The largest of each row: XLA's form, and the Mosaic kernel's code on numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import best_kernel
from pallas_kernels.experts.best import best, best_plan
from pallas_kernels.experts.route_plan import BestPlan
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import newest
from tests.helpers.warp_emulator import emulated

CASES = [(5, 128, 8), (4, 32, 4), (1, 60, 6), (9, 300, 10)]


def scores_of(rows: int, n: int) -> jax.Array:
    """Rows with equal scores, infinities and zeros of both signs."""
    drawn = np.random.default_rng(0).normal(size=(rows, n)).astype(np.float32)
    drawn[:, 7] = drawn[:, 3] = 4.0
    drawn[0, [5, 9]] = np.inf, -np.inf
    drawn[-1] = np.where(drawn[-1] > 1, drawn[-1], -np.inf)
    drawn[-1, 20:] = 0.0
    return jnp.asarray(drawn)


def check(found: tuple[jax.Array, jax.Array], scores: jax.Array, k: int) -> None:
    values, places = found
    order = np.argsort(-np.asarray(scores), axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(scores), order, -1))


def test_xla() -> None:
    scores = scores_of(5, 128)
    check(best(scores, 8), scores, 8)
    slope = jax.grad(lambda x: jnp.sum(best(x, 3)[0] * jnp.arange(3.0)))(scores)
    assert float(jnp.sum(slope)) == 5 * 3.0 and int(jnp.sum(slope != 0)) == 5 * 2


@newest
@pytest.mark.parametrize("rows,n,k", CASES)
def test_emulated(rows, n, k) -> None:
    scores = scores_of(rows, n)
    with emulated(best_kernel):
        found = best_kernel.best_of_rows(scores, plan=best_plan(scores, k))
    check(found, scores, k)


@pytest.mark.gpu
@pytest.mark.parametrize("rows,n,k", [*CASES, (2048, 128, 8), (4097, 512, 10)])
def test_values_on_the_gpu(rows, n, k) -> None:
    scores = scores_of(rows, n)
    check(jax.jit(lambda x: best(x, k, implementation="mosaic"))(scores), scores, k)


@newest
def test_lowers_for_cuda() -> None:
    text = lowered(lambda x: best(x, 4, implementation="mosaic"), scores_of(4, 32))
    assert kernels_in(text) == ["best_of_rows"] and "sort" not in text


def test_what_it_takes() -> None:
    scores = jnp.zeros((4, 64))
    assert best_plan(scores, 6) == BestPlan(4, 64, 6)
    assert "scores are bfloat16" in best_plan(scores.astype(jnp.bfloat16), 6).text
    assert "2 of 513" in best_plan(jnp.zeros((1, 513)), 2).text
    with pytest.raises(ValueError, match="best: k = 65 of 64 scores"):
        best(scores, 65)

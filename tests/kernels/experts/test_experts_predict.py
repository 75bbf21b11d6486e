"""Predicted times of a grouped product's forms: what they choose beside what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import experts_fit as fit
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import plan as planning
from pallas_kernels.experts import predict, xla

# H100, jax 0.12.0.1, 2026-11-25: microseconds of 26 cases.  The times of "masked" are
# those of ``lax.ragged_dot``, which jax lowers to that product.
TIMES = fit.read(str(Path(__file__).parents[2] / "golden" / "experts_times.jsonl"))


def test_choices_beside_the_measured_best() -> None:
    with fit.table():
        found = fit.losses(TIMES, TIMES)
    shares = [share for share, *_ in found]
    assert len(shares) == 26 and max(shares) <= 0.15 and statistics.mean(shares) < 0.01
    assert {form for _, form, _ in found} == set(fit.FORMS)


def test_choices_of_a_shape_that_the_fit_has_not_seen() -> None:
    """Each shape by a fit to the others; one case (int8, 8 tokens) takes the second best."""
    shares = [share for share, *_ in fit.losses_of_unseen_shapes(TIMES)]
    assert len(shares) == 26 and statistics.mean(shares) < 0.02
    assert sum(share > 0.15 for share in shares) <= 1 and max(shares) < 0.3


def test_the_device_s_costs_are_those_of_the_fit() -> None:
    costs = fit.fit(TIMES)
    for family, cost in fit.H200.costs.items():
        if family.startswith("experts "):
            want = costs[family]
            np.testing.assert_allclose(cost.start, want.start, rtol=0.02)
            np.testing.assert_allclose(cost.serial, want.serial, rtol=0.02)


def test_a_longer_call_takes_longer() -> None:
    """For every form, in pairs and in rows of an expert."""
    with fit.table():
        for form in fit.FORMS:
            for scheme in ("bf16", "w8", "w4"):
                small, large = (
                    fit.ExpertsCase((32, 4, n, 1024), scheme, 1).weight() for n in (512, 2048)
                )
                by_pairs = [predict.form_us(form, small, pairs) for pairs in (1, 8, 64, 512, 4096)]
                assert by_pairs == sorted(by_pairs) and by_pairs[0] > 0
                assert predict.form_us(form, small, 8) < predict.form_us(form, large, 8)


@pytest.mark.parametrize("scheme,is_kernel", [("bf16", False), ("w8", False), ("w4", True)])
def test_the_kernel_is_taken_where_it_is_the_shortest(scheme, is_kernel) -> None:
    case = fit.ExpertsCase((128, 8, 1536, 2048), scheme, 8)
    x = jax.ShapeDtypeStruct((case.tokens, 2048), jnp.bfloat16)
    with fit.table():
        found = planning.plan(x, case.weight(), case.pairs, "silu")
    assert isinstance(found, Reason) is not is_kernel
    plan = found if is_kernel else found.plan
    assert (plan.predicted_us < plan.xla_us) is is_kernel


def test_every_form_of_xla_is_there() -> None:
    assert set(xla.BY_FORM) == set(predict.XLA_FORMS)

"""Predicted times of a grouped product's forms: what they choose beside what was measured."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import experts_fit as fit
from pallas_kernels.cards.table import measured_cards
from pallas_kernels.device import gpu_named
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import plan, xla
from pallas_kernels.experts import plan as planning

# H100s and H200s, jax 0.12.0.1, 2026-11-25 to 27: microseconds of 49 cases with a choice,
# and others of one form.  Down's rows count a row for each pair; its other forms were timed with a
# token's row shared, which they repeat.
TIMES = fit.read(str(Path(__file__).parents[2] / "golden" / "experts_times.jsonl"))


def test_choices_beside_the_measured_best() -> None:
    found = fit.losses(TIMES, TIMES)
    shares = [share for share, *_ in found]
    assert len(shares) == 49 and max(shares) <= 0.17 and statistics.mean(shares) < 0.01
    assert {case.card for *_, case in found} == set(measured_cards())


def test_every_expert_is_multiplied_between_few_and_many_pairs() -> None:
    """A float weight; its sums bound the number of rows."""
    w = fit.ExpertsCase("NVIDIA H200", (128, 8, 1536, 2048), "bf16", 1, 1).weight()
    with fit.table("NVIDIA H200"):
        forms = [plan.shortest_form(w, 8 * tokens, tokens) for tokens in (1, 8, 32, 256, 512)]
    assert forms == ["gather", "gather", "every", "every", "blocks"]
    assert plan.has_every(w, 341) and not plan.has_every(w, 342)


def test_choices_of_a_shape_that_the_fit_has_not_seen() -> None:
    """Each shape by a fit to the others."""
    shares = [share for share, *_ in fit.losses_of_unseen_shapes(TIMES)]
    assert len(shares) == 49 and statistics.mean(shares) < 0.02 and max(shares) < 0.3


def test_the_device_s_costs_are_those_of_the_fit() -> None:
    costs = fit.fit(TIMES)
    for family, cost in gpu_named("NVIDIA H200").costs.items():
        if family.startswith("experts "):
            want = costs[family]
            np.testing.assert_allclose(cost.start, want.start, rtol=0.02)
            np.testing.assert_allclose(cost.serial, want.serial, rtol=0.02)


def test_a_longer_call_takes_longer() -> None:
    """For every form, in pairs and in rows of an expert."""
    with fit.table("NVIDIA H100 80GB HBM3"):
        for form in fit.FORMS:
            for scheme in ("w4",) if form == "summed" else ("bf16", "w8", "w4"):
                small, large = (
                    fit.ExpertsCase("", (32, 4, n, 1024), scheme, 1, 1).weight()
                    for n in (512, 8192)
                )
                us = functools.partial(plan.form_us, form)
                by_pairs = [us(small, pairs, pairs) for pairs in (1, 8, 64, 512, 4096)]
                assert by_pairs == sorted(by_pairs) and by_pairs[0] > 0
                assert us(small, 8, 8) < us(large, 8, 8)


@pytest.mark.parametrize(
    "scheme,tokens,is_kernel",
    [("bf16", 1, False), ("bf16", 8, True), ("w8", 8, True), ("w4", 8, True)],
)
def test_the_kernel_is_taken_where_it_is_the_shortest(scheme, tokens, is_kernel) -> None:
    case = fit.ExpertsCase("NVIDIA H100 80GB HBM3", (128, 8, 1536, 2048), scheme, tokens, tokens)
    x = jax.ShapeDtypeStruct((case.tokens, 2048), jnp.bfloat16)
    with fit.table(case.card):
        found = planning.plan(x, case.weight(), case.pairs, "silu")
    assert isinstance(found, Reason) is not is_kernel
    plan = found if is_kernel else found.plan
    assert (plan.predicted_us < plan.xla_us) is is_kernel


def test_every_form_of_xla_is_there() -> None:
    assert set(xla.BY_FORM) == set(plan.XLA_FORMS)

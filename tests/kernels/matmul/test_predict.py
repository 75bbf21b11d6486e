"""Predicted times: what they choose among kernels and XLA's forms, beside what was measured."""

import dataclasses
import itertools
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import fit
from pallas_kernels import QTensor, explain
from pallas_kernels.dispatch import Reason, shortest
from pallas_kernels.matmul import choice, predict, weight_only
from tests.helpers.matmul_cases import activations, exact, weights

# H200, jax 0.12: times that the table was fitted to, and those of 45 other cases (seed 20261125).
FITTED = Path(__file__).parents[2] / "golden" / "matmul_times.jsonl"
UNSEEN = FITTED.with_name("matmul_times_unseen.jsonl")


@pytest.mark.core
@pytest.mark.parametrize("name", ["w4-row", "w4-g64-zero", "w4-g32-minimum", "w8-g64-zero"])
def test_xla_forms_give_the_same_sums(name):
    """In float32, of one row and of several, with zeros of both kinds."""
    w = weights(name, 16, 256, jnp.bfloat16)
    wide = exact(w)
    for m in (1, 2):
        x = activations((m, 256), jnp.float32)
        ref = np.asarray(x, np.float64) @ wide.T
        for form in predict.forms(w.q, w.group_size):
            out = jax.jit(weight_only.BY_FORM[form])(x, w.scale, w.zero, w.q)
            error = np.sqrt(np.mean((np.asarray(out, np.float64) - ref) ** 2) / np.mean(ref**2))
            assert out.dtype == jnp.float32 and error < 2e-6, (form, m)


def test_few_rows_are_one_pass_over_the_codes():
    """No form of up to four rows writes a copy of the weight."""
    for scheme in ("w4a16", "w4a16-zero", "w4a16-g32-minimum", "w8a16", "w8a16-g128"):
        for n, k in ((14336, 4096), (4096, 14336)):
            for m in (1, 2, 3, 4):
                call = fit.FitCase(scheme, m, n, k).call()
                x = jax.ShapeDtypeStruct((m, k), call.x)
                form = predict.shortest_form(x, call.w)
                assert form in predict.forms(call.w.q, call.w.group_size) and form != "copy"
                assert form == "words" or (m, n, call.w.dtype) != (1, 14336, jnp.int4)
    call = fit.FitCase("w4a16", 512, 4096, 4096).call()
    assert predict.shortest_form(jax.ShapeDtypeStruct((512, 4096), call.x), call.w) == "copy"


def test_why_no_plan_is_taken():
    call = fit.FitCase("w4a16", 1, 14336, 4096).call()
    plan = choice.plan(call)
    found = shortest([Reason("too wide"), plan], lambda _: 9.0, lambda: 8.0)
    assert found.plan == plan and "predicted to take 8.0 us" in found.text and "9.0" in found.text
    found = shortest([Reason("too wide"), Reason(""), Reason("odd")], lambda _: 0.0, lambda: 0.0)
    assert found == Reason("too wide; odd")


def test_one_row_of_a_decoders_products_takes_the_row_kernel():
    """Measured 5 to 20% faster than tiles (the README's table)."""
    for scheme in ("w4a16-zero", "w8a16", "plain"):
        for n, k, fused in ((28672, 4096, "ng"), (4096, 14336, "r"), (128256, 4096, "n")):
            plan = choice.plan(fit.FitCase(scheme, 1, n, k, fused).call())
            assert getattr(plan, "kernel", plan) == "quantized_matmul_row_mosaic", (scheme, n, k)


def test_explain_shows_predicted_times():
    shape = jax.ShapeDtypeStruct
    w = QTensor(shape((14336, 4096), jnp.int4), shape((14336, 32), jnp.bfloat16))
    x = shape((1, 4096), jnp.bfloat16)
    text = explain("quantized_matmul", x, w, implementation="mosaic")
    assert " us predicted (XLA " in text


@pytest.mark.parametrize("x", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", fit.SCHEMES)
def test_every_call_has_predicted_times(scheme, x):
    """The table has each family that a call may come to."""
    for m, n, k in itertools.product((1, 5, 48, 300), (4096, 100), (14336, 96)):
        if k % (fit.SCHEMES[scheme][1] or k):
            continue
        call = fit.FitCase(scheme, m, n, k).call()
        if not call.quantized_x and not call.plain:
            call = dataclasses.replace(call, x=jnp.dtype(x))
        assert isinstance(choice.plan(call), Reason) or predict.xla_us(call) > 0


def shares_lost(path):
    times = fit.read(str(path))
    made = (fit.lost(case, programs) for case, programs in times.items())
    return set(times), [found[0] for found in made if found is not None]


def test_choices_beside_the_measured_best():
    cases, shares = shares_lost(UNSEEN)
    assert cases == set(fit.cases(20261125, 45))
    assert len(shares) > 40 and statistics.mean(shares) < 0.03 and max(shares) < 0.3
    assert sum(share > 0.15 for share in shares) <= 1
    cases, shares = shares_lost(FITTED)
    assert not cases & set(fit.cases(20261125, 45)) and len(shares) > 400
    assert statistics.mean(shares) < 0.02

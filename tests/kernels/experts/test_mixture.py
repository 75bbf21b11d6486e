"""Experts with one that all tokens pass: the kernels' code, and when a call has none."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import mixture
from pallas_kernels.experts.mixture import SharedMixture, WithShared
from pallas_kernels.qtensor import quantize
from tests.helpers.matmul_cases import newest
from tests.helpers.op_calls import mixture as call_of
from tests.helpers.op_plans import _experts

SHAPES = (3072, 2048), (2048, 1536)  # GLM-4.7-Flash's
CALLS = [("nvfp4", 1, 128, 128), pytest.param(("int4", 2, 256, 640), marks=pytest.mark.slow)]
S = jax.ShapeDtypeStruct


def call(kind, k, f, d):
    with planned_for("NVIDIA H200"):
        return call_of(k, _experts(kind, 3, 2 * f, d), _experts(kind, 3, d, f), is_one_kernel=True)


@newest
@pytest.mark.parametrize("given", CALLS, ids=str)
def test_kernels_in_the_emulator(given):
    from tests.helpers.emulator.launch import emulated

    made, rng = call(*given), np.random.default_rng(0)
    operands = made.values(rng)
    with planned_for("NVIDIA H200"), emulated():
        out = made.kernel(*operands)
    made.check(out, operands, rng)


def test_why_two_kernels_do_not_compute_a_mixture():
    given = SharedMixture(*call_of(4, *(_experts("int4", 64, *s) for s in SHAPES)).operands)
    x, gate_up = given.x, given.gate_up
    eight = jax.eval_shape(functools.partial(quantize, dtype="int8"), S((3072, 2048), jnp.float32))
    unit = S((64, 3072, 1), jnp.float32)
    two_levels = dataclasses.replace(gate_up.experts, unit=unit)
    others = {
        "scales in two levels": given._replace(gate_up=gate_up._replace(experts=two_levels)),
        "gate_up is not in codes": given._replace(gate_up=WithShared(x, x)),
        "is not stored as an expert": given._replace(gate_up=gate_up._replace(shared=eight)),
        "another kernel of experts is faster": given._replace(
            x=S((64, 2048), jnp.bfloat16), experts=S((64, 4), jnp.int32)
        ),
    }
    with planned_for("NVIDIA H200"):
        found = mixture.mixture_plan(given, "silu")
        assert str(found) == "8 warps, 2 chains; sums by 16 warps"
        for words, other in others.items():
            refused = mixture.mixture_plan(other, "silu")
            assert isinstance(refused, Reason) and words in refused.text

"""The probe's ring kernel on numpy: values, and the ring's slots over several rounds."""

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks.kernels import ring_kernel
from tests.helpers.few_rows import few_rows
from tests.helpers.matmul_cases import activations, check, extras, fused_product, newest, weight

CASES = [  # weights, N, K, fused, SMs, KB of a ring, bytes of a piece
    ("plain", 96, 512, "n", 2, 32, 1024),
    ("w8-row", 80, 1024, "r", 2, 16, 512),
    ("w4-g128", 96, 2048, "ns", 1, 40, 1024),
    ("w4-g128", 64, 4096, "r", 2, 24, 512),
]


@newest
@pytest.mark.parametrize("name,n,k,kinds,sms,ring,piece", CASES, ids=str)
def test_emulated(name, n, k, kinds, sms, ring, piece):
    w, x = weight(name, n, k, jnp.bfloat16), activations((1, k), jnp.bfloat16)
    given = extras(1, n, k, jnp.bfloat16, kinds, jnp.bfloat16)
    ref = fused_product(x, w, None, **given)
    gamma, _ = given.pop("norm", (None, None))
    order = "x first" if "s" in kinds else "after"
    plan = ring_kernel.plan_of(w, "swiglu" in given, ring, order, piece=piece)
    plan = dataclasses.replace(plan, row=dataclasses.replace(plan.row, sms=sms))
    assert plan.row.units > plan.blocks * plan.row.warps
    with few_rows(ring_kernel):
        out = ring_kernel.ring_matmul(x, w, plan=plan, gamma=gamma, **given)
    check(out, ref, x.dtype)

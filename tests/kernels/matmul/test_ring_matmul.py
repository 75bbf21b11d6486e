"""The product of one row with a settled weight: the ring kernel's code on numpy, and on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.architecture import TARGET
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall, settled_weights
from pallas_kernels.matmul.few_rows import kernel, ring
from pallas_kernels.matmul.few_rows.ring_plan import RingPlan, ring_plan
from tests.helpers.few_rows import few_rows
from tests.helpers.matmul_cases import check, weight
from tests.kernels.matmul.test_row_matmul import case

overlapping = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="kernels do not overlap")
CASES = [  # weights, N, K, fused, changes to the plan
    ("plain", 96, 512, "n", {"depth": 2}),
    ("plain", 64, 4096, "nsb", {"depth": 3}),
    ("w8-row", 80, 1024, "nr", {"depth": 4}),
    ("w4-g128", 96, 2048, "nsb", {"depth": 3}),
    ("w4-g128", 64, 4096, "r", {"depth": 2, "unrolled": 1}),
    ("w4-g128-zero", 96, 4096, "nr", {"depth": 3}),
    ("w4-g128-zero", 64, 10240, "", {"depth": 3}),
]


def plan_of(x, w, given):
    norm = given.get("gamma")
    parts = {"residual": given.get("residual"), "gamma": norm, "eps": given.get("eps")}
    with settled_weights():
        call = MatmulCall.of(x, w, x.dtype, swiglu=given.get("swiglu", False), **parts)
    return ring_plan(call)


@overlapping
@pytest.mark.parametrize("name,n,k,kinds,changes", CASES, ids=str)
def test_emulated(name, n, k, kinds, changes, monkeypatch):
    """Every warp has several units of rows, so slots are filled again."""
    monkeypatch.setenv(TARGET, "sm_90")
    x, w, given, ref = case(name, n, k, kinds)
    plan = dataclasses.replace(plan_of(x, w, given), sms=2, **changes)
    assert plan.units > plan.blocks * plan.warps
    with few_rows(ring):
        out = kernel.matmul(x, w, out_dtype=x.dtype, plan=plan, **given)
    check(out, ref, x.dtype)


@overlapping
def test_only_settled_weights_have_a_ring(monkeypatch):
    monkeypatch.setenv(TARGET, "sm_90")
    x, w, _, _ = case("w4-g128", 256, 2048, "")
    with settled_weights():
        settled = MatmulCall.of(x, w, x.dtype)
    assert isinstance(choice.plan(settled), RingPlan)
    assert not isinstance(choice.plan(MatmulCall.of(x, w, x.dtype)), RingPlan)


@overlapping
@pytest.mark.parametrize("k,bits", [(2048, 4), (8192, 4), (14336, 4), (2048, 16), (4096, 16)])
def test_two_blocks_fit_on_an_sm(k, bits, monkeypatch):
    monkeypatch.setenv(TARGET, "sm_90")
    x = jax.ShapeDtypeStruct((1, k), jnp.bfloat16)
    w = weight("w4-g128" if bits == 4 else "plain", 64, k, jnp.bfloat16)
    plan = plan_of(x, w, {})
    assert sum(-(-size // 1024) for size in plan.scratch_sizes(normed=True)) + 1 <= 114
    assert plan.depth >= 2


SIZES = [(6144, 4096), (4096, 14336), (2144, 2048), (16384, 2048), (34, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("n,k", SIZES)
@pytest.mark.parametrize("name,kinds", [("plain", "nr"), ("w8-row", "nsb"), ("w4-g128-zero", "n")])
def test_values_on_the_gpu(n, k, name, kinds):
    x, w, given, ref = case(name, n, k, kinds)
    plan = plan_of(x, w, given)
    fixed = {key: given.pop(key) for key in ("eps", "swiglu", "activation") if key in given}
    call = jax.jit(
        lambda x, w, given: kernel.matmul(x, w, out_dtype=x.dtype, plan=plan, **given, **fixed)
    )
    check(call(x, w, given), ref, x.dtype)

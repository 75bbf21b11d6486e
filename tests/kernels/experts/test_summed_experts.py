"""The Mosaic kernel that sums over a token's experts: its code on numpy, and what it takes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import plan as planning
from pallas_kernels.experts import summed_kernel, summed_program
from pallas_kernels.experts.op import grouped_matmul_reference
from pallas_kernels.experts.summed_plan import GroupedSumPlan, summed_plan
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows import operands
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import activations, newest, weight
from tests.helpers.warp_emulator import emulated

E, T, FAN = 5, 2, 3
EXPERTS = [[4, 0, 2], [1, 4, 3]]
CASES = [  # weights, N, K, the bias's dtype, units ahead
    ("w4-g128-zero", 24, 384, "bfloat16", 1),
    ("mxfp4", 24, 160, "float32", 4),  # rows end inside a slot
    ("w4-g64-zero", 24, 192, "bfloat16", 2),
    pytest.param("w4-g32", 48, 160, None, 4, marks=pytest.mark.slow),
    pytest.param("w4-g128", 64, 256, None, 4, marks=pytest.mark.slow),
    pytest.param("nvfp4", 48, 256, None, 1, marks=pytest.mark.slow),
]


def stacked(name: str, n: int, k: int):
    """``[E, N, K]``: the rows of one weight, cut."""
    w = weight(name, E * n, k, jnp.bfloat16)
    w = QTensor(w.q, w.scale, w.zero, unit=w.unit)
    return jax.tree.map(lambda v: v.reshape(E, n, *v.shape[1:]), w)


def check(got, want) -> None:
    """Relative RMS, as of the kernels of one row."""
    got, want = (np.asarray(v, np.float64) for v in (got, want))
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))


def case(name, n, k, bias=None):
    x, w = activations((T, FAN, k), jnp.bfloat16), stacked(name, n, k)
    plan = summed_plan(x, w, T * FAN, FAN, most_tokens=T)
    assert not isinstance(plan, Reason)
    bias = None if bias is None else activations((E, n), jnp.dtype(bias), 2)
    weights = activations((T, FAN), jnp.float32, 3)
    return x, w, as_jax(EXPERTS, jnp.int32), weights, bias, dataclasses.replace(plan, sms=4)


def run(x, w, experts, weights, bias, plan):
    with emulated(summed_kernel, summed_program, operands, widen):
        return summed_kernel.grouped_sum(x, w, experts, weights, bias, plan=plan)


@newest
@pytest.mark.parametrize("name,n,k,bias,most_ahead", CASES, ids=str)
def test_emulated(name, n, k, bias, most_ahead) -> None:
    *given, bias, plan = case(name, n, k, bias)
    got = run(*given, bias, dataclasses.replace(plan, most_ahead=most_ahead))
    x, w, experts, weights = given
    check(got, grouped_matmul_reference(x, w, experts, bias=bias, weights=weights))


@newest
@pytest.mark.slow
def test_experts_outside_are_clamped_or_add_nothing() -> None:
    x, w, experts, weights, _, plan = case("w4-g128", 16, 128)
    outside = experts.at[0, 0].set(E).at[1, 2].set(-3)
    inside = jnp.clip(outside, 0, E - 1)
    np.testing.assert_array_equal(
        run(x, w, outside, weights, None, plan), run(x, w, inside, weights, None, plan)
    )
    partial = dataclasses.replace(plan, partial=True)
    outside = experts.at[0, 0].set(E)
    none = weights.at[0, 0].set(0.0)
    check(
        run(x, w, outside, weights, None, partial),
        grouped_matmul_reference(x, w, experts, weights=none),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [None, "bfloat16"])
@pytest.mark.parametrize("n,k", [(2048, 768), (2880, 2880)])
@pytest.mark.parametrize("name", ["w4-g128", "w4-g128-zero", "w4-g64-zero", "mxfp4", "nvfp4"])
def test_values_on_the_gpu(name, n, k, bias) -> None:
    if k % 128 and name.startswith("w4-g128"):
        pytest.skip("groups of 128 do not divide the row")
    x, w, experts, weights, bias, _ = case(name, n, k, bias)
    x, experts, weights = x[:1], experts[:1], weights[:1]
    plan = summed_plan(x, w, FAN, FAN)
    run = jax.jit(functools.partial(summed_kernel.grouped_sum, plan=plan))
    first, again = run(x, w, experts, weights, bias), run(x, w, experts, weights, bias)
    assert (first == again).all()
    check(first, grouped_matmul_reference(x, w, experts, bias=bias, weights=weights))


@newest
def test_lowers_for_cuda() -> None:
    x, w, experts, weights, bias, _ = case("mxfp4", 64, 416, "bfloat16")
    x, experts, weights = x[:1], experts[:1], weights[:1]
    f = functools.partial(grouped_matmul, implementation="mosaic")
    call = jax.jit(lambda *given: f(*given[:3], weights=given[3], bias=given[4]))
    text = call.trace(x, w, experts, weights, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


def test_what_it_takes(monkeypatch) -> None:
    x, w = jnp.zeros((1, FAN, 256), jnp.bfloat16), stacked("w4-g128", 48, 256)
    found = planning.plan(x, w, FAN, None, joined=FAN)
    own = found.plan if isinstance(found, Reason) else found
    assert isinstance(own, GroupedSumPlan)
    assert planning.partial(own).partial
    assert "float32" in summed_plan(x.astype(jnp.float32), w, FAN, FAN).text
    assert "2 tokens" in summed_plan(x, w, 2 * FAN, FAN).text
    assert "too long" in summed_plan(x, w, 72, 72).text
    monkeypatch.setenv(TARGET, "sm_80")
    assert "sm_80 has no wgmma" in summed_plan(x, w, FAN, FAN).text

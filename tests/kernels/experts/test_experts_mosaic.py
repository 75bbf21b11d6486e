"""The Mosaic kernel of few pairs: its code on numpy, and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, grouped_matmul
from pallas_kernels.dispatch import Reason, named_plan
from pallas_kernels.experts import kernel
from pallas_kernels.experts import plan as planning
from pallas_kernels.experts.gate import ClampedGate
from pallas_kernels.experts.op import GroupedStatic, grouped_matmul_reference, planned
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows import operands, row, row_loops, row_x, several
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import activations, newest, weight
from tests.helpers.warp_emulator import emulated

E, PAIRS = 3, 4
CASES = [  # weights, N, K, the gate's activation, with a bias
    ("plain", 96, 512, None, False),
    ("plain", 96, 512, "silu", True),
    ("plain", 96, 512, ClampedGate(limit=0.5), True),
    ("w8-row", 80, 1024, None, True),
    ("w8-row", 96, 512, "gelu_tanh", False),
    ("w4-g128", 96, 1024, "silu", False),
    ("w4-g128-zero", 80, 2048, None, True),
    ("w4-g128-zero", 96, 768, "silu", True),  # the row ends inside the kernel's only read of it
    ("w4-g128", 80, 1408, None, False),  # and inside the second
    ("mxfp4", 96, 1120, "silu", True),
    ("nvfp4", 80, 1024, None, False),
    ("fp8-block", 96, 640, "gelu_tanh", False),
]


def stacked(name: str, n: int, k: int):
    """``[E, N, K]``: the rows of one weight, cut."""
    w = weight(name, E * n, k, jnp.bfloat16)
    w = QTensor(w.q, w.scale, w.zero, unit=w.unit) if isinstance(w, QTensor) else w
    return jax.tree.map(lambda v: v.reshape(E, n, *v.shape[1:]), w)


def case(name, n, k, has_bias):
    x = activations((PAIRS // 2, k), jnp.bfloat16)
    experts = as_jax([[2, 0], [1, 2]], jnp.int32)
    kind = jnp.bfloat16 if name == "mxfp4" else jnp.float32  # as gpt-oss has it
    bias = activations((E, n), kind, 2) if has_bias else None
    return x, stacked(name, n, k), experts, bias


def check(got, want) -> None:
    """Relative RMS, as of the one-row kernel: x is rounded to bfloat16 beside int4."""
    got, want = (np.asarray(v, np.float64) for v in (got, want))
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))


@newest
@pytest.mark.parametrize("name,n,k,activation,has_bias", CASES, ids=str)
def test_emulated(name, n, k, activation, has_bias) -> None:
    x, w, experts, bias = case(name, n, k, has_bias)
    plan = planning.row_plan(x, w, PAIRS, activation)
    assert not isinstance(plan, Reason)
    plan = dataclasses.replace(plan, row=dataclasses.replace(plan.row, sms=2))
    with emulated(kernel, operands, row, row_loops, row_x, several, widen):
        got = kernel.grouped_rows(
            x, w, experts.reshape(-1), bias, fan=2, gate=activation, plan=plan
        )
    want = grouped_matmul_reference(x, w, experts, bias=bias, gated=activation)
    check(got, np.asarray(want).reshape(PAIRS, -1))


@newest
def test_a_short_row_reads_nothing_of_the_next() -> None:
    """NaN in every row but a unit's own."""
    x, w, _, _ = case("w4-g128-zero", 96, 768, False)
    is_own = jnp.zeros((E, 96, 1), bool).at[1, 4:6].set(True)
    w = dataclasses.replace(w, scale=jnp.where(is_own, w.scale, jnp.nan))
    experts = jnp.ones((PAIRS,), jnp.int32)
    plan = planning.row_plan(x, w, PAIRS, None)
    with emulated(kernel, operands, row, row_loops, row_x, several, widen):
        got = kernel.grouped_rows(x, w, experts, fan=2, gate=None, plan=plan)
    np.testing.assert_array_equal(np.isfinite(got), np.broadcast_to(is_own[1, :, 0], got.shape))


@newest
@pytest.mark.parametrize("name,n,k,activation,has_bias", CASES, ids=str)
def test_lowers_for_cuda(name, n, k, activation, has_bias) -> None:
    x, w, experts, bias = case(name, n, k, has_bias)
    weights = jnp.ones((2, 2), jnp.float32)
    f = functools.partial(grouped_matmul, gated=activation, implementation="mosaic")
    call = jax.jit(lambda *given: f(*given[:3], weights=given[3], bias=given[4]))
    text = call.trace(x, w, experts, weights, bias).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "w8-row", "w4-g128", "w4-g128-zero", "w4-g64-zero"])
@pytest.mark.parametrize("n,k", [(1536, 2048), (2048, 1024), (2048, 768), (5760, 3072)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_values_on_the_gpu(name, n, k, activation) -> None:
    """A token has the same bits alone, and between others in another place of the batch."""
    if name == "w8-row" and k % 512:
        pytest.skip("int8 rows end at a multiple of 512")
    x, w, experts, bias = case(name, n, k, True)

    @jax.jit
    def run(x, w, experts):
        plan = planning.row_plan(x, w, experts.size, activation)
        static = GroupedStatic(2, activation, plan, x.dtype, w.shape[0], False)
        return planned(static, x, w, experts, bias=bias)

    got = run(x, w, experts)
    order = as_jax([1, 0, 1, 1, 0])
    again = run(x[order], w, experts[order])
    assert (again == got[order]).all()
    assert (run(x[1:], w, experts[1:]) == got[1:]).all()
    check(
        got.astype(jnp.float32),
        grouped_matmul_reference(x, w, experts, bias=bias, gated=activation),
    )


def test_what_it_takes() -> None:
    """The plan where it is predicted to be shorter, else a Reason that has the plan."""
    x, w, _, _ = case("plain", 96, 512, False)
    found = planning.plan(x, w, 4, None)
    assert isinstance(found, Reason) and "XLA's form is predicted to take" in found.text
    assert named_plan(found).row.sms == 33
    assert "513 pairs" in planning.row_plan(x, w, 513, None).text
    assert "float32" in planning.row_plan(x.astype(jnp.float32), w, 4, None).text
    assert "multiple of 512" in planning.row_plan(x, stacked("w8-row", 96, 768), 4, None).text

"""The Mosaic kernel of a token's experts: its code on numpy, and lowered for CUDA."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import token_kernel, token_program
from pallas_kernels.experts.gate import ClampedGate
from pallas_kernels.experts.op import grouped_matmul_reference
from pallas_kernels.experts.token_plan import token_plan
from pallas_kernels.matmul.few_rows import widen
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import activations, newest, weight
from tests.helpers.warp_emulator import emulated

E, T, FAN = 5, 2, 3
CASES = [  # weights, N, K, the gate, with a bias
    ("w4-g128", 96, 1024, "silu", False),
    ("w4-g128-zero", 80, 1408, None, True),  # rows end inside a chunk
    ("mxfp4", 96, 1120, ClampedGate(limit=0.5), True),  # and inside a slot
    ("nvfp4", 80, 512, "gelu_tanh", False),
]
JOINED = [
    ("w4-g128-zero", 72, 384, True),
    ("mxfp4", 64, 416, True),
    ("nvfp4", 48, 256, False),
]


def stacked(name: str, n: int, k: int):
    """``[E, N, K]``: the rows of one weight, cut."""
    w = weight(name, E * n, k, jnp.bfloat16)
    w = QTensor(w.q, w.scale, w.zero, unit=w.unit)
    return jax.tree.map(lambda v: v.reshape(E, n, *v.shape[1:]), w)


def check(got, want) -> None:
    """Relative RMS: x is rounded to bfloat16."""
    got, want = (np.asarray(v, np.float64) for v in (got, want))
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))


def planned(x, w, gate, joined, **changed):
    plan = token_plan(x, w, T * FAN, gate, fan=FAN, joined=joined)
    assert not isinstance(plan, Reason)
    return dataclasses.replace(plan, sms=4, **changed)


EXPERTS = [[4, 0, 2], [1, 4, 3]]


@newest
@pytest.mark.parametrize("most_ahead", [1, 3, 8])
@pytest.mark.parametrize("name,n,k,gate,has_bias", CASES, ids=str)
def test_emulated(name, n, k, gate, has_bias, most_ahead) -> None:
    x, w, experts = (
        activations((T, k), jnp.bfloat16),
        stacked(name, n, k),
        as_jax(EXPERTS, jnp.int32),
    )
    bias = activations((E, n), jnp.float32, 2) if has_bias else None
    plan = planned(x, w, gate, False, most_ahead=most_ahead)
    with emulated(token_kernel, token_program, widen):
        got = token_kernel.token_rows(x, w, experts, bias, gate=gate, plan=plan)
    check(got, grouped_matmul_reference(x, w, experts, bias=bias, gated=gate))


@newest
@pytest.mark.parametrize("name,n,k,has_bias", JOINED, ids=str)
def test_emulated_sum(name, n, k, has_bias) -> None:
    x, w, experts = (
        activations((T, FAN, k), jnp.bfloat16),
        stacked(name, n, k),
        as_jax(EXPERTS, jnp.int32),
    )
    bias = activations((E, n), jnp.float32, 2) if has_bias else None
    weights = activations((T, FAN), jnp.float32, 3)
    plan = planned(x, w, None, True)
    with emulated(token_kernel, token_program, widen):
        got = token_kernel.token_rows(x, w, experts, bias, weights, gate=None, plan=plan)
    check(got, grouped_matmul_reference(x, w, experts, bias=bias, weights=weights))

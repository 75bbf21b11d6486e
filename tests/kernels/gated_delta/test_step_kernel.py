"""One step of the gated delta rule: the kernel's body, every thread of it on the CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.arrays import as_jax
from tests.helpers.delta_cases import oracle
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gated_delta import step_kernel


def step_case(b, hk, h, dk, dv, by_channel, dtype):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, b, hk, dk))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.normal(size=(b, h, dv)), rng.normal(size=(b, h, dk, dv))
    shape = (b, h, dk) if by_channel else (b, h)
    g = np.array([0.0, -0.1, -3.0, -np.inf])[rng.integers(0, 4, size=shape)]
    beta = np.array([0.0, 0.4, 1.0])[rng.integers(0, 3, size=(b, h))]
    q, k, v = (as_jax(x.astype(jnp.dtype(dtype))) for x in (q, k, v))
    return q, k, v, *(as_jax(x, jnp.float32) for x in (g, beta, state))


@pytest.mark.parametrize(
    "shape, by_channel, columns, dtype",
    [
        ((2, 1, 2, 64, 128), False, 128, "bfloat16"),
        ((1, 2, 4, 128, 256), False, 128, "bfloat16"),
        ((1, 2, 2, 128, 128), True, 64, "float16"),
        ((1, 1, 1, 256, 128), True, 128, "bfloat16"),
        ((1, 2, 4, 128, 128), False, 128, "float16"),
    ],
)
def test_step_emulated(shape, by_channel, columns, dtype):
    operands = step_case(*shape, by_channel, dtype)
    *inputs, state = operands
    want, want_state = oracle(*(x[:, None] for x in inputs), state, scale=0.3)
    want = want[:, 0]
    plan = step_kernel.DeltaStepPlan(columns)
    with emulated(step_kernel):
        o, state = step_kernel.gated_delta_step(*operands, scale=0.3, plan=plan)
    np.testing.assert_allclose(np.asarray(state), want_state, rtol=1e-5, atol=1e-5)
    error = 1e-2 if dtype == "bfloat16" else 1e-3
    np.testing.assert_allclose(np.asarray(o, np.float64), want, rtol=error, atol=error)


def test_plan_names_the_fact():
    spec = jax.ShapeDtypeStruct
    q, v = spec((1, 2, 128), jnp.bfloat16), spec((1, 2, 96), jnp.bfloat16)
    assert "Dv = 96" in step_kernel.plan(q, q, v).text
    assert "float32" in step_kernel.plan(spec(q.shape, jnp.float32), q, v).text
    half = spec(q.shape, jnp.float16)
    assert "k is float16 where q is bfloat16" in step_kernel.plan(q, half, v).text
    wide = spec((64, 32, 128), jnp.bfloat16)
    assert step_kernel.plan(q, q, wide).columns == 128


def test_step_lowers_in_place():
    spec = jax.ShapeDtypeStruct
    q, v = spec((64, 16, 128), jnp.bfloat16), spec((64, 32, 128), jnp.bfloat16)
    g, state = spec((64, 32), jnp.float32), spec((64, 32, 128, 128), jnp.float32)
    plan = step_kernel.plan(q, q, v)
    step = functools.partial(step_kernel.gated_delta_step, scale=0.1, plan=plan)
    text = lowered(step, q, q, v, g, g, state, donate_argnums=5)
    assert kernels_in(text) == ["gated_delta_step"]
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 5" in text
    assert "tf.aliasing_output = 1" in text

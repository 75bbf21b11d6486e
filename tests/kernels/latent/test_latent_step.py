"""A step's latent attention: the kernels' code, and when a step has none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason
from pallas_kernels.latent.step_plan import LatentStep, step_plan
from tests.helpers.matmul_cases import newest
from tests.helpers.op_calls import latent_step

S = jax.ShapeDtypeStruct


@newest
@pytest.mark.parametrize(
    "given",
    [
        (1, 3, 64, 64, 128),  # heads that are filled up
        pytest.param((3, 13, 192, 256, 192, 32), marks=pytest.mark.slow),  # a row without a token
        pytest.param((2, 20, 192, 256, 192, 64), marks=pytest.mark.slow),  # 24 query rows
        pytest.param((1, 33, 64, 128, 128), marks=pytest.mark.slow),  # the program for 64
    ],
    ids=str,
)
def test_kernels_in_the_emulator(given):
    from tests.helpers.emulator.launch import emulated

    call, rng = latent_step(*given), np.random.default_rng(0)
    operands = call.values(rng)
    with planned_for("NVIDIA H200"), emulated():
        out = call.kernel(*operands)
    call.check(out, operands, rng)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"batch": 9}, "9 rows; the kernels of a step take 8"),
        ({"capacity": 1124}, "cache holds 1124 tokens a row; the kernel takes multiples of 8"),
        ({"capacity": 64}, "a row holds 64 tokens; the kernels of a step take 65"),
        ({"still": 40}, "40 features of a key and 256 of a value"),
        ({"d_v": 96}, "192 features of a key and 96 of a value"),
    ],
    ids=str,
)
def test_a_reason_names_the_fact(given, words):
    sizes = {"batch": 1, "n": 20, "still": 192, "d_v": 256, "capacity": 1152}
    with planned_for("NVIDIA H200"):
        found = step_plan(LatentStep(*latent_step(**(sizes | given)).operands))
        plan = step_plan(LatentStep(*latent_step(**sizes).operands))
    assert isinstance(found, Reason) and words in found.text
    assert str(plan) == "24 query rows, chunks of 128 tokens"


def test_weights_of_32_bits_have_none():
    x = LatentStep(*latent_step(1, 20, 192, 256, 1152).operands)
    with planned_for("NVIDIA H200"):
        found = step_plan(x._replace(up=S(x.up.shape, jnp.float32)))
    assert isinstance(found, Reason) and "up is float32[20, 448, 512]" in found.text

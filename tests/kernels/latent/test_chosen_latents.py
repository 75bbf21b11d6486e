"""Latent attention over chosen tokens: every form against its definition in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason
from pallas_kernels.latent.chosen import ChosenPlan, chosen_latent_attention, plan
from tests.helpers.arrays import as_jax
from tests.helpers.latent_cases import BOUND, SCALE, compare, oracle, placed
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import newest


def case(batch, tokens, n, capacity, places, page=0, seed=0, dtype=jnp.bfloat16):
    """Lists that are full, half free and empty; NaN in every token that none of them names."""
    rng = np.random.default_rng(seed)
    chosen = np.full((batch, tokens, places), -1)
    for row, token in np.ndindex(batch, tokens):
        taken = (places, places // 2, 0, 1)[(row + token) % 4]
        chosen[row, token, :taken] = rng.permutation(capacity)[:taken]
    q, entries = rng.normal(size=(batch, tokens, n, 576)), rng.normal(size=(batch, capacity, 576))
    for row in range(batch):
        entries[row, np.setdiff1d(np.arange(capacity), chosen[row])] = np.nan
    entries, table = placed(rng, entries, page)
    return as_jax(q, dtype), as_jax(entries, dtype), as_jax(chosen, jnp.int32), table


def check(form, q, cache, chosen, table, bound=BOUND):
    got = form(q, cache, chosen, scale=SCALE, table=table)
    lists = np.asarray(chosen)
    want = oracle(q, cache, table, lambda row, token: lists[row, token][lists[row, token] >= 0])
    assert want.any()
    compare(got, want, q, np.all(lists < 0, axis=-1), bound)


@pytest.mark.parametrize("page", [0, 16])
def test_values(page):
    form = functools.partial(chosen_latent_attention, implementation="xla")
    check(form, *case(3, 2, 5, 96, 24, page))
    check(form, *case(3, 2, 5, 96, 24, page, dtype=jnp.float32), bound=1e-5)


@pytest.mark.parametrize(
    "width, dtype, words",
    [
        (576, jnp.float32, "q is float32 and cache float32; the kernel takes bfloat16"),
        (640, jnp.bfloat16, "q has 640 features; the kernel takes 512 + 64"),
    ],
)
def test_a_reason_names_the_fact(width, dtype, words):
    S = jax.ShapeDtypeStruct
    given = S((2, 1, 16, width), dtype), S((2, 4096, width), dtype), S((2, 1, 2048), jnp.int32)
    with planned_for("NVIDIA H200"):
        found = plan(*given)
    assert isinstance(found, Reason) and words in found.text


@pytest.mark.parametrize(
    "lists, n, program",
    [
        (64, 16, "16 query rows, chunks of 1024 tokens"),
        (132, 16, "16 query rows, chunks of 2048 tokens"),
        (64, 128, "chunks of 2048 tokens"),
        (1, 128, "chunks of 128 tokens"),
    ],
)
def test_a_plan_fills_the_gpu(lists, n, program):
    S = jax.ShapeDtypeStruct
    given = S((lists, 1, n, 576), jnp.bfloat16), S((lists, 131072, 576), jnp.bfloat16)
    with planned_for("NVIDIA H200"):
        found = plan(*given, S((lists, 1, 2048), jnp.int32))
    assert isinstance(found, ChosenPlan) and str(found) == program


@newest
def test_lowers_as_planned():
    S = jax.ShapeDtypeStruct
    given = S((2, 2, 16, 576), jnp.bfloat16), S((2, 4096, 576), jnp.bfloat16)
    f = functools.partial(chosen_latent_attention, scale=SCALE, implementation="mosaic")
    names = ["chosen_latents_kernel", "decode_attention_merge"]
    assert kernels_in(lowered(f, *given, S((2, 2, 2048), jnp.int32))) == names


@newest
@pytest.mark.parametrize(
    "chunk, given",
    [
        (256, (2, 1, 5, 256, 200)),
        (256, (2, 1, 20, 256, 200)),
        pytest.param(384, (2, 1, 20, 1024, 700), marks=pytest.mark.slow),
        pytest.param(128, (2, 1, 72, 256, 130), marks=pytest.mark.slow),
        pytest.param(128, (2, 2, 16, 512, 256, 32), marks=pytest.mark.slow),
    ],
)
def test_kernel_in_any_order(chunk, given):
    from pallas_kernels.latent import chosen
    from pallas_kernels.latent.chosen import plans
    from tests.helpers.emulator.launch import emulated

    def form(q, cache, listed, *, scale, table):
        with emulated(chunk):
            few = plans(q.shape[2], listed.shape[2])[0].few
            call = scale, ChosenPlan(chunk, few)
            listed = chosen.places_of(cache, listed, table)
            return chosen._kernel(call, q, cache.reshape(-1, 576), listed)

    check(form, *case(*given))

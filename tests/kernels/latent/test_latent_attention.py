"""Latent attention: every form against its definition in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason
from pallas_kernels.latent.op import latent_attention, latent_attention_reference, plan
from tests.helpers.arrays import as_jax
from tests.helpers.latent_cases import BOUND, SCALE, compare, in_codes, oracle, placed
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import newest

FORMS = {
    "reference": latent_attention_reference,
    "xla": functools.partial(latent_attention, implementation="xla"),
}


def case(batch, tokens, n, capacity, page=0, seed=0, dtype=jnp.bfloat16):
    """Rows that are full, empty, of odd lengths and short, NaN past each; and a table, or None."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, capacity + 1, (batch, tokens))
    lengths[0], lengths[-1, 0] = capacity - np.arange(tokens), rng.integers(2) * capacity
    if batch > 2:
        lengths[1] = 0
    q, entries = rng.normal(size=(batch, tokens, n, 576)), rng.normal(size=(batch, capacity, 576))
    for row, longest in enumerate(lengths.max(axis=1)):
        entries[row, longest:] = np.nan
    entries, table = placed(rng, entries, page)
    return as_jax(q, dtype), as_jax(entries, dtype), as_jax(lengths, jnp.int32), table


def check(form, q, cache, lengths, table, bound=BOUND):
    got = form(q, cache, lengths, scale=SCALE, table=table)
    seen = np.asarray(lengths)
    want = oracle(q, cache, table, lambda row, token: slice(seen[row, token]))
    compare(got, want, q, seen == 0, bound)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("name", FORMS)
def test_values(name, page):
    check(FORMS[name], *case(3, 2, 5, 96, page))
    check(FORMS[name], *case(3, 2, 5, 96, page, dtype=jnp.float32), bound=1e-5)


@pytest.mark.parametrize("name, kind", [("xla", "int8"), ("reference", "float8_e4m3fn")])
def test_values_of_codes(name, kind):
    """NaN in what no token sees is scales and turning keys that are NaN."""
    q, cache, lengths, table = case(3, 2, 5, 96, 16, dtype=jnp.float32)
    codes = in_codes(cache, kind)
    assert np.isnan(codes.low.scale).any() and np.isnan(codes.rope.astype(jnp.float32)).any()
    check(FORMS[name], q, codes, lengths, table, bound=1e-5)


def test_codes_that_do_not_fit_are_named():
    q, cache, lengths, _ = case(2, 1, 5, 16)
    codes = in_codes(cache, "int8")
    short = dataclasses.replace(codes, rope=codes.rope[..., :32])
    with pytest.raises(ValueError, match="q has 576 features, and cache 544"):
        latent_attention(q, short, lengths, scale=SCALE)
    with pytest.raises(ValueError, match=r"latent_attention: rope is float32"):
        wide = dataclasses.replace(codes, rope=codes.rope.astype(jnp.float32))
        latent_attention(q, wide, lengths, scale=SCALE)


def shapes(batch, tokens, n, capacity, page=0, dtype=jnp.bfloat16, width=576):
    S = jax.ShapeDtypeStruct
    q, cache = S((batch, tokens, n, width), dtype), S((batch, capacity, width), dtype)
    if not page:
        return q, cache, None
    pool = S((batch * capacity // page, page, width), dtype)
    return q, pool, S((batch, capacity // page), jnp.int32)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"dtype": jnp.float32}, "q is float32 and cache float32; the kernel takes bfloat16"),
        ({"width": 640}, "q has 640 features; the kernel takes 512 + 64"),
        ({"tokens": 17}, "q has 17 tokens a row; the kernel takes 16"),
        ({"capacity": 1020}, "cache holds 1020 tokens a row; the kernel takes multiples of 8"),
        ({"capacity": 1020, "page": 1020}, "cache holds 1020 tokens a page"),
        ({"capacity": 960, "page": 48}, "pages of 48 tokens; the kernel takes 8, 16, 32 and n"),
    ],
)
def test_a_reason_names_the_fact(given, words):
    found = plan(*shapes(**({"batch": 2, "tokens": 1, "n": 16, "capacity": 1024} | given)))
    assert isinstance(found, Reason) and words in found.text


def test_codes_take_few_query_rows():
    q, cache, _ = shapes(64, 1, 20, 8192)
    codes = jax.eval_shape(functools.partial(in_codes, kind="int8"), cache)
    with planned_for("NVIDIA H200"):
        found = plan(q, codes)
        refused = plan(shapes(64, 1, 32, 8192)[0], codes)
    assert str(found).startswith("24 query rows of int8, chunks of ")
    words = "1 tokens of 32 heads; the kernel of codes takes 24 query rows"
    assert isinstance(refused, Reason) and words in refused.text


@pytest.mark.parametrize("batch, n", [(1, 16), (64, 16), (16, 128), (128, 128)])
@pytest.mark.parametrize("capacity", [8192, 65536])
def test_a_plan_fills_the_gpu(batch, n, capacity):
    """The blocks are one wave, or whole waves nearly; and XLA's form is predicted to be slower."""
    with planned_for("NVIDIA H200"):
        found = plan(*shapes(batch, 1, n, capacity))
    assert not isinstance(found, Reason) and found.predicted_us < found.xla_us
    blocks = batch * -(-capacity // found.chunk) * -(-n // 64)
    waves = -(-blocks // 132)
    assert blocks > 0.45 * 132 and blocks / (waves * 132) > 0.45


@pytest.mark.parametrize("batch, capacity, chunk", [(64, 8192, 4096), (16, 65536, 8192)])
def test_few_query_rows_use_nearly_every_sm(batch, capacity, chunk):
    with planned_for("NVIDIA H200"):
        found = plan(*shapes(batch, 1, 16, capacity))
    assert not isinstance(found, Reason) and found.chunk == chunk


@pytest.mark.parametrize("tokens, n, few", [(1, 16, 16), (2, 5, 16), (1, 17, 0)])
def test_few_query_rows_have_a_program(tokens, n, few):
    with planned_for("NVIDIA H200"):
        found = plan(*shapes(64, tokens, n, 8192))
    assert not isinstance(found, Reason) and found.few == few


@newest
@pytest.mark.parametrize("batch, capacity, page", [(1, 8192, 0), (132, 256, 64)])
def test_lowers_as_planned(batch, capacity, page):
    q, cache, table = shapes(batch, 1, 16, capacity, page)
    lengths = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    given = (q, cache, lengths, table) if page else (q, cache, lengths)

    def f(q, cache, lengths, table=None):
        return latent_attention(
            q, cache, lengths, scale=SCALE, table=table, implementation="mosaic"
        )

    names = ["decode_attention_merge", "latent_attention_kernel"]
    assert kernels_in(lowered(f, *given)) == (names if batch == 1 else names[1:])


def emulated(seed, chunk, *given, few=0, kind="bfloat16"):
    from pallas_kernels.latent import kernel
    from pallas_kernels.latent.plan import LatentPlan
    from tests.helpers.emulator.launch import emulated

    def form(q, cache, lengths, *, scale, table):
        with emulated(seed):
            rows = q.shape[1] * q.shape[2]
            codes = "" if kind == "bfloat16" else kind
            plan = LatentPlan(chunk, few, not few and -(-rows // 64) % 2 == 0, codes)
            return kernel.latent_attention(q, cache, lengths, table, scale=scale, plan=plan)

    q, cache, lengths, table = case(*given, seed=seed)
    check(form, q, in_codes(cache, kind), lengths, table)


@newest
@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk, given",
    [
        (384, (3, 1, 16, 384)),  # rounds of which the last is a tile, and a row without a key
        (64, (1, 1, 16, 136)),  # chunks of one tile
        (128, (2, 3, 16, 192, 32)),  # several tokens and copies of pages
        (256, (1, 1, 72, 256, 128)),  # two blocks of query rows
        (192, (2, 1, 12, 384, 64)),  # heads that are filled up
        (128, (2, 1, 8, 136, 136)),  # a row of one page, which no tile divides
    ],
)
def test_kernel_in_any_order(chunk, given):
    emulated(chunk, chunk, *given)


@newest
@pytest.mark.parametrize(
    "kind, chunk, given",
    [
        ("int8", 192, (1, 1, 20, 192)),  # places that are used again
        ("float8_e4m3fn", 64, (1, 3, 8, 128, 32)),  # several tokens and copies of pages
        pytest.param("float8_e4m3fn", 384, (3, 1, 16, 384), marks=pytest.mark.slow),
        pytest.param("int8", 128, (2, 2, 8, 256, 8), marks=pytest.mark.slow),
        pytest.param("int8", 128, (2, 1, 8, 136, 136), marks=pytest.mark.slow),
    ],
)
def test_codes_in_any_order(kind, chunk, given):
    emulated(chunk, chunk, *given, few=24, kind=kind)


@newest
@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk, given",
    [
        (384, (3, 1, 16, 384)),  # places of tiles that are used again, and a row without a key
        (64, (2, 1, 16, 136)),  # chunks of one tile
        (128, (2, 2, 8, 192, 32)),  # several tokens and copies of pages
        (256, (2, 1, 5, 256)),  # heads that are filled up
    ],
)
def test_few_query_rows_in_any_order(chunk, given):
    emulated(chunk + 1, chunk, *given, few=16)


@newest
def test_heads_that_fill_up_to_an_odd_number_of_tiles():
    """3 x 41 query rows are two tiles and 3 x 48 three, which are no pairs."""
    from tests.helpers.emulator.launch import emulated as in_emulator
    from tests.helpers.op_calls import latents

    call, rng = latents(1, 3, 41, 64), np.random.default_rng(0)
    operands = call.values(rng)
    with planned_for("NVIDIA H200"), in_emulator(0):
        out = call.kernel(*operands)
    call.check(out, operands, rng)

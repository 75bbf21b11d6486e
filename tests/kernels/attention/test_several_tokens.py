"""decode_attention of several query tokens a row: every form is that many rows of one token each.

Errors are those of ``test_decode_attention``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.op import decode_attention, decode_attention_reference, plan
from pallas_kernels.dispatch import Reason
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import heads_of, in_pages, poisoned, softmax
from tests.helpers.cases import each_once
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.kernels.attention.test_decode_attention import (
    MOSAIC_CACHES,
    NEWEST,
    as_cache,
    emulation,
    form_given,
    kernels_of,
)


def case(tokens, capacity, heads, cache, q_dtype="bfloat16"):
    """Rows that are full, empty, begun by these tokens, and padded behind them; NaN past each."""
    q, k, v, _ = heads_of(4 * tokens, capacity, *heads, cache, q_dtype)
    k, v = (jax.tree.map(lambda leaf: as_jax(np.asarray(leaf)[:4]), x) for x in (k, v))
    newest = np.asarray([capacity, 0, tokens - 1, capacity // 2 + 3])
    lengths = np.maximum(newest[:, None] - np.arange(tokens)[::-1], 0)
    lengths[3, -1] = 0
    longest = lengths.max(axis=1)
    q = q.reshape(4, tokens, *q.shape[1:])
    return q, poisoned(k, longest), poisoned(v, longest), as_jax(lengths, jnp.int32)


def without_nan(x):
    x = np.array(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x[np.isnan(x)] = 0
    return x


@pytest.mark.parametrize(
    "cache, window", each_once(["float32", "bfloat16", "int8", "int4"], [None, 40])
)
def test_the_xla_form_and_the_reference_are_a_float64_softmax(cache, window):
    q, k, v, lengths = case(3, 90, (6, 2, 64), cache, "float32")
    want = softmax(q, k, v, lengths, window)
    xla = functools.partial(decode_attention, implementation="xla")
    for form in (xla, decode_attention_reference):
        got = jax.jit(form, static_argnames="window")(q, k, v, lengths, window=window)
        assert relative_rms(got, want) < 1e-5
        assert not np.asarray(got)[np.asarray(lengths) == 0].any()


def test_gradients_are_those_of_tokens_alone():
    q, k, v, lengths = case(2, 8, (2, 1, 64), "float32", "float32")

    def together(q, k, v):
        return jnp.sum(jnp.sin(decode_attention(q, k, v, lengths)))

    def alone(q, k, v):
        one = [decode_attention(q[:, t], k, v, lengths[:, t]) for t in range(2)]
        return jnp.sum(jnp.sin(jnp.stack(one, 1)))

    k, v = without_nan(k), without_nan(v)
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (together, alone))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_what_does_not_fit_is_said():
    def reason(tokens, heads):
        found = plan(*case(tokens, 40, heads, "bfloat16")[:3])
        return found.text if isinstance(found, Reason) else None

    assert reason(16, (8, 2, 64)) is None and reason(8, (8, 1, 64)) is None
    assert "16 tokens and 64" in reason(17, (2, 2, 64))
    assert "16 tokens and 64" in reason(9, (8, 1, 64))
    q, k, v, lengths = case(3, 40, (4, 2, 64), "float32", "float32")
    with pytest.raises(ValueError, match="lengths"):
        decode_attention(q, k, v, lengths[:, :2])
    with pytest.raises(ValueError, match="lengths"):
        decode_attention(q, k, v, lengths[:, 0])


SHAPES = [
    ((1, 5, 1536, 32, 8, 128),),
    ((64, 16, 8192, 32, 8, 128),),
    ((3, 8, 700, 64, 8, 128),),
    ((2, 4, 131072, 8, 4, 256),),
    ((9, 7, 640, 9, 3, 64),),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("shape, cache", each_once(SHAPES, MOSAIC_CACHES), ids=str)
def test_what_was_planned_lowers_for_cuda(shape, cache):
    batch, tokens, capacity, n, n_kv, h = shape
    kv = jax.eval_shape(lambda: as_cache(jnp.zeros((batch, capacity, n_kv, h)), cache))
    q = jax.ShapeDtypeStruct((batch, tokens, n, h), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)

    def attend(q, kv, lengths):
        return decode_attention(q, kv, kv, lengths, window=77, implementation="mosaic")

    assert kernels_in(lowered(attend, q, kv, lengths)) == kernels_of(plan(q, kv, kv))


EMULATED = [  # form, tokens, capacity, heads, cache, q, window, page
    ("clusters", 5, 300, (8, 2, 64), "bfloat16", "bfloat16", None, None),
    ("clusters", 2, 200, (8, 2, 256), "float8_e4m3fn", "float16", None, None),
    ("chunks", 5, 300, (8, 2, 64), "bfloat16", "bfloat16", 40, None),
    ("blocks", 16, 150, (4, 2, 64), "int8", "bfloat16", 9, None),
    ("chunks", 3, 333, (9, 3, 64), "int4", "bfloat16", 150, None),
    ("chunks", 16, 96, (8, 2, 64), "float16", "float16", None, 32),
    ("clusters", 7, 128, (4, 1, 64), "int8", "bfloat16", 30, 64),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("given", EMULATED, ids=str)
def test_the_kernel_emulated_is_a_float64_softmax(given, monkeypatch):
    form, tokens, capacity, heads, cache, q_dtype, window, page = given
    form_given(monkeypatch, form)
    q, k, v, lengths = case(tokens, capacity, heads, cache, q_dtype)
    want, table = softmax(q, k, v, lengths, window), None
    if page is not None:
        (k, v), table = in_pages((k, v), page, np.asarray(lengths).max(axis=1))
    with emulation():
        got = decode_attention(
            q, k, v, lengths, window=window, table=table, implementation="mosaic"
        )
    assert relative_rms(got, want) < 4e-3
    assert not np.asarray(got, np.float32)[np.asarray(lengths) == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, heads, cache, page, window",
    [
        (2, (32, 8, 128), "bfloat16", None, None),
        (2, (32, 8, 128), "int8", 32, 100),
        (5, (32, 8, 128), "int4", 32, None),
        (5, (32, 8, 128), "float8_e4m3fn", None, 100),
        (16, (32, 8, 128), "int8", None, 100),
        (16, (32, 8, 128), "int4", 32, None),
        (8, (8, 1, 64), "float8_e4m3fn", 32, None),
        (8, (8, 1, 64), "bfloat16", 32, 100),
        (7, (9, 3, 64), "int8", None, None),
        (7, (9, 3, 64), "int4", None, 100),
        (16, (8, 8, 128), "bfloat16", 32, None),
        (16, (8, 8, 128), "float8_e4m3fn", None, 100),
        (5, (8, 4, 256), "bfloat16", None, 100),
        (5, (8, 4, 256), "int8", 32, None),
        (16, (8, 4, 256), "int4", 32, 100),
        (16, (8, 4, 256), "float8_e4m3fn", None, None),
    ],
    ids=str,
)
def test_the_kernel_is_a_float64_softmax(tokens, heads, cache, page, window, monkeypatch):
    for form, capacity in (("blocks", 96), ("clusters", 960), ("chunks", 960)):
        form_given(monkeypatch, form)
        q, k, v, lengths = case(tokens, capacity, heads, cache)
        want, table = softmax(q, k, v, lengths, window), None
        if page is not None:
            (k, v), table = in_pages((k, v), page, np.asarray(lengths).max(axis=1))
        run = jax.jit(decode_attention, static_argnames=("window", "implementation"))
        options = {"window": window, "table": table, "implementation": "mosaic"}
        got = run(q, k, v, lengths, **options)
        assert relative_rms(got, want) < 4e-3
        assert not np.asarray(got, np.float32)[np.asarray(lengths) == 0].any()
        again = run(q, k, v, lengths, **options)
        assert np.array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))

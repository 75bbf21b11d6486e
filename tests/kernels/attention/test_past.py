"""Attention over an int8 past: what is prepared for the kernel, with its contract in its place, and
on a GPU the kernel."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import past
from pallas_kernels.dispatch import Reason
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import cache_of, values_of
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.kernels.attention.test_decode_attention import NEWEST, as_cache


def case(batch, width, capacity, n, n_kv, h, spread=1.0, dtype="bfloat16"):
    """(q, k, v) and 0, 131 or all keys; behind them scales are NaN.  A token's q is zeros."""
    rng = np.random.default_rng(0)
    q = (spread * rng.standard_normal((batch, width, n, h))).astype(jnp.dtype(dtype))
    q[:, 5] = 0
    shape = (batch, capacity, n_kv, h)
    k, v = (cache_of(rng.standard_normal(shape), "int8") for _ in range(2))
    n_keys = np.asarray([0, 131, capacity][:batch], np.int32)
    unused = (np.arange(capacity) >= n_keys[:, None])[:, :, None, None]
    k = k.__class__(k.q, as_jax(np.where(unused, np.float32(np.nan), np.asarray(k.scale))))
    v = np.where(unused, 0, values_of(v)).astype(q.dtype)
    return as_jax(q), k, as_jax(v), as_jax(n_keys)


def oracle(q, k, v, n_keys):
    """(means, logarithms of the sums) in float64; a row without keys sees one of zeros."""
    q, k, v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    seen = (np.arange(k.shape[1]) < np.maximum(n_keys, 1)[:, None])[:, None, None]
    s = np.where(seen, s, -np.inf)
    peak = s.max(-1, keepdims=True)
    w = np.exp(s - peak)
    out = np.einsum("bnts,bsnh->btnh", w / w.sum(-1, keepdims=True), v)
    return out, np.moveaxis(np.log(w.sum(-1)) + peak[..., 0], 1, 2)


def by_contract(q, sq, k, sk, v, n_keys):
    """What ``past_kernel.attend`` says that it computes, in float64; its scores are in log2."""
    assert np.all(np.asarray(sq) > 0)  # it multiplies -inf
    q = np.asarray(q, np.float64) * np.moveaxis(np.asarray(sq, np.float64), 1, 2)[..., None]
    k = np.asarray(k, np.float64) * np.moveaxis(np.asarray(sk, np.float64), 1, 2)[..., None]
    out, log = oracle(q * math.log(2) * q.shape[-1] ** 0.5, k, v, n_keys)
    return as_jax(out, v.dtype), as_jax(np.moveaxis(log, 2, 1), jnp.float32)


def check(q, k, v, n_keys):
    out, log = past.attend(q, k, v, n_keys)
    want, logs = oracle(q, values_of(k), v, n_keys)
    # q rounded to int8: 0.6% of each of its values; the logarithms are of sums of many.
    assert relative_rms(out, want) < 0.015
    np.testing.assert_allclose(np.asarray(log), logs, atol=0.05)


def test_what_the_kernel_is_given(monkeypatch):
    kernel = pytest.importorskip("pallas_kernels.attention.past_kernel")
    monkeypatch.setattr(kernel, "attend", by_contract)
    check(*case(3, 128, 256, 6, 2, 64, spread=2.0))


def test_what_has_a_kernel():
    q, k, *_ = case(1, 128, 256, 4, 1, 64)
    assert not isinstance(past.plan(q, k), Reason)
    wide = jnp.zeros((1, 128, 4, 96), jnp.bfloat16)
    floats = jax.ShapeDtypeStruct(k.shape, jnp.float32)
    for given, text in (
        ((q, floats), "k is float32"),
        ((q, jax.eval_shape(lambda: as_cache(jnp.zeros(k.shape), "int4"))), "k is int4"),
        ((jax.ShapeDtypeStruct(q.shape, jnp.float32), k), "q is float32"),
        ((jax.ShapeDtypeStruct((1, 100, 4, 64), q.dtype), k), "q has 100 tokens"),
        ((wide, k), "heads of 96"),
    ):
        found = past.plan(*given)
        assert isinstance(found, Reason) and text in found.text


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("h", [64, 128])
def test_the_kernel_lowers_for_cuda(h):
    given = case(2, 256, 256, 8, 2, h)
    assert kernels_in(lowered(past.attend, *given)) == ["attend_past_int8"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(8, 2, 128), (6, 3, 64), (4, 1, 128)], ids=str)
def test_the_kernel_is_a_float64_softmax(heads, dtype):
    q, k, v, n_keys = case(3, 256, 640, *heads, spread=2.0, dtype=dtype)
    check(q, k, v, n_keys)
    again = [past.attend(q, k, v, n_keys)[0] for _ in range(2)]
    assert np.array_equal(*(np.asarray(x, np.float32) for x in again))

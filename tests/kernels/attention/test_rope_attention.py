"""rope_and_attend: the two ops it stands for, in float64, on what the cache stores.

Errors are relative RMS: 1e-5 in float32, 4e-3 in 16-bit (a bf16 output alone rounds by 1.7e-3).
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.rope_attention import plan, rope_and_attend
from pallas_kernels.attention.rope_cache import norm_heads, rope_and_write
from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import heads_of, poisoned, softmax, values_of
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated
from tests.kernels.attention.test_decode_attention import (
    NEWEST,
    direct_rows,
    kernels_of,
)

DIRECT = importlib.import_module("pallas_kernels.attention.direct")


def case(capacity, heads, dtype, batch=5, cache=None):
    n, n_kv, h = heads
    rng = np.random.default_rng(3)
    qkv = as_jax(rng.standard_normal((batch, n + 2 * n_kv, h)), dtype)
    angle = as_jax(rng.uniform(0, 6, (batch, h // 2)), jnp.float32)
    slots = [capacity // 2 + 3, capacity, 0, capacity - 1, capacity + 7][:batch]
    slots = as_jax(slots, jnp.int32)
    _, k, v, _ = heads_of(batch, capacity, n, n_kv, h, cache or dtype, dtype)
    # Nothing of the new token's place, nor of what follows it, is ever read.
    k, v = poisoned(k, slots), poisoned(v, slots)
    return qkv, jnp.cos(angle), jnp.sin(angle), k, v, slots


def norm_of(args):
    """Weights of the norm of q and k, and eps."""
    h, dtype = args[0].shape[-1], args[0].dtype
    rng = np.random.default_rng(5)
    return *(as_jax(rng.normal(size=h) + 1, dtype) for _ in "qk"), 1e-6


def check(args, window, bound, implementation, norm=None):
    def step(*args):
        return rope_and_attend(*args, norm=norm, window=window, implementation=implementation)

    if implementation == "emulated":
        implementation = "mosaic"
        out, k, v = step(*args)
    else:
        out, k, v = jax.jit(step)(*args)
    slots, capacity = args[-1], args[3].shape[1]
    if norm is not None:
        qkv, n_kv = args[0].astype(jnp.float32), args[3].shape[2]
        args = norm_heads(qkv, n_kv, norm[:2], norm[2]).astype(args[0].dtype), *args[1:]
    write = jax.jit(rope_and_write, static_argnames="implementation")
    q, want_k, want_v = write(*args, implementation="xla")
    slots = np.asarray(slots)
    want = softmax(q, want_k, want_v, np.where(slots < capacity, slots + 1, 0), window)
    assert relative_rms(out, want) < bound
    assert not np.asarray(out, np.float32)[slots >= capacity].any()
    for got, expected in ((k, want_k), (v, want_v)):
        near = 0.05 if isinstance(got, QTensor) else 2 * bound  # a tie may round either way
        np.testing.assert_allclose(values_of(got), values_of(expected), near, near)


@pytest.mark.core
@pytest.mark.parametrize(
    "window, cache, normed",
    [(None, "float32", True), (11, "int8", True), (11, "float32", False), (None, "int8", False)],
)
def test_the_xla_form_is_the_two_ops(window, cache, normed):
    args = case(40, (6, 2, 64), "float32", cache=cache)
    check(args, window, 1e-5, "xla", norm_of(args) if normed else None)


def test_the_norm_is_of_each_head_of_q_and_k():
    args = case(40, (6, 2, 64), "float32")
    q_weight, k_weight, eps = norm_of(args)
    got = np.asarray(norm_heads(args[0], 2, (q_weight, k_weight), eps), np.float64)
    x = np.asarray(args[0], np.float64)
    want = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    np.testing.assert_allclose(got[:, :6], want[:, :6] * np.asarray(q_weight), rtol=1e-5)
    np.testing.assert_allclose(got[:, 6:8], want[:, 6:8] * np.asarray(k_weight), rtol=1e-5)
    np.testing.assert_array_equal(got[:, 8:], x[:, 8:])
    with pytest.raises(ValueError, match=r"norm of k \(32,\) is not \[64\]"):
        rope_and_attend(*args, norm=(q_weight, k_weight[:32], eps))


EMULATED = [  # capacity, heads, dtype, window, norm of heads
    (300, (8, 2, 128), "bfloat16", None, False),
    (200, (6, 3, 64), "float16", 40, False),
    (150, (8, 4, 256), "bfloat16", None, True),
    (1300, (4, 2, 128), "bfloat16", 700, True),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("given", EMULATED, ids=str)
def test_the_one_kernel_emulated(given, monkeypatch):
    from pallas_kernels.attention import codes, gather, merge, source, tile

    direct_rows(monkeypatch, DIRECT, 5)
    capacity, heads, dtype, window, normed = given
    args = case(capacity, heads, dtype)
    norm = norm_of(args) if normed else None
    with emulated(DIRECT, codes, gather, merge, source, tile):
        check(args, window, 4e-3, "emulated", norm)


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("given", EMULATED[:2], ids=str)
def test_the_portable_kernel_emulated(given, monkeypatch):
    """As before Hopper: a second kernel sums what the blocks of a kv head have."""
    monkeypatch.setenv(TARGET, "sm_80")
    test_the_one_kernel_emulated(given, monkeypatch)


def test_what_the_one_kernel_refuses_is_said():
    def reason(capacity=1152, heads=(8, 2, 128), batch=1, cache=None, dtype="bfloat16"):
        args = case(8, heads, dtype, batch, cache)
        k = args[3]
        if cache is None:
            k = jax.ShapeDtypeStruct((batch, capacity, *k.shape[2:]), k.dtype)
        found = plan(args[0], k)
        return found.text if isinstance(found, Reason) else None

    assert reason() is None and reason(4096) is None and reason(32768, (32, 8, 128)) is None
    assert "rows" in reason(batch=gpu().attention.direct_rows + 1)
    assert "4104 tokens" in reason(4104)
    assert "32776 tokens" in reason(32776, (32, 8, 128))
    assert "16 query heads" in reason(heads=(16, 1, 128))
    assert "int8 codes" in reason(cache="int8")
    assert "float32" in reason(dtype="float32")
    args = case(8, (8, 2, 128), "bfloat16", 1)
    assert "weights float32" in plan(args[0], args[3], [jnp.ones(128)] * 2).text
    with pytest.raises(NotImplementedError, match="int8 codes"):
        rope_and_attend(*case(8, (8, 2, 128), "bfloat16", 1, "int8"), implementation="mosaic")


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("shape", [(1, 1152, 32, 8, 128), (2, 2048, 28, 4, 128)], ids=str)
def test_it_lowers_for_cuda_as_one_kernel(shape):
    batch, capacity, n, n_kv, h = shape
    cache = jax.ShapeDtypeStruct((batch, capacity, n_kv, h), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((batch, n + 2 * n_kv, h), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((batch, h // 2), jnp.float32)
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = functools.partial(rope_and_attend, implementation="mosaic")
    text = lowered(step, qkv, table, table, cache, cache, slots, donate_argnums=(3, 4))
    assert kernels_in(text) == kernels_of(plan(qkv, cache))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 1, 64), (7, 1, 128), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_the_one_kernel(heads, window, normed, monkeypatch):
    direct_rows(monkeypatch, DIRECT, 5)
    for capacity, dtype in ((100, "bfloat16"), (1152, "float16"), (3000, "bfloat16")):
        args = case(capacity, heads, dtype)
        check(args, window, 4e-3, "mosaic", norm_of(args) if normed else None)


@pytest.mark.gpu
def test_the_same_bits_each_time_and_in_place():
    qkv, cos, sin, k, v, slots = case(1152, (32, 8, 128), "bfloat16", 1)
    step = jax.jit(rope_and_attend, donate_argnums=(3, 4), static_argnames="implementation")
    compiled = step.lower(qkv, cos, sin, k, v, slots, implementation="mosaic").compile()
    memory = compiled.memory_analysis()
    size = k.nbytes + v.nbytes
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size // 10
    want, k, v = compiled(qkv, cos, sin, k, v, slots)
    for _ in range(50):
        out, k, v = compiled(qkv, cos, sin, k, v, slots)
        assert np.array_equal(np.asarray(out, np.float32), np.asarray(want, np.float32))

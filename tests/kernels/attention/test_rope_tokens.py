"""rope_and_write_tokens: the XLA form beside single tokens, the kernel beside the XLA form."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import rope_cache_kernel
from pallas_kernels.attention.blockwise import joined
from pallas_kernels.attention.rope_cache import rope_and_write, rope_and_write_tokens
from pallas_kernels.device import gpu
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import cache_of, values_of
from tests.helpers.warp_emulator import emulated
from tests.kernels.attention.test_decode_attention import CACHES, NEWEST


def case(cache, heads=(6, 2, 64), batch=3, width=5, capacity=64, page=None):
    """Ragged: of the first row two tokens do not fit, of the second one is padding."""
    n, n_kv, h = heads
    rng = np.random.default_rng(0)
    dtype = "float16" if cache == "float16" else "bfloat16"
    qkv = as_jax(rng.standard_normal((batch, width, n + 2 * n_kv, h)), dtype)
    angle = as_jax(rng.uniform(0, 6, (batch, width, h // 2)), jnp.float32)
    k, v = (
        cache_of(rng.standard_normal((batch, capacity, n_kv, h)).astype(jnp.dtype(dtype)), cache)
        for _ in range(2)
    )
    slots = np.arange(width) + np.asarray([capacity - width + 2, 4, 0])[:, None]
    slots[1, -1] = capacity
    slots, table = as_jax(slots, jnp.int32), None
    if page is not None:
        k, v = (jax.tree.map(lambda x: x.reshape(-1, page, *x.shape[2:]), kv) for kv in (k, v))
        entries = capacity // page
        table = np.array(rng.permutation(batch * entries).reshape(batch, entries), np.int32)
        table[2, 0] = batch * entries  # no page
        table = as_jax(table)
    return (qkv, jnp.cos(angle), jnp.sin(angle), k, v, slots), table


def near(got, want, bound=1e-6):
    """By the RMS of the difference."""
    got, want = values_of(got), values_of(want)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < bound


def as_xla(got, given, table, bound):
    """q and the caches are the XLA form's, but for words that are rounded the other way at a tie;
    the new k and v are what the caches then hold.  (XLA's own need not be on a GPU, where it may
    leave out the way through narrow floats.)"""
    qkv, *_, slots = given
    want = jax.jit(functools.partial(rope_and_write_tokens, table=table, implementation="xla"))(
        *given
    )
    for i in (0, 3, 4):
        near(got[i], want[i], bound)
    for new, kv in zip(got[1:3], got[3:], strict=True):
        whole = values_of(kv if table is None else joined(kv, table))
        for row in range(qkv.shape[0]):
            held = np.asarray(slots[row]) < whole.shape[1]
            if table is not None:
                page = kv.shape[1]
                held &= (
                    np.asarray(table)[row, np.minimum(slots[row], whole.shape[1] - 1) // page]
                    < kv.shape[0]
                )
            # The sum of int4's product and zero point may be rounded once or twice.
            if held.any():
                words = whole[row, np.asarray(slots[row])[held]]
                near(np.asarray(new)[row][held], words.astype(new.dtype), 3e-3)


@pytest.mark.parametrize(
    ("cache", "page"),
    [
        *((c, None) for c in CACHES),
        pytest.param("int8", 16, marks=pytest.mark.core),
        ("bfloat16", 32),
    ],
)
def test_tokens_at_once_are_tokens_one_by_one(cache, page):
    (qkv, cos, sin, k, v, slots), table = case(cache, page=page)
    run = jax.jit(functools.partial(rope_and_write_tokens, table=table))
    q, new_k, new_v, *after = run(qkv, cos, sin, k, v, slots)
    one = jax.jit(functools.partial(rope_and_write, table=table))
    for t in range(qkv.shape[1]):
        want, k, v = one(qkv[:, t], cos[:, t], sin[:, t], k, v, slots[:, t])
        near(q[:, t], want)
    for got, want in zip(after, (k, v), strict=True):
        near(got, want)
    if page is None:
        row = np.asarray(slots[2])
        for new, kv in zip((new_k, new_v), after, strict=True):
            near(np.asarray(new)[2], values_of(kv)[2, row].astype(qkv.dtype))


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize(
    ("cache", "heads", "page"),
    [
        *((cache, (6, 2, 64), None) for cache in CACHES),
        *((cache, (10, 1, 128), 16) for cache in ("bfloat16", "int8", "float8_e4m3fn")),
        *((cache, (4, 2, 256), 32) for cache in ("float16", "int4")),
    ],
    ids=str,
)
def test_the_kernel_emulated_is_the_xla_form(cache, heads, page):
    given, table = case(cache, heads, page=page)
    with emulated(rope_cache_kernel, *_parts()):
        got = rope_and_write_tokens(*given, table=table, implementation="mosaic")
    as_xla(got, given, table, 0.02)


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize(
    ("cache", "heads", "page"),
    [
        ("float8_e4m3fn", (10, 1, 128), 16),
        ("int4", (6, 2, 64), None),
        ("bfloat16", (4, 2, 256), 32),
    ],
    ids=str,
)
def test_many_rows_emulated_are_the_xla_form(cache, heads, page, monkeypatch):
    limits = gpu().attention._replace(shared_rope_rows=1)
    card = dataclasses.replace(gpu(), attention=limits)
    monkeypatch.setattr(rope_cache_kernel, "gpu", lambda: card)
    (qkv, cos, sin, k, v, slots), table = case(cache, heads, width=1, page=page)
    given = qkv[:, 0], cos[:, 0], sin[:, 0], k, v, slots[:, 0]
    with emulated(rope_cache_kernel, *_parts()):
        got = rope_and_write(*given, table=table, implementation="mosaic")
    want = jax.jit(functools.partial(rope_and_write, table=table, implementation="xla"))(*given)
    for ours, theirs in zip(got, want, strict=True):
        near(ours, theirs, 0.02)


def _parts():
    from pallas_kernels.attention import codes, pages

    return codes, pages


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("cache", CACHES)
def test_the_kernel_lowers_for_cuda(cache):
    page = 32 if cache in ("int8", "float16") else None
    given, table = case(cache, (32, 8, 128), page=page)
    run = functools.partial(rope_and_write_tokens, table=table, implementation="mosaic")
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_what_does_not_fit_together_is_said():
    (qkv, cos, sin, k, v, slots), _ = case("int8")
    with pytest.raises(
        ValueError, match=r"rope_and_write_tokens: qkv .* is not \[B, T, N \+ 2K, H"
    ):
        rope_and_write_tokens(qkv[:, :, :5], cos, sin, k, v, slots)
    with pytest.raises(ValueError, match=r"rope_and_write_tokens: cos .* \[B, T, H / 2\]"):
        rope_and_write_tokens(qkv, cos[..., :8], sin[..., :8], k, v, slots)
    with pytest.raises(NotImplementedError, match="the kernel rotates bfloat16 and float16"):
        rope_and_write_tokens(
            qkv.astype(jnp.float32), cos, sin, k, v, slots, implementation="mosaic"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
def test_the_kernel_is_the_xla_form_and_in_place(cache):
    shapes = (6, 2, 64), (32, 8, 128), (10, 1, 128), (4, 2, 256)
    for heads, page in zip(shapes, (None, 32, None, 32), strict=True):
        given, table = case(cache, heads, width=70, capacity=256, page=page)
        got = jax.jit(
            functools.partial(rope_and_write_tokens, table=table, implementation="mosaic")
        )(*given)
        as_xla(got, given, table, 0.03)
    given, _ = case(cache, (8, 2, 128), capacity=4096)
    step = jax.jit(
        functools.partial(rope_and_write_tokens, implementation="mosaic"), donate_argnums=(3, 4)
    )
    memory = step.lower(*given).compile().memory_analysis()
    size = sum(
        x.size * jnp.iinfo(x.dtype).bits // 8 if x.dtype == jnp.int4 else x.nbytes
        for x in jax.tree.leaves(given[3:5])
    )
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size // 10

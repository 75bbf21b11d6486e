"""Block tables: a cache in pages, of any order, is the cache in rows, to the bit.

What no row owns is NaN where a number can be, and entries past a row's own pages are anything.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import rope_attention, rope_cache
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.op import decode_attention, decode_attention_reference, plan
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import norm_heads, rope_and_write, store
from pallas_kernels.dispatch import Reason
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import heads_of, in_pages, poisoned, same, softmax, values_of
from tests.helpers.cases import each_once, slow
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.kernels.attention.test_decode_attention import (
    CACHES,
    MOSAIC_CACHES,
    NEWEST,
    as_cache,
    emulation,
    form_given,
    kernels_of,
)
from tests.kernels.attention.test_rope_attention import case as step_of_rows
from tests.kernels.attention.test_rope_attention import norm_of


def paged_case(cache, page, batch=7, capacity=192, heads=(4, 2, 64)):
    q, k, v, lengths = heads_of(batch, capacity, *heads, cache)
    k, v = poisoned(k, lengths), poisoned(v, lengths)
    (paged_k, paged_v), table = in_pages((k, v), page, lengths)
    return q, (k, v), (paged_k, paged_v), lengths, table


@pytest.mark.parametrize(
    "cache, page, window",
    [
        ("float32", 4, None),
        ("int8", 64, 40),
        ("int4", 16, None),
        *slow(
            ("bfloat16", 16, 40),
            ("float16", 64, None),
            ("int8", 4, 40),
            ("float8_e4m3fn", 64, 40),
        ),
    ],
)
def test_attention_through_a_table_is_that_of_the_rows(cache, page, window):
    """And both are a float64 softmax: a narrow cache adds no error of the op."""
    q, rows, pages, lengths, table = paged_case(cache, page, heads=(8, 2, 128))
    forms = [functools.partial(decode_attention, implementation="xla")]
    if cache in ("float32", "int4"):
        forms.append(decode_attention_reference)
    for form in forms:
        step = jax.jit(form, static_argnames="window")
        want = step(q, *rows, lengths, window=window)
        same(step(q, *pages, lengths, window=window, table=table), want)
        assert relative_rms(want, softmax(q, *rows, lengths, window)) < 1e-5


@pytest.mark.parametrize(
    "capacity, page, block",
    [
        (1040, 16, 512),
        (192, 64, None),
        (144, 48, 96),
        (144, 48, 40),
        (96, 96, 32),
    ],
)
def test_several_queries_in_blocks_of_whole_pages(capacity, page, block):
    """And the last block overhangs the capacity."""
    rng = np.random.default_rng(0)
    q = as_jax(rng.standard_normal((3, 5, 4, 64)), jnp.float32)
    k, v = (as_jax(rng.standard_normal((3, capacity, 2, 64)), jnp.float32) for _ in range(2))
    first = np.asarray([capacity - 5, 0, capacity // 2])
    positions = first[:, None] + np.arange(5)
    positions[1] = -1  # sees nothing
    positions = as_jax(positions, jnp.int32)
    needed = [capacity, 0, capacity // 2 + 5]
    pages, table = in_pages((k, v), page, needed)
    rounded = None if block is None else -(-block // page) * page
    options = {} if block is None else {"window": 30, "softcap": 20.0}
    attend = jax.jit(blockwise_attention, static_argnames=("block", *options))
    want = attend(q, k, v, positions, block=rounded, **options)
    same(attend(q, *pages, positions, block=block, table=table, **options), want)
    assert not np.asarray(want)[1].any()


@pytest.mark.core
def test_rows_share_the_pages_that_they_read():
    q, (k, v), _, _, _ = paged_case("float32", 16)
    k, v = (np.array(x) for x in (k, v))
    for x in (k, v):
        x[1:, :48] = x[:1, :48]
    lengths = as_jax([192, 48, 100, 49, 64, 1, 0], jnp.int32)
    (k_pages, v_pages), table = in_pages((k, v), 16, lengths)
    shared = np.array(table)
    shared[1:, :3] = shared[:1, :3]
    attend = jax.jit(decode_attention)
    want = attend(q, k, v, lengths)
    same(attend(q, k_pages, v_pages, lengths, table=shared), want)


def rope_case(cache, page, capacity=192):
    """Rows in order, one past the end, one at -1; the last has no page where it would write."""
    rng = np.random.default_rng(1)
    qkv = as_jax(rng.standard_normal((7, 8, 64)), jnp.float32)
    angle = as_jax(rng.uniform(0, 6, (7, 32)), jnp.float32)
    slots = np.asarray([0, capacity - 1, capacity, -1, 70, 3, 64], np.int32)
    _, k, v, _ = heads_of(7, capacity, 4, 2, 64, cache)
    pages, table = in_pages((k, v), page, slots + 1)
    table = without_page(table, 6, 64 // page)
    return (qkv, jnp.cos(angle), jnp.sin(angle)), (k, v), pages, as_jax(slots), table


def without_page(table, row, entry):
    """The table where an entry of a row names a page past the pool's."""
    table = np.array(table)
    table[row, entry] = 2 * table.size
    return as_jax(table)


def written(pages, rows, table, page):
    """``pages`` with a row's token at each (row, slot) of ``rows`` put where the table has it."""
    pages, table = jax.tree.map(np.array, pages), np.asarray(table)
    for (row, slot), new in rows.items():
        for x, y in zip(jax.tree.leaves(pages), jax.tree.leaves(new), strict=True):
            x[table[row, slot // page], slot % page] = y
    return pages


def have_tokens(got, pages, after, table, page, at):
    """``got`` are ``pages`` with the tokens of the rows ``after`` that stand at ``at``."""
    for x, before, want in zip(got, pages, after, strict=True):
        same(x, written(before, {place: token(want, place) for place in at}, table, page))


PAGED = [*zip(["float32", *CACHES], [4, 64] * 3, strict=True)]


@pytest.mark.core
@pytest.mark.parametrize(
    "cache, page",
    [
        x if x[0] in ("float32", "int8", "int4") else pytest.param(*x, marks=pytest.mark.slow)
        for x in PAGED
    ],
)
def test_a_step_writes_where_the_table_says_and_nowhere_else(cache, page):
    new, rows, pages, slots, table = rope_case(cache, page)
    q, *after = jax.jit(rope_and_write)(*new, *rows, slots)
    got_q, *got = jax.jit(rope_and_write)(*new, *pages, slots, table=table)
    same(got_q, q)
    have_tokens(got, pages, after, table, page, [(b, int(slots[b])) for b in (0, 1, 4, 5)])


@pytest.mark.parametrize(
    "cache, window, normed",
    [("int4", 11, True), *slow(("float32", 11, True), ("int4", None, False))],
)
def test_the_whole_step_through_a_table(cache, window, normed):
    new, rows, pages, slots, table = rope_case(cache, 16)
    norm = norm_of(new) if normed else None
    step = jax.jit(functools.partial(rope_and_attend, norm=norm, window=window))
    on_pages = np.array(slots)
    on_pages[6] = -1  # its slot is on no page
    want, *_ = step(*new, *rows, on_pages)
    got, *got_pages = step(*new, *pages, slots, table=table)
    if norm is not None:
        new = norm_heads(new[0], 2, norm[:2], norm[2]), *new[1:]
    same(got, want)
    assert not np.asarray(want)[[2, 3, 6]].any()
    _, *want_pages = jax.jit(rope_and_write)(*new, *pages, slots, table=table)
    if cache == "float32" and normed:  # the CPU's handler adds the norm's squares in its own order
        for got_page, want_page in zip(got_pages, want_pages, strict=True):
            np.testing.assert_allclose(got_page, want_page, rtol=5e-6, atol=5e-7)
    else:
        same(got_pages, want_pages)


@pytest.mark.parametrize("cache", ["float32", "int8", "int4"])
def test_store_takes_many_tokens_of_a_row(cache):
    _, _, pages, _, table = rope_case(cache, 16)
    rng = np.random.default_rng(2)
    new = as_jax(rng.standard_normal((7, 20, 2, 64)), jnp.float32)
    slots = np.full((7, 20), 10**6, np.int32)
    slots[1], slots[4, :9] = np.arange(150, 170), np.arange(62, 71)
    slots[5] = -1 - np.arange(20)
    got = jax.jit(store)(pages[0], new, as_jax(slots), table)
    words = as_cache(new, cache)
    where = {
        (b, int(slots[b, t])): token(words, (b, t))
        for b, count in ((1, 20), (4, 9))
        for t in range(count)
    }
    same(got, written(pages[0], where, table, 16))


def test_gradients_are_those_of_the_rows():
    q, rows, pages, lengths, table = paged_case("float32", 16, batch=3)

    def loss(q, k, v, table=None):
        return jnp.sum(decode_attention(q, k, v, lengths, window=40, table=table) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    want = [np.asarray(x) for x in gradient(q, *(np.nan_to_num(x) for x in rows))]
    got = [np.asarray(x) for x in gradient(q, *pages, table)]
    np.testing.assert_allclose(got[0], want[0], 1e-5, 1e-6)
    for x, y in zip(got[1:], want[1:], strict=True):
        for row, length in enumerate(np.asarray(lengths)):
            owned = x[np.asarray(table)[row, : -(-length // 16)]].reshape(-1, 2, 64)
            np.testing.assert_allclose(owned[:length], y[row, :length], 1e-5, 1e-6)
        assert np.isclose(x.sum(), y.sum(), atol=1e-4)  # and no other page has one


def token(kv, at):
    """The numbers of a cache's token at (row, slot)."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[at], kv)


def test_a_bad_table_is_named():
    q, _, (k, v), lengths, table = paged_case("float32", 16, batch=2)
    new, _, pages, slots, rope_table = rope_case("float32", 16)
    for match, bad in (
        (r"table is float32, not int32", lambda t: t.astype(jnp.float32)),
        (r"table \(1, 12\) is not \[B, M\]: B is", lambda t: t[:1]),
        (r"table \(12,\) is not \[B, M\]", lambda t: t[0]),
        (r"table \(\d, 0\) is not \[B, M\]: M is 0", lambda t: t[:, :0]),
        ("table is a list, not an array", lambda t: [1]),
    ):
        with pytest.raises(ValueError, match=f"decode_attention: {match}"):
            decode_attention(q, k, v, lengths, table=bad(table))
        for op in (rope_and_write, rope_and_attend):
            with pytest.raises(ValueError, match=f"{op.__name__}: {match}"):
                op(*new, *pages, slots, table=bad(rope_table))
    with pytest.raises(ValueError, match=r"v \(\d+, 8, 2, 64\) is not \[P, page, K, H\]: page is"):
        decode_attention(q, k, v[:, :8], lengths, table=table)


EMULATED = [  # form, capacity, page, heads, cache, q, window
    ("direct", 320, 32, (8, 2, 64), "bfloat16", "bfloat16", None),
    ("direct", 320, 64, (6, 3, 128), "float16", "float16", 40),
    ("direct", 2112, 64, (4, 1, 64), "int8", "bfloat16", 1000),
    ("direct", 256, 128, (8, 2, 64), "float8_e4m3fn", "float16", 130),
    ("direct", 192, 64, (8, 2, 256), "int4", "float16", None),
    ("clusters", 320, 32, (8, 2, 64), "bfloat16", "bfloat16", 40),
    ("clusters", 320, 64, (6, 3, 128), "float16", "float16", None),
    ("clusters", 384, 96, (16, 1, 128), "int8", "bfloat16", None),
    ("clusters", 256, 128, (8, 2, 64), "float8_e4m3fn", "float16", 130),
    ("blocks", 320, 64, (6, 3, 128), "bfloat16", "bfloat16", 40),
    ("blocks", 192, 32, (8, 2, 256), "float16", "float16", None),
    ("blocks", 2112, 64, (4, 1, 64), "int8", "bfloat16", 1000),
    ("blocks", 256, 128, (8, 2, 64), "float8_e4m3fn", "bfloat16", None),
    ("chunks", 320, 32, (8, 2, 64), "bfloat16", "bfloat16", None),
    ("chunks", 384, 96, (16, 1, 128), "int8", "bfloat16", None),
    ("chunks", 256, 128, (8, 2, 64), "float8_e4m3fn", "float16", 130),
    ("chunks", 320, 64, (8, 8, 128), "int4", "bfloat16", 40),
    ("chunks", 192, 64, (8, 2, 256), "int4", "float16", None),
    ("few chunks", 512, 32, (7, 1, 128), "int4", "bfloat16", 200),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_the_kernel_emulated_reads_through_the_table(case, monkeypatch):
    """Every step is that of the rows, to the bit."""
    form, capacity, page, heads, cache, q_dtype, window = case
    form_given(monkeypatch, form)
    q, k, v, _ = heads_of(4, capacity, *heads, cache, q_dtype)
    lengths = as_jax([capacity, 0, 1, capacity // 2 + 3], jnp.int32)
    k, v = poisoned(k, lengths), poisoned(v, lengths)
    pages, table = in_pages((k, v), page, lengths)
    options = {"window": window, "implementation": "mosaic"}
    with emulation("rope_cache_kernel"):
        got = decode_attention(q, *pages, lengths, table=table, **options)
        want = decode_attention(q, k, v, lengths, **options)
    same(got, want)
    assert relative_rms(got, softmax(q, k, v, lengths, window)) < 4e-3
    assert not np.asarray(got, np.float32)[1].any()


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("cache, page", each_once(CACHES, [16, 96]))
def test_the_write_kernel_emulated_writes_where_the_table_says(cache, page):
    dtype = "float16" if cache == "float16" else "bfloat16"
    (qkv, cos, sin), rows, pages, slots, table = rope_case(cache, page)
    new = qkv.astype(dtype), cos, sin
    with emulation("rope_cache_kernel"):
        q, *after = rope_and_write(*new, *rows, slots, implementation="mosaic")
        got_q, *got = rope_and_write(*new, *pages, slots, table=table, implementation="mosaic")
    same(got_q, q)
    _, *plain = rope_and_write(*new, *rows, slots)
    tokens = [(b, int(slots[b])) for b in (0, 1, 4, 5)]
    have_tokens(got, pages, after, table, page, tokens)
    for want, expected in zip(map(values_of, after), map(values_of, plain), strict=True):
        for at in tokens:  # a tie may round either way
            assert relative_rms(want[at], expected[at]) < 0.02


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize(
    "case",
    [
        (320, 32, (8, 2, 128), "bfloat16", None, False),
        (192, 64, (6, 3, 64), "float16", 40, True),
        (160, 32, (8, 1, 256), "bfloat16", None, False),
        (1344, 64, (4, 2, 128), "bfloat16", 700, True),
        (1344, 96, (4, 2, 128), "bfloat16", None, True),
    ],
    ids=str,
)
def test_the_one_kernel_emulated_through_a_table(case, monkeypatch):
    capacity, page, heads, dtype, window, normed = case
    form_given(monkeypatch, "direct")
    new, rows, slots = step_case(capacity, heads, dtype)
    pages, table = in_pages(rows, page, np.where(slots < capacity, slots + 1, 0))
    table = without_page(table, 5, int(slots[5]) // page)
    norm = norm_of(new) if normed else None
    options = {"window": window, "norm": norm, "implementation": "mosaic"}
    with emulation("rope_cache_kernel"):
        out, *after = rope_and_attend(*new, *rows, slots, **options)
        got, *got_pages = rope_and_attend(*new, *pages, slots, table=table, **options)
    out = np.array(out)
    out[5] = 0
    same(got, out)
    have_tokens(got_pages, pages, after, table, page, [(b, int(slots[b])) for b in (0, 2, 3)])


def step_case(capacity, heads, dtype):
    """As the one kernel's own, and a row whose slot is on no page."""
    qkv, cos, sin, k, v, slots = step_of_rows(capacity, heads, dtype)
    given = (np.asarray(x) for x in (qkv, cos, sin, k, v, slots))
    again = [as_jax(np.concatenate((x, x[:1]))) for x in given]
    return again[:3], tuple(again[3:5]), again[5]


def shapes_of(cache, batch, entries, page, heads):
    n, n_kv, h = heads
    shape = jax.ShapeDtypeStruct
    kv = jax.eval_shape(
        lambda: as_cache(jnp.zeros((batch * entries, page, n_kv, h), jnp.bfloat16), cache)
    )
    qkv = shape((batch, n + 2 * n_kv, h), jnp.bfloat16)
    half = shape((batch, h // 2), jnp.float32)
    slots, table = shape((batch,), jnp.int32), shape((batch, entries), jnp.int32)
    return (qkv, half, half, kv, kv, slots), table


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize(
    "cache, shape",
    each_once(MOSAIC_CACHES, [((64, 128, 64),), ((3, 11, 96),), ((1, 18, 64),)]),
    ids=str,
)
def test_what_was_planned_of_a_table_lowers_for_cuda(cache, shape):
    given, table = shapes_of(cache, *shape, (32, 8, 128))

    def step(qkv, cos, sin, k, v, slots, table):
        options = {"table": table, "implementation": "mosaic"}
        q, k, v = rope_and_write(qkv, cos, sin, k, v, slots, **options)
        return decode_attention(q, k, v, slots, window=77, **options), k, v

    text = lowered(step, *given, table)
    qkv, *_, kv, _, slots = given
    q = jax.ShapeDtypeStruct((*slots.shape, 32, 128), qkv.dtype)
    assert kernels_in(text) == [*kernels_of(plan(q, kv, kv, table)), "rope_and_cache_write"]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
def test_the_step_through_a_table_lowers_as_one_kernel():
    given, table = shapes_of("bfloat16", 1, 18, 64, (32, 8, 128))
    step = lambda *x: rope_and_attend(*x[:-1], table=x[-1], implementation="mosaic")  # noqa: E731
    found = rope_attention.plan(given[0], given[3], table=table)
    assert kernels_in(lowered(step, *given, table)) == kernels_of(found)


def test_what_the_kernels_refuse_of_a_table_is_said():
    q = jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16)
    (qkv, *_, kv, _, _), table = shapes_of("bfloat16", 1, 36, 48, (8, 2, 128))
    for found in (plan(q, kv, kv, table), rope_attention.plan(qkv, kv, table=table)):
        assert isinstance(found, Reason) and "k has pages of 48 tokens" in found.text
    assert not isinstance(rope_cache.plan(qkv, kv), Reason)  # a token lies in one page always
    (qkv, *_, kv, _, _), table = shapes_of("bfloat16", 1, 18, 64, (8, 2, 128))
    rows = jax.ShapeDtypeStruct((1, 18 * 64, 2, 128), jnp.bfloat16)
    assert plan(q, kv, kv, table) == plan(q, rows, rows)
    assert rope_attention.plan(qkv, kv, table=table) == rope_attention.plan(qkv, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, cache, window",
    [
        ((32, 8, 128), "bfloat16", None),
        ((32, 8, 128), "int4", 200),
        ((9, 3, 64), "int8", None),
        ((9, 3, 64), "bfloat16", 200),
        ((16, 1, 128), "int4", None),
        ((16, 1, 128), "int8", 200),
        ((8, 4, 256), "float8_e4m3fn", None),
        ((8, 4, 256), "float8_e4m3fn", 200),
    ],
    ids=str,
)
def test_the_kernel_reads_through_the_table(heads, cache, window, monkeypatch):
    forms = (
        ("blocks", 128, 64),
        ("clusters", 1024, 32),
        ("chunks", 1024, 256),
        ("few chunks", 1536, 96),
        ("direct", 1536, 64),
    )
    for form, capacity, page in forms:
        if form == "direct" and heads[0] // heads[1] > 8:
            continue
        form_given(monkeypatch, form)
        q, k, v, lengths = heads_of(7, capacity, *heads, cache, "bfloat16")
        k, v = poisoned(k, lengths), poisoned(v, lengths)
        pages, table = in_pages((k, v), page, lengths)
        run = jax.jit(functools.partial(decode_attention, window=window, implementation="mosaic"))
        got = run(q, *pages, lengths, table=table)
        assert relative_rms(got, softmax(q, k, v, lengths, window)) < 4e-3
        same(run(q, *pages, lengths, table=table), got)
        same(got, run(q, k, v, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "int4", "float8_e4m3fn"])
def test_the_kernels_write_where_the_table_says(cache):
    (qkv, cos, sin), rows, pages, slots, table = rope_case(cache, 64)
    new = qkv.astype(jnp.bfloat16), cos, sin
    step = jax.jit(functools.partial(rope_and_write, implementation="mosaic"))
    q, *after = step(*new, *rows, slots)
    got_q, *got = step(*new, *pages, slots, table=table)
    same(got_q, q)
    have_tokens(got, pages, after, table, 64, [(b, int(slots[b])) for b in (0, 1, 4, 5)])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
def test_the_one_kernel_through_a_table(window, monkeypatch):
    form_given(monkeypatch, "direct")
    cases = (128, 32, "bfloat16"), (1152, 64, "float16"), (3072, 256, "bfloat16")
    for capacity, page, dtype in cases:
        new, rows, slots = step_case(capacity, (32, 8, 128), dtype)
        pages, table = in_pages(rows, page, np.where(slots < capacity, slots + 1, 0))
        table = without_page(table, 5, int(slots[5]) // page)
        step = jax.jit(functools.partial(rope_and_attend, window=window, implementation="mosaic"))
        out, *after = step(*new, *rows, slots)
        got, *got_pages = step(*new, *pages, slots, table=table)
        same(got, out.at[5].set(0))
        have_tokens(got_pages, pages, after, table, page, [(b, int(slots[b])) for b in (0, 2, 3)])

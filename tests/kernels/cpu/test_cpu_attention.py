"""Attention of a decode step by the CPU's handler, against float64 on what the cache holds."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, explain, rope_and_attend
from pallas_kernels.attention.rope_cache import rope_and_write, rope_and_write_tokens
from pallas_kernels.cpu import attend as cpu
from pallas_kernels.cpu import frame, jit
from pallas_kernels.cpu.attend import attributes
from pallas_kernels.cpu.attention import Attend
from pallas_kernels.cpu.cache import CacheForm
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.cpu.scores import PART
from pallas_kernels.cpu.target import TARGETS, VARIABLE
from pallas_kernels.qtensor import quantize
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import (
    cache_of,
    heads_of,
    in_own_basis,
    in_pages,
    poisoned,
    same,
    softmax,
)
from tests.helpers.cases import each_once, slow
from tests.helpers.cpu_cases import GuardedPages, error, native, same_bits_under_load, stored

CACHES = ["float32", "bfloat16", "float16", "int8", "int4"]
TOLERANCE = 1e-6


HEADS = 6, 2, 64  # of most tests, so that their programs are generated once


def new_token(capacity, heads, dtype="float32", cache=None, batch=5):
    """(qkv, cos, sin, k, v, slots) of the op that writes a new token and attends."""
    n, n_kv, width = heads
    rng = np.random.default_rng(3)
    qkv = as_jax(rng.standard_normal((batch, n + 2 * n_kv, width)), dtype)
    angle = rng.uniform(0, 6, (batch, width // 2))
    slots = as_jax([capacity // 2 + 3, capacity, 0, capacity - 1, capacity + 7], jnp.int32)
    shape = batch, capacity, n_kv, width
    kv = [cache_of(rng.standard_normal(shape), cache or dtype) for _ in range(2)]
    # Nothing of the new token's place, nor of what follows it, is ever read.
    kv = [poisoned(x, slots[:batch]) for x in kv]
    tables = (as_jax(f(angle), jnp.float32) for f in (np.cos, np.sin))
    return qkv, *tables, *kv, slots[:batch]


def by_hand(q, k, v, lengths, table=None, window=None, threads=1, on=None, place=lambda a: a):
    """Without XLA, each array where ``place`` copies it."""
    found = cpu.plan(q, k, table)
    assert isinstance(found, CpuPlan), found
    program = found.program
    arrays = [place(stored(x)) for x in jax.tree.leaves((q, lengths, k, v, table))]
    shapes = cpu.results(found, q.shape, k, table)
    out, parts = (place(np.full(s.shape, np.nan, np.float32)) for s in shapes)
    fixed = {name: np.asarray(x) for name, x in attributes(window, q.shape[-1] ** -0.5).items()}
    address = jit.compiled(program, on or jit.host()).address
    frame.call(address, arrays, [out, parts], fixed, threads=threads)
    return in_own_basis(v, np.array(out))


SHAPES = [(HEADS, None), ((6, 2, 32), 300), ((14, 2, 96), 1), ((8, 1, 128), None)]


@pytest.mark.parametrize(("cache", "heads", "window"), each_once(CACHES, SHAPES, pytest.mark.core))
def test_it_is_a_float64_softmax(cache, heads, window):
    q, k, v, lengths = heads_of(7, 2 * PART + 71, *heads, cache)
    want = softmax(q, k, v, lengths, window)
    k, v = poisoned(k, lengths), poisoned(v, lengths)
    step = jax.jit(functools.partial(decode_attention, window=window, implementation="cpu"))
    got = step(q, k, v, lengths)
    assert error(got, want) < TOLERANCE
    assert not np.asarray(got)[0].any()  # no keys, no output
    pages, table = in_pages((k, v), 11, lengths)
    same(step(q, *pages, lengths, table=table), got)


@pytest.mark.parametrize("size", [1e-3, 60.0])
@pytest.mark.parametrize("cache", ["float32", "int8", "int4"])
def test_flat_and_peaked_scores(cache, size):
    q, k, v, lengths = heads_of(4, 900, *HEADS, cache, size=size)
    assert error(by_hand(q, k, v, lengths), softmax(q, k, v, lengths)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_of_16_bits(dtype):
    q, k, v, lengths = heads_of(3, 90, *HEADS, "int8", dtype)
    got = decode_attention(q, k, v, lengths, implementation="cpu")
    assert got.dtype == q.dtype
    assert error(np.asarray(got), softmax(q, k, v, lengths)) < 4e-3


@pytest.mark.parametrize(
    ("cache", "target"), each_once(CACHES, native()), ids=lambda x: getattr(x, "name", x)
)
def test_every_target_of_this_machine_computes_it(cache, target):
    q, k, v, lengths = heads_of(5, PART + 44, *HEADS, cache)
    assert error(by_hand(q, k, v, lengths, on=target), softmax(q, k, v, lengths)) < TOLERANCE


@pytest.mark.parametrize(
    ("one", "cache"),
    [*((target, "int8") for target in TARGETS), (TARGETS[0], "bfloat16"), (TARGETS[-1], "int4")],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_target_compiles_it(one, cache):
    """NEON's code is read here; ``test_arm_emulated`` runs it."""
    form = CacheForm(cache, 2, 32, {"int8": 1, "int4": 1}.get(cache, 0))
    assembly = jit.build(Attend(form, 2, True), one, assembly=True)
    assert ("fmla" if one.arch == "aarch64" else "vfmadd") in assembly
    dots = {"avx512vnni": "vpdpbusd", "avxvnni": "vpdpbusd", "avx2": "vpmaddubsw", "neon": "sdot"}
    assert (dots[one.name] in assembly) == (cache == "int8")
    assert ("zmm" in assembly) == (one.name == "avx512vnni")


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 30), marks=pytest.mark.slow)])
def test_shapes_of_any_size_on_guarded_pages(seeds):
    """Each operand and result ends where a page begins that nobody may touch; nobody reads what no
    row sees; bits are equal for any number of threads, targets in turn."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        cache = CACHES[seed % 5]
        width = int(rng.choice([32, 64, 96] if cache == "int4" else [16, 32, 48, 64]))
        n_kv, group = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        batch, capacity = int(rng.integers(1, 5)), int(rng.choice([1, 7, 64, 255, 257, 530, 800]))
        q, k, v, _ = heads_of(batch, capacity, n_kv * group, n_kv, width, cache, seed=seed)
        lengths = as_jax(rng.integers(0, capacity + 1, batch), jnp.int32)
        window = int(rng.integers(1, capacity + 1)) if seed % 3 == 0 else None
        want = softmax(q, k, v, lengths, window)
        k, v = poisoned(k, lengths), poisoned(v, lengths)
        table = None
        if seed % 2:
            page = next(p for p in (16, 5, 1) if capacity % p == 0)
            (k, v), table = in_pages((k, v), page, lengths, seed)
        run = functools.partial(by_hand, q, k, v, lengths, table, window)
        alone = run(on=native()[seed % len(native())])
        if lengths.any():
            assert error(alone, want) < TOLERANCE, (cache, width, n_kv, group, capacity)
        assert not alone[np.asarray(lengths) == 0].any()
        for threads in (0, 2, 8):
            place = GuardedPages().place if threads == 2 else lambda a: a
            on = native()[seed % len(native())]
            np.testing.assert_array_equal(run(threads=threads, on=on, place=place), alone)


def test_a_table_that_lies_reads_some_page():
    q, k, v, lengths = heads_of(3, 64, *HEADS, "int8")
    (k, v), table = in_pages((k, v), 16, lengths)
    table = jnp.full_like(table, -(2**31)).at[1].set(2**31 - 1)
    by_hand(q, k, v, lengths, table, place=GuardedPages().place)
    by_hand(q, k, v, as_jax([-5, 2**31 - 1, 9]), table, place=GuardedPages().place)


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    q, k, v, lengths = heads_of(6, 700, *HEADS, "int8")
    whole = by_hand(q, k, v, lengths)
    for row in range(6):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (q, k, v, lengths))
        np.testing.assert_array_equal(by_hand(*one)[0], whole[row])
    strange = by_hand(q.at[2].set(jnp.nan), k, v, lengths)
    assert np.isnan(strange[2]).all()
    np.testing.assert_array_equal(np.delete(strange, 2, 0), np.delete(whole, 2, 0))


@pytest.mark.parametrize(
    ("cache", "paged"),
    [
        ("bfloat16", True),
        ("int8", False),
        *slow(*itertools.product(["float32", "float16"], [True, False])),
        *slow(("bfloat16", False), ("int8", True)),
    ],
)
def test_the_new_token_is_written_and_seen(cache, paged):
    """The bits of the ops that it stands for: RoPE and write, then attention."""
    capacity = PART + 144
    qkv, cos, sin, k, v, slots = new_token(capacity, HEADS, cache=cache)
    table, given = None, (k, v)
    if paged:
        needed = np.where(np.asarray(slots) < capacity, np.asarray(slots) + 1, 0)
        given, table = in_pages((k, v), 16, needed)
    options = {"window": 99, "table": table}
    assert "cpu, attention_cpu" in explain(rope_and_attend, qkv, cos, sin, *given, slots, **options)
    step = jax.jit(functools.partial(rope_and_attend, implementation="cpu", **options))
    out, *after = step(qkv, cos, sin, *given, slots)
    q, *want = jax.jit(functools.partial(rope_and_write, table=table))(qkv, cos, sin, *given, slots)
    same(after, want)
    seen = as_jax(np.where(np.asarray(slots) < capacity, np.asarray(slots) + 1, 0))
    attend = jax.jit(functools.partial(decode_attention, implementation="cpu", **options))
    same(out, attend(q, *want, seen))
    assert not np.asarray(out)[np.asarray(slots) >= capacity].any()


@pytest.mark.parametrize(
    ("cache", "paged"), [("int8", False), *slow(("float32", False), ("bfloat16", True))]
)
def test_each_of_several_tokens_has_its_own_steps_bits(cache, paged):
    """Over the end of a part, at once and one after the other; rows full, empty and of no page."""
    capacity, n_tokens = 2 * PART, 5
    *new, k, v, _ = new_token(capacity, HEADS, cache=cache)
    new = [np.asarray(x) for x in new]
    tokens = [np.stack([np.roll(x, t, axis=-1) for t in range(n_tokens)], axis=1) for x in new]
    qkv, cos, sin = map(jnp.asarray, tokens)
    first = as_jax([PART - 2, capacity - 3, 0, capacity, 77], jnp.int32)
    slots = np.minimum(np.asarray(first)[:, None] + np.arange(n_tokens), capacity)
    slots[-1, 2:] = capacity  # not new
    slots = as_jax(slots, jnp.int32)
    k, v = jax.tree.map(lambda x: as_jax(np.nan_to_num(np.asarray(x))), (k, v))
    table = None
    if paged:
        (k, v), table = in_pages((k, v), 16, jnp.full(k.shape[0], capacity, jnp.int32))
    options = {"window": 99, "table": table, "implementation": "cpu"}
    assert "cpu, attention_cpu" in explain(
        rope_and_attend, qkv, cos, sin, k, v, slots, window=99, table=table
    )
    out, *after = jax.jit(functools.partial(rope_and_attend, **options))(qkv, cos, sin, k, v, slots)
    step, want = jax.jit(functools.partial(rope_and_attend, **options)), (k, v)
    for t in range(n_tokens):
        one, *want = step(qkv[:, t], cos[:, t], sin[:, t], *want, slots[:, t])
        same(out[:, t], one)
    same(after, want)
    seen = as_jax(np.where(np.asarray(slots) < capacity, np.asarray(slots) + 1, 0))
    q, *_ = jax.jit(functools.partial(rope_and_write_tokens, table=table))(
        qkv, cos, sin, k, v, slots
    )
    read = jax.jit(functools.partial(decode_attention, **options))
    again = read(q, *want, seen)
    for t in range(n_tokens):
        same(again[:, t], read(q[:, t], *want, seen[:, t]))


def test_the_write_is_in_place():
    args = new_token(512, HEADS, cache="int8")
    step = jax.jit(rope_and_attend, donate_argnums=(3, 4), static_argnames="implementation")
    memory = step.lower(*args, implementation="cpu").compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(args[3:5]))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4  # the parts' sums


def test_under_scan_vmap_and_grad():
    q, k, v, lengths = heads_of(3, 80, *HEADS)
    plain = decode_attention(q, k, v, lengths, implementation="cpu")
    mapped = jax.vmap(functools.partial(decode_attention, implementation="cpu"))(
        q[:, None], k[:, None], v[:, None], lengths[:, None]
    )
    np.testing.assert_array_equal(mapped[:, 0], plain)

    def layer(state, _):
        out, *state = rope_and_attend(*new, *state, slots, implementation="cpu")
        return tuple(state), out

    *new, k, v, slots = new_token(80, HEADS)
    state, outs = jax.jit(lambda s: jax.lax.scan(layer, s, length=2))((k, v))
    same(outs[0], outs[1])
    loss = lambda q, how: jnp.sum(jnp.sin(decode_attention(q, k, v, slots, implementation=how)))  # noqa: E731
    q = new[0][:, : HEADS[0]]
    k, v = (as_jax(np.nan_to_num(x)) for x in (k, v))
    slopes = (jax.jit(jax.grad(loss), static_argnums=1)(q, how) for how in ("cpu", "xla"))
    np.testing.assert_allclose(*slopes, 1e-5, 1e-6)


def test_what_it_refuses_is_said(monkeypatch):
    def reason(*shape, cache="float32"):
        return cpu.plan(*heads_of(1, 8, *shape, cache)[:2], None).text

    assert "40 features; the handler takes multiples of 16" in reason(4, 2, 40)
    assert "48 features; the handler takes multiples of 32" in reason(4, 2, 48, cache="int4")
    assert "float8_e4m3fn; the handler reads float32" in reason(4, 2, 64, cache="float8_e4m3fn")
    assert "bytes of stack" in reason(256, 2, 128)
    args = new_token(40, HEADS, "bfloat16")
    assert "qkv is bfloat16" in cpu.new_token_plan(args[0], args[3], None).text
    args = new_token(40, HEADS, cache="int4")
    assert "another basis" in cpu.new_token_plan(args[0], args[3], None).text
    with pytest.raises(NotImplementedError, match="no CPU handler for this call: an int4 cache"):
        rope_and_attend(*args, implementation="cpu")
    q, k, v, lengths = heads_of(2, 40, *HEADS)
    assert "cpu, attention_cpu, " + jit.host().name in explain(decode_attention, q, k, v, lengths)
    monkeypatch.setenv(VARIABLE, "off")
    assert f"xla ({VARIABLE}=off)" in explain(decode_attention, q, k, v, lengths)


@pytest.mark.parametrize(
    "options",
    [
        [{"scale_dtype": jnp.bfloat16}] * 2,
        [{}, {"group_size": 16}],
        [{"symmetric": False}] * 2,
    ],
    ids=["scales of 16 bits", "groups of v", "zero points"],
)
def test_caches_of_other_layouts_are_left_to_xla(options):
    q, k, v, lengths = heads_of(2, 40, *HEADS)
    k, v = (quantize(x, "int8", **own) for x, own in zip((k, v), options, strict=True))
    assert "xla" in explain(decode_attention, q, k, v, lengths)
    got, want = (decode_attention(q, k, v, lengths, implementation=i) for i in (None, "xla"))
    np.testing.assert_array_equal(got, want)


def _under_load(calls: int) -> None:
    cases = [heads_of(2, 300 + 150 * i, *HEADS, "int8", seed=i) for i in range(6)]
    step = jax.jit(functools.partial(decode_attention, implementation="cpu"))
    same_bits_under_load(calls, [functools.partial(step, *case) for case in cases])


def test_bits_are_equal_under_load():
    _under_load(40)


@pytest.mark.slow
def test_bits_are_equal_under_long_load():
    _under_load(1500)


def test_a_program_has_a_name_of_its_own():
    form = CacheForm("int8", 2, 64, 1)
    names = {
        Attend(form, 4, False).name,
        Attend(form, 4, True).name,
        Attend(dataclasses.replace(form, heads=4), 4, False).name,
    }
    assert len(names) == 3

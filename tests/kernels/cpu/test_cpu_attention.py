"""Attention of a decode step by the CPU's handler, against float64 on what the cache holds."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, explain, rope_and_attend
from pallas_kernels.attention.rope_cache import from_cache_basis, rope_and_write
from pallas_kernels.attention.rope_tokens import rope_and_write_tokens
from pallas_kernels.cpu import attention, frame, jit
from pallas_kernels.cpu.attention import PART, Attend, CpuPlan
from pallas_kernels.cpu.cache import Form
from pallas_kernels.cpu.target import TARGETS, VARIABLE
from pallas_kernels.qtensor import dequantize
from tests.helpers.cases import each_once
from tests.helpers.cpu_cases import GuardedPages, native, said_with_avx2, same_bits_under_load
from tests.kernels.attention.test_decode_attention import error, make, oracle, poison, rotation
from tests.kernels.attention.test_pages import in_pages, same
from tests.kernels.attention.test_rope_attention import case as new_token

CACHES = ["float32", "bfloat16", "float16", "int8", "int4"]
TOLERANCE = 1e-6


def stored(x) -> np.ndarray:
    """An array as XLA's CPU has it in memory: int4 two to a byte."""
    x = np.asarray(x)
    if x.dtype != jnp.int4:
        return x
    codes = x.astype(np.int8) & 15
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def by_hand(q, k, v, lengths, table=None, window=None, threads=1, on=None, place=lambda a: a):
    """Without XLA, each array where ``place`` copies it."""
    found = attention.plan(q, k, table)
    assert isinstance(found, CpuPlan), found
    program = found.program
    arrays = [place(stored(x)) for x in jax.tree.leaves((q, lengths, k, v, table))]
    shapes = attention._results(program, q.shape[0], k, table)
    out, parts = (place(np.full(s.shape, np.nan, np.float32)) for s in shapes)
    fixed = {
        name: np.asarray(x) for name, x in attention.fixed(window, q.shape[-1] ** -0.5).items()
    }
    address = jit.compiled(program, on or jit.host()).address
    frame.call(address, arrays, [out, parts], fixed, threads=threads)
    return np.asarray(from_cache_basis(v, jnp.asarray(out)))


def softmax(q, k, v, lengths, window=None):
    """The oracle, of int4 heads of any width."""
    if v.dtype != jnp.int4:
        return oracle(q, k, v, lengths, window)
    out = oracle(q, dequantize(k), dequantize(v), lengths, window)
    size = out.shape[-1] & -out.shape[-1]
    return (out.reshape(*out.shape[:2], -1, size) @ rotation(size)).reshape(out.shape)


HEADS = [((4, 4, 64), None), ((6, 2, 32), 300), ((14, 2, 96), 1), ((8, 1, 128), None)]


@pytest.mark.parametrize(("cache", "heads", "window"), each_once(CACHES, HEADS))
def test_it_is_a_float64_softmax(cache, heads, window):
    q, k, v, lengths = make(7, 2 * PART + 77, *heads, cache)
    want = softmax(q, k, v, lengths, window)
    k, v = poison(k, lengths), poison(v, lengths)
    step = jax.jit(functools.partial(decode_attention, window=window, implementation="cpu"))
    got = step(q, k, v, lengths)
    assert error(got, want) < TOLERANCE
    assert not np.asarray(got)[0].any()  # no keys, no output
    rows, lengths = jax.tree.map(lambda x: x[:, : 2 * PART], (k, v)), jnp.minimum(lengths, 2 * PART)
    pages, table = in_pages(rows, 16, lengths)
    same(step(q, *pages, lengths, table=table), step(q, *rows, lengths))


@pytest.mark.parametrize("size", [1e-3, 60.0])
@pytest.mark.parametrize("cache", ["float32", "int8", "int4"])
def test_flat_and_peaked_scores(cache, size):
    q, k, v, lengths = make(4, 900, 8, 2, 64, cache, size=size)
    assert error(by_hand(q, k, v, lengths), oracle(q, k, v, lengths)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_of_16_bits(dtype):
    q, k, v, lengths = make(3, 90, 8, 2, 64, "int8", dtype)
    got = decode_attention(q, k, v, lengths, implementation="cpu")
    assert got.dtype == q.dtype and error(got, oracle(q, k, v, lengths)) < 4e-3


@pytest.mark.parametrize("target", native(), ids=lambda t: t.name)
@pytest.mark.parametrize("cache", CACHES)
def test_every_target_of_this_machine_computes_it(cache, target):
    q, k, v, lengths = make(5, PART + 44, 6, 2, 64, cache)
    assert error(by_hand(q, k, v, lengths, on=target), oracle(q, k, v, lengths)) < TOLERANCE


@pytest.mark.parametrize("one", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "int4"])
def test_every_target_compiles_it(cache, one):
    """NEON's code is read, not run: there is no such machine here."""
    form = Form(cache, 2, 64, {"int8": 1, "int4": 1}.get(cache, 0))
    assembly = jit.build(Attend(form, 4, True), one, assembly=True)
    assert ("fmla" if one.arch == "aarch64" else "vfmadd") in assembly
    dots = {"avx512vnni": "vpdpbusd", "avxvnni": "vpdpbusd", "avx2": "vpmaddubsw", "neon": "sdot"}
    assert (dots[one.name] in assembly) == (cache == "int8")
    assert ("zmm" in assembly) == (one.name == "avx512vnni")


def test_shapes_of_any_size_on_guarded_pages():
    """Each operand and result ends where a page begins that nobody may touch; nobody reads what no
    row sees; bits are equal for any number of threads, targets in turn."""
    rng = np.random.default_rng(3)
    for seed in range(15):
        cache = CACHES[seed % 5]
        width = int(rng.choice([32, 64, 96] if cache == "int4" else [16, 32, 48, 64]))
        n_kv, group = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        batch, capacity = int(rng.integers(1, 5)), int(rng.choice([1, 7, 64, 255, 257, 530, 800]))
        q, k, v, _ = make(batch, capacity, n_kv * group, n_kv, width, cache, seed=seed)
        lengths = jnp.asarray(rng.integers(0, capacity + 1, batch), jnp.int32)
        window = int(rng.integers(1, capacity + 1)) if seed % 3 == 0 else None
        want = softmax(q, k, v, lengths, window)
        k, v = poison(k, lengths), poison(v, lengths)
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
    q, k, v, lengths = make(3, 64, 4, 2, 64, "int8")
    (k, v), table = in_pages((k, v), 16, lengths)
    table = jnp.full_like(table, -(2**31)).at[1].set(2**31 - 1)
    by_hand(q, k, v, lengths, table, place=GuardedPages().place)
    by_hand(q, k, v, jnp.asarray([-5, 2**31 - 1, 9]), table, place=GuardedPages().place)


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    q, k, v, lengths = make(6, 700, 6, 2, 64, "int8")
    whole = by_hand(q, k, v, lengths)
    for row in range(6):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (q, k, v, lengths))
        np.testing.assert_array_equal(by_hand(*one)[0], whole[row])
    strange = by_hand(q.at[2].set(jnp.nan), k, v, lengths)
    assert np.isnan(strange[2]).all()
    np.testing.assert_array_equal(np.delete(strange, 2, 0), np.delete(whole, 2, 0))


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("paged", [False, True])
def test_the_new_token_is_written_and_seen(cache, paged):
    """The bits of the ops that it stands for: RoPE and write, then attention."""
    capacity = PART + 144
    qkv, cos, sin, k, v, slots = new_token(capacity, (6, 2, 64), "float32", cache=cache)
    table, given = None, (k, v)
    if paged:
        needed = jnp.where(slots < capacity, slots + 1, 0)
        given, table = in_pages((k, v), 16, needed)
    options = {"window": 99, "table": table}
    assert "cpu, attention_cpu" in explain(rope_and_attend, qkv, cos, sin, *given, slots, **options)
    step = jax.jit(functools.partial(rope_and_attend, implementation="cpu", **options))
    out, *after = step(qkv, cos, sin, *given, slots)
    q, *want = jax.jit(functools.partial(rope_and_write, table=table))(qkv, cos, sin, *given, slots)
    same(after, want)
    seen = jnp.where(slots < capacity, slots + 1, 0)
    same(out, decode_attention(q, *want, seen, implementation="cpu", **options))
    assert not np.asarray(out)[np.asarray(slots) >= capacity].any()


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("paged", [False, True])
def test_each_of_several_tokens_has_its_own_steps_bits(cache, paged):
    """Over the end of a part, at once and one after the other; rows full, empty and of no page."""
    capacity, n_tokens = 2 * PART, 5
    *new, k, v, _ = new_token(capacity, (6, 2, 64), "float32", cache=cache)
    qkv, cos, sin = (jnp.stack([jnp.roll(x, t, axis=-1) for t in range(5)], axis=1) for x in new)
    first = jnp.asarray([PART - 2, capacity - 3, 0, capacity, 77], jnp.int32)
    slots = jnp.minimum(first[:, None] + jnp.arange(n_tokens, dtype=jnp.int32), capacity)
    slots = slots.at[-1, 2:].set(capacity)  # not new
    k, v = (jax.tree.map(jnp.nan_to_num, x) for x in (k, v))
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
    seen = jnp.where(slots < capacity, slots + 1, 0)
    q, *_ = rope_and_write_tokens(qkv, cos, sin, k, v, slots, table=table)
    again = decode_attention(q, *want, seen, **options)
    for t in range(n_tokens):
        same(again[:, t], decode_attention(q[:, t], *want, seen[:, t], **options))


def test_the_write_is_in_place():
    args = new_token(512, (8, 2, 64), "float32", cache="int8")
    step = jax.jit(rope_and_attend, donate_argnums=(3, 4), static_argnames="implementation")
    memory = step.lower(*args, implementation="cpu").compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(args[3:5]))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4  # the parts' sums


def test_under_scan_vmap_and_grad():
    q, k, v, lengths = make(3, 80, 4, 2, 64)
    plain = decode_attention(q, k, v, lengths, implementation="cpu")
    mapped = jax.vmap(functools.partial(decode_attention, implementation="cpu"))(
        q[:, None], k[:, None], v[:, None], lengths[:, None]
    )
    np.testing.assert_array_equal(mapped[:, 0], plain)

    def layer(state, _):
        out, *state = rope_and_attend(*new, *state, slots, implementation="cpu")
        return tuple(state), out

    *new, k, v, slots = new_token(80, (4, 2, 64), "float32")
    state, outs = jax.jit(lambda s: jax.lax.scan(layer, s, length=2))((k, v))
    same(outs[0], outs[1])
    loss = lambda q, how: jnp.sum(jnp.sin(decode_attention(q, k, v, slots, implementation=how)))  # noqa: E731
    q = new[0][:, :4]
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    np.testing.assert_allclose(*(jax.grad(loss)(q, how) for how in ("cpu", "xla")), 1e-5, 1e-6)


def test_what_it_refuses_is_said(monkeypatch):
    def reason(*shape, cache="float32"):
        return attention.plan(*make(1, 8, *shape, cache)[:2], None).text

    assert "40 features; the handler takes multiples of 16" in reason(4, 2, 40)
    assert "48 features; the handler takes multiples of 32" in reason(4, 2, 48, cache="int4")
    assert "float8_e4m3fn; the handler reads float32" in reason(4, 2, 64, cache="float8_e4m3fn")
    assert "bytes of stack" in reason(256, 2, 128)
    args = new_token(40, (4, 2, 64), "bfloat16")
    assert "qkv is bfloat16" in attention.new_token_plan(args[0], args[3], None).text
    args = new_token(40, (4, 2, 64), "float32", cache="int4")
    assert "another basis" in attention.new_token_plan(args[0], args[3], None).text
    with pytest.raises(NotImplementedError, match="no CPU handler for this call: an int4 cache"):
        rope_and_attend(*args, implementation="cpu")
    q, k, v, lengths = make(2, 40, 4, 2, 64)
    assert "cpu, attention_cpu, " + jit.host().name in explain(decode_attention, q, k, v, lengths)
    monkeypatch.setenv(VARIABLE, "off")
    assert f"xla ({VARIABLE}=off)" in explain(decode_attention, q, k, v, lengths)


def test_xla_runs_avx2_where_it_is_asked_for():
    child = (
        "from pallas_kernels import decode_attention, explain\n"
        "from tests.kernels.attention.test_decode_attention import error, make, oracle\n"
        "case = make(3, 300, 6, 2, 64, 'int8')\n"
        "print(explain(decode_attention, *case), "
        "error(decode_attention(*case), oracle(*case)) < 1e-6)"
    )
    said = said_with_avx2(child)
    assert f"cpu, attention_cpu, {native()[-1].name}" in said
    assert said.strip().endswith("True")


def _under_load(calls: int) -> None:
    cases = [make(2, 300 + 150 * i, 6, 2, 64, "int8", seed=i) for i in range(6)]
    step = jax.jit(functools.partial(decode_attention, implementation="cpu"))
    same_bits_under_load(calls, [functools.partial(step, *case) for case in cases])


def test_bits_are_equal_under_load():
    _under_load(40)


@pytest.mark.slow
def test_bits_are_equal_under_long_load():
    _under_load(1500)


def test_a_program_has_a_name_of_its_own():
    form = Form("int8", 2, 64, 1)
    names = {Attend(form, 4, False).name, Attend(form, 4, True).name,
             Attend(dataclasses.replace(form, heads=4), 4, False).name}  # fmt: skip
    assert len(names) == 3

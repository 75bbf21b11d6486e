"""Attention of several tokens a row by the CPU's handler, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.model.mixers.attention.chunk import attend, attend_cached
from jaxllama.model.mixers.attention.state import KVCache
from pallas_kernels.attention.rope_attention import tokens_have_a_steps_bits
from pallas_kernels.cpu import attend as cpu
from pallas_kernels.cpu import frame, jit
from pallas_kernels.cpu.attend import attributes
from pallas_kernels.cpu.cache import CacheForm
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.cpu.prefill import Prefill
from pallas_kernels.cpu.target import TARGETS, VARIABLE
from pallas_kernels.dispatch import choices
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import attended, heads_of, in_pages, poisoned, same
from tests.helpers.cases import each_once, slow
from tests.helpers.cpu_cases import GuardedPages, error, native, same_bits_under_load, stored
from tests.kernels.cpu.test_cpu_attention import CACHES

TOLERANCE = 1e-6


def case(cache, heads, tokens, capacity, first, seed=0):
    """(q, k, v, positions): rows whose tokens begin at ``first``; NaN past what they see."""
    batch = len(first)
    _, k, v, _ = heads_of(batch, capacity, *heads, cache, seed=seed)
    rng = np.random.default_rng(seed)
    q = as_jax(rng.standard_normal((batch, tokens, heads[0], heads[2])), jnp.float32)
    positions = np.asarray(first)[:, None] + np.arange(tokens)
    k, v = poisoned((k, v), np.asarray(first) + tokens)
    return q, k, v, as_jax(positions, jnp.int32)


def by_hand(q, k, v, positions, table=None, window=None, threads=1, on=None, place=lambda a: a):
    found = cpu.prompt_plan(q, k, table, None)
    assert isinstance(found, CpuPlan), found
    rows = np.asarray(q).reshape(-1, *q.shape[2:]), np.asarray(positions).reshape(-1) + 1
    arrays = [place(stored(x)) for x in jax.tree.leaves((*rows, k, v, table))]
    out = place(np.full(rows[0].shape, np.nan, np.float32))
    fixed = attributes(window, q.shape[-1] ** -0.5)
    address = jit.compiled(found.program, on or jit.host()).address
    fixed = {name: np.asarray(x) for name, x in fixed.items()}
    frame.call(address, arrays, [out], fixed, threads=threads)
    return np.array(out).reshape(q.shape)


HEADS = [((4, 4, 64), None), ((6, 2, 32), 40), ((7, 1, 96), 1), ((8, 2, 128), None)]


FORMS = each_once(CACHES, HEADS)
# 16-bit caches are read as float32 is; their attention of one token is in test_cpu_attention.
QUICK = {"float32": pytest.mark.core, "int8": pytest.mark.core}


@pytest.mark.parametrize(
    ("cache", "heads", "window"),
    [
        pytest.param(*form.values, marks=form.marks or QUICK.get(form.values[0], pytest.mark.slow))
        for form in FORMS
    ],
)
def test_it_is_a_float64_softmax(cache, heads, window):
    q, k, v, positions = case(cache, heads, 70, 224, [0, 130, 99])
    positions = np.array(positions)
    positions[0, :2] = -1  # they see nothing
    want = attended(q, k, v, positions + 1, window)
    got = by_hand(q, k, v, positions, window=window)
    assert error(got, want) < TOLERANCE
    assert not got[0, :2].any()
    pages, table = in_pages((k, v), 16, positions[:, -1] + 1)
    same(by_hand(q, *pages, positions, table, window=window), got)


@pytest.mark.parametrize(
    ("cache", "one"), each_once(["bfloat16", "int8", "int4"], TARGETS), ids=lambda t: str(t)[:12]
)
def test_every_target_compiles_it(cache, one):
    """NEON's code is read here; ``test_arm_emulated`` runs it."""
    form = CacheForm(cache, 2, 32, {"int8": 1, "int4": 1}.get(cache, 0))
    assembly = jit.build(Prefill(form, 2, True), one, assembly=True)
    assert ("fmla" if one.arch == "aarch64" else "vfmadd") in assembly
    assert ("zmm" in assembly) == (one.name == "avx512vnni")


# By default int4, and 16-bit floats in pages.
@pytest.mark.parametrize("seeds", [[4, 1], *slow([0, 2, 3, *range(5, 30)])])
def test_shapes_of_any_size_on_guarded_pages(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        cache = CACHES[seed % 5]
        width = int(rng.choice([32, 64, 96] if cache == "int4" else [16, 32, 48, 64]))
        n_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 17]))
        tokens, capacity = int(rng.integers(1, 80)), int(rng.choice([80, 128, 225]))
        first = rng.integers(0, capacity - tokens + 1, int(rng.integers(1, 4)))
        heads = n_kv * group, n_kv, width
        q, k, v, positions = case(cache, heads, tokens, capacity, first, seed)
        window = int(rng.integers(1, capacity)) if seed % 3 == 0 else None
        want, table = attended(q, k, v, positions + 1, window), None
        if seed % 2:
            page = next(p for p in (16, 5) if capacity % p == 0)
            (k, v), table = in_pages((k, v), page, first + tokens, seed)
        on = native()[seed % len(native())]
        run = functools.partial(by_hand, q, k, v, positions, table, window, on=on)
        alone = run()
        assert error(alone, want) < TOLERANCE, (cache, heads, tokens, capacity, window)
        for threads in (2, 8):
            place = GuardedPages().place if threads == 2 else lambda a: a
            np.testing.assert_array_equal(run(threads=threads, place=place), alone)


def test_a_tokens_bits_do_not_depend_on_its_neighbours():
    q, k, v, positions = case("int8", (6, 2, 64), 100, 300, [0, 170])
    whole = by_hand(q, k, v, positions)
    q, positions = np.asarray(q), np.asarray(positions)
    parts = [by_hand(q[:, i : i + 37], k, v, positions[:, i : i + 37]) for i in (0, 37, 74)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_new_tokens_take_tiles_where_those_fit_on_a_stack():
    """A step's plan decides whether several tokens get a step's bits, whatever the tiles need."""
    for width, tokens, want in ((64, 8, "attention_cpu"), (64, 9, "prefill_cpu"), (256, 9, None)):
        qkv, k = jnp.zeros((1, tokens, 10, width)), jnp.zeros((1, 64, 1, width))
        found = cpu.new_token_plan(qkv, k, None)
        assert (found.kernel if isinstance(found, CpuPlan) else None) == want
        assert tokens_have_a_steps_bits(qkv, k, None)
    assert "bytes of stack" in found.text


def test_the_model_takes_it(monkeypatch):
    """In the forms that prefill has: with a cache, in pages, without any, and its derivative."""
    q, k, v, positions = case("float32", (6, 2, 64), 40, 128, [0, 88])
    lengths = as_jax([40, 33], jnp.int32)
    pages, table = in_pages((k, v), 16, positions[:, -1] + 1)
    new = jax.tree.map(lambda x: x[:, :40], (k, v))
    fresh = as_jax(np.tile(np.arange(40, dtype=np.int32), (2, 1)))

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v, fresh + 5, 30)))

    def forms():
        return jax.jit(
            lambda: (
                attend_cached(q, KVCache(k, v), positions, lengths, 60),
                attend_cached(q, KVCache(*pages), positions, lengths, None, table=table),
                attend(q, *new, fresh + 5, 30),
                *jax.grad(loss, argnums=(0, 1, 2))(q, *new),
            )
        )()

    made = choices(attend, q, *new, fresh, 30)
    assert [choice.kernel for choice in made] == ["prefill_cpu"]
    got = forms()
    monkeypatch.setenv(VARIABLE, "off")
    for one, other in zip(got, forms(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    made = choices(attend, q, *new, fresh, 30, 50.0)
    assert [choice.reason for choice in made] == ["the handler does not cap scores"]


def _under_load(calls: int) -> None:
    cases = [case("int8", (6, 2, 64), 30 + i, 128, [i, 60], i) for i in range(6)]
    runs = [functools.partial(by_hand, *one, threads=2) for one in cases]
    same_bits_under_load(calls, runs)


def test_bits_are_equal_under_load():
    _under_load(10)


@pytest.mark.slow
def test_bits_are_equal_under_long_load():
    _under_load(1500)

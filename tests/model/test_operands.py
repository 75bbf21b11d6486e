"""What prefill, decode_step, verify_step, commit, logits and generate do with impossible operands,
and with calls that are traced."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxllama as jl
from jaxllama import compiler_options
from jaxllama.config import preset_names
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.language_model import LanguageModel
from jaxllama.model.mixers.attention.state import KVCache
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.models import (
    IDENTITIES,
    LLAMA,
    params_of,
    relative_error,
    shrunk,
    tokens_of,
)

CFG = LLAMA.replace(max_position=16, n_layers=1)
B, T = 2, 5
TOKENS = np.asarray(tokens_of(CFG, B, T))
FULL = np.array([T, T - 1], np.int32)


@pytest.fixture(scope="module")
def params():
    return params_of(CFG)


def new_cache(cfg=CFG, batch=B):
    return jl.init_cache(cfg, batch, 8)


# (what is changed, message): of every function that has such an operand
BAD = {
    "tokens in a list": ({"tokens": TOKENS.tolist()}, "tokens: list: expected an array of int"),
    "float tokens": ({"tokens": TOKENS.astype(np.float32)}, "tokens: float32: expected integers"),
    "boolean tokens": ({"tokens": TOKENS > 3}, "tokens: bool: expected integers"),
    "one row, flat": ({"tokens": TOKENS[0]}, r"tokens\[5\]: expected \[B, T\]"),
    "no tokens": ({"tokens": TOKENS[:, :0]}, r"tokens\[2, 0\]: expected \[B, T\], at least one"),
    "past the context": ({"tokens": np.zeros((B, 17), int)}, "has a context of 16"),
    "lengths in a list": ({"lengths": [5, 4]}, "lengths: list: expected an array of integers"),
    "float lengths": ({"lengths": FULL.astype(np.float32)}, "lengths: float32: expected integers"),
    "one length": ({"lengths": FULL[:1]}, r"lengths\[1\]: expected 2, one for each row"),
    "a length for each token": ({"lengths": TOKENS}, r"lengths\[2, 5\]: expected \[B\]"),
    "no cache": ({"cache": None}, r"cache: NoneType: expected a Cache \(init_cache\)"),
    "a cache of other rows": ({"cache": new_cache(batch=3)}, "it has 3 rows, .* tokens of 2"),
    "a cache of another model": (
        {"cache": new_cache(IDENTITIES["gla-variant"])},
        "its layers are not those",
    ),
}
CALLS = {
    "prefill": lambda params, tokens, lengths, cache: jl.prefill(
        CFG, params, tokens, lengths, cache
    ),
    "verify_step": lambda params, tokens, lengths, cache: jl.verify_step(
        CFG, params, tokens, lengths, cache
    ),
    "logits": lambda params, tokens, lengths: jl.logits(CFG, params, tokens, lengths),
    "generate": lambda params, tokens, lengths, cache: jl.generate(
        CFG, params, tokens, lengths, cache, jl.Sampling(), 0, 2
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", CALLS)
def test_operands_of_another_type_or_shape_are_named(params, name, case):
    change, message = BAD[case]
    if name == "logits" and "cache" in change:
        return
    operands = {"tokens": TOKENS, "lengths": FULL, "cache": new_cache(), **change}
    if name == "logits":
        del operands["cache"]
    with pytest.raises(jl.JaxLlamaError, match=message) as caught:
        CALLS[name](params, **operands)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, c: jl.decode_step(CFG, p, [1, 2], c), "tokens: list: expected an array"),
        (lambda p, c: jl.decode_step(CFG, p, TOKENS, c), r"tokens\[2, 5\]: expected \[B\]"),
        (lambda p, c: jl.decode_step(CFG, p, np.ones(2, "f"), c), "tokens: float32: expected int"),
        (lambda p, c: jl.decode_step(CFG, p, TOKENS[:1, 0], c), "it has 2 rows, .* tokens of 1"),
        (lambda p, c: jl.decode_step(CFG, p, TOKENS[:, 0], {}), "cache: dict: expected a Cache"),
        (lambda p, c: jl.prefill(CFG, p, TOKENS, FULL, c, chunk=0), "chunk = 0: must be at least"),
        (
            lambda p, c: jl.commit(jl.verify_step(CFG, p, TOKENS, FULL, c)[1], np.zeros(3, int)),
            r"accepted\[3\]: expected 2, one for each row",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL, c, jl.Sampling(), 0, 0),
            "max_new_tokens = 0: must be at least 1",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL, c, 0.7, 0, 2),
            "sampling = 0.7: expected a Sampling, or one a row",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL, c, [jl.Sampling()], 0, 2),
            "sampling: 1 entries for 2 prompts",
        ),
        (
            lambda p, c: jl.generate(
                CFG, p, TOKENS, FULL, c, SamplingParams.stack([jl.Sampling()], CFG.vocab_size), 0, 2
            ),
            "sampling: 1 entries for 2 prompts",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL, c, jl.Sampling(), 0, 2, chunk=0),
            "chunk = 0: must be at least 1",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL, c, jl.Sampling(), 0, 12),
            "row 0: 5 tokens and 12 new ones exceed the context of tiny, 16",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, FULL + 1, c, jl.Sampling(), 0, 1),
            r"lengths\[0\] = 6: must be from 0 to 5",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS, -FULL, c, jl.Sampling(), 0, 1),
            r"lengths\[0\] = -5: must be from 0 to 5",
        ),
        (
            lambda p, c: jl.generate(CFG, p, TOKENS + 97, FULL, c, jl.Sampling(), 0, 1),
            r"tokens\[0\]: id \d+ is outside of the vocabulary of 97",
        ),
    ],
)
def test_other_operands_are_named(params, call, message):
    with pytest.raises(jl.JaxLlamaError, match=message):
        call(params, new_cache())


@pytest.mark.parametrize(
    ("key", "dtype", "message"),
    [
        (0, jnp.float32, "key: int: expected a PRNG key"),
        (np.zeros(2, np.float32), jnp.float32, r"key: float32\[2\]: expected a PRNG key"),
        (jax.ShapeDtypeStruct((2, 2), jnp.uint32), jnp.float32, r"key: uint32\[2, 2\]: expected"),
        (np.zeros(2, np.uint32), jnp.int8, "dtype 'int8' is not float32, bfloat16 or float16"),
    ],
)
def test_init_params_names_a_key_or_dtype_that_is_none(key, dtype, message):
    with pytest.raises(jl.JaxLlamaError, match=message):
        jl.init_params(CFG, key, dtype)


def _changed(row: int, place: int, token: int) -> np.ndarray:
    tokens = TOKENS.copy()
    tokens[row, place] = token
    return tokens


# (tokens, lengths, rows that are impossible)
IMPOSSIBLE = [
    (TOKENS, [99, 4], [True, False]),
    (TOKENS, [6, 4], [True, False]),
    (TOKENS, [0, 4], [True, False]),
    (TOKENS, [-3, 4], [True, False]),
    (TOKENS, [-(2**31), 2**31 - 1], [True, True]),
    (_changed(0, 2, 97), [5, 4], [True, False]),
    (_changed(0, 2, -1), [5, 4], [True, False]),
    (_changed(1, 4, -1), [5, 4], [False, False]),  # padding may be anything
]


@pytest.mark.core
@pytest.mark.parametrize("family", ["gla-conv-groups", *slow("gqa")])
def test_a_row_of_impossible_values_stays_as_it_is_and_gets_nan(family):
    """Its neighbour does not notice, and what comes next is of the row as it was."""
    cfg = IDENTITIES[family].first_layers(1)
    params = params_of(cfg)
    good, want = jl.prefill(cfg, params, TOKENS, FULL, new_cache(cfg))
    empty = jl.decode_step(cfg, params, TOKENS[:, 0], new_cache(cfg))[0]
    every = jl.logits(cfg, params, TOKENS, FULL)
    wanted, _ = jl.decode_step(cfg, params, TOKENS[:, 0], want)
    for tokens, lengths, bad in IMPOSSIBLE:
        lengths, bad = np.array(lengths, np.int32), np.array(bad)
        count = np.where(bad, 0, FULL)
        got, cache = jl.prefill(cfg, params, tokens, lengths, new_cache(cfg))
        np.testing.assert_array_equal(got, np.where(bad[:, None], np.nan, good))
        assert cache.lengths.tolist() == count.tolist()
        scores = jl.logits(cfg, params, tokens, lengths)
        for row in range(B):
            valid = slice(0, T if bad[row] else lengths[row])
            expected = np.nan if bad[row] else every[row, valid]
            np.testing.assert_array_equal(scores[row, valid], expected)
        drafted, proposal = jl.verify_step(cfg, params, tokens, lengths, new_cache(cfg))
        assert np.isnan(drafted).all(axis=(1, 2)).tolist() == bad.tolist()
        assert jl.commit(proposal, FULL - 1).lengths.tolist() == count.tolist()
        following, cache = jl.decode_step(cfg, params, TOKENS[:, 0], cache)
        expected = np.where(bad[:, None], empty, wanted)
        assert relative_error(following, expected) < 1e-6
    # A token of a step, in a cache that has been read above.
    before = np.asarray(cache.lengths)
    got, cache = jl.decode_step(cfg, params, np.array([97, 3]), cache)
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()
    np.testing.assert_array_equal(cache.lengths, before + [int(cache.capacity is None), 1])


# Calls that are traced: derivatives, vmap


def test_gradients_flow_through_prefill_and_decode_steps_outside_of_a_jit(params):
    """The derivative reads the cache that a call was given, so it is not donated; it is
    ``jl.logits``' derivative."""
    weight = np.random.default_rng(1).standard_normal((B, CFG.vocab_size)).astype(np.float32)

    def stepwise(params):
        scores, cache = jl.prefill(CFG, params, TOKENS[:, :3], np.array([3, 3]), new_cache())
        scores, cache = jl.decode_step(CFG, params, TOKENS[:, 3], cache)
        return jnp.sum(scores * weight)

    def whole(params):
        return jnp.sum(jl.logits(CFG, params, TOKENS[:, :4], np.array([4, 4]))[:, 3] * weight)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, got = jax.value_and_grad(stepwise)(params)
        want_value, want = jax.jit(jax.value_and_grad(whole))(params)
    assert relative_error(value, want_value) < 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < 1e-4


def test_vmap_over_rows_warns_of_nothing(params):
    def one(tokens, cache):
        lengths = jnp.full((1,), T, jnp.int32)
        scores, cache = jl.prefill(CFG, params, tokens[None], lengths, cache)
        return jl.decode_step(CFG, params, jnp.argmax(scores, -1).astype(jnp.int32), cache)[0][0]

    caches = jax.tree.map(lambda leaf: jnp.stack([leaf] * B), new_cache(batch=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = jax.vmap(one)(as_jax(TOKENS), caches)
    want = [one(as_jax(TOKENS[row]), new_cache(batch=1)) for row in range(B)]
    assert relative_error(got, jnp.stack(want)) < 1e-5


def _over_a_mesh(function):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


COMPOSED = {
    "vmap": jax.vmap,
    "scan": lambda one: jax.jit(lambda keys: lax.scan(lambda n, key: (n, one(key)), 0, keys)[1]),
    "shard_map": lambda one: jax.jit(_over_a_mesh(jax.vmap(one))),
    "jit": lambda one: lambda keys: jnp.stack([jax.jit(one)(key) for key in keys]),
    "eager shard_map": lambda one: _over_a_mesh(jax.vmap(one)),
}
KEYS = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
FULL_SAMPLING = jl.Sampling(temperature=1.0, top_k=30, top_p=0.95, presence_penalty=0.5)


@functools.cache
def generating(family, sampling):
    """Return a function of a key, and its tokens for KEYS in plain calls."""
    cfg = IDENTITIES[family].replace(max_position=16)
    params, own = params_of(cfg), jl.Sampling(temperature=1.0, seed=4)

    def one(key):
        cache = jl.init_cache(cfg, B, 8)
        rows = jl.generate(
            cfg, params, TOKENS, FULL, cache, [sampling, own], key, 3, chunk=3, stop_tokens=()
        )
        return rows.tokens

    return one, np.stack([one(key) for key in KEYS])


@pytest.mark.parametrize("form", [*list(COMPOSED)[:3], *slow(*list(COMPOSED)[3:])])
@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("hybrid", jl.Sampling(temperature=1.0)),
        *(pytest.param(f, FULL_SAMPLING, marks=pytest.mark.slow) for f in ("gqa", "delta")),
    ],
)
def test_generate_composes(family, sampling, form):
    """With the key as an argument, each transformation gives the tokens of the plain call."""
    one, want = generating(family, sampling)
    assert (want[0, 0] != want[1, 0]).any() and (want[0, 1] == want[1, 1]).all()
    np.testing.assert_array_equal(COMPOSED[form](one)(KEYS), want)


@pytest.mark.parametrize("seed", [7, -1, -(2**31)])
def test_a_traced_seed_is_the_number(seed):
    def key(seed):
        return SamplingParams.stack([jl.Sampling(), jl.Sampling(seed=5)], 9, seed).key

    np.testing.assert_array_equal(jax.jit(key)(jnp.int32(seed)), key(seed))
    raw = jax.random.key_data(jax.random.key(seed))
    np.testing.assert_array_equal(jax.jit(key)(raw), key(raw))


def test_a_traced_seed_is_whole():
    with pytest.raises(jl.JaxLlamaError, match="seed: float32: must be a whole number or a PRNG"):
        jax.jit(lambda seed: SamplingParams.stack([jl.Sampling()], 9, seed).key)(1.5)


def test_a_traced_loop_takes_no_options_of_a_device(monkeypatch):
    """jax refuses a compiler's options inside of a trace; a trial program cannot run there."""
    asked = []
    monkeypatch.setattr(compiler_options, "for_device", lambda: asked.append(1))
    program = jax.jit(lambda x: compiler_options.compiled_for(jax.jit(jnp.negative), None)(x))
    assert program(1) == -1 and not asked
    compiler_options.compiled_for(program, None)
    assert asked == [1]


def test_a_call_that_is_not_traced_donates(params):
    cache = new_cache()
    _, after = jl.prefill(CFG, params, TOKENS, FULL, cache)
    jl.decode_step(CFG, params, TOKENS[:, 0], after)
    assert cache.layers[0].k.is_deleted() and after.layers[0].k.is_deleted()


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_a_cache_has_the_backend_s_activations_by_default(backend, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    cache = jax.eval_shape(lambda: jl.init_cache(CFG, 1, 8))
    assert cache.layers[0].k.dtype == dtype


# Rows for the next prompts


@pytest.mark.parametrize("family", ["hybrid", *slow("gqa", "gla-conv-groups", "delta", "kda")])
def test_a_row_that_is_reset_has_nothing_of_its_last_prompt(family):
    """The next prompt gets the logits of an empty cache, and the neighbour goes on."""
    cfg = IDENTITIES[family]
    params = params_of(cfg)
    first = np.array([0, T], np.int32)  # the neighbour rests
    want, fresh = jl.prefill(cfg, params, TOKENS, np.array([3, T]), new_cache(cfg))
    want_next, _ = jl.decode_step(cfg, params, TOKENS[:, 0], fresh)
    _, used = jl.prefill(cfg, params, TOKENS[::-1], first[::-1], new_cache(cfg))
    _, used = jl.prefill(cfg, params, TOKENS, first, used)
    assert used.lengths.tolist() == [T, T]
    for rows in (np.array([True, False]), np.array([0, 7, -1])):
        cache = jl.reset_rows(jax.tree.map(jnp.copy, used), rows)
        assert cache.lengths.tolist() == [0, T]
        got, cache = jl.prefill(cfg, params, TOKENS, np.array([3, 0]), cache)
        following, _ = jl.decode_step(cfg, params, TOKENS[:, 0], cache)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(following, want_next)
    if any(kind != "attention" for kind in cfg.layer_types):  # what a length of 0 leaves behind
        stale = dataclasses.replace(used, lengths=jnp.array([0, T], jnp.int32))
        got, _ = jl.prefill(cfg, params, TOKENS, np.array([3, 0]), stale)
        assert relative_error(got[0], want[0]) > 0.05


@pytest.mark.parametrize("name", preset_names())
def test_every_kind_of_state_is_reset(name):
    """All rows after tokens of NaN are the rows of a new cache."""
    empty = jl.init_cache(shrunk(jl.load_config(name)), 2, 4)
    marked = jax.tree.map(lambda leaf: jnp.full_like(leaf, 3), empty)
    cache = jl.reset_rows(marked, jnp.ones(2, bool))
    assert cache.lengths.tolist() == [0, 0]
    for got, want in zip(cache.layers, empty.layers, strict=True):
        if not isinstance(want, KVCache):
            jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones(3, bool), r"rows\[3\]: expected bool \[2\]"),
        ([0], "rows: list: expected an array of integers"),
        (np.ones(2, np.float32), "rows: float32: expected integers"),
    ],
)
def test_rows_that_cannot_be_reset_are_named(rows, message):
    with pytest.raises(jl.JaxLlamaError, match=message):
        jl.reset_rows(new_cache(), rows)


@pytest.mark.parametrize("deterministic", [True, False])
def test_prompts_are_compiled_as_in_an_engine(deterministic, monkeypatch):
    """With the options under which XLA chooses no other exponential for them."""
    cfg = LLAMA.first_layers(1)
    lm, asked = LanguageModel(cfg, params_of(cfg), None, deterministic=deterministic), []
    want = lm.generate([[5, 6, 7]], 3)
    monkeypatch.setattr(compiler_options, "of_fusions", lambda fixed: asked.append(fixed) or {})
    [got] = lm.generate([[5, 6, 7]], 3)
    assert asked == [deterministic]
    assert (got.tokens, got.logprobs) == (want[0].tokens, want[0].logprobs)

"""Identities of the model, its cache and its loop: every way to the same logits gives them.

Bound: 2e-5 of the largest logit in float32, a few hundred roundings of 6e-8.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError
from jaxllama.generation import decode_step, generate, logits, prefill
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.mixers.attention.chunk import attend, attend_cached
from jaxllama.model.mixers.attention.sparse import sparse_decode
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.recurrent import RecurrentState
from pallas_kernels.attention.rope_cache import to_cache_basis
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.cases import slow
from tests.helpers.models import (
    FAMILIES,
    IDENTITIES,
    LLAMA,
    params_of,
    relative_error,
    tokens_of,
)

BOUND = 2e-5
ONE_LAYER = LLAMA.first_layers(1)
CORE = ("gqa", "mqa-window", "gla-conv-groups", "delta")


def families(*quick: str):
    """Run a test over all families, by default over CORE and the quick ones: each mixer with all
    that it carries from token to token. The four of CORE are in the core lane."""
    marks = {
        name: pytest.mark.core if name in CORE else () if name in quick else pytest.mark.slow
        for name in IDENTITIES
    }
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=mark) for name, mark in marks.items()]
    )


# The identities share these shapes, so that each family compiles one program a function.
ROWS, WIDTH, ROOM = 3, 12, 16


@functools.cache
def model(family: str):
    """Return a family's config, parameters and prompts."""
    cfg = IDENTITIES[family]
    return cfg, params_of(cfg), np.asarray(tokens_of(cfg, ROWS, WIDTH))


def alone(family: str, row: int, length: int):
    """Return the logits of a prompt by itself, and of the step behind it.

    Behind the row's own tokens stands other padding than in the batch. By default one family is
    alone in a batch of one row, with less room; the others are beside rows of no tokens, and so
    take the programs of the other identities.
    """
    cfg, params, tokens = model(family)
    own = np.where(np.arange(WIDTH) < length, tokens[row], 5)[None]
    batch, room = (1, WIDTH) if family == "gqa" else (ROWS, ROOM)
    own, lengths = np.repeat(own, batch, axis=0), np.zeros(batch, np.int32)
    lengths[-1] = length
    found, cache = prefill(cfg, params, own, lengths, init_cache(cfg, batch, room))
    following, _ = decode_step(cfg, params, np.repeat(tokens[row, :1], batch), cache)
    return np.asarray(found)[-1:], np.asarray(following)[-1:]


def full_logits(cfg, params, tokens):
    lengths = np.full((tokens.shape[0],), tokens.shape[1], np.int32)
    return np.asarray(logits(cfg, params, tokens, lengths))


def poison(cache: Cache) -> Cache:
    """NaN wherever no row owns the position (attention), and in whole rows of length 0 (GLA)."""
    lengths = np.asarray(cache.lengths)

    def spoiled(unused: np.ndarray):
        return lambda leaf: np.where(
            unused.reshape(*unused.shape, *(1,) * (leaf.ndim - unused.ndim)), np.nan, leaf
        ).astype(leaf.dtype)

    def layer_of(layer):
        if isinstance(layer, RecurrentState):
            return jax.tree.map(spoiled(lengths == 0), layer)
        return jax.tree.map(spoiled(np.arange(layer.k.shape[1]) >= lengths[:, None]), layer)

    return jax.device_put(Cache(tuple(map(layer_of, cache.layers)), lengths))


@families()
def test_prefill_then_decode_is_the_full_forward_at_every_split(family):
    cfg, params, tokens = model(family)
    want = full_logits(cfg, params, tokens)
    for split in range(1, WIDTH):
        padded = np.pad(tokens[:, :split], ((0, 0), (0, WIDTH - split)), constant_values=5)
        lengths = np.full((ROWS,), split, np.int32)
        got, cache = prefill(cfg, params, padded, lengths, init_cache(cfg, ROWS, ROOM))
        assert relative_error(got, want[:, split - 1]) < BOUND
        for t in range(split, WIDTH):
            got, cache = decode_step(cfg, params, tokens[:, t], cache)
            assert relative_error(got, want[:, t]) < BOUND
        assert cache.lengths.tolist() == [WIDTH] * ROWS


@families()
def test_chunked_prefill_is_whole_prefill(family):
    """Three pieces of 5 overhang the prompt's 12, and the cache they leave is the same. Neither way
    writes the keys of padding."""
    cfg, params, tokens = model(family)
    lengths = np.asarray([9, 1, 4], np.int32)
    want, whole = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM))
    got, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM), chunk=5)
    assert relative_error(got, want) < BOUND
    assert cache.lengths.tolist() == [9, 1, 4]
    for layer in (*whole.layers, *cache.layers):
        if isinstance(layer, KVCache):
            behind = np.arange(ROOM) >= lengths[:, None]
            assert not np.any(np.asarray(layer.k)[behind]), "padding was written"
            assert np.asarray(layer.k)[~behind].any(axis=(1, 2)).all()
    following, _ = decode_step(cfg, params, tokens[:, 0], cache)
    wanted, _ = decode_step(cfg, params, tokens[:, 0], whole)
    assert relative_error(following, wanted) < BOUND


@families()
def test_ragged_batch_equals_each_row_alone(family):
    cfg, params, tokens = model(family)
    lengths = np.asarray([WIDTH - 1, 3, 7], np.int32)
    batched, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM))
    following, _ = decode_step(cfg, params, tokens[:, 0], cache)
    batched, following = np.asarray(batched), np.asarray(following)
    for row, length in enumerate(lengths):
        first, second = alone(family, row, int(length))
        assert relative_error(batched[row : row + 1], first) < BOUND
        assert relative_error(following[row : row + 1], second) < BOUND


@families()
def test_nan_beyond_every_length_changes_nothing(family):
    cfg, params, tokens = model(family)
    lengths = np.asarray([6, 0, 4], np.int32)
    used = np.asarray([0, 2])

    def fresh(layer):
        """Return the layer with zeros in the states of the rows that are used."""
        if not isinstance(layer, RecurrentState):
            return layer
        empty = np.isin(np.arange(ROWS), used)
        return jax.tree.map(
            lambda leaf: np.where(empty.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf), layer
        )

    def run(spoil):
        cache = spoil(init_cache(cfg, ROWS, ROOM))
        cache = jax.device_put(Cache(tuple(map(fresh, cache.layers)), cache.lengths))
        first, cache = prefill(cfg, params, tokens, lengths, cache)
        second, cache = decode_step(cfg, params, tokens[:, 0], spoil(cache))
        return np.asarray(first)[used], np.asarray(second)[used]

    for got, want in zip(run(poison), run(lambda cache: cache), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.core
@pytest.mark.parametrize("window", [600, *slow(None)])
def test_long_prompts_cross_query_and_key_blocks(window):
    cfg = ONE_LAYER.replace(sliding_window=window)
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 2, 1300))
    want = full_logits(cfg, params, tokens)
    lengths = np.asarray([1299, 700], np.int32)
    # A capacity that is not a multiple of the key block: the last block overhangs.
    got, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, 2, 1400), chunk=512)
    assert relative_error(got, np.stack([want[0, 1298], want[1, 699]])) < BOUND
    following = np.stack([tokens[0, 1299], tokens[1, 700]])
    got, _ = decode_step(cfg, params, following, cache)
    assert relative_error(got, np.stack([want[0, 1299], want[1, 700]])) < BOUND


@pytest.mark.core
def test_attention_equals_a_float64_softmax():
    """Against numpy, sharing no code: grouped heads, causal, window."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, heads, 8)) for heads in (6, 2, 2))
    positions = np.broadcast_to(np.arange(20), (2, 20))
    operands = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    got = jax.jit(attend, static_argnums=4)(*operands, jnp.asarray(positions), 5)
    want = np.zeros_like(q)
    for b in range(2):
        for n in range(6):
            for t in range(20):
                keys = slice(max(0, t - 4), t + 1)
                scores = k[b, keys, n // 3] @ q[b, t, n] / np.sqrt(8)
                weights = np.exp(scores - scores.max())
                want[b, t, n] = (weights / weights.sum()) @ v[b, keys, n // 3]
    assert relative_error(got, want) < 1e-6


@pytest.mark.core
@pytest.mark.parametrize("sparsity", [0.25, 0.999])
def test_sparse_decode_keeps_the_heaviest_and_the_newest(sparsity):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 1, 4, 8)) * 3
    k, v = rng.standard_normal((2, 2, 24, 2, 8))
    lengths = np.asarray([24, 9])
    k[1, 9:], v[1, 9:] = np.nan, np.nan
    f32 = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    positions = jnp.asarray(lengths[:, None] - 1, jnp.int32)
    run = jax.jit(sparse_decode, static_argnums=(3, 4))
    got = run(f32[0], KVCache(f32[1], f32[2]), positions, sparsity, None)
    for b, length in enumerate(lengths):
        for n in range(4):
            scores = k[b, :length, n // 2] @ q[b, 0, n] / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            older = np.argsort(-weights[:-1])[: int(sparsity * (length - 1))]
            kept = [*older, length - 1]
            want = weights[kept] @ v[b, kept, n // 2]
            assert relative_error(got[b, 0, n], want) < 1e-5


def test_full_sparsity_is_dense_and_less_is_not():
    cfg, params, tokens = ONE_LAYER, params_of(ONE_LAYER), np.asarray(tokens_of(ONE_LAYER, 1, 30))
    lengths = np.asarray([30], np.int32)
    _, filled = prefill(cfg, params, tokens, lengths, init_cache(cfg, 1, 32, "int4"))
    filled = jax.tree.map(np.array, filled)

    def step(sparsity: float):
        sparse = cfg.replace(attn_sparsity=sparsity)
        return np.asarray(decode_step(sparse, params, tokens[:, 0], jax.device_put(filled))[0])

    dense = np.asarray(decode_step(cfg, params, tokens[:, 0], jax.device_put(filled))[0])
    np.testing.assert_array_equal(step(1.0), dense)
    assert relative_error(step(0.1), dense) > 1e-3


WIDE = ONE_LAYER.replace(head_dim=64)


@jax.jit
def widened(layer: KVCache) -> KVCache:
    """The float32 values that a narrow cache stands for."""
    is_qtensor = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731
    return jax.tree.map(
        lambda leaf: (dequantize(leaf) if is_qtensor(leaf) else leaf).astype(jnp.float32),
        layer,
        is_leaf=is_qtensor,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        *slow("bfloat16", "float8_e4m3fn", "int8"),
        pytest.param("int4", marks=pytest.mark.core),
    ],
)
def test_a_narrow_cache_costs_its_rounding_and_nothing_else(dtype):
    """Decoding over a narrow cache is decoding over the floats it stands for (1e-5, float32
    roundings), and those are within half a step of what was written: 2^-9 relative for bfloat16,
    2^-4 for fp8, scale / 2 for integers (int4: of 15 steps from the smallest to the
    largest, in the cache's basis, and 2^-10 for what is kept in float16)."""
    params, tokens = params_of(WIDE), np.asarray(tokens_of(WIDE, 2, 20))
    lengths = np.asarray([20, 11], np.int32)
    narrow = prefill(WIDE, params, tokens, lengths, init_cache(WIDE, 2, 32, dtype))[1].layers[0]
    floats = widened(narrow)
    wide = prefill(WIDE, params, tokens, lengths, init_cache(WIDE, 2, 32))[1].layers[0]
    expected = jax.jit(to_cache_basis)(narrow.k, wide.k, wide.v)
    for got, want in zip((floats.k, floats.v), expected, strict=True):
        for row, length in enumerate(lengths):
            x, y = np.asarray(got)[row, :length], np.asarray(want)[row, :length]
            largest = np.abs(y).max(axis=-1, keepdims=True)
            half_step = {
                "bfloat16": np.abs(y) * 2.0**-8,
                "float8_e4m3fn": np.abs(y) * 2.0**-4 + largest * 2.0**-10,
                "int8": largest / 254,
                "int4": np.ptp(y, axis=-1, keepdims=True) / 30 + largest * 2.0**-10,
            }[dtype]
            assert (np.abs(x - y) <= half_step * 1.001 + 1e-12).all()
            assert np.abs(x - y).max() > 0
    # Read side: the same floats, narrow or already widened.
    q = np.random.default_rng(0).standard_normal((2, 1, WIDE.n_heads, 64)).astype(np.float32)
    operands = lengths[:, None] - 1, np.ones(2, np.int32)
    read = jax.jit(lambda q, layer, *at: attend_cached(q, layer, *at, None))
    assert relative_error(read(q, narrow, *operands), read(q, floats, *operands)) < 1e-5


@pytest.mark.parametrize("head_dim", [48, *slow(64)])
def test_an_int4_cache_is_read_alike_by_prefill_and_decode(head_dim):
    """Both enter and leave the cache's basis: the same words, so the same logits but for float32
    roundings (1e-4)."""
    cfg = WIDE.replace(head_dim=head_dim)
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 2, 20))
    full = np.full(2, 20, np.int32)
    want, _ = prefill(cfg, params, tokens, full, init_cache(cfg, 2, 32, "int4"))
    _, cache = prefill(cfg, params, tokens, full - 1, init_cache(cfg, 2, 32, "int4"))
    got, _ = decode_step(cfg, params, tokens[:, 19], cache)
    assert relative_error(got, want) < 1e-4


def test_cache_nbytes_counts_packed_words():
    cfg = LLAMA.replace(head_dim=64)
    rows = 3 * 16 * cfg.n_kv_heads
    per_layer = {
        "float32": 2 * rows * 64 * 4,
        "bfloat16": 2 * rows * 64 * 2,
        "int8": 2 * rows * (64 + 4),
        "int4": 2 * rows * (32 + 4),
    }
    for dtype, size in per_layer.items():
        assert init_cache(cfg, 3, 16, dtype).nbytes == cfg.n_layers * size + 3 * 4


@pytest.mark.parametrize("family", ["gqa", *slow("delta")])
def test_generate_equals_greedy_by_full_forward(family):
    """(Of other families test_gla_model, test_parity, and generate beside the engine.)"""
    cfg, params, tokens = model(family)
    tokens = tokens.copy()
    lengths, new = np.asarray([6, 3, 5], np.int32), 6
    cache = init_cache(cfg, ROWS, WIDTH + new)
    out = generate(cfg, params, tokens, lengths, cache, Sampling(), 0, new, stop_tokens=())
    for row, length in enumerate(lengths):
        tokens[row, length : length + new] = out.tokens[row]
    # Greedy is right exactly if every token is the argmax of the forward over what precedes it.
    scores = np.asarray(logits(cfg, params, tokens, lengths + new), np.float64)
    for row, length in enumerate(lengths):
        own = scores[row, length - 1 : length - 1 + new]
        assert own.argmax(-1).tolist() == out.tokens[row].tolist()
        want = own.max(-1) - np.log(np.sum(np.exp(own), axis=-1))
        np.testing.assert_allclose(out.logprobs[row], want, atol=1e-4)
    assert out.counts.tolist() == [new] * ROWS


def continued(tokens, lengths, sampling, stops=(-1, -1), seed=0, new=40):
    """Return the one-layer model's continuation of prompts."""
    cfg = ONE_LAYER
    cache = init_cache(cfg, len(tokens), 64)
    params = params_of(cfg)
    return generate(cfg, params, tokens, lengths, cache, sampling, seed, new, stop_tokens=stops)


PROMPTS = np.asarray(tokens_of(ONE_LAYER, 4, 6)), np.asarray([6, 3, 5, 1], np.int32)


@pytest.mark.core
def test_rows_stop_separately_and_the_loop_stops_early():
    tokens, lengths = (each[:2] for each in PROMPTS)
    free = continued(tokens, lengths, Sampling())
    first, second = np.asarray(free.tokens)
    stops = [int(first[2]), int(second[5])]
    ends = [int(np.flatnonzero(np.isin(row, stops))[0]) + 1 for row in (first, second)]
    out = continued(tokens, lengths, Sampling(), stops)
    assert out.counts.tolist() == ends
    assert int(out.step) == max(ends)
    assert out.done.tolist() == [True, True]
    for row, end in enumerate(ends):
        assert out.tokens[row, :end].tolist() == free.tokens[row, :end].tolist()
        assert int(out.cache.lengths[row]) == int(lengths[row]) + end - 1


@pytest.mark.core
def test_sampled_tokens_depend_on_neither_neighbours_nor_slot():
    """And a call of the same shapes compiles nothing."""
    tokens, lengths = PROMPTS
    sampling = [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.7, top_k=5, seed=12),
        Sampling(temperature=1.3, top_p=0.8, seed=13, repetition_penalty=1.2),
        Sampling(),
    ]
    compiled: list[str] = []

    def run(rows):
        own = [sampling[row] for row in rows]
        out = continued(tokens[rows], lengths[rows], own, new=12)
        return {row: out.tokens[i].tolist() for i, row in enumerate(rows)}

    together = run([0, 1, 2, 3])
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    assert run([3, 2, 1, 0]) == together
    assert compiled == []
    assert len({tuple(row) for row in together.values()}) == 4


def test_the_cache_is_updated_in_place():
    """(That it is donated: test_operands.)"""
    cfg = ONE_LAYER
    cache = init_cache(cfg, 2, 64)
    lowered = decode_step.lower(cfg, params_of(cfg), np.zeros(2, np.int32), cache)
    stats = lowered.compile().memory_analysis()
    assert stats.alias_size_in_bytes >= cache.nbytes


@pytest.mark.parametrize("args", [(0, 8), (2, 0)])
def test_cache_sizes_must_be_positive(args):
    with pytest.raises(JaxLlamaError, match="at least 1"):
        init_cache(LLAMA, *args)


def test_cache_dtype_must_be_known():
    with pytest.raises(JaxLlamaError, match="int32"):
        init_cache(LLAMA, 1, 8, "int32")


# A cache that is full


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gqa", "int4"),
        pytest.param("hybrid", "float32", marks=pytest.mark.core),
        *slow(("gqa", "int8"), ("mqa-window", "bfloat16"), ("gqa", "float8_e4m3fn")),
    ],
)
def test_a_full_row_stays_as_it_is_and_gets_nan(family, dtype):
    """And its neighbour does not notice."""
    cfg = FAMILIES[family]
    cfg = cfg if family == "hybrid" else cfg.first_layers(1)
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 2, 5))
    filled = prefill(cfg, params, tokens, np.asarray([5, 4]), init_cache(cfg, 2, 5, dtype))[1]
    before = jax.tree.map(np.array, filled)
    got, cache = decode_step(cfg, params, tokens[:, 0], filled)
    beside_a_shorter = Cache(before.layers, np.asarray([4, 4], np.int32))
    want, _ = decode_step(cfg, params, tokens[:, 0], jax.device_put(beside_a_shorter))
    got = np.asarray(got)
    assert np.isnan(got[0]).all() and np.isfinite(want).all()
    np.testing.assert_array_equal(got[1], np.asarray(want)[1])
    assert cache.lengths.tolist() == [5, 5]
    for old, new in zip(jax.tree.leaves(before.layers), jax.tree.leaves(cache.layers), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[0], old[0])
    again, cache = decode_step(cfg, params, tokens[:, 0], cache)
    assert np.isnan(again).all() and cache.lengths.tolist() == [5, 5]


def test_what_does_not_fit_a_cache_is_said_up_front_or_nan():
    cfg, tokens = ONE_LAYER, np.asarray(tokens_of(ONE_LAYER, 1, 5))
    params, lengths = params_of(cfg), np.asarray([5], np.int32)
    for chunk in (None, 2):
        with pytest.raises(JaxLlamaError, match="^5 tokens do not fit a cache of max_len 4"):
            prefill(cfg, params, tokens, lengths, init_cache(cfg, 1, 4), chunk=chunk)
    with pytest.raises(JaxLlamaError, match=r"^8 tokens \(5 \+ 4 new - 1\) do not fit .* 7"):
        generate(cfg, params, tokens, lengths, init_cache(cfg, 1, 7), Sampling(), 0, 4)
    cache = init_cache(cfg, 1, 8)
    out = generate(cfg, params, tokens, lengths, cache, Sampling(), 0, 4, stop_tokens=(), chunk=2)
    assert out.counts.tolist() == [4] and np.isfinite(out.logprobs).all()
    assert out.cache.lengths.tolist() == [8]
    # How much a cache holds already is known on the device only.
    scores, cache = prefill(cfg, params, tokens, lengths, out.cache, chunk=2)
    assert np.isnan(scores).all() and cache.lengths.tolist() == [8]


@pytest.mark.parametrize(
    ("family", "is_drawn"), [("gqa", False), *slow(("hybrid", False), ("hybrid", True))]
)
def test_the_readme_s_lines_give_the_same_under_x64(family, is_drawn):
    """Where ``jnp.asarray([5])`` is int64: our integers stay int32 and our floats float32."""
    cfg = FAMILIES[family] if family == "hybrid" else ONE_LAYER
    params = params_of(cfg)

    def run():
        tokens, lengths = jnp.asarray([[50, 35, 31, 46, 14]]), jnp.asarray([5])
        cache = init_cache(cfg, batch=1, max_len=16, dtype="int4")
        logits, cache = prefill(cfg, params, tokens, lengths, cache)
        logits, cache = decode_step(cfg, params, logits.argmax(-1), cache)
        if not is_drawn:
            return logits, cache
        drawn = Sampling(temperature=0.8, top_k=9, repetition_penalty=1.1)
        empty = init_cache(cfg, batch=1, max_len=16, dtype="int4")
        return logits, cache, generate(cfg, params, tokens, lengths, empty, drawn, 0, 4)

    want = run()
    with jax.enable_x64(True):
        got = run()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(leaf).astype(np.float64) for leaf in (x, y))
        np.testing.assert_allclose(x, y, rtol=BOUND, atol=BOUND)

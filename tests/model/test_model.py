"""Identities of the model, its cache and its loop: every way to the same logits gives them.

Bound: 2e-5 of the largest logit in float32, a few hundred roundings of 6e-8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.generation import decode_step, generate, logits, prefill
from jaxllama.model.cache import Cache, init_cache, insert
from jaxllama.model.mixers.attention.mix import attend, attend_cached
from jaxllama.model.mixers.attention.sparse import sparse_decode
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.recurrent import RecurrentState
from jaxllama.quantization.quantize import quantize_params
from jaxllama.sampling import Sampling
from pallas_kernels.attention.rope_cache import to_cache_basis
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.models import FAMILIES, LLAMA, params_of, relative_error, tokens_of

BOUND = 2e-5
families = pytest.mark.parametrize("family", FAMILIES)
# How angles and embeddings are scaled is the same in every way to a token; GLA is also in both of
# its neighbours.
SCALED = ("wide-heads-scaled", "llama3-rope", "yarn-rope", "gla")
ways = pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in SCALED else ()) for f in FAMILIES],
)


# The identities share these shapes, so that each family compiles one program a function.
ROWS, WIDTH, ROOM = 3, 12, 16


def full_logits(cfg, params, tokens):
    lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    return np.asarray(logits(cfg, params, tokens, lengths))


def poison(cache: Cache) -> Cache:
    """NaN wherever no row owns the position (attention), and in whole rows of length 0 (GLA)."""

    def one(layer):
        if isinstance(layer, RecurrentState):
            empty = cache.lengths == 0

            def fill(leaf):
                mask = empty.reshape(-1, *(1,) * (leaf.ndim - 1))
                return jnp.where(mask, jnp.asarray(jnp.nan, leaf.dtype), leaf)

        else:
            unused = jnp.arange(layer.k.shape[1])[None, :] >= cache.lengths[:, None]

            def fill(leaf):
                return jnp.where(unused[:, :, None, None], jnp.asarray(jnp.nan, leaf.dtype), leaf)

        return jax.tree.map(fill, layer)

    return Cache(tuple(one(layer) for layer in cache.layers), cache.lengths)


@families
def test_prefill_then_decode_is_the_full_forward_at_every_split(family):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, ROWS, WIDTH))
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


@ways
@pytest.mark.parametrize(
    "chunk", [1, 4, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (3, 9))]
)
def test_chunked_prefill_is_whole_prefill(family, chunk):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), tokens_of(cfg, ROWS, WIDTH)
    lengths = jnp.asarray([9, 1, 4], jnp.int32)
    want, _ = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM))
    got, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM), chunk=chunk)
    assert relative_error(got, want) < BOUND
    assert cache.lengths.tolist() == [9, 1, 4]
    follow, _ = decode_step(cfg, params, tokens[:, 0], cache)
    assert np.isfinite(np.asarray(follow)).all()


@ways
def test_ragged_batch_equals_each_row_alone(family):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, ROWS, WIDTH))
    lengths = np.asarray([WIDTH, 3, 7], np.int32)
    batched, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, ROWS, ROOM))
    batched_next, _ = decode_step(cfg, params, tokens[:, 0], cache)
    for row, length in enumerate(lengths):
        # Behind the row's own tokens stands other padding than in the batch.
        own = np.where(np.arange(WIDTH) < length, tokens[row], 5)[None]
        one = np.asarray([length], np.int32)
        alone, cache = prefill(cfg, params, own, one, init_cache(cfg, 1, ROOM))
        assert relative_error(batched[row], alone[0]) < BOUND
        alone_next, _ = decode_step(cfg, params, tokens[row : row + 1, 0], cache)
        assert relative_error(batched_next[row], alone_next[0]) < BOUND


@families
def test_nan_beyond_every_length_changes_nothing(family):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), tokens_of(cfg, ROWS, WIDTH)
    lengths = jnp.asarray([6, 0, 4], jnp.int32)
    used = np.asarray([0, 2])

    def fresh(layer):
        """A poisoned GLA slot becomes usable by being replaced whole, as ``insert`` does."""
        if not isinstance(layer, RecurrentState):
            return layer
        return jax.tree.map(lambda leaf: leaf.at[used].set(jnp.zeros((), leaf.dtype)), layer)

    def run(spoil):
        cache = spoil(init_cache(cfg, ROWS, ROOM))
        cache = Cache(tuple(fresh(layer) for layer in cache.layers), cache.lengths)
        first, cache = prefill(cfg, params, tokens, lengths, cache)
        second, cache = decode_step(cfg, params, tokens[:, 0], spoil(cache))
        return np.asarray(first)[used], np.asarray(second)[used]

    for got, want in zip(run(poison), run(lambda cache: cache), strict=True):
        np.testing.assert_array_equal(got, want)


@ways
def test_a_row_inserted_into_a_poisoned_slot_goes_on_as_if_alone(family):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 1, WIDTH))
    lengths = np.asarray([9], np.int32)
    _, alone = prefill(cfg, params, tokens, lengths, init_cache(cfg, 1, WIDTH))
    big = jax.tree.map(
        lambda leaf: np.full(leaf.shape, np.nan if leaf.dtype == np.float32 else 0, leaf.dtype),
        init_cache(cfg, ROWS, ROOM),
    )
    merged = insert(jax.device_put(big), 2, alone)
    _, roomy = prefill(cfg, params, tokens, lengths, init_cache(cfg, 1, ROOM))
    want, _ = decode_step(cfg, params, tokens[:, 0], roomy)
    got, merged = decode_step(cfg, params, np.tile(tokens[:, 0], ROWS), merged)
    assert relative_error(got[2], want[0]) < BOUND
    assert merged.lengths.tolist()[2] == 10


@pytest.mark.parametrize("window", [None, 600])
def test_long_prompts_cross_query_and_key_blocks(window):
    cfg = LLAMA.replace(sliding_window=window)
    params, tokens = params_of(cfg), tokens_of(cfg, 2, 1300)
    want = full_logits(cfg, params, tokens)
    lengths = jnp.asarray([1299, 700], jnp.int32)
    # A capacity that is not a multiple of the key block: the last block overhangs.
    got, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, 2, 1400), chunk=512)
    assert relative_error(got[0], want[0, 1298]) < BOUND
    assert relative_error(got[1], want[1, 699]) < BOUND
    following = jnp.stack([tokens[0, 1299], tokens[1, 700]])
    got, _ = decode_step(cfg, params, following, cache)
    assert relative_error(got[0], want[0, 1299]) < BOUND
    assert relative_error(got[1], want[1, 700]) < BOUND


def test_attention_equals_a_float64_softmax():
    """Against numpy, sharing no code: grouped heads, causal, window."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, heads, 8)) for heads in (6, 2, 2))
    positions = np.broadcast_to(np.arange(20), (2, 20))
    got = attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(positions), 5)
    want = np.zeros_like(q)
    for b in range(2):
        for n in range(6):
            for t in range(20):
                keys = slice(max(0, t - 4), t + 1)
                scores = k[b, keys, n // 3] @ q[b, t, n] / np.sqrt(8)
                weights = np.exp(scores - scores.max())
                want[b, t, n] = (weights / weights.sum()) @ v[b, keys, n // 3]
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.999])
def test_sparse_decode_keeps_the_heaviest_and_the_newest(sparsity):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 1, 4, 8)) * 3
    k, v = rng.standard_normal((2, 2, 24, 2, 8))
    lengths = np.asarray([24, 9])
    k[1, 9:], v[1, 9:] = np.nan, np.nan
    f32 = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    positions = jnp.asarray(lengths[:, None] - 1, jnp.int32)
    got = sparse_decode(f32[0], KVCache(f32[1], f32[2]), positions, sparsity, None)
    for b, length in enumerate(lengths):
        for n in range(4):
            scores = k[b, :length, n // 2] @ q[b, 0, n] / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            older = np.argsort(-weights[:-1])[: int(sparsity * (length - 1))]
            kept = [*older, length - 1]
            want = weights[kept] @ v[b, kept, n // 2]
            assert relative_error(got[b, 0, n], want) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_full_sparsity_is_dense_and_less_is_not(dtype):
    params, tokens = params_of(LLAMA), tokens_of(LLAMA, 1, 30)
    lengths = jnp.asarray([30], jnp.int32)

    def step(cfg):
        _, cache = prefill(cfg, params, tokens, lengths, init_cache(cfg, 1, 32, dtype))
        return np.asarray(decode_step(cfg, params, tokens[:, 0], cache)[0])

    dense = step(LLAMA)
    np.testing.assert_array_equal(step(LLAMA.replace(attn_sparsity=1.0)), dense)
    assert relative_error(step(LLAMA.replace(attn_sparsity=0.99)), dense) < 0.2
    assert relative_error(step(LLAMA.replace(attn_sparsity=0.1)), dense) > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "int4"])
def test_a_narrow_cache_costs_its_rounding_and_nothing_else(dtype):
    """Decoding over a narrow cache is decoding over the floats it stands for (1e-5, float32
    roundings), and those are within half a step of what was written: 2^-9 relative for bfloat16,
    2^-4 for fp8, scale / 2 for integers (int4: of 15 steps from the smallest to the
    largest, in the cache's basis, and 2^-10 for what is kept in float16)."""
    cfg = LLAMA.replace(head_dim=64)
    params, tokens = params_of(cfg), tokens_of(cfg, 2, 20)
    lengths = jnp.asarray([20, 11], jnp.int32)
    _, narrow = prefill(cfg, params, tokens, lengths, init_cache(cfg, 2, 32, dtype))

    def is_qtensor(leaf):
        return isinstance(leaf, QTensor)

    floats = jax.tree.map(
        lambda leaf: dequantize(leaf) if is_qtensor(leaf) else leaf,
        narrow.layers, is_leaf=is_qtensor,
    )  # fmt: skip
    floats = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), floats)
    wide = prefill(cfg, params, tokens, lengths, init_cache(cfg, 2, 32))[1].layers[0]
    expected = to_cache_basis(narrow.layers[0].k, wide.k, wide.v)
    for got, want in zip((floats[0].k, floats[0].v), expected, strict=True):
        for row, length in enumerate([20, 11]):
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
    q = jax.random.normal(jax.random.key(0), (2, 1, cfg.n_heads, 64))
    one, positions = jnp.ones((2,), jnp.int32), lengths[:, None] - 1
    got = attend_cached(q, narrow.layers[0], positions, one, None)
    want = attend_cached(q, floats[0], positions, one, None)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("head_dim", [48, 64])
def test_an_int4_cache_is_read_alike_by_prefill_and_decode(head_dim):
    """Both enter and leave the cache's basis: the same words, so the same logits but for float32
    roundings (1e-4)."""
    cfg = LLAMA.replace(head_dim=head_dim)
    params, tokens = params_of(cfg), tokens_of(cfg, 2, 20)
    want, _ = prefill(cfg, params, tokens, jnp.asarray([20, 20]), init_cache(cfg, 2, 32, "int4"))
    _, cache = prefill(cfg, params, tokens, jnp.asarray([19, 19]), init_cache(cfg, 2, 32, "int4"))
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


@ways
def test_generate_equals_greedy_by_full_forward(family):
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), np.array(tokens_of(cfg, ROWS, WIDTH))
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


def test_rows_stop_separately_and_the_loop_stops_early():
    cfg, params = LLAMA, params_of(LLAMA)
    tokens, lengths = tokens_of(cfg, 2, 6), jnp.asarray([6, 3], jnp.int32)

    def run(stops):
        cache = init_cache(cfg, 2, 64)
        return generate(cfg, params, tokens, lengths, cache, Sampling(), 0, 40, stop_tokens=stops)

    free = run(())
    first, second = np.asarray(free.tokens)
    stops = [int(first[2]), int(second[5])]
    ends = [int(np.flatnonzero(np.isin(row, stops))[0]) + 1 for row in (first, second)]
    out = run(stops)
    assert out.counts.tolist() == ends
    assert int(out.step) == max(ends)
    assert out.done.tolist() == [True, True]
    for row, end in enumerate(ends):
        assert out.tokens[row, :end].tolist() == free.tokens[row, :end].tolist()
        assert int(out.cache.lengths[row]) == int(lengths[row]) + end - 1


def test_sampled_tokens_depend_on_neither_neighbours_nor_slot():
    cfg, params = LLAMA, params_of(LLAMA)
    tokens = tokens_of(cfg, 4, 6)
    lengths = jnp.asarray([6, 3, 5, 1], jnp.int32)
    sampling = [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.7, top_k=5, seed=12),
        Sampling(temperature=1.3, top_p=0.8, seed=13, repetition_penalty=1.2),
        Sampling(),
    ]

    def run(rows):
        index = np.asarray(rows)
        out = generate(
            cfg, params, tokens[index], lengths[index], init_cache(cfg, len(rows), 32),
            [sampling[row] for row in rows], 0, 12, stop_tokens=(),
        )  # fmt: skip
        return {row: out.tokens[i].tolist() for i, row in enumerate(rows)}

    together = run([0, 1, 2, 3])
    assert run([3, 2, 1, 0]) == together
    for row in (0, 2):
        assert run([row]) == {row: together[row]}
    assert len({tuple(row) for row in together.values()}) == 4


def test_steady_state_compiles_nothing():
    cfg, params = LLAMA, params_of(LLAMA)
    compiled: list[str] = []

    def run(seed):
        generate(
            cfg, params, tokens_of(cfg, 2, 6, seed), jnp.asarray([6, 3], jnp.int32),
            init_cache(cfg, 2, 32), Sampling(temperature=1.0), seed, 8,
        )  # fmt: skip

    run(0)
    run(1)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    run(2)
    assert [event for event in compiled if "backend_compile" in event] == []


def test_the_cache_is_donated_and_updated_in_place():
    cfg, params = LLAMA, params_of(LLAMA)
    cache = init_cache(cfg, 2, 64)
    _, new = decode_step(cfg, params, jnp.zeros((2,), jnp.int32), cache)
    assert cache.layers[0].k.is_deleted()
    lowered = decode_step.lower(cfg, params, jnp.zeros((2,), jnp.int32), new)
    stats = lowered.compile().memory_analysis()
    assert stats.alias_size_in_bytes >= new.nbytes


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
    [("gqa", "float32"), ("gqa", "int8"), ("gqa", "int4"), ("gqa", "float8_e4m3fn"),
     ("mqa-window", "bfloat16"), ("hybrid", "float32")],
)  # fmt: skip
def test_a_full_row_stays_as_it_is_and_gets_nan(family, dtype):
    """And its neighbour does not notice."""
    cfg = FAMILIES[family]
    params, tokens = params_of(cfg), tokens_of(cfg, 2, 5)
    lengths = jnp.asarray([5, 4], jnp.int32)

    def filled():
        return prefill(cfg, params, tokens, lengths, init_cache(cfg, 2, 5, dtype))[1]

    before = jax.tree.map(np.array, filled())
    got, cache = decode_step(cfg, params, tokens[:, 0], filled())
    beside_a_shorter = Cache(filled().layers, jnp.asarray([4, 4], jnp.int32))
    want, _ = decode_step(cfg, params, tokens[:, 0], beside_a_shorter)
    assert np.isnan(got[0]).all() and np.isfinite(want).all()
    np.testing.assert_array_equal(got[1], want[1])
    assert cache.lengths.tolist() == [5, 5]
    for old, new in zip(jax.tree.leaves(before.layers), jax.tree.leaves(cache.layers), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
    again, cache = decode_step(cfg, params, tokens[:, 0], cache)
    assert np.isnan(again).all() and cache.lengths.tolist() == [5, 5]


def test_what_does_not_fit_a_cache_is_said_up_front_or_nan():
    cfg, tokens = LLAMA, tokens_of(LLAMA, 1, 5)
    params, lengths = params_of(cfg), jnp.asarray([5], jnp.int32)
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


def test_the_readme_s_lines_give_the_same_under_x64():
    """Where ``jnp.asarray([5])`` is int64: our integers stay int32 and our floats float32."""
    cfg = FAMILIES["hybrid"]

    def run():
        params = quantize_params(params_of(cfg), "w8a16")
        tokens, lengths = jnp.asarray([[50, 35, 31, 46, 14]]), jnp.asarray([5])
        cache = init_cache(cfg, batch=1, max_len=16, dtype="int4")
        logits, cache = prefill(cfg, params, tokens, lengths, cache)
        logits, cache = decode_step(cfg, params, logits.argmax(-1), cache)
        drawn = Sampling(temperature=0.8, top_k=9, repetition_penalty=1.1)
        empty = jax.tree.map(jnp.zeros_like, cache)
        return logits, cache, generate(cfg, params, tokens, lengths, empty, drawn, 0, 4)

    want = run()
    with jax.enable_x64(True):
        got = run()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(leaf).astype(np.float64) for leaf in (x, y))
        np.testing.assert_allclose(x, y, rtol=BOUND, atol=BOUND)

"""Attention of new tokens over a cache's past and themselves: cuDNN's on a Hopper GPU; elsewhere
its parts, with plain sums in float32 in the place of cuDNN's."""

from __future__ import annotations

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.decoding import forward
from jaxllama.generation import prefill
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.mixers.attention import chunk
from jaxllama.model.mixers.attention import cudnn as cudnn_attention
from jaxllama.model.mixers.attention.state import KVCache, write
from jaxllama.training.batch import Batch
from pallas_kernels.attention.blockwise import blockwise_attention, floats
from pallas_kernels.attention.plain import attention_scores, weighted_values
from pallas_kernels.attention.rope_cache import as_stored, to_cache_basis
from tests.helpers.arrays import as_jax
from tests.helpers.cudnn_plain import plain
from tests.helpers.models import LLAMA, params_of, relative_error, tokens_of


def pretend_a_gpu(monkeypatch):
    """``extend`` in float32 on any machine, in blocks of 128 keys."""
    monkeypatch.setattr(cudnn_attention, "_with_log_sum", plain)
    monkeypatch.setattr(cudnn_attention, "PAST_TOKENS", 128)
    monkeypatch.setattr(chunk, "has_cudnn", lambda *heads: True)


def poison(cache: Cache) -> Cache:
    """NaN, or the words that are, wherever no row owns the position."""
    unused = (jnp.arange(cache.capacity)[None, :] >= cache.lengths[:, None])[:, :, None, None]

    def spoil(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.where(unused, as_jax(jnp.nan if is_float else 7, leaf.dtype), leaf)

    return Cache(jax.tree.map(spoil, cache.layers), cache.lengths)


def case(dtype, compute, h=128):
    """((q, k, v), a cache that holds a ragged past and NaN behind it, the same as floats, the
    past's lengths).  Scores of up to 30: logarithms rounded to bfloat16 would be off by 0.1."""
    rng = np.random.default_rng(0)
    shapes = ((4, 150, 4, h), (4, 150, 2, h), (4, 150, 2, h), *[(4, 611, 2, h)] * 2)
    q, *rest = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return stored(dtype, compute, 6 * q, *rest, np.asarray([0, 1, 140, 400], np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def stored(dtype, compute, q, k, v, old_k, old_v, n_past):
    batch, capacity, _, h = old_k.shape
    cfg = LLAMA.replace(n_layers=1, layer_types=("attention",), head_dim=h)
    layer = init_cache(cfg, batch, capacity, dtype).layers[0]
    q, k, v, *old = (x.astype(compute) for x in to_cache_basis(layer.k, q, k, v, old_k, old_v))
    slots = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (batch, capacity))
    layer = poison(Cache((write(layer, *old, slots),), n_past)).layers[0]
    past = KVCache(*(floats(x, compute) for x in (layer.k, layer.v)))
    return (q, as_stored(layer.k, k), as_stored(layer.v, v)), layer, past, n_past


@functools.partial(jax.jit, static_argnames="window")
def expected(q, k, v, past, n_past, window=None):
    """In float32, by the blockwise form on a cache that holds the new tokens too."""
    positions = n_past[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None, :]
    wide = KVCache(*(x.astype(jnp.float32) for x in (past.k, past.v)))
    wide = write(wide, *(x.astype(jnp.float32) for x in (k, v)), positions)
    return blockwise_attention(q.astype(jnp.float32), wide.k, wide.v, positions, window=window)


def in_pages(layer, n_past, page=47):
    """``layer [B, S, ...]`` as a pool, its pages in another order, and the table: entries behind
    what a row's past needs are outside of the pool."""
    rows, capacity = layer.k.shape[:2]
    count = capacity // page
    order = np.random.default_rng(1).permutation(rows * count)
    pools = jax.tree.map(lambda x: x.reshape(-1, page, *x.shape[2:])[order], layer)
    table = np.argsort(order).astype(np.int32).reshape(rows, count)
    return pools, jnp.where(np.arange(count) * page < n_past[:, None], table, rows * count + 3)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.core),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "int4", "float8_e4m3fn")),
    ],
)
def test_extend_parts(monkeypatch, dtype):
    """In blocks of 128 keys, the last of which overhangs the capacity.  1e-5: scores near 30, and
    so the exponents of the weights, are rounded at 2e-6 in float32."""
    pretend_a_gpu(monkeypatch)
    qkv, layer, past, n_past = case(dtype, jnp.float32)
    got = jax.jit(cudnn_attention.extend)(*qkv, (layer.k, layer.v), n_past)
    want = expected(*qkv, past, n_past)
    assert relative_error(got, want) < 1e-5
    even = jax.tree.map(lambda x: x[:, :512], (layer.k, layer.v))  # in four whole blocks
    got = jax.jit(cudnn_attention.extend)(*qkv, even, n_past)
    assert relative_error(got, want) < 1e-5
    monkeypatch.setattr(cudnn_attention, "PAST_TOKENS", 4096)  # in one block, without a loop
    program = jax.jit(lambda *x: cudnn_attention.extend(*x[:3], x[3:5], x[5]))
    assert relative_error(program(*qkv, layer.k, layer.v, n_past), want) < 1e-5
    assert "stablehlo.while" not in program.lower(*qkv, layer.k, layer.v, n_past).as_text()


# For 150 tokens behind 0, 1, 140 and 400: no past, windows within the tokens, as long, longer, in
# two blocks of the past, and longer than all that the cache holds.
@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        ("int4", 200),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("int4", 60), ("int8", 200))),
        pytest.param("float32", 700, marks=pytest.mark.slow),
        *(pytest.param("float32", w, marks=pytest.mark.slow) for w in (1, 2, 60, 151, 200, 350)),
        pytest.param("float8_e4m3fn", 350, marks=pytest.mark.slow),
    ],
)
def test_extend_parts_through_a_window(monkeypatch, dtype, window):
    """1e-5 as above; and of pages the same bits."""
    pretend_a_gpu(monkeypatch)
    qkv, layer, past, n_past = case(dtype, jnp.float32)
    extend = jax.jit(cudnn_attention.extend, static_argnames="window")
    got = extend(*qkv, (layer.k, layer.v), n_past, window=window)
    assert relative_error(got, expected(*qkv, past, n_past, window=window)) < 1e-5
    if window < 700:
        pools, table = in_pages(layer, n_past)
        paged = extend(*qkv, (pools.k, pools.v), n_past, table, window=window)
        assert np.array_equal(got, paged)


def a_ragged_past(cfg, params, capacity, dtype) -> Cache:
    """Rows of 0, 150, 229 and 60 tokens, NaN behind them."""
    tokens, lengths = tokens_of(cfg, 4, 229, seed=1), as_jax([0, 150, 229, 60], jnp.int32)
    return poison(prefill(cfg, params, tokens, lengths, init_cache(cfg, 4, capacity, dtype))[1])


def more(cfg, params, cache, chunk=None):
    """Logits behind it, of three rows; the last has no new tokens."""
    tokens, lengths = tokens_of(cfg, 4, 230), as_jax([230, 190, 1, 0], jnp.int32)
    cache = jax.tree.map(jnp.copy, cache)
    return prefill(cfg, params, tokens, lengths, cache, chunk=chunk)[0][:3]


@pytest.mark.parametrize("window", [170, pytest.param(None, marks=pytest.mark.slow)])
def test_prefill_behind_a_ragged_past(monkeypatch, window):
    """Against the blockwise form: 2e-5, as in test_model.  One layer: a second one's keys could be
    rounded to another of int8's steps."""
    cfg = LLAMA.replace(n_layers=1, layer_types=("attention",), sliding_window=window)
    params = params_of(cfg)
    cache = a_ragged_past(cfg, params, 471, "int8")
    want = more(cfg, params, cache)
    pretend_a_gpu(monkeypatch)
    assert relative_error(more(cfg.replace(name="other"), params, cache, 128), want) < 2e-5


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_prompt_s_pieces_are_as_few_as_its_memory_allows(backend, monkeypatch):
    """A piece is a multiple of 128 tokens and within the bound; each pads less than 128 tokens."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for rows, width in itertools.product((1, 3, 64, 1024), (1, 512, 513, 768, 16384, 131072)):
        most = forward.CPU_PREFILL_TOKENS
        if backend == "gpu":
            most = max(forward.PREFILL_TOKENS // rows, 128)
        chunk = forward.prefill_chunk(rows, width)
        assert (chunk is None) == (width <= most)
        if chunk is not None:
            pieces = -(-width // most)
            assert chunk % 128 == 0 and chunk <= most and pieces * chunk >= width
            assert -(-width // chunk) == pieces and pieces * chunk - width < 128 * pieces


def test_segments_that_are_read_alone_have_their_places_and_sizes(monkeypatch):
    """cuDNN takes where each segment begins and how long it is, without the row's end."""
    taken = {}

    def attention(q, k, v, **options):
        taken.update(options)
        return q

    masks = types.SimpleNamespace(PADDING_CAUSAL="causal")
    monkeypatch.setattr(cudnn_attention, "cudnn_attention", lambda: (attention, masks))
    monkeypatch.setattr(cudnn_attention, "_reads_segments", lambda q, begins: True)
    x = jnp.zeros((2, 10, 1, 8), jnp.bfloat16)
    batch = Batch(np.zeros((2, 11), np.int32), begins=np.array([[0, 4, 10], [0, -1, -1]], np.int32))
    cudnn_attention.causal(x, x, x, segments=x[..., 0, 0], begins=batch.input_begins)
    for name in ("q", "kv"):
        assert taken[f"{name}_offsets"].tolist() == [[0, 4, -1, -1], [0, -1, -1, -1]]
        assert taken[f"{name}_seqlen"].tolist() == [[4, 6, -1], [10, -1, -1]]
    assert taken["mask_type"] == "causal"


def test_few_segments_are_read_alone_on_hopper(monkeypatch):
    def reads(m, rows=4, capability="9.0", width=128):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(cudnn_attention, "device_of", lambda x: device)
        q = jax.ShapeDtypeStruct((rows, 2048, 4096 // width, width), jnp.bfloat16)
        return cudnn_attention._reads_segments(q, jax.ShapeDtypeStruct((rows, m), jnp.int32))

    assert reads(2) and reads(16)
    assert not reads(17) and not reads(16, rows=5)  # 5.4 GB of work
    assert not reads(16, capability="8.0") and not reads(16, capability="10.0")
    assert not reads(2, width=256)


# --- on a Hopper GPU -----------------------------------------------------------------------------


DTYPES = [(dtype, 128) for dtype in ("bfloat16", "int8", "int4", "float8_e4m3fn")]


@pytest.mark.gpu
@pytest.mark.parametrize("past_tokens", [1024, 32768])  # 256 keys a row at once, or all 611
@pytest.mark.parametrize(("dtype", "width"), [*DTYPES, ("bfloat16", 256), ("int8", 256)])
def test_extend_values(monkeypatch, dtype, width, past_tokens):
    """Both parts and the result are rounded to bfloat16 (2^-9 each), as are the weights within a
    part: 1e-2 of the largest value."""
    monkeypatch.setattr(cudnn_attention, "PAST_TOKENS", past_tokens)
    qkv, layer, past, n_past = case(dtype, jnp.bfloat16, width)
    got = jax.jit(cudnn_attention.extend)(*qkv, (layer.k, layer.v), n_past)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert relative_error(got, expected(*qkv, past, n_past)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [60, 151, 350])
@pytest.mark.parametrize(("dtype", "width"), [*DTYPES, ("bfloat16", 256)])
def test_extend_values_through_a_window(monkeypatch, dtype, width, window):
    """1e-2 as above."""
    monkeypatch.setattr(cudnn_attention, "PAST_TOKENS", 512)
    qkv, layer, past, n_past = case(dtype, jnp.bfloat16, width)
    extend = jax.jit(cudnn_attention.extend, static_argnames="window")
    got = extend(*qkv, (layer.k, layer.v), n_past, window=window)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert relative_error(got, expected(*qkv, past, n_past, window=window)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40, 170])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_prefill_in_chunks_on_the_gpu(dtype, window):
    """bfloat16 rounds at other places: 4e-2 of the largest logit, a dozen roundings of 2^-9 through
    two layers."""
    cfg = LLAMA.replace(head_dim=64, sliding_window=window)
    params = params_of(cfg, dtype=jnp.bfloat16)
    cache = a_ragged_past(cfg, params, 471, dtype)
    whole = more(cfg, params, cache)
    assert np.isfinite(np.asarray(whole)).all()
    assert relative_error(more(cfg, params, cache, 128), whole) < 4e-2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize(("window", "known"), [(None, False), (60, False), (None, True)])
def test_packed_rows_on_the_gpu(window, known, width):
    """Values and gradients beside float32 sums: 1.8e-3 to 3.5e-3 RMS were measured."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (100, 37, 119)
    q, k, v, dy = (
        jax.random.normal(key, (2, sum(sizes), heads, width), jnp.bfloat16)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )
    segments = jnp.repeat(jnp.arange(3, dtype=jnp.int32), jnp.array(sizes))[None]
    # The second row is one segment, as far as its numbers say.
    segments = jnp.concatenate([segments, jnp.zeros_like(segments)])
    begins = jnp.array([[0, 100, 137, -1], [0, -1, -1, -1]], jnp.int32) if known else None

    def packed(q, k, v):
        return cudnn_attention.causal(q, k, v, window, segments=segments, begins=begins)

    def exact(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        place = jnp.arange(q.shape[1])
        seen = (segments[:, :, None] == segments[:, None]) & (place[:, None] >= place)
        if window is not None:
            seen &= place[:, None] - place < window
        scores = jnp.where(seen[:, None, None], attention_scores(q, k), -jnp.inf)
        return weighted_values(jax.nn.softmax(scores, axis=-1), v)

    with jax.default_matmul_precision("highest"):
        expected = _with_gradients(exact, q, k, v, dy.astype(jnp.float32))
    for got, want in zip(_with_gradients(packed, q, k, v, dy), expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)


def _with_gradients(form, q, k, v, dy):
    out, pull = jax.vjp(form, q, k, v)
    return out, *pull(dy)


def test_values_of_another_width_are_not_filled_up(monkeypatch):
    """Heads of 192 features and values of 128, as in latent attention, go to cuDNN as they are."""

    def attention(q, k, v, **options):
        assert options["mask_type"] == "causal" and options["scale"] == 192**-0.5
        assert v.shape[-1] == 128
        return plain(q, k, v, is_causal=True, window=options["sliding_window_length"])[0]

    masks = types.SimpleNamespace(CAUSAL="causal")
    monkeypatch.setattr(cudnn_attention, "cudnn_attention", lambda: (attention, masks))
    rng = np.random.default_rng(0)
    shapes = (2, 40, 4, 192), (2, 40, 2, 192), (2, 40, 2, 128)
    q, k, v = (as_jax(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    for window in (None, 7):
        padded = jnp.pad(v, ((0, 0),) * 3 + ((0, 64),))
        want = plain(q, k, padded, is_causal=True, window=window)[0][..., :128]
        assert relative_error(cudnn_attention.causal(q, k, v, window), want) < 1e-6


@pytest.mark.parametrize(
    "widths, capability, version, taken",
    [
        ((128, 128), "8.0", 0, True),
        ((256, 256), "9.0", 91400, True),
        ((192, 192), "8.0", 91400, False),
        ((256, 256), "10.0", 91400, False),
        ((192, 128), "9.0", 91400, True),
        ((192, 128), "9.0", 90900, False),
        ((192, 128), "8.0", 91400, False),
        ((256, 136), "9.0", 91400, False),
        ((192, 132), "9.0", 91400, False),
    ],
)
def test_heads_that_cudnn_takes(widths, capability, version, taken, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(cudnn_attention, "cudnn_version", lambda: version)
    q, v = (jax.ShapeDtypeStruct((1, 64, 4, width), jnp.bfloat16) for width in widths)
    assert chunk.has_cudnn(q, v) == taken

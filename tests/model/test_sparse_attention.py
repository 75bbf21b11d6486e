"""Sparse attention is of generated tokens, however they and their prompts come in."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama import generation
from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import init_cache
from jaxllama.model.decoder import forward
from jaxllama.model.mixers.attention.sparse import quotas, sparse_decode
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.planner.trial import random_run
from jaxllama.text.rows import pad_rows
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.models import LLAMA, params_of, relative_error

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
NEW = 20  # more than an offloaded cache's tail: its snapshot is written anew once
PROMPTS = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (1, 9, 21)]


@pytest.mark.core
def test_quotas_are_python_s_products():
    for percent in range(1, 100):
        share = percent / 100
        assert quotas(share, 4096).tolist() == [int(share * (s - 1)) for s in range(1, 4097)]


@pytest.mark.core
def test_a_step_keeps_its_quota():
    """Keys of equal weight, values of one: the sum counts what is kept.  In float32 0.57 * 300 and
    0.29 * 200 are 171 and 58, in Python 170.99... and 57.99..."""
    rows, k = np.zeros((512, 1, 1, 1), np.float32), np.zeros((512, 512, 1, 1), np.float32)
    run = jax.jit(sparse_decode, static_argnums=(3, 4))
    positions = jnp.arange(512, dtype=jnp.int32)[:, None]
    for share in (0.57, 0.29):
        out = np.asarray(run(rows, KVCache(k, k + 1), positions, share, None))[:, 0, 0, 0]
        kept = np.rint(out * np.arange(1, 513)).astype(int)
        assert (kept - 1).tolist() == [int(share * (s - 1)) for s in range(1, 513)]


@pytest.mark.parametrize(
    ("n_layers", "sparsity", "dtype"),
    [
        (1, 0.3, "int8"),
        *slow((2, 0.05, "float32"), (2, 0.3, "int8"), (2, 0.3, "float32"), (2, 0.9, "float32")),
    ],
)
def test_every_way_gives_the_same_tokens(n_layers, sparsity, dtype):
    """``generate`` with every chunk, and the engine with rows that begin beside others and rows
    that are put out and filled anew; of two layers one has a sliding window.  (Offloaded models:
    offload/test_offload.)"""
    cfg = LLAMA.first_layers(n_layers).replace(
        attn_sparsity=sparsity,
        eos_token_ids=(),
        **({"sliding_window": 7, "window_layers": (1,)} if n_layers > 1 else {}),
    )
    params = params_of(cfg)
    lm = LanguageModel(cfg, params, None)

    def tokens(lm: LanguageModel, chunk: int | None) -> list[list[int]]:
        return [out.tokens for out in lm.generate(PROMPTS, NEW, kv_dtype=dtype, chunk=chunk)]

    want = tokens(lm, None)
    assert tokens(lm, 1) == want
    engine = Engine(
        lm,
        max_slots=2,
        max_len=44,
        kv_dtype=dtype,
        prefill_chunk=8,
        steps_per_call=3,
        cache_tokens=44,
        page_size=4,
    )
    requests = [Request(f"{i}", tuple(p), NEW, Sampling()) for i, p in enumerate(PROMPTS)]
    events = engine.generate(requests)
    assert [[t for event in events[r.id] for t in event.tokens] for r in requests] == want
    assert engine.stats().preemptions > 0


def test_what_was_generated_is_filled_as_it_was_generated():
    """Position by position the same keys and values, prompt and answer in one call."""
    cfg = LLAMA.first_layers(1).replace(attn_sparsity=0.2, eos_token_ids=())
    params = params_of(cfg)
    tokens, lengths = pad_rows(PROMPTS, 24)
    state = generation.generate(
        cfg, params, tokens, lengths, init_cache(cfg, 3, 64), Sampling(), 0, NEW
    )
    rows = [p + o[:-1] for p, o in zip(PROMPTS, state.tokens.tolist(), strict=True)]
    whole, totals = pad_rows(rows, 64)
    written = np.arange(64, dtype=np.int32) >= np.asarray(lengths)[:, None]
    filled = jax.jit(forward, static_argnums=0)
    _, cache = filled(cfg, params, whole, totals, init_cache(cfg, 3, 64), lengths, sparse=written)
    for got, want in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(state.cache.layers)):  # noqa: B905
        for row, n in enumerate(map(len, rows)):
            got, want = np.asarray(got), np.asarray(want)
            assert relative_error(got[row, :n], want[row, :n]) < 1e-5


def test_a_text_is_scored_as_it_is_decoded():
    cfg = LLAMA.first_layers(1).replace(vocab_size=256, attn_sparsity=0.3)
    params, tokenizer = params_of(cfg), Tokenizer.byte_level()
    lm, text = LanguageModel(cfg, params, tokenizer), "What is kept is what is read."
    found = perplexity(lm, text, 32)["nll"]
    cache, total = init_cache(cfg, 1, 32), 0.0
    for token, following in itertools.pairwise(tokenizer.encode(text)):
        scores, cache = generation.decode_step(cfg, params, as_jax([token]), cache)
        row = np.asarray(scores, np.float64)[0]
        total -= row[following] - np.logaddexp.reduce(row)
    assert found == pytest.approx(total / (len(tokenizer.encode(text)) - 1), rel=1e-5)


@pytest.mark.slow
def test_a_policy_s_text_is_scored_as_the_resident_model_s(tmp_path):
    """Under what the policy says of sparsity and of the cache."""
    cfg = LLAMA.first_layers(1).replace(vocab_size=256, attn_sparsity=0.3)
    params, tokenizer = params_of(cfg), Tokenizer.byte_level()
    lm, text = LanguageModel(cfg, params, tokenizer), "What is kept is what is read."
    policy = Policy.parse("0 100 0 100 0 100 attn_sparsity=0.3 compress_cache=true")
    place = Placement(policy, jnp.float32, directory=tmp_path)
    full = cfg.replace(attn_sparsity=1.0)
    off = place.model(full, place.tree(jax.tree.map(np.asarray, params)), tokenizer)
    want = perplexity(lm, text, 32, kv_dtype="int4")
    assert perplexity(off, text, 32) == pytest.approx(want, rel=1e-6, nan_ok=True)
    with pytest.raises(JaxLlamaError, match="compress_cache is int4, and kv_dtype is 'int8'"):
        perplexity(off, text, 32, kv_dtype="int8")
    with pytest.raises(JaxLlamaError, match="compress_cache is int4, and kv_dtype is 'int8'"):
        off.generate([[3]], 1, kv_dtype="int8")


@pytest.mark.slow
def test_of_an_offloaded_cache_only_what_is_read_moves(tmp_path, monkeypatch):
    """Two query heads to a kv head: at 0.1 at most a fifth of V, and a sixteenth for widths that
    are few."""
    put, moved = jax.device_put, {}
    for share in (1.0, 0.1):
        cfg = LLAMA.replace(n_layers=1, layer_types=("attention",), attn_sparsity=share)
        policy = Policy.parse("100 0 0 100 100 0")
        place = Placement(policy, jnp.float32, directory=tmp_path)
        lm = place.model(cfg, place.tree(params_of(cfg)), None)
        run = random_run(lm, 4, 240, 8, 256, "float32", 240)
        for _ in range(2):
            run.step()

        def count(x, device=None, share=share, home=lm.executor.store.on_device, **options):
            if device is home and x.dtype == np.float32:
                moved[share] = moved.get(share, 0) + x.nbytes
            return put(x, device, **options)

        monkeypatch.setattr(jax, "device_put", count)
        run.step()
        jax.block_until_ready([batch.rows.written for batch in run.batches])
        monkeypatch.setattr(jax, "device_put", put)
    whole = 4 * 256 * 2 * 8 * 4  # rows, columns, kv heads, features, bytes
    assert moved[1.0] == 2 * whole
    assert whole < moved[0.1] <= whole + (2 * 0.1 + 1 / 16) * whole

"""Sparse attention by an indexer: each query reads the keys with the best scores, in every form.

``test_parity`` compares two families with transformers, ``random_options`` their options.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.mixers.latent.indexer import choice
from jaxllama.model.stacked import hidden_states
from jaxllama.typing import Params
from tests.helpers.engine_cases import REPEATING, engine, every_way_generates, run_schedule
from tests.helpers.models import INDEXED, check_chunks_and_steps, params_of, tokens_of

CFG = INDEXED.first_layers(1)


def with_top_k(top_k: int) -> jl.ModelConfig:
    indexer = dataclasses.replace(CFG.latent.indexer, top_k=top_k)
    return CFG.replace(latent=dataclasses.replace(CFG.latent, indexer=indexer))


def test_the_choice_is_the_keys_with_the_best_scores():
    rng = np.random.default_rng(0)
    q, weights = rng.normal(size=(2, 3, 6, 8)), rng.normal(size=(2, 3, 6))
    keys, seen = rng.normal(size=(2, 11, 8)), np.array([[11, 4, 1], [7, 0, 11]])
    arrays = (x.astype(np.float32) for x in (q, weights, keys))
    chosen, is_chosen = jax.jit(choice, static_argnums=4)(*arrays, seen, 4)
    for row, token in np.ndindex(seen.shape):
        scores = [
            weights[row, token] @ np.maximum(q[row, token] @ keys[row, s], 0)
            for s in range(seen[row, token])
        ]
        want = set(np.argsort(scores)[-4:].tolist())
        got = np.asarray(chosen)[row, token][np.asarray(is_chosen)[row, token]]
        assert set(got.tolist()) == want


def test_more_keys_than_there_are_is_attention_to_all():
    """The oracle is the form without an indexer; fewer keys give something else."""
    params, tokens = params_of(CFG), np.asarray(tokens_of(CFG, 2, 12))
    lengths = np.full(2, 12, np.int32)
    few, all_but_one, whole = (
        np.asarray(jl.logits(with_top_k(k), params, tokens, lengths)) for k in (5, 11, 12)
    )
    np.testing.assert_allclose(all_but_one[:, :11], whole[:, :11], atol=1e-5)
    assert np.abs(few - whole).max() > 1e-2
    np.testing.assert_allclose(few[:, :5], whole[:, :5], atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "bound", "pages"),
    [
        ("float32", 1e-5, False),
        ("float32", 1e-5, True),
        pytest.param("int8", 0.3, True, marks=pytest.mark.slow),
        pytest.param("int4", 0.5, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_steps_over_a_cache_are_whole_rows(dtype, bound, pages):
    check_chunks_and_steps(CFG, dtype, bound, pages, n=4)


def test_the_cache_holds_the_indexer_s_keys_and_nothing_unwritten_reaches_a_row():
    params, tokens = params_of(CFG), np.asarray(tokens_of(CFG, 2, 9))
    cache = jl.init_cache(CFG, 2, 16, "float32")
    assert cache.layers[0].v.shape == (2, 16, 1, 8)
    poisoned = dataclasses.replace(cache, layers=jax.tree.map(lambda x: x * jnp.nan, cache.layers))
    lengths = np.array([9, 6])
    want, _ = jl.prefill(CFG, params, tokens, lengths, jl.init_cache(CFG, 2, 16, "float32"))
    got, poisoned = jl.prefill(CFG, params, tokens, lengths, poisoned, chunk=4)
    np.testing.assert_allclose(got, want, atol=1e-5)
    got, _ = jl.decode_step(CFG, params, tokens[:, 0], poisoned)
    assert np.isfinite(got).all()


@pytest.mark.slow
def test_drafts_an_engine_and_offloaded_weights_give_the_same_tokens():
    cfg = CFG.replace(eos_token_ids=())
    lm = LanguageModel(cfg, params_of(cfg), None)
    every_way_generates(lm, np.asarray(tokens_of(cfg, 2, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_an_engine_gives_the_tokens_of_each_request_alone(draft):
    """With prefixes, preemption and NaN in what is nobody's."""
    run_schedule("indexed", engine("indexed", draft=draft), REPEATING)


def test_packed_rows_see_their_own_segment():
    params, tokens = params_of(CFG), np.asarray(tokens_of(CFG, 1, 16))
    ends, segments = (7, 16), np.repeat([0, 1], [7, 9])[None].astype(np.int32)
    hidden = jax.jit(functools.partial(hidden_states, CFG, dtype=jnp.dtype("float32")))
    got = hidden(params, tokens, segments=jnp.asarray(segments))
    begin = 0
    for end in ends:
        want = hidden(params, tokens[:, begin:end])
        np.testing.assert_allclose(got[:, begin:end], want, atol=1e-5)
        begin = end


def test_the_choice_has_no_derivative_and_the_rest_has():
    params, tokens = params_of(CFG), np.asarray(tokens_of(CFG, 1, 9))

    def loss(params: Params) -> jax.Array:
        return jnp.sum(jnp.square(hidden_states(CFG, params, tokens, jnp.dtype("float32"))))

    grads = jax.jit(jax.grad(loss))(params)["layer_0"]["mixer"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert np.abs(grads["kv_a"]["weight"]).max() > 0 == np.abs(grads["index_k"]["weight"]).max()


def test_an_indexer_without_a_latent_of_queries_is_refused():
    with pytest.raises(JaxLlamaError, match=r"^latent\.q_rank = None: is needed by the indexer"):
        CFG.replace(latent=dataclasses.replace(CFG.latent, q_rank=None))

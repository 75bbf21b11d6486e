"""Sparse attention by an indexer: each query reads the keys with the best scores, in every form.

``test_parity`` compares two families with transformers, ``random_options`` their options.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.linear import linear
from jaxllama.model.mixers.latent import indexer
from jaxllama.model.mixers.latent import mix as latent
from jaxllama.model.mixers.latent.indexer import choice
from jaxllama.model.records import whole_rows
from jaxllama.model.stacked import hidden_states
from jaxllama.typing import Params
from pallas_kernels.latent.chosen import chosen_latent_attention
from pallas_kernels.latent.plan import LatentPlan
from pallas_kernels.operands import Columns
from pallas_kernels.rows.rms_norm import rms_norm
from tests.helpers.engine_cases import REPEATING, engine, every_way_generates, run_schedule
from tests.helpers.models import INDEXED, check_chunks_and_steps, params_of, tokens_of
from tests.helpers.parity_cases import their_model

SLOW = pytest.mark.slow
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


def drawn(seed: int) -> ModelConfig:
    """A layer whose indexer and latents have random sizes, with RoPE of either kind."""
    draw = random.Random(seed)
    d_rope = draw.choice((4, 8, 16))
    config = {
        "model_type": draw.choice(("deepseek_v32", "glm_moe_dsa")),
        "vocab_size": 64,
        "hidden_size": draw.choice((32, 48)),
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": draw.choice((12, 20)),
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": d_rope,
        "v_head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "index_n_heads": draw.choice((16, 24, 32)),
        "index_head_dim": d_rope + draw.choice((0, 6, 16)),
        "index_topk": draw.randint(1, 24),
        "rope_parameters": draw.choice(ROPES),
    }
    return config_from_hf({**config, "bos_token_id": 1, "eos_token_id": None}, "tiny")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}
ROPES = (
    {"rope_type": "default", "rope_theta": 1e4},
    {**YARN, "factor": 4.0},
    {**YARN, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7},
)


def their_choice(cfg: ModelConfig, params: Params, tokens: np.ndarray, folder: Path) -> np.ndarray:
    """transformers' places of the keys that the queries of the first layer read."""
    torch = pytest.importorskip("torch")
    path, found = hf.save(folder, cfg, params), []
    model = their_model(path)
    layer = model.model.layers[0].self_attn.indexer
    layer.register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64)))
    return found[0].numpy()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=SLOW) for s in range(3, 50))])
def test_the_choice_is_that_of_transformers(seed: int, tmp_path: Path) -> None:
    cfg = drawn(seed)
    layer, options = cfg.layers[0], cfg.layers[0].mixer
    params = params_of(cfg, seed)
    tokens = np.asarray(tokens_of(cfg, 2, 40, seed))
    seen = np.tile(np.arange(1, 41, dtype=np.int32), (2, 1))
    top_k = options.indexer.top_k

    @jax.jit
    def ours_of(params: Params) -> tuple[jax.Array, jax.Array]:
        p, at = params["layer_0"]["mixer"], whole_rows(layer, 2, 40)
        norm = params["layer_0"]["mixer_norm"]["weight"]
        y = rms_norm(jnp.asarray(params["embed"]["weight"])[tokens], norm, cfg.norm_eps)
        products = [Columns.whole(linear(y, weight)) for weight in latent.inputs(layer, p)]
        heads = latent.turned(
            latent.heads_of(options, p, products), *at.rope.of(options.rope, options.d_rope)
        ).indexed
        return choice(heads.q, heads.weights, heads.key[:, :, 0], seen, top_k)

    chosen, is_chosen = ours_of(params)
    want = their_choice(cfg, params, tokens, tmp_path / "m")
    for row, place in np.ndindex(seen.shape):
        theirs = {int(key) for key in want[row, place] if key <= place}
        ours = np.asarray(chosen)[row, place][np.asarray(is_chosen)[row, place]]
        assert set(ours.tolist()) == theirs and len(ours) == min(top_k, place + 1)


def test_more_keys_than_there_are_is_attention_to_all():
    """The oracle is the form without an indexer; fewer keys give something else."""
    params, tokens = params_of(CFG), np.asarray(tokens_of(CFG, 2, 12))
    lengths = np.full(2, 12, np.int32)
    few, whole = (np.asarray(jl.logits(with_top_k(k), params, tokens, lengths)) for k in (5, 12))
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


@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_by_the_op_of_chosen_latents(pages, monkeypatch):
    """The op's XLA form stands for its kernel, which the model takes where it has a plan."""
    called, sizes = [], {"kv_rank": 512, "d_nope": 4, "d_rope": 4}
    cfg = CFG.replace(
        latent=dataclasses.replace(CFG.latent, **sizes),
        rope=dataclasses.replace(CFG.rope, rotary_dim=4),
    )

    def op(*operands, **named):
        called.append(operands[0].shape[-1])
        return chosen_latent_attention(*operands, **named, implementation="xla")

    monkeypatch.setattr(indexer, "own_plan", lambda find, *operands: LatentPlan(64))
    monkeypatch.setattr(indexer, "chosen_latent_attention", op)
    check_chunks_and_steps(cfg, "float32", 1e-5, pages, n=4)
    assert called and set(called) == {516}


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

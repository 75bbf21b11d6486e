"""Drafts of the checkpoint's own head: its numbers, and the same tokens as without it."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.decoding.drafts import ADAPTIVE, DraftContext, next_token
from jaxllama.decoding.forward import fill_hidden
from jaxllama.decoding.heads import HeadDraft
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from tests.helpers.models import check_same, params_of
from tests.helpers.mtp_cases import CONFIG, HEAD, drafts_of, model, proposed

NEW = 24
SAMPLING = (
    jl.Sampling(),
    jl.Sampling(temperature=0.8, top_p=0.9),
    jl.Sampling(temperature=0.7, repetition_penalty=1.2, logit_bias={7: 2.0}),
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 256, length).tolist() for length in (1, 9, 21)]


def endless() -> LanguageModel:
    """The model without tokens that end an answer."""
    return LanguageModel(CONFIG.replace(eos_token_ids=()), model().params, None)


def test_the_head_is_the_reference(tmp_path) -> None:
    """Logits of three proposals within 1e-4 of the largest, and the tokens, of random weights.

    The prompt is read in chunks, its last two tokens as a pass that verifies a draft.
    """
    pytest.importorskip("torch")
    params, tokens, count = params_of(CONFIG), prompts()[2], 3
    want, chosen = proposed(hf.save(tmp_path / "model", CONFIG, params), tokens, count)
    draft, given = HeadDraft(HEAD), np.asarray([tokens], np.int32)
    sampling = SamplingParams.stack([jl.Sampling()], CONFIG.vocab_size, 0)
    scores: list[jax.Array] = []

    def draw(found, *given):
        jax.debug.callback(scores.append, found.whole[0])
        return next_token(found, *given)

    @jax.jit
    def run(params, given, sampling):
        read = functools.partial(draft.read_prompt, params)
        state, cache = draft.begin(params, 1, 32), jl.init_cache(CONFIG, 1, 32)
        lengths, new = jnp.asarray([len(tokens) - 2], jnp.int32), given[:, -2:]
        last, cache, state = fill_hidden(
            CONFIG, params, given[:, :-2], lengths, cache, 8, read, state
        )
        _, proposal = jl.verify_step(CONFIG, params, new, jnp.asarray([1], jnp.int32), cache)
        assert proposal.hidden is not None
        both = jnp.concatenate([last.x[:, None], proposal.hidden.x[:, :1]], axis=1)
        hidden = dataclasses.replace(last, x=both)
        state = draft.read(params, state, new, hidden, jnp.asarray([2], jnp.int32))
        size, wanted = jnp.asarray([len(tokens)]), jnp.asarray([count], jnp.int32)
        ask = DraftContext(given, size, wanted, count, sampling, None, draw)
        found = draft.propose(params, state, ask)
        logits = HEAD.scores(params, state.last).logits
        return logits, state.cache.lengths, found.tokens, found.lengths

    got, known, found, lengths = run(params, given, sampling)
    assert known.tolist() == [len(tokens) - 1]
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-4 * np.abs(want).max())
    assert found[0].tolist() == chosen and lengths.tolist() == [count]
    jax.effects_barrier()
    np.testing.assert_allclose(scores, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("draft_tokens", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_tokens_are_those_without_a_draft(draft_tokens) -> None:
    """The greedy row drafts and accepts what the head, read anew at each turn, would have it."""
    lm = endless()
    options = {"seed": [0, 1, 2], "chunk": 8}
    want = lm.generate(prompts(), NEW, SAMPLING, **options)
    got = lm.generate(prompts(), NEW, SAMPLING, draft="mtp", draft_tokens=draft_tokens, **options)
    check_same(got, want, 1e-4)
    known = drafts_of(
        prompts()[0], want[0].tokens, draft_tokens or ADAPTIVE, written=1, adapts=not draft_tokens
    )
    assert (got[0].drafted, got[0].accepted) == known
    assert 0 < got[0].accepted < sum(one.accepted for one in got)


def test_a_model_without_a_head_says_so() -> None:
    cfg = CONFIG.replace(mtp_layers=0)
    lm = LanguageModel(cfg, {}, None, executor=model().executor)
    with pytest.raises(JaxLlamaError, match="has no head for multi-token prediction"):
        lm.drafting("mtp", 0)
    assert model().first_layers(1).config.mtp_layers == 0


def test_the_head_s_tensors_are_loaded_and_saved(tmp_path) -> None:
    """Those of another shape of head are left out, and a warning says so."""
    params = params_of(CONFIG)
    directory = hf.save(tmp_path / "model", CONFIG, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg, loaded = hf.load(directory)
    assert cfg.mtp_layers == 1 == hf.read_config(directory).mtp_layers
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    jax.tree.map(
        np.testing.assert_array_equal, hf.load(hf.save(tmp_path / "b", cfg, loaded))[1], params
    )

"""Drafts of an EAGLE-3 head: its numbers, its folder, and the same tokens as without it."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import eagle3
from jaxllama.checkpoints.hf import load as hf
from jaxllama.decoding.drafts import DraftContext, next_token
from jaxllama.decoding.forward import fill_hidden
from jaxllama.decoding.heads import HeadDraft
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model import verification
from pallas_kernels.qtensor import tree_bytes
from tests.helpers.eagle_cases import (
    CONFIG,
    IDS,
    OWN,
    TAPS,
    drafter,
    model,
    proposed,
    states,
    tensors,
    write,
)
from tests.helpers.models import check_same

NEW = 24
SAMPLING = (
    jl.Sampling(),
    jl.Sampling(temperature=0.8, top_p=0.9),
    jl.Sampling(temperature=0.7, repetition_penalty=1.2, logit_bias={5: 30.0, 9: 29.0}),
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 256, length).tolist() for length in (1, 9, 21)]


def endless(**options) -> LanguageModel:
    """The model without tokens that end an answer."""
    cfg = CONFIG.replace(eos_token_ids=())
    return LanguageModel(cfg, model().params, None, **options)


@pytest.mark.parametrize("norm_residual", [False, True])
def test_proposals_are_those_of_the_published_code(tmp_path, norm_residual) -> None:
    """Logits of four proposals within 1e-4 of the largest, and the tokens, of random weights.

    The prompt is read in chunks, its last two tokens as a pass that verifies a draft.
    """
    pytest.importorskip("torch")
    tokens, count = prompts()[2], 4
    base = hf.save(tmp_path / "model", CONFIG, model().params)
    tapped, embedding = states(base, tokens[:-1])
    want, chosen = proposed(tapped, embedding, tokens, count, norm_residual=norm_residual)
    folder = write(tmp_path / "draft", {"norm_before_residual": norm_residual})
    found = jl.load_drafter(folder, np.float32)
    source = model().drafting(found, count)
    assert source is not None
    draft, cfg = source.plan.draft, CONFIG.replace(taps=TAPS)
    assert isinstance(draft, HeadDraft) and draft.taps == TAPS
    sampling = SamplingParams.stack([jl.Sampling()], CONFIG.vocab_size, 0)
    scores: list[jax.Array] = []

    def draw(found, *given):
        jax.debug.callback(scores.append, found.whole[0])
        return next_token(found, *given)

    @jax.jit
    def run(params, own, given, sampling):
        own = draft.weights(params, own)
        state, cache = draft.begin(own, 1, 32), jl.init_cache(CONFIG, 1, 32)
        lengths, new = jnp.asarray([len(tokens) - 2], jnp.int32), given[:, -2:]
        read = functools.partial(draft.read_prompt, own)
        last, cache, state = fill_hidden(cfg, params, given[:, :-2], lengths, cache, 8, read, state)
        hidden, _ = verification.propose(cfg, params, new, jnp.asarray([1], jnp.int32), cache)
        join = functools.partial(jnp.concatenate, axis=1)
        both = jax.tree.map(lambda a, b: join([a[:, None], b[:, :1]]), last, hidden)
        state = draft.read(own, state, new, both, jnp.asarray([2], jnp.int32))
        size, wanted = jnp.asarray([len(tokens)]), jnp.asarray([count], jnp.int32)
        ask = DraftContext(given, size, wanted, count, sampling, None, draw)
        return draft.propose(own, state, ask).tokens, state.cache.lengths

    given = np.asarray([tokens], np.int32)
    drafted, known = run(model().params, source.params, given, sampling)
    jax.effects_barrier()
    assert known.tolist() == [len(tokens) - 1] and drafted[0].tolist() == chosen
    got = np.stack(scores)
    np.testing.assert_allclose(got[:, IDS], want, rtol=0, atol=1e-4 * np.abs(want).max())
    assert (np.delete(got, IDS, axis=1) == -np.inf).all()


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_are_those_without_a_draft(deterministic) -> None:
    """Rows draft and accept; a deterministic model's logprobs are the same to the bit."""
    lm, options = endless(deterministic=deterministic), {"seed": [0, 1, 2]}
    options |= {} if deterministic else {"chunk": 8}
    want = lm.generate(prompts(), NEW, SAMPLING, **options)
    got = lm.generate(prompts(), NEW, SAMPLING, draft=drafter(), draft_tokens=3, **options)
    check_same(got, want, 0 if deterministic else 1e-5)
    assert 0 < got[2].accepted < sum(one.drafted for one in got)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_has_no_loop_and_where_greedy_only_the_head_s_vocabulary(temperature) -> None:
    """Three tokens of two rows; the one loop chooses the length."""
    source = model().drafting(drafter(), 3)
    assert source is not None
    draft, three = source.plan.draft, jnp.full((2,), 3, jnp.int32)
    sampling = SamplingParams.stack([jl.Sampling(temperature)] * 2, CONFIG.vocab_size, 0)
    own = draft.weights(model().params, source.params)

    def tokens(own, state, size):
        text = jnp.zeros((2, 32), jnp.int32)
        ask = DraftContext(text, size, size, 3, sampling, None)
        return draft.propose(own, state, ask).tokens

    program = str(jax.make_jaxpr(tokens)(own, draft.begin(own, 2, 32), three))
    assert program.count("while[") == 1
    assert (f"f32[2,{CONFIG.vocab_size}]" in program) == (temperature > 0)


def test_a_quantized_head_s_drafts_change_no_token(tmp_path) -> None:
    folder = write(tmp_path / "draft")
    rounded = jl.load_drafter(folder, np.float32, "w4a16-g32,down=w8a16")
    assert tree_bytes(rounded.params) < 0.7 * tree_bytes(drafter().params)
    want, got = (
        endless().generate(prompts(), NEW, draft=draft, draft_tokens=count)
        for draft, count in ((None, 0), (rounded, 3))
    )
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert sum(one.accepted for one in got) > 0


def test_a_folder_is_read_and_written(tmp_path) -> None:
    """Under other tools' names, too; what is written has the tensors that were read."""
    from safetensors.numpy import load_file, save_file

    folder = write(tmp_path / "a")
    again = eagle3.save(tmp_path / "b", jl.load_drafter(folder, np.float32))
    for name, value in tensors().items():
        np.testing.assert_array_equal(load_file(again / "model.safetensors")[name], value)
    read = jl.load_drafter(again, np.float32)
    assert read.head.taps == drafter().head.taps
    assert dataclasses.replace(read.head.model, name="") == dataclasses.replace(
        drafter().head.model, name=""
    )
    other = shutil.copytree(folder, tmp_path / "c")
    renamed = {
        name if name in ("d2t", "t2d") else f"model.{name}".replace("midlayer", "layers.0"): value
        for name, value in tensors().items()
    }
    renamed["lm_head.weight"] = renamed.pop("model.lm_head.weight")
    embedding = np.asarray(model().params["embed"]["weight"])
    save_file(renamed | {"model.embed_tokens.weight": embedding}, other / "model.safetensors")
    with_embedding = jl.load_drafter(other, np.float32)
    np.testing.assert_array_equal(with_embedding.params["embed"]["weight"], embedding)
    jax.tree.map(
        np.testing.assert_array_equal,
        {k: v for k, v in with_embedding.params.items() if k != "embed"},
        drafter().params,
    )


CONFIGS = {
    "num_hidden_layers": (2, "must be 1"),
    "fc_norm": (True, "fc_norm = True"),
    "rope_theta": (-1.0, "rope_theta"),
    "eagle_config": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "must be three layers"),
    "draft_vocab_size": (61, r"'lm_head.weight': shape \[60, 32\]"),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_folder_that_does_not_fit_says_so(tmp_path, key) -> None:
    value, message = CONFIGS[key]
    with pytest.raises(JaxLlamaError, match=message):
        jl.load_drafter(write(tmp_path / "draft", {key: value}))


def test_tokens_of_a_head_that_the_model_has_not(tmp_path) -> None:
    from safetensors.numpy import save_file

    folder = write(tmp_path / "draft")
    wrong = {**tensors(), "d2t": np.full(OWN, 250)}
    save_file(wrong, folder / "model.safetensors")
    with pytest.raises(JaxLlamaError, match="not different tokens below 256"):
        jl.load_drafter(folder)


def test_a_model_that_a_head_does_not_fit_says_so(tmp_path) -> None:
    with pytest.raises(JaxLlamaError, match="a head that drafts for a model: name its folder as"):
        jl.load(write(tmp_path / "draft"))
    with pytest.raises(JaxLlamaError, match="no EAGLE-3 head"):
        jl.load_drafter(hf.save(tmp_path / "model", CONFIG, model().params))
    small = LanguageModel(CONFIG.replace(n_layers=2), {}, None, executor=model().executor)
    with pytest.raises(JaxLlamaError, match=r"before layers \[1, 2, 3\], but tiny-eagle has 2"):
        dataclasses.replace(small, params=model().params).drafting(drafter(), 3)
    words = CONFIG.replace(vocab_size=97)
    with pytest.raises(JaxLlamaError, match="for vocab_size 256, but tiny-eagle has 97"):
        dataclasses.replace(model(), config=words).drafting(drafter(), 3)
    config = json.loads(
        (write(tmp_path / "bare", {"eagle_config": {}}) / "config.json").read_text()
    )
    assert config["eagle_config"] == {}
    bare = jl.load_drafter(tmp_path / "bare", np.float32)
    source = model().drafting(bare, 3)
    assert source is not None and source.plan.draft.taps == (2, 2, 1)

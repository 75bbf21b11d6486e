"""Drafts change how soon tokens come, never which."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.decoding import drafts
from jaxllama.language_model import LanguageModel
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES, HYBRIDS, params_of

NEW = 16
SAMPLING = (
    jl.Sampling(),
    jl.Sampling(temperature=0.8),
    jl.Sampling(temperature=0.9, top_p=0.8, min_p=0.02),
    jl.Sampling(
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias={7: 2.0, 11: -float("inf")},
    ),
)


# The first layer is a draft of mqa-window's; of the others a layer of each kind is enough.
CONFIGS = {name: FAMILIES[name].first_layers(1) for name in ("gqa", "gla-conv-groups")} | HYBRIDS
DELTA = ("delta", "kda", "qwen3.5", "kimi")


def model(family: str, **kwargs) -> LanguageModel:
    cfg = CONFIGS[family] if family in CONFIGS else FAMILIES[family]
    return LanguageModel(cfg, params_of(cfg), None, **kwargs)


def always_wrong(lm: LanguageModel) -> LanguageModel:
    """Its logits are the model's one token further."""
    head = lm.params["head"] if "head" in lm.params else lm.params["embed"]
    params = {**lm.params, "head": {"weight": np.roll(head["weight"], 1, axis=0)}}
    return dataclasses.replace(lm, params=params)


DRAFTS = {
    "ngram": lambda lm: "ngram",
    "always-right": lambda lm: lm,
    "first-layer": lambda lm: lm.first_layers(1),
    "always-wrong": always_wrong,
}


def prompts_of(count: int, vocab: int = 97) -> list[list[int]]:
    """Random ones, every other with a part that comes again."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, vocab, 3 + index % 11).tolist() for index in range(count)]
    return [row * (1 + index % 2) for index, row in enumerate(rows)]


def check(lm, draft, draft_tokens, count=4, **options):
    """The generations with the draft, which are those without it."""
    prompts, sampling = prompts_of(count), [SAMPLING[i % len(SAMPLING)] for i in range(count)]
    options = {"seed": list(range(count)), **options}
    # Sums in another order move a cache's code now and then: one of int4 is 4e-4 of a logprob.
    bits_may_differ = options.get("kv_dtype", "float32") != "float32" and not lm.deterministic
    want = lm.generate(prompts, NEW, sampling, **options)
    got = lm.generate(prompts, NEW, sampling, draft=draft, draft_tokens=draft_tokens, **options)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        if not bits_may_differ:
            atol = 0 if lm.deterministic else 1e-4
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
        assert other.drafted == other.accepted == 0 <= one.accepted <= one.drafted
    return got


@pytest.mark.parametrize(
    ("family", "draft", "draft_tokens"),
    [
        pytest.param("gqa", "ngram", 3, marks=pytest.mark.core),
        *slow(
            ("gqa", "always-right", 0),
            ("mqa-window", "first-layer", 3),
            ("gla-conv-groups", "always-wrong", 2),
            ("hybrid", "always-right", 3),
            ("delta", "always-wrong", 2),
            ("kda", "always-right", 3),
            ("qwen3.5", "first-layer", 3),
            ("kimi", "always-right", 0),
        ),
    ],
)
def test_tokens_are_those_without_a_draft(family, draft, draft_tokens):
    lm = model(family)
    got = check(lm, DRAFTS[draft](lm), draft_tokens)
    for out, sampling in zip(got, SAMPLING, strict=True):
        if draft == "always-right" and out.finish_reason == "length":
            assert out.accepted == out.drafted > len(out.tokens) // 2
        if draft == "always-wrong" and sampling.temperature == 0:
            assert out.accepted == 0 < out.drafted


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "family", ["gqa", "mqa-window", "gla", "gla-conv-groups", "hybrid", *DELTA]
)
def test_300_prompts(family, kv_dtype, draft):
    if family.startswith(("gla", "kda")) and kv_dtype != "float32":
        pytest.skip("no keys and values")
    for deterministic in (False, True) if kv_dtype != "float32" else (False,):
        lm = model(family, deterministic=deterministic)
        for draft_tokens in (0, 4):
            check(lm, DRAFTS[draft](lm), draft_tokens, count=300, kv_dtype=kv_dtype)


def test_a_pass_may_be_wider_than_a_draft():
    """A deterministic model's passes have a power of two tokens."""
    drafted = drafts.Drafted(np.array([[5, 6, 7, 8]], np.int32), np.array([4], np.int32), None)
    assert [drafted.following(width).tolist() for width in (1, 4, 5, 8)] == [
        [[5]],
        [[5, 6, 7, 8]],
        [[5, 6, 7, 8, 0]],
        [[5, 6, 7, 8, 0, 0, 0, 0]],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gqa", "gla-conv-groups", *DELTA])
def test_a_deterministic_model_gives_the_same_bits(family):
    lm = model(family, deterministic=True)
    prompts, sampling = prompts_of(4), SAMPLING[1]
    want = lm.generate(prompts, NEW, sampling)
    got = lm.generate(prompts, NEW, sampling, draft=lm, draft_tokens=7)
    assert [(out.tokens, out.logprobs) for out in got] == [
        (out.tokens, out.logprobs) for out in want
    ]
    # A stop ends a row within a draft.
    to_the_end = [out for out in got if out.finish_reason == "length"]
    assert to_the_end and all(out.accepted == out.drafted > 0 for out in to_the_end)


def test_an_ngram_follows_the_longest_suffix_where_it_stood_last():
    text = np.zeros((4, 16), np.int32)
    rows = [[1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [7, 8, 7, 8, 7, 8], [1, 2, 3, 4, 5, 6], [4, 4]]
    for index, row in enumerate(rows):
        text[index, : len(row)] = row
    size = np.asarray([len(row) for row in rows])

    def proposed(draft: drafts.NGram):
        def run(text, size):
            ask = drafts.DraftContext(text, size, jnp.full(4, 4, jnp.int32), 4, None, None)
            return draft.propose(None, None, ask)

        return jax.jit(run)(text, size)

    drafted = proposed(drafts.NGram())
    np.testing.assert_array_equal(drafted.lengths, [4, 4, 0, 0])
    np.testing.assert_array_equal(drafted.tokens[:2], [[9, 5, 2, 3], [7, 8, 7, 8]])
    rows[0][:3] = 5, 5, 5  # then the longest are two tokens
    text[0, : len(rows[0])] = rows[0]
    drafted = proposed(drafts.NGram(unsure=True))
    np.testing.assert_array_equal(drafted.lengths, [3, 4, 0, 0])
    np.testing.assert_array_equal(drafted.tokens[0, :3], [8, 1, 2])


def test_a_wrong_draft_is_asked_ever_more_seldom():
    after = jax.jit(drafts.Pace.after, static_argnums=3)
    pace, turns = drafts.Pace(*(np.asarray([value]) for value in (3, 0, 1))), []
    for _ in range(64):
        drafted = np.where(np.asarray(pace.wait) > 0, 0, pace.tokens)
        turns.append(int(drafted[0]))
        pace = after(pace, drafted, 0 * drafted, 7)
    assert sum(turns) == 8 and sum(count > 0 for count in turns) == 6
    for _ in range(80):
        drafted = np.where(np.asarray(pace.wait) > 0, 0, pace.tokens)
        pace = after(pace, drafted, drafted, 7)
    assert int(pace.tokens[0]) == 7 and int(pace.pause[0]) == 1


def test_stop_strings_and_streams_do_not_see_the_draft():
    cfg = CONFIGS["gqa"].replace(vocab_size=256, eos_token_ids=())
    lm = LanguageModel(cfg, params_of(cfg), Tokenizer.byte_level())
    options = {"max_new_tokens": NEW, "sampling": SAMPLING[1]}
    plain = lm.generate(["abcabc"], **options)[0]
    pieces = list(lm.stream("abcabc", **options, draft=lm, draft_tokens=3))
    assert "".join(pieces) == plain.text and len(pieces) > 1
    stop = plain.text[5:8]
    want = lm.generate(["abcabc"], stop=stop, **options)[0]
    got = lm.generate(["abcabc"], stop=stop, **options, draft=lm, draft_tokens=3)[0]
    assert (got.text, got.tokens) == (want.text, want.tokens) and got.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft": "bigram"},
            'draft = \'bigram\': expected "ngram", "mtp", a LanguageModel or a Dra',
        ),
        ({"draft": "ngram", "draft_tokens": 16}, "draft_tokens = 16: must be from 0"),
        ({"draft": "ngram", "draft_tokens": -1}, "draft_tokens = -1: must be from 0"),
        ({"draft_tokens": 2}, "draft_tokens = 2 needs a draft"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(jl.JaxLlamaError, match=message):
        model("gqa").generate([[5, 6]], 4, **options)


def test_a_draft_has_the_same_tokens():
    lm, cfg = model("gqa"), FAMILIES["gqa"].replace(vocab_size=64)
    with pytest.raises(jl.JaxLlamaError, match="draft: tiny has another tokenizer than tiny"):
        lm.generate([[5, 6]], 4, draft=LanguageModel(cfg, params_of(cfg), None))
    with pytest.raises(jl.JaxLlamaError, match="layers = 3: tiny has 1"):
        lm.first_layers(3)


def test_the_first_layers_keep_their_kinds():
    cfg = FAMILIES["gqa"].replace(
        n_layers=4,
        layer_types=("attention",) * 4,
        sliding_window=5,
        window_layers=(1, 3),
        nope_layers=(3,),
    )
    assert cfg.first_layers(1).sliding_window is None
    for count in (2, 3):
        first = cfg.first_layers(count)
        assert [layer.window for layer in first.layers] == [None, 5, None][:count]
    assert cfg.first_layers(3).nope_layers == () and cfg.first_layers(4) == cfg

"""Logprobs of prompts, as lm-eval asks for them.

``benchmarks/peers/lm_eval_over_http.py`` runs lm-eval itself.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from jaxllama.engine.scoring import Scorer
from tests.helpers.cases import on_demand
from tests.helpers.http_server import NAME

on_demand("openai")
ENGINE = {"max_len": 400}
TEXT = "Once upon a time"


def values_of(lm, row: list[int]) -> np.ndarray:
    """Log probabilities ``[T, V]`` of what follows each token."""
    padded = np.zeros((1, 320), np.int32)  # one shape for all
    padded[0, : len(row)] = row
    scores = np.asarray(lm.logits(padded, [len(row)])[0, : len(row)], np.float64)
    scores -= scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


@pytest.mark.parametrize("length", [1, 2, 16, 300])
def test_scores_are_the_models_own(lm, length):
    """Longer than a block of positions too; padded and in blocks, so up to float32's rounding."""
    row = np.random.default_rng(length).integers(3, 256, length).tolist()
    got, want = Scorer(lm)(row, 3), values_of(lm, row)
    assert got.tokens == tuple(row) and got.logprobs[0] is got.ranks[0] is got.tops[0] is None
    for place, token in enumerate(row[1:]):
        values = want[place]
        np.testing.assert_allclose(got.logprobs[place + 1], values[token], atol=1e-4)
        assert got.ranks[place + 1] == 1 + np.sum(values > values[token])
        ids, best = zip(*got.tops[place + 1], strict=True)
        np.testing.assert_allclose(best, np.sort(values)[::-1][:3], atol=1e-4)
        np.testing.assert_allclose(values[list(ids)], best, atol=1e-4)
    assert len(got.logprobs) == len(got.tops) == length


@pytest.mark.core
def test_a_prompt_alone_is_scored(client, engine, lm):
    asked = len(engine.requests)
    ask = {"model": NAME, "prompt": [TEXT, "ab"], "max_tokens": 0, "echo": True, "logprobs": 2}
    got = client.completions.create(**ask)
    assert len(engine.requests) == asked, "nothing is written"
    assert got.usage.completion_tokens == 0 and got.usage.prompt_tokens == len(TEXT) + 2
    [first, second] = got.choices
    assert (first.text, second.text, first.finish_reason) == (TEXT, "ab", "length")
    assert first.logprobs.tokens == list(TEXT)
    assert first.logprobs.text_offset == list(range(len(TEXT)))
    want = values_of(lm, list(TEXT.encode()))
    mine = [want[place, token] for place, token in enumerate(TEXT.encode()[1:])]
    assert first.logprobs.token_logprobs[0] is first.logprobs.top_logprobs[0] is None
    np.testing.assert_allclose(first.logprobs.token_logprobs[1:], mine, atol=1e-4)
    best = [max(top.values()) for top in first.logprobs.top_logprobs[1:]]
    np.testing.assert_allclose(best, want[:-1].max(1), atol=1e-4)
    [chunk] = [c for c in client.completions.create(**{**ask, "prompt": TEXT}, stream=True)][:1]
    assert chunk.choices[0].logprobs == first.logprobs


def test_a_prompt_and_what_follows_are_one_text(client):
    ask = {"model": NAME, "prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}
    [choice] = client.completions.create(**ask, n=1).choices
    [alone] = client.completions.create(**{**ask, "echo": False}).choices
    assert choice.text == TEXT + alone.text
    assert choice.logprobs.tokens == [*TEXT, *alone.logprobs.tokens]
    assert choice.logprobs.token_logprobs[len(TEXT) :] == alone.logprobs.token_logprobs
    assert choice.logprobs.text_offset == list(range(len(TEXT) + 4))
    assert len(choice.logprobs.top_logprobs) == len(TEXT) + 4
    chunks = [c.choices[0] for c in client.completions.create(**ask, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for key, want in choice.logprobs.model_dump().items():
        assert [value for chunk in chunks for value in getattr(chunk.logprobs, key)] == want


def test_prompt_logprobs_and_token_ids_as_vllm_has_them(client, lm):
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    ask = {"model": NAME, "prompt": [97, 98, 99], "max_tokens": 2, "seed": 1}
    choice = client.completions.create(**ask, n=2, extra_body=extra).choices[1]
    first, *rest = choice.prompt_logprobs
    assert first is None and len(rest) == 2
    want = values_of(lm, [97, 98, 99])
    for place, (token, entries) in enumerate(zip((98, 99), rest, strict=True)):
        mine = entries[str(token)]
        np.testing.assert_allclose(mine["logprob"], want[place, token], atol=1e-4)
        assert mine["decoded_token"] == chr(token)
        assert mine["rank"] == 1 + np.sum(want[place] > want[place, token])
        assert {str(want[place].argmax()), str(token)} == set(entries)
    assert choice.prompt_token_ids == [97, 98, 99]
    assert bytes(choice.token_ids).decode() == choice.text
    chunks = client.completions.create(**ask, stream=True, extra_body={"return_token_ids": True})
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert bytes(ids).decode() == client.completions.create(**ask).choices[0].text
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.prompt_logprobs) == len("<user>hi\n<assistant>")

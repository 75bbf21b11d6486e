"""Grammars: the tokens are those of one mask a token, and forced ones take no look of the host."""

from __future__ import annotations

import json

import pytest

import jaxllama as jl
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.options import ResolvedOptions
from jaxllama.serving.engine.request import Grammar, Request
from tests.helpers.engine_cases import OPTIONS, check_answer, model

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["x", "yz"]}, "employed": {"type": "boolean"}},
    "required": ["first_name", "employed"],
    "additionalProperties": False,
}
REQUESTS = (
    Request("json", tuple(b"one"), 60, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    Request("drawn", tuple(b"two"), 60, jl.Sampling(temperature=1.0, seed=3, presence_penalty=0.5),
            grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    Request("word", tuple(b"three"), 30, grammar=Grammar("regex", "the only answer"), logprobs=2),
    Request("cut", tuple(b"four"), 9, grammar=Grammar("regex", "(a|b)cdefghijklmnop")),
    Request("least", tuple(b"five"), 24, jl.Sampling(temperature=1.0, seed=5), min_tokens=9,
            grammar=Grammar("regex", "ab[cd]{0,3}e?")),
    Request("free", tuple(b"abababab"), 24, ignore_eos=True),
)  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("llama", None),
        pytest.param("hybrid", "ngram", marks=pytest.mark.slow),
        pytest.param("llama", "first", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_mask_a_token(family, draft, monkeypatch):
    # Decode programs of one size, which halves what is compiled; test_engine has them all.
    monkeypatch.setattr(ResolvedOptions, "sizes", property(lambda options: (options.max_slots,)))
    eng = Engine(
        model(family),
        **{**OPTIONS, "cache_tokens": 96},
        draft=model(family).first_layers(1) if draft == "first" else draft,
    )
    events = eng.generate(REQUESTS)
    for request in REQUESTS:
        check_answer(family, request, events[request.id], 1e-4)
    assert eng.stats().preemptions > 0
    assert [event.finish_reason for event in events["cut"]][-1] == "length"
    answer = "".join(event.text for event in events["json"])
    assert json.loads(answer).keys() == SCHEMA["properties"].keys()
    assert all(len(event.top_logprobs) == len(event.tokens) for event in events["word"])
    # Forced tokens take no look of the host: as many a call as drafts, call after call.
    again = eng.generate([REQUESTS[2]])["word"]
    assert "".join(event.text for event in again) == "the only answer"
    assert [len(event.tokens) for event in again] == ([15] if draft else [3] * 5)

"""Ollama's API: the same answers in its lines."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from jaxllama import __version__
from jaxllama.serving.api.schemas import to_json
from jaxllama.serving.http.ollama import OllamaAnswer
from jaxllama.serving.tools.parts import AnswerPart
from tests.helpers.fake_engine import says
from tests.helpers.http_server import NAME, client, serving, tiny_model
from tests.serving.http.test_tools import TOOLS, tokenizer

THINK = "{% if False %}<think></think>{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
ENGINE = {"max_len": 2048}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tokenizer("hermes", THINK))


@pytest.fixture(scope="module")
def http(lm, engine):
    with serving(lm, engine) as url, client(url) as http:
        yield http


def test_a_conversation_whole_and_in_lines(http, engine, lm):
    engine.answer = says(lm.tokenizer, f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}}
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "keep_alive": "5m"}
    whole = http.post("/api/chat", json={**body, "stream": False}).json()
    assert whole["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "thinking": "Hm.",
        "tool_calls": [call],
    }
    assert whole["done"] and whole["done_reason"] == "stop" and whole["model"] == NAME
    assert whole["eval_count"] > 10 and whole["prompt_eval_count"] > 0
    answer = http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in lines) == whole["message"][name]
    assert [c for line in lines for c in line["message"].get("tool_calls", ())] == [call]

    said = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "cold", "tool_name": "weather"},
    ]
    engine.answer = says(lm.tokenizer, "It is cold.")
    again = http.post("/api/chat", json={**body, "messages": said, "stream": False}).json()
    assert again["message"]["content"] == "It is cold."
    assert "<tool weather>cold" in bytes(engine.requests[-1].prompt).decode()


def test_prompts_options_and_formats(http, engine, lm):
    engine.answer = says(lm.tokenizer, "yes it is")
    options = {"num_predict": 3, "temperature": 0.5, "top_k": 7, "seed": 5, "num_ctx": 99}
    body = {"model": NAME, "prompt": "hi", "stream": False}
    cut = http.post("/api/generate", json={**body, "system": "Be brief.", "options": options})
    assert cut.json()["response"] == "yes" and cut.json()["done_reason"] == "length"
    request = engine.requests[-1]
    assert bytes(request.prompt).decode().startswith("<system>Be brief.\n<user>hi")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 5)
    http.post("/api/generate", json={**body, "raw": True, "options": {"num_predict": -1}})
    assert engine.requests[-1].prompt == tuple(b"hi")
    assert engine.requests[-1].max_new_tokens == 2046
    http.post("/api/generate", json={**body, "format": {"type": "object"}})
    assert engine.requests[-1].grammar is not None


def test_models_version_and_errors(http):
    assert [one["name"] for one in http.get("/api/tags").json()["models"]] == [NAME]
    assert http.get("/api/version").json() == {"version": __version__}
    body = {"model": NAME, "messages": USER}
    for fields, status, said in (
        ({"model": "other"}, 404, "does not exist"),
        ({"messages": [{**USER[0], "images": ["aa"]}]}, 400, "images are not read"),
        ({"options": {"mirostat": 1}}, 400, "'mirostat' is not here"),
        ({"options": {"temperature": "hot"}}, 400, "temperature"),
        ({"format": "xml"}, 400, "format"),
    ):
        answer = http.post("/api/chat", json={**body, **fields})
        assert answer.status_code == status and said in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"city": "two\nlines"}', {"city": "two\nlines"}),
        ("[1]", {}),
        ("null", {}),
        (r'{"city": "\ud800"}', {}),
        ('{"a":' * 252 + "1" + "}" * 252, {}),
        ('{"city', {}),
    ],
    ids=["line", "list", "null", "surrogate", "deep", "cut"],
)
def test_arguments_are_an_object_that_can_be_sent(text, want):
    run: Any = SimpleNamespace(call=SimpleNamespace(reading=None, model=NAME))
    answer = OllamaAnswer(run, True)
    answer._take(AnswerPart("call", "weather", 0))
    answer._take(AnswerPart("arguments", text, 0))
    [message] = answer._end_call()
    assert message["tool_calls"] == [{"function": {"name": "weather", "arguments": want}}]
    assert to_json(answer._line(message, {}))

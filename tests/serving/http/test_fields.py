"""Fields of other servers' APIs: done, or refused by name, at every endpoint that writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from jaxllama.serving.api import bodies, other_fields
from jaxllama.serving.api.bodies import Chat, Completion, Embedding, StreamOptions
from jaxllama.serving.api.response_bodies import Responses
from jaxllama.serving.api.schemas import ApiError
from tests.helpers.http_server import NAME, TEMPLATE, byte_tokenizer, client, serving, tiny_model

MAX_LEN = 96
ROOTS = {
    "/v1/completions": {"prompt": "Once upon"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once upon"}]},
    "/v1/responses": {"input": "Once upon"},
}
COMPLETION, CHAT, RESPONSES = ROOTS
WITH_THINKING = "{% if enable_thinking %}<think>{% endif %}{# </think> #}"


@pytest.fixture(scope="module")
def http(engine):
    lm = tiny_model(byte_tokenizer(TEMPLATE + WITH_THINKING))
    with serving(lm, engine) as url, client(url) as http:
        yield http


def ask(http, path: str, fields: dict[str, Any]):
    """The most tokens of the answer are 8, unless ``fields`` say so."""
    limit = {"max_output_tokens": 8} if path == RESPONSES else {"max_tokens": 8}
    if fields.keys() & {"n_predict"}:
        limit = {}
    return http.post(path, json={"model": NAME, "seed": 1, **ROOTS[path], **limit, **fields})


EVERYWHERE = (COMPLETION, CHAT, RESPONSES)
# (fields, where they are done, what a request then has); elsewhere they are refused.
DONE = {
    "bad_words": (
        {"bad_words": ["no", 'é"']},
        EVERYWHERE,
        lambda r: "& ~(ANY (" in r.grammar.source,
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [97, 98]},
        EVERYWHERE,
        lambda r: r.allowed_token_ids == (97, 98),
    ),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 3},
        EVERYWHERE,
        lambda r: len(r.prompt) == 3,
    ),
    "include_stop_str_in_output": (
        {"include_stop_str_in_output": True},
        EVERYWHERE,
        lambda r: r.include_stop,
    ),
    "grammar": (
        {"grammar": 'root ::= "a"'},
        EVERYWHERE,
        lambda r: "root ::= " in r.grammar.source,
    ),
    "n_predict": ({"n_predict": 5}, (COMPLETION, CHAT), lambda r: r.max_new_tokens == 5),
    "enable_thinking": (
        {"enable_thinking": True},
        (CHAT, RESPONSES),
        lambda r: bytes(r.prompt).endswith(b"<think>"),
    ),
    "return_token_ids": ({"return_token_ids": True}, (COMPLETION, CHAT), lambda r: True),
}
REFUSED = {name: "asked" for name in other_fields.ELSEWHERE}
# Fields of one endpoint at another, each with a word of its answer.
ELSEWHERE = [
    (COMPLETION, {"messages": ROOTS[CHAT]["messages"]}, "/v1/chat/completions"),
    (COMPLETION, {"tools": [{"type": "function", "function": {"name": "f"}}]}, COMPLETION),
    (COMPLETION, {"max_completion_tokens": 4}, "max_tokens"),
    (COMPLETION, {"chat_template_kwargs": {"a": 1}}, COMPLETION),
    (CHAT, {"echo": True}, CHAT),
    (CHAT, {"prompt": "x"}, "messages"),
    (RESPONSES, {"stop": ["x"]}, RESPONSES),
    (RESPONSES, {"max_tokens": 4}, "max_output_tokens"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "text.format"),
    (RESPONSES, {"logit_bias": {"1": 2}}, RESPONSES),
]


@pytest.mark.parametrize("path", ROOTS)
@pytest.mark.parametrize("name", [*DONE, *REFUSED])
def test_a_field_is_done_or_refused_by_name(http, engine, name, path):
    asked = len(engine.requests)
    fields, where, has = DONE.get(name, ({name: REFUSED.get(name)}, (), None))
    reply = ask(http, path, fields)
    if path in where:
        assert reply.status_code == 200, reply.text
        assert len(engine.requests) == asked + 1 and has(engine.requests[-1])
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == name and error["code"] == "unsupported"
    assert error["message"].startswith(f"{name}: ") and len(error["message"]) > len(name) + 12
    assert len(engine.requests) == asked
    neutral = other_fields.ELSEWHERE.get(name, ("", ()))[1]
    for value in (None, False, [], *neutral):
        assert ask(http, path, {name: value}).status_code == 200, value


@pytest.mark.parametrize(("path", "fields", "says"), ELSEWHERE)
def test_a_field_of_another_endpoint_is_refused(http, path, fields, says):
    reply = ask(http, path, fields)
    [name] = fields
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name
    assert says in reply.json()["error"]["message"]


WRONG = [
    (CHAT, {"bad_words": ["x"], "grammar": 'root ::= "a"'}, "bad_words"),
    (CHAT, {"allowed_token_ids": [97], "grammar": 'root ::= "a"'}, "allowed_token_ids"),
    (COMPLETION, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETION, {"max_tokens": 4, "n_predict": 5}, "n_predict"),
    (
        CHAT,
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        "enable_thinking",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_fields_that_contradict_each_other_are_refused(http, path, fields, param):
    reply = ask(http, path, fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_no_limit_is_what_the_context_leaves(http, engine):
    assert ask(http, CHAT, {"n_predict": -1}).status_code == 200
    last = engine.requests[-1]
    assert last.max_new_tokens == MAX_LEN - len(last.prompt)


@pytest.mark.parametrize("path", ROOTS)
def test_a_prompt_that_is_too_long_may_be_cut(http, engine, path):
    text = "a" * 300
    body = {COMPLETION: {"prompt": text}, RESPONSES: {"input": text}}.get(
        path, {"messages": [{"role": "user", "content": text}]}
    )
    assert ask(http, path, body).status_code == 400
    for asked, kept in ((10, 10), (-1, MAX_LEN - 8)):
        reply = ask(http, path, {**body, "truncate_prompt_tokens": asked})
        assert reply.status_code == 200 and len(engine.requests[-1].prompt) == kept


def test_ends_are_in_the_text_where_that_is_asked(http):
    whole = ask(http, COMPLETION, {}).json()["choices"][0]["text"]
    stop = whole[3:5]
    [cut] = ask(http, COMPLETION, {"stop": stop}).json()["choices"]
    more = {"include_stop_str_in_output": True}
    [shown] = ask(http, COMPLETION, {"stop": stop, **more}).json()["choices"]
    assert shown["text"] == cut["text"] + stop and shown["finish_reason"] == "stop"
    [by_id] = ask(http, COMPLETION, {"stop_token_ids": [ord(whole[2])], **more}).json()["choices"]
    assert by_id["text"] == whole[: whole.index(whole[2]) + 1]


def test_chats_list_their_token_ids(http, engine):
    whole = ask(http, CHAT, {"return_token_ids": True}).json()
    [choice] = whole["choices"]
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    assert whole["prompt_token_ids"] == list(engine.requests[-1].prompt)
    for fields in ({}, {"logprobs": True}):
        reply = ask(http, CHAT, {"return_token_ids": True, "stream": True, **fields})
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line)["choices"][0] for line in lines]
        assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        listed = [token for part in parts for token in part.get("token_ids") or ()]
        assert listed == choice["token_ids"]
    assert "token_ids" not in ask(http, CHAT, {}).json()["choices"][0]


def test_counts_take_them_too(http):
    body = {"messages": ROOTS[CHAT]["messages"]}
    plain = http.post("/tokenize", json=body).json()["count"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = http.post("/tokenize", json={**body, "tools": tools, "enable_thinking": True}).json()
    assert more["count"] > plain + len('[{"type": "function"')


def test_every_field_of_the_official_api_is_known():
    openai = pytest.importorskip("openai")
    types = openai.types
    for body, theirs in (
        (Chat, types.chat.completion_create_params.CompletionCreateParamsStreaming),
        (Completion, types.completion_create_params.CompletionCreateParamsStreaming),
        (Embedding, types.embedding_create_params.EmbeddingCreateParams),
        (Responses, types.responses.response_create_params.ResponseCreateParamsStreaming),
        (StreamOptions, types.chat.ChatCompletionStreamOptionsParam),
    ):
        known = {field.alias or name for name, field in body.model_fields.items()}
        assert theirs.__required_keys__ | theirs.__optional_keys__ <= known, body


def test_only_numbers_in_lists_are_counted_as_token_ids() -> None:
    texts = b",".join([b'"a"'] * 3000)
    bodies._check_size(b'{"top_n":3,"documents":[' + texts + b"]}", 0, 4096)
    bodies._check_size(b'{"a":{' + b",".join([b'"k":1'] * 2100) + b"}}", 4096, 4096)
    ids = b",".join([b"1"] * 20)
    for data in (b'{"prompt":[%b]}', b'{"prompt": [[1, 2], [ %b ]]}', b'{"prompt":[\n%b'):
        with pytest.raises(ApiError, match="prompt: at most 10 token ids"):
            bodies._check_size(data % ids, 4096, 10)
    for data in (b'{"k":1%b}' % (b",1" * 2**16), b'{"k":[1.5%b]}' % (b", 1" * 2**16)):
        with pytest.raises(ApiError, match="k: more than"):
            bodies._check_size(data, 4096, 4096)

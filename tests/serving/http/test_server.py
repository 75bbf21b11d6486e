"""The HTTP server over an engine without a model: bodies, limits, errors, streams, disconnects.

Requests go over real sockets to uvicorn; the official client and a real engine are in
``test_real_engine``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from prometheus_client.parser import text_string_to_metric_families

from jaxllama import __version__
from jaxllama.decoding.sampling import Sampling, SamplingParams, sample
from jaxllama.engine.embeddings import Embedder
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed import load_generator
from jaxllama.evaluation.speed.load_generator import Lengths, Load
from jaxllama.model.decoder import final_norm, forward
from jaxllama.serving.api import bodies as request_bodies
from jaxllama.serving.api.bodies import ApiError, Chat, Completion, parse
from jaxllama.serving.api.calls import ModelFacts, Prompts
from jaxllama.serving.api.logprobs import chat_entries, chat_logprobs
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.api.schemas import to_json
from jaxllama.serving.http import basics, body_threads, vector_routes
from jaxllama.serving.http.context import Context, ServerSettings
from jaxllama.serving.http.routes import ROUTES
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.link import EngineClient, local
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.arrays import as_jax
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import (
    CFG,
    NAME,
    byte_tokenizer,
    chunks_of,
    client,
    error_of,
    serving,
    wait_until,
)

MAX_LEN = 96
COMPLETION = {"model": NAME, "prompt": "ab", "max_tokens": 6, "seed": 1}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1}


@contextlib.contextmanager
def posted(url: str, path: str, body: dict):
    """Within the block a client waits that has sent this body; behind it, it has left."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + data)
        yield


# Answers


@pytest.mark.core
def test_a_completion_and_the_stream_of_it_are_the_same(http):
    body = {**COMPLETION, "logprobs": 2, "n": 2}
    whole = http.post("/v1/completions", json=body).json()
    assert whole["object"] == "text_completion" and whole["model"] == NAME
    assert whole["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    options = {"include_usage": True}
    streamed = http.post(
        "/v1/completions", json={**body, "stream": True, "stream_options": options}
    )
    assert streamed.headers["content-type"] == "text/event-stream"
    *chunks, last = chunks_of(streamed.text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert (
            "".join(piece["text"] for piece in mine) == choice["text"] and len(choice["text"]) == 6
        )
        ends = [piece["finish_reason"] for piece in mine]
        assert ends == [None] * (len(ends) - 1) + ["length"]
        for key, want in choice["logprobs"].items():
            assert [value for piece in mine for value in piece["logprobs"][key]] == want
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert choice["logprobs"]["text_offset"] == list(range(6))
        assert choice["logprobs"]["top_logprobs"] == [{"z": 0.0, "y": -1.0}] * 6
    first, second = whole["choices"]
    assert first["text"] != second["text"], "choices have seeds of their own"


@pytest.mark.core
def test_a_chat_answer_and_the_stream_of_it_are_the_same(http, engine):
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert engine.requests[-1].prompt == tuple(b"<user>hi\n<assistant>")
    assert whole["object"] == "chat.completion" and whole["usage"]["prompt_tokens"] == 20
    [choice] = whole["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    chunks = chunks_of(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]
    entries = [e for c in chunks[1:] for e in c["choices"][0]["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"] and len(entries) == 6
    text = choice["message"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in entries] == list(text)
    assert entries[0]["top_logprobs"] == [{"token": "z", "logprob": 0.0, "bytes": [122]}]
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("spells", [True, False])
def test_the_logprobs_of_a_chunk_are_those_of_the_schema(spells):
    """Of tokens that are no text by themselves, and of numbers that JSON does not have."""
    prompts = Prompts(ModelFacts(CFG, byte_tokenizer(), None, ()), NAME, MAX_LEN, 8)
    call = prompts.chat(Chat(**CHAT, logprobs=True, top_logprobs=2), "chatcmpl-1")
    call = call if spells else dataclasses.replace(call, tokenizer=None)
    tops = [[(34, -0.5), (92, float("-inf")), (7, -1.0)], [], [(255, float("nan"))]]
    piece = TextPiece(0, [34, 0xE2, 259], logprobs=[-1e-7, -99999.0, -2.25], top_logprobs=tops)
    said = chat_logprobs(call, 0, [piece])
    assert to_json(said) == b'{"content":[%b],"refusal":null}' % chat_entries(call, 0, piece)


def test_a_base_model_s_refusal_names_no_file():
    tokenizer = Tokenizer(Tokenizer.byte_level()._backend, "/secret/tokenizer.json")
    prompts = Prompts(ModelFacts(CFG, tokenizer, None, ()), NAME, MAX_LEN, 8)
    with pytest.raises(ApiError, match="the model has no chat template") as refused:
        prompts.chat(Chat(**CHAT), "chatcmpl-1")
    assert "/secret" not in str(refused.value) and refused.value.status == 400


@pytest.mark.core
def test_stop_ends_before_the_text_and_counts_the_stop_token(http):
    long = http.post("/v1/completions", json={**COMPLETION, "max_tokens": 60}).json()
    [choice] = long["choices"]
    assert choice["finish_reason"] == "stop" and len(choice["text"]) == 40
    assert long["usage"]["completion_tokens"] == 41  # with the stop token
    stop = choice["text"][10:12]
    body = {**COMPLETION, "max_tokens": 60, "stop": [stop, "never"]}
    [cut] = http.post("/v1/completions", json=body).json()["choices"]
    assert cut["text"] == choice["text"].split(stop)[0] and cut["finish_reason"] == "stop"
    scored = http.post("/v1/completions", json={**COMPLETION, "max_tokens": 60, "logprobs": 0})
    assert len(scored.json()["choices"][0]["logprobs"]["tokens"]) == 40


def test_every_prompt_has_its_choices_and_ids_are_prompts_too(http):
    body = {**COMPLETION, "n": 2, "echo": True}
    texts = http.post("/v1/completions", json={**body, "prompt": ["ab", "xyz"]}).json()
    ids = http.post("/v1/completions", json={**body, "prompt": [[97, 98], [120, 121, 122]]}).json()
    assert [choice["text"] for choice in texts["choices"]] == [c["text"] for c in ids["choices"]]
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in texts["choices"]] == ["ab", "ab", "xy", "xy"]
    assert texts["usage"]["prompt_tokens"] == 5  # each prompt once, however many choices
    one = http.post("/v1/completions", json={**COMPLETION, "prompt": [97, 98]}).json()
    assert "ab" + one["choices"][0]["text"] == texts["choices"][0]["text"]
    chunks = chunks_of(http.post("/v1/completions", json={**body, "stream": True}).text)
    joined = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0)
    assert joined == texts["choices"][0]["text"]


@pytest.mark.core
def test_what_is_asked_reaches_the_engine(http, engine):
    body = {
        **COMPLETION,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100},
        "seed": 11,
        "n": 2,
        "stop": "x",
        "logprobs": 3,
        "priority": 2,
        "deadline": 9.5,
        "ignore_eos": True,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}},
        "user": "u",
        "metadata": {"k": "v"},
    }
    assert http.post("/v1/completions", json=body).status_code == 200
    first, second = engine.requests[-2:]
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        0,
        0.1,
    )
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.5, 0.25, -0.5) and sampling.logit_bias == ((5, -100.0),)
    assert (sampling.seed, second.sampling.seed) == (11, 12)
    assert (first.stop, first.logprobs, first.priority, first.deadline) == (("x",), 3, 2, 9.5)
    assert first.ignore_eos and first.grammar.kind == "json_schema"
    assert json.loads(first.grammar.source)["a"] == 1
    http.post("/v1/completions", json={"model": NAME, "prompt": "ab"})
    plain = engine.requests[-1]
    assert plain.sampling.temperature == 1 and plain.max_new_tokens == 16, "OpenAI's defaults"
    assert plain.sampling.seed is not None and plain.logprobs is None
    http.post("/v1/chat/completions", json={**CHAT, "max_tokens": None})
    assert engine.requests[-1].max_new_tokens == MAX_LEN - 20, "the rest of the context"


@pytest.mark.parametrize(
    ("path", "body", "limits"),
    [
        ("completions", COMPLETION, ["max_tokens"]),
        ("chat/completions", CHAT, ["max_tokens", "max_completion_tokens"]),
        ("responses", {"model": NAME, "input": "hi"}, ["max_output_tokens"]),
    ],
)
def test_other_servers_words_for_no_limit_and_the_likeliest_token(http, engine, path, body, limits):
    for limit in limits:
        fields = {name: value for name, value in body.items() if name != "max_tokens"}
        fields |= {limit: -1, "top_p": 0, "temperature": 1.5}
        reply = http.post(f"/v1/{path}", json=fields)
        assert reply.status_code == 200
        request = engine.requests[-1]
        assert request.max_new_tokens == MAX_LEN - len(request.prompt), "what the context leaves"
        logits = as_jax([[1.0, 3.0, 2.9, -5.0]] * 20)
        rows = [dataclasses.replace(request.sampling, seed=seed) for seed in range(20)]
        params = SamplingParams.stack(rows, 4)
        tokens, _ = jax.jit(sample)(logits, params, jnp.arange(20))
        assert set(tokens.tolist()) == {1}
        for wrong in ({limit: -2}, {limit: True}, {limit: 1.5}, {"top_p": -0.1}, {"top_p": 1.1}):
            refused = http.post(f"/v1/{path}", json={**body, **wrong})
            assert refused.status_code == 400 and error_of(refused)["param"] == next(iter(wrong))
    if path == "completions":
        each = http.post("/v1/completions", json={**body, "prompt": ["a", "abc"], "max_tokens": -1})
        assert each.status_code == 200
        assert [r.max_new_tokens for r in engine.requests[-2:]] == [MAX_LEN - 1, MAX_LEN - 3]


FOREIGN = [
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "custom", "custom": {"name": "f"}},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "computer_use_preview", "display_width": 1},
    {"type": "mcp", "server_label": "a", "server_url": "https://b"},
]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_tools_that_are_no_functions_are_dropped_with_a_line_in_the_log(http, engine, caplog, path):
    """Codex sends them to every server."""
    if path == "responses":
        body, tool = {"model": NAME, "input": "hi"}, {"type": "function", "name": "f"}
    else:
        body, tool = CHAT, {"type": "function", "function": {"name": "f"}}
    body = {**body, "tool_choice": "auto"}
    assert http.post(f"/v1/{path}", json={**body, "tools": FOREIGN}).status_code == 200
    [line] = [record for record in caplog.records if record.message == "tools ignored"]
    assert line.fields["types"] == sorted({tool["type"] for tool in FOREIGN})
    plain = engine.requests[-1].prompt
    http.post(f"/v1/{path}", json=body)
    assert engine.requests[-1].prompt == plain, "the model is shown nothing"
    mixed = http.post(f"/v1/{path}", json={**body, "tools": [*FOREIGN[:1], tool, *FOREIGN[1:]]})
    shown = engine.requests[-1].prompt
    alone = http.post(f"/v1/{path}", json={**body, "tools": [tool]})
    assert mixed.status_code == alone.status_code
    if alone.status_code == 200:
        assert engine.requests[-1].prompt == shown
    if path == "responses":
        dropped = http.post(f"/v1/{path}", json={**body, "tools": FOREIGN}).json()
        assert dropped["tools"] == [], "the answer lists the tools that the model was shown"
    for odd in ({}, [], 5, None, True, {"a": []}):
        reply = http.post(f"/v1/{path}", json={**body, "tools": [*FOREIGN, {"type": odd}]})
        assert reply.status_code == 400 and error_of(reply)["param"].startswith("tools")
    # Nothing is left to be required.
    required = {**body, "tools": FOREIGN, "tool_choice": "required"}
    assert error_of(http.post(f"/v1/{path}", json=required))["param"] == "tool_choice"


@pytest.mark.core
def test_sampling_that_a_body_does_not_name_is_the_models_own(lm):
    own = Sampling(0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    prompts = Prompts(dataclasses.replace(lm, sampling=own), NAME, MAX_LEN, 8)

    def asked(**fields) -> Sampling:
        body = Completion(**{**COMPLETION, **fields})
        return prompts.completion(body, "x").requests[0].sampling

    assert asked() == dataclasses.replace(own, seed=1)
    assert asked(temperature=0, top_k=-1) == Sampling(0, 0, 0.9, 0, 1.1, seed=1)
    assert asked(top_p=None, top_k=5) == Sampling(0.6, 5, 0.9, 0, 1.1, seed=1)
    greedy = dataclasses.replace(prompts, lm=dataclasses.replace(lm, sampling=Sampling()))
    assert greedy.chat(Chat(**CHAT), "x").requests[0].sampling == Sampling(seed=1)


def test_tools_and_parts_reach_the_template(http, engine):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    body = {**CHAT, "messages": messages, "tools": [TOOL], "max_tokens": 1}
    with_tools = {**body, "messages": messages[:1]}
    assert (
        http.post("/v1/chat/completions", json=body).status_code == 400
    )  # longer than the context
    assert http.post("/v1/chat/completions", json={**body, "tools": []}).status_code == 200
    assert bytes(engine.requests[-1].prompt) == b"<system>ab\n<assistant>\n<tool>r\n<assistant>"
    for choice, shown in (("auto", True), ("none", False)):
        tokens = http.post("/tokenize", json={"messages": messages[:1]}).json()["count"]
        reply = http.post("/v1/chat/completions", json={**with_tools, "tool_choice": choice})
        too_long = reply.status_code == 400 and reply.json()["error"]["code"]
        assert (too_long == "context_length_exceeded") == shown
        assert tokens == len(b"<system>ab\n<assistant>")


def test_embeddings_are_the_unit_mean_of_the_hidden_states(http, lm):
    rows = [[10, 20, 30], [7]]
    reply = http.post("/v1/embeddings", json={"model": NAME, "input": rows}).json()
    assert reply["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    tokens, lengths = as_jax([[10, 20, 30], [7, 0, 0]]), as_jax([3, 1])
    hidden, _ = jax.jit(forward, static_argnums=0)(CFG, lm.params, tokens, lengths)
    hidden = final_norm(CFG, lm.params, hidden)
    for index, (item, row) in enumerate(zip(reply["data"], rows, strict=True)):
        want = np.asarray(hidden[index, : len(row)], np.float64).mean(0)
        want /= np.linalg.norm(want)
        # The same float32 sums in padded rows: a few units in the last place.
        np.testing.assert_allclose(item["embedding"], want, rtol=0, atol=2e-6)
    body = {"model": NAME, "input": rows, "encoding_format": "base64"}
    coded = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    got = np.frombuffer(base64.b64decode(coded), "<f4")
    np.testing.assert_array_equal(got, np.float32(reply["data"][0]["embedding"]))
    text = http.post("/v1/embeddings", json={"model": NAME, "input": "abc"}).json()["data"]
    ids = http.post("/v1/embeddings", json={"model": NAME, "input": [97, 98, 99]}).json()["data"]
    assert text == ids


@pytest.fixture
def patient(monkeypatch):
    """An embedder that embeds nothing and waits before every row: (rows begun, the semaphore)."""
    begun, go = [], threading.Semaphore(0)

    def embed(self, row):
        begun.append(len(row))
        assert go.acquire(timeout=60)
        return np.zeros(4, np.float32)

    monkeypatch.setattr(Embedder, "__call__", embed)
    yield begun, go
    go.release(1000)


def test_bodies_of_texts_to_embed_take_turns_and_end_with_their_client(url, patient):
    begun, go = patient
    with client(url) as http, ThreadPoolExecutor(2) as pool:
        many = {"model": NAME, "input": ["long"] * 40}
        one = {"model": NAME, "input": "a"}
        large = pool.submit(http.post, "/v1/embeddings", json=many)
        wait_until(lambda: begun)
        small = pool.submit(http.post, "/v1/embeddings", json=one)
        while not small.done():
            go.release()
            time.sleep(0.05)
        assert small.result().status_code == 200 and not large.done()
        assert begun.index(1) <= 5, "not behind the 40"
        go.release(1000)
        assert len(large.result().json()["data"]) == 40
        while go.acquire(blocking=False):
            pass
        begun.clear()

        with posted(url, "/v1/embeddings", many):
            wait_until(lambda: begun)
        small = pool.submit(http.post, "/v1/embeddings", json=one)
        time.sleep(0.2)  # for the server to see that the first one has left
        go.release(1000)
        assert small.result().status_code == 200
        assert begun.index(1) <= 2 and len(begun) <= 3, "what its client left is not embedded"


@pytest.mark.core
def test_large_texts_of_clients_that_left_hold_nobody_up(url, lm, monkeypatch):
    """Six of them. Those that have not begun never begin."""
    go, begun, encode = threading.Event(), [], Tokenizer.encode

    def slow(tokenizer, text, *more, **named):
        if len(text) > body_threads.LARGE:
            begun.append(len(text))
            assert go.wait(60)
        return encode(tokenizer, text, *more, **named)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    monkeypatch.setattr(Tokenizer, "exceeds", lambda *more: False)
    text = "a" * (body_threads.LARGE + 1)
    large = {"model": NAME, "prompt": text, "truncate_prompt_tokens": 4, "max_tokens": 1}
    try:
        with contextlib.ExitStack() as clients:
            for _ in range(6):
                clients.enter_context(posted(url, "/v1/completions", large))
            wait_until(lambda: len(begun) == 2)
            time.sleep(0.1)  # for the others to arrive
        middle = {"model": NAME, "prompt": "ab" * 20, "max_tokens": 1, "user": "u" * 3000}
        asked = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        with client(url) as http:
            assert http.post("/v1/completions", json=middle).status_code == 200
            assert http.post("/v1/messages", json=asked).status_code == 200
            time.sleep(0.1)
            go.set()
            assert http.post("/v1/completions", json=large).status_code == 200
        assert len(begun) == 3, "two had begun, and the last one has a client"
    finally:
        go.set()


def test_tokens_to_embed_are_bounded(http, monkeypatch):
    monkeypatch.setattr(vector_routes, "TOKENS", 9)
    reply = http.post("/v1/embeddings", json={"model": NAME, "input": ["abcd", "efgh", "ij"]})
    assert reply.status_code == 400
    assert error_of(reply)["message"] == "input: more than 9 tokens in all: send several bodies"


@pytest.mark.core
def test_tokenize_and_back(http):
    tokens = http.post("/tokenize", json={"prompt": "é"}).json()
    assert tokens == {"tokens": [0xC3, 0xA9], "count": 2, "max_model_len": MAX_LEN}
    assert http.post("/detokenize", json={"tokens": [0xC3, 0xA9]}).json() == {"prompt": "é"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.core
def test_models_health_page_and_their_headers(http):
    [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == NAME and model["max_model_len"] == MAX_LEN and model["chat"]
    assert http.get(f"/v1/models/{NAME}").json() == model
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": __version__}
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "page.js" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    own = [http.get(path).text for path in ("/page.js", "/markdown.js", "/page.css")]
    assert "://" not in page.text + "".join(own)
    assert all("sourceMappingURL" not in http.get(p).text for p in ("/marked.js", "/purify.js"))
    assert page.headers["x-request-id"] != http.get("/").headers["x-request-id"]
    reply = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine"})
    assert reply.headers["x-request-id"] == "mine" and reply.json()["id"] == "cmpl-mine"
    strange = http.get("/health", headers={"X-Request-Id": 'a"b c'}).headers["x-request-id"]
    assert len(strange) == 32


def test_pages_of_other_origins_ask_only_where_they_may(lm, engine, http):
    asks = {
        "Origin": "https://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    refused = http.options("/v1/completions", headers=asks)
    assert refused.status_code == 405
    assert error_of(refused)["message"] == "/v1/completions: the method must be POST"
    for path, words in (
        ("/v1/other", "no route /v1/other: the guide's page HTTP lists the routes"),
        ("/v1/load_lora_adapter", "serve --lora-slots N adds it"),
    ):
        assert words in error_of(http.get(path))["message"]
    settings = {"origins": ("https://page",), "api_keys": ("secret",)}
    with serving(lm, engine, **settings) as url, client(url) as open_http:
        before = open_http.options("/v1/completions", headers=asks)
        assert before.status_code == 200, "a browser asks without the key"
        assert before.headers["access-control-allow-origin"] == "https://page"
        other = open_http.options("/v1/completions", headers={**asks, "Origin": "https://other"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = open_http.get("/v1/models", headers={"Origin": "https://page"})
        assert refused.status_code == 401, "and says so to the page"
        assert refused.headers["access-control-allow-origin"] == "https://page"


def test_an_adapter_is_a_model_of_its_own(lm, engine):
    """Bodies name it as "base:name", and answers too; embeddings have none and refuse it."""
    lm, name = dataclasses.replace(lm, adapters=("one", "a:b")), f"{NAME}:a:b"
    with serving(lm, engine) as url, client(url) as http:
        ids = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert ids == [NAME, f"{NAME}:one", name]
        assert http.get(f"/v1/models/{name}").json()["id"] == name
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            assert http.post(f"/v1/{path}", json={**body, "model": name}).json()["model"] == name
            assert engine.requests[-1].adapter == "a:b"
            assert http.post(f"/v1/{path}", json=body).json()["model"] == NAME
            assert engine.requests[-1].adapter is None
        wrong = error_of(http.post("/v1/completions", json={**COMPLETION, "model": f"{NAME}:two"}))
        assert wrong["message"].endswith(f"has {NAME!r}, {NAME + ':one'!r}, {name!r}")
        refused = http.post("/v1/embeddings", json={"model": name, "input": "a"})
        assert refused.status_code == 400 and error_of(refused)["param"] == "model"


def metric(http, name: str, **labels) -> float:
    """The sum of a metric's samples that have these labels."""
    page = http.get("/metrics").text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    found = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


@pytest.mark.core
def test_metrics_count_what_happened(http):
    name, labels = "jaxllama_http_requests_total", {"path": "/v1/completions", "status": "200"}
    before, ended = metric(http, name, **labels), metric(http, "jaxllama_requests_finished_total")
    http.post("/v1/completions", json=COMPLETION)
    assert metric(http, name, **labels) == before + 1
    assert metric(http, "jaxllama_requests_finished_total", reason="length") >= 1
    assert metric(http, "jaxllama_requests_finished_total") == ended + 1
    assert metric(http, "jaxllama_slots") == 16
    assert metric(http, "jaxllama_cache_capacity_tokens") == 100
    http.get("/wp-admin.php")
    assert metric(http, name, path="other", status="404") >= 1


@pytest.mark.parametrize("max_tokens", [60, 12], ids=["in the middle", "with the last token"])
def test_what_a_stop_string_cuts_off_is_not_counted(http, engine, max_tokens):
    """The engine writes on until it hears of the stop string; nobody counts that."""

    def counts() -> tuple[float, float, float]:
        ended = "jaxllama_requests_finished_total"
        written = metric(http, "jaxllama_completion_tokens_total")
        return written, metric(http, ended, reason="stop"), metric(http, ended)

    [whole] = http.post("/v1/completions", json={**COMPLETION, "max_tokens": 40}).json()["choices"]
    written, stopped, ended = counts()
    body = {**COMPLETION, "max_tokens": max_tokens, "stop": [whole["text"][4:12]]}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == whole["text"][:4]
    assert answer["usage"]["completion_tokens"] == 12
    assert engine.wait_for(lambda: not engine.live)
    assert counts() == (written + 12, stopped + 1, ended + 1)


# Refusals

BAD = {
    "not JSON": (b"{", "invalid_json"),
    "not an object": (b"[]", "invalid_json"),
    "not UTF-8": (b'{"model": "\xff"}', "invalid_json"),
    "half a surrogate": (b'{"model": "\\ud800"}', "invalid_json"),
    "deep": (b'{"prompt":' + b"[" * 5000, "invalid_json"),
    "NaN": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_value"),
    "huge int": (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", None),
    "no prompt": ({"prompt": ...}, "missing_parameter"),
    "no model": ({"model": ...}, "missing_parameter"),
    "text for a number": ({"temperature": "1"}, "invalid_value"),
    "true for a number": ({"max_tokens": True}, "invalid_value"),
    "hot": ({"temperature": 2.1}, "invalid_value"),
    "no tokens": ({"max_tokens": 0}, "invalid_value"),
    "empty prompt": ({"prompt": ""}, "empty_prompt"),
    "no prompts": ({"prompt": []}, "invalid_value"),
    "mixed prompts": ({"prompt": ["a", 1]}, "invalid_value"),
    "an empty one": ({"prompt": ["a", ""]}, "empty_prompt"),
    "id outside": ({"prompt": [1, 264]}, "invalid_value"),
    "negative id": ({"prompt": [-1]}, "invalid_value"),
    "empty stop": ({"stop": ""}, "invalid_value"),
    "many stops": ({"stop": ["x"] * 17}, "invalid_value"),
    "bias for a word": ({"logit_bias": {"a": 1}}, "invalid_value"),
    "too long": ({"prompt": "a" * 91}, "context_length_exceeded"),
    "too many choices": ({"prompt": ["a"] * 2, "n": 100}, "too_many_choices"),
    "best of": ({"best_of": 3}, "unsupported"),
    "suffix": ({"suffix": "x"}, "unsupported"),
    "streamed prompt logprobs": ({"prompt_logprobs": 1, "stream": True}, "unsupported"),
    "two forms": ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_value"),
    "no form": ({"structured_outputs": {}}, "invalid_value"),
    "a schema that is none": ({"guided_json": "["}, "invalid_value"),
    "tags without structures": (
        {"response_format": {"type": "structural_tag"}},
        "missing_parameter",
    ),
    "more than the most": ({"min_tokens": 7}, None),
    "logprobs": ({"logprobs": 21}, "invalid_value"),
    "schema without one": ({"response_format": {"type": "json_schema"}}, "missing_parameter"),
}


@pytest.mark.core
@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_400_with_a_reason(http, engine, name):
    body, code = BAD[name]
    if isinstance(body, dict):
        merged = {**COMPLETION, **body}
        body = json.dumps({k: v for k, v in merged.items() if v is not ...}).encode()
    asked = len(engine.requests)
    headers = {"Content-Type": "application/json"}
    reply = http.post("/v1/completions", content=body, headers=headers)
    error = error_of(reply)
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code
    assert len(error["message"]) > 10 and len(error["message"]) < 500
    assert len(engine.requests) == asked


def test_what_the_engine_refuses_is_400(http, engine, monkeypatch):
    def refuse(*_, **__):
        raise JaxLlamaError("too much of it")

    monkeypatch.setattr(engine, "submit", refuse)
    reply = http.post("/v1/completions", json=COMPLETION)
    assert (reply.status_code, error_of(reply)["message"]) == (400, "too much of it")


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT_BAD = {
    "no messages": {"messages": []},
    "role": {"messages": [{"role": "king", "content": "x"}]},
    "image": {"messages": IMAGE},
    "top without logprobs": {"top_logprobs": 2},
    "tool choice": {"tool_choice": "required"},
    "long": {"messages": [{"role": "user", "content": "x" * 100}]},
    "spoken": {"modalities": ["text", "audio"]},
    "voice": {"audio": {"voice": "alloy", "format": "wav"}},
    "functions": {"functions": [{"name": "f"}]},
    "a function's call": {"function_call": {"name": "f"}},
    "web search": {"web_search_options": {}},
    "moderation": {"moderation": {"model": "m"}},
    "a tool of no known kind": {"tools": [{"type": "magic"}]},
    **{
        f"a tool called {name!r}": {"tools": [{"type": "function", "function": {"name": name}}]}
        for name in ('say "hi"', "", "two words", "a" * 129, "f\n", "<f>")
    },
}


@pytest.mark.parametrize("name", CHAT_BAD)
def test_a_bad_chat_is_400_with_a_reason(http, name):
    reply = http.post("/v1/chat/completions", json={**CHAT, **CHAT_BAD[name]})
    [param] = CHAT_BAD[name]
    assert reply.status_code == 400 and error_of(reply)["param"] == param
    assert error_of(reply)["message"].startswith(param)
    if name == "image":
        path = "messages[0].content[0].type: must be 'text'"
        assert error_of(reply)["message"].startswith(path)


def test_what_concerns_another_service_or_nobody_knows_is_accepted(http, engine, caplog):
    """Unknown names are logged once each, and a client cannot fill the log with them."""
    official = {
        "reasoning_effort": "low",
        "verbosity": "high",
        "modalities": ["text"],
        "store": True,
        "prediction": {"type": "content", "content": "x"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": False,
        "metadata": {"k": "v"},
        "functions": [],
        "function_call": "auto",
        "audio": None,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    }
    request_bodies._unknown.clear()
    plain = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    reply = http.post("/v1/chat/completions", json={**CHAT, **official})
    texts = [
        "".join(c["choices"][0]["delta"]["content"] for c in chunks_of(r.text))
        for r in (plain, reply)
    ]
    assert texts[0] == texts[1] and not caplog.records
    unknown = {"max_token": 4, "stream_options": {"new": 1, "include_usage": True}}
    for _ in range(2):
        assert http.post("/v1/completions", json={**COMPLETION, **unknown}).status_code == 200
        assert engine.requests[-1].max_new_tokens == COMPLETION["max_tokens"]
    assert http.post("/tokenize", json={"prompt": "a", "max_token": 1}).status_code == 200
    warned = [r.fields["field"] for r in caplog.records if r.message == "unknown field ignored"]
    assert sorted(warned) == ["max_token", "new"]
    many = {f"x{index}": None for index in range(300)}
    http.post("/v1/completions", json={**COMPLETION, **many})
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 101
    request_bodies._unknown.clear()


def test_tools_that_the_template_ignores_are_refused(lm, engine):
    plain = Tokenizer(lm.tokenizer._backend, "no tools", chat_template="{{ messages[0].content }}")
    with serving(dataclasses.replace(lm, tokenizer=plain), engine) as url, client(url) as http:
        reply = http.post("/v1/chat/completions", json={**CHAT, "tools": [TOOL]})
        assert reply.status_code == 400 and error_of(reply)["param"] == "tools"
        for body in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
            assert http.post("/v1/chat/completions", json={**CHAT, **body}).status_code == 200


def test_a_template_that_refuses_says_why_and_names_no_folder(lm, engine):
    text = "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    strict = Tokenizer(lm.tokenizer._backend, "/srv/models/secret/t.json", chat_template=text + "x")
    with serving(dataclasses.replace(lm, tokenizer=strict), engine) as url, client(url) as http:
        said = {**CHAT, "messages": [{"role": "system", "content": "x"}]}
        for path, body in (
            ("/v1/chat/completions", said),
            ("/tokenize", {"messages": said["messages"]}),
            ("/v1/messages", {**said, "max_tokens": 9}),
        ):
            reply = http.post(path, json=body)
            assert reply.status_code == 400 and "No system!" in reply.text
            assert "srv" not in reply.text and "secret" not in reply.text


def test_past_calls_in_the_forms_that_clients_send(lm, engine):
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }};{% endfor %}"
    shown = "{% for m in messages %}" + calls + "{{ m.content }}|{% endfor %}"
    own = Tokenizer(lm.tokenizer._backend, "calls", chat_template=shown)
    calls = [{"function": {"name": "f", "arguments": a}} for a in ("", None, {"a": 1}, '{"a": 1}')]
    turns = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": calls}]
    with serving(dataclasses.replace(lm, tokenizer=own), engine) as url, client(url) as http:
        reply = http.post("/tokenize", json={"messages": [*turns, {"role": "assistant"}]})
        assert reply.status_code == 200, reply.text
        text = own.decode(reply.json()["tokens"])
        assert text.endswith('|{};{};{"a": 1};{"a": 1};||')


def prompt(value: str) -> str:
    return f'{{"model": "tiny", "prompt": {value}}}'


HUGE = 500_000
COSTLY = {
    "floats": lambda: prompt("[" + "1.5," * HUGE + "1.5]"),
    "a float at the end": lambda: prompt("[" + "1," * (MAX_LEN - 1) + "1.5]"),
    "ids": lambda: prompt("[" + "123," * HUGE + "1]"),
    "texts": lambda: prompt("[" + '"a",' * HUGE + '"a"]'),
    "rows": lambda: prompt("[" + "[1]," * HUGE + "[1]]"),
    "lists of floats": lambda: prompt("[" + "[1.5,1.5]," * 200_000 + "[1]]"),
    "a text": lambda: prompt('"' + "abc, " * 800_000 + '"'),
    "no spaces": lambda: prompt('"' + "a" * 4_000_000 + '"'),
    "spaces": lambda: prompt('"' + " " * 4_000_000 + '"'),
    "a text among texts": lambda: prompt('["a", "' + "abc " * 1_000_000 + '"]'),
    "messages": lambda: '{"model": "tiny", "messages": [' + "{}," * HUGE + "{}]}",
    "a message": lambda: (
        '{"model": "tiny", "messages": [{"role": "user", "content": "' + "abc " * 1_000_000 + '"}]}'
    ),
}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, "chat" if "message" in name else "completion") for name in COSTLY),
        ("floats", "embedding"),
        ("a text", "embedding"),
        ("a text", "tokenize"),
        ("a message", "tokenize"),
    ],
)
def test_a_refusal_is_cheap(lm, name, path):
    """Under 100 ms of CPU beside tokenizing max_len, which is nothing here, and under 10 MB."""
    data = COSTLY[name]().encode()
    if path == "embedding":
        data = data.replace(b'"prompt"', b'"input"')
    server = Context(lm, EngineClient(), ServerSettings(NAME, MAX_LEN), 8)
    path, read = {
        "completion": ("/v1/completions", lambda body: server.prompts.completion(body, "x")),
        "chat": ("/v1/chat/completions", lambda body: server.prompts.chat(body, "x")),
        "embedding": (
            "/v1/embeddings",
            lambda body: vector_routes.embedding_rows(server.prompts, body),
        ),
        "tokenize": ("/tokenize", lambda body: basics.tokenize(server, body)),
    }[path]
    row = next(row for row in ROUTES if row.path == path)

    def ask():
        read(parse(row.body, data, *row.n_ids(server)))

    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        with pytest.raises(ApiError) as refused:
            ask()
        seconds.append(time.thread_time() - begin)
    assert refused.value.status == 400 and len(str(refused.value)) < 500
    assert refused.value.param in ("prompt", "input", "messages")
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            ask()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert min(seconds) < 0.1 and peak < 10e6


@pytest.mark.core
def test_long_lists_that_fit_are_answered(lm):
    """The bounds are exact: the longest rows, and as many as there may be."""
    rows = [[5] * (MAX_LEN - 6)] * 8
    text = json.dumps({**COMPLETION, "prompt": rows, "max_tokens": 6}).encode()
    body = parse(Completion, text, 8 * MAX_LEN, MAX_LEN)
    assert body.prompt == rows
    full = json.dumps({**COMPLETION, "prompt": [5] * MAX_LEN}).encode()
    assert parse(Completion, full, MAX_LEN, MAX_LEN).prompt == [5] * MAX_LEN
    digits = "[1,2,3] {}" * 200_000  # in a text they are nothing but text
    text = json.dumps({**COMPLETION, "prompt": digits}).encode()
    assert parse(Completion, text, MAX_LEN, MAX_LEN).prompt == digits


@pytest.mark.core
def test_other_refusals_have_their_status(http):
    wrong = http.post("/v1/completions", json={**COMPLETION, "model": "gpt-4"})
    assert (wrong.status_code, error_of(wrong)["code"]) == (404, "model_not_found")
    assert http.get("/v1/models/gpt-4").status_code == 404
    assert error_of(http.get("/nowhere"))["type"] == "invalid_request_error"
    method = http.get("/v1/completions")
    assert method.status_code == 405 and method.headers["allow"] == "POST" and error_of(method)
    form = http.post("/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415 and error_of(form)
    big = http.post("/v1/completions", json={**COMPLETION, "user": "x" * 100_000})
    assert (big.status_code, error_of(big)["code"]) == (413, "body_too_large")

    def pieces():  # no Content-Length
        for _ in range(110):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    assert http.post("/v1/completions", content=pieces(), headers=headers).status_code == 413
    for path, body in {
        "/v1/embeddings": {"model": NAME, "input": "a" * 97},
        "/v1/embeddings?": {"model": NAME, "input": "a", "dimensions": 1000},
        "/tokenize": {},
        "/detokenize": {"tokens": [2**31]},
    }.items():
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and error_of(reply)


@pytest.mark.core
def test_only_the_key_opens(lm, engine):
    with serving(lm, engine, api_keys=("secret", "other")) as url, client(url) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                reply = http.get(path, headers=headers)
                assert reply.status_code == 401 and error_of(reply)["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
        for key in ("secret", "other"):
            headers = {"Authorization": f"Bearer {key}"}
            assert http.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/", "/openapi.json"):
            assert http.get(path).status_code == 200
        assert http.get("/openapi.json").json()["security"] == [{"key": []}]


# Load, leaving, breaking


def test_a_slow_reader_gets_larger_pieces(http, lm, engine):
    """Pieces that wait together are one chunk, without losing a token."""
    ask = {**COMPLETION, "max_tokens": 30, "logprobs": 1, "seed": 4}
    [whole] = http.post("/v1/completions", json=ask).json()["choices"]

    async def read() -> list[TextPiece]:
        link = local(Hub(engine, {}, Metrics(), None), lm.tokenizer, (2,))
        stream = await link.submit("slow", [dataclasses.replace(engine.requests[-1], id="slow")])
        await asyncio.to_thread(engine.wait_for, lambda: not engine.live)
        return [piece async for pieces in stream for piece in pieces]

    [event] = asyncio.run(read())
    assert event.text == whole["text"] and event.finish_reason == whole["finish_reason"]
    assert list(event.logprobs) == whole["logprobs"]["token_logprobs"]
    assert len(event.tokens) == len(event.top_logprobs) == event.completion_tokens == 30


@pytest.mark.core
def test_a_full_queue_is_429_with_retry_after(url, engine):
    with ThreadPoolExecutor(engine.options.max_queue) as pool, client(url) as http:
        with engine.held():
            waiting = [
                pool.submit(http.post, "/v1/completions", json=COMPLETION)
                for _ in range(engine.options.max_queue)
            ]
            assert engine.wait_for(lambda: len(engine.live) == engine.options.max_queue)
            asked = len(engine.requests)
            never = http.post("/v1/completions", json={**COMPLETION, "n": 9})
            assert never.status_code == 400, "more than the queue takes: no retry would help"
            for body in (COMPLETION, {**COMPLETION, "stream": True}, {**COMPLETION, "n": 2}):
                reply = http.post("/v1/completions", json=body)
                assert (reply.status_code, error_of(reply)["type"]) == (429, "rate_limit_error")
                assert reply.headers["retry-after"] == "3"  # 2.5 s, in whole ones
            assert len(engine.requests) == asked
        texts = {reply.result().json()["choices"][0]["text"] for reply in waiting}
        assert len(texts) == 1, "all are answered, and alike"


def test_a_request_id_may_be_used_again_at_once(http, engine):
    headers = {"X-Request-Id": "twice"}
    with ThreadPoolExecutor(3) as pool:
        with engine.held():
            asked = [
                pool.submit(http.post, "/v1/completions", json=body, headers=headers)
                for body in (COMPLETION, {**COMPLETION, "stream": True}, COMPLETION)
            ]
            assert engine.wait_for(lambda: len(engine.live) == 3)
        replies = [reply.result() for reply in asked]
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-request-id"] for reply in replies} == {"twice"}
    first, streamed, second = replies
    ids = {first.json()["id"], second.json()["id"], chunks_of(streamed.text)[0]["id"]}
    assert len(ids) == 3 and "cmpl-twice" in ids
    assert all(id.startswith("cmpl-twice") for id in ids)


@pytest.mark.core
def test_half_a_body_of_choices_is_taken_back(http, engine):
    with ThreadPoolExecutor(1) as pool:
        with engine.held():
            first = pool.submit(http.post, "/v1/completions", json={**COMPLETION, "n": 5})
            assert engine.wait_for(lambda: len(engine.live) == 5)
            cancelled = len(engine.cancelled)
            reply = http.post("/v1/completions", json={**COMPLETION, "n": 6})
            assert reply.status_code == 429 and len(engine.live) == 5
            assert len(engine.cancelled) >= cancelled + 3
        assert len(first.result().json()["choices"]) == 5


@pytest.mark.core
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_cancels_its_rows(url, engine, stream):
    with engine.held():
        asked, cancelled = len(engine.requests), len(engine.cancelled)
        with posted(url, "/v1/completions", {**COMPLETION, "n": 2, "stream": stream}):
            assert engine.wait_for(lambda: len(engine.requests) == asked + 2)
        assert engine.wait_for(lambda: len(engine.cancelled) == cancelled + 2)
        mine = {request.id for request in engine.requests[asked:]}
        assert set(engine.cancelled[cancelled:]) == mine and not engine.live


@pytest.mark.core
def test_an_engine_that_fails_is_told_and_the_server_is_no_longer_healthy(lm):
    def broken(request):
        raise RuntimeError("as asked")
        yield

    with FakeEngine(answer=broken) as engine, serving(lm, engine) as url, client(url) as http:
        streamed = http.post("/v1/completions", json={**COMPLETION, "stream": True}).text
        assert json.loads(streamed.split("\n\n")[-2][6:])["error"]["code"] == "engine_failed"
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            reply = http.post(path, json=body)
            assert reply.status_code == 503 and "as asked" in error_of(reply)["message"]
        assert http.get("/health").status_code == 503


@pytest.mark.core
def test_a_request_that_fails_fails_alone(http, engine):
    """As one whose grammar turns out too complex (``test_server_faults``)."""
    with ThreadPoolExecutor(3) as pool:
        with engine.held(2):
            bodies = ({}, {"seed": 2}, {"seed": 3, "stream": True})
            well, *bad = [
                pool.submit(http.post, "/v1/completions", json={**COMPLETION, **body})
                for body in bodies
            ]
            assert engine.wait_for(lambda: len(engine.live) == 3)
            for row in list(engine.live.values()):
                if row.request.sampling.seed != 1:
                    engine.fail(row.request.id, JaxLlamaError("too complex"))
        whole, streamed = (reply.result() for reply in bad)
        assert well.result().status_code == 200
    assert (whole.status_code, error_of(whole)["message"]) == (400, "too complex")
    last = [line for line in streamed.text.split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "too complex"
    assert http.get("/health").status_code == 200


def test_rows_that_the_engine_drops_when_it_stops_are_503(lm):
    with (
        FakeEngine() as engine,
        serving(lm, engine) as url,
        client(url) as http,
        ThreadPoolExecutor(2) as pool,
        engine.held(),
    ):
        whole = pool.submit(http.post, "/v1/completions", json=COMPLETION)
        streamed = pool.submit(http.post, "/v1/completions", json={**COMPLETION, "stream": True})
        assert engine.wait_for(lambda: len(engine.live) == 2)
        engine.stop()
        assert whole.result().status_code == 503
        error = json.loads(streamed.result().text.split("\n\n")[-2][6:])["error"]
        assert error["code"] == "stopping"
        late = http.post("/v1/completions", json=COMPLETION)  # not the client's fault: no 400
        assert late.status_code == 503 and error_of(late)["code"] == "stopping"
        assert int(late.headers["retry-after"]) >= 1


# What is owed


@pytest.mark.core
def test_a_new_server_answers_what_the_old_one_owed(lm, tmp_path):
    bodies = {
        "a": ("/v1/completions", {"model": NAME, "prompt": "ab", "max_tokens": 6}),  # no seed
        "b": ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True, "logprobs": True}),
    }
    with (
        FakeEngine() as first,
        first.held(),
        serving(lm, first, state=str(tmp_path)) as url,
        client(url) as http,
        ThreadPoolExecutor(3) as pool,
    ):
        for key, (path, body) in bodies.items():
            pool.submit(http.post, path, json=body, headers={"X-Request-Id": key})
        assert first.wait_for(lambda: len(first.live) == 3)
        waiting = pool.submit(http.get, "/v1/completions/cmpl-a")
        assert error_of(http.get("/v1/completions/cmpl-zzz"))["code"] == "not_found"
        first.stop()  # as if killed: nothing has been answered
        assert waiting.result().status_code == 503
    with (
        FakeEngine() as second,
        serving(lm, second, state=str(tmp_path)) as url,
        client(url) as http,
    ):
        a = http.get("/v1/completions/cmpl-a").json()
        b = http.get("/v1/chat/completions/chatcmpl-b").json()
        assert second.requests == first.requests, "the very same, drawn seed included"
        assert len(a["choices"][0]["text"]) == 6 and a["id"] == "cmpl-a"
        direct = http.post("/v1/chat/completions", json={**bodies["b"][1], "stream": False}).json()
        assert b["choices"] == direct["choices"]
        again = http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "a"}).json()
        assert again["id"].startswith("cmpl-a-"), "the first one keeps its answer"
        assert http.get(f"/v1/completions/{again['id']}").json() == again
        assert http.get("/v1/completions/cmpl-a").json() == a
        assert http.get("/v1/chat/completions/cmpl-a").status_code == 404, "another kind"


# Load on another server


class Foreign(BaseHTTPRequestHandler):
    """What vLLM, SGLang and others have in common: no vocabulary in the list of models, chunks
    without a usage, CRLF between them."""

    protocol_version = "HTTP/1.0"
    listed = {"object": "list", "data": [{"id": "a", "object": "model"}, {"id": "b"}]}
    asked: ClassVar[list[dict]] = []

    def do_GET(self):
        self.reply("application/json", json.dumps(self.listed))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        chunk = {"id": "x", "choices": [{"index": 0, "text": "t", "finish_reason": None}]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        chunks = [chunk] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        lines = [f"data:{json.dumps(chunk)}" for chunk in chunks]
        self.reply("text/event-stream", "\r\n\r\n".join([*lines, "data: [DONE]", ""]))

    def reply(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


def test_load_on_another_server(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        load = Load(url, requests=3, prompt_tokens=Lengths("7"), new_tokens=Lengths("4"))
        report = load_generator.run(load)
        assert (report["answered"], report["output_tokens"], report["prompt_tokens"]) == (3, 12, 21)
        assert report["model"] == "a" and report["itl_s"]["max"] >= 0
        load_generator.run(dataclasses.replace(load, model="b"))
        assert [body["model"] for body in Foreign.asked] == ["a"] * 3 + ["b"] * 3
        assert all(3 <= id < 10_000 for body in Foreign.asked for id in body["prompt"])
        for listed, model, message in (
            (Foreign.listed, "c", "has a, b, not 'c'"),
            ({"data": []}, None, "/v1/models has nothing"),
            ({"models": []}, None, "no list of models"),
            ([1], None, "no list of models"),
        ):
            monkeypatch.setattr(Foreign, "listed", listed)
            with pytest.raises(JaxLlamaError, match=message):
                load_generator.run(dataclasses.replace(load, model=model))
        server.shutdown()

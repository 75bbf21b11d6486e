"""OpenAI's own Python client, unchanged, against the server with a real engine."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import openai
from openai.types import chat, completion_create_params, embedding_create_params

from jaxllama.language_model import LanguageModel
from jaxllama.sampling import Sampling
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.http.bodies import Chat, Completion, Embedding, StreamOptions
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, byte_tokenizer, talking
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.replace(vocab_size=260)
# One shape for lm.generate: compiling is what takes time here.
PROMPT, NEW = "Once upon a time, or so", 24
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(CFG, jax.tree.map(jnp.asarray, seeded_params(CFG)), byte_tokenizer())


@pytest.fixture(scope="module")
def engine(lm):
    engine = Engine(lm, max_slots=2, max_len=96, prefill_chunk=16, max_queue=8)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def client(lm, engine):
    with talking(lm, engine, "secret", api_keys=("secret",)) as client:
        yield client


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_completions_are_what_generate_writes(client, lm):
    [want] = lm.generate([ids(PROMPT)], NEW)
    got = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=NEW, temperature=0, logprobs=1
    )
    [choice] = got.choices
    assert choice.text == want.text and choice.finish_reason == want.finish_reason
    n = len(want.tokens) - (want.finish_reason == "stop")
    # Batched and chunked sums in float32 against one row's.
    np.testing.assert_allclose(choice.logprobs.token_logprobs, want.logprobs[:n], atol=1e-4)
    assert len(choice.logprobs.top_logprobs) == n
    # Greedy: the chosen token is the likeliest.
    best = [max(top.values()) for top in choice.logprobs.top_logprobs]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, best, atol=1e-6)
    assert got.usage.prompt_tokens == len(PROMPT) and got.usage.completion_tokens == len(
        want.tokens
    )


def test_seeds_choices_and_streams(client, lm):
    ask = {"model": NAME, "prompt": PROMPT, "max_tokens": NEW, "seed": 5, "n": 3}
    whole = client.completions.create(**ask)
    texts = [choice.text for choice in whole.choices]
    for index, text in enumerate(texts):
        [want] = lm.generate([ids(PROMPT)], NEW, Sampling(temperature=1.0, seed=5 + index))
        assert text == want.text
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    usage = None
    for chunk in client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
        usage = chunk.usage or usage
    assert streamed == texts and usage == whole.usage


def test_chat_and_its_stream(client, lm):
    ask = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": NEW, "seed": 3}
    got = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    [want] = lm.generate([ids("<user>hi\n<assistant>")], NEW, Sampling(temperature=1.0, seed=3))
    [choice] = got.choices
    assert choice.message.content == want.text and choice.message.role == "assistant"
    spelt = [entry.bytes for entry in choice.logprobs.content]
    assert sum(spelt, []) == [t for t in want.tokens if t < 256][: len(spelt)]
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    text = ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == want.text
    assert chunk.choices[0].finish_reason == choice.finish_reason


def test_stop(client, lm):
    [long] = lm.generate([ids(PROMPT)], NEW)
    stop = next(
        long.text[i : i + 2] for i in range(3, len(long.text) - 2)
        if long.text[i : i + 2].isascii() and long.text[i : i + 2].isprintable()
    )  # fmt: skip
    ask = {"model": NAME, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    [choice] = client.completions.create(**ask, stop=[stop]).choices
    assert choice.text == long.text.split(stop)[0] and choice.finish_reason == "stop"


def test_a_schema_is_kept_to(client, engine):
    """The answer ends where the schema does, and no program was compiled for it."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    got = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=form, max_tokens=60, temperature=0.1, seed=1
    )
    [choice] = got.choices
    assert choice.finish_reason == "stop"
    answer = json.loads(choice.message.content)
    assert set(answer) == {"ok"} and isinstance(answer["ok"], bool)
    assert engine.stats().compilations == 0
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=bad)


def test_embeddings_and_models(client):
    [item] = client.embeddings.create(model=NAME, input="hello").data
    assert len(item.embedding) == CFG.d_model
    np.testing.assert_allclose(np.linalg.norm(item.embedding), 1, atol=1e-5)
    assert [model.id for model in client.models.list()] == [NAME]


def test_errors_are_the_clients_own_exceptions(client, engine):
    def ask(**change):
        base = {"model": NAME, "prompt": "ab", "max_tokens": 4}
        return client.completions.create(**{**base, **change})

    before = engine.stats().compilations
    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        ask(max_tokens=1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ask(model="gpt-4")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as many:
        ask(n=40)
    assert many.value.code == "too_many_choices"
    assert ask(extra_body={"max_token": 4}).usage.completion_tokens <= 4, "logged, not refused"
    # What was refused half-way has been taken back, and nothing was compiled for any of it.
    assert ask().usage.completion_tokens <= 4
    assert engine.stats().compilations == before


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (Chat, chat.completion_create_params.CompletionCreateParamsStreaming),
        (Completion, completion_create_params.CompletionCreateParamsStreaming),
        (Embedding, embedding_create_params.EmbeddingCreateParams),
    ],
    ids=["chat", "completion", "embedding"],
)
def test_every_field_of_the_official_api_is_known(body, theirs):
    known = {field.alias or name for name, field in body.model_fields.items()}
    official = theirs.__required_keys__ | theirs.__optional_keys__
    assert official <= known
    options = chat.ChatCompletionStreamOptionsParam
    assert options.__optional_keys__ <= set(StreamOptions.model_fields)


def test_a_full_queue_is_the_clients_rate_limit(lm):
    engine = FakeEngine(lm.tokenizer, eos=2, max_len=96, max_queue=1)
    engine.start()
    engine.hold(True)
    with talking(lm, engine) as client:
        ask = {"model": NAME, "prompt": "ab", "max_tokens": 4, "stream": True}
        with client.completions.create(**ask) as waiting:
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**ask)
            assert full.value.response.headers["retry-after"] == "3"
            engine.hold(False)
            assert [chunk.choices[0].finish_reason for chunk in waiting][-1] == "length"
    engine.stop()


def test_leaving_a_stream_frees_its_slot(client, engine):
    stream = client.completions.create(
        model=NAME, prompt="ab", max_tokens=90, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    client.completions.create(model=NAME, prompt="ab", max_tokens=1)
    deadline = time.monotonic() + 60
    while engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().finished["cancelled"] >= 1 and engine.stats().running == 0

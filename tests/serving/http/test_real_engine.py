"""A real engine behind the server, by OpenAI's own client: one for all, so it compiles once."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

import pydantic

from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.evaluation.speed import load_generator
from jaxllama.evaluation.speed.load_generator import Lengths, Load
from tests.helpers.cases import on_demand
from tests.helpers.http_server import CFG, NAME, serving, talking, tiny_model, wait_until
from tests.serving.http.test_tools import CITY, TIME, TOOLS, USER, tokenizer

openai = on_demand("openai")
# One shape for lm.generate: compiling is what takes time here.
PROMPT, NEW = "Once upon a time, or so", 24


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tokenizer("hermes"))


@pytest.fixture(scope="module")
def engine(lm):
    engine = Engine(lm, max_slots=1, max_len=1024, prefill_chunk=16, max_queue=8)
    engine.start()
    yield engine
    engine.stop()
    assert engine.stats().compilations == 0, "the warm-up compiled all that tests asked for"


@pytest.fixture(scope="module")
def client(lm, engine):
    with talking(lm, engine, "secret", api_keys=("secret",)) as client:
        yield client


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.core
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


@pytest.mark.core
def test_chat_and_its_stream(client, lm):
    ask = {"model": NAME, "messages": USER, "max_completion_tokens": NEW, "seed": 3}
    got = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    [want] = lm.generate([ids("<user>hi\n<assistant>")], NEW, Sampling(temperature=1.0, seed=3))
    [choice] = got.choices
    assert choice.message.content == want.text and choice.message.role == "assistant"
    spelt = [entry.bytes for entry in choice.logprobs.content]
    special = [(lm.tokenizer.token(t) or "").encode() for t in want.tokens]
    names = [special[n] if t >= 256 else bytes([t]) for n, t in enumerate(want.tokens)]
    assert [bytes(one) for one in spelt] == names[: len(spelt)]
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    text = ""
    for chunk in client.chat.completions.create(**ask, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == want.text
    assert chunk.choices[0].finish_reason == choice.finish_reason


def test_stop(client, lm):
    [long] = lm.generate([ids(PROMPT)], NEW)
    stop = next(
        long.text[i : i + 2]
        for i in range(3, len(long.text) - 2)
        if long.text[i : i + 2].isascii() and long.text[i : i + 2].isprintable()
    )
    ask = {"model": NAME, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    [choice] = client.completions.create(**ask, stop=[stop]).choices
    assert choice.text == long.text.split(stop)[0] and choice.finish_reason == "stop"


@pytest.mark.core
def test_a_schema_is_kept_to(client):
    """The answer ends where the schema does."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    got = client.chat.completions.create(
        model=NAME, messages=USER, response_format=form, max_tokens=60, temperature=0.1, seed=1
    )
    [choice] = got.choices
    assert choice.finish_reason == "stop"
    answer = json.loads(choice.message.content)
    assert set(answer) == {"ok"} and isinstance(answer["ok"], bool)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=USER, response_format=bad)


def test_embeddings_and_models(client):
    [item] = client.embeddings.create(model=NAME, input="hello").data
    assert len(item.embedding) == CFG.d_model
    np.testing.assert_allclose(np.linalg.norm(item.embedding), 1, atol=1e-5)
    assert [model.id for model in client.models.list()] == [NAME]


def test_errors_are_the_clients_own_exceptions(client):
    def ask(**change):
        base = {"model": NAME, "prompt": "ab", "max_tokens": 4}
        return client.completions.create(**{**base, **change})

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        ask(max_tokens=2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ask(model="gpt-4")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as many:
        ask(n=40)
    assert many.value.code == "too_many_choices"
    assert ask(extra_body={"max_token": 4}).usage.completion_tokens <= 4, "logged, not refused"
    assert ask().usage.completion_tokens <= 4, "what was refused half-way has been taken back"


@pytest.mark.core
def test_leaving_a_stream_frees_its_slot(client, engine):
    stream = client.completions.create(
        model=NAME, prompt="ab", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    client.completions.create(model=NAME, prompt="ab", max_tokens=1)
    wait_until(lambda: not engine.stats().running)
    assert engine.stats().finished["cancelled"] >= 1


def test_an_agent_of_six_calls(client):
    """As agents do it: call, run, tell, until the model has to speak."""
    messages = list(USER)
    for turn in range(6):
        answer = client.chat.completions.create(
            model=NAME,
            messages=messages,
            tools=TOOLS[:1],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=turn,
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        asked = json.loads(call.function.arguments)
        assert asked["city"] in ("Oslo", "Rome") and asked["days"] in (1, 2)
        result = {"role": "tool", "tool_call_id": call.id, "content": f"{asked['city']} is cold"}
        messages += [choice.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(
        model=NAME, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, seed=1
    )
    assert last.choices[0].message.tool_calls is None
    assert last.usage.prompt_tokens > 6 * len(TIME["hermes"])


def test_a_named_call_streams(client):
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        model=NAME, messages=USER, tools=TOOLS, tool_choice=named, seed=3
    ) as stream:
        kinds = [event.type for event in stream]
    [choice] = stream.get_final_completion().choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    # A chunk has all tokens that were there when the client read.
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_min_tokens_and_stop_token_ids(client):
    def ask(**extra):
        return client.completions.create(
            model=NAME,
            prompt="ab",
            max_tokens=12,
            seed=4,
            logit_bias={"2": 100},
            extra_body=extra,
        )

    assert ask().usage.completion_tokens == 1, "the stop token at once"
    held = ask(min_tokens=7)
    assert held.usage.completion_tokens == 8 and held.choices[0].finish_reason == "stop"
    text = ask(ignore_eos=True, min_tokens=0).choices[0].text
    assert len(text.encode()) == 12
    bias = {"logit_bias": {"97": 100}}
    ended = ask(stop_token_ids=[97], **bias)
    assert ended.usage.completion_tokens == 1 and ended.choices[0].text == ""
    both = ask(stop_token_ids=[97], min_tokens=3, **bias)
    assert both.usage.completion_tokens == 4 and "a" not in both.choices[0].text
    assert ask(stop=["a"], min_tokens=3, **bias).choices[0].text == "aaa"
    one = ask(guided_choice=["b"], min_tokens=5)
    assert one.choices[0].text == "b", "a form that allows no more"


def test_only_allowed_tokens_are_written(client):
    def ask(**extra):
        [choice] = client.chat.completions.create(
            model=NAME, messages=USER, max_tokens=9, seed=4, logit_bias={"2": 100}, extra_body=extra
        ).choices
        return choice

    assert ask().message.content == "", "the stop token at once"
    some = ask(allowed_token_ids=[97, 98])
    assert some.finish_reason == "length" and set(some.message.content) <= {*"ab"}
    assert len(some.message.content) == 9
    assert ask(allowed_token_ids=[97, 2]).finish_reason == "stop", "a stop token among them"
    for wrong in ([CFG.vocab_size], []):
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            ask(allowed_token_ids=wrong)


def test_structured_output_and_forced_calls(client):
    class Answer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        ok: bool

    parsed = client.responses.parse(model=NAME, input="hi", text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    chat = client.chat.completions.parse(model=NAME, messages=USER, response_format=Answer)
    assert isinstance(chat.choices[0].message.parsed, Answer)
    weather = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        made = client.responses.create(
            model=NAME, input="hi", tools=[weather], tool_choice=choice, parallel_tool_calls=False
        )
        [call] = made.output
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_notes_are_in_the_answer(client):
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask = {"model": NAME, "max_tokens": 9, "seed": 1}
    chat = {**ask, "messages": USER, "response_format": form}
    more = {"extra_body": {"response_format": form}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    found = [
        client.chat.completions.create(**chat).warnings,
        next(iter(client.chat.completions.create(**chat, stream=True))).warnings,
        client.completions.create(**ask, prompt="x", **more).warnings,
        client.responses.create(model=NAME, input="x", max_output_tokens=9, text=text).warnings,
    ]
    assert found == [['Unimplemented keys: ["uniqueItems"]']] * 4
    assert client.completions.create(**ask, prompt="x").warnings is None


def test_a_load_of_conversations_is_found_in_the_cache(lm, engine):
    with serving(lm, engine) as url:
        load = Load(url, requests=2, prompt_tokens=Lengths("20"), new_tokens=Lengths("8"), turns=8)
        report = load_generator.run(load)
    assert report["answered"] == 16
    prompts = [28 * turn + 20 for turn in range(8)]
    assert report["prompt_tokens"] == 2 * sum(prompts)
    # At least the whole blocks of the prompt before, but for its last token.
    least = 2 * sum((length - 1) // 16 * 16 for length in prompts[:-1])
    assert report["cached_tokens"] >= least
    assert "in the server's cache" in load_generator.table(report)

"""/v1/messages by Anthropic's own client: made, streamed, with tools and thinking, counted."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("uvicorn")

from tests.helpers import http_server
from tests.helpers.cases import on_demand
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import NAME, serving, tiny_model
from tests.serving.http.test_tools import CITY, tokenizer

anthropic = on_demand("anthropic")
MAX_LEN = 2048
ENGINE = {"max_len": MAX_LEN}
THINK = "{% if enable_thinking %}<think>\n{% endif %}{% if False %}<think></think>{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
WEATHER = {"name": "weather", "description": "Look out.", "input_schema": CITY}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tokenizer("hermes", THINK))


@pytest.fixture(scope="module")
def url(lm, engine):
    with serving(lm, engine, api_keys=("secret-1", "secret-2")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="secret-1", max_retries=0) as client:
        yield client


def prompt(engine) -> str:
    return bytes(engine.requests[-1].prompt).decode()


def answer(client, engine, lm, text: str, **fields):
    """The message of the answer ``text``; its stream is the same."""
    engine.answer = says(lm.tokenizer, text)
    ask = {"model": NAME, "max_tokens": 500, "messages": USER, **fields}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
    streamed = stream.get_final_message()

    # The client itself reads the arguments of a stream, as far as they are JSON.
    has_input = not any("INVALID_JSON" in getattr(b, "input", ()) for b in whole.content)
    left_out = {"id", "parsed_output"} | (set() if has_input else {"input"})

    def bare(message) -> list[dict]:
        return [b.model_dump(exclude=left_out) for b in message.content]

    assert bare(streamed) == bare(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.stop_sequence == whole.stop_sequence
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    return whole


@pytest.mark.core
def test_thinking_text_and_calls(client, engine, lm):
    text = f"Hm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    ask = {"tools": [WEATHER], "system": "Be brief.", "thinking": thinking}
    message = answer(client, engine, lm, text, **ask)
    assert prompt(engine).startswith("<system>Be brief.\n<user>hi\n")
    assert prompt(engine).endswith("<think>\n")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, said, call, again = message.content
    assert (thought.thinking, said.text) == ("Hm.", "Let me see.")
    assert (call.name, call.input) == ("weather", {"city": "Oslo", "days": 1})
    assert call.id != again.id and message.stop_reason == "tool_use"
    assert message.usage.input_tokens == len(prompt(engine))
    # The client sends the message back as it came, with what the tools said.
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"},
        {
            "type": "tool_result",
            "tool_use_id": again.id,
            "content": [{"type": "text", "text": "none"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    turns = [*USER, {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": results})
    message = answer(client, engine, lm, "Mild.", messages=turns, tools=[WEATHER])
    shown = prompt(engine)
    assert f"<why>Hm.</why>Let me see.{CALL}{CALL}\n" in shown
    assert "<tool weather>12 degrees\n<tool weather>none\n<user>Well?\n" in shown
    assert not shown.endswith("<think>\n"), "without thinking a template does not think"
    assert message.content[0].text == "Mild." and message.stop_reason == "end_turn"


def test_choices_of_tools_are_held_to(client, engine, lm):
    def asked(**choice):
        answer(client, engine, lm, "fine", tools=[WEATHER], tool_choice=choice)
        grammar = engine.requests[-1].grammar
        return grammar and grammar.source

    assert asked(type="auto") is None
    assert '"tool_call' not in (asked(type="none") or "") and '"tools"' not in prompt(engine)
    assert "weather" in asked(type="any") and "weather" in asked(type="tool", name="weather")
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        asked(type="tool", name="nobody")
    form = {"format": {"type": "json_schema", "schema": CITY}}
    answer(client, engine, lm, "{}", output_config=form)
    assert engine.requests[-1].grammar is not None


def test_ends_of_a_message(client, engine, lm):
    cut = answer(client, engine, lm, "one two three", max_tokens=7)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one two")
    stopped = answer(client, engine, lm, "one two three", stop_sequences=["zwo", " thr"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " thr")
    assert stopped.content[0].text == "one two"
    full = answer(client, engine, lm, "x" * 4000, max_tokens=16_000)
    assert full.stop_reason == "model_context_window_exceeded"
    broken = answer(client, engine, lm, CALL[:-30], tools=[WEATHER])
    assert list(broken.content[0].input) == ["INVALID_JSON"]
    assert answer(client, engine, lm, "").content == []


def test_a_last_message_of_the_assistant_is_continued(client, engine, lm):
    for begun in ("The river is", "<", "a", "user", "\\n"):  # the template writes some of these
        turns = [*USER, {"role": "assistant", "content": begun}]
        message = answer(client, engine, lm, " long.", messages=turns)
        assert prompt(engine).endswith(f"hi\n<assistant>{begun}")
        assert message.content[0].text == " long."


def test_names_of_tools_have_up_to_128_characters(client, engine, lm):
    name = "mcp__" + "x" * 123
    call = CALL.replace("weather", name)
    tools = [{**WEATHER, "name": name}]
    [block] = answer(client, engine, lm, call, tools=tools).content
    assert (block.type, block.name) == ("tool_use", name)
    turns = [*USER, {"role": "assistant", "content": [block.model_dump(exclude={"caller"})]}]
    turns += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id}]}]
    answer(client, engine, lm, "fine", tools=tools, messages=turns)
    assert name in prompt(engine)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(
            model=NAME, max_tokens=9, messages=USER, tools=[{**WEATHER, "name": name + "x"}]
        )


def test_tokens_are_counted(client, engine, lm):
    ask = {"model": NAME, "messages": USER, "tools": [WEATHER], "system": "Be brief."}
    count = client.messages.count_tokens(**ask)
    answer(client, engine, lm, "fine", tools=[WEATHER], system="Be brief.")
    assert count.input_tokens == len(prompt(engine))


def test_tools_of_the_service_are_left_out_with_a_note(client, engine, lm):
    search = {"type": "web_search_20250305", "name": "web_search"}
    message = answer(client, engine, lm, "fine", tools=[search, {**WEATHER, "type": "custom"}])
    assert message.warnings == ["tools left out: web_search_20250305"]
    assert "weather" in prompt(engine) and "web_search" not in prompt(engine)


def test_refusals_are_anthropics(client, url):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for fields, name in (
        ({"messages": [{"role": "user", "content": [image]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"extra_body": {"stop": ["x"]}}, "stop"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=name) as refused:
            client.messages.create(**{"model": NAME, "max_tokens": 5, "messages": USER, **fields})
        error = refused.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        client.messages.create(model="claude", max_tokens=5, messages=USER)
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(model=NAME, max_tokens=5, messages=USER)
        assert "wrong" not in json.dumps(refused.value.body["error"]).replace(
            "missing or wrong", ""
        )


def test_an_engine_that_fails_is_told_midway(lm):
    def broken(request):
        yield 97
        raise RuntimeError("as asked")

    with FakeEngine(max_len=MAX_LEN, answer=broken) as engine, serving(lm, engine) as url:
        with http_server.client(url) as http:
            body = {"model": NAME, "max_tokens": 9, "messages": USER, "stream": True}
            text = http.post("/v1/messages", json=body).text
    last = text.strip().split("\n\n")[-1]
    event, data = last.split("\n")
    assert event == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["error"]["type"] == "api_error" and "as asked" in error["error"]["message"]

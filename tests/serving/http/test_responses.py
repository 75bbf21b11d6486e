"""/v1/responses by OpenAI's own client: made, streamed, with tools, continued, read, forgotten."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("uvicorn")

from jaxllama.serving.ipc import stored_responses
from tests.helpers.cases import on_demand
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import NAME, talking, tiny_model, wait_until
from tests.serving.http.test_tools import CITY, tokenizer

openai = on_demand("openai")
MAX_LEN = 2048
ENGINE = {"max_len": MAX_LEN}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
THINK = "{% if False %}<think></think>{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tokenizer("hermes", THINK))


def prompt(engine) -> str:
    return bytes(engine.requests[-1].prompt).decode()


@pytest.mark.core
def test_a_response_and_its_stream_are_the_same(client, engine, lm):
    engine.answer = says(lm.tokenizer, f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    ask = {"model": NAME, "input": "hi", "tools": [WEATHER], "instructions": "Be brief."}
    whole = client.responses.create(**ask)
    assert prompt(engine).startswith("<system>Be brief.\n<user>hi\n")
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought, said, call = whole.output
    assert thought.content[0].text == "Hm." and whole.output_text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 1})
    assert whole.status == call.status == said.status == "completed"
    assert whole.usage.input_tokens == len(prompt(engine))
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    streamed = stream.get_final_response()
    plain = {"id", "call_id", "parsed", "parsed_arguments"}

    def bare(item) -> dict:
        return {key: value for key, value in item.model_dump().items() if key not in plain}

    assert [bare(item)["type"] for item in streamed.output] == [i.type for i in whole.output]
    assert streamed.output_text == whole.output_text
    assert streamed.output[2].arguments == call.arguments
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    for name, count in (
        ("output_item.added", 3),
        ("output_item.done", 3),
        ("content_part.added", 2),
        ("content_part.done", 2),
        ("function_call_arguments.done", 1),
    ):
        assert kinds.count(name) == count
    for name, text in (("reasoning_text", "Hm."), ("output_text", "Let me see.")):
        deltas = [e.delta for e in events if e.type == f"response.{name}.delta"]
        assert "".join(deltas) == text


def test_what_is_cut_is_incomplete(client, engine, lm):
    engine.answer = says(lm.tokenizer, "a long answer")
    cut = client.responses.create(model=NAME, input="hi", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "a l")
    assert cut.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model=NAME, input="hi", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "a l"
    engine.answer = says(lm.tokenizer, "")
    assert client.responses.create(model=NAME, input="hi").output_text == ""


@pytest.mark.core
def test_a_conversation_goes_on_from_its_last_response(client, engine, lm):
    engine.answer = says(lm.tokenizer, f"<think>Hm</think>{CALL}")
    first = client.responses.create(
        model=NAME, input="hi", tools=[WEATHER], instructions="Be brief."
    )
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    engine.answer = says(lm.tokenizer, "It is cold.")
    second = client.responses.create(model=NAME, input=[result], previous_response_id=first.id)
    shown = f"<user>hi\n<assistant><why>Hm</why>{CALL}\n<tool weather>cold\n<assistant>"
    assert prompt(engine) == shown, "the instructions were the first one's"
    third = client.responses.create(model=NAME, input="Sure?", previous_response_id=second.id)
    assert prompt(engine) == shown + "It is cold.\n<user>Sure?\n<assistant>"
    items = [
        {"role": "user", "content": "hi"},
        *first.output,
        result,
        *second.output,
        {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]
    client.responses.create(model=NAME, input=items)
    assert prompt(engine) == shown + "It is cold.\n<user>Sure?\n<assistant>", "or from its items"
    again = client.responses.retrieve(third.id)
    assert again == third
    client.responses.delete(third.id)
    for wrong in (
        lambda: client.responses.retrieve(third.id),
        lambda: client.responses.delete(third.id),
        lambda: client.responses.create(model=NAME, input="x", previous_response_id=third.id),
    ):
        with pytest.raises(openai.NotFoundError):
            wrong()
    kept = client.responses.create(model=NAME, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    streamed = list(client.responses.create(model=NAME, input="hi", stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == "It is cold."


def test_what_is_kept_is_bounded(monkeypatch, client):
    monkeypatch.setattr(stored_responses, "STORED_BYTES", 4000)
    made = [client.responses.create(model=NAME, input="x" * 100 * n) for n in range(1, 6)]
    there = []
    for response in made:
        try:
            there.append(client.responses.retrieve(response.id).id)
        except openai.NotFoundError:
            there.append(None)
    assert there[0] is None and there[-1] == made[-1].id


@pytest.mark.core
def test_refusals(client, engine):
    for fields in (
        {"background": True, "stream": True},
        {"conversation": "c"},
        {"top_logprobs": 2},
        {"tools": [{"type": "magic"}]},
        {"tools": [{**WEATHER, "name": 'say "hi"'}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"tool_choice": {"type": "function", "name": "nobody"}, "tools": [WEATHER]},
        {"input": []},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**{"model": NAME, "input": "hi", **fields})
        assert refused.value.param == next(iter(fields))


def test_an_engine_that_fails_is_told_midway(lm):
    def broken(request):
        yield 97
        raise RuntimeError("as asked")

    with FakeEngine(max_len=MAX_LEN, answer=broken) as engine, talking(lm, engine) as client:
        *_, last = client.responses.create(model=NAME, input="hi", stream=True)
        assert (last.type, last.code) == ("error", "engine_failed")
        assert "as asked" in last.message


def test_what_a_continuation_keeps_is_counted(monkeypatch, client):
    """Each one keeps the whole conversation."""
    monkeypatch.setattr(stored_responses, "STORED_BYTES", 20_000)
    first = last = client.responses.create(model=NAME, input="x" * 1000)
    for _ in range(20):
        last = client.responses.create(model=NAME, input="y", previous_response_id=last.id)
    assert client.responses.retrieve(last.id).id == last.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_reasoning_alone_is_no_conversation(client):
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.responses.create(model=NAME, input=[{"type": "reasoning", "summary": []}])


def test_a_store_forgets_only_what_is_there():
    assert not stored_responses.StoredResponses().forget("nobody", "")


def test_the_input_of_a_response_is_listed_in_pages(client, engine, lm):
    engine.answer = says(lm.tokenizer, "yes")
    said = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    made = client.responses.create(model=NAME, input=said)
    items = client.responses.input_items
    texts = [item.content[0].text for item in items.list(made.id, order="asc", limit=2)]
    assert texts == ["one", "two", "three"], "the client follows the pages"
    page = items.list(made.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["three", "two"] and page.has_more
    for query in (
        {"limit": 0},
        {"limit": 101},
        {"limit": "9" * 5000},
        {"order": "up"},
        {"after": "x"},
    ):
        with pytest.raises(openai.BadRequestError):
            items.list(made.id, extra_query=query)
    with pytest.raises(openai.NotFoundError):
        items.list("resp_none")


def test_a_response_in_the_background(client, engine, lm):
    """It begins at once, ends without its client, and can be cancelled, read and deleted."""
    engine.answer = says(lm.tokenizer, "done")
    with engine.held():
        begun = client.responses.create(model=NAME, input="hi", background=True)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        assert client.responses.retrieve(begun.id).status == "in_progress"
    wait_until(lambda: client.responses.retrieve(begun.id).status != "in_progress")
    ended = client.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("completed", "done")
    assert client.responses.cancel(begun.id).status == "completed"
    again = client.responses.create(model=NAME, input="and?", previous_response_id=begun.id)
    assert again.output_text == "done" and "<user>hi" in prompt(engine)
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(again.id)

    for more, param in (({"stream": True}, "background"), ({"store": False}, "store")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=NAME, input="hi", background=True, **more)
        assert refused.value.param == param


def test_a_response_in_the_background_is_cancelled(client, engine, lm):
    engine.answer = says(lm.tokenizer, "a" * 1000)
    with engine.held():
        begun = client.responses.create(model=NAME, input="hi", background=True)
        assert client.responses.cancel(begun.id).status == "cancelled"
    assert f"{begun.id}/0" in engine.cancelled
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with engine.held():
        held = client.responses.create(model=NAME, input="hi", background=True)
        client.responses.delete(held.id)
    wait_until(lambda: f"{held.id}/0" in engine.cancelled)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(held.id)


def test_a_response_lists_logprobs_of_its_text(engine):
    plain = tiny_model()
    engine.answer = says(plain.tokenizer, "abc")
    ask = {"model": NAME, "input": "hi", "include": ["message.output_text.logprobs"]}
    with talking(plain, engine) as client:
        whole = client.responses.create(**ask, top_logprobs=2)
        [text] = whole.output[0].content
        assert [entry.token for entry in text.logprobs] == ["a", "b", "c"]
        assert text.logprobs[0].logprob == pytest.approx(-ord("a") / 256)
        assert [len(entry.top_logprobs) for entry in text.logprobs] == [2, 2, 2]
        events = list(client.responses.create(**ask, stream=True))
        streamed = [
            entry.token
            for event in events
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
        assert streamed == ["a", "b", "c"]
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [entry.token for entry in done.logprobs] == streamed


def test_logprobs_of_an_answer_in_parts_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="chat completions have logprobs") as refused:
        client.responses.create(
            model=NAME, input="hi", include=["message.output_text.logprobs"], tools=[WEATHER]
        )
    assert refused.value.param == "include"

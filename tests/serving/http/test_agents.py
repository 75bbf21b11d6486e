"""Agent loops over a real engine: ten calls one after the other, in each format of calls, and the
same by LangChain's ChatOpenAI."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from jaxllama.engine.engine import Engine
from tests.helpers.cases import on_demand
from tests.helpers.http_server import NAME, byte_tokenizer, serving, talking, tiny_model
from tests.serving.http.test_harmony import SPECIAL
from tests.serving.http.test_harmony import TEMPLATE as HARMONY
from tests.serving.http.test_tools import CITY, tool
from tests.serving.test_tool_formats import TEMPLATES

on_demand("openai")
CALLS = 10
# What every template has: the messages with their calls and results, and the tools.
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOOLS = [tool("weather", CITY), tool("book", CITY)]


def template(form: str) -> str:
    if form == "harmony":
        return HARMONY
    return TURNS + "{# " + TEMPLATES[form].replace("{{", "").replace("}}", "") + " #}"


@pytest.fixture(scope="module")
def lm():
    return tiny_model(byte_tokenizer(HARMONY, SPECIAL))


@pytest.fixture(scope="module")
def engine(lm):
    engine = Engine(lm, max_slots=2, max_len=2048, prefill_chunk=64)
    engine.start()
    yield engine
    engine.stop()


def speaking(lm, form: str):
    """The model with this format's template; its grammars and special tokens stay the same."""
    return dataclasses.replace(lm, tokenizer=byte_tokenizer(template(form), SPECIAL))


@pytest.mark.slow
@pytest.mark.parametrize("form", [*TEMPLATES, "harmony"])
def test_an_agent_of_ten_calls(lm, engine, form):
    with talking(speaking(lm, form), engine) as client:
        messages = [{"role": "user", "content": "Book a trip."}]
        for turn in range(CALLS):
            ask = {
                "model": NAME,
                "messages": messages,
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "seed": turn,
                "max_tokens": 300,
            }
            if form == "harmony":  # reasoning is free, and a random model would not end it
                end = 256 + SPECIAL.index("<|end|>")
                ask["logit_bias"] = {str(end): 50}
            if turn % 2:
                with client.chat.completions.stream(**ask) as stream:
                    for _ in stream:
                        pass
                [choice] = stream.get_final_completion().choices
            else:
                [choice] = client.chat.completions.create(**ask).choices
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls
            asked = json.loads(call.function.arguments)
            assert call.function.name in ("weather", "book")
            assert asked["city"] in ("Oslo", "Rome") and asked["days"] in (1, 2)
            call = {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}: done"},
            ]
        last = client.chat.completions.create(
            model=NAME, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, seed=1
        )
        assert not last.choices[0].message.tool_calls
        assert len({m["tool_call_id"] for m in messages if m["role"] == "tool"}) == CALLS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_langchains_chat_openai(lm, engine):
    """Plain and streamed text, tools in a loop, structured output, token counts, errors."""
    chat_models = pytest.importorskip("langchain_openai")
    import openai
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as langchain_tool
    from pydantic import BaseModel

    @langchain_tool
    def weather(days: bool) -> str:
        """The weather of some days."""
        return f"cold, {days}"

    class Trip(BaseModel):
        is_far: bool
        by_rail: bool

    with serving(speaking(lm, "hermes"), engine) as url:
        options = {"base_url": f"{url}/v1", "api_key": "-", "model": NAME, "max_retries": 0}
        with contextlib.closing(openai.OpenAI(base_url=f"{url}/v1", api_key="-")):
            chat = chat_models.ChatOpenAI(**options, max_tokens=20, seed=1, temperature=1)
            whole = chat.invoke("hi")
            assert whole.usage_metadata["output_tokens"] <= 20 and whole.content
            chunks = list(chat.stream("hi"))
            assert "".join(chunk.content for chunk in chunks) == whole.content
            asking = chat_models.ChatOpenAI(**options, max_tokens=300, seed=2, temperature=1)
            agent = asking.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
            messages = [HumanMessage("Where is it cold?")]
            for _ in range(CALLS):
                answer = agent.invoke(messages)
                [call] = answer.tool_calls
                assert call["name"] == "weather" and type(call["args"]["days"]) is bool
                result = weather.invoke(call["args"])
                messages += [answer, ToolMessage(result, tool_call_id=call["id"])]
            total = None
            for chunk in agent.stream(messages):
                total = chunk if total is None else total + chunk
            [call] = total.tool_calls
            assert type(call["args"]["days"]) is bool
            trip = asking.with_structured_output(Trip, method="json_schema").invoke("plan")
            assert isinstance(trip, Trip)
            trip = asking.with_structured_output(Trip, method="function_calling").invoke("plan")
            assert isinstance(trip, Trip)
            with pytest.raises(openai.BadRequestError):
                chat.invoke("x" * 5000)

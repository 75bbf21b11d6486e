"""Harmony: messages in channels, as gpt-oss writes them, by hand and by OpenAI's client."""

from __future__ import annotations

import dataclasses
import os

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.tools.harmony import ChannelReader
from tests.helpers.cases import on_demand
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, byte_tokenizer, talking
from tests.serving.http import test_tools
from tests.serving.http.test_tools import CITY, MAX_LEN, ONE, TOOLS, USER, Scripted, spelt, tool

on_demand("openai")
NAMES = ("start", "channel", "message", "end", "call", "return", "constrain")
SPECIAL = [f"<|{name}|>" for name in NAMES]
# As gpt-oss's template has it, in small.
TEMPLATE = (
    "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ONE}"
FINAL = "<|channel|>final<|message|>It rains.\n\nTake <|care|> and < x."
SAMPLES = {  # text: (reasoning, content, calls)
    f"{THOUGHT}{FINAL}<|return|>": ("I look.", "It rains.\n\nTake <|care|> and < x.", []),
    FINAL: ("", "It rains.\n\nTake <|care|> and < x.", []),
    f"{THOUGHT}{CALL}<|call|>": ("I look.", "", [("weather", ONE)]),
    f"{THOUGHT} to=functions.weather<|channel|>commentary json<|message|>{ONE}": (
        "I look.",
        "",
        [("weather", ONE)],
    ),
    f"{THOUGHT}<|channel|>commentary<|message|>A moment.<|end|><|start|>assistant{CALL}<|call|>"
    f"<|start|>assistant<|channel|>commentary to=functions.time json<|message|>{{}}<|call|>": (
        "I look.",
        "A moment.",
        [("weather", ONE), ("time", "{}")],
    ),
    f"{THOUGHT}{THOUGHT}<|channel|>commentary<|message|>One<|end|><|start|>assistant"
    "<|channel|>final<|message|>two": ("I look.\nI look.", "One\ntwo", []),
    "<|channel|>commentary to=browser.search<|message|>{}<|call|>": ("", "{}", []),
    "Plain text.": ("", "Plain text.", []),
    "<|channel|>analysis<|message|>cut short": ("cut short", "", []),
    "": ("", "", []),
}


def read(pieces, **options):
    reader = ChannelReader(("weather", "time"), **options)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.close()
    said = {
        kind: "".join(part.text for part in parts if part.kind == kind)
        for kind in ("reasoning", "content")
    }
    calls = [
        (name.text, "".join(p.text for p in parts if p[::2] == ("arguments", name.number)))
        for name in parts
        if name.kind == "call"
    ]
    assert len(calls) == reader.calls
    return said["reasoning"], said["content"], calls


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_whole_by_character_and_in_two(text):
    want = SAMPLES[text]
    assert read([text]) == want
    assert read(text) == want
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]]) == want


def test_further_calls_are_dropped_where_one_is_allowed():
    text = f"{CALL}<|call|><|start|>assistant{CALL}<|call|>"
    assert read([text], only_one=True) == ("", "", [("weather", ONE)])


def tokenizer():
    return byte_tokenizer(TEMPLATE, SPECIAL)


def test_a_client_gets_reasoning_content_and_calls(lm):
    """Whole and streamed."""
    own = tokenizer()
    with (
        FakeEngine(max_len=MAX_LEN) as engine,
        talking(dataclasses.replace(lm, tokenizer=own), engine) as client,
    ):
        server = Scripted(client, engine, own)
        choice = server.ask(f"{THOUGHT}{CALL}")
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert spelt(choice.message) == [("weather", ONE)]
        assert choice.message.reasoning_content == "I look."
        assert server.prompt().endswith("<|start|>assistant")
        choice = server.ask(f"{THOUGHT}<|channel|>final<|message|>It rains.")
        assert (choice.finish_reason, choice.message.content) == ("stop", "It rains.")
        before = {"role": "assistant", "content": "Well.", "reasoning_content": "I recall."}
        server.ask("", messages=[*USER, before, *USER], reasoning_effort="high")
        assert server.prompt().startswith("Reasoning: high<|start|>user")
        assert "<|channel|>analysis<|message|>I recall.<|end|>" in server.prompt()


def test_a_grammar_holds_the_last_message(lm):
    """A forced call, a strict one among free text, and a form of the final message."""
    own = tokenizer()
    prompts = Prompts(dataclasses.replace(lm, tokenizer=own), NAME, MAX_LEN, 8)

    def matches(text: str, **fields) -> bool:
        body = Chat(**{"model": NAME, "messages": USER, "seed": 1, **fields})
        [request] = prompts.chat(body, "x").requests
        return test_tools.matches(request.grammar, text, own)

    forced = {"tools": TOOLS, "tool_choice": "required"}
    assert matches(f"{THOUGHT}{CALL}", **forced) and matches(CALL, **forced)
    assert not matches(FINAL, **forced) and not matches(CALL.replace("Oslo", "Bonn"), **forced)
    strict = {"tools": [tool("weather", CITY, strict=True), TOOLS[1]]}
    assert matches(f"{THOUGHT}{CALL}", **strict)
    assert matches("<|channel|>final<|message|>It rains.", **strict)
    assert not matches(CALL.replace("Oslo", "Bonn"), **strict)
    form = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    }
    assert matches(f"{THOUGHT}<|channel|>final<|message|>{ONE}", **form)
    assert not matches("<|channel|>final<|message|>It rains.", **form)


@pytest.mark.skipif(
    "TIKTOKEN_ENCODINGS_BASE" not in os.environ, reason="openai-harmony's vocabulary is not here"
)
def test_openai_harmony_reads_the_samples_alike():
    """TIKTOKEN_ENCODINGS_BASE: a folder with ``o200k_base.tiktoken``."""
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    for text, (reasoning, content, calls) in SAMPLES.items():
        if not text or text.startswith(("Plain", "<|channel|>commentary to=browser")):
            continue  # no answers of the format
        if "<|care|>" in text:
            continue  # no token of the vocabulary
        tokens = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(
            tokens, harmony.Role.ASSISTANT, strict=False
        )
        found = {"analysis": [], "final": [], "call": []}
        for message in messages:
            body = message.content[0].text
            if message.recipient:
                found["call"].append((message.recipient.removeprefix("functions."), body))
            else:
                key = "analysis" if message.channel == "analysis" else "final"
                found[key].append(body)
        assert "\n".join(found["analysis"]) == reasoning
        assert "\n".join(found["final"]) == content
        assert found["call"] == calls

"""Forced and strict calls in every format: a grammar allows the texts that models of the family
write, and no others; whether the marks are special tokens of the tokenizer or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("llguidance")

from jaxllama.engine.grammar import GrammarCompiler
from jaxllama.engine.request import Grammar
from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.tools.lark import LarkRules
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.http_server import CFG, NAME, byte_tokenizer, tiny_model
from tests.serving.test_tool_formats import FORMS, TEMPLATES, UNMARKED, WRITTEN, render

MAX_LEN = 4096
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1},
        "exact": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "in": {"$ref": "#/$defs/Place"}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
GOOD: list[dict[str, Any]] = [
    {"city": "Oslo", "days": 1},
    {"city": "two\nlines <b>", "unit": "F", "days": 12},
    {
        "city": "",
        "days": 3,
        "exact": False,
        "where": {"lat": 1.5, "in": {"lat": -2}},
        "tags": ["a b", "c"],
    },
    {"city": "x", "days": 7, "tags": []},
]
BAD: list[dict[str, Any]] = [
    {"city": "Oslo"},
    {"city": "Oslo", "unit": "K", "days": 1},
    {"city": "Oslo", "days": "soon"},
    {"city": "Oslo", "days": 1, "where": {"lat": "north"}},
    {"city": "Oslo", "days": 1, "more": 2},
]
USER = [{"role": "user", "content": "hi"}]
MARKED = [name for name in WRITTEN if name not in UNMARKED]


def own_tokenizer(form: str, is_special: bool) -> Tokenizer:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}"
        "{% endif %}{# " + TEMPLATES[form].replace("{{", "").replace("}}", "") + " #}"
    )
    marks = FORMS[form].spelling.split()
    special = [mark for mark in dict.fromkeys(marks) if mark[0] in "<[" and mark[-1] in ">]"]
    special = [m for m in special if m.count("<") < 2 and m not in ("<tool_call>", "</tool_call>")]
    special = ["｜DSML｜"] if form in ("deepseek-v3.2", "deepseek-v4") else special
    return byte_tokenizer(template, special[:8] if is_special else ())


class Held:
    """What a grammar allows."""

    def __init__(self, form: str, is_special: bool = False, **fields: Any) -> None:
        self._tokenizer = own_tokenizer(form, is_special)
        self._cfg = dataclasses.replace(CFG, vocab_size=272)
        lm = dataclasses.replace(tiny_model(), tokenizer=self._tokenizer)
        tools = [
            {
                "type": "function",
                "function": {"name": "weather", "parameters": SCHEMA, "strict": True},
            },
            {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
        ]
        body = {"model": NAME, "messages": USER, "tools": tools, "seed": 1, **fields}
        grammar = Prompts(lm, NAME, MAX_LEN, 8).chat(Chat(**body), "x").requests[0].grammar
        assert isinstance(grammar, Grammar)
        self._grammar = grammar
        self._compiler = GrammarCompiler(self._tokenizer, 272, CFG.eos_token_ids)

    def __contains__(self, text: str) -> bool:
        matcher = self._compiler.matcher(self._grammar)

        def may_follow(token: int) -> bool:
            forced, mask, _ = matcher.ahead()
            return token == forced[0] if forced else bool(int(mask[token // 32]) >> token % 32 & 1)

        for token in self._tokenizer.encode(text, add_special=False):
            if matcher.is_complete or not may_follow(token):
                return False
            matcher.read([token])
        return matcher.is_complete or may_follow(CFG.eos_token_ids[0])


def check(
    form: str, is_special: bool, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    forced = Held(form, is_special, tool_choice="required")
    strict = Held(form, is_special)
    said = "" if form in UNMARKED else "Let me see. "
    for arguments in good:
        text = render(form, [("weather", arguments)])
        assert text in forced, text
        assert said + text in strict, text
    for arguments in bad:
        text = render(form, [("weather", arguments)])
        assert text not in forced, text
        assert said + text not in strict, text
    assert render(form, [("now", {})]) in forced
    two = render(form, [("weather", GOOD[0]), ("now", {})])
    assert (two in forced) == (form != "llama3"), "its template shows one at a time"
    one = Held(form, is_special, tool_choice="required", parallel_tool_calls=False)
    assert two not in one
    assert "hello" not in forced and "It is cold." in strict
    named = {"type": "function", "function": {"name": "now"}}
    only = Held(form, is_special, tool_choice=named)
    assert render(form, [("now", {})]) in only
    assert render(form, [("weather", GOOD[0])]) not in only


# One of each reader with each way to hold an argument; the others differ in their marks.
COVERING = ("qwen-xml", "glm-4.7", "gemma", "pythonic", "kimi")


@pytest.mark.parametrize("form", COVERING)
def test_forced_and_strict_calls_keep_the_form_and_the_schema(form):
    check(form, False, GOOD[:3], BAD)


@pytest.mark.parametrize("form", ["deepseek-v3.2", "kimi"])
def test_marks_that_are_special_tokens(form):
    check(form, True, GOOD[:2], BAD[:2])


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITTEN)
def test_every_format_holds_forced_and_strict_calls(form):
    check(form, False, GOOD, BAD)
    if form in MARKED:
        check(form, True, GOOD, BAD)


@pytest.mark.parametrize("form", ["qwen-xml", "gemma", "pythonic"])
def test_keywords_of_a_wrong_type_count_as_absent(form):
    def rules(bounds: dict[str, Any], required: object) -> tuple[str, dict[str, str]]:
        properties = {"tags": {"type": "array", **bounds}} if form != "qwen-xml" else {}
        schema = {"properties": {"city": {"type": "string"}, **properties}, "required": required}
        lark = LarkRules(byte_tokenizer())
        return FORMS[form].rule("weather", schema, False, lark), lark._rules

    for required in (True, "city", {"city": 1}):
        assert rules({"minItems": "2", "maxItems": [3]}, required) == rules({}, [])

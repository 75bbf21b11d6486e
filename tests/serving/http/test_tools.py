"""Calls of tools and reasoning, by OpenAI's own client: what models write (by script), and what a
grammar allows.  ``test_real_engine`` has what a grammar makes a model without sense write."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from jaxllama.engine import grammar_process
from jaxllama.engine.grammar import GrammarCompiler
from jaxllama.engine.request import Grammar
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import tools
from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.tools.formats import FORMATS
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.cases import on_demand
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import CFG, NAME, byte_tokenizer, talking

openai = on_demand("openai")
MAX_LEN = 2048
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
# As checkpoints' templates have it, in small.
TURNS = (
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name }}>"
    "{% if m.reasoning_content %}<why>{{ m.reasoning_content }}</why>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL%{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>",
    "llama3": '<|python_tag|>{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}",
    "mistral-list": '[TOOL_CALLS][{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}]",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
}
FORMS = {form.name: form for form in FORMATS}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict | None = None, **more) -> dict:
    function = {"name": name, "parameters": parameters or {"type": "object"}, **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", CITY), tool("time")]
USER = [{"role": "user", "content": "hi"}]


def tokenizer(form: str, tail: str = "") -> Tokenizer:
    return byte_tokenizer(TURNS.replace("CALL%", CALLS[form]) + tail, SPECIAL)


class Scripted(NamedTuple):
    """OpenAI's client of a server whose model answers by script."""

    client: Any
    engine: FakeEngine
    tokenizer: Tokenizer

    def ask(self, text: str, **fields):
        """The choice of the answer ``text``, which the client reads alike from the stream."""
        self.engine.answer = says(self.tokenizer, text)
        ask = {"model": NAME, "messages": USER, "tools": TOOLS, "seed": 1, **fields}
        [choice] = self.client.chat.completions.create(**ask).choices
        if choice.finish_reason == "length":
            return choice  # the client's reader refuses it
        with self.client.chat.completions.stream(**ask) as stream:
            for _ in stream:
                pass
        [streamed] = stream.get_final_completion().choices
        assert streamed.finish_reason == choice.finish_reason
        assert (streamed.message.content or "") == (choice.message.content or "")
        assert spelt(streamed.message) == spelt(choice.message)
        return choice

    def prompt(self) -> str:
        """What the model was asked last."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt, skip_special=False)


@contextlib.contextmanager
def scripted(lm, form: str, tail: str = "") -> Iterator[Scripted]:
    own = tokenizer(form, tail)
    with (
        FakeEngine(max_len=MAX_LEN) as engine,
        talking(dataclasses.replace(lm, tokenizer=own), engine) as client,
    ):
        yield Scripted(client, engine, own)


def spelt(message) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


ONE = '{"city": "Oslo", "days": 1}'
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": %s}; {"name": "time", "parameters": {}}',
    "mistral-list": '[TOOL_CALLS][{"name": "weather", "arguments": %s}, '
    '{"name": "time", "arguments": {}}]',
    "mistral": "[TOOL_CALLS]weather[ARGS]%s[TOOL_CALLS]time[ARGS]{}",
}

TIME = {
    "hermes": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "time", "parameters": {}}',
    "mistral-list": '[TOOL_CALLS][{"name": "time", "arguments": {}}]',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
}


@pytest.mark.core
@pytest.mark.parametrize("form", WRITTEN)
def test_calls_in_every_format(lm, form):
    with scripted(lm, form) as server:
        choice = server.ask(WRITTEN[form] % ONE)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert spelt(choice.message) == [("weather", ONE), ("time", "{}")]
        [first, _] = choice.message.tool_calls
        assert len(first.id) == (9 if "mistral" in form else 29) and first.id.isascii()
        one = server.ask(WRITTEN[form] % ONE, parallel_tool_calls=False)
        assert spelt(one.message) == [("weather", ONE)]
        # The client sends the call back as it came, with what the tool said.
        turns = [*USER, choice.message, {"role": "tool", "content": "12", "tool_call_id": first.id}]
        server.ask("fine", messages=turns)
        shown = server.prompt()
        mark = FORMS[form].mark or "<|python_tag|>"
        assert f"<assistant>{mark}" in shown and '"Oslo"' in shown and "<tool weather>12\n" in shown

        plain = server.ask("It is { cold }.\n")
        assert (plain.finish_reason, plain.message.content) == ("stop", "It is { cold }.\n")
        assert plain.message.tool_calls is None
        stranger = WRITTEN[form].replace("weather", "whether").split("; ")[0] % ONE
        assert "whether" in server.ask(stranger).message.content, "no tool of that name: text"
        cut = server.ask(WRITTEN[form] % ONE, max_tokens=WRITTEN[form].index("%") + 5)
        assert cut.finish_reason == "length"


@pytest.mark.core
def test_words_before_a_call_and_between_events(lm):
    with scripted(lm, "hermes") as server:
        choice = server.ask("Let me see.\n\n" + WRITTEN["hermes"] % ONE, logprobs=True)
        assert choice.message.content == "Let me see." and len(choice.message.tool_calls) == 2
        assert len(choice.logprobs.content) == len("Let me see.\n\n" + WRITTEN["hermes"] % ONE)
        assert server.ask("<tool_call> is a mark").message.content == "<tool_call> is a mark"
        none = server.ask(WRITTEN["hermes"] % ONE, tool_choice="none")
        assert none.message.content == WRITTEN["hermes"] % ONE
        other = [{"type": "function", "function": {"name": "time"}}]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": other}}
        choice = server.ask(WRITTEN["hermes"] % ONE, tool_choice=allowed)
        assert spelt(choice.message) == [("time", "{}")] and "weather" in choice.message.content


@pytest.mark.core
def test_a_reader_gives_the_same_however_the_text_is_cut():
    for form, text in WRITTEN.items():
        text = f"{'' if form == 'llama3' else 'so: '}{text % ONE}"
        for step in (1, 2, 3, 5, 1000):
            reader = FORMS[form].reader({"weather": CITY, "time": {}})
            parts = [p for i in range(0, len(text), step) for p in reader.feed(text[i : i + step])]
            parts += reader.close()
            assert [p.text for p in parts if p.kind == "call"] == ["weather", "time"]
            arguments = ["", ""]
            for part in parts:
                if part.kind == "arguments":
                    arguments[part.number] += part.text
            assert arguments == [ONE, "{}"]
            said = "".join(p.text for p in parts if p.kind == "content")
            assert said == ("" if form == "llama3" else "so:")


@pytest.mark.parametrize(
    ("written", "want"),
    [
        ('{"arguments": {"a": 1}, "name": "time"}', '{"a": 1}'),
        ('{"name": "time", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "time"}', "{}"),
        ('{"type": "function", "name": "time", "parameters": {"a": "}\\"]"}}', '{"a": "}\\"]"}'),
        ('{"name": "time", "arguments": {"a": [{', '{"a": [{'),
        ('{"name": "time", "arguments": {"a": 1}, "id": "x"}', '{"a": 1}'),
        ("{time}", None),
        ('{"answer": 5}', None),
        ('{"name": ["time"], "arguments": {}}', None),
    ],
)
def test_what_weak_models_write(written, want):
    reader = FORMS["llama3"].reader({"time": {}})
    parts = [*reader.feed(written), *reader.close()]
    if want is None:
        assert "".join(part.text for part in parts) == written and reader.calls == 0
    else:
        assert [parts[0].text, "".join(part.text for part in parts[1:])] == ["time", want]


@pytest.mark.core
@pytest.mark.parametrize(("first", "last"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_reasoning_is_split_off(lm, first, last):
    tail = (
        "{% if open %}" + first + "\n{% elif closed %}" + first + "\n\n" + last + "\n\n{% endif %}"
    )
    thought, said = f"\nWell, 1 < 2.\n{last}\n\n", "Yes."
    with scripted(lm, "hermes", tail) as server:
        for text, variables in ((first + thought + said, {}), (thought + said, {"open": True})):
            extra = {"chat_template_kwargs": variables}
            choice = server.ask(text, extra_body=extra)
            assert (choice.message.content, choice.finish_reason) == (said, "stop")
            assert choice.message.reasoning_content == "Well, 1 < 2."
            called = server.ask(text + WRITTEN["hermes"] % ONE, extra_body=extra)
            assert called.message.reasoning_content == "Well, 1 < 2."
            assert called.message.content == said and len(called.message.tool_calls) == 2
        extra = {"chat_template_kwargs": {"open": True}}
        cut = server.ask(thought + said, extra_body=extra, max_tokens=8)
        assert (cut.message.reasoning_content, cut.message.content) == ("Well, 1", "")
        off = server.ask(said, extra_body={"chat_template_kwargs": {"closed": True}})
        assert off.message.content == said and off.message.reasoning_content is None
        turns = [*USER, choice.message, *USER]
        server.ask(said, messages=turns)
        shown = server.prompt()
        assert "<why>Well, 1 < 2.</why>Yes." in shown


def test_continued_messages_and_template_variables(lm):
    with scripted(lm, "hermes", "{{ more }}") as server:

        def prompt(**extra) -> str:
            messages = [*USER, {"role": "assistant", "content": "I think "}]
            server.client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=1, extra_body=extra
            )
            return server.prompt()

        whole = "<user>hi\n<assistant>I think "
        assert prompt() == whole + "\n<assistant>"
        assert prompt(add_generation_prompt=False) == whole + "\n"
        assert prompt(continue_final_message=True) == whole
        assert prompt(chat_template_kwargs={"more": "!"}) == whole + "\n<assistant>!"
        for extra in (
            {"continue_final_message": True, "add_generation_prompt": True},
            {"chat_template_kwargs": {"messages": []}},
            {"chat_template_kwargs": {"self": 1}},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                prompt(**extra)
            assert refused.value.param == next(iter(extra))


def test_choices_that_cannot_be(lm):
    named = {"type": "function", "function": {"name": "nobody"}}
    with scripted(lm, "hermes") as server:
        for fields in (
            {"tool_choice": "required", "tools": openai.NOT_GIVEN},
            {"tool_choice": named},
            {"tool_choice": "any"},
            {"tool_choice": {"type": "custom", "custom": {"name": "time"}}},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            {"tools": [TOOLS[0], TOOLS[0]]},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                server.ask("", **fields)
            assert refused.value.param == next(iter(fields))


# Held to it


def constraint(lm, form: str, tail: str = "", **fields) -> Grammar | None:
    lm = dataclasses.replace(lm, tokenizer=tokenizer(form, tail))
    body = {"model": NAME, "messages": USER, "tools": TOOLS, "seed": 1, **fields}
    call = Prompts(lm, NAME, MAX_LEN, 8).chat(Chat(**body), "x")
    return call.requests[0].grammar


def matches(grammar: Grammar, text: str, own: Tokenizer | None = None) -> bool:
    """Whether an answer may be this text."""
    own = own or tokenizer("hermes")
    matcher = GrammarCompiler(own, CFG.vocab_size, CFG.eos_token_ids).matcher(grammar)

    def may_follow(token: int) -> bool:
        forced, mask, _ = matcher.ahead()
        return token == forced[0] if forced else bool(int(mask[token // 32]) >> token % 32 & 1)

    for token in own.encode(text, add_special=False):
        if matcher.is_complete or not may_follow(token):
            return False
        matcher.read([token])
    return matcher.is_complete or may_follow(CFG.eos_token_ids[0])


@pytest.mark.parametrize("form", WRITTEN)
def test_forced_calls_are_nothing_but_calls(lm, form):
    two = WRITTEN[form] % ONE
    required = constraint(lm, form, tool_choice="required")
    one = constraint(lm, form, tool_choice="required", parallel_tool_calls=False)
    assert matches(required, two) == (form != "llama3"), "its template shows one at a time"
    assert matches(required, two.replace("CALLS][", "CALLS] [")) == (form != "llama3")
    assert not matches(one, two) and not matches(required, "hello")
    assert not matches(required, two.replace("Oslo", "Bonn"))
    named = {"type": "function", "function": {"name": "time"}}
    assert matches(constraint(lm, form, tool_choice=named), TIME[form])
    assert not matches(constraint(lm, form, tool_choice=named), two)


@pytest.mark.core
@pytest.mark.parametrize("form", WRITTEN)
def test_strict_arguments_follow_their_schema_among_free_text(lm, form):
    assert constraint(lm, form) is None, "nothing is strict"
    strict = constraint(lm, form, tools=[tool("weather", CITY, strict=True), tool("time")])
    two = WRITTEN[form] % ONE
    said = "" if form == "llama3" else "Let me see. "
    assert matches(strict, said + two) == (form != "llama3")
    assert matches(strict, "It is cold.")
    assert not matches(strict, said + two.replace("Oslo", "Bonn"))
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    either = constraint(lm, form, response_format=schema)
    assert matches(either, '"yes"') and not matches(either, "yes")
    assert matches(either, two) == (form != "llama3")


@pytest.mark.parametrize(("first", "last"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_reasoning_is_free_before_a_form(lm, first, last):
    tail = "{% if open %}" + first + "\n{% endif %}{# " + last + " #}"
    fields = {"tools": None, "guided_choice": ["yes", "no"]}
    closed = constraint(lm, "hermes", tail, **fields)
    opened = constraint(lm, "hermes", tail, **fields, chat_template_kwargs={"open": True})
    for grammar, begin in ((closed, first), (opened, "")):
        assert matches(grammar, f"{begin}who knows{last}\n\nyes")
        assert not matches(grammar, f"{begin}who knows{last}\n\nmaybe")
    assert matches(closed, "no") and not matches(opened, "no")
    forced = constraint(lm, "hermes", tail, tool_choice="required")
    assert matches(forced, f"{first}hm{last}\n" + WRITTEN["hermes"] % ONE)


FORMED = {
    "a choice": ({"guided_choice": ['é"', "b"]}, 'é"', "c"),
    "an expression": ({"guided_regex": "a+/b"}, "aa/b", "ab"),
    "a schema": ({"guided_json": {"enum": [1, 2]}}, "2", "3"),
    "a schema's text": ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "2", "3"),
    "an object": ({"structured_outputs": {"json_object": True}}, '{"a":1}', "[]"),
    "Lark": ({"guided_grammar": 'start: "a" b+\nb: "b"'}, "abb", "ba"),
    "GBNF": ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, "a12", "a"),
    "what is not said": ({"bad_words": ["bad", 'é"']}, "a ba é", "a bad"),
    "the same in quotes": ({"bad_words": ["bad", 'é"']}, '"d"\n', 'so é"!'),
    "tags": (
        {
            "response_format": {
                "type": "structural_tag",
                "triggers": ["<n"],
                "structures": [
                    {"begin": "<num>", "schema": {"type": "integer"}, "end": "</num>"},
                    {"begin": "<nil>", "schema": {"type": "null"}, "end": "</nil>"},
                ],
            }
        },
        "so <num>12</num> and <nil>null</nil>.",
        "so <num>null</num>",
    ),
}


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("thinks", [False, True])
def test_forms_of_output(lm, name, thinks):
    fields, good, bad = FORMED[name]
    tail = "{{ '<think>' }}{# </think> #}" if thinks else ""
    begin = "hm</think>" if thinks else ""
    grammar = constraint(lm, "hermes", tail, tools=None, **fields)
    assert matches(grammar, begin + good) and not matches(grammar, begin + bad)


def test_the_format_is_that_of_the_template_for_tools(lm):
    templates = {"default": TURNS, "tool_use": TURNS.replace("CALL%", CALLS["mistral"])}
    named = byte_tokenizer(templates, SPECIAL)
    prompts = Prompts(dataclasses.replace(lm, tokenizer=named), NAME, MAX_LEN, 8)
    body = {"model": NAME, "messages": USER, "tools": TOOLS}
    assert prompts.chat(Chat(**body), "x").reading.tools.format.name == "mistral"


# What templates of families write around calls that are no known JSON.
UNKNOWN = {
    "none": "{{ tools }}",
    "hunyuan": "<tool_call>f<tool_sep>",
    "phi": "<|tool_call|>",
    "command-r": "<|START_ACTION|>",
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_tools_of_a_template_of_unknown_form_are_refused(lm, family):
    template = TURNS.replace("CALL%", "") + "{# " + UNKNOWN[family] + " #}"
    own = byte_tokenizer(template, SPECIAL)
    prompts = Prompts(dataclasses.replace(lm, tokenizer=own), NAME, MAX_LEN, 8)
    body = {"model": NAME, "messages": USER, "tools": TOOLS}
    with pytest.raises(ApiError, match=r"tools: .* a form that is not known here") as refused:
        prompts.chat(Chat(**body), "x")
    assert refused.value.status == 400 and refused.value.param == "tools"
    assert prompts.chat(Chat(**body, tool_choice="none"), "x").reading is None


# Schemas that the library cannot hold an answer to in full: (schema, what it allows, what not).
BEYOND = {
    "uniqueItems": ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True}, "[1,1]", "[2]"),
    "not": ({"type": "integer", "not": {"const": 3}}, "3", '"3"'),
    "then": ({"type": "integer", "if": {"const": 1}, "then": {"const": 2}}, "1", '"1"'),
    "contains": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}},
        "[2]",
        "[3]",
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b":1}', "1"),
    "format": ({"type": "string", "format": "idn-email"}, '"x"', "1"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", '"1"'),
    "look": ({"type": "string", "pattern": "^(?=.*a)b$"}, '"c"', "1"),
    r"(a)\1": (
        {
            "type": "object",
            "patternProperties": {r"^(a)\1$": {"type": "null"}},
            "properties": {"n": {"enum": [1]}},
            "required": ["n"],
        },
        '{"n":1}',
        '{"n":2}',
    ),
    "exclusiveMaximum": (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1e30},
        "7",
        '"x"',
    ),
    "minimum": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-5", "1.5"),
    "minLength": ({"type": "string", "minLength": 10**12, "maxLength": 10**13}, '"a"', "1"),
    "$ref": ({"anyOf": [{"enum": [1]}, {"$ref": "https://json.schema/x"}]}, "1", "{"),
}
BOUNDS = {"minimum": -(2**63)}, {"maximum": 2**63 - 1}  # too much only together
BEYOND["Unsupported maximum"] = ({"type": "integer", "allOf": list(BOUNDS)}, "-5", "1.5")


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_schema_that_is_not_strict_is_held_to_as_far_as_can_be(lm, name, thinks):
    schema, good, bad = BEYOND[name]
    tail, begin = ("{{ '<think>' }}{# </think> #}", "hm</think>") if thinks else ("", "")

    def call(**more):
        asked = {"type": "json_schema", "json_schema": {"schema": schema, **more}}
        own = dataclasses.replace(lm, tokenizer=tokenizer("hermes", tail))
        body = {"model": NAME, "messages": USER, "seed": 1, "response_format": asked}
        return Prompts(own, NAME, MAX_LEN, 8).chat(Chat(**body), "x")

    lenient = call()
    assert any(name in note or "(?=" in note for note in lenient.notes)
    assert matches(lenient.requests[0].grammar, begin + good)
    assert not matches(lenient.requests[0].grammar, begin + bad)
    if schema.get("type") == "object":
        schema = {**schema, "additionalProperties": False}
    strict = call(strict=True)
    assert not strict.notes
    with pytest.raises(JaxLlamaError):
        matches(strict.requests[0].grammar, begin + good)


REGEXES = [
    (r"\d\/\d", "1/2", "12"),
    ("a/b", "a/b", "ab"),
    (r"\\/", "\\/", "/"),
    (r"[/\\]+x", "/\\x", "x"),
    ("a\nb", "a\nb", "ab"),
    ('"/"', '"/"', "/"),
]


@pytest.mark.parametrize(("regex", "good", "bad"), REGEXES)
def test_a_regex_may_have_slashes_wherever_it_stands(lm, regex, good, bad):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{regex}$"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    for tail, begin in (("", ""), ("{{ '<think>' }}{# </think> #}", "hm</think>")):
        own = dataclasses.replace(lm, tokenizer=tokenizer("hermes", tail))
        for more in ({}, {"tools": TOOLS}):
            body = Chat(model=NAME, messages=USER, guided_regex=regex, **more)
            grammar = Prompts(own, NAME, MAX_LEN, 8).chat(body, "x").requests[0].grammar
            assert matches(grammar, begin + good) and not matches(grammar, begin + bad)
        offered = [tool("weather", schema, strict=True)]
        body = Chat(model=NAME, messages=USER, tools=offered, tool_choice="required")
        grammar = Prompts(own, NAME, MAX_LEN, 8).chat(body, "x").requests[0].grammar
        for said in (good, bad):
            text = TIME["hermes"].replace("time", "weather")
            text = begin + text.replace("{}", json.dumps({"a": said}))
            assert matches(grammar, text) == (said == good)


@pytest.mark.parametrize("name", ["look", "minimum", "minLength", "format"])
@pytest.mark.parametrize("form", WRITTEN)
def test_a_forced_call_is_held_to_its_schema_as_far_as_can_be(lm, form, name):
    schema = {"type": "object", "properties": {"a": BEYOND[name][0]}, "required": ["a"]}
    own = dataclasses.replace(lm, tokenizer=tokenizer(form))

    def call(**more):
        offered = [tool("weather", {**schema, "additionalProperties": False}, **more)]
        body = {"model": NAME, "messages": USER, "tools": offered, "tool_choice": "required"}
        return Prompts(own, NAME, MAX_LEN, 8).chat(Chat(**body), "x")

    lenient = call()
    assert any(note.startswith("weather: ") for note in lenient.notes)
    value = BEYOND[name][1]
    text = TIME[form].replace("time", "weather").replace("{}", f'{{"a": {value}}}')
    assert matches(lenient.requests[0].grammar, text)
    assert not matches(lenient.requests[0].grammar, text.replace(value, "[]"))
    with pytest.raises(JaxLlamaError):
        matches(call(strict=True).requests[0].grammar, text)


def test_schemas_of_tools_are_read_under_limits_and_beside_the_loop(lm, monkeypatch):
    schemas = [{"type": "object", "description": "a" * 2**22}, {"type": "object"}]
    given = [tool(f"f{number}", schema) for number, schema in enumerate(schemas)]
    body = {"model": NAME, "messages": USER, "tools": given, "tool_choice": "required"}
    own = dataclasses.replace(lm, tokenizer=tokenizer("hermes"))
    monkeypatch.setattr(grammar_process, "MEMORY", 2**20)
    with pytest.raises(JaxLlamaError, match="json_schema: .* more than 1 MiB of memory"):
        tools.offered(Chat(**body), own.tokenizer.chat_template)
    monkeypatch.undo()
    threads, enforceable = [], grammar_process.enforceable

    def noted(schemas):
        threads.append(threading.current_thread().name)
        return enforceable(schemas)

    monkeypatch.setattr(tools, "enforceable", noted)
    body["tools"] = [tool("weather", {"type": "object"})]
    with FakeEngine(max_len=MAX_LEN) as engine, talking(own, engine) as api:
        answer = api.chat.completions.create(**body, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert [name.startswith("bodies") for name in threads] == [True], threads


def test_an_impossible_schema_stays_an_error(lm):
    for limits in (
        {"minimum": 9, "maximum": 1},
        {"type": "string", "minLength": 9, "maxLength": 1},
    ):
        asked = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", **limits}}}
        body = {"model": NAME, "messages": USER, "response_format": asked}
        own = dataclasses.replace(lm, tokenizer=tokenizer("hermes"))
        call = Prompts(own, NAME, MAX_LEN, 8).chat(Chat(**body), "x")
        with pytest.raises(JaxLlamaError, match="Unsatisfiable"):
            matches(call.requests[0].grammar, "1")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "#/$defs/none"}, "Pointer '/$defs/none' does not exist"),
        ({"enum": []}, "Unsatisfiable schema: required property 'a' is unsatisfiable"),
    ],
)
def test_a_bad_schema_of_a_tool_is_named_without_our_grammar(lm, schema, reason):
    own = dataclasses.replace(lm, tokenizer=tokenizer("hermes"))
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [tool("weather", parameters)]
    body = Chat(model=NAME, messages=USER, tools=tools, tool_choice="required")
    call = Prompts(own, NAME, MAX_LEN, 8).chat(body, "x")
    assert call.requests[0].grammar.kind == "lark"
    with pytest.raises(JaxLlamaError) as error:
        matches(call.requests[0].grammar, "1")
    assert str(error.value) == f"json_schema: {reason}"


CLOSED = {"type": "object", "properties": {"n": {"enum": [1]}}, "additionalProperties": False}
OPEN = {"type": ["object", "null"], "properties": {"n": {"enum": [1]}}}
# Schemas that allow further properties in a part: (schema, the part's path).
OPEN_PARTS = [
    (OPEN, ""),
    ({**CLOSED, "additionalProperties": {"type": "integer"}}, ""),
    ({**CLOSED, "properties": {"a": CLOSED, "b": OPEN}}, ".properties.b"),
    ({**CLOSED, "$defs": {"Place": OPEN}}, ".$defs.Place"),
    ({"type": "array", "items": {"anyOf": [CLOSED, OPEN]}}, ".items.anyOf[1]"),
]


@pytest.mark.parametrize(("schema", "path"), OPEN_PARTS)
def test_a_strict_schema_forbids_further_properties(lm, schema, path):
    own = dataclasses.replace(lm, tokenizer=tokenizer("hermes"))

    def read(schema, place, strict=True):
        if place == "tools":
            more = {"tools": [tool("time", schema, strict=strict)]}
        else:
            form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
            more = {"response_format": form}
        body = Chat(**{"model": NAME, "messages": USER, **more})
        return Prompts(own, NAME, MAX_LEN, 8).chat(body, "x").requests[0].grammar

    for place, name in (
        ("tools", "tools[0].function.parameters"),
        ("response_format", "response_format.json_schema.schema"),
    ):
        assert read(CLOSED, place) is not None
        read(schema, place, strict=False)
        with pytest.raises(ApiError) as refused:
            read(schema, place)
        assert refused.value.status == 400 and refused.value.param == name
        assert str(refused.value).startswith(f"{name}{path}: an object of a strict schema")


def test_schemas_may_refer_to_their_parts(lm):
    parts = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["Oslo"]}},
    }
    grammar = constraint(lm, "hermes", tools=[tool("time", parts)], tool_choice="required")
    text = '<tool_call>\n{"name": "time", "arguments": {"at": "%s"}}\n</tool_call>'
    assert matches(grammar, text % "Oslo") and not matches(grammar, text % "Bonn")


def test_a_grammar_that_is_none_is_refused(lm):
    for kind, source in (("lark", "start: nobody"), ("lark", 'root ::= "a')):
        with pytest.raises(JaxLlamaError, match="lark: "):
            matches(Grammar(kind, source), "")

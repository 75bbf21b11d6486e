"""The table of formats: each is recognised by its family's template, reads what its models write
however the stream is cut, and holds forced and strict calls to its form.

The texts are written as the families' chat templates and model cards have them, in this file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxllama.serving.tools.formats import FORMATS, format_of

FORMS = {form.name: form for form in FORMATS if form.name != "harmony"}
NASTY = (
    "",
    " ",
    "Oslo",
    "line\nline",
    "\"quoted\" \\ 'single'",
    "{a: [1, 2}",
    "<b>bold</b> < > &",
    "é ☃ 🐍 \u2028",
    "</param",
    "[TOOL",
    "3",
    "true",
    "call:x{a:1}",
    "}\n]",
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "rate": {"type": "number"},
        },
    },
    "get_time.now-2": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
Call = tuple[str, dict[str, Any]]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else compact(value)


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return compact(value)


def tags(begin: str, key: str, end: str, argument: str) -> Callable[[Call], str]:
    def write(call: Call) -> str:
        body = "".join(argument % (k, as_text(v)) for k, v in call[1].items())
        return begin % call[0] + body + end

    return write


def dsml(call: Call) -> str:
    body = "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{as_text(v)}'
        "</｜DSML｜parameter>\n"
        for k, v in call[1].items()
    )
    return f'<｜DSML｜invoke name="{call[0]}">\n{body}</｜DSML｜invoke>\n'


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


def with_name(key: str) -> Callable[[Call], str]:
    return lambda call: f'{{"name": {compact(call[0])}, "{key}": {compact(call[1])}}}'


# format: (before all calls, between two, after them, how a call is written)
WRITTEN: dict[str, tuple[str, str, str, Callable[[Call], str]]] = {
    "hermes": (
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        with_name("arguments"),
    ),
    "llama3": ("", "; ", "", with_name("parameters")),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]", "", lambda c: f"{c[0]}[ARGS]{compact(c[1])}"),
    "mistral-list": ("[TOOL_CALLS][", ", ", "]", with_name("arguments")),
    "minimax-m1": ("<tool_calls>\n", "\n", "\n</tool_calls>", with_name("arguments")),
    "nemotron": ("<TOOLCALL>[", ", ", "]</TOOLCALL>", with_name("arguments")),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<｜tool▁calls▁end｜>",
        lambda c: f"{c[0]}\n```json\n{compact(c[1])}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁end｜>",
        lambda c: f"{c[0]}<｜tool▁sep｜>{compact(c[1])}<｜tool▁call▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        "<|tool_call_begin|>functions.",
        "<|tool_calls_section_end|>",
        lambda c: f"{c[0]}:0<|tool_call_argument_begin|>{compact(c[1])}<|tool_call_end|>",
    ),
    "qwen-xml": (
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        tags("<function=%s>\n", "", "</function>", "<parameter=%s>\n%s\n</parameter>\n"),
    ),
    "seed": (
        "<seed:tool_call>\n",
        "\n</seed:tool_call>\n<seed:tool_call>\n",
        "\n</seed:tool_call>",
        tags("<function=%s>\n", "", "</function>", "<parameter=%s>%s</parameter>\n"),
    ),
    "glm": (
        "<tool_call>",
        "</tool_call>\n<tool_call>",
        "</tool_call>",
        tags("%s\n", "", "", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
    ),
    "glm-4.7": (
        "<tool_call>",
        "</tool_call><tool_call>",
        "</tool_call>",
        tags("%s", "", "", "<arg_key>%s</arg_key><arg_value>%s</arg_value>"),
    ),
    "minimax": (
        "<minimax:tool_call>\n",
        "",
        "</minimax:tool_call>",
        tags('<invoke name="%s">\n', "", "</invoke>\n", '<parameter name="%s">%s</parameter>\n'),
    ),
    "deepseek-v3.2": ("<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>", dsml),
    "deepseek-v4": ("<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>", dsml),
    "pythonic": ("[", ", ", "]", python),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", python),
    "gemma": (
        "<|tool_call>call:",
        "<tool_call|><|tool_call>call:",
        "<tool_call|>",
        lambda c: c[0] + gemma(c[1], '<|"|>'),
    ),
    "function-gemma": (
        "<start_function_call>call:",
        "<end_function_call><start_function_call>call:",
        "<end_function_call>",
        lambda c: c[0] + gemma(c[1], "<escape>"),
    ),
}
UNMARKED = ("llama3", "pythonic")  # a call must stand at the beginning of the text
# What templates say, in small. Their marks decide.
TEMPLATES = {
    "hermes": '<tool_call>\n{"name": "' + "{{ c.name }}" + '", "arguments": ',
    "llama3": '{{ "<|start_header_id|>" + m.role }} {"name": function name, "parameters": ...}',
    "mistral": '{{ "[TOOL_CALLS]" + c.name + "[ARGS]" }}',
    "mistral-list": '{{ "[TOOL_CALLS][" }}',
    "minimax-m1": "<tool_calls>\n{{ c }}\n</tool_calls>",
    "nemotron": "<TOOLCALL>[{{ calls }}]</TOOLCALL>",
    "seed": "<seed:tool_call>\n<function=example_function_name>\n",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>\\n```json",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ n + '<｜tool▁sep｜>' + a",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "qwen-xml": "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>",
    "glm": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
    "glm-4.7": "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    "minimax": '<minimax:tool_call>\n<invoke name="',
    "deepseek-v3.2": "<｜DSML｜function_calls>",
    "deepseek-v4": "<｜DSML｜tool_calls>",
    "pythonic": "<|header_start|> Format: [func_name1(params_name1=params_value1), func_name2()]",
    "lfm2": "<|tool_call_start|>",
    "gemma": "<|tool_call>call:{{ name }}",
    "function-gemma": "<start_function_call>call:{{ name }}",
}


def draw_calls(draw: random.Random) -> list[Call]:
    def text() -> str:
        return "".join(draw.choices(NASTY, k=draw.randint(0, 3)))

    def value(depth: int) -> Any:
        kind = draw.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randint(0, 3))]
        if kind == 6:
            return {f"k{i}": value(depth - 1) for i in range(draw.randint(0, 3))}
        return [text(), draw.randint(-9, 9), True, None, 1.5][kind]

    makers: dict[str, Callable[[], Any]] = {
        "city": text,
        "days": lambda: draw.randint(-3, 10**6),
        "exact": lambda: draw.random() < 0.5,
        "where": lambda: {f"k{i}": value(2) for i in range(draw.randint(0, 3))},
        "tags": lambda: [value(2) for _ in range(draw.randint(0, 3))],
        "note": lambda: draw.choice((None, "as said", "two\nlines")),
        "rate": lambda: draw.choice((0.25, -1e-3, 7.5)),
    }
    calls: list[Call] = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.3:
            calls.append(("get_time.now-2", {"zone": text()} if draw.random() < 0.7 else {}))
        else:
            keys = draw.sample(list(makers), draw.randint(0, len(makers)))
            calls.append(("weather", {key: makers[key]() for key in keys}))
    return calls


def render(form: str, calls: list[Call]) -> str:
    before, between, after, write = WRITTEN[form]
    return before + between.join(map(write, calls)) + after


def read(form: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls) of an answer that comes in these pieces."""
    reader = FORMS[form].reader(FUNCTIONS)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.close()
    said = "".join(part.text for part in parts if part.kind == "content")
    names = [part.text for part in parts if part.kind == "call"]
    assert [part.number for part in parts if part.kind == "call"] == list(range(len(names)))
    assert reader.calls == len(names)
    arguments = [""] * len(names)
    for part in parts:
        if part.kind == "arguments":
            arguments[part.number] += part.text
    return said, list(zip(names, arguments, strict=True))


def pieces(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def damaged(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text))
    kind = draw.randrange(5)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + draw.randint(1, 8) :]
    if kind == 2:
        return text[:at] + draw.choice((*NASTY, "<tool_call>", "</", "｜>", "]", "(")) + text[at:]
    if kind == 3:
        return text[:at] + text[max(at - draw.randint(1, 20), 0) :]
    end = at + draw.randint(1, 12)
    return text[:at] + text[at:end][::-1] + text[end:]


def check(form: str, draw: random.Random) -> None:
    """One answer: whole, then damaged. Every way to cut it gives the same."""
    calls = draw_calls(draw)
    said = "" if form in UNMARKED else draw.choice(("", "So: ", "1 < 2 [a] {b}\n\n", "<tool"))
    text = said + render(form, calls)
    content, found = read(form, [text])
    assert [(name, json.loads(a)) for name, a in found] == calls, text
    assert content == said.rstrip(), text
    assert read(form, list(text)) == read(form, pieces(text, draw)) == (content, found), text
    bad = damaged(text, draw)
    content, found = read(form, [bad])
    assert read(form, list(bad)) == read(form, pieces(bad, draw)) == (content, found), bad
    # None invented: each call's name stands in the text, for each call once.
    for name in FUNCTIONS:
        assert sum(called == name for called, _ in found) <= bad.count(name), bad
    # None lost: a call of a tool that is not offered is text, and the next answer's calls are read.
    if form not in UNMARKED:
        stranger = render(form, [("nobody", {"city": "Oslo"})])
        content, found = read(form, [stranger + "\n" + text])
        assert "nobody" in content and "Oslo" in content
        assert [(name, json.loads(a)) for name, a in found] == calls, text


@pytest.mark.parametrize("form", WRITTEN)
def test_answers_in_every_format_however_they_are_cut(form):
    for seed in range(40):
        check(form, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITTEN)
def test_two_thousand_answers_in_every_format(form):
    for seed in range(1000, 3000):
        check(form, random.Random(seed))


def test_every_format_is_recognised_by_its_template():
    assert set(TEMPLATES) == set(WRITTEN) == set(FORMS)
    for name, template in TEMPLATES.items():
        found = format_of(template)
        assert found is not None and found.name == name
    assert format_of("<tool_call>{{ name }}<tool_sep>") is None
    first_of_lfm2 = format_of("List of tools: <|tool_list_start|>[{{ tool }}]<|tool_list_end|>")
    assert first_of_lfm2 is not None and first_of_lfm2.name == "lfm2"


OPENINGS = {  # that models at times leave out
    "qwen-xml": "<tool_call>\n",
    "seed": "<seed:tool_call>\n",
    "minimax": "<minimax:tool_call>\n",
    "deepseek-v3.2": "<｜DSML｜function_calls>\n",
    "deepseek-v4": "<｜DSML｜tool_calls>\n",
}


@pytest.mark.parametrize("form", OPENINGS)
def test_calls_without_their_opening_tag(form: str) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        calls = draw_calls(draw)
        text = "So: " + render(form, calls).replace(OPENINGS[form], "")
        content, found = read(form, pieces(text, draw))
        assert [(name, json.loads(a)) for name, a in found] == calls, text
        assert content == "So:"


def test_a_literal_may_have_its_quote_unescaped() -> None:
    for said in ("it's", 'say "hi" now', "'", "don't 'do' it", "a, b's"):
        for quote in "'\"":
            text = f"<|tool_call_start|>[weather(city={quote}{said}{quote}, days=2)]"
            if f"{quote}," in said:
                continue  # which ends a string
            for cut in (1, 3, 99):
                parts = [text[at : at + cut] for at in range(0, len(text), cut)]
                _, [(name, arguments)] = read("lfm2", parts)
                assert (name, json.loads(arguments)) == ("weather", {"city": said, "days": 2})


def test_a_lone_surrogate_before_the_name_stays_an_escape() -> None:
    whole = r'{"city": "\\\ud800é"}'
    for arguments in (whole, json.dumps(whole), r'"{\"city\": \"\\\\\ud800é\"}"'):
        text = f'{{"arguments": {arguments}, "name": "weather"}}'
        _, [(_, got)] = read("hermes", [f"<tool_call>\n{text}\n</tool_call>"])
        assert got.encode() and json.loads(got) == {"city": "\\\ud800é"}

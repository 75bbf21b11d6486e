"""Calls whose arguments are literals: Python's (Llama 3.2 and 4, LFM2), Gemma's.

    [NAME(KEY='VALUE', KEY=2), NAME()]                          Python
    <|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>,KEY:2}<tool_call|>     Gemma 4

Both have strings, numbers, truth values, null, lists and objects, and differ in their spelling. In
Gemma a string stands between two marks and has no escapes, and keys are bare. A bare word is a
string. Strings of the other kind are read, too.

Sources: the chat templates of Llama 4, LFM2, FunctionGemma and Gemma 4.
"""

from __future__ import annotations

import dataclasses
import json

from jaxllama.serving.tools.format import Functions
from jaxllama.serving.tools.lark import LarkRules, quoted, tight
from jaxllama.serving.tools.markup import text_pattern
from jaxllama.serving.tools.parts import begun
from jaxllama.serving.tools.written import (
    LONGEST_NAME,
    Parse,
    Source,
    WrittenFormat,
    as_json,
    json_text,
    properties,
    required,
    resolved,
    spelt,
    types_of,
)
from jaxllama.typing import JsonObject

MAX_DEPTH = 64  # of lists and objects in each other
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_ENDS = ",)]}"
_STRING = r"""/'([^'\\\n]|\\[\\'"nrt])*'/"""  # as Python writes it
_BOUNDS = ("pattern", "format", "minLength", "maxLength")
_ANY_KEY = "/[A-Za-z0-9_.-]{1,64}/"


class _Wrong(Exception):
    """The text is no literal."""


@dataclasses.dataclass(frozen=True)
class LiteralFormat(WrittenFormat):
    """A format with literals.

    brackets: around a call's arguments. colon: between an argument's name and its value. quote:
    around a string, "" for Python's quotes. comma: between arguments.
    """

    brackets: tuple[str, str] = ("(", ")")
    colon: str = "="
    quote: str = ""
    comma: str = ", "

    @property
    def spelling(self) -> str:
        return f"{super().spelling} {self.quote}"

    # Reading

    def read(self, source: Source, functions: Functions) -> Parse[bool]:
        yield from source.blanks()
        name = yield from source.name()
        if name not in functions or not (yield from source.skip(self.brackets[0])):
            return False
        close = self.brackets[1]
        yield from source.blanks()
        found = yield from source.next_of(close)
        key: str | None = None
        if found is None:
            key = yield from self._key(source, self.colon)
            if key is None:
                return False
        yield "call", name
        yield "arguments", "{"
        schema = functions[name]
        separator = ""
        try:
            while key is not None:
                yield "arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: "
                separator = ", "
                value_schema = properties(schema).get(key, {})
                yield from self._value(source, types_of(value_schema, schema), MAX_DEPTH)
                has_more = yield from source.skip(",")
                yield from source.blanks()
                found = yield from source.next_of(close)
                key = None
                if found is None and has_more:
                    key = yield from self._key(source, self.colon)
        except _Wrong:
            pass
        yield "arguments", "}"
        if found:
            source.take(len(close))
        return True

    def _key(self, source: Source, colon: str) -> Parse[str | None]:
        """Read a name and what follows it; None if there is none. It may stand in quotes."""
        yield from source.blanks()
        quotes = [quote for quote in (self.quote, '"', "'") if quote]
        quote = yield from source.next_of(*quotes)
        if quote is None:
            key = yield from source.name()
        else:
            source.take(len(quote))
            found = yield from source.up_to(quote, LONGEST_NAME)
            if found is None:
                return None
            key = found
        is_key = yield from source.skip(colon)
        return key if is_key and (key or quote) else None

    def _value(self, source: Source, kinds: frozenset[str], depth: int) -> Parse[None]:
        """Read a value, and yield its JSON while it comes. Raises _Wrong if it is none."""
        yield from source.blanks()
        while not source.text:
            yield from source.more()
        quotes = [quote for quote in (self.quote, '"', "'") if quote]
        quote = yield from source.next_of(*quotes)
        if quote is not None:
            source.take(len(quote))
            yield "arguments", '"'
            yield from self._string(source, quote)
            yield "arguments", '"'
        elif source.text[0] in "[{":
            if not depth:
                raise _Wrong
            yield from self._nested(source, depth - 1)
        else:
            yield from self._bare(source, kinds)

    def _nested(self, source: Source, depth: int) -> Parse[None]:
        is_object = source.take(1) == "{"
        close = "}" if is_object else "]"
        yield "arguments", "{" if is_object else "["
        separator = ""
        while not (yield from source.skip(close)):
            if separator and not (yield from source.skip(",")):
                raise _Wrong
            if separator and (yield from source.skip(close)):  # Python allows a last comma
                break
            yield "arguments", separator
            separator = ", "
            if is_object:
                key = yield from self._key(source, ":")
                if key is None:
                    raise _Wrong
                yield "arguments", f"{json.dumps(key, ensure_ascii=False)}: "
            yield from self._value(source, frozenset(), depth)
        yield "arguments", close

    def _bare(self, source: Source, kinds: frozenset[str]) -> Parse[None]:
        """Read a number or a word, up to the end of a value."""
        text = ""
        while True:
            n = next((i for i, char in enumerate(source.text) if char in _ENDS), len(source.text))
            is_over = n < len(source.text)
            text += source.take(n)
            if is_over:
                break
            yield from source.more()
        if not text.strip():
            raise _Wrong
        found = as_json(text) if not kinds or "string" in kinds else None
        yield "arguments", found or spelt(text.strip(), kinds)

    def _string(self, source: Source, quote: str) -> Parse[None]:
        """Read a string up to its quote."""
        has_escapes = quote in ('"', "'")
        marks = (quote, "\\") if has_escapes else (quote,)
        while True:
            places = [at for mark in marks if (at := source.text.find(mark)) >= 0]
            if not places:
                n = len(source.text) - begun(source.text, marks)
                yield "arguments", json_text(source.take(n))
                yield from source.more()
                continue
            yield "arguments", json_text(source.take(min(places)))
            if source.text.startswith(quote):
                source.take(len(quote))
                if not has_escapes or (yield from self._is_last(source)):
                    return
                yield "arguments", json_text(quote)
                continue
            source.take(1)
            yield "arguments", json_text((yield from self._escape(source)))

    def _is_last(self, source: Source) -> Parse[bool]:
        """Return whether a quote ends its string; LFM2's template escapes no quote in a string."""
        while True:
            rest = source.text.lstrip()
            if rest or source.is_over:
                return not rest or rest[0] in f"{_ENDS}:"
            yield None

    def _escape(self, source: Source) -> Parse[str]:
        char = yield from source.char()
        if char not in _HEX:
            return _ESCAPES.get(char, char if char in "\\'\"/" else f"\\{char}")
        code = yield from self._code(source, char)
        if code is None:
            return f"\\{char}"
        if 0xD800 <= code < 0xDC00:  # JSON writes large characters as two
            low = None
            if (yield from source.next_of("\\u")):
                source.take(2)
                low = yield from self._code(source, "u")
            if low is None or not 0xDC00 <= low < 0xE000:
                return "\ufffd"
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return "\ufffd" if 0xDC00 <= code < 0xE000 or code > 0x10FFFF else chr(code)

    def _code(self, source: Source, kind: str) -> Parse[int | None]:
        n = _HEX[kind]
        while len(source.text) < n:
            yield from source.more()
        digits = source.text[:n]
        if any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            return None
        return int(source.take(n), 16)

    # Grammar

    def rule(self, name: str, schema: JsonObject, is_lenient: bool, lark: LarkRules) -> str:
        writer = _Writer(self, schema, is_lenient, lark)
        return (
            f"{lark.literal(name)} {writer.members(schema, *self.brackets, self.colon, self.comma)}"
        )


class _Writer:
    """Writes the rules of a schema's values. root: the whole schema, to which references point."""

    def __init__(
        self, form: LiteralFormat, root: JsonObject, is_lenient: bool, lark: LarkRules
    ) -> None:
        self._form, self._root, self._is_lenient, self._lark = form, root, is_lenient, lark
        self._known: dict[str, str] = {}

    def members(self, schema: JsonObject, begin: str, end: str, colon: str, comma: str) -> str:
        """Return an object's text, its brackets included."""
        lark, required_keys = self._lark, required(schema)
        items = [
            (
                f"{lark.literal(self._spelt_key(key, colon))} {self.value(value_schema)}",
                key in required_keys,
            )
            for key, value_schema in properties(schema).items()
        ]
        first, last = lark.literal(begin), lark.literal(end)
        if not items:
            if schema.get("additionalProperties") is False:
                return lark.new(f"{first} {last}")
            item = lark.new(f"{self._any_key(colon)} {self.value({})}")
            return lark.new(f"{first} ({item} ({lark.literal(comma)} {item})*)? {last}")
        rest = [""]  # what may follow item i and later ones
        for item, is_required in reversed(items):
            more = f"{lark.literal(comma)} {item}"
            rest.append(lark.new(f"{more if is_required else f'({more})?'} {rest[-1]}"))
        rest.reverse()
        begins = []
        for index, (item, is_required) in enumerate(items):
            begins.append(f"{item} {rest[index + 1]}")
            if is_required:
                break
        is_optional = not any(is_required for _, is_required in items)
        body = f"({' | '.join(begins)})" + ("?" if is_optional else "")
        return lark.new(f"{first} {body} {last}")

    def _spelt_key(self, key: str, colon: str) -> str:
        return f"{key!r}{colon}" if self._is_python and colon == ": " else f"{key}{colon}"

    def _any_key(self, colon: str) -> str:
        if self._is_python and colon == ": ":
            return f'({_STRING} | %json {{"type": "string"}}) {quoted(colon)}'
        return f"{_ANY_KEY} {quoted(colon)}"

    @property
    def _is_python(self) -> bool:
        return not self._form.quote

    def value(self, schema: JsonObject) -> str:
        """Return the name of the rule of a value."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = self._lark.reserve()
            self._lark.add(self._known[key], self._value(resolved(schema, self._root)))
        return self._known[key]

    def _value(self, schema: JsonObject) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [self._spell(value) for value in values]
            if self._is_python:
                texts += [quoted(value) for value in values if isinstance(value, str)]
            return " | ".join(self._lark.literal(text) for text in texts)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return " | ".join(self.value(part) for part in schema[key])
        kinds = types_of(schema, self._root) or ("string", "number", "boolean", "null", "array")
        return " | ".join(self._of_type(kind, schema) for kind in sorted(kinds))

    def _of_type(self, kind: str, schema: JsonObject) -> str:
        lark, form = self._lark, self._form
        if kind == "object":
            colon, comma = (": ", ", ") if self._is_python else (":", ",")
            return self.members(schema, "{", "}", colon, comma)
        if kind == "array":
            items = schema.get("items")
            item = self.value(items if isinstance(items, dict) else {})
            more = f"({lark.literal(', ' if self._is_python else ',')} {item})*"
            least, most = schema.get("minItems"), schema.get("maxItems")
            least = least if isinstance(least, int) else 0
            most = most if isinstance(most, int) else None
            if least or most is not None:
                rest = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
                more = more.removesuffix("*") + rest
            whole = f"({item} {more})" + ("" if least else "?")
            return lark.new(f'"[" {whole if most != 0 else ""} "]"')
        if kind == "string" and not self._is_python:
            pattern = text_pattern(schema, self._is_lenient)
            text = "TEXT" if pattern is None else lark.terminal(pattern)
            return lark.new(f"{lark.literal(form.quote)} {lark.text_before(form.quote, text)}")
        if kind in ("boolean", "null"):
            words = {"boolean": (True, False), "null": (None,)}[kind]
            return " | ".join(quoted(self._spell(word)) for word in words)
        plain = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        whole = "%json " + json.dumps(tight({**plain, "type": kind}, self._is_lenient))
        is_free = kind == "string" and not any(key in plain for key in _BOUNDS)
        return f"{_STRING} | {whole}" if is_free else whole

    def _spell(self, value: object) -> str:
        """Return a value as the format writes it."""
        if isinstance(value, str):
            quote = self._form.quote
            return repr(value) if self._is_python else f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{(', ' if self._is_python else ',').join(map(self._spell, value))}]"
        if isinstance(value, dict):
            colon, comma = (": ", ", ") if self._is_python else (":", ",")
            items = [f"{self._spelt_key(k, colon)}{self._spell(v)}" for k, v in value.items()]
            return f"{{{comma.join(items)}}}"
        if self._is_python and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value)


PYTHONIC = LiteralFormat(
    "pythonic",
    ("[func_name1(", "[func1(", "[function_name1("),
    is_list=True,
    separator=", ",
)
LFM2 = LiteralFormat(
    "lfm2",
    ("<|tool_call_start|>", "<|tool_list_start|>"),
    section=("<|tool_call_start|>", "<|tool_call_end|>"),
    is_list=True,
    separator=", ",
)
GEMMA = LiteralFormat(
    "gemma",
    ("<|tool_call>",),
    "<|tool_call>call:",
    "<tool_call|>",
    separator="",
    brackets=("{", "}"),
    colon=":",
    quote='<|"|>',
    comma=",",
)
FUNCTION_GEMMA = dataclasses.replace(
    GEMMA,
    name="function-gemma",
    marks=("<start_function_call>",),
    begin="<start_function_call>call:",
    end="<end_function_call>",
    quote="<escape>",
)

"""The reader of calls that are not JSON: the text is read once, by a parser that may stop anywhere.

    class MyFormat(WrittenFormat):
        def read(self, source, functions): ...     yields parts of a call

A parser is a generator over a ``Source``. It yields parts, and None where it needs more text than
has come. So it reads a call from top to bottom, and how a stream is cut cannot change what it sees.

Contract. As for calls in JSON: text that turns out not to be a call of an offered tool comes out as
content, complete except for the blanks between calls. A call counts as one as soon as its name is
an offered tool's and its first argument, or its end, has come. Its arguments are translated to
JSON while they come. Arguments that break off are handed on up to there. Text that cannot be a
further argument ends a call, and is content.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Generator, Iterator
from typing import TypeVar

from jaxllama.serving.tools.format import CallFormat, Functions
from jaxllama.serving.tools.parts import AnswerPart, CallsReader, begun
from jaxllama.typing import JsonObject

T = TypeVar("T")
Piece = tuple[str, str]  # ("call", a name) or ("arguments", some JSON)
Parse = Generator[Piece | None, None, T]
Wait = Generator[None, None, T]  # yields where more text is needed
_BLANKS = " \t\r\n"
_NOT_NAME = re.compile(r"[^\w.-]")
LONGEST_NAME = 128  # characters of a tool's or an argument's name


class CutShort(Exception):
    """The text ended inside of a call."""


class Source:
    """Text that comes in pieces. text: what has come and is unread."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self._read: list[str] = []  # since the last ``mark``

    def mark(self) -> None:
        """Remember this place for ``rewind``."""
        self._read = []

    def rewind(self) -> None:
        self.text = "".join(self._read) + self.text
        self._read = []

    def take(self, n: int) -> str:
        """Read n characters that have come."""
        taken, self.text = self.text[:n], self.text[n:]
        self._read.append(taken)
        return taken

    def more(self) -> Wait[None]:
        """Wait for more text. Raises CutShort at the end."""
        if self.is_over:
            raise CutShort
        yield None

    def blanks(self) -> Wait[None]:
        """Read blanks, up to other text or the end."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip(_BLANKS)))
            if self.text or self.is_over:
                return
            yield None

    def next_of(self, *options: str) -> Wait[str | None]:
        """Return which of some texts comes next, without reading it; None for another text.

        "" stands for any text, so it is the last option if it is one.
        """
        while True:
            for option in options:
                if self.text.startswith(option):
                    return option
                if option.startswith(self.text) and not self.is_over:
                    break
            else:
                return None
            yield None

    def skip(self, text: str) -> Wait[bool]:
        """Read blanks and a text. Returns False, and reads only blanks, if another text comes."""
        yield from self.blanks()
        found = yield from self.next_of(text)
        if found is None:
            return False
        self.take(len(text))
        return True

    def char(self) -> Wait[str]:
        while not self.text:
            yield from self.more()
        return self.take(1)

    def name(self) -> Wait[str]:
        """Read a name: letters, digits, ``_``, ``.`` and ``-``."""
        while True:
            end = _NOT_NAME.search(self.text)
            if end or len(self.text) > LONGEST_NAME:
                return self.take(min(end.start() if end else LONGEST_NAME, LONGEST_NAME))
            yield from self.more()

    def up_to(self, end: str, longest: int) -> Wait[str | None]:
        """Read a name and its end. Returns None if it is too long, or has a line or a tag."""
        while True:
            at = self.text.find(end)
            known = self.text[: at if at >= 0 else len(self.text) - begun(self.text, (end,))]
            if len(known) > longest or "\n" in known or "<" in known:
                return None
            if at >= 0:
                self.take(at + len(end))
                return known
            yield from self.more()


def json_text(text: str) -> str:
    """Return the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclasses.dataclass(frozen=True)
class WrittenFormat(CallFormat):
    """A format whose calls a parser translates to JSON."""

    @property
    def bare_mark(self) -> str:
        """The string that marks a call whose model left out ``begin`` or the section's begin."""
        return ""

    def read(self, source: Source, functions: Functions) -> Parse[bool]:
        """Read a call behind ``begin``. Returns False if it is none; nothing was yielded then."""
        raise NotImplementedError

    def reader(self, functions: Functions, only_one: bool = False) -> WrittenReader:
        return WrittenReader(self, functions, only_one)


class WrittenReader(CallsReader):
    """Reads calls of tools from a text; the module docstring has the contract."""

    def __init__(self, format: WrittenFormat, functions: Functions, only_one: bool) -> None:
        super().__init__(only_one)
        self._format, self._functions = format, functions
        marks = (format.section[0].strip(), format.call_mark, format.bare_mark)
        self._marks = tuple(filter(None, dict.fromkeys(marks)))
        self._source = Source()
        self._parser: Iterator[AnswerPart | None] | None = self._parse()

    def feed(self, text: str) -> list[AnswerPart]:
        self._source.text += text
        return self._run()

    def close(self) -> list[AnswerPart]:
        """Return the parts that were held back, at the end of the text."""
        self._source.is_over = True
        parts = self._run()
        self._parser = None
        return parts

    def _run(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for part in self._parser or ():
            if part is None:
                break
            if part.kind == "content":
                self._say(part.text, parts)
            else:
                self._add(part, parts)
        return parts

    # The parser

    def _parse(self) -> Generator[AnswerPart | None]:
        source = self._source
        if not self._marks:  # a call must stand at the beginning of the text
            source.mark()
            if not (yield from self._section()):
                source.rewind()
        while True:
            text, marks = source.text, self._marks
            places = [at for mark in marks if (at := text.find(mark)) >= 0]
            if places:
                said = text[: min(places)].rstrip()
                yield AnswerPart("content", said)
                source.take(len(said))
                source.mark()
                if not (yield from self._section()):
                    source.rewind()
                    blanks = len(source.text) - len(source.text.lstrip())
                    mark = next(mark for mark in marks if source.text.startswith(mark, blanks))
                    yield AnswerPart("content", source.take(blanks + len(mark)))
                continue
            if source.is_over:
                yield AnswerPart("content", source.take(len(text)))
                return
            certain = text[: len(text) - begun(text, marks)]
            certain = certain.rstrip() if marks else certain
            source.take(len(certain))
            yield AnswerPart("content", certain)
            yield None

    def _section(self) -> Generator[AnswerPart | None, None, bool]:
        """Read some calls. Returns False if there is none."""
        form, source = self._format, self._source
        first = self.calls
        yield from source.blanks()
        yield from source.skip(form.section[0].strip())
        if form.is_list and not (yield from source.skip("[")):
            return False
        while True:
            if self.calls > first:
                source.mark()
            if form.begin and not (yield from source.skip(form.call_mark)):
                if not form.bare_mark:
                    break
            if not (yield from self._call()):
                if self.calls > first:
                    source.rewind()
                break
            yield from source.skip(form.end.strip())
            if form.is_list:
                yield from source.skip(",")
        if self.calls == first:
            return False
        if form.is_list:
            yield from source.skip("]")
        yield from source.skip(form.section[1].strip())
        return True

    def _call(self) -> Generator[AnswerPart | None, None, bool]:
        number = self.calls
        reading = self._format.read(self._source, self._functions)
        try:
            while True:
                piece = next(reading)
                if piece is None:
                    yield None
                elif piece[0] == "call":
                    self.calls, self._is_behind = number + 1, True
                    yield AnswerPart("call", piece[1], number)
                elif piece[1]:
                    yield AnswerPart("arguments", piece[1], number)
        except StopIteration as end:
            return bool(end.value)
        except CutShort:
            return self.calls > number


_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


def types_of(schema: JsonObject, root: JsonObject, depth: int = 8) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    schema = resolved(schema, root)
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        return frozenset(k for k in ([kinds] if isinstance(kinds, str) else kinds) if k in _TYPES)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(type_of, values))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and depth:
            found = [types_of(part, root, depth - 1) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def type_of(value: object) -> str:
    names: dict[type[object], str] = {
        str: "string",
        bool: "boolean",
        dict: "object",
        list: "array",
        int: "integer",
    }
    return "null" if value is None else names.get(type(value), "number")


def resolved(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Return what a schema's local ``$ref`` points to; {} for one that is missing."""
    for _ in range(8):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            break
        target: object = root
        for key in ref.removeprefix("#/").split("/"):
            target = target.get(key, {}) if isinstance(target, dict) else {}
        schema = target if isinstance(target, dict) else {}
    return schema if isinstance(schema, dict) else {}


def properties(schema: JsonObject) -> dict[str, JsonObject]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required(schema: JsonObject) -> list[object]:
    found = schema.get("required")
    return found if isinstance(found, list) else []


def as_json(text: str) -> str | None:
    """Return a text if it is JSON, or Python's spelling of a JSON value; None otherwise."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(text, parse_constant=_no_constant, strict=False)
    except (ValueError, RecursionError):
        return None
    return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def spelt(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a bare value. kinds: the types that it may have; none for any."""
    found = None if kinds == frozenset(("string",)) else as_json(text)
    if found is not None:
        kind = type_of(json.loads(found, strict=False))
        if "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return found
    return json.dumps(text, ensure_ascii=False)

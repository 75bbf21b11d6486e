"""How models write calls of tools, and the reader of what they wrote.

    format_of(template) -> Format | None    by what a chat template says of calls; None: unknown
    CallReader(format, names)            feed(text), close() -> Parts, as the text comes

A Format is a row of a table: how a call begins, how it ends, how its arguments are written.  The
reader needs little of it, for what comes says what it is: a JSON object with a name and arguments,
a list of them, or a name and then its arguments.  Arguments are handed on as they come, in the
model's own spelling.

Contract.  Text that turns out to be no call of an offered tool comes out as content, to the last
character but for the blanks between calls.  Left out: calls that are no JSON (Qwen3-Coder's and
GLM's XML, Llama's Python): they stay text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Format:
    """marks: what only such a model's template has; foreign: what it has not.

    begin, end: of a call, or of the JSON list of all where ``is_list``.  begin "": an answer that
    is a call is nothing else.  arguments: their key; None where the name stands outside, before
    ``between``.  separator: between two calls, None where the template shows but one.  id_length:
    of a call's id, where the template asks.
    """

    name: str
    marks: tuple[str, ...]
    begin: str
    end: str
    arguments: str | None = "arguments"
    separator: str | None = "\n"
    between: str = ""
    is_list: bool = False
    id_length: int | None = None
    foreign: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """What is looked for in a text."""
        return self.begin.strip()

    def call_id(self, digest: str) -> str:
        """digest: hexadecimal, the call's own."""
        return digest[: self.id_length] if self.id_length else f"call_{digest[:24]}"


# Between the same tags Qwen3-Coder, GLM and Hunyuan write calls that are no JSON.
HERMES = Format(
    "hermes",
    ("<tool_call>",),
    "<tool_call>\n",
    "\n</tool_call>",
    foreign=("<function=", "<arg_key>", "<tool_sep>"),
)
FORMATS = (
    Format("mistral", ("[ARGS]",), "[TOOL_CALLS]", "", None, "", "[ARGS]", id_length=9),
    Format(
        "mistral-list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        "",
        separator=", ",
        is_list=True,
        id_length=9,
    ),
    HERMES,
    Format(
        "llama3", ("<|python_tag|>", "<|start_header_id|>"), "", "", "parameters", separator=None
    ),
)


def format_of(template: str) -> Format | None:
    """The first format whose marks a template has; None for a form of calls that is not here."""
    for form in FORMATS:
        is_foreign = any(mark in template for mark in form.foreign)
        if any(mark in template for mark in form.marks) and not is_foreign:
            return form
    return None


class AnswerPart(NamedTuple):
    """A piece of an answer.  call: the name of call number ``number``; arguments: some of its."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0


class MarkFinder:
    """Looks for a mark in a stream of text, and holds back the blanks before it and what may be
    its beginning."""

    def __init__(self, mark: str) -> None:
        self.mark, self._held = mark, ""

    def feed(self, text: str) -> tuple[str, str, str | None]:
        """(what stands before the mark, the blanks between, what stands behind it; None as long as
        the mark has not come)."""
        text = self._held + text
        before, found, behind = text.partition(self.mark)
        if found:
            self._held, said = "", before.rstrip()
            return said, before[len(said) :], behind
        n_begun = next(
            n
            for n in range(min(len(self.mark) - 1, len(text)), -1, -1)
            if text.endswith(self.mark[:n])
        )
        certain = text[: len(text) - n_begun].rstrip()
        self._held = text[len(certain) :]
        return certain, "", None

    def close(self) -> str:
        rest, self._held = self._held, ""
        return rest


# What a call's object may have, and how far it must have come for its arguments to be handed on.
_KEYS = ("name", "arguments", "parameters", "type", "id")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_ENDS = re.compile(r"\[(?:CALL_ID|ARGS)\]")
_BLANKS = " \t\r\n"


class _Object:
    """A JSON object as it comes.  begin: where its arguments do, once that is known.  ends: where
    what is nested as deep as they are has ended."""

    def __init__(self, floor: int) -> None:
        self.text = ""
        self.ends: list[int] = []
        self.begin: int | None = None if floor else 0
        self.sent = 0
        self._floor, self._depth = floor, 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> str:
        """What comes behind the object."""
        for index, char in enumerate(text, start=1):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == self._floor:
                    self.ends.append(len(self.text) + index)
                if self._depth == 0:
                    self.text += text[:index]
                    return text[index:]
        self.text += text
        return ""

    @property
    def is_closed(self) -> bool:
        return bool(self.text) and self._depth == 0

    def news(self) -> str:
        """Arguments that have not been handed on."""
        assert self.begin is not None
        end = next((end for end in self.ends if end > self.begin), len(self.text))
        begin, self.sent = max(self.begin, self.sent), end
        return self.text[begin:end]


class Machine:
    """Text in, parts out.  A state is a method that takes some text and gives back what is left."""

    _state: Callable[[str, list[AnswerPart]], str]

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while text:
            text = self._state(text, parts)
        return parts


class CallReader(Machine):
    """See the module docstring.  names: of the tools that were offered.  only_one: further calls
    are dropped."""

    def __init__(self, format: Format, names: Collection[str], only_one: bool = False) -> None:
        self._format, self._names, self._only_one = format, names, only_one
        self.calls = 0
        self._ahead = MarkFinder(format.mark)
        self._raw = ""  # what may yet turn out to be text
        self._object = _Object(0)
        self._is_behind = False  # a call, and nothing has been said since
        # Without a mark a call is what the text begins with.
        self._state = self._in_text if format.mark else self._at_call

    def close(self) -> list[AnswerPart]:
        """What was held back, when no more text comes."""
        parts: list[AnswerPart] = []
        self._say(self._ahead.close(), parts)
        if self._state == self._in_call and self._object.begin is None:
            self._raw += self._object.text
        if self._state != self._behind_call:
            self._say(self._raw, parts)
        self._raw = ""
        return parts

    # The states

    def _in_text(self, text: str, parts: list[AnswerPart]) -> str:
        before, blanks, behind = self._ahead.feed(text)
        self._say(before, parts)
        if behind is None:
            return ""
        self._state, self._raw = self._at_call, blanks + self._format.mark
        return behind

    def _in_rest(self, text: str, parts: list[AnswerPart]) -> str:
        """Nothing is looked for any more."""
        self._say(text, parts)
        return ""

    def _at_call(self, text: str, parts: list[AnswerPart]) -> str:
        """Behind a mark: whatever stands there says which form a call has."""
        self._raw += text
        inside = self._raw.lstrip().removeprefix(self._format.mark).lstrip("[" + _BLANKS)
        if not inside:
            return ""
        if inside[0] == "{":
            self._raw = self._raw.removesuffix(inside)
            self._object, self._state = _Object(1), self._in_call
            return inside
        if self._format.arguments is None:
            head, brace, _ = inside.partition("{")
            if not brace:
                return ""
            name = _NAME_ENDS.split(head)[0].strip()
            if name in self._names:
                self._raw = ""
                self._start(name, parts)
                self._object, self._state = _Object(0), self._in_call
                return inside.removeprefix(head)
        return self._no_call(inside, parts)

    def _in_call(self, text: str, parts: list[AnswerPart]) -> str:
        call = self._object
        rest = call.feed(text)
        if call.begin is None and not self._find_arguments(parts):
            return self._no_call(call.text, parts) + rest
        if call.begin is not None:
            self._add(AnswerPart("arguments", call.news(), self.calls - 1), parts)
        if call.is_closed:
            self._state = self._behind_call
        return rest

    def _find_arguments(self, parts: list[AnswerPart]) -> bool:
        """Start the call as soon as its arguments begin; False once it can be none."""
        call = self._object
        if head := _HEAD.match(call.text):
            name, begin, whole = json.loads(head[1], strict=False), head.end(), None
        elif call.is_closed:  # in another order
            try:
                written = json.loads(call.text, strict=False)
            except (ValueError, RecursionError):
                return False
            name, begin = written.get("name"), len(call.text)
            whole = written.get("arguments", written.get("parameters", {}))
        else:
            first = _FIRST_KEY.match(call.text)
            return first is None or first[1] in _KEYS
        if not isinstance(name, str) or name not in self._names:
            return False
        self._raw, call.begin = "", begin
        self._start(name, parts)
        if whole is not None:
            text = whole if isinstance(whole, str) else json.dumps(whole, ensure_ascii=False)
            self._add(AnswerPart("arguments", text, self.calls - 1), parts)
        return True

    def _behind_call(self, text: str, parts: list[AnswerPart]) -> str:
        self._raw += text
        seen, end = self._raw.lstrip(_BLANKS), self._format.end.strip()
        is_end = bool(end) and seen.startswith(end)
        if not seen or (end.startswith(seen) and not is_end):
            return ""
        self._raw = ""
        if is_end:
            self._leave()
            return seen.removeprefix(end)
        if seen[0] in ",;]":
            return seen[1:]
        if seen[0] == "{":
            self._object, self._state = _Object(1), self._in_call
        else:
            self._leave()
        return seen

    # Ways out

    def _no_call(self, inside: str, parts: list[AnswerPart]) -> str:
        raw, self._raw = self._raw, ""
        self._leave()
        self._say(raw.removesuffix(inside), parts)
        return inside

    def _leave(self) -> None:
        self._state = self._in_text if self._format.mark else self._in_rest

    def _start(self, name: str, parts: list[AnswerPart]) -> None:
        self._add(AnswerPart("call", name, self.calls), parts)
        self.calls, self._is_behind = self.calls + 1, True

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        if self._is_behind:  # blanks between calls are nobody's words
            text = text.lstrip()
        if text:
            self._is_behind = False
            parts.append(AnswerPart("content", text))

    def _add(self, part: AnswerPart, parts: list[AnswerPart]) -> None:
        if part.text and not (self._only_one and part.number):
            parts.append(part)

"""Formats of tool calls in a model's text, and the reader of such calls.

    format_of(template) -> Format | None    found by the chat template; None if it is unknown
    CallReader(format, names)               feed(text), close() -> Parts, as the text comes

A Format is a row of a table: how a call begins, how it ends, how its arguments are written. The
reader needs little of it, because the text itself shows its form. It is a JSON object with a name
and arguments, a list of such objects, or a name followed by arguments. Arguments are handed on as
they come, in the model's own spelling.

Contract. Text that turns out not to be a call of an offered tool comes out as content, complete
except for the blanks between calls. Left out: calls that are not JSON (Qwen3-Coder's and GLM's XML,
Llama's Python), which stay text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of tool calls.

    marks: strings that only templates of this format contain. foreign: strings that they do not
    contain. begin, end: around a call, or around the JSON list of all calls if ``is_list``. With an
    empty begin, an answer with a call has no other text. arguments: key of the arguments; None if
    the name stands outside of the JSON, before ``between``. separator: between two calls, None if
    the template allows one call only. id_length: length of a call's id, if the template prescribes
    it.
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
        """The string that marks a call in a text."""
        return self.begin.strip()

    def call_id(self, digest: str) -> str:
        """Return a call's id, made from its hexadecimal digest."""
        return digest[: self.id_length] if self.id_length else f"call_{digest[:24]}"


# Qwen3-Coder, GLM and Hunyuan use the same tags for calls that are not JSON.
HERMES = Format(
    "hermes",
    ("<tool_call>",),
    "<tool_call>\n",
    "\n</tool_call>",
    foreign=("<function=", "<arg_key>", "<tool_sep>"),
)
# Calls are messages of a channel (``harmony``). The token that ends one ends the answer, too.
HARMONY = Format(
    "harmony",
    ("<|channel|>",),
    "<|channel|>commentary to=functions.",
    "",
    arguments=None,
    separator=None,
    between=" <|constrain|>json<|message|>",
)
FORMATS = (
    HARMONY,
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
    """Return the first format whose marks a template contains; None for an unknown form."""
    for form in FORMATS:
        is_foreign = any(mark in template for mark in form.foreign)
        if any(mark in template for mark in form.marks) and not is_foreign:
            return form
    return None


class AnswerPart(NamedTuple):
    """A piece of an answer.

    kind: "call" has a call's name as text, "arguments" some of its arguments. number: index of the
    call.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0


class MarkFinder:
    """Looks for a mark in a stream of text.

    It holds back the blanks before the mark and any text that may be the mark's beginning.
    """

    def __init__(self, mark: str) -> None:
        self.mark, self._held = mark, ""

    def feed(self, text: str) -> tuple[str, str, str | None]:
        """Return (text before the mark, the blanks after it, text after the mark).

        The last is None until the mark has come.
        """
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


# The allowed keys of a call's object, and the text after which its arguments are handed on.
_KEYS = ("name", "arguments", "parameters", "type", "id")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_ENDS = re.compile(r"\[(?:CALL_ID|ARGS)\]")
_BLANKS = " \t\r\n"


class _Object:
    """A JSON object that comes in pieces.

    begin: where its arguments begin, once that is known. ends: where values nested as deep as the
    arguments have ended.
    """

    def __init__(self, floor: int) -> None:
        self.text = ""
        self.ends: list[int] = []
        self.begin: int | None = None if floor else 0
        self.sent = 0
        self._floor, self._depth = floor, 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> str:
        """Add text. Returns the rest after the end of the object."""
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
        """Return the arguments that have not been handed on."""
        assert self.begin is not None
        end = next((end for end in self.ends if end > self.begin), len(self.text))
        begin, self.sent = max(self.begin, self.sent), end
        return self.text[begin:end]


class Machine:
    """Turns text into parts. A state is a method that takes text and returns the unread rest."""

    _state: Callable[[str, list[AnswerPart]], str]

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while text:
            text = self._state(text, parts)
        return parts


class CallReader(Machine):
    """Reads calls of tools from a text; the module docstring has the contract.

    names: of the offered tools. only_one: whether further calls are dropped.
    """

    def __init__(self, format: Format, names: Collection[str], only_one: bool = False) -> None:
        self._format, self._names, self._only_one = format, names, only_one
        self.calls = 0
        self._ahead = MarkFinder(format.mark)
        self._raw = ""  # text that may turn out not to be a call
        self._object = _Object(0)
        self._is_behind = False  # after a call, before any other text
        # Without a mark, a call must stand at the beginning of the text.
        self._state = self._in_text if format.mark else self._at_call

    def close(self) -> list[AnswerPart]:
        """Return the parts that were held back, at the end of the text."""
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
        """Pass on the rest of the text as content."""
        self._say(text, parts)
        return ""

    def _at_call(self, text: str, parts: list[AnswerPart]) -> str:
        """Decide by the text after a mark which form the call has."""
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
        """Start the call as soon as its arguments begin. Returns False if it cannot be a call."""
        call = self._object
        if head := _HEAD.match(call.text):
            name, begin, whole = json.loads(head[1], strict=False), head.end(), None
        elif call.is_closed:  # the keys are in another order
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
        if self._is_behind:  # blanks between calls are not content
            text = text.lstrip()
        if text:
            self._is_behind = False
            parts.append(AnswerPart("content", text))

    def _add(self, part: AnswerPart, parts: list[AnswerPart]) -> None:
        if part.text and not (self._only_one and part.number):
            parts.append(part)

"""Calls whose arguments are JSON: Hermes, Llama 3, Mistral, DeepSeek up to V3.1, Kimi K2.

The reader needs little of a format, because the text itself shows its form. It is a JSON object
with a name and arguments, a list of such objects, or a name followed by arguments. Arguments are
handed on as they come, in the model's own spelling.

Contract. Text that turns out not to be a call of an offered tool comes out as content, complete
except for the blanks between calls. Arguments that break off are handed on up to there.
"""

from __future__ import annotations

import dataclasses
import json
import re

from jaxllama.serving.tools.format import CallFormat, Functions
from jaxllama.serving.tools.lark import LarkRules, tight
from jaxllama.serving.tools.parts import AnswerPart, CallsReader, Machine, MarkFinder
from jaxllama.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class JsonFormat(CallFormat):
    """A format with JSON arguments.

    arguments: key of the arguments; None if the name stands outside of the JSON, before
    ``between``. head: what may stand before the JSON then, in the form of models that were
    trained with an older template, too. counts: the name is followed by the call's number, which
    is the id of the call.
    """

    arguments: str | None = "arguments"
    between: str = ""
    head: re.Pattern[str] = re.compile(r"(?P<name>[\w.-]+)\s*")
    counts: bool = False

    @property
    def spelling(self) -> str:
        return f"{super().spelling} {self.between}"

    def call_id(self, digest: str, name: str, index: int) -> str:
        return f"functions.{name}:{index}" if self.counts else super().call_id(digest, name, index)

    def reader(self, functions: Functions, only_one: bool = False) -> CallReader:
        return CallReader(self, functions, only_one)

    def rule(self, name: str, schema: JsonObject, is_lenient: bool, lark: LarkRules) -> str:
        arguments = "%json " + json.dumps(tight({"type": "object", **schema}, is_lenient))
        if self.arguments is None:
            number = "/:[0-9]{1,4}/" if self.counts else ""
            return f"{lark.literal(name)} {number} {lark.literal(self.between)} {arguments}"
        head = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
        return f'{lark.literal(head)} {arguments} "}}"'


# Qwen3-Coder, GLM and Hunyuan use the same tags for calls that are not JSON.
HERMES = JsonFormat(
    "hermes",
    ("<tool_call>",),
    "<tool_call>\n",
    "\n</tool_call>",
    foreign=("<function=", "<arg_key>", "<tool_sep>"),
)
# Calls are messages of a channel (``harmony``). The token that ends one ends the answer, too.
HARMONY = JsonFormat(
    "harmony",
    ("<|channel|>",),
    "<|channel|>commentary to=functions.",
    separator=None,
    arguments=None,
    between=" <|constrain|>json<|message|>",
)
MISTRAL = JsonFormat(
    "mistral",
    ("[ARGS]",),
    "[TOOL_CALLS]",
    separator="",
    id_length=9,
    arguments=None,
    between="[ARGS]",
    head=re.compile(r"(?P<name>[\w.-]+)\s*(\[CALL_ID\][^\[]*)?(\[ARGS\])?\s*"),
)
MISTRAL_LIST = JsonFormat(
    "mistral-list",
    ("[TOOL_CALLS]",),
    section=("[TOOL_CALLS]", ""),
    separator=", ",
    is_list=True,
    id_length=9,
)
LLAMA3 = JsonFormat(
    "llama3",
    ("<|python_tag|>", "<|start_header_id|>"),
    separator=None,
    arguments="parameters",
)
_DEEPSEEK = re.compile(
    r"(function\s*<｜tool▁sep｜>\s*)?(?P<name>[\w.-]+)\s*(<｜tool▁sep｜>)?\s*(```(json)?)?\s*"
)
DEEPSEEK_V3 = JsonFormat(
    "deepseek-v3",
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    arguments=None,
    between="\n```json\n",
    head=_DEEPSEEK,
)
DEEPSEEK_V31 = JsonFormat(
    "deepseek-v3.1",
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator="",
    arguments=None,
    between="<｜tool▁sep｜>",
    head=_DEEPSEEK,
    foreign=("```json",),
)
KIMI = JsonFormat(
    "kimi",
    ("<|tool_call_argument_begin|>",),
    "<|tool_call_begin|>functions.",
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    separator="",
    arguments=None,
    between="<|tool_call_argument_begin|>",
    head=re.compile(
        r"(functions\.)?(?P<name>[\w.-]+?)\s*(:\s*\d+)?\s*<\|tool_call_argument_begin\|>\s*"
    ),
    counts=True,
)
MINIMAX_M1 = JsonFormat(
    "minimax-m1",
    ("<tool_calls>",),
    section=("<tool_calls>\n", "\n</tool_calls>"),
)
NEMOTRON = JsonFormat(
    "nemotron",
    ("<TOOLCALL>",),
    section=("<TOOLCALL>", "</TOOLCALL>"),
    separator=", ",
    is_list=True,
)

# The allowed keys of a call's object, and the text after which its arguments are handed on.
_KEYS = ("name", "arguments", "parameters", "type", "id")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_LONGEST_HEAD = 256  # characters between a mark and a call's JSON
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


class CallReader(CallsReader, Machine):
    """Reads calls of tools from a text; the module docstring has the contract.

    names: of the offered tools. only_one: whether further calls are dropped.
    """

    def __init__(self, format: JsonFormat, names: Functions, only_one: bool = False) -> None:
        super().__init__(only_one)
        self._format, self._names = format, names
        # The part of ``begin`` that every model writes; the head has the rest.
        first = format.call_mark
        first = first[: first.find(">") + 1] or first
        self._marks = tuple(filter(None, dict.fromkeys((format.section[0].strip(), first))))
        self._ends = tuple(
            filter(None, (format.end.strip(), format.end.strip("`\n "), format.section[1].strip()))
        )
        self._ahead = MarkFinder(*self._marks)
        self._raw = ""  # text that may turn out not to be a call
        self._object = _Object(0)
        self._has_ended = False  # the end of a call has come
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
        self._state, self._raw = self._at_call, blanks + self._ahead.found
        return behind

    def _in_rest(self, text: str, parts: list[AnswerPart]) -> str:
        """Pass on the rest of the text as content."""
        self._say(text, parts)
        return ""

    def _at_call(self, text: str, parts: list[AnswerPart]) -> str:
        """Decide by the text after a mark which form the call has."""
        self._raw += text
        inside = self._raw.lstrip()
        for mark in self._marks:
            inside = inside.removeprefix(mark).lstrip(_BLANKS)
        if any(mark.startswith(inside) for mark in self._marks):
            return ""
        if any(inside.startswith(mark) for mark in self._marks):
            return self._no_call(inside, parts)  # the call may begin at the second mark
        inside = inside.lstrip("[" + _BLANKS)
        if not inside:
            return ""
        if inside[0] == "{":
            self._raw = self._raw.removesuffix(inside)
            self._object, self._state = _Object(1), self._in_call
            return inside
        if self._format.arguments is None:
            before, brace, _ = inside.partition("{")
            is_short = len(before) < _LONGEST_HEAD
            if not brace and is_short and not any(mark in before for mark in self._marks):
                return ""
            head = self._format.head.fullmatch(before) if brace and is_short else None
            if head is not None and head["name"] in self._names:
                self._raw = ""
                self._start(head["name"], parts)
                self._object, self._state = _Object(0), self._in_call
                return inside.removeprefix(before)
        return self._no_call(inside, parts)

    def _in_call(self, text: str, parts: list[AnswerPart]) -> str:
        call = self._object
        rest = call.feed(text)
        if call.begin is None and not self._find_arguments(parts):
            return self._no_call(call.text, parts) + rest
        if call.begin is not None:
            self._add(AnswerPart("arguments", call.news(), self.calls - 1), parts)
        if call.is_closed:
            self._state, self._has_ended = self._behind_call, False
        return rest

    def _find_arguments(self, parts: list[AnswerPart]) -> bool:
        """Start the call as soon as its arguments begin. Returns False if it cannot be a call."""
        call = self._object
        if head := _HEAD.match(call.text):
            name, begin, whole = json.loads(head[1], strict=False), head.end(), None
        elif call.is_closed:  # the keys are in another order
            first = _FIRST_KEY.match(call.text)
            if first is None or first[1] not in _KEYS:
                return False
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
            # UTF-8 has no lone surrogates: they stay escapes, as the model wrote them.
            text = text.encode(errors="backslashreplace").decode()
            self._add(AnswerPart("arguments", text, self.calls - 1), parts)
        return True

    def _behind_call(self, text: str, parts: list[AnswerPart]) -> str:
        self._raw += text
        seen = self._raw.lstrip(_BLANKS)
        found = next((end for end in self._ends if seen.startswith(end)), None)
        if not seen or (found is None and any(end.startswith(seen) for end in self._ends)):
            return ""
        self._raw = ""
        if found is not None:
            self._has_ended = True
            if found == self._ends[-1]:
                self._leave()
            return seen.removeprefix(found)
        if self._has_ended:
            self._leave()
        elif seen[0] in ",;]":
            return seen[1:]
        elif seen[0] == "{":
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

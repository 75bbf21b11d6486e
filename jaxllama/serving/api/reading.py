"""Split a chat model's text into reasoning, content and calls of tools.

    Reading(...)                     how to read an answer; follows from its body and prompt
    answer_reader(reading)           feed(text), close() -> Parts, as the text comes
    parts_of(reader, piece)          the parts that a piece completes
    PARSE_TIMES                      where a traced request's reader counts its time

Reasoning is the text between a template's tags for it, at the beginning of an answer. Many
templates write the first tag themselves, at the end of the prompt. Blanks around the reasoning are
dropped. In harmony (``tools.harmony``) an answer's channels say what is reasoning and what a call.
"""

from __future__ import annotations

import dataclasses
import time
from contextvars import ContextVar

from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.tools import Tools
from jaxllama.serving.tools import harmony
from jaxllama.serving.tools.lark import special_marks
from jaxllama.serving.tools.parts import AnswerPart, AnswerReader, Machine, MarkFinder
from jaxllama.text.tokenizer import Tokenizer

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How to read an answer.

    tags: the tags around the reasoning, None if there are none. is_thinking: the prompt ends with
    the first tag. tools: the tools that may be called. opened: in harmony, the part of the first
    message that the prompt has; None for other templates.
    """

    tags: tuple[str, str] | None
    is_thinking: bool
    tools: Tools | None
    opened: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.tags is None and self.tools is None and self.opened is None

    def needs_special(self, tokenizer: Tokenizer) -> bool:
        """Return whether one of the marks to find is a special token."""
        marks = [*(self.tags or ()), *([self.tools.format.spelling] if self.tools else ())]
        marks = marks if self.opened is None else [harmony.MARK]
        return any(special_marks(tokenizer, mark) for mark in marks)


PLAIN = Reading(None, False, None)


def reading(template: str, prompt: str, tools: Tools | None) -> Reading:
    """Return how to read the answer to ``prompt``, which was made with this template."""
    if harmony.MARK in template:
        _, start, opened = prompt.rpartition(harmony.START)
        return dataclasses.replace(PLAIN, tools=tools, opened=opened if start else "")
    end = prompt.rstrip()
    for tags in TAGS:
        if tags[1] in template and not end.endswith(tags[1]):
            return Reading(tags, end.endswith(tags[0]), tools)
    return dataclasses.replace(PLAIN, tools=tools)


class ParseTimes:
    """When the texts of an answer were read: begin and end in seconds of ``time.monotonic``.

    busy: seconds of reading in between. count: number of texts.
    """

    __slots__ = ("begin", "busy", "count", "end")

    def __init__(self) -> None:
        self.begin = self.end = self.busy = 0.0
        self.count = 0


# Of the request that this task answers, if it is traced.
PARSE_TIMES: ContextVar[ParseTimes | None] = ContextVar("parse times", default=None)


class TimedReader:
    """A reader that counts its time."""

    def __init__(self, reader: AnswerReader, times: ParseTimes) -> None:
        self._reader, self._times = reader, times

    @property
    def calls(self) -> int:
        return self._reader.calls

    def feed(self, text: str) -> list[AnswerPart]:
        times, begin = self._times, time.monotonic()
        parts = self._reader.feed(text)
        times.end = time.monotonic()
        times.busy += times.end - begin
        if not times.count:
            times.begin = begin
        times.count += 1
        return parts

    def close(self) -> list[AnswerPart]:
        return self._reader.close()


def answer_reader(reading: Reading) -> AnswerReader:
    """Return a reader of one answer; it counts its time if the request is traced and has tools."""
    tools, times = reading.tools, PARSE_TIMES.get()
    if reading.opened is None:
        reader = MessageReader(reading)
    else:
        names, only_one = (tools.names, tools.only_one) if tools else ((), False)
        reader = harmony.ChannelReader(names, only_one)
        reader.feed(reading.opened)
    return reader if times is None or tools is None else TimedReader(reader, times)


def parts_of(reader: AnswerReader, piece: TextPiece) -> list[AnswerPart]:
    """Return the parts that a piece completes; the last piece completes all that were held back."""
    parts = reader.feed(piece.text)
    return parts if piece.finish_reason is None else parts + reader.close()


class MessageReader(Machine):
    """Splits an answer's text into parts; the module docstring has the interface."""

    def __init__(self, reading: Reading) -> None:
        tools, self._tags = reading.tools, reading.tags or ("", "")
        self._calls: AnswerReader | None = (
            tools.format.reader(tools.parameters, tools.only_one) if tools else None
        )
        self._end = MarkFinder(self._tags[1])
        self._has_thought = False
        self._held = ""
        state = self._at_start if reading.tags else self._in_answer
        self._state = self._in_thought if reading.is_thinking else state

    @property
    def calls(self) -> int:
        return self._calls.calls if self._calls else 0

    def close(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state == self._in_thought:
            self._think(self._end.close().rstrip(), parts)
        if self._state == self._at_start:
            held, self._held = self._held, ""
            self._in_answer(held, parts)
        if self._calls is not None:
            parts += self._calls.close()
        return parts

    def _at_start(self, text: str, parts: list[AnswerPart]) -> str:
        """Find out whether the answer begins with reasoning."""
        self._held += text
        seen = self._held.lstrip()
        if self._tags[0].startswith(seen):
            if seen == self._tags[0]:
                self._state = self._in_thought
            return ""
        held, self._held = self._held, ""
        if seen.startswith(self._tags[0]):
            self._state = self._in_thought
            return seen.removeprefix(self._tags[0])
        self._state = self._in_answer
        return held

    def _in_thought(self, text: str, parts: list[AnswerPart]) -> str:
        before, _, behind = self._end.feed(text)
        self._think(before, parts)
        if behind is None:
            return ""
        self._state = self._behind_thought
        return behind

    def _behind_thought(self, text: str, parts: list[AnswerPart]) -> str:
        text = text.lstrip()
        if text:
            self._state = self._in_answer
        return text

    def _in_answer(self, text: str, parts: list[AnswerPart]) -> str:
        if self._calls is not None:
            parts += self._calls.feed(text)
        elif text:
            parts.append(AnswerPart("content", text))
        return ""

    def _think(self, text: str, parts: list[AnswerPart]) -> None:
        text = text if self._has_thought else text.lstrip()
        if text:
            self._has_thought = True
            parts.append(AnswerPart("reasoning", text))

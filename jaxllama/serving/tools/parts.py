"""Parts of an answer, and what the readers of an answer's text share.

AnswerPart    a piece of an answer
MarkFinder    finds a mark in a stream of text
Machine       base of a reader with states
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol


class AnswerPart(NamedTuple):
    """A piece of an answer.

    kind: "call" has a call's name as text, "arguments" some of its arguments. number: index of the
    call.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0


class AnswerReader(Protocol):
    """A reader of answers, or of their calls alone. calls: how many have begun."""

    @property
    def calls(self) -> int: ...
    def feed(self, text: str) -> list[AnswerPart]: ...
    def close(self) -> list[AnswerPart]: ...


def begun(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that may begin one of the marks."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for n in range(min(longest, len(text)), 0, -1):
        tail = text[-n:]
        if any(mark.startswith(tail) for mark in marks):
            return n
    return 0


class MarkFinder:
    """Looks for the first of some marks in a stream of text.

    It holds back the blanks before the mark and any text that may be the mark's beginning. found:
    the mark that came last.
    """

    def __init__(self, *marks: str) -> None:
        self._marks, self._held, self.found = marks, "", ""

    def feed(self, text: str) -> tuple[str, str, str | None]:
        """Return (text before the mark, the blanks after it, text after the mark).

        The last is None until a mark has come.
        """
        text = self._held + text
        places = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if places:
            at, self.found = min(places)
            self._held, said = "", text[:at].rstrip()
            return said, text[len(said) : at], text[at + len(self.found) :]
        certain = text[: len(text) - begun(text, self._marks)].rstrip()
        self._held = text[len(certain) :]
        return certain, "", None

    def close(self) -> str:
        rest, self._held = self._held, ""
        return rest


class CallsReader:
    """The base of readers of calls. only_one: whether further calls are dropped."""

    def __init__(self, only_one: bool) -> None:
        self._only_one, self.calls = only_one, 0
        self._is_behind = False  # after a call, before any other text

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        if self._is_behind:  # blanks between calls are not content
            text = text.lstrip()
        if text:
            self._is_behind = False
            parts.append(AnswerPart("content", text))

    def _add(self, part: AnswerPart, parts: list[AnswerPart]) -> None:
        if part.text and not (self._only_one and part.number):
            parts.append(part)


class Machine:
    """Turns text into parts. A state is a method that takes text and returns the unread rest."""

    _state: Callable[[str, list[AnswerPart]], str]

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while text:
            text = self._state(text, parts)
        return parts

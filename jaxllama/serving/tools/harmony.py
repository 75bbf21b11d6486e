"""Harmony, the format of gpt-oss's answers: messages in channels.

    ChannelReader(names)               feed(text), close() -> parts, as the text comes

An answer is a sequence of messages ``header <|message|> body end``.  The header names the channel
and, for a call, the recipient:

    <|channel|>analysis                                     reasoning
    <|channel|>final                                        content
    <|channel|>commentary                                   content before a call
    <|channel|>commentary to=functions.NAME <|constrain|>json       arguments of a call of NAME
     to=functions.NAME<|channel|>commentary json            the same

A body ends with ``<|end|>`` (another message follows), ``<|call|>`` or ``<|return|>``.  Messages
of one kind are joined by a line break.

Contract.  A body for a recipient that is not an offered tool comes out as content.  Text without a
header is content.  Source: OpenAI's harmony response format.  Left out: the built-in tools
(browser, python).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from jaxllama.serving.tools.parts import AnswerPart, Machine, MarkFinder

MARK = "<|channel|>"  # only templates of this format contain it
START = "<|start|>assistant"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_Kind = Literal["reasoning", "content", "arguments"]


class ChannelReader(Machine):
    """Reads messages in channels; the module docstring has the contract.

    names: of the offered tools. only_one: whether further calls are dropped.
    """

    def __init__(self, names: Collection[str] = (), only_one: bool = False) -> None:
        self._names, self._only_one = names, only_one
        self.calls = 0
        self._begin_header()
        self._kind: _Kind = "content"
        self._is_dropped = False
        self._body = MarkFinder("<|")
        self._mark = ""  # the beginning of an end
        self._said: set[str] = set()  # kinds that have had text
        self._is_new = False  # at the beginning of a message

    def close(self) -> list[AnswerPart]:
        """Return the parts that were held back, at the end of the text."""
        parts: list[AnswerPart] = []
        if self._state == self._in_header:
            self._in_header(self._ahead.close(), parts)
        if self._state == self._at_mark:
            self._say(self._mark, parts)
        elif self._state == self._in_body:
            self._say(self._body.close(), parts)
        return parts

    # The states

    def _begin_header(self) -> None:
        self._header, self._ahead = "", MarkFinder(_MESSAGE)
        self._state = self._in_header

    def _in_header(self, text: str, parts: list[AnswerPart]) -> str:
        before, _, behind = self._ahead.feed(text)
        self._header += before
        if behind is not None:
            self._begin_body(parts)
            return behind
        seen = self._header.lstrip()
        if seen and not any(head.startswith(seen[: len(head)]) for head in ("<|", "to=")):
            held, self._kind, self._is_new = self._header + self._ahead.close(), "content", True
            self._state, self._header = self._in_body, ""
            return held
        return ""

    def _begin_body(self, parts: list[AnswerPart]) -> None:
        channel, to = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind, self._is_new = "reasoning" if is_thought else "content", True
        self._is_dropped, self._state = False, self._in_body
        name = to[1].removeprefix(_FUNCTIONS) if to else ""
        if name in self._names:
            self._kind, self._is_dropped = "arguments", self._only_one and self.calls > 0
            if not self._is_dropped:
                parts.append(AnswerPart("call", name, self.calls))
                self.calls += 1

    def _in_body(self, text: str, parts: list[AnswerPart]) -> str:
        before, blanks, behind = self._body.feed(text)
        self._say(before, parts)
        if behind is None:
            return ""
        self._mark, self._state = f"{blanks}<|", self._at_mark
        return behind

    def _at_mark(self, text: str, parts: list[AnswerPart]) -> str:
        """Decide whether a mark ends the message."""
        self._mark += text
        seen = self._mark.lstrip()
        for end in _ENDS:
            if seen.startswith(end):
                self._begin_header()
                return seen.removeprefix(end)
            if end.startswith(seen):
                return ""
        blanks = self._mark.removesuffix(seen)
        self._state = self._in_body
        self._say(f"{blanks}<|", parts)
        return seen.removeprefix("<|")

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        if not text or self._is_dropped:
            return
        if self._kind == "arguments":
            parts.append(AnswerPart("arguments", text, self.calls - 1))
            return
        if self._is_new and self._kind in self._said:
            text = f"\n{text}"
        self._said.add(self._kind)
        self._is_new = False
        parts.append(AnswerPart(self._kind, text))

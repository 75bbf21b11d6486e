"""The base of the formats of tool calls: what a row of the table says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.serving.tools.lark import LarkRules
from jaxllama.serving.tools.parts import AnswerReader
from jaxllama.typing import JsonObject

Functions = Mapping[str, JsonObject]  # the schema of the arguments of each offered tool, by name


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    marks: strings that only templates of this format contain. foreign: strings that they do not
    contain. begin, end: around each call. section: around all calls. separator: between two calls,
    None if the template allows one call only. is_list: the calls stand in square brackets.
    id_length: length of a call's id, if the template prescribes it. With an empty mark, an answer
    with a call has no other text.
    """

    name: str
    marks: tuple[str, ...]
    begin: str = ""
    end: str = ""
    section: tuple[str, str] = ("", "")
    separator: str | None = "\n"
    is_list: bool = False
    id_length: int | None = None
    foreign: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The string that marks the first call in a text."""
        return (self.section[0] or self.begin).strip()

    @property
    def call_mark(self) -> str:
        """The string that marks a call behind the first."""
        return self.begin.strip()

    @property
    def spelling(self) -> str:
        """All strings around the calls, in which special tokens may be."""
        return " ".join((*self.section, self.begin, self.end))

    def call_id(self, digest: str, name: str, index: int) -> str:
        """Return a call's id.

        digest: hexadecimal, of the call. index: number of the conversation's earlier calls.
        """
        return digest[: self.id_length] if self.id_length else f"call_{digest[:24]}"

    def reader(self, functions: Functions, only_one: bool = False) -> AnswerReader:
        """Return a reader of an answer's text. only_one: further calls are dropped."""
        raise NotImplementedError

    def rule(self, name: str, schema: JsonObject, is_lenient: bool, lark: LarkRules) -> str:
        """Return the Lark rule of a call between ``begin`` and ``end``.

        is_lenient: parts of the schema that cannot be enforced are ignored.
        """
        raise NotImplementedError

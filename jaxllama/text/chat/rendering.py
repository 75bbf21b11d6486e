"""Rendering: a conversation to its prompt, and where one message's text ends in it.

    chat = Conversation.of(template, messages, tools, variables, markers)
    chat.prompt() -> ChatPrompt
    chat.split(index) -> (ChatPrompt up to the end of a message's text, ChatPrompt of the rest)

The end of a text is known by a mark, a character that occurs nowhere else, behind it. So any text
has an end, also one that the template writes itself. A template may trim the text. It leaves the
blanks behind the mark then, or else it takes them away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxllama.text.chat.messages import Messages, content_text, normalized, shown_tools
from jaxllama.text.chat.prompt_text import ChatPrompt, Markers, unused_marks
from jaxllama.text.chat.template import ChatTemplate
from jaxllama.typing import JsonObject

_BLANKS = "   "  # trimmed with a text if the template trims it


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation for a template.

    messages: normalized. variables: the template's further ones, tools among them. markers: None
    if special tokens that a message spells are special.
    """

    template: ChatTemplate
    messages: Sequence[JsonObject]
    variables: Mapping[str, object]
    markers: Markers | None

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        messages: Messages,
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
        markers: Markers | None,
    ) -> Conversation:
        """Return a conversation of messages and tools in any of their forms.

        Raises JaxLlamaError that names what no template can show.
        """
        shown = {"documents": None, **variables, "tools": shown_tools(tools)}
        return cls(template, normalized(messages, template), shown, markers)

    def prompt(self) -> ChatPrompt:
        """Return the prompt. Raises JaxLlamaError if the template refuses the messages."""
        rendered, mark = self._render(None, "")
        return ChatPrompt.of(rendered, mark)

    def split(self, index: int) -> tuple[ChatPrompt, ChatPrompt] | None:
        """Return (the prompt up to the end of a message's text, the rest of the prompt).

        Returns None if the template does not show the message's text.
        """
        text = content_text(self.messages[index]["content"])
        blanks = text[len(text.rstrip()) :]
        [end] = self._unused(1)
        rendered, mark = self._render(index, end + _BLANKS)
        before, found, after = rendered.rpartition(end)
        if not found:
            return None
        if blanks and blanks == text and not after.startswith(_BLANKS):
            # The template trims them all: those before ``end`` are its own.
            messages = list(self.messages)
            messages[index] = {**messages[index], "content": ""}
            return dataclasses.replace(self, messages=messages).split(index)
        # The text may be shown more than once.
        before = before.replace(end + _BLANKS, "").replace(blanks + end, "").replace(end, "")
        if after.startswith(_BLANKS):
            after = after.removeprefix(_BLANKS)
        else:
            before = before.removesuffix(blanks)
        return ChatPrompt.of(before, mark), ChatPrompt.of(after, mark)

    def _unused(self, count: int) -> list[str]:
        marks = unused_marks([self.messages, self.variables])
        return [next(marks) for _ in range(count)]

    def _render(self, index: int | None, end: str) -> tuple[str, str | None]:
        """Return (rendered text, the mark of special tokens that are text).

        end: is written behind the text of the message ``index``.
        """
        messages, variables, mark = list(self.messages), self.variables, None
        if self.markers is not None:
            everywhere, in_answers = self.markers
            if everywhere.are_in([messages, variables]):
                _, mark = self._unused(2)
                messages = [
                    (in_answers if m.get("role") == "assistant" else everywhere).guard(m, mark)
                    for m in messages
                ]
                variables = {name: everywhere.guard(v, mark) for name, v in variables.items()}
        if index is not None:
            message = messages[index]
            messages[index] = {**message, "content": _with_end(message["content"], end)}
        return self.template.render({**variables, "messages": messages}), mark


def _with_end(content: object, end: str) -> object:
    if isinstance(content, list):
        *parts, last = content
        return [*parts, {**last, "text": last["text"] + end}]
    return f"{content}{end}"

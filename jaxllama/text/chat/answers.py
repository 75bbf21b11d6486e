"""An answer as tokens: the prompt before it, its text and the token that ends it.

    prompt, answer = answer_of(messages, tokenizer, tools)

The prompt is exactly that of inference. The answer is what the template writes between the
beginning of an answer and its end, with the first stop token. Some templates write no token behind
an answer: the next role's token ends it (GLM). Others write none at all, and the end of text ends
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os.path import commonprefix

from jaxllama.errors import JaxLlamaError
from jaxllama.text.chat.messages import Messages
from jaxllama.text.chat.prompt_text import ChatPrompt
from jaxllama.text.chat.rendering import Conversation
from jaxllama.text.tokenizer import Tokenizer

# Variables of templates that say whether an answer begins with reasoning.
_SWITCHES = ("enable_thinking", "thinking")


def answer_of(
    messages: Messages, tokenizer: Tokenizer, tools: Sequence[object] | None = None
) -> tuple[list[int], list[int]]:
    """Return (tokens of the prompt, tokens of the last message, which answers it).

    Raises JaxLlamaError for a template whose text of the answer does not follow the prompt, or
    that leaves out the answer's calls of tools.
    """
    if messages[-1].get("tool_calls") and not tokenizer.compiled_template(bool(tools)).shows_calls:
        raise JaxLlamaError(
            f"{tokenizer.name}: the chat template does not show calls of tools, so none is learned"
        )
    last = _Answer(messages, tokenizer, tools)
    prompt, answer = last.halves()
    head, ids = tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(prompt + answer)
    if ids[: len(head)] == head:
        rest = ids[len(head) :]
    else:  # a token crosses the border; at inference none does
        rest = tokenizer.encode_prompt(answer)
    ends = [number for number, token in enumerate(rest) if token in tokenizer.eos_ids]
    return head, rest[: ends[0] + 1] if ends else [*rest, *last.unwritten_end()]


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The last message of a conversation, which answers the earlier ones."""

    messages: Messages
    tokenizer: Tokenizer
    tools: Sequence[object] | None

    def halves(self) -> tuple[ChatPrompt, ChatPrompt]:
        """Return (prompt, answer)."""
        source = self.tokenizer.template_for(bool(self.tools)) or ""
        known = [name for name in _SWITCHES if name in source]
        for variables in ({}, *({name: on} for name in known for on in (False, True))):
            earlier, whole = self._earlier(True, **variables), self._whole(**variables)
            prompt, written = earlier.prompt(), whole.prompt()
            if not written.text.startswith(prompt.text):
                # An earlier message may be shown otherwise once the answer is there.
                begun, written = self._behind(earlier), self._behind(whole)
            else:
                begun = prompt
            if written.text.startswith(begun.text):
                return prompt, written.since(len(begun.text))
        return self._where_they_part()

    def _where_they_part(self) -> tuple[ChatPrompt, ChatPrompt]:
        """Return (prompt, answer) of a template that writes an answer into another beginning.

        The prompt ends where the two part.
        """
        earlier = self._earlier(True)
        begun, written = self._behind(earlier), self._behind(self._whole())
        other = {**self.messages[-1], "content": "\ufdd0"}  # the text is no part of the beginning
        others = self._behind(self._chat([*self.messages[:-1], other], False))
        same = len(commonprefix([begun.text, written.text, others.text]))
        if same <= len(self._behind(self._earlier(False)).text):
            raise JaxLlamaError(
                f"{self.tokenizer.name}: the chat template does not write an answer behind its "
                "own prompt"
            )
        prompt = earlier.prompt()
        return prompt.until(len(prompt.text) - len(begun.text) + same), written.since(same)

    def unwritten_end(self) -> list[int]:
        """Return the token that ends the answer where the template writes none behind it.

        It is the stop token with which the next message begins, else the end of text.
        """
        role = "tool" if self.messages[-1].get("tool_calls") else "user"
        chat = self._chat([*self.messages, {"role": role, "content": "."}], False)
        try:
            halves = chat.split(len(self.messages) - 1)
        except JaxLlamaError:  # the template refuses such a message
            halves = None
        ids = self.tokenizer.encode_prompt(halves[1]) if halves else []
        ends = self.tokenizer.eos_ids
        return [*(token for token in ids if token in ends), *ends][:1]

    # The conversation without the answer and with it

    def _earlier(self, begins: bool, **variables: object) -> Conversation:
        return self._chat(self.messages[:-1], begins, **variables)

    def _whole(self, **variables: object) -> Conversation:
        return self._chat(self.messages, False, **variables)

    def _chat(self, messages: Messages, begins: bool, **variables: object) -> Conversation:
        return self.tokenizer.conversation(
            messages, self.tools, add_generation_prompt=begins, **variables
        )

    def _behind(self, chat: Conversation) -> ChatPrompt:
        """Return a prompt's text behind the message before the answer, or the whole prompt."""
        index = len(self.messages) - 2
        halves = chat.split(index) if index >= 0 else None
        return chat.prompt() if halves is None else halves[1]

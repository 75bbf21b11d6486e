"""Conversations as tokens, and which of them are the model's answers.

    examples = read("chat.jsonl", tokenizer)          list of Example(tokens, answers)

Every line of the file is an object of one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"messages": [...], "tools": [...]}
    {"prompt": "text", "completion": "text"}             no template; the end of text is appended
    {"prompt": [messages], "completion": [messages]}     answers in the prompt do not count

The tokenizer's own chat template writes messages. The tokens before an answer are exactly the
prompt that the template gives at inference. An answer ends with the first token behind it that ends
a generation; what the template writes after that is the next turn's. Some templates rewrite earlier
turns (they remove old reasoning, say). Such a conversation becomes several examples, each as the
model sees it at inference.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject

Messages = Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class Example:
    """A sequence. tokens: int32 ``[n]``. answers: bool ``[n]``, which tokens are to be learned."""

    tokens: np.ndarray
    answers: np.ndarray

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Example:
        tokens = np.array([*prompt, *answer], np.int32)
        return cls(tokens, np.arange(len(tokens)) >= len(prompt))


def read(path: str | Path, tokenizer: Tokenizer) -> list[list[Example]]:
    """Return the examples of every line.

    Raises JaxLlamaError naming the file, the line and what is wrong with it.
    """
    found = []
    for number, line in lines(path):
        try:
            found.append(list(examples_of(line, tokenizer)))
        except JaxLlamaError as error:
            raise JaxLlamaError(f"{path}: line {number}: {error}") from None
    return found


def lines(path: str | Path) -> Iterator[tuple[int, JsonObject]]:
    """Yield (number from 1, object) of each line that is not empty."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None
    empty = True
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        empty = False
        try:
            value = json.loads(line)
        except ValueError as error:
            raise JaxLlamaError(f"{path}: line {number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise JaxLlamaError(f"{path}: line {number}: expected an object")
        yield number, value
    if empty:
        raise JaxLlamaError(f"{path}: empty")


def examples_of(line: JsonObject, tokenizer: Tokenizer) -> Iterator[Example]:
    """Yield the examples of one line; the module docstring lists the forms."""
    if "messages" in line:
        messages = checked(line["messages"], "messages")
        yield from chat(messages, tokenizer, line.get("tools"))
    elif "prompt" in line and "completion" in line:
        prompt, completion = line["prompt"], line["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            yield Example.of(*text_pair(prompt, completion, tokenizer))
        else:
            before, after = checked(prompt, "prompt"), checked(completion, "completion")
            yield from chat([*before, *after], tokenizer, line.get("tools"), first=len(before))
    else:
        raise JaxLlamaError("expected messages, or prompt and completion")


def checked(value: object, key: str) -> list[JsonObject]:
    """Return a list of messages. Raises JaxLlamaError naming ``key`` for anything else."""
    if not isinstance(value, list) or not value:
        raise JaxLlamaError(f"{key}: expected a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise JaxLlamaError(f"{key}: expected objects with a role, not {str(message)[:60]!r}")
    return value


def text_pair(prompt: str, completion: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return (tokens of a plain text, tokens of its continuation and of the end of text)."""
    answer = tokenizer.encode(completion, add_special=False)
    return tokenizer.encode(prompt), [*answer, *tokenizer.eos_ids[:1]]


def chat(
    messages: Messages, tokenizer: Tokenizer, tools: object = None, first: int = 0
) -> Iterator[Example]:
    """Yield the examples of a conversation.

    first: index of the first message whose answer counts.
    """
    if tools is not None and not isinstance(tools, list):
        raise JaxLlamaError("tools: expected a list")
    current: Example | None = None
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first:
            continue
        example = Example.of(*answer_of(messages[: index + 1], tokenizer, tools))
        if current is not None:
            before = len(current.tokens)
            if np.array_equal(example.tokens[:before], current.tokens):
                answers = example.answers.copy()
                answers[:before] |= current.answers
                example = Example(example.tokens, answers)
            else:
                yield current
        current = example
    if current is None:
        raise JaxLlamaError("no message of the assistant: there is nothing to learn")
    yield current


def answer_of(
    messages: Messages, tokenizer: Tokenizer, tools: Sequence[object] | None = None
) -> tuple[list[int], list[int]]:
    """Return (tokens of the prompt, tokens of the last message, which answers it).

    Raises JaxLlamaError for a template whose text of the answer does not follow the prompt.
    """
    prompt = tokenizer.chat_prompt(messages[:-1], tools=tools)
    whole = tokenizer.chat_prompt(messages, add_generation_prompt=False, tools=tools)
    head, ids = tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(whole)
    if ids[: len(head)] == head:
        answer = ids[len(head) :]
    elif whole.text.startswith(prompt.text):
        # A token crosses the border; at inference none does.
        answer = tokenizer.encode_prompt(whole.since(len(prompt.text)))
    else:
        raise JaxLlamaError(
            f"{tokenizer.source}: the chat template does not write an answer behind its own prompt"
        )
    ends = [place for place, token in enumerate(answer) if token in tokenizer.eos_ids]
    return head, answer[: ends[-1] + 1] if ends else answer

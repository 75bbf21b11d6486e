"""Conversations as tokens, and which of them are the model's answers.

    lines = read("chat.jsonl", tokenizer)          of each line a list of Unit(examples, label)

Every line of the file is an object of one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"messages": [...], "tools": [...]}
    {"prompt": "text", "completion": "text"}             no template; the end of text is appended
    {"prompt": [messages], "completion": [messages]}     answers in the prompt do not count
    {"prompt": ..., "chosen": ..., "rejected": ...}      preferences: DPO, ORPO; of either kind
    {"chosen": [messages], "rejected": [messages]}       their first equal messages are the prompt
    {"prompt": ..., "completion": ..., "label": true}    KTO

Messages may have any of the forms that the server takes (``text.chat.messages``), and the model
learns what the server shows it (``text.chat.answers``). The tokens before an answer are exactly the
prompt of inference. An answer ends with the first token behind it that ends a generation. Some
templates rewrite earlier turns (they remove old reasoning, say). Such a conversation becomes
several examples, each as the model sees it at inference.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.text.chat.answers import answer_of
from jaxllama.text.chat.messages import Messages
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class Example:
    """A sequence. tokens: int32 ``[n]``. answers: bool ``[n]``, which tokens are to be learned."""

    tokens: np.ndarray
    answers: np.ndarray

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Example:
        tokens = np.array([*prompt, *answer], np.int32)
        return cls(tokens, np.arange(len(tokens)) >= len(prompt))


@dataclasses.dataclass(frozen=True)
class Unit:
    """Sequences that must lie in one row: one, or two that a preference compares.

    label: weight in the loss; for KTO its sign says whether the first answer is desirable.
    """

    examples: tuple[Example, ...]
    label: float = 1.0

    def __len__(self) -> int:
        return sum(len(example.tokens) for example in self.examples)


def read(path: str | Path, tokenizer: Tokenizer, kind: str = "sft") -> list[list[Unit]]:
    """Return the units of every line.

    kind: of the objective, "sft", "dpo", "orpo" or "kto". Raises JaxLlamaError naming the file, the
    line and what is wrong with it.
    """
    found = []
    before: JsonObject | None = None
    numbered = list(lines(path))
    if kind == "kto":
        # The answer that a unit is compared with is the one of the line before.
        before = numbered[-1][1]
    for number, line in numbered:
        try:
            if kind == "kto":
                found.append([labelled(line, before or line, tokenizer)])
            elif kind in ("dpo", "orpo"):
                found.append([pair(line, tokenizer)])
            else:
                found.append([Unit((example,)) for example in examples_of(line, tokenizer)])
        except JaxLlamaError as error:
            raise JaxLlamaError(f"{path}: line {number}: {error}") from None
        before = line
    return found


def lines(path: str | Path) -> Iterator[tuple[int, JsonObject]]:
    """Yield (number from 1, object) of each line that is not empty."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise JaxLlamaError(f"{os.path.abspath(path)}: {error.strerror or error}") from None
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
        yield from chat(messages, tokenizer, tools_of(line))
    elif "prompt" in line and "completion" in line:
        prompt, completion = line["prompt"], line["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            yield Example.of(*text_pair(prompt, completion, tokenizer))
        else:
            before, after = checked(prompt, "prompt"), checked(completion, "completion")
            yield from chat([*before, *after], tokenizer, tools_of(line), first=len(before))
    else:
        raise JaxLlamaError("expected messages, or prompt and completion")


def pair(line: JsonObject, tokenizer: Tokenizer) -> Unit:
    """Return the unit (chosen, rejected) of a line."""
    if "chosen" not in line or "rejected" not in line:
        raise JaxLlamaError("expected chosen and rejected, with or without a prompt")
    answers = line["chosen"], line["rejected"]
    if "prompt" not in line:
        both = [checked(answer, "chosen and rejected") for answer in answers]
        same = 0
        while same < min(map(len, both)) and both[0][same] == both[1][same]:
            same += 1
        prompt, answers = both[0][:same], [messages[same:] for messages in both]
    else:
        prompt = line["prompt"]
    tools = line.get("tools")
    return Unit(tuple(answered(prompt, answer, tokenizer, tools) for answer in answers))


def labelled(line: JsonObject, other: JsonObject, tokenizer: Tokenizer) -> Unit:
    """Return KTO's unit: a line's answer, and the answer of another line to the same prompt."""
    if not isinstance(line.get("label"), bool) or "prompt" not in line or "completion" not in line:
        raise JaxLlamaError("expected prompt, completion and label, true or false")
    prompt, tools = line["prompt"], line.get("tools")
    answers = line["completion"], other.get("completion")
    examples = tuple(answered(prompt, answer, tokenizer, tools) for answer in answers)
    return Unit(examples, 1.0 if line["label"] else -1.0)


def answered(prompt: object, answer: object, tokenizer: Tokenizer, tools: object) -> Example:
    """Return the one example of a prompt and its answer, both texts or both messages."""
    line: JsonObject = {"prompt": prompt, "completion": answer, "tools": tools}
    found = list(examples_of(line, tokenizer))
    if len(found) != 1:
        raise JaxLlamaError("the template rewrites this answer's earlier turns: no preference")
    return found[0]


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


def tools_of(line: JsonObject) -> list[object] | None:
    """Return the tools of a line. Raises JaxLlamaError for anything but a list of objects."""
    tools = line.get("tools")
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        raise JaxLlamaError("tools: expected a list of objects")
    return tools


def chat(
    messages: Messages,
    tokenizer: Tokenizer,
    tools: Sequence[object] | None = None,
    first: int = 0,
) -> Iterator[Example]:
    """Yield the examples of a conversation.

    first: index of the first message whose answer counts.
    """
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

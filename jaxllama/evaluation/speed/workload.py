"""The requests of a load: conversations of token ids that follow from a seed.

    conversations(load, rng, vocab_size, longest) -> [[ConversationTurn, ...], ...]
    read_lengths(path) -> [[(prompt, new), ...], ...]         the turns of every entry of a file

A turn's prompt is the conversation so far and some new ids. If conversations begin with shared
prefixes, number i has prefix ``i % prefixes``.

Files are ShareGPT's JSON (a list of ``{"conversations": [{"from", "value"}, ...]}``) or JSON lines
``{"prompt_tokens": N, "new_tokens": N}``. In ShareGPT's texts four bytes of UTF-8 count as a token,
which is typical of chats. Entries are drawn at random, without those that are longer than the
server accepts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    ``N``: always N. ``LOW:HIGH``: uniform. ``~N``: log-normal with mean N (sigma 1, at most 8 N),
    like chats.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            numbers = [int(part) for part in self.text.removeprefix("~").split(":")]
        except ValueError:
            numbers = []
        single = len(numbers) == 1
        pair = len(numbers) == 2 and self.text[0] != "~" and numbers[0] <= numbers[1]
        if not (single or pair) or numbers[0] < 1:
            raise JaxLlamaError(f"{self.text!r} is no length: N, LOW:HIGH or ~MEAN, from 1 on")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.text[0] == "~":
            mean = int(self.text[1:])
            drawn = rng.lognormal(math.log(mean) - 0.5, 1.0, count)
            return np.clip(drawn, 1, 8 * mean).astype(int).tolist()
        low, _, high = self.text.partition(":")
        return rng.integers(int(low), int(high or low), count, endpoint=True).tolist()


@dataclasses.dataclass(frozen=True)
class ConversationTurn:
    """A turn. ids: the new part of its prompt. new_tokens: number of tokens to generate."""

    ids: list[int]
    new_tokens: int


class Asked(Protocol):
    """The sizes to draw from; ``load_generator.Load`` has them."""

    @property
    def requests(self) -> int: ...
    @property
    def prompt_tokens(self) -> Lengths: ...
    @property
    def new_tokens(self) -> Lengths: ...
    @property
    def seed(self) -> int: ...
    @property
    def lengths(self) -> Path | None: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def prefixes(self) -> int: ...
    @property
    def turns(self) -> int: ...


def conversations(
    load: Asked, rng: np.random.Generator, vocab_size: int, longest: int | None
) -> list[list[ConversationTurn]]:
    """Return ``load.requests`` conversations of up to ``load.turns`` turns.

    longest: number of tokens that the server accepts in one request, None if unknown.
    """
    if load.lengths is None:
        count = load.requests * load.turns
        drawn = list(
            zip(load.prompt_tokens.draw(rng, count), load.new_tokens.draw(rng, count), strict=True)
        )
        sizes = [drawn[first : first + load.turns] for first in range(0, count, load.turns)]
    else:
        room = None if longest is None else longest - load.prefix_tokens
        entries = [_within(entry[: load.turns], room) for entry in read_lengths(load.lengths)]
        entries = [entry for entry in entries if entry]
        if not entries:
            raise JaxLlamaError(f"{load.lengths}: no entry is as short as {longest} tokens")
        sizes = [entries[index] for index in rng.integers(len(entries), size=load.requests)]

    def ids(count: int) -> list[int]:
        return rng.integers(3, vocab_size, count).tolist()

    shared = [ids(load.prefix_tokens) for _ in range(load.prefixes)] if load.prefix_tokens else [[]]
    found = []
    for number, turns in enumerate(sizes):
        before = shared[number % len(shared)]
        found.append([])
        for prompt, new in turns:
            found[-1].append(ConversationTurn([*before, *ids(prompt)], new))
            before = []
    return found


def _within(turns: list[tuple[int, int]], room: int | None) -> list[tuple[int, int]]:
    """Return the first turns that fit together."""
    total = 0
    for index, (prompt, new) in enumerate(turns):
        total += prompt + new
        if room is not None and total > room:
            return turns[:index]
    return turns


def read_lengths(path: Path) -> list[list[tuple[int, int]]]:
    """Return the lengths of a file. Raises JaxLlamaError naming an invalid line or entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return [[_pair(path, number, line)] for number, line in _lines(text)]
    if not isinstance(data, list):
        return [[_pair(path, 1, text)]]
    entries = [_chat(path, number, entry) for number, entry in enumerate(data)]
    return [entry for entry in entries if entry]


def _lines(text: str) -> list[tuple[int, str]]:
    return [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _pair(path: Path, number: int, line: str) -> tuple[int, int]:
    try:
        entry = json.loads(line)
        prompt, new = entry["prompt_tokens"], entry["new_tokens"]
        if type(prompt) is type(new) is int and min(prompt, new) >= 1:
            return prompt, new
    except (ValueError, KeyError, TypeError):
        pass
    raise JaxLlamaError(f"{path}:{number}: needs prompt_tokens and new_tokens, from 1 on")


def _chat(path: Path, number: int, entry: JsonObject) -> list[tuple[int, int]]:
    """Return the lengths of each message with its answer; [] without an answer."""
    try:
        said = [(turn["from"], turn["value"]) for turn in entry["conversations"]]
        sizes = [(who, max(len(text.encode()) // BYTES_PER_TOKEN, 1)) for who, text in said]
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        raise JaxLlamaError(f"{path}: entry {number}: no conversation as ShareGPT has it") from None
    return [
        (size, answer)
        for (who, size), (other, answer) in zip(sizes, sizes[1:], strict=False)
        if who in ("human", "user") and other in ("gpt", "assistant", "chatgpt", "bing", "bard")
    ]

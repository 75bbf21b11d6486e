"""Chat prompts in which a special token that a message spells stays text.

    spellings = Spellings(markers)
    mark = next(unused_marks(messages))                if spellings.are_in(messages)
    rendered = template(spellings.guard(messages, mark))
    prompt = ChatPrompt.of(rendered, mark)             the text, and where a marker is only text
    PlainSpelling(backend, markers).encode(prompt)     token ids

A marker is a token with which a chat template structures a conversation, such as ``<|im_end|>``.
``guard`` puts a character that occurs nowhere else after the first character of every marker in
the messages.  The template may trim, quote or join the messages: the character stays where it is.
``ChatPrompt.of`` takes it out again and keeps the positions.  ``PlainSpelling`` holds a copy of the
tokenizer in which every marker has a random name.  It writes these names for the template's own
markers, so the spelling of a marker in a message matches no token.

The beginning of a marker at the end of a message is guarded too, since a template may append
another message to it.  Left out: a template that cuts pieces out of the middle of a message could
join two halves of a marker.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import tokenizers

from jaxllama.errors import JaxLlamaError

# What templates ask for by name: of the API, not of a user's text, also where a marker spells it.
_WORDS = frozenset(
    "role content type text name description id index function arguments parameters properties "
    "required items enum tool_calls tool_call_id reasoning reasoning_content thinking system user "
    "assistant tool developer object string number integer boolean array null".split()
)
# Noncharacters of Unicode, and the characters of private use.
MARKS = range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0xF0000, 0x10FFFE)


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation. literal: positions where a marker's spelling is only text."""

    text: str
    literal: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rendered: str, mark: str | None) -> ChatPrompt:
        if mark is None:
            return cls(rendered)
        pieces = rendered.split(mark)
        size, literal = 0, set[int]()
        for piece in pieces[:-1]:
            size += len(piece)
            literal.add(size - 1)
        return cls("".join(pieces), frozenset(literal))

    def __add__(self, other: ChatPrompt) -> ChatPrompt:
        shifted = (at + len(self.text) for at in other.literal)
        return ChatPrompt(self.text + other.text, self.literal.union(shifted))

    def until(self, end: int) -> ChatPrompt:
        """Return the first ``end`` characters."""
        return ChatPrompt(self.text[:end], frozenset(at for at in self.literal if at < end))

    def since(self, start: int) -> ChatPrompt:
        """Return the characters from ``start`` on."""
        literal = frozenset(at - start for at in self.literal if at >= start)
        return ChatPrompt(self.text[start:], literal)


class Spellings:
    """Finds markers in texts."""

    def __init__(self, markers: Collection[str]) -> None:
        self._pattern = re.compile(f"(?=({_any_of(markers)}))") if markers else None
        self._beginnings = {word[:size] for word in markers for size in range(1, len(word))}
        self._longest = max(map(len, markers), default=0)

    def starts(self, text: str) -> set[int]:
        """Positions of markers in a text, and of the beginning of one at its end."""
        if self._pattern is None:
            return set()
        found = {match.start() for match in self._pattern.finditer(text)}
        end = len(text.rstrip())
        for size in range(1, min(self._longest, end + 1)):
            if text[end - size : end] in self._beginnings:
                found.add(end - size)
        return found

    def are_in(self, value: object) -> bool:
        """Return whether a text in ``value`` spells a marker."""
        return any(map(self.starts, texts_in(value)))

    def guard(self, value: Any, mark: str) -> Any:
        """Nested lists and objects with every text guarded, keys included, but for ``_WORDS``."""
        if isinstance(value, str):
            cuts = [0, *(start + 1 for start in sorted(self.starts(value))), len(value)]
            return mark.join(value[begin:end] for begin, end in itertools.pairwise(cuts))
        if isinstance(value, Mapping):
            guarded = {}
            for key, item in value.items():
                is_kind = key in ("role", "type") and isinstance(item, str) and item in _WORDS
                name = key if key in _WORDS else self.guard(key, mark)
                guarded[name] = item if is_kind else self.guard(item, mark)
            return guarded
        if isinstance(value, (list, tuple)):
            return [self.guard(item, mark) for item in value]
        return value


class Markers(NamedTuple):
    """Finders for the special tokens of a chat: everywhere, and in an assistant's message.

    Templates search the assistant's earlier messages for "</think>" and similar tokens.
    """

    everywhere: Spellings
    in_answers: Spellings


class PlainSpelling:
    """A tokenizer's copy in which markers have random names.  Making it takes about a second."""

    def __init__(self, backend: tokenizers.Tokenizer, markers: Collection[str]) -> None:
        secret = secrets.token_hex(8)
        self._names = {
            marker: f"\ufdd0{secret}{index}\ufdd0" for index, marker in enumerate(sorted(markers))
        }
        data = json.loads(backend.to_str())
        added = data["added_tokens"]
        ids = [(token["id"], self._name(token["content"])) for token in added]
        for token in added:
            token["content"] = self._name(token["content"])
        data["post_processor"] = None  # it may name special tokens; chat prompts need none
        model = data["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {self._name(token): index for token, index in vocab.items()}
        else:  # Unigram: pairs of a token and its score
            model["vocab"] = [[self._name(token), score] for token, score in vocab]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._name(model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not self._makes_marker(pair)]
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(data))
        # The library gives added tokens new numbers if the vocabulary lacks them.
        self._ids = {self._backend.token_to_id(name): index for index, name in ids}
        self._plain = backend
        self._markers = {backend.token_to_id(marker): marker for marker in markers}

    def encode(self, prompt: ChatPrompt) -> list[int]:
        ids = self._backend.encode(self._named(prompt), add_special_tokens=False).ids
        return [self._ids.get(index, index) for index in ids]

    def _named(self, prompt: ChatPrompt) -> str:
        """The prompt's text with the names of the markers that are tokens in it."""
        text, parts, done = prompt.text, [], 0
        seen = self._plain.encode(text, add_special_tokens=False)
        for index, (begin, end) in zip(seen.ids, seen.offsets, strict=True):
            marker = self._markers.get(index)
            # The span may include blanks around the marker.
            start = -1 if marker is None else text.find(marker, begin, end)
            if marker is not None and start >= done and start not in prompt.literal:
                parts += [text[done:start], self._names[marker]]
                done = start + len(marker)
        return "".join([*parts, text[done:]])

    def _name(self, token: str) -> str:
        return self._names.get(token, token)

    def _makes_marker(self, pair: str | list[str]) -> bool:
        left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
        return not self._names.keys().isdisjoint((left, right, left + right))


def unused_marks(value: object) -> Iterator[str]:
    """Yield characters that no text in ``value`` has."""
    used = set[str]().union(*map(set, texts_in(value)))
    yield from (mark for mark in map(chr, itertools.chain(*MARKS)) if mark not in used)
    raise JaxLlamaError("the messages use every private character: none is left as a mark")


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item)


_Branch: TypeAlias = "dict[str, _Branch]"  # what may follow, by its first character; "" ends


def _any_of(words: Collection[str]) -> str:
    """Return a pattern for the longest of the words, in linear time: a tree of characters."""
    tree: _Branch = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: _Branch) -> str:
    branches = [re.escape(key) + _branches(rest) for key, rest in node.items() if key]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else "|".join(branches)
    if len(branches) > 1 or "" in node:
        pattern = f"(?:{pattern})"
    return pattern + "?" if "" in node else pattern

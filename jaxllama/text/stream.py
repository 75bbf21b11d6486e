"""Text as it is decoded: ``TextStream`` turns token ids into text, ``StopStrings`` finds its end.

Both take a piece and return the part that is certain. TextStream holds back bytes that do not form
a whole character yet. StopStrings holds back text that may be the beginning of a stop string.
``flush`` returns the rest. Each costs a constant time per token or character, however long the text
is. The search is Knuth, Morris and Pratt's, with one automaton for each stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Detokenizer(Protocol):
    """The interface of a tokenizer that TextStream needs."""

    @property
    def drops_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes: ...


class TextStream:
    """Incremental decoding.

    The joined results of ``feed`` and ``flush`` equal ``tokenizer.decode(ids,
    continuing=continuing)``. continuing: whether the tokens follow a prompt. Otherwise they begin a
    text, to which SentencePiece tokenizers add a first space that they drop again.
    """

    def __init__(
        self, tokenizer: Detokenizer, *, skip_special: bool = True, continuing: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._drop_space = tokenizer.drops_first_space and not continuing
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # inside a character

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes; invalid UTF-8 becomes U+FFFD."""
        return self._decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def read(self, token_ids: Iterable[int]) -> str:
        """Return the characters that all these tokens complete."""
        spell, skip_special = self._tokenizer.token_bytes, self._skip_special
        return self._decode(b"".join([spell(token, skip_special) for token in token_ids]))

    def _decode(self, piece: bytes) -> str:
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        if not self._is_inside:
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(piece)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the rest: U+FFFD if the text ends inside a character."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._is_inside = False
        return rest


class StopStrings:
    """Cuts a stream of text at the first stop string that is completed.

    found: whether a stop string was completed. match: which one, the longest of several that end
    together.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._begins = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.match: str | None = None

    @property
    def found(self) -> bool:
        return self.match is not None

    def feed(self, text: str) -> str:
        """Return text that cannot belong to a stop string; "" after one has been found."""
        if self.found:
            return ""
        if not self._held and self._begins.isdisjoint(text):
            return text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                state, failure = self._matched[index], self._failure[index]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    if self.match is None or len(stop) > len(self.match):
                        self.match = stop
                    state = failure[state - 1]
                self._matched[index] = state
            if self.match is not None:
                self._held = ""
                return held[: position - len(self.match)]
        keep = len(held) - max(self._matched, default=0)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        rest, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return rest


def _failure_table(pattern: str) -> list[int]:
    """Return for every prefix the length of its longest proper prefix that is also its suffix."""
    table, length = [0] * len(pattern), 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table

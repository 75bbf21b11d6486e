"""OutputReader: one request's tokens to text and to its end, as ``LanguageModel.generate`` does.

It keeps every token up to and with the one that ends the text (a stop token, or the one that
completes a stop string) and drops what the device wrote after it.  Its state is a function of the
tokens read, so a restored engine reads them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllama.tokenizer import StopStrings, TextStream, Tokenizer


class OutputReader:
    def __init__(
        self, tokenizer: Tokenizer | None, eos_ids: Sequence[int], stops: Sequence[str]
    ) -> None:
        self.stopped = False
        self._eos = frozenset(eos_ids)
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._stops = StopStrings(stops) if stops else None

    def may_stop(self, tokens: Sequence[int]) -> bool:
        """Could the text end within these tokens?"""
        return self._stops is not None or not self._eos.isdisjoint(tokens)

    def read(self, tokens: Sequence[int]) -> tuple[int, str]:
        """(How many of ``tokens`` belong to the answer, the text that is certain by then)."""
        shown: list[str] = []
        for index, token in enumerate(tokens):
            if token in self._eos:
                self.stopped = True
            elif self._stream is not None:
                shown.append(self._pass(self._stream.feed(token)))
            if self.stopped:
                return index + 1, "".join(shown)
        return len(tokens), "".join(shown)

    def close(self) -> str:
        """What was held back: an incomplete character, the beginning of a stop string."""
        if self._stream is None or (self._stops is not None and self._stops.found):
            return ""
        text = self._pass(self._stream.flush())
        if self._stops is not None and not self._stops.found:
            text += self._stops.flush()
        return text

    def _pass(self, text: str) -> str:
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        self.stopped |= self._stops.found
        return text

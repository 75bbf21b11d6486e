"""Reader: from tokens to text, up to the end of an answer.

    reader = Reader(tokenizer, eos_ids, stops)
    kept, text = reader.read(tokens)      number of tokens of the answer, text that is certain
    text = reader.close()                 the text that was held back

The answer includes every token up to the one that ends the text, and that token too: a stop token,
or the token that completes a stop string. Tokens that the device generated after it do not belong
to the answer. ``LanguageModel.generate``, the engine and the server's front end use this class.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllama.text.tokenizer import StopStrings, TextStream, Tokenizer


class Reader:
    """Follows the tokens of one answer.

    Parameters
    ----------
    tokenizer
        None if no text is needed.
    eos_ids
        Tokens that end the answer.
    stops
        Texts that end the answer.
    least
        Number of first tokens in which stop strings are ignored.
    skip_special
        As for ``TextStream``.
    include_stop
        Whether the text includes the token or the text that ends it.

    Attributes
    ----------
    stopped
        Whether the answer has ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        stops: Sequence[str],
        *,
        least: int = 0,
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.stopped = False
        self._include_stop = include_stop
        self._eos = frozenset(eos_ids)
        self._stream = TextStream(tokenizer, skip_special=skip_special) if tokenizer else None
        self._stops = StopStrings(stops) if stops else None
        self._exempt = least

    @property
    def stop_text(self) -> str | None:
        """The stop string that has ended the answer, or None."""
        return self._stops.match if self._stops is not None else None

    def read(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Return (number of ``tokens`` that belong to the answer, text that is certain now)."""
        if self._stops is None and self._eos.isdisjoint(tokens):
            self._exempt -= len(tokens)
            return len(tokens), self._stream.read(tokens) if self._stream is not None else ""
        shown: list[str] = []
        for index, token in enumerate(tokens):
            if token in self._eos:
                self.stopped = True
                if self._include_stop and self._stream is not None:
                    shown.append(self._pass(self._stream.feed(token)))
            elif self._stream is not None:
                shown.append(self._pass(self._stream.feed(token)))
            self._exempt -= 1
            if self.stopped:
                return index + 1, "".join(shown)
        return len(tokens), "".join(shown)

    def close(self) -> str:
        """Return the text held back: an incomplete character or the start of a stop string."""
        if self._stream is None or (self._stops is not None and self._stops.found):
            return ""
        text = self._pass(self._stream.flush())
        if self._stops is not None and not self._stops.found:
            text += self._stops.flush()
        return text

    def _pass(self, text: str) -> str:
        if self._stops is None or self._exempt > 0:
            return text
        text = self._stops.feed(text)
        self.stopped |= self._stops.found
        if self._include_stop and self._stops.match is not None:
            text += self._stops.match
        return text

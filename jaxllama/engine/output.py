"""What a request writes, on its way to the one who listens.

``OutputReader`` turns tokens to text and finds their end as ``LanguageModel.generate`` does: it
keeps every token up to and with the one that ends the text (a stop token, or the one that completes
a stop string) and drops what the device wrote after it.  ``RequestOutput`` is a request in the
engine, with its reader, its grammar's matcher and its listener.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxllama.engine import scheduler
from jaxllama.engine.grammar import Matcher
from jaxllama.engine.request import Event, FinishReason
from jaxllama.engine.runner import Written
from jaxllama.text.tokenizer import StopStrings, TextStream, Tokenizer

OnEvent = Callable[[Event], None]


class OutputReader:
    """least: no stop string is looked for in that many tokens.  skip_special: of ``TextStream``.
    include_stop: the text ends with what has ended it."""

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

    def read(self, tokens: Sequence[int]) -> tuple[int, str]:
        """(How many of ``tokens`` belong to the answer, the text that is certain by then)."""
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
        """What was held back: an incomplete character, the beginning of a stop string."""
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


class RequestOutput:
    """reason: set once the answer is complete.  error: what the request's own work has raised; then
    nothing more is read.  last_time: of the newest token, before the first one of the submission.
    """

    def __init__(
        self,
        sequence: scheduler.Sequence,
        on_event: OnEvent,
        reader: OutputReader,
        matcher: Matcher | None,
        last_time: float,
    ) -> None:
        self.sequence, self.on_event = sequence, on_event
        self.reader, self.matcher = reader, matcher
        self.last_time = last_time
        self.reason: FinishReason | None = None
        self.error: Exception | None = None

    def read(self, written: Written) -> dict[str, Any]:
        """What is news in what a row has written, as fields of an Event."""
        sequence = self.sequence
        kept, text = self.reader.read(written.tokens)
        news: dict[str, Any] = {
            "tokens": tuple(written.tokens[:kept]),
            "logprobs": tuple(written.logprobs[:kept]),
        }
        n_top = sequence.request.logprobs
        if n_top:
            ids, values = (array[:kept, :n_top].tolist() for array in written.top)
            news["top_logprobs"] = tuple(
                tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)
            )
        sequence.output += news["tokens"]
        if self.reader.stopped:
            self.reason = "stop"
        elif self.matcher is not None:
            self.matcher.read(news["tokens"])
            self.reason = "stop" if self.matcher.is_complete else None
        if self.reason is not None or not sequence.remaining:
            text += self.reader.close()  # which may complete a stop string
            self.reason = self.reason or ("stop" if self.reader.stopped else "length")
        return {**news, "text": text}

    def emit(self, **news: Any) -> None:
        """Tell the listener, which may raise."""
        sequence = self.sequence
        self.on_event(
            Event(
                id=sequence.request.id,
                prompt_tokens=len(sequence.request.prompt),
                cached_tokens=sequence.cached,
                completion_tokens=len(sequence.output),
                **news,
            )
        )

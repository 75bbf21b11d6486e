"""Live: a request in the engine and the one who listens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.grammar import Matcher
from jaxllama.serving.output import OutputReader
from jaxllama.serving.request import Event, FinishReason
from jaxllama.serving.runner import Written
from jaxllama.serving.scheduler import Sequence

OnEvent = Callable[[Event], None]


class Live:
    """reason: set once the answer is complete.  last_time: of the newest token, before the first
    one of the submission."""

    def __init__(
        self,
        sequence: Sequence,
        on_event: OnEvent,
        reader: OutputReader,
        matcher: Matcher | None,
        last_time: float,
    ) -> None:
        self.sequence, self.on_event = sequence, on_event
        self.reader, self.matcher = reader, matcher
        self.last_time = last_time
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None

    def read(self, written: Written) -> dict[str, Any]:
        """What is news of what a row has written, as fields of an Event."""
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
        self.logprobs += news["logprobs"]
        if self.reader.stopped:
            self.reason = "stop"
        elif self.matcher is not None:
            try:
                self.matcher.read(news["tokens"])
                self.reason = "stop" if self.matcher.is_complete else None
            except JaxLlamaError as error:
                self.reason, news["message"] = "error", str(error)
        if self.reason is not None or not sequence.remaining:
            text += self.reader.close()  # which may complete a stop string
            self.reason = self.reason or ("stop" if self.reader.stopped else "length")
        return {**news, "text": text}

    def emit(self, **news: Any) -> bool:
        """Tell the listener; False if it raised: it hears no more."""
        sequence = self.sequence
        event = Event(
            id=sequence.request.id,
            prompt_tokens=len(sequence.request.prompt),
            cached_tokens=sequence.cached,
            completion_tokens=len(sequence.output),
            **news,
        )
        try:
            self.on_event(event)
        except Exception:
            self.on_event = lambda event: None
            return False
        return True

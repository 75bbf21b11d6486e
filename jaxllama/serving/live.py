"""Live: a request in the engine and the one who listens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.grammar import Matcher
from jaxllama.serving.output import OutputReader
from jaxllama.serving.request import Event, FinishReason
from jaxllama.serving.runner import Written
from jaxllama.serving.scheduler import Sequence

OnEvent = Callable[[Event], None]


class Unread(NamedTuple):
    """What a row has written at ``time`` and nobody has been told yet.  is_accepted: it stands in
    the sequence's output already."""

    written: Written
    time: float
    is_accepted: bool


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
        self.unread: Unread | None = None
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None

    def accept(self, written: Written, time: float) -> bool:
        """Take what a row has written.  True if the answer goes on after it: then it can be read
        later, else at once."""
        tokens, sequence = written.tokens, self.sequence
        may_end = (
            len(tokens) >= sequence.remaining
            or self.matcher is not None
            or self.reader.may_stop(tokens)
        )
        if not may_end:
            sequence.output += tokens
            self.logprobs += written.logprobs
        self.unread = Unread(written, time, not may_end)
        return not may_end

    def read(self) -> dict[str, Any]:
        """What is news in ``unread``, as fields of an Event."""
        assert self.unread is not None
        (written, _, is_accepted), self.unread = self.unread, None
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
        if not is_accepted:
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

"""The output of a request, on its way to its listener.

``RequestOutput`` holds a request in the engine with its reader, its grammar's matcher and its
listener.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxllama.engine import scheduler
from jaxllama.engine.grammar import Matcher
from jaxllama.engine.request import Event, FinishReason
from jaxllama.engine.runner import Written
from jaxllama.text.reader import Reader
from jaxllama.typing import Options

OnEvent = Callable[[Event], None]


class RequestOutput:
    """A request in the engine and the state of its answer.

    reason: set once the answer is complete. error: the exception that the request's own text,
    grammar or listener raised; after an error nothing more is read. first_time: time of the first
    token, None before it. last_time: time of the newest token, or of the submission before the
    first token. to_skip: number of coming tokens that the listener has already
    (``Request.begun``) and that are generated again.
    """

    def __init__(
        self,
        sequence: scheduler.Sequence,
        on_event: OnEvent,
        reader: Reader,
        matcher: Matcher | None,
        last_time: float,
    ) -> None:
        self.sequence, self.on_event = sequence, on_event
        self.reader, self.matcher = reader, matcher
        self.first_time: float | None = None
        self.last_time = last_time
        self.to_skip = 0
        self.reason: FinishReason | None = None
        self.error: Exception | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Read tokens that the listener has already."""
        self.reader.read(tokens)
        if self.matcher is not None:
            self.matcher.read(tokens)
        self.sequence.output += tokens

    def read(self, written: Written) -> Options:
        """Return the new tokens, logprobs and text of a row, as fields of an Event."""
        sequence = self.sequence
        begin = min(self.to_skip, len(written.tokens))
        if begin:
            self.to_skip -= begin
            self.begin(written.tokens[:begin])
        kept, text = self.reader.read(written.tokens[begin:])
        kept += begin
        news: Options = {
            "tokens": tuple(written.tokens[begin:kept]),
            "logprobs": tuple(written.logprobs[begin:kept]),
        }
        n_top = sequence.request.logprobs
        if n_top:
            ids, values = (array[begin:kept, :n_top].tolist() for array in written.top)
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
            text += self.reader.close()  # closing may complete a stop string
            self.reason = self.reason or ("stop" if self.reader.stopped else "length")
        return {**news, "text": text}

    def emit(self, **news: Any) -> None:
        """Call the listener with an Event; the listener may raise."""
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

"""An engine without a model: what the server asks of one (``hub.Served``), on a thread of its own.

    with FakeEngine(max_len=96) as engine: ...
    engine.answer = says(tokenizer, "Hello.")
    with engine.held():                                rows stand still
        engine.wait_for(lambda: len(engine.live) == 2)

In each step every row writes one token of ``answer(request)``. An answer that raises ends the
engine, as a device that fails does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    FinishReason,
    QueueFull,
    Request,
)
from jaxllama.engine.stats import EngineStats
from jaxllama.serving.ipc.pool import Sizes
from jaxllama.text.tokenizer import Tokenizer

STOP = 2  # the stop token
LETTERS = 40  # of an answer
Answer = Callable[[Request], Iterator[int]]


def letters(request: Request) -> Iterator[int]:
    """Letters that follow from the prompt and the seed, and the stop token behind ``LETTERS``."""
    draw = random.Random(str((request.prompt, request.sampling.seed)))
    for index in itertools.count():
        letter = draw.choice(b"abcdefghij ")
        yield STOP if index == LETTERS and not request.ignore_eos else letter


def says(tokenizer: Tokenizer, text: str) -> Answer:
    """The answer that is this text, whatever is asked."""
    tokens = tokenizer.encode(text, add_special=False)
    return lambda request: itertools.chain(tokens, itertools.repeat(STOP))


@dataclasses.dataclass
class Row:
    """A request in flight."""

    request: Request
    on_event: Callable[[Event], None]
    tokens: Iterator[int]
    written: int = 0
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    first: float | None = None

    def step(self) -> Event:
        """Write a token, with logprobs that follow from it."""
        token, request = next(self.tokens), self.request
        self.written += 1
        self.first = self.first or time.monotonic()
        stops = (*request.stop_token_ids, *(() if request.ignore_eos else (STOP,)))
        reason: FinishReason | None = None
        if token in stops and self.written > request.min_tokens:
            reason = "stop"
        elif self.written == request.max_new_tokens:
            reason = "length"
        top = tuple((ord("z") - rank, -float(rank)) for rank in range(request.logprobs or 0))
        event = self.event(reason)
        return dataclasses.replace(
            event, tokens=(token,), logprobs=(-token / 256,), top_logprobs=(top,) if top else ()
        )

    def event(self, reason: FinishReason | None, error: Exception | None = None) -> Event:
        times = None
        if reason is not None and self.first is not None:
            times = self.submitted, self.submitted, self.first, time.monotonic()
        return Event(
            self.request.id,
            finish_reason=reason,
            times=times,
            error=error,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.written,
        )


class FakeEngine:
    """requests, cancelled: all that were submitted, and the ids of those that were cancelled."""

    def __init__(self, *, max_len: int = 96, max_queue: int = 8, answer: Answer = letters) -> None:
        self.options = Sizes(max_len, max_queue)
        self.answer = answer
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.failure: str | None = None
        self.closed: str | None = None
        self.stalled: str | None = None
        self.live: dict[str, Row] = {}
        self._listeners: list[Callable[[], None]] = []
        self._clock = threading.Condition(threading.RLock())
        self._steps = math.inf  # until rows stand still
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # What the server asks

    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool
    ) -> None:
        with self._clock:
            if self.closed is not None:
                raise EngineClosed(self.closed)
            if len(self.live) >= self.options.max_queue:
                raise QueueFull.of(len(self.live), 2.5)
            self.requests.append(request)
            begun = len(request.begun)
            tokens = itertools.islice(self.answer(request), begun, None)
            self.live[request.id] = Row(request, on_event, tokens, begun)
            self._clock.notify_all()

    def end(self, request_id: str, reason: FinishReason) -> None:
        with self._clock:
            if reason == "cancelled":
                self.cancelled.append(request_id)
            self._end([request_id], reason)

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def stats(self) -> EngineStats:
        figures: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        own = {"running": len(self.live), "max_slots": 16, "cache_capacity": 100, "finished": {}}
        return EngineStats(**figures | own)

    # What tests do

    @contextlib.contextmanager
    def held(self, steps: int = 0) -> Generator[None]:
        """Within the block rows stand still behind so many steps."""
        self._go(steps)
        try:
            yield
        finally:
            self._go(math.inf)

    def fail(self, request_id: str, error: Exception) -> None:
        """End one request with an error of its own."""
        with self._clock:
            self._end([request_id], "error", error)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition comes to hold; asked behind every change."""
        with self._clock:
            return self._clock.wait_for(condition, 30)

    def stop(self) -> None:
        """Take no more requests and drop those in flight."""
        with self._clock:
            self.closed = self.closed or "the engine has stopped"
            self._end(list(self.live), "cancelled")
        self._thread.join()

    def _go(self, steps: float) -> None:
        with self._clock:
            self._steps = steps
            self._clock.notify_all()

    def _run(self) -> None:
        while self.closed is None:
            with self._clock:
                self._clock.wait_for(lambda: self.closed or (self.live and self._steps))
                self._steps -= 1
                try:
                    self._tell([row.step() for row in self.live.values()])
                except Exception as error:
                    self.failure = self.closed = f"the engine failed: {error}"
                    self._end(list(self.live), "error", EngineFailed(self.failure))

    def _end(self, ids: list[str], reason: FinishReason, error: Exception | None = None) -> None:
        self._tell([self.live[id].event(reason, error) for id in ids if id in self.live])

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            row = self.live[event.id] if event.finish_reason is None else self.live.pop(event.id)
            row.on_event(event)
        for told in self._listeners:
            told()
        self._clock.notify_all()

"""A replica: an engine in an actor of Ray Serve.

    EngineReplica(start)                   start() -> Started, called in the actor
    replica.generate(request)              yields ``ipc`` messages, as bytes
    replica.forward("embed", ...)          a pass beside the engine
    replica.report()                       figures, and times since the last report

Contract. The first message of ``generate`` is a Reply, or a Refused for what ``Engine.submit``
raises. Each StepNews after it has all tokens since the one before. The first token is sent at once,
and the others at most every ``PIECE`` seconds. The last row has a finish reason. A caller that
leaves ends its request.

An engine that fails ends its process, so that Serve starts another replica. Serve calls
``check_health``, and replaces a replica whose event loop does not answer.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging.config
import os
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, Protocol

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import EngineFailed, Event, Request
from jaxllama.engine.stats import EngineStats
from jaxllama.language_model import LanguageModel
from jaxllama.serving import logs
from jaxllama.serving.api import messages
from jaxllama.serving.ipc.facts import ModelFacts
from jaxllama.serving.ipc.hub import row_event
from jaxllama.serving.ipc.replicas import About
from jaxllama.serving.ipc.served import Passes, Served, forward_passes
from jaxllama.typing import Options

PIECE = 0.04  # seconds between two messages of a request
LOOK = 0.5  # seconds between two checks of the engine
Observe = Callable[[str, float], None]


class Runs(Served, Protocol):
    """An engine that a replica runs."""

    def stats(self) -> EngineStats: ...

    def stop(self) -> None: ...


class Started(NamedTuple):
    """A running engine with the facts of its model and the passes beside it."""

    engine: Runs
    facts: ModelFacts
    passes: Passes


class ReplicaReport(NamedTuple):
    """The figures of a replica. times: (name, seconds) pairs for ``Metrics.observe``."""

    replica: str
    stats: EngineStats
    times: list[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class StartEngine:
    """Starts an engine over the model that ``load`` returns."""

    load: Callable[[], LanguageModel]
    options: Options

    def __call__(self, observe: Observe) -> Started:
        logging.config.dictConfig(logs.configuration())
        with logs.progress_lines():
            lm = self.load()
            engine = Engine(lm, observe=observe, **self.options)
            engine.start()
        return Started(engine, ModelFacts.of(lm), forward_passes(lm))


class _Stream:
    """The events of a request that its caller has not been sent."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: collections.deque[Event] = collections.deque()
        self.ready = asyncio.Event()
        self.is_over = asyncio.Event()

    def take(self) -> bytes:
        rows: list[messages.RowEvent] = []
        self.ready.clear()
        while self.events:
            event = self.events.popleft()
            rows.append(row_event(0, self.request, event))
            if event.finish_reason is not None:
                self.is_over.set()
        return messages.encode(messages.StepNews(rows))


class EngineReplica:
    """The deployment's class; the module docstring has the interface."""

    def __init__(self, start: Callable[[Observe], Started]) -> None:
        self._name = uuid.uuid4().hex
        self._times: list[tuple[str, float]] = []
        self._engine, self._facts, self._passes = start(self._observe)
        self._news: set[_Stream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._engine.listen(self._told)

    def _observe(self, name: str, seconds: float) -> None:
        self._times.append((name, seconds))

    # On the engine's thread

    def _add(self, stream: _Stream, event: Event) -> None:
        stream.events.append(event)
        self._news.add(stream)

    def _told(self) -> None:
        if self._news and self._loop is not None:
            news, self._news = self._news, set()
            self._loop.call_soon_threadsafe(self._wake, news)

    # On the event loop

    @staticmethod
    def _wake(news: set[_Stream]) -> None:
        for stream in news:
            stream.ready.set()
            if stream.events and stream.events[-1].finish_reason is not None:
                stream.is_over.set()

    async def generate(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the messages of a request; its id is unique among those in flight."""
        self._watch()
        # Stop strings are found where the text is made.
        stream = _Stream(request := dataclasses.replace(request, stop=()))
        try:
            # Compiling a grammar takes long.
            await asyncio.to_thread(
                self._engine.submit,
                request,
                lambda event: self._add(stream, event),
                with_text=False,
            )
        except Exception as error:
            yield messages.encode(messages.refusal(error))
            return
        try:
            yield messages.encode(messages.Reply(0, None))
            while not stream.is_over.is_set():
                await stream.ready.wait()
                yield stream.take()
                try:
                    await asyncio.wait_for(stream.is_over.wait(), PIECE)
                except TimeoutError:
                    continue
            if stream.events:
                yield stream.take()
        finally:
            if not stream.is_over.is_set():
                self._engine.end(request.id, "cancelled")

    async def forward(self, name: str, arguments: list[Any]) -> Any:
        self._watch()
        return await asyncio.to_thread(self._passes[name], *arguments)

    def about(self) -> About:
        options = self._engine.options
        return About(self._facts, options.max_len, options.max_queue, self._engine.stats())

    def report(self) -> ReplicaReport:
        times, self._times = self._times, []
        return ReplicaReport(self._name, self._engine.stats(), times)

    def check_health(self) -> None:
        if self._engine.failure is not None:
            raise EngineFailed(self._engine.failure)

    def _watch(self) -> None:
        if self._looking is None:
            self._loop = asyncio.get_running_loop()
            self._looking = asyncio.create_task(self._end_after_failure())

    async def _end_after_failure(self) -> None:
        while self._engine.failure is None:
            await asyncio.sleep(LOOK)
        await asyncio.sleep(LOOK)  # its last events are on their way
        log = logging.getLogger("jaxllama.serving")
        log.error("a replica ends", extra={"fields": {"reason": self._engine.failure}})
        os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()

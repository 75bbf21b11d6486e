"""An engine without a model for replicas on Ray: ``ROWS`` rows at once, ``STEP`` seconds a step.

    start(step) -> a picklable function for ``EngineReplica``
    python -m tests.helpers.ray_engine ADDRESS REPLICAS STEP IN OUT      a batch on a cluster

Its tokens follow from the prompt and the seed (``fake_engine.letters``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from jaxllama.engine.request import EngineClosed, Event, FinishReason, QueueFull, Request
from jaxllama.engine.stats import EngineStats
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http.server import ServerSettings, application
from jaxllama.serving.ipc import link
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.pool import Sizes
from jaxllama.serving.ipc.replica import Observe, Started
from tests.helpers.fake_engine import Row, letters

ROWS = 8
STEP = 0.02


class SleepingEngine:
    """``served.Served``: a thread sleeps for each step, and the first ``ROWS`` rows get a token."""

    def __init__(self, step: float, max_queue: int = 256) -> None:
        self.options = Sizes(4096, max_queue)
        self.failure: str | None = None
        self.closed: str | None = None
        self.stalled: str | None = None
        self.steps = 0
        self._step, self._rows = step, dict[str, Row]()
        self._clock = threading.Condition(threading.RLock())
        self._listeners: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool
    ) -> None:
        with self._clock:
            if self.closed is not None:
                raise EngineClosed(self.closed)
            if len(self._rows) >= self.options.max_queue + ROWS:
                raise QueueFull.of(len(self._rows), 1.0)
            n = len(request.begun)
            tokens = itertools.islice(letters(request), n, None)
            self._rows[request.id] = Row(request, on_event, tokens, n)
            self._clock.notify_all()

    def end(self, request_id: str, reason: FinishReason) -> None:
        with self._clock:
            row = self._rows.pop(request_id, None)
        if row is not None:
            row.on_event(row.event(reason))
            self._tell()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def stats(self) -> EngineStats:
        figures: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        running = min(len(self._rows), ROWS)
        own = {"running": running, "max_slots": ROWS, "steps": self.steps, "finished": {}}
        return EngineStats(**figures | own)

    def stop(self) -> None:
        with self._clock:
            self.closed = "the engine has stopped"
            self._clock.notify_all()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _run(self) -> None:
        while self.closed is None:
            with self._clock:
                self._clock.wait_for(lambda: self._rows or self.closed)
            time.sleep(self._step)
            self.steps += 1
            with self._clock:
                running = list(itertools.islice(self._rows.items(), ROWS))
                for id, row in running:
                    event = row.step()
                    if event.finish_reason is not None:
                        del self._rows[id]
                    row.on_event(event)
            self._tell()


def _start(step: float, observe: Observe) -> Started:
    from tests.helpers.http_server import CFG, byte_tokenizer

    facts = ModelFacts(CFG, byte_tokenizer(), None, ())
    passes = {name: lambda *arguments: b"" for name in ("embed", "rank", "score")}
    return Started(SleepingEngine(step), facts, passes)


def start(step: float = STEP) -> Callable[[Observe], Started]:
    return functools.partial(_start, step)


@contextlib.contextmanager
def open_app(step: float) -> Generator[ASGIApp]:
    """The application over such an engine, for batches."""
    engine, facts, passes = start(step)(lambda name, seconds: None)
    metrics = Metrics("tiny")
    metrics.watch(engine)
    hub = Hub(engine, passes, metrics, None)
    client = link.local(hub, facts.tokenizer, facts.config.eos_token_ids)
    yield application(facts, client, ServerSettings("tiny", 4096), 256)
    engine.stop()
    hub.close()


def main() -> None:
    """Answer a batch on a cluster: ADDRESS REPLICAS STEP IN OUT."""
    from jaxllama.serving.ray import batch
    from jaxllama.serving.ray.options import ClusterOptions

    address, replicas, step, source, target = sys.argv[1:]
    cluster = ClusterOptions(address, int(replicas), int(replicas))
    app = functools.partial(open_app, float(step))
    print(batch.run(cluster, "tiny", app, Path(source), Path(target), 2 * ROWS, show=False))


if __name__ == "__main__":
    main()

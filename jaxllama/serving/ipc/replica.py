"""A replica: an engine behind a hub of its own, in a process of the server or an actor of Ray.

    Replica(start)                         start(observe) -> Started, called in the process
    replica.about(); replica.report()      its description, and its figures since the last report
    main()                                 the program of a process; ``replicas`` starts it
    serve(connection)                      the same over an open socket, to its end

A caller opens a port of the hub, as a front end does. The metrics, the journal and the counts are
those of the process that has all replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging.config
import pickle
import socket
import sys
import uuid
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxllama.engine.engine import Engine
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving import logs
from jaxllama.serving.api import messages
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.served import Passes, Served, forward_passes
from jaxllama.serving.ipc.wire import Wire
from jaxllama.typing import Options

REPORT = 0.05  # seconds between two reports of a process
Observe = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class About:
    """A replica's description of itself after its start."""

    facts: ModelFacts
    max_len: int
    max_queue: int
    stats: EngineStats


class Runs(Served, Protocol):
    """An engine that a replica runs."""

    def stats(self) -> EngineStats: ...
    def stop(self) -> None: ...


class Started(NamedTuple):
    """A running engine with the facts of its model and the passes beside it."""

    engine: Runs
    facts: ModelFacts
    passes: Passes


Start = Callable[[Observe], Started]


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


class Replica:
    """A running replica; the module docstring has the interface."""

    def __init__(self, start: Start) -> None:
        self._name = uuid.uuid4().hex
        self._times: list[tuple[str, float]] = []
        self.engine, self._facts, self.passes = start(self._observe)
        self.hub = Hub(self.engine, self.passes, Metrics(), None)

    def _observe(self, name: str, seconds: float) -> None:
        self._times.append((name, seconds))

    def about(self) -> About:
        options = self.engine.options
        return About(self._facts, options.max_len, options.max_queue, self.engine.stats())

    def report(self) -> messages.EngineReport:
        times, self._times = self._times, []
        failure = self.engine.failure or self.engine.stalled
        return messages.EngineReport(self._name, self.engine.stats(), times, failure)

    def stop(self) -> None:
        self.engine.stop()
        self.hub.close()


def main() -> None:
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))


def serve(connection: socket.socket) -> int:
    """Start the replica that the socket's first bytes describe, serve it, and return the status."""
    try:
        replica = Replica(pickle.load(connection.makefile("rb")))
    except JaxLlamaError as error:
        connection.sendall(messages.encode(messages.Failed(str(error))))
        return 2
    connection.sendall(messages.encode(messages.Welcome(pickle.dumps(replica.about()))))
    asyncio.run(_run(connection, replica))
    return 0


async def _run(connection: socket.socket, replica: Replica) -> None:
    wire = Wire()
    port = replica.hub.open(wire.write)
    wire.on_data = port.received
    await wire.open(connection)
    while not wire.gone.is_set():
        port.send(replica.report())
        await asyncio.sleep(REPORT)
    port.close()
    replica.stop()

"""Several engines as one: each replica is a process with the model, on a device of its own.

    replicas = Replicas(count, load, options, observe)      takes an engine's place in a Hub
    replicas.start(); await replicas.open(); replicas.stop()

A replica is an engine behind a Hub of its own, without a journal. This process talks to it as a
front end does. A request goes to the replica with the least work, counted in tokens of prompts and
answers in flight. A replica that has read the beginning of the prompt before is preferred, if it
has at most ``SLACK`` requests' work more than the least. The figures are the sums over replicas, up
to ``REPORT`` seconds old. Times are observed in this process. If a replica fails, hangs or is
killed, all of them end, so that a supervisor starts the server again.

Left out: replicas on several hosts, or each on a mesh.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    FinishReason,
    QueueFull,
    Request,
)
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving import logs
from jaxllama.serving.api import messages
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.ipc.facts import ModelFacts
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.served import forward_passes
from jaxllama.serving.ipc.wire import Pulse, Wire
from jaxllama.typing import Options

PREFIXES = (1024, 256, 64)  # lengths, in tokens, of the beginnings by which prompts are recognized
REMEMBERED = 8192  # number of remembered beginnings
SLACK = 4
REPORT = 0.05
DEVICES = "CUDA_VISIBLE_DEVICES"

Load = Callable[[], LanguageModel]


@dataclasses.dataclass(frozen=True)
class About:
    """A replica's description of itself after its start."""

    facts: ModelFacts
    max_len: int
    max_queue: int
    stats: EngineStats


@dataclasses.dataclass(eq=False)
class Flight:
    """A request in flight and the number of tokens that its listener has."""

    request: Request
    on_event: Callable[[Event], None]
    written: int = 0

    @property
    def work(self) -> int:
        return len(self.request.prompt) + self.request.max_new_tokens

    def read(self, piece: TextPiece) -> None:
        """Pass a message's tokens to the listener."""
        self.written += len(piece.tokens)
        self.tell(
            tokens=tuple(piece.tokens),
            times=piece.times,
            logprobs=tuple(piece.logprobs),
            top_logprobs=tuple(tuple(top) for top in piece.top_logprobs),
            finish_reason=piece.finish_reason,
            cached_tokens=piece.cached_tokens,
            error=None if piece.error is None else messages.error(piece.error),
        )

    def tell(self, **news: Any) -> None:
        request = self.request
        self.on_event(
            Event(
                request.id,
                prompt_tokens=len(request.prompt),
                completion_tokens=self.written,
                **news,
            )
        )


class Replica:
    """A replica, as the parent process sees it."""

    def __init__(self, number: int, load: Load, options: Options, device: str) -> None:
        self.number, self._spec = number, pickle.dumps((load, options))
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"from {__name__} import main; main()",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={
                    **os.environ,
                    DEVICES: device,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                start_new_session=True,
            )
        self.flights: dict[int, Flight] = {}
        self._by_id: dict[str, int] = {}
        self.wire, self.pulse = Wire(), Pulse()
        self._frames = messages.Frames(messages.from_engine())
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self.told: Callable[[], None] = lambda: None
        self.on_report: Callable[[Replica, messages.EngineReport], None] = lambda one, report: None

    def begin(self) -> None:
        self.socket.sendall(self._spec)

    def about(self) -> About:
        """Wait until the replica has loaded its model and compiled, and return its description."""
        while data := self.socket.recv(1 << 16):
            for message in self._frames.feed(data):
                if isinstance(message, messages.Failed):
                    raise JaxLlamaError(message.reason)
                return pickle.loads(message.setup)
        status = self.process.wait()
        raise JaxLlamaError(f"a replica ended with status {status} as it started")

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.wire.on_data = self._received
        await self.wire.open(self.socket)

    @property
    def work(self) -> int:
        return sum(flight.work for flight in list(self.flights.values()))

    # Called from other threads

    def submit(self, flight: Flight) -> None:
        """Submit a request and wait for the answer. Raises what the replica's engine raises."""
        number = next(self._numbers)
        # Stop strings are found where the text is made.
        request = dataclasses.replace(flight.request, stop=())
        self.flights[number], self._by_id[request.id] = flight, number
        try:
            self.ask(lambda call: messages.Submit(call, request.id, number, [request], None, False))
        except BaseException:
            self._take(number)
            raise

    def end_one(self, request_id: str, reason: FinishReason) -> None:
        """End a request. Ids that are not in flight are ignored."""
        number = self._by_id.get(request_id)
        flight = None if number is None else self._take(number)
        if number is not None and flight is not None:
            self.tell(messages.End(number, reason, 0))
            self._loop.call_soon_threadsafe(self._ended, flight, reason)

    def _ended(self, flight: Flight, reason: FinishReason) -> None:
        flight.tell(finish_reason=reason)
        self.told()

    def _take(self, number: int) -> Flight | None:
        flight = self.flights.pop(number, None)
        if flight is not None:
            self._by_id.pop(flight.request.id, None)
        return flight

    def ask(self, message: Callable[[int], messages.IpcMessage]) -> Any:
        call, done = next(self._numbers), Future[Any]()
        self._asked[call] = done
        self.tell(message(call))
        return done.result()

    def tell(self, message: messages.IpcMessage) -> None:
        self._loop.call_soon_threadsafe(self.wire.write, messages.encode(message))

    # Called on the event loop

    def _received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            match message:
                case messages.Received():
                    for piece in message.rows:
                        self._read(piece)
                    self.told()
                case messages.Reply():
                    self._asked.pop(message.call).set_result(message.value)
                case messages.Refused():
                    self._asked.pop(message.call).set_exception(messages.error(message))
                case messages.EngineReport():
                    self.on_report(self, message)
                case _:
                    pass

    def _read(self, piece: TextPiece) -> None:
        flight = self.flights.get(piece.number)
        if flight is None:
            return
        if piece.finish_reason is not None:
            self._take(piece.number)
        flight.read(piece)

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End all requests in flight."""
        for number in list(self.flights):
            flight = self._take(number)
            if flight is not None:
                flight.tell(finish_reason=reason, error=error)
        self.told()
        while self._asked:
            self._asked.popitem()[1].set_exception(error or EngineClosed("the engine has stopped"))


class HasWork(Protocol):
    """Something with work: the number of prompt and answer tokens in flight."""

    @property
    def work(self) -> int: ...


Some = TypeVar("Some", bound=HasWork)
Name = TypeVar("Name")


class KnownPrefixes(Generic[Name]):
    """Remembers which replica has read the beginning of a prompt; for use in any thread."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[int, Name] = collections.OrderedDict()
        self._lock = threading.Lock()

    def readers(self, request: Request) -> list[Name]:
        """Return the replicas that have read a beginning of the prompt, the longest first."""
        with self._lock:
            return [self._known[key] for key in _beginnings(request) if key in self._known]

    def remember(self, request: Request, one: Name) -> None:
        with self._lock:
            for key in _beginnings(request):
                self._known[key] = one
                self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


class ReplicaChoice(Generic[Some]):
    """Chooses the replica of a request; may be called from any thread."""

    def __init__(self, replicas: Sequence[Some]) -> None:
        self._all, self._known = replicas, KnownPrefixes[Some]()
        self._turns = itertools.count()
        self.remember = self._known.remember

    def order(self, request: Request) -> list[Some]:
        """Return the replicas, least work first; one that has read the prompt's beginning leads."""
        turn = next(self._turns) % len(self._all)
        work = [(one.work, one) for one in (*self._all[turn:], *self._all[:turn])]
        work.sort(key=lambda pair: pair[0])
        order = [one for _, one in work]
        room = work[0][0] + SLACK * (len(request.prompt) + request.max_new_tokens)
        for one in self._known.readers(request):
            if one.work <= room:
                order.remove(one)
                order.insert(0, one)
                break
        return order


class Sizes(NamedTuple):
    """The sizes of all replicas together (``hub.EngineLimits``)."""

    max_len: int
    max_queue: int


class Replicas:
    """Several engines as one; the module docstring has the interface.

    ``facts`` and ``options`` exist after ``start``. Raises JaxLlamaError if there are too few
    devices.
    """

    def __init__(
        self, count: int, load: Load, options: Options, observe: Callable[[str, float], None]
    ) -> None:
        named = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        if named and len(named) < count:
            raise JaxLlamaError(f"--replicas = {count}: ${DEVICES} has {len(named)}")
        devices = named or [str(number) for number in range(count)]
        self.failure: str | None = None
        self.closed: str | None = None
        self.stalled: str | None = None  # a replica that stalls fails, and all with it
        self.passes = {name: self._pass(name) for name in ("embed", "rank", "score")}
        self._observe = observe
        self._all = [Replica(n, load, options, devices[n]) for n in range(count)]
        self._choice = ReplicaChoice(self._all)

    def start(self) -> None:
        """Start all replicas; wait until they have loaded the model and compiled."""
        for one in self._all:
            one.begin()
        about = [one.about() for one in self._all]
        first = about[0]
        self.facts = first.facts
        self.options = Sizes(
            max_len=min(each.max_len for each in about),
            max_queue=sum(each.max_queue for each in about),
        )
        self._stats = [each.stats for each in about]

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for one in self._all:
            one.on_report = self._reported
            await one.open()
            asyncio.create_task(self._watch(one))
            asyncio.create_task(self._fail_if_hung(one))

    async def _fail_if_hung(self, one: Replica) -> None:
        await one.pulse.lost()
        if self.closed is None:
            self._fail(f"the engine failed: replica {one.number} does not answer")

    async def _watch(self, one: Replica) -> None:
        await one.wire.gone.wait()
        if self.closed is None:
            status = await asyncio.to_thread(one.process.wait)
            self._fail(f"the engine failed: replica {one.number} ended with status {status}")

    def _fail(self, reason: str) -> None:
        self.failure = self.closed = reason
        for one in self._all:
            one.end("error", EngineFailed(reason))

    def _reported(self, one: Replica, report: messages.EngineReport) -> None:
        one.pulse.beat()
        self._stats[one.number] = EngineStats(**report.stats)
        for name, seconds in report.times:
            self._observe(name, seconds)
        if report.failure is not None and self.failure is None:
            self._fail(report.failure)

    def stats(self) -> EngineStats:
        figures = [dataclasses.asdict(stats) for stats in self._stats]
        finished = sum(
            (collections.Counter(f.pop("finished")) for f in figures), collections.Counter[str]()
        )
        return EngineStats(
            **{key: sum(f[key] for f in figures) for key in figures[0]}, finished=finished
        )

    # The interface for a Hub

    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool
    ) -> None:
        """Submit a request, which waits for the replica: never call this on the event loop."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        if self.closed is not None:
            raise EngineClosed(self.closed)
        full: list[QueueFull] = []
        for one in self._choice.order(request):
            try:
                one.submit(Flight(request, on_event))
            except QueueFull as error:
                full.append(error)
            else:
                self._choice.remember(request, one)
                return
        raise QueueFull(
            sum(stats.waiting for stats in self._stats), min(error.retry_after for error in full)
        )

    def listen(self, listener: Callable[[], None]) -> None:
        for one in self._all:
            one.told = listener

    def end(self, request_id: str, reason: FinishReason) -> None:
        for one in self._all:
            one.end_one(request_id, reason)

    def _pass(self, name: Any) -> Callable[..., Any]:
        """Return a function that runs a forward pass on the replicas in turn."""

        turns = itertools.count()

        def ask(*arguments: Any) -> Any:
            one = self._all[next(turns) % len(self._all)]
            return one.ask(lambda call: messages.HubRequest(call, name, list(arguments)))

        return ask

    def stop(self) -> None:
        """Stop all replicas; requests in flight end with the reason "cancelled"."""
        self.closed = self.closed or "the engine has stopped"
        for one in self._all:
            if not one.wire.gone.is_set() and one.process.poll() is None:
                self._loop.call_soon_threadsafe(one.end, "cancelled")
                self._loop.call_soon_threadsafe(one.wire.close)
        self.kill(after=10)

    def kill(self, after: float = 0) -> None:
        for one in self._all:
            try:
                one.process.wait(after)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _beginnings(request: Request) -> list[int]:
    """Return hashes of the prompt's beginnings, the longest first."""
    prompt = request.prompt
    return [hash((request.cache_key, prompt[:n])) for n in PREFIXES if len(prompt) >= n]


# In the replica's process


class _Reporter:
    """Collects a Hub's and an Engine's times for the process that has the metrics."""

    def __init__(self) -> None:
        self.times: list[tuple[str, float]] = []

    def observe(self, name: str, seconds: float) -> None:
        self.times.append((name, seconds))

    def wrote(self, tokens: int) -> None:
        """Do nothing: the parent process counts tokens."""

    def ended(self, reason: str) -> None:
        """Do nothing: the parent process counts requests."""

    def sized(self, prompt: int, completion: int, limit: int) -> None:
        """Do nothing: the parent process counts requests."""


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    reporter = _Reporter()
    with logs.progress_lines():
        try:
            load, options = pickle.load(connection.makefile("rb"))
            lm = load()
            engine = Engine(lm, observe=reporter.observe, **options)
            engine.start()
        except JaxLlamaError as error:
            connection.sendall(messages.encode(messages.Failed(str(error))))
            sys.exit(2)
        about = About(
            ModelFacts.of(lm), engine.options.max_len, engine.options.max_queue, engine.stats()
        )
        connection.sendall(messages.encode(messages.Welcome(pickle.dumps(about))))
        asyncio.run(_run(connection, lm, engine, reporter))


async def _run(connection: socket.socket, lm: LanguageModel, engine: Engine, reporter: Any) -> None:
    hub, wire = Hub(engine, forward_passes(lm), reporter, None), Wire()
    port = hub.open(wire.write)
    wire.on_data = port.received
    await wire.open(connection)
    while not wire.gone.is_set():
        times, reporter.times = reporter.times, []
        stats = dataclasses.asdict(engine.stats())
        port.send(messages.EngineReport(stats, times, engine.failure or engine.stalled))
        await asyncio.sleep(REPORT)
    port.close()
    engine.stop()
    hub.close()

"""Several replicas as one engine, which goes on with the requests of a replica that is lost.

    engine = PooledEngine(pool, about, observe)      takes an engine's place in a Hub
    await engine.open(); engine.stop()

A ``Pool`` has the replicas: processes of this host (``replicas``) or actors on a Ray cluster
(``serving.ray.app``). It chooses a replica for each call, and replaces lost ones.

Contract. Every request ends once. If its replica is lost, the request is sent again with the tokens
that its listener has (``Request.begun``). So the listener gets each token once, and the answer is
that of an undisturbed run. A replica that is shut down, or whose engine has failed, counts as
lost. While there is no replica, requests wait. A request whose last ``LOSSES`` replicas took it and
were lost without a new token ends with EngineFailed, because it may be the reason. A full queue
refuses only new requests. The figures are the sums over the replicas, as old as the last reports;
the totals of a lost replica stay.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    FinishReason,
    QueueFull,
    Request,
)
from jaxllama.engine.stats import EngineStats
from jaxllama.serving.api import messages
from jaxllama.serving.api.messages import EngineReport, TextPiece
from jaxllama.serving.ipc.replica import About

LOSSES = 5
AGAIN = 0.1  # seconds before a request is sent again
RETRY_AFTER = 1.0  # seconds after which a client tries again if all queues are full
# Fields of EngineStats that are totals since the start; the others are states.
TOTALS = (
    *("prefix_hit_tokens", "prompt_tokens", "completion_tokens", "preemptions", "steps"),
    *("compilations", "drafted_tokens", "accepted_tokens", "host_tier_hits"),
    *("host_tier_hit_bytes", "disk_tier_hits", "disk_tier_hit_bytes", "tier_lost"),
)
_log = logging.getLogger("jaxllama.serving")


class ReplicaLost(Exception):
    """The replica of a call has ended, or cannot be reached."""


Taken = Callable[[], None]  # called when a replica has taken the request
Read = Callable[[Sequence[TextPiece]], bool]  # returns whether the request has ended


class Pool(Protocol):
    """Replicas behind one door. Calls raise ReplicaLost."""

    async def open(self) -> None:
        """Begin to watch the replicas on the running event loop."""
        ...

    async def run(self, request: Request, taken: Taken, read: Read) -> None:
        """Run a request on one replica to its end.

        Raises what ``Engine.submit`` and ``read`` raise. Cancelling the call ends the request.
        """
        ...

    async def forward(self, name: str, arguments: Sequence[Any]) -> Any:
        """Return the result of a pass beside the engine (``served.forward_passes``)."""
        ...

    async def reports(self) -> Sequence[EngineReport]:
        """Return the next report of each replica.

        Raises EngineFailed if there will be no replica any more.
        """
        ...

    def stop(self) -> None:
        """End the replicas; called from any thread."""
        ...


async def follow(stream: AsyncIterator[bytes], taken: Taken, read: Read) -> None:
    """Read the messages of one request (``EngineReplica.generate``), as ``Pool.run`` does."""
    frames = messages.Frames(messages.from_engine())
    async for data in stream:
        for message in frames.feed(data):
            match message:
                case messages.Reply():
                    taken()
                case messages.Refused():
                    raise messages.error(message)
                case messages.Received():
                    if read(message.rows):
                        return
                case _:
                    pass
    raise ReplicaLost("a replica's answer broke off")


class Sizes(NamedTuple):
    """The sizes of all replicas together (``served.EngineLimits``)."""

    max_len: int
    max_queue: int


@dataclasses.dataclass(eq=False)
class Flight:
    """A request in flight with the tokens that its listener has.

    accepted: done when a replica has taken the request, or with the reason why none has. is_taken:
    whether its present replica has taken it.
    """

    request: Request
    on_event: Callable[[Event], None]
    accepted: Future[None] = dataclasses.field(default_factory=Future)
    is_taken: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None

    def rest(self, attempt: int) -> Request | None:
        """Return the request for what is missing, or None if its deadline has passed."""
        request = self.request
        deadline = request.deadline
        if deadline is not None and attempt:
            deadline -= time.monotonic() - self.began
            if deadline <= 0:
                return None
        return dataclasses.replace(
            request,
            id=f"{request.id}#{attempt}" if attempt else request.id,
            stop=(),  # stop strings are found where the text is made
            begun=(*request.begun, *self.tokens),
            deadline=deadline,
        )

    def taken(self) -> None:
        self.is_taken = True
        self.answered()

    def answered(self, _: object = None) -> None:
        """Let ``submit`` return: a replica has the request, or its listener knows its end."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def tell(self, **news: Any) -> None:
        request = self.request
        self.on_event(
            Event(
                request.id,
                prompt_tokens=len(request.prompt),
                completion_tokens=len(self.tokens),
                **news,
            )
        )


class PooledEngine:
    """Several replicas as one engine; the module docstring has the contract.

    about: a replica's description. observe: as for ``Engine``. replicas: number of replicas at the
    start. on_empty: called with True when no replica is left, and with False when one is there
    again.
    """

    def __init__(
        self, pool: Pool, about: About, observe: Callable[[str, float], None], replicas: int = 1
    ) -> None:
        self._pool, self._observe = pool, observe
        self.options = Sizes(about.max_len, about.max_queue * replicas)
        self._room = about.stats.max_slots + about.max_queue  # of a replica
        self.failure: str | None = None
        self.closed: str | None = None
        self.stalled: str | None = None  # a replica that stalls counts as lost
        self.passes = {name: self._pass(name) for name in ("embed", "rank", "score")}
        self.on_empty: Callable[[bool], None] = lambda is_empty: None
        self._flights: dict[str, Flight] = {}
        self._listener: Callable[[], None] = lambda: None
        self._none = dataclasses.replace(
            about.stats, **{field.name: 0 for field in _numbers()}, finished={}
        )
        self._gone: dict[str, EngineStats] = {}
        self._stats: dict[str, EngineStats] = {}
        self.is_empty = False

    async def open(self) -> None:
        """Begin to read reports on the running event loop, which also runs the requests."""
        self._loop = asyncio.get_running_loop()
        await self._pool.open()
        self._reading = asyncio.create_task(self._read_reports())

    def stop(self) -> None:
        """End all requests with the reason "cancelled", and the replicas; call it in any thread."""
        self.closed = self.closed or "the engine has stopped"
        self._loop.call_soon_threadsafe(self._stop)
        self._pool.stop()

    # The interface for a Hub

    def submit(
        self, request: Request, on_event: Callable[[Event], None], *, with_text: bool
    ) -> None:
        """Submit a request and wait for a replica: never call this on the event loop."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        if self.closed is not None:
            raise EngineClosed(self.closed)
        in_flight = len(self._flights)
        if in_flight >= self._room * max(len(self._stats), 1):
            raise QueueFull.of(in_flight, RETRY_AFTER)
        flight = Flight(request, on_event)
        self._loop.call_soon_threadsafe(self._begin, flight)
        flight.accepted.result()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request, from any thread. Ids that are not in flight are ignored."""
        self._loop.call_soon_threadsafe(self._end, request_id, reason)

    def stats(self) -> EngineStats:
        return _sum([self._none, *self._gone.values(), *self._stats.values()])

    def _pass(self, name: str) -> Callable[..., Any]:
        """Return a function that runs a pass on a replica; a lost one is replaced by another."""

        async def ask(arguments: Sequence[Any]) -> Any:
            for attempt in itertools.count(1):
                try:
                    return await self._pool.forward(name, arguments)
                except ReplicaLost as error:
                    if attempt == LOSSES:
                        raise EngineFailed(str(error)) from None
                    await asyncio.sleep(AGAIN)

        def wait(*arguments: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(ask(arguments), self._loop).result()

        return wait

    # On the event loop

    def _begin(self, flight: Flight) -> None:
        if self.closed is not None:
            flight.accepted.set_exception(EngineClosed(self.closed))
            return
        self._flights[flight.request.id] = flight
        flight.task = asyncio.create_task(self._follow(flight))
        flight.task.add_done_callback(flight.answered)  # one that is cancelled may never begin
        if flight.request.deadline is not None:
            timer = self._loop.call_later(flight.request.deadline, self._overdue, flight)
            flight.task.add_done_callback(lambda _: timer.cancel())

    def _overdue(self, flight: Flight) -> None:
        """End a request that waits for a replica; one that a replica has, ends there."""
        if not flight.is_taken:
            self._end(flight.request.id, "deadline")

    def _end(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            flight.tell(finish_reason=reason, error=error)
            self._listener()
            if flight.task is not None and flight.task is not asyncio.current_task():
                flight.task.cancel()

    def _stop(self, reason: FinishReason = "cancelled", error: Exception | None = None) -> None:
        if self._reading is not asyncio.current_task():
            self._reading.cancel()
        for id in list(self._flights):
            self._end(id, reason, error)

    async def _follow(self, flight: Flight) -> None:
        """Follow a request from replica to replica until it has ended."""
        request, losses = flight.request, 0
        try:
            for attempt in itertools.count():
                rest, n_tokens, flight.is_taken = flight.rest(attempt), len(flight.tokens), False
                if rest is None:
                    self._end(request.id, "deadline")
                    return
                try:
                    await self._pool.run(rest, flight.taken, lambda rows: self._read(flight, rows))
                    return
                except QueueFull:
                    if not flight.accepted.done():
                        raise
                except (ReplicaLost, EngineClosed, EngineFailed) as lost:
                    losses = 0 if len(flight.tokens) > n_tokens else losses
                    losses += flight.is_taken
                    fields = {"id": request.id, "tokens": len(flight.tokens), "reason": str(lost)}
                    _log.warning("a request has lost its replica", extra={"fields": fields})
                    if losses == LOSSES:
                        raise EngineFailed(f"the request lost {LOSSES} replicas: {lost}") from None
                await asyncio.sleep(AGAIN)
        except Exception as error:
            if flight.accepted.done():
                self._end(request.id, "error", error)
            else:
                self._flights.pop(request.id, None)
                flight.accepted.set_exception(error)

    def _read(self, flight: Flight, pieces: Sequence[TextPiece]) -> bool:
        """Pass the tokens to the listener; return whether the request has ended."""
        for piece in pieces:
            error = None if piece.error is None else messages.error(piece.error)
            if isinstance(error, EngineFailed):
                raise error
            if piece.finish_reason == "cancelled":  # not by its client: the replica is shut down
                raise ReplicaLost("a replica was shut down")
            if piece.finish_reason is not None:
                self._flights.pop(flight.request.id, None)
            flight.tokens += piece.tokens
            flight.tell(
                tokens=tuple(piece.tokens),
                times=piece.times,
                logprobs=tuple(piece.logprobs),
                top_logprobs=tuple(tuple(top) for top in piece.top_logprobs),
                finish_reason=piece.finish_reason,
                cached_tokens=piece.cached_tokens,
                error=error,
            )
        self._listener()
        return bool(pieces) and pieces[-1].finish_reason is not None

    # Reports

    async def _read_reports(self) -> None:
        while True:
            try:
                self._reported(await self._pool.reports())
            except EngineFailed as error:
                self.failure = self.closed = str(error)
                self._stop("error", error)
                return
            except Exception as error:  # the next round tells
                _log.warning("no report of a replica", extra={"fields": {"reason": str(error)}})
                await asyncio.sleep(AGAIN)

    def _reported(self, reports: Sequence[EngineReport]) -> None:
        living = {report.replica for report in reports}
        for replica in self._stats.keys() - living:
            last = self._stats.pop(replica)
            totals = {name: getattr(last, name) for name in TOTALS}
            self._gone[replica] = dataclasses.replace(self._none, **totals, finished=last.finished)
        if self.is_empty != (not living):
            self.is_empty = not living
            self.on_empty(self.is_empty)
        for report in reports:
            self._gone.pop(report.replica, None)  # it had only been silent
            self._stats[report.replica] = report.stats
            for name, seconds in report.times:
                self._observe(name, seconds)


def _numbers() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(EngineStats) if field.name != "finished"]


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    figures = {field.name: sum(getattr(s, field.name) for s in stats) for field in _numbers()}
    finished = collections.Counter[str]()
    for stat in stats:
        finished.update(stat.finished)
    return EngineStats(**figures, finished=dict(finished))

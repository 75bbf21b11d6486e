"""Several replicas as one engine: what is lost, sent again, refused and counted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("msgspec")

from jaxllama.engine.request import EngineFailed, Event, QueueFull, Request
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import messages
from jaxllama.serving.api.calls import ModelFacts
from jaxllama.serving.api.messages import EngineReport
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.ipc import pool as pooled
from jaxllama.serving.ipc.hub import EMPTY, Hub
from jaxllama.serving.ipc.pool import PooledEngine, Read, ReplicaLost, Taken, follow
from jaxllama.serving.ipc.replica import About, Started
from jaxllama.serving.ipc.replicas import KnownPrefixes
from jaxllama.serving.ray.replica import EngineReplica
from tests.helpers.fake_engine import FakeEngine, letters
from tests.helpers.models import LLAMA

FACTS = ModelFacts(LLAMA, None, None, ())


def report(replica: str, stats: EngineStats, times: Sequence[tuple[str, float]] = ()):
    return EngineReport(replica, stats, list(times), None)


class OneReplica:
    """A pool of a replica over a FakeEngine; ``cut`` lists after how many messages calls break."""

    def __init__(self, engine: FakeEngine, cut: list[int]) -> None:
        passes = {"embed": lambda row: row, "rank": None, "score": None}
        self.replica = EngineReplica(lambda observe: Started(engine, FACTS, passes))
        self.cut, self.asked = cut, list[Request]()
        self.living = [report("a", dataclasses.replace(engine.stats(), prompt_tokens=5))]

    async def open(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def run(self, request: Request, taken: Taken, read: Read) -> None:
        async with contextlib.aclosing(self.generate(request)) as stream:
            await follow(stream, taken, read)

    async def generate(self, request: Request) -> AsyncGenerator[bytes]:
        self.asked.append(request)
        left = self.cut.pop(0) if self.cut else 10**9
        if not left:
            raise ReplicaLost("it is gone")
        async with contextlib.aclosing(self.replica.generate(request)) as stream:
            async for data in stream:
                for message in one_by_one(data):
                    yield message
                    left -= 1
                    if not left:
                        raise ReplicaLost("it is gone")

    async def forward(self, name: str, arguments: Any) -> Any:
        if self.cut:
            self.cut.pop()
            raise ReplicaLost("it is gone")
        return await self.replica.forward(name, arguments)

    async def reports(self) -> list[EngineReport]:
        await asyncio.sleep(3600)  # tests call ``_reported``
        return self.living


def one_by_one(data: bytes) -> list[bytes]:
    """The messages with one token each."""
    found: list[messages.IpcMessage] = []
    for message in messages.Frames(messages.from_engine()).feed(data):
        if isinstance(message, messages.Received):
            found += [messages.StepNews([row]) for row in message.rows]
        else:
            found.append(message)
    return [messages.encode(message) for message in found]


class Server:
    """A PooledEngine on an event loop of its own."""

    def __init__(self, cut: list[int] = ()) -> None:
        self.fake = FakeEngine()
        self.pool = OneReplica(self.fake, list(cut))
        self.times: list[tuple[str, float]] = []
        about = About(FACTS, 96, 8, self.fake.stats())
        self.empty: list[bool] = []
        self.engine = PooledEngine(self.pool, about, lambda *time: self.times.append(time))
        self.engine.on_empty = self.empty.append
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Server:
        self.fake.__enter__()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.engine.open(), self.loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self.engine.stop)
        self._call(lambda: self.pool.replica._looking and self.pool.replica._looking.cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.fake.stop()

    def _call(self, work: Any) -> None:
        async def run() -> None:
            work()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    def answer(self, request: Request) -> list[Event]:
        events, ended = list[Event](), threading.Event()

        def told(event: Event) -> None:
            events.append(event)
            if event.finish_reason is not None:
                ended.set()

        self.engine.submit(request, told, with_text=False)
        assert ended.wait(30)
        return events


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(pooled, "AGAIN", 0.001)
    monkeypatch.setattr("jaxllama.serving.ray.replica.PIECE", 0.0)
    monkeypatch.setattr("jaxllama.serving.ray.replica.LOOK", 1e6)  # no test ends this process


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def test_a_request_goes_on_where_its_replica_was_lost():
    request = Request("a", (1, 2, 3), 20, ignore_eos=True)
    with Server(cut=[4, 0, 1, 6]) as server:
        events = server.answer(request)
        assert tokens(events) == list(itertools.islice(letters(request), 20))
        assert events[-1].finish_reason == "length" and events[-1].completion_tokens == 20
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        asked = server.pool.asked
        assert [one.id for one in asked] == ["a", "a#1", "a#2", "a#3", "a#4"]
        begun = [len(one.begun) for one in asked]
        assert begun[0] == 0 < begun[1] == begun[2] == begun[3] < begun[4]
        assert all(list(one.begun) == tokens(events)[: len(one.begun)] for one in asked)


def test_a_request_that_loses_every_replica_ends():
    with Server(cut=[1] * 9) as server, server.fake.held():
        [event] = server.answer(Request("a", (1,), 5))
        assert event.finish_reason == "error" and isinstance(event.error, EngineFailed)
        assert "lost 5 replicas" in event.message


def test_replicas_that_take_nothing_are_no_reason_to_end_it():
    """A replica whose engine has failed refuses until Serve knows."""
    request = Request("a", (1, 2), 6, ignore_eos=True)
    with Server(cut=[2, *[0] * 20]) as server:
        assert tokens(server.answer(request)) == list(itertools.islice(letters(request), 6))
        assert len(server.pool.asked) == 22


def test_what_a_replica_refuses_is_raised():
    with Server() as server, server.fake.held():
        for number in range(8):
            server.engine.submit(Request(f"{number}", (1,), 5), lambda event: None, with_text=False)
        with pytest.raises(QueueFull):
            server.engine.submit(Request("8", (1,), 5), lambda event: None, with_text=False)

        def refuse(*_: object, **__: object) -> None:
            raise JaxLlamaError("never")

        server.fake.submit = refuse
        with pytest.raises(JaxLlamaError, match="never"):
            server.engine.submit(Request("9", (1,), 5), lambda event: None, with_text=False)


def test_a_client_that_leaves_ends_its_row():
    events = list[Event]()
    with Server() as server, server.fake.held(2):
        server.engine.submit(Request("a", (1,), 9), events.append, with_text=False)
        server.engine.end("a", "cancelled")
        assert server.fake.wait_for(lambda: "a" in server.fake.cancelled)
    assert [event.finish_reason for event in events if event.finish_reason] == ["cancelled"]


@pytest.mark.parametrize("cut", [[0] * 10**4, []], ids=["no replica", "one replica"])
def test_a_submission_returns_though_its_client_leaves_at_once(cut):
    """Otherwise each such client keeps one of the hub's threads."""
    with Server(cut=cut) as server, server.fake.held(2):
        pool = server.engine
        events = list[Event]()
        flight = pooled.Flight(Request("a", (1,), 9), events.append)

        def submit_and_end() -> None:
            pool._begin(flight)
            pool._end("a", "cancelled")

        server._call(submit_and_end)
        flight.accepted.result(timeout=5)
    assert [event.finish_reason for event in events] == ["cancelled"]


def test_a_deadline_passes_while_no_replica_runs():
    with Server() as server:
        forever = asyncio.Event()
        server.pool.run = lambda *_: forever.wait()
        events = server.answer(Request("a", (1,), 9, deadline=0.05))
        assert [event.finish_reason for event in events] == ["deadline"]


def test_passes_and_totals_outlive_a_replica():
    with Server(cut=[0, 0]) as server:
        assert server.engine.passes["embed"](b"row") == b"row", "from the third"
        server.engine._reported(server.pool.living)
        two = dataclasses.replace(server.pool.living[0].stats, running=2, finished={"stop": 1})
        times = [("ttft", 0.5)]
        server.engine._reported([report("a", two, times), report("b", two)])
        assert server.engine.stats().running == 4 and server.times == times
        server.engine._reported([report("b", two)])
        stats = server.engine.stats()
        assert (stats.running, stats.prompt_tokens, stats.finished) == (2, 10, {"stop": 2})
        server.engine._reported([report("a", two), report("b", two)])
        assert server.engine.stats().prompt_tokens == 10, "one that was silent is counted once"
        server.engine._reported([])
        server.engine._reported([report("c", two)])
        assert server.empty == [True, False]
        assert server.engine.stats().prompt_tokens == 15


def test_the_reader_of_the_longest_beginning_leads():
    known = KnownPrefixes[str]()
    known.remember(Request("a", (1,) * 70, 5), "short")
    known.remember(Request("b", (1,) * 64 + (2,) * 300, 5), "long")
    assert known.readers(Request("c", (1,) * 64 + (2,) * 300, 5)) == ["long", "long"]
    assert known.readers(Request("d", (1,) * 70 + (3,) * 300, 5)) == ["long"]
    assert known.readers(Request("e", (1,) * 63, 5)) == []
    assert known.readers(Request("f", (1,) * 70, 5, cache_salt="x")) == []


def test_a_result_has_all_tokens_since_the_one_before():
    async def read() -> list[int]:
        with FakeEngine() as fake:
            replica = EngineReplica(lambda observe: Started(fake, FACTS, {}))
            frames, sizes = messages.Frames(messages.from_engine()), list[int]()
            request = Request("a", (1,), 12, ignore_eos=True)
            async for data in replica.generate(request):
                received = [m for m in frames.feed(data) if isinstance(m, messages.Received)]
                sizes.append(sum(len(message.rows) for message in received))
                while sizes[-1] and fake.live:  # a slow reader
                    await asyncio.sleep(0.001)
            replica._looking.cancel()
            return sizes

    sizes = asyncio.run(read())
    assert sum(sizes) == 12 and len(sizes) < 12, sizes


def test_a_journal_that_recovers_hides_no_missing_replica(monkeypatch):
    with FakeEngine() as engine:
        hub, sent = Hub(engine, {}, Metrics(), None), []
        monkeypatch.setattr(hub, "tell", sent.append)
        hub.report_empty(True)
        for trouble in ("the disk is full", None):
            hub._answers._tell(trouble)
        hub.report_empty(False)
        hub.close()
    assert [message.reason for message in sent] == [EMPTY, "the disk is full", EMPTY, None]

"""Replicas: which one a request goes to, and two of them as a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.engine.request import EngineFailed, Event, Request
from jaxllama.serving.api import messages
from jaxllama.serving.ipc import replica, replicas, wire
from jaxllama.serving.ipc.pool import PooledEngine, ReplicaLost
from jaxllama.serving.ipc.replicas import LocalPool, Process, ReplicaChoice
from tests.helpers.fake_engine import FakeEngine, letters
from tests.helpers.http_server import client, serve, tiny_checkpoint, wait_until
from tests.helpers.ray_engine import ROWS, start
from tests.serving.http.test_front_ends import children, counted, streamed, text_of

BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "seed": 1, "ignore_eos": True}


def request(first: int, length: int = 70) -> Request:
    return Request(str(first), (first,) * length, 30)


class Busy:
    work = 0


def three() -> tuple[ReplicaChoice, list[Busy]]:
    some = [Busy(), Busy(), Busy()]
    return ReplicaChoice(some), some


@pytest.mark.core
def test_a_request_goes_where_the_least_is_to_do():
    choice, (a, b, c) = three()
    a.work, b.work, c.work = 300, 100, 200
    assert choice.order(request(1)) == [b, c, a]
    a.work = b.work = c.work = 0
    assert {choice.order(request(n))[0] for n in range(3)} == {a, b, c}, "in turns"


@pytest.mark.core
def test_a_request_goes_where_its_beginning_was_read_unless_that_has_too_much_to_do():
    choice, (a, b, c) = three()
    choice.remember(request(7), c)
    a.work, b.work, c.work = 0, 50, 400
    assert choice.order(request(7, 200))[0] is c, "other words behind the same 64"
    assert choice.order(request(8))[0] is a
    assert choice.order(request(7, 63))[0] is a, "too short to tell"
    c.work = 401
    assert choice.order(request(7))[0] is a, "more than four requests' work above the least"


class Listener:
    """The tokens of a request: (time, token) pairs; ``ended`` is set with its last event."""

    def __init__(self, number: int, length: int = 150) -> None:
        self.request = Request(str(number), (number, 1), length, ignore_eos=True)
        self.told: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.told += [(time.monotonic(), token) for token in event.tokens]
        if event.finish_reason is not None:
            self.reason, self.error = event.finish_reason, event.error
            self.ended.set()

    @property
    def is_right(self) -> bool:
        """Whether the tokens are those of the request alone."""
        assert self.ended.wait(60) and self.reason == "length", self.error
        want = itertools.islice(letters(self.request), self.request.max_new_tokens)
        return [token for _, token in self.told] == list(want)


class ThreadChild:
    """A child in a thread of this process: its death is the end of the socket."""

    number = itertools.count()

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.process, self.pid = self, next(self.number)
        self._thread = threading.Thread(target=replica.serve, args=(self._theirs,))
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout or 0)
        return -9


@contextlib.contextmanager
def running(count: int, step: float) -> Generator[tuple[LocalPool, PooledEngine]]:
    """Replicas over sleeping engines, on an event loop of their own."""
    pool, loop = LocalPool(count, start(step)), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        engine = PooledEngine(pool, pool.start(), lambda name, seconds: None, count)
        asyncio.run_coroutine_threadsafe(engine.open(), loop).result()
        yield pool, engine
        engine.stop()
    finally:
        pool.kill()
        asyncio.run_coroutine_threadsafe(ended(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def ended() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def submitted(engine: PooledEngine, listeners: list[Listener]) -> None:
    with ThreadPoolExecutor(24) as threads:
        asked = [
            threads.submit(engine.submit, one.request, one, with_text=False) for one in listeners
        ]
    assert [one.result() for one in asked] == [None] * len(listeners)


def lost(caplog) -> list[str]:
    """The ids of the requests that have lost their replica, as the log has them."""
    told = [r for r in caplog.records if r.getMessage() == "a request has lost its replica"]
    return [record.fields["id"] for record in told]


def killed_under_load(engine: PooledEngine, pool: LocalPool, caplog) -> float:
    """24 requests over three replicas, of which one is killed.

    Returns the longest pause of the requests of the other two.
    """
    listeners = [Listener(number) for number in range(24)]
    submitted(engine, listeners)
    wait_until(lambda: all(len(one.told) > 10 for one in listeners))
    assert engine.stats().max_slots == 3 * ROWS
    victim, told = pool._processes[1], min(len(one.told) for one in listeners)
    assert told < 150, "all of them run"
    victim.child.process.kill()
    killed = time.monotonic()
    assert all(one.is_right for one in listeners)
    gone = lost(caplog)
    assert len(gone) == len({*gone}) == 8, "those of one replica, once"
    wait_until(lambda: len(pool._living) == 3)
    assert pool._processes[1] in pool._living and pool._processes[1] is not victim
    again = [Listener(number, 20) for number in range(24)]
    submitted(engine, again)
    wait_until(lambda: pool._processes[1].stats.steps > 0)
    assert all(one.is_right for one in again) and lost(caplog) == gone
    wait_until(lambda: [one.work for one in pool._living] == [0, 0, 0])
    assert engine.failure is None
    others = [one for one in listeners if one.request.id not in gone]
    return max(b - a for one in others for (a, _), (b, _) in pairwise(one.told) if b > killed)


def test_a_lost_replica_loses_no_token_and_runs_again(caplog, monkeypatch):
    monkeypatch.setattr(replicas, "Child", ThreadChild)
    with running(3, 0.004) as (pool, engine):
        killed_under_load(engine, pool, caplog)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(None, "it does not answer"), ("the engine failed: gone", "the engine failed: gone")],
)
def test_a_replica_that_hangs_or_fails_is_lost(failure, reason, monkeypatch):
    monkeypatch.setattr(wire, "BEAT", 0.02)
    stats, ended = FakeEngine().stats(), list[str]()

    async def run() -> None:
        one = Process(0, SimpleNamespace(process=SimpleNamespace(pid=7)))
        watching = asyncio.create_task(one.ended())
        asked = asyncio.create_task(one.run(request(1), lambda: None, lambda rows: True))
        for _ in range(20):
            one.handle(messages.EngineReport("", stats, [("ttft", 0.5)], None))
            await asyncio.sleep(0.01)
        assert not watching.done(), "it reports"
        assert one.report() == messages.EngineReport("7", stats, [("ttft", 0.5)] * 20, None)
        assert one.report().times == []
        if failure is not None:
            one.handle(messages.EngineReport("", stats, [], failure))
        ended.append(await watching)
        for call in (asked, one.run(request(2), lambda: None, lambda rows: True)):
            with pytest.raises(ReplicaLost, match=reason):
                await call

    asyncio.run(asyncio.wait_for(run(), 30))
    assert ended == [reason]


def test_replicas_of_which_none_can_be_started_have_failed(monkeypatch, caplog):
    """One that is left goes on; with the last one lost, requests end with the reason."""
    starts = itertools.count()

    def child(module: str, environment: dict[str, str]) -> ThreadChild:
        if next(starts) >= 2:
            raise OSError(11, "no process is left")
        return ThreadChild(module, environment)

    monkeypatch.setattr(replicas, "Child", child)
    monkeypatch.setattr(wire, "LONGEST_DELAY", 0.01)
    with running(2, 0.02) as (pool, engine):
        one = Listener(1, 40)
        submitted(engine, [one])
        first, second = (pool._processes[number].child for number in range(2))
        first.kill()
        wait_until(lambda: next(starts) > 4)
        assert engine.failure is None and one.is_right
        late = Listener(2, 4000)
        submitted(engine, [late])
        second.kill()
        assert late.ended.wait(30) and isinstance(late.error, EngineFailed)
        assert engine.failure == str(late.error)
        assert engine.failure.startswith("the engine failed: no replica is left: ")
        assert "no process is left" in engine.failure
        with pytest.raises(EngineFailed):
            engine.submit(request(3), print, with_text=False)


@pytest.mark.slow
def test_a_killed_process_loses_no_token_and_runs_again(caplog):
    """The same with processes and SIGKILL; the others never stop."""
    with running(3, 0.02) as (pool, engine):
        pause = killed_under_load(engine, pool, caplog)
        print(f"the longest pause of a request elsewhere: {pause:.2f} s")
        assert pause < 1.0


@pytest.mark.slow
def test_two_replicas_are_one_server(tmp_path):
    folder: Path = tiny_checkpoint(tmp_path)
    flags = ("--max-slots", "2", "--max-len", "1024", "--replicas", "2")
    long = {**BODY, "prompt": "b" * 200, "max_tokens": 1}
    with (
        serve(folder, *flags) as (process, url, log),
        client(url) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        assert len(children(process.pid)) == 3, "two engines and a front end"
        want = text_of(streamed(url, BODY))
        assert {*pool.map(lambda _: text_of(streamed(url, BODY)), range(3))} == {want}
        assert counted(http, "slots") == 4
        assert counted(http, "completion_tokens_total") == 32
        assert counted(http, "requests_finished_total") == 4
        for _ in range(4):
            assert http.post("/v1/completions", json=long).json()["usage"]["prompt_tokens"] == 200
        usage = http.post("/v1/completions", json=long).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128, "where it was read before"
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 4000}).status_code == 400
        stop = {**BODY, "max_tokens": 200, "stop": [want[2:4]]}
        [choice] = http.post("/v1/completions", json=stop).json()["choices"]
        assert choice["text"] == want[: want.index(want[2:4])]
        rows = http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "a"]}).json()
        first, second = (row["embedding"] for row in rows["data"])
        assert first == second, "one on each"

        # Killed one after the other and both at once: nobody notices, but for a pause.
        body = {**BODY, "max_tokens": 900, "temperature": 0}
        alone = text_of(streamed(url, body))
        for killed in (1, 1, 2):
            began = threading.Event()
            stream = pool.submit(streamed, url, body, began)
            assert began.wait(60)
            for pid in replicas_of(process.pid)[:killed]:
                os.kill(pid, signal.SIGKILL)
            assert text_of(stream.result()) == alone
            wait_until(lambda: counted(http, "slots") == 4)
        assert http.get("/ready").status_code == 200

        # None is left, and none can be started.
        (folder / "tiny").rename(folder / "gone")
        stream = pool.submit(streamed, url, body, began := threading.Event())
        assert began.wait(60)
        for pid in replicas_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert stream.result()[-1]["error"]["code"] == "engine_failed"
        assert process.wait(60) == 1
        *_, error = log.read_text().splitlines()
    assert error.startswith("error: the engine failed: no replica is left: ")


def replicas_of(pid: int) -> list[int]:
    """The processes of a server that have an engine."""
    command = lambda child: Path(f"/proc/{child}/cmdline").read_text()  # noqa: E731
    return [child for child in children(pid) if "ipc.replica" in command(child)]

"""Signs of life between processes: who gives none is killed, replaced or told of."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.engine.request import Request
from jaxllama.serving.api import messages
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import process
from jaxllama.serving.ipc import hub as hub_module
from jaxllama.serving.ipc import link, wire
from jaxllama.serving.ipc.hub import Hub
from jaxllama.serving.ipc.link import EngineClient


class Child:
    """A front end's process as its parent has it; another thread answers, or does not."""

    pid = 1234

    def __init__(self, hangs: bool, is_ready: bool = True) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.process, self._hangs, self._ended = self, hangs, threading.Event()
        self.pings, self._is_ready = 0, is_ready
        self.failures: list[str] = []
        threading.Thread(target=self._talk, daemon=True).start()

    def _talk(self) -> None:
        try:
            self._answer()
        except OSError:  # the test closed the socket meanwhile
            if not self._ended.is_set():
                raise

    def _answer(self) -> None:
        frames = messages.Frames(messages.from_engine())
        if not self._is_ready:
            self.kill()
            return
        self.theirs.sendall(messages.encode(messages.Ready()))
        while not self._ended.is_set() and (data := self.theirs.recv(1 << 16)):
            for message in frames.feed(data):
                if isinstance(message, messages.Ping):
                    self.pings += 1
                    if not self._hangs:
                        self.theirs.sendall(messages.encode(messages.Pong()))
                elif isinstance(message, messages.Failed):
                    self.failures.append(message.reason)
                elif isinstance(message, messages.Drain):
                    self.kill()

    def kill(self) -> None:
        self._ended.set()
        self.theirs.shutdown(socket.SHUT_RDWR)
        self.theirs.close()

    def wait(self) -> int:
        return -9 if self._ended.wait(30) else 0


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(wire, "BEAT", 0.02)
    monkeypatch.setattr(wire, "MISSED", 4)


def engine_of(**more):
    """An engine that has not failed."""
    usual = {"failure": None, "closed": None, "stalled": None, "listen": lambda told: None}
    return SimpleNamespace(**usual, **more)


def server_of(engine, listener=None, seconds=1):
    return process._Server(Hub(engine, {}, Metrics(), None), engine, b"", listener, seconds)


def ended(run):
    """What ``run()`` returns; it has 30 seconds."""
    return asyncio.run(asyncio.wait_for(run(), 30))


async def end(server, child) -> None:
    """Let a server's last front end end."""
    server._ending.set()
    child.kill()
    await asyncio.wait(server._living)


@pytest.mark.core
def test_a_front_end_that_hangs_is_replaced(fast, monkeypatch, caplog):
    children = [Child(hangs=True), Child(hangs=False)]
    waiting = children[1:]
    monkeypatch.setattr(process.front_end, "start", lambda listener: waiting.pop())
    engine = engine_of()
    caplog.set_level(logging.ERROR, "jaxllama.serving")

    async def run() -> None:
        server = server_of(engine)
        server._unready = 1
        server._watch(children[0])
        while children[1].pings < 10:
            await asyncio.sleep(0.01)
        assert len(server._living) == 1 and server._error is None
        await end(server, children[1])

    ended(run)
    assert children[0].pings == 4 and children[0]._ended.is_set()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a front end hangs", "a front end has ended"], "once, and not of the other"


@pytest.mark.core
def test_an_engine_that_fails_ends_the_server_with_its_reason(monkeypatch, capsys):
    """A process that ends so has status 1, and a supervisor starts it again."""
    monkeypatch.setattr(process, "LOOK", 0.01)
    child, stopped = Child(hangs=False), []
    engine = engine_of(stats=lambda: None, stop=lambda: stopped.append(True))

    async def run() -> str | None:
        listener = SimpleNamespace(close=lambda: None)
        server = server_of(engine, listener, 10)
        running = asyncio.create_task(server.run([child], "tiny", None))
        await server._ready.wait()
        engine.failure = "the engine failed: gone"
        return await running

    assert ended(run) == "the engine failed: gone"
    assert child.failures == ["the engine failed: gone"] and stopped
    assert capsys.readouterr().out == "jaxllama serves tiny\n"


@pytest.mark.core
def test_a_replaced_front_end_that_dies_before_it_is_ready_is_replaced(fast, monkeypatch, caplog):
    """The engine's process goes on, and its other front ends too."""
    children = [Child(hangs=False), Child(hangs=False, is_ready=False), Child(hangs=False)]
    waiting, began = [OSError(11, "none left"), *children[1:]], []

    def start(listener):
        began.append(time.monotonic())
        one = waiting.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    monkeypatch.setattr(process.front_end, "start", start)
    monkeypatch.setattr(wire, "LONGEST_DELAY", 0.05)
    monkeypatch.setattr(wire, "MISSED", 10_000)  # none of them hangs
    engine = engine_of()
    caplog.set_level(logging.ERROR, "jaxllama.serving")

    async def run() -> None:
        server = server_of(engine)
        server._unready = 1
        server._watch(children[0])
        await server._ready.wait()
        children[0].kill()
        while children[2].pings < 3:
            await asyncio.sleep(0.01)
        assert server._error is None and not server._ending.is_set()
        assert server._died == 0 and server._unready == 0
        await end(server, children[2])

    ended(run)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a front end has ended", "a front end cannot be started"] + told[:1]
    assert [late - early >= 0.05 for early, late in itertools.pairwise(began)] == [True, True]


def test_a_first_front_end_that_dies_ends_the_start(fast):
    child = Child(hangs=False, is_ready=False)
    engine = engine_of()

    async def run() -> str | None:
        server = server_of(engine)
        server._watch(child)
        await server._ending.wait()
        return server._error

    said = ended(run)
    assert said == "a front end ended with status -9 as it started"


def test_an_engine_that_does_not_stop_is_given_up(fast, monkeypatch):
    monkeypatch.setattr(process, "STUCK", 0.2)
    for module in (process, hub_module):  # other tests leave threads of hubs
        monkeypatch.setattr(module, "THREADS", "tested")
    go = threading.Event()
    engine = engine_of(stop=go.wait)

    async def run() -> str | None:
        listener = SimpleNamespace(close=lambda: None)
        server = server_of(engine, listener)
        await server._drain()
        return server.stuck

    assert ended(run) == "jaxllama-engine"
    hub = Hub(engine, {"embed": go.wait}, Metrics(), None)
    hub._forward.submit(go.wait)
    hub.close()
    assert process._stuck_thread(0.05) == "tested-forward_0"
    go.set()
    assert process._stuck_thread(10) is None


def test_live_fails_while_the_engine_stands_still(lm, monkeypatch):
    """A probe restarts a server whose step does not end; one that goes on is left alone."""
    from jaxllama.engine import engine as engines

    lm = dataclasses.replace(lm)
    engine = engines.Engine(lm, max_slots=1, max_len=32)
    go, run = threading.Event(), engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda *step: (go.wait(30), run(*step))[1])
    monkeypatch.setattr(engines, "STALLED", 0.05)
    engine.start()
    try:
        assert engine.stalled is None
        events = []
        engine.submit(Request("a", (1, 2), 2), events.append)
        while engine.stalled is None:
            time.sleep(0.01)
        assert engine.stalled == "the engine hangs: its step has not ended for 0 s"
        go.set()
        while not events or events[-1].finish_reason is None:
            time.sleep(0.01)
        assert engine.drain(10)
        while engine.stalled is not None:  # the last request ends before its step does
            time.sleep(0.01)
    finally:
        go.set()
        engine.stop()


@pytest.mark.core
def test_a_front_end_tells_that_the_engines_process_hangs(monkeypatch):
    one, sent = EngineClient(), []
    one.open(sent.append)
    assert one.problem is None, "nobody has promised to ping"
    now = [100.0]
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one.received(messages.encode(messages.Ping()))
    [message] = messages.Frames(messages.from_front_end()).feed(sent[0])
    assert isinstance(message, messages.Pong)
    now[0] += link.SILENCE
    assert one.problem is None
    now[0] += 5
    assert one.problem == "the engine's process has given no sign of life for 35 s"
    assert one.standstill == one.problem
    one.received(messages.encode(messages.Ping()))
    assert one.problem is None
    one.received(messages.encode(messages.Ping("the engine hangs")))
    assert one.problem == one.standstill == "the engine hangs"
    one.received(messages.encode(messages.Ping()))
    assert one.problem is None
    one.received(messages.encode(messages.Trouble("the disk is full")))
    assert one.problem == "the disk is full" and one.standstill is None
    one.received(messages.encode(messages.Trouble(None)))
    assert one.problem is None

"""Processes of a server: how one is started, the socket to it, calls over it, and heartbeats.

A process that answers no ``Ping`` for ``BEAT * MISSED`` seconds counts as hung.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllama.serving.api import messages

BEAT = 5.0  # seconds between two heartbeats
MISSED = 6  # number of missed heartbeats after which a process counts as hung
LONGEST_DELAY = 30.0  # seconds before a process that died as it started is replaced


class Child:
    """A child process that runs a module's ``main``, and this end of the socket to it.

    main's arguments are the descriptors of the other end and of ``files``, and ``words``.
    environment: variables beside this process's own. kind: of the socket.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        words: Sequence[str] = (),
        kind: int = socket.SOCK_STREAM,
    ) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with theirs:
            passed = theirs.fileno(), *files
            program = f"from {module} import main; main()"
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *map(str, passed), *words],
                pass_fds=passed,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C goes to the parent only
            )

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


def delay(died: int) -> float:
    """Return the seconds before the next start, after so many processes died as they started."""
    return min(2.0 ** (died - 1), LONGEST_DELAY) if died else 0.0


class Wire(asyncio.Protocol):
    """A stream of bytes between two processes. gone: set when the other end is closed."""

    def __init__(self) -> None:
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.gone = asyncio.Event()
        self._transport: Any = None

    async def open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the socket after the bytes that were written."""
        if self._transport is not None:
            self._transport.close()


class Exchange:
    """The caller's end of a hub's port: calls, their answers, and the tokens of requests.

    A subclass defines ``read`` and ``handle``.
    """

    def __init__(self) -> None:
        self._send: Callable[[bytes], None] = lambda data: None
        self._frames = messages.Frames(messages.from_engine())
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._closed: Callable[[], Exception] | None = None

    def open(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, messages.Received):
                self.read(message.rows)
            elif isinstance(message, messages.Reply):
                self._answered(message.call, message.value)
            elif isinstance(message, messages.Refused):
                self._answered(message.call, self.error(message))
            else:
                self.handle(message)

    def read(self, pieces: Sequence[messages.TextPiece]) -> None:
        """Read new tokens."""
        raise NotImplementedError

    def handle(self, message: Any) -> None:
        """Read a message that is neither an answer nor tokens."""
        raise NotImplementedError

    def error(self, refused: messages.Refused) -> Exception:
        return messages.error(refused)

    def tell(self, message: messages.IpcMessage) -> None:
        self._send(messages.encode(message))

    async def call(self, message: Callable[[int], messages.IpcMessage]) -> Any:
        """Send the message of a call's number, and return its answer."""
        if self._closed is not None:
            raise self._closed()
        call = next(self._numbers)
        waiting = self._asked[call] = asyncio.get_running_loop().create_future()
        try:
            self.tell(message(call))
            return await waiting
        finally:
            self._asked.pop(call, None)

    def close(self, error: Callable[[], Exception]) -> None:
        """Send nothing more, and let all calls raise what ``error`` returns."""
        self._closed, self._send = error, lambda data: None
        for call in list(self._asked):
            self._answered(call, error())

    def _answered(self, call: int, value: Any) -> None:
        waiting = self._asked.pop(call, None)
        if waiting is None or waiting.done():
            return
        if isinstance(value, Exception):
            waiting.set_exception(value)
        else:
            waiting.set_result(value)


class Pulse:
    """Heartbeats of another process. ``beat`` records one."""

    def __init__(self) -> None:
        self._missed = 0

    def beat(self) -> None:
        self._missed = 0

    async def lost(self, ask: Callable[[], None] = lambda: None) -> None:
        """Return after ``MISSED`` heartbeats in a row did not come; ``ask`` is called before each.

        Heartbeats are counted and not seconds, so a machine that sleeps or is slow misses none.
        """
        while self._missed < MISSED:
            self._missed += 1
            ask()
            await asyncio.sleep(BEAT)

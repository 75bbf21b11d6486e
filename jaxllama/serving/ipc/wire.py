"""The socket between two processes of a server, and each one's signs of life.

A process that answers no ``Ping`` for ``BEAT * MISSED`` seconds is taken to hang.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

BEAT = 5.0  # seconds between two signs of life
MISSED = 6  # of them, after which a process is taken to hang


class Wire(asyncio.Protocol):
    """Bytes between two processes, as they come.  gone: the other end is closed."""

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
        """Behind what is written already."""
        self._transport.close()


class Pulse:
    """Another process's signs of life.  ``beat``: one has come."""

    def __init__(self) -> None:
        self._missed = 0

    def beat(self) -> None:
        self._missed = 0

    async def lost(self, ask: Callable[[], None] = lambda: None) -> None:
        """Return when ``MISSED`` beats in a row have not come.  ask: called before each.  Beats are
        counted, not seconds: a machine that sleeps, or is slow, misses none."""
        while self._missed < MISSED:
            self._missed += 1
            ask()
            await asyncio.sleep(BEAT)

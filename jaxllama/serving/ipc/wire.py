"""The socket between two processes of a server, and the heartbeats over it.

A process that answers no ``Ping`` for ``BEAT * MISSED`` seconds counts as hung.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

BEAT = 5.0  # seconds between two heartbeats
MISSED = 6  # number of missed heartbeats after which a process counts as hung


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

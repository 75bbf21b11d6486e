"""Limits of a connection before its request reaches the application, as a uvicorn protocol.

    uvicorn_config(app, ...)             of a server with this protocol
    protocol(peers) -> class             for ``uvicorn.Config(http=...)``
    Peers(limit)                         the open connections of this process, by client address
    raise_descriptors()                  raises the limit of open files to the system's maximum

uvicorn reads headers of any size for any time. Here the request line and headers have at most
``HEAD_BYTES`` (431) and ``HEAD_SECONDS`` (408). A body's trailers have at most ``HEAD_BYTES`` too.
The application limits a body's size and time (``read_body``). A body that the application does not
read ends the connection after ``BODY_SECONDS``.

An address has at most ``CLIENT_CONNECTIONS`` connections, and never more than half of the
descriptors that this process may open. At the bound a new connection replaces the oldest one that
has not sent a whole request. That one is idle or has sent half a request. If all of them wait for
answers, the new one gets 429. So half requests never block whole ones.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxllama.serving import logs
from jaxllama.serving.api.schemas import ApiError, to_json

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
UPLOAD_SECONDS = 600.0  # for a file, which /v1/files takes
BODY_SECONDS = 35.0  # longer than the application waits, so that the application's answer is sent
LINGER_SECONDS = 1.0  # in which a refused client may read the reason
CLIENT_CONNECTIONS = 1024
SPARE = 8  # descriptors reserved for files, the journal, imports
_log = logging.getLogger("jaxllama.serving")
_REASONS = {
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
}


def raise_descriptors() -> None:
    """Raise this process's limit of open files to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS reports unlimited and allows less
            pass


class Peers:
    """The open connections of this process. limit: largest number of one address."""

    def __init__(self, limit: int = CLIENT_CONNECTIONS) -> None:
        self._limit = limit
        self._others: int | None = None  # number of descriptors that are not connections
        # the oldest first
        self._all: dict[Limited, None] = {}
        self._by_address: dict[str, dict[Limited, None]] = collections.defaultdict(dict)

    @property
    def total(self) -> int:
        """Largest number of connections that this process can have."""
        if self._others is None:
            self._others = len(os.listdir("/dev/fd")) - len(self._all)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return 2**31 if most == resource.RLIM_INFINITY else max(most - self._others - SPARE, 2)

    def enter(self, connection: Limited) -> bool:
        """Count a new connection; return False if there is no room for it."""
        theirs = self._by_address[connection.address]
        theirs[connection] = self._all[connection] = None
        total = self.total
        if len(theirs) > min(self._limit, total // 2) and not _make_room(theirs, connection):
            return False
        return len(self._all) <= total or _make_room(self._all, connection)

    def leave(self, connection: Limited) -> None:
        self._all.pop(connection, None)
        theirs = self._by_address.get(connection.address)
        if theirs is not None:
            theirs.pop(connection, None)
            if not theirs:
                del self._by_address[connection.address]


def _make_room(connections: dict[Limited, None], newest: Limited) -> bool:
    """Close the oldest connection that waits for no answer; return False if there is none."""
    for other in connections:
        if other is not newest and not other.is_answering:
            other.give_way()
            return True
    return False


class Limited(HttpToolsProtocol):
    """A connection with limits; the module docstring names them.

    A connection is between two requests or in a request's head, then in its body, then waits for
    the answer.
    """

    peers: Peers

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self._in_head, self._is_refused = True, False
        self._has_begun = self._has_progress = False
        self._bytes = 0  # bytes without progress: of headers, trailers or a chunk's extensions
        self._since = 0.0  # time at which this part of the request began
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """Whether a whole request waits for its answer."""
        if not self.cycle:  # before the first request
            return False
        is_whole = not (self.cycle.response_complete or self.cycle.more_body)
        return is_whole or bool(self.pipeline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
        if not self.peers.enter(self):
            self.refuse(429, "too many connections: try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self.peers.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not (self._is_refused or self.transport.is_closing()):
            part = data[: HEAD_BYTES - self._bytes]
            data = data[len(part) :]
            self._has_progress = False
            super().data_received(part)
            self._bytes = 0 if self._has_progress else self._bytes + len(part)
            if self._bytes >= HEAD_BYTES:
                message = f"the request line and headers are larger than {HEAD_BYTES} bytes"
                self.refuse(431, message, linger=LINGER_SECONDS)

    def on_message_begin(self) -> None:
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._begin(in_head=False)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_begun = False
        self._begin(in_head=True)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def _begin(self, in_head: bool) -> None:
        self._in_head, self._has_progress, self._since = in_head, True, self.loop.time()

    def _look(self) -> None:
        """Close the connection if this part of its request takes too long."""
        now = self.loop.time()
        if self.is_answering:
            self._since = now
        limit = HEAD_SECONDS if self._in_head else BODY_SECONDS
        if not self._in_head and self.scope["path"] == "/v1/files":
            limit = UPLOAD_SECONDS + BODY_SECONDS - HEAD_SECONDS
        rest = self._since + limit - now
        if rest > 0:
            self._timer = self.loop.call_later(rest, self._look)
        elif not self._has_begun:
            self.transport.close()
        else:
            self.refuse(408, f"the request did not arrive within {HEAD_SECONDS:g} s")

    def give_way(self) -> None:
        """Close the connection in favour of a newer one."""
        self.peers.leave(self)
        if self._is_refused or not self._has_begun:
            self.transport.close()
        else:
            self.refuse(429, "too many connections: this one had not sent a whole request")

    def refuse(self, status: int, message: str, linger: float = 0.0) -> None:
        """Answer with an error and close the connection.

        linger: seconds in which further bytes of the client are dropped. A connection that is
        closed before them may lose the answer.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        _log.info("refused", extra={"fields": {"client": self.address, "status": status}})
        # The error must not be written into another answer or after this request's own answer.
        if not self.is_answering and (self._in_head or not self.cycle.response_started):
            error = to_json(ApiError(status, message).body())
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b"
                % (status, _REASONS[status].encode(), len(error), error)
            )
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(linger, self.transport.close)
        else:
            self.transport.close()


def protocol(peers: Peers | None = None) -> type[HttpToolsProtocol]:
    """Return the protocol of one server, whose connections ``peers`` counts."""
    return type("LimitedProtocol", (Limited,), {"peers": peers or Peers()})


class Server(uvicorn.Server):
    """A server that calls ``started`` when it listens."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()


def uvicorn_config(app: ASGIApp, drain_timeout: int, **tls: Any) -> uvicorn.Config:
    """Return the configuration of a server with these limits and our log.

    drain_timeout: seconds from the signal to the end. tls: uvicorn's fields of a certificate.
    """
    return uvicorn.Config(
        app,
        http=protocol(),
        lifespan="on",
        ws="none",
        log_config=logs.configuration(),
        access_log=False,
        server_header=False,
        # uvicorn trusts local clients by default, and any of them could name another address.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
        timeout_graceful_shutdown=drain_timeout,
        **tls,
    )

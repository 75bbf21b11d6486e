"""OpenTelemetry traces of a front end: one record a request, sent to a process that exports it.

    tracer = Tracer(endpoint, model)      starts the exporter's process (``trace_exporter``)
    trace = tracer.begin(headers)         takes the client's ``traceparent``
    tracer.end(trace, ...)                keeps the record for the next packet; never waits
    tracer.close()

A front end only packs the times that it has and writes them to a socket, every ``FLUSH_SECONDS``.
The other process makes spans of them with OpenTelemetry's own library, and sends the spans. If the
exporter does not keep up, its socket is full and records are dropped, and the log says so.

A request with a ``traceparent`` gets spans of that trace, none if its sampled flag is off. The
answer's ``traceparent`` names the request's own span.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import subprocess
import time

import msgspec

from jaxllama.engine.request import RequestTimes
from jaxllama.serving.api.reading import ParseTimes
from jaxllama.serving.http.trace_records import SpanTimes, TraceRecord
from jaxllama.serving.ipc.wire import Child
from jaxllama.typing import JsonObject

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
FLUSH_SECONDS = 0.25
PACKET = 64  # records of a packet
_BUFFER = 4 * 2**20  # bytes of records that wait for the exporter
END_SECONDS = 5.0  # in which the exporter sends what it has
_log = logging.getLogger("jaxllama.serving")


class RequestTrace:
    """A request's place in its trace. is_sampled: whether anything is recorded of it."""

    __slots__ = ("is_sampled", "parent", "parsing", "span_id", "state", "trace_id")

    def __init__(self, trace_id: str, parent: str | None, state: str, is_sampled: bool) -> None:
        self.trace_id, self.parent, self.state = trace_id, parent, state
        self.is_sampled = is_sampled
        self.span_id = f"{random.getrandbits(64) or 1:016x}"
        self.parsing = ParseTimes()

    @property
    def header(self) -> bytes:
        """The value of the answer's ``traceparent``."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}".encode()


class Tracer:
    """Sends a front end's records. endpoint: the URL of the collector (OTLP over HTTP)."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._dropped = 0
        self._records: list[TraceRecord] = []
        self._encode = msgspec.msgpack.Encoder().encode
        module, words = "jaxllama.serving.http.trace_exporter", (endpoint, model)
        child = Child(module, {}, words=words, kind=socket.SOCK_SEQPACKET)
        self._socket, self._process = child.socket, child.process
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

    def begin(self, headers: dict[bytes, bytes]) -> RequestTrace:
        sent = headers.get(b"traceparent")
        found = None if sent is None else _PARENT.fullmatch(sent.decode("latin-1"))
        if found is None or set(found[1]) == {"0"} or set(found[2]) == {"0"}:
            return RequestTrace(f"{random.getrandbits(128) or 1:032x}", None, "", True)
        state = headers.get(b"tracestate", b"").decode("latin-1")[:512]
        return RequestTrace(found[1], found[2], state, bool(int(found[3], 16) & 1))

    def end(
        self,
        trace: RequestTrace,
        name: str,
        seconds: float,
        times: RequestTimes | None,
        status: int,
        attributes: JsonObject,
    ) -> None:
        """Send the record of a request that has just ended.

        seconds: that it took. times: of the choice that ended first, if it had any.
        """
        if not trace.is_sampled:
            return
        now = time.time_ns()
        offset = now - time.monotonic_ns()
        parts: list[SpanTimes] = []
        if times is not None:
            submitted, admitted, first, ended = (int(t * 1e9) + offset for t in times)
            parts = [
                SpanTimes("queue", submitted, admitted),
                SpanTimes("prefill", admitted, first),
                SpanTimes("decode", first, ended),
            ]
        parsing = trace.parsing
        if parsing.count:
            busy: dict[str, int | float | str] = {
                "jaxllama.busy_seconds": parsing.busy,
                "jaxllama.texts": parsing.count,
            }
            begin, end = (int(t * 1e9) + offset for t in (parsing.begin, parsing.end))
            parts.append(SpanTimes("tool parsing", begin, end, busy))
        record = TraceRecord(
            trace.trace_id,
            trace.span_id,
            trace.parent,
            trace.state,
            name,
            now - int(seconds * 1e9),
            now,
            status >= 500,
            attributes,
            parts,
        )
        self._records.append(record)
        if len(self._records) == 1:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        records, self._records = self._records, []
        for begin in range(0, len(records), PACKET):
            packet = records[begin : begin + PACKET]
            try:
                self._socket.send(self._encode(packet))
            except OSError:  # the exporter is slow, or gone
                if not self._dropped:
                    _log.warning("traces are dropped: their exporter is slow or has ended")
                self._dropped += len(packet)

    def close(self) -> None:
        """Send what there is; the exporter hands it on, and ends."""
        self._flush()
        if self._dropped:
            _log.warning("traces were dropped", extra={"fields": {"dropped": self._dropped}})
        self._socket.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

"""The records that a front end sends its exporter of traces, as packets of msgpack.

The module imports nothing of the server, so that the exporter's process starts soon.
"""

from __future__ import annotations

import msgspec


class SpanTimes(msgspec.Struct, array_like=True, gc=False):
    """A part of a request. begin, end: in nanoseconds since 1970."""

    name: str
    begin: int
    end: int
    attributes: dict[str, int | float | str] = {}


class TraceRecord(msgspec.Struct, array_like=True, gc=False):
    """A request for the exporter. parent: id of the client's span, or None."""

    trace_id: str
    span_id: str
    parent: str | None
    state: str
    name: str
    begin: int
    end: int
    is_error: bool
    attributes: dict[str, int | float | str]
    parts: list[SpanTimes]

"""``python -m benchmarks.traces``: what traces cost a front end of ``jaxllama serve``.

A real front end, a process of its own, stands between an engine that only answers (``front_end``)
and clients that only count.  Each round all streams send a request, and each gets ``--tokens``
tokens, one a chunk.  The front end's CPU time with traces stands beside the one without, from
rounds in turn; a collector in this process takes the spans.  ``--picture FILE.png`` draws one
request's spans.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import http.server
import json
import pickle
import selectors
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.front_end import BODY, CASES, SETTINGS, WORDS, LoadCase, Mock, facts, rows_of
from jaxllama.serving.api import messages
from jaxllama.serving.api.messages import RowEvent, StepNews
from jaxllama.serving.http import front_end

END = b"0\r\n\r\n"  # of an answer in chunks


class Collector:
    """Takes spans over HTTP. spans: those that came. Their text is read after the measurement."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                is_packed = self.headers.get("Content-Encoding") == "gzip"
                collector.bodies.append(gzip.decompress(data) if is_packed else data)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class FrontEnd:
    """A front end with its engine and its clients. traces: URL of the collector, or None."""

    def __init__(self, case: LoadCase, streams: int, traces: str | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._child = front_end.start(listener)
        self._mock, self._streams = Mock(self._child.socket, case), streams
        settings = dataclasses.replace(SETTINGS, traces=traces)
        setup = front_end.FrontEndSetup(facts(), settings, 100_000, 1)
        self._mock.send(messages.Welcome(pickle.dumps(setup)))
        assert self._mock.is_ready.wait(120)
        body = json.dumps({**BODY, **dict(case.body)}).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._selector = selectors.DefaultSelector()
        self._connections = [
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            for _ in range(streams)
        ]
        for connection in self._connections:
            self._selector.register(connection, selectors.EVENT_READ)

    def round(self, tokens: np.ndarray) -> float:
        """Answer a request on each connection; returns the front end's CPU seconds.

        tokens: [steps, streams].
        """
        clock = (~self._child.process.pid << 3) | 2  # Linux: the CPU time of that process
        begin = time.clock_gettime(clock)
        self._mock.rows.clear()
        for connection in self._connections:
            connection.sendall(self._asked)
        while len(self._mock.rows) < self._streams:
            time.sleep(0.0005)
        submitted = time.monotonic()
        chunks = ended = 0
        admitted = time.monotonic()
        for number, step in enumerate(tokens, start=1):
            rows: list[RowEvent] = rows_of(self._mock.rows, step, 1)
            if number == len(tokens):
                now = time.monotonic()
                for row in rows:
                    row.finish_reason = "length"
                    row.times = (submitted, admitted, admitted + (now - admitted) / 10, now)
            self._mock.send(StepNews(rows))
            while chunks < number * self._streams or (
                number == len(tokens) and ended < self._streams
            ):
                for key, _ in self._selector.select(10):
                    data = key.fileobj.recv(1 << 16)  # pyright: ignore
                    chunks += data.count(b"data: ")
                    ended += data.endswith(END)
        return time.clock_gettime(clock) - begin

    def close(self) -> None:
        self._child.kill()


def draw(spans: list[Any], path: Path) -> None:
    """Draw the spans of the last request as bars over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    root = [span for span in spans if span.name.startswith("POST")][-1]
    parts = [span for span in spans if span.parent_span_id == root.span_id]
    parts.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    shown = [root, *parts]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(shown) + 1.2), layout="constrained")
    for row, span in enumerate(shown):
        begin = (span.start_time_unix_nano - root.start_time_unix_nano) / 1e6
        width = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        axes.barh(row, width, left=begin, color="tab:blue" if row else "tab:gray")
        axes.annotate(
            f"{width:.2f} ms",
            (begin + width, row),
            (4, 0),
            va="center",
            fontsize=8,
            textcoords="offset points",
        )
    axes.set_yticks(range(len(shown)), [span.name for span in shown])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms since the request arrived")
    axes.set_title(f"trace {root.trace_id.hex()}", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    collector, case = Collector(), CASES[1]
    off, on = (FrontEnd(case, args.streams, url) for url in (None, collector.url))
    tokens = np.random.default_rng(0).integers(256, WORDS, (args.tokens, args.streams))
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(3):
        off.round(tokens)
        on.round(tokens)
    for _ in range(args.rounds):
        seconds["off"].append(off.round(tokens))
        seconds["on"].append(on.round(tokens))
    count = args.tokens * args.streams
    least = {name: min(values) for name, values in seconds.items()}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    time.sleep(8)  # the exporter sends every 5 seconds
    spans = collector.spans
    off.close()
    on.close()
    for name in seconds:
        print(
            f"traces {name}: {count / middle[name]:,.0f} tokens/s of CPU (median), "
            f"{count / least[name]:,.0f} (best)"
        )
    cost = {"median": middle["on"] / middle["off"] - 1, "best": least["on"] / least["off"] - 1}
    extra = (middle["on"] - middle["off"]) / args.streams * 1e6
    print(
        f"cost: {cost['median']:.1%} (median), {cost['best']:.1%} (best), {extra:.1f} us a request "
        f"of {args.tokens} tokens; {len(spans)} spans received of "
        f"{4 * args.streams * (args.rounds + 3)}"
    )
    if args.picture is not None:
        draw(spans, args.picture)


if __name__ == "__main__":
    main()

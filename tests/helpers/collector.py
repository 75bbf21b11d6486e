"""A collector of OpenTelemetry's spans, for tests of traces."""

from __future__ import annotations

import gzip
import http.server
import threading


class Collector:
    """A collector of OTLP over HTTP: the spans that it has received."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.spans, self.service, collector = [], {}, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                sent = ExportTraceServiceRequest.FromString(data)
                for resource in sent.resource_spans:
                    collector.service = named(resource.resource)
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


def named(span) -> dict:
    kinds = ("string_value", "int_value", "double_value")
    values = {one.key: one.value for one in span.attributes}
    return {key: getattr(v, next(k for k in kinds if v.HasField(k))) for key, v in values.items()}

"""The process that makes a front end's records (``traces``) spans, and sends them to a collector.

    main()       arguments: descriptor of the socket, URL of the collector, name of the model

OpenTelemetry's SDK does the work: its environment variables hold here too, for example
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER. The
process ends when its socket is closed, after it has sent what it has.
"""

from __future__ import annotations

import logging.config
import os
import socket
import sys

import msgspec
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from jaxllama import __version__
from jaxllama.serving import logs
from jaxllama.serving.http.trace_records import TraceRecord

PACKET_BYTES = 1 << 20


class _RecordedIds(IdGenerator):
    """Ids of the records for requests, and random ids for their parts."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.record: TraceRecord | None = None

    def generate_trace_id(self) -> int:
        assert self.record is not None
        return int(self.record.trace_id, 16)

    def generate_span_id(self) -> int:
        record, self.record = self.record, None
        return self._random.generate_span_id() if record is None else int(record.span_id, 16)


class Spans:
    """Makes records spans. processor: takes each span."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME") or "jaxllama"
        resource = Resource.create(
            {"service.name": name, "service.version": __version__, "jaxllama.model": model}
        )
        self._ids = _RecordedIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxllama", __version__)

    def add(self, record: TraceRecord) -> None:
        context = None
        if record.parent is not None:
            parent = SpanContext(
                int(record.trace_id, 16),
                int(record.parent, 16),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
                trace_state=TraceState.from_header([record.state]),
            )
            context = set_span_in_context(NonRecordingSpan(parent))
        # The span id is generated after the trace id, or alone if there is a parent.
        self._ids.record = record
        span = self._tracer.start_span(
            record.name, context, SpanKind.SERVER, record.attributes, start_time=record.begin
        )
        within = set_span_in_context(span)
        for part in record.parts:
            self._tracer.start_span(
                part.name, within, SpanKind.INTERNAL, part.attributes, start_time=part.begin
            ).end(part.end)
        if record.is_error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.end)

    def close(self) -> None:
        self._provider.shutdown()


def main() -> None:
    descriptor, endpoint, model = sys.argv[1:]
    logging.config.dictConfig(logs.configuration("WARNING", ("opentelemetry",)))
    source = socket.socket(fileno=int(descriptor))
    spans = Spans(BatchSpanProcessor(OTLPSpanExporter(endpoint)), model)
    trace.set_tracer_provider(trace.NoOpTracerProvider())  # the exporter's own requests have none
    decoder = msgspec.msgpack.Decoder(list[TraceRecord])
    while data := source.recv(PACKET_BYTES):
        for record in decoder.decode(data):
            spans.add(record)
    spans.close()

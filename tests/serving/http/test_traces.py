"""Traces: the spans that a collector receives, the client's trace that goes on, and what is off."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("opentelemetry.exporter")

from tests.helpers.collector import Collector, named
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import NAME, client, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {
    "model": NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
    "stream": True,
}


def test_the_spans_of_requests(lm, caplog):
    caplog.set_level("INFO", "jaxllama.serving")
    with Collector() as collector, FakeEngine(max_len=512) as engine:
        engine.answer = says(lm.tokenizer, CALL)
        with serving(lm, engine, traces=collector.url) as url, client(url) as http:
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}
            reply = http.post("/v1/chat/completions", json=CHAT, headers=sent)
            assert "add" in reply.text
            version, trace, own, flags = reply.headers["traceparent"].split("-")
            assert (version, trace, flags) == ("00", TRACE, "01") and own != PARENT
            other = http.post("/v1/completions", json={"model": NAME, "prompt": "a"})
            off = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            assert http.get("/v1/models", headers=off).headers["traceparent"].endswith("-00")
            strange = {"traceparent": "00-zz-1-01"}
            assert TRACE not in http.get("/v1/models", headers=strange).headers["traceparent"]
            http.get("/health")
    spans = {(span.trace_id.hex(), span.name): span for span in collector.spans}
    mine = {name: span for (id, name), span in spans.items() if id == TRACE}
    root = mine.pop("POST /v1/chat/completions")
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (own, PARENT)
    assert root.trace_state == "a=1"
    assert mine.keys() == {"queue", "prefill", "decode", "tool parsing"}
    assert mine["prefill"].end_time_unix_nano == mine["decode"].start_time_unix_nano
    for span in mine.values():
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    facts = named(root)
    assert facts["http.response.status_code"] == 200
    assert facts["gen_ai.usage.output_tokens"] == len(CALL) + 1
    assert named(mine["tool parsing"])["jaxllama.texts"] >= 1
    id = other.headers["traceparent"].split("-")[1]
    assert spans[id, "POST /v1/completions"].parent_span_id == b""
    assert collector.service["service.name"] == "jaxllama"
    assert sorted(span.name for span in collector.spans if span.name.startswith("GET")) == [
        "GET /v1/models"
    ], "one of two was not to be recorded, and probes never are"
    logged = [record.fields for record in caplog.records if record.msg == "request"]
    assert TRACE in json.dumps(logged) and "hi" not in str(collector.spans)


def test_the_parts_of_a_request_follow_from_the_engines_times():
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from jaxllama.serving.http.trace_exporter import Spans
    from jaxllama.serving.http.trace_records import SpanTimes, TraceRecord

    memory = InMemorySpanExporter()
    spans = Spans(SimpleSpanProcessor(memory), "tiny")
    names = ("queue", "prefill", "decode")
    parts = [SpanTimes(name, 10 * n, 10 * n + 10) for n, name in enumerate(names)]
    spans.add(TraceRecord(TRACE, "1" * 16, None, "", "POST /x", 0, 40, True, {"a": 1}, parts))
    spans.close()
    made = {span.name: span for span in memory.get_finished_spans()}
    root = made["POST /x"]
    assert (root.start_time, root.end_time) == (0, 40) and not root.status.is_ok
    assert f"{root.context.trace_id:032x}-{root.context.span_id:016x}" == f"{TRACE}-{'1' * 16}"
    for n, name in enumerate(names):
        assert made[name].parent == root.context
        assert (made[name].start_time, made[name].end_time) == (10 * n, 10 * n + 10)


def test_without_traces_nothing_of_them_is_there(lm):
    with FakeEngine() as engine, serving(lm, engine) as url, client(url) as http:
        reply = http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert "traceparent" not in reply.headers


def test_the_option_needs_its_extra(monkeypatch):
    from jaxllama.errors import JaxLlamaError
    from jaxllama.serving.http import process

    monkeypatch.setattr(process, "find_spec", lambda name: None)
    with pytest.raises(JaxLlamaError, match=re.escape("pip install -e '.[otel]'")):
        process.ServeOptions("tiny", traces="http://127.0.0.1:4318/v1/traces")
    assert process.ServeOptions("tiny").traces is None, "nothing is needed for nothing"

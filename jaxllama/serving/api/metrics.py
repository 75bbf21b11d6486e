"""Prometheus metrics of a server, under ``jaxllama_`` and under vLLM's names.

    metrics = Metrics(); Engine(..., observe=metrics.observe); metrics.watch(engine)
    metrics.wrote(tokens); metrics.ended(reason)             by the hub
    metrics.sized(prompt, completion, limit)                 by the hub, tokens of an ended request
    metrics.request(path, method, status, seconds); metrics.page() -> (content type, bytes)

One Metrics object in the engine's process serves all front ends, which report their requests to it.
The engine's thread feeds the histograms: time to first token, inter-token time, queue time, time of
the whole request. The engine's own counts are read from ``engine.stats()`` when the page is
requested. Each object has its own registry, so two servers in one process do not mix.

``VLLM`` lists the names that vLLM's dashboards query, with the metric of ours that has the values.
The page repeats those under vLLM's name, with the label ``model_name``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from jaxllama.engine.stats import EngineStats

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TIMES = {
    "ttft": ("time_to_first_token", "From submission to the first token", _LONG),
    "itl": ("inter_token", "Between two tokens of a request", _SHORT),
    "queue": ("queue", "From submission to a slot", _LONG),
    "prefill": ("prefill", "From a slot to the first token", _LONG),
    "decode": ("decode", "From the first token to the last", _LONG),
    "e2e": ("request", "From submission to the last token", _LONG),
}
_GAUGES = {
    "waiting": ("requests_waiting", "Requests without a slot"),
    "prefilling": ("requests_prefilling", "Requests whose prompt is being read"),
    "running": ("requests_running", "Requests that decode"),
    "max_slots": ("slots", "Requests that can run at once"),
    "cache_tokens": ("cache_tokens", "Tokens in the cache"),
    "cache_capacity": ("cache_capacity_tokens", "Tokens that the cache may hold"),
    "pages": ("cache_pages", "Pages of the cache"),
    "pages_used": ("cache_pages_used", "Pages that running requests hold"),
    "pages_known": ("cache_pages_known", "Pages that new requests may begin with"),
    "programs_missing": ("programs_missing", "Programs that are still compiled in the background"),
    "host_tier_bytes": ("cache_host_bytes", "Bytes of prefixes in host memory"),
    "disk_tier_bytes": ("cache_disk_bytes", "Bytes of prefixes on disk"),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Tokens of prompts found in the prefix cache"),
    "preemptions": ("preemptions", "Requests pushed out of their slot"),
    "steps": ("steps", "Engine steps"),
    "compilations": ("compilations", "Programs compiled since warm-up"),
    "drafted_tokens": ("drafted_tokens", "Tokens that drafts proposed"),
    "accepted_tokens": ("accepted_tokens", "Tokens that were as their draft"),
    "host_tier_hits": ("cache_host_hits", "Pages and states that came back from host memory"),
    "host_tier_hit_bytes": ("cache_host_hit_bytes", "Their bytes"),
    "disk_tier_hits": ("cache_disk_hits", "Pages and states that came back from disk"),
    "disk_tier_hit_bytes": ("cache_disk_hit_bytes", "Their bytes"),
    "tier_lost": ("cache_lost_pages", "Pages that left the device without a copy"),
}


# vLLM's metric by the one of ours that has its values.  The first name of each pair is the newer.
VLLM = {
    "jaxllama_request_seconds": ("vllm:e2e_request_latency_seconds",),
    "jaxllama_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "jaxllama_inter_token_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "jaxllama_queue_seconds": ("vllm:request_queue_time_seconds",),
    "jaxllama_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "jaxllama_decode_seconds": ("vllm:request_decode_time_seconds",),
    "jaxllama_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "jaxllama_request_completion_tokens": ("vllm:request_generation_tokens",),
    "jaxllama_request_limit_tokens": (
        "vllm:request_params_max_tokens",
        "vllm:request_max_num_generation_tokens",
    ),
    "jaxllama_requests_finished": ("vllm:request_success",),
    "jaxllama_prompt_tokens": ("vllm:prompt_tokens",),
    "jaxllama_completion_tokens": ("vllm:generation_tokens",),
    "jaxllama_preemptions": ("vllm:num_preemptions",),
    "jaxllama_requests_waiting": ("vllm:num_requests_waiting",),
    "jaxllama_requests_active": ("vllm:num_requests_running",),
    "jaxllama_requests_swapped": ("vllm:num_requests_swapped",),
    "jaxllama_cache_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "jaxllama_prefix_lookup_tokens": ("vllm:prefix_cache_queries",),
    "jaxllama_prefix_hit_tokens": ("vllm:prefix_cache_hits",),
}
_SIZES = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class HasStats(Protocol):
    def stats(self) -> EngineStats: ...


class Metrics:
    """Collects and writes the metrics; the module docstring has the interface."""

    def __init__(self, model: str = "model") -> None:
        self._registry, self._model = CollectorRegistry(), model
        ProcessCollector(registry=self._registry)
        named = {"namespace": "jaxllama", "registry": self._registry}
        counter = functools.partial(Counter, **named)
        histogram = functools.partial(Histogram, **named)
        self._times = {
            key: histogram(f"{name}_seconds", text, buckets=edges)
            for key, (name, text, edges) in _TIMES.items()
        }
        self._requests = counter("http_requests", "HTTP requests", ["method", "path", "status"])
        text = "From a request's head to the end of its answer"
        self._seconds = histogram("http_request_seconds", text, ["path"], buckets=_LONG)
        self._written = counter("completion_tokens", "Tokens written")
        self._finished = counter("requests_finished", "Requests by how they ended", ["reason"])
        self._sizes = [
            histogram(f"request_{name}", text, buckets=_SIZES)
            for name, text in (
                ("prompt_tokens", "Tokens of a request's prompt"),
                ("completion_tokens", "Tokens of a request's answer"),
                ("limit_tokens", "Most tokens that a request's answer may have"),
            )
        ]

    def observe(self, name: str, seconds: float) -> None:
        """Add seconds to a histogram; the engine's ``observe`` callback."""
        self._times[name].observe(seconds)

    def watch(self, engine: HasStats) -> None:
        self._registry.register(_EngineCollector(engine))

    def wrote(self, tokens: int) -> None:
        self._written.inc(tokens)

    def ended(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def sized(self, prompt: int, completion: int, limit: int) -> None:
        for histogram, value in zip(self._sizes, (prompt, completion, limit), strict=True):
            histogram.observe(value)

    def request(self, path: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def page(self) -> tuple[str, bytes]:
        ours = generate_latest(self._registry)
        return CONTENT_TYPE_LATEST, ours + generate_latest(_Renamed(self._registry, self._model))


class _Renamed:
    """The metrics of a registry that ``VLLM`` lists, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            for name in VLLM.get(metric.name, ()):
                renamed = Metric(name, metric.documentation, metric.type)
                for sample in metric.samples:
                    labels = {**sample.labels, "model_name": self._model}
                    if "reason" in labels:
                        labels["finished_reason"] = labels.pop("reason")
                    suffix = sample.name.removeprefix(metric.name)
                    renamed.add_sample(name + suffix, labels, sample.value)
                yield renamed


class _EngineCollector:
    def __init__(self, engine: HasStats) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # so that registering calls nothing on the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for key, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"jaxllama_{name}", text, value=getattr(stats, key))
        for name, text, value in (
            ("requests_active", "Requests with a slot", stats.prefilling + stats.running),
            ("requests_swapped", "Requests in the host's memory: none", 0),
            ("cache_share", "Share of the cache in use", stats.cache_share),
        ):
            yield GaugeMetricFamily(f"jaxllama_{name}", text, value=value)
        text = "Tokens of prompts that were looked up in the prefix cache"
        yield CounterMetricFamily("jaxllama_prefix_lookup_tokens", text, value=stats.prompt_tokens)
        for key, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"jaxllama_{name}", text, value=getattr(stats, key))

"""The queries of vLLM's Grafana dashboard, written by hand, answered from our /metrics.

Each is evaluated over two pages of metrics as Prometheus evaluates it: ``rate`` is the increase
between the pages over ``SECONDS``, ``histogram_quantile`` interpolates within a bucket.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from jaxllama.engine.stats import EngineStats
from jaxllama.serving.api.metrics import Metrics

NAME = "tiny"

SECONDS = 10.0
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
SELECTED = '{model_name="tiny"}'
QUANTILES = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
AVERAGES = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_params_max_tokens",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
QUERIES = (
    *(
        f"histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket{SELECTED}[1m])))"
        for name in QUANTILES
        for q in (0.99, 0.95, 0.9, 0.5)
    ),
    *(f"rate(vllm:{n}_sum{SELECTED}[1m]) / rate(vllm:{n}_count{SELECTED}[1m])" for n in AVERAGES),
    *(f"vllm:{name}{SELECTED}" for name in GAUGES),
    f"vllm:kv_cache_usage_perc{SELECTED}",
    f"vllm:gpu_cache_usage_perc{SELECTED}",
    f"rate(vllm:prompt_tokens_total{SELECTED}[1m])",
    f"rate(vllm:generation_tokens_total{SELECTED}[1m])",
    f"sum by(finished_reason) (increase(vllm:request_success_total{SELECTED}[1m]))",
    f"rate(vllm:prefix_cache_hits_total{SELECTED}[1m]) / "
    f"rate(vllm:prefix_cache_queries_total{SELECTED}[1m])",
)


class Engine:
    """The figures of an engine; those that are not given are 0."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts

    def stats(self) -> EngineStats:
        names = [field.name for field in dataclasses.fields(EngineStats)]
        plain = {**dict.fromkeys(names, 0), "finished": {}, "cache_capacity": 100}
        return EngineStats(**{**plain, **self._counts})


def read(metrics: Metrics) -> Page:
    families = text_string_to_metric_families(metrics.page()[1].decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


class Queries:
    """Evaluates the forms of ``QUERIES`` over two pages."""

    def __init__(self, before: Page, after: Page) -> None:
        self._before, self._after = before, after

    def select(self, text: str, change: Callable[[float, float], float]) -> Page:
        """Return the samples of a selector, changed from (before, after)."""
        name, wanted = re.fullmatch(r'([\w:]+)\{model_name="(\w+)"\}', text.strip()).groups()
        found = {
            key: change(self._before.get(key, 0.0), value)
            for key, value in self._after.items()
            if key[0] == name and ("model_name", wanted) in key[1]
        }
        assert found, f"no sample of {text}"
        return found

    def total(self, text: str) -> float:
        """Return the value of a rate, an increase or a plain selector."""
        match = re.fullmatch(r"(rate|increase)\((.*)\[1m\]\)", text.strip())
        if match is None:
            return sum(self.select(text, lambda before, after: after).values())
        seconds = SECONDS if match[1] == "rate" else 1.0
        return sum(self.select(match[2], lambda old, new: (new - old) / seconds).values())

    def value(self, query: str) -> float:
        if match := re.fullmatch(
            r"histogram_quantile\(([\d.]+), sum by\(le\) \(rate\((.*)\[1m\]\)\)\)", query
        ):
            return self._quantile(float(match[1]), match[2])
        if match := re.fullmatch(r"sum by\(\w+\) \((.*)\)", query):
            return self.total(match[1])
        parts = [self.total(part) for part in query.split(" / ")]
        if len(parts) == 2:
            return parts[0] / parts[1] if parts[1] else math.nan
        return parts[0]

    def _quantile(self, q: float, selector: str) -> float:
        found = self.select(selector, lambda before, after: after - before)
        buckets = sorted((float(dict(labels)["le"]), n) for (_, labels), n in found.items())
        rank, (low, below) = q * buckets[-1][1], (0.0, 0.0)
        for high, count in buckets:
            if count >= rank and count > below:
                if math.isinf(high):
                    return low
                return low + (high - low) * (rank - below) / (count - below)
            low, below = high, count
        return math.nan


def test_the_dashboard_of_vllm_has_its_answers():
    metrics, counts = Metrics(NAME), {"running": 3, "waiting": 2, "cache_tokens": 40}
    metrics.watch(Engine(counts))
    before = read(metrics)
    for seconds in (0.2, 0.4, 0.6, 0.8):
        for name in ("queue", "prefill", "ttft", "itl", "decode", "e2e"):
            metrics.observe(name, seconds)
        metrics.sized(100, 20, 50)
        metrics.wrote(20)
        metrics.ended("stop")
    counts |= {"prompt_tokens": 400, "prefix_hit_tokens": 100}
    queries = Queries(before, read(metrics))
    values = {query: queries.value(query) for query in QUERIES}
    assert all(math.isfinite(value) for value in values.values())
    for query, value in values.items():
        for name in ("e2e", "queue", "prefill", "decode"):
            if query.startswith("rate") and f"_{name}_" in query.replace(":", "_"):
                assert value == pytest.approx(0.5), query  # the mean of the four
    for name, value in (
        (f"vllm:num_requests_running{SELECTED}", 3),
        (f"vllm:num_requests_waiting{SELECTED}", 2),
        (f"vllm:num_requests_swapped{SELECTED}", 0),
        (f"vllm:kv_cache_usage_perc{SELECTED}", 0.4),
        (f"rate(vllm:prompt_tokens_total{SELECTED}[1m])", 40),
        (f"rate(vllm:generation_tokens_total{SELECTED}[1m])", 8),
        (f"sum by(finished_reason) (increase(vllm:request_success_total{SELECTED}[1m]))", 4),
        (QUERIES[-1], 0.25),
        (QUERIES[-1].replace("hits", "queries"), 1),
    ):
        assert queries.value(name) == pytest.approx(value), name
    [half] = [v for q, v in values.items() if q.startswith("histogram_quantile(0.5") and "e2e" in q]
    assert 0.3 < half < 0.7, "between the second and the third, up to a bucket"

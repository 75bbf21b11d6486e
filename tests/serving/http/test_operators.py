"""What operators use: metrics under vLLM's names, keys with limits, probes."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn")

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import keys
from jaxllama.serving.api.keys import ApiKey, Quotas
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, client, error_of, serving, wait_until

# The queries of vLLM's own dashboard (examples/online_serving/prometheus_grafana), each selector.
SELECTORS = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:time_per_output_token_seconds_bucket vllm:time_per_output_token_seconds_sum
vllm:time_per_output_token_seconds_count vllm:inter_token_latency_seconds_bucket
vllm:num_requests_running vllm:num_requests_swapped vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
vllm:time_to_first_token_seconds_count vllm:gpu_cache_usage_perc vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_max_num_generation_tokens_sum
""".split()
BODY = {"model": NAME, "prompt": "abc", "max_tokens": 4, "ignore_eos": True}


def samples_of(http):
    page = http.get("/metrics").text
    return [s for family in text_string_to_metric_families(page) for s in family.samples]


def test_the_queries_of_vllms_dashboard_find_their_series(lm, engine):
    with serving(lm, engine) as url, client(url) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        samples = samples_of(http)
        assert [http.get(path).json() for path in ("/live", "/ready")] == [{"status": "ok"}] * 2
    theirs = [s for s in samples if s.name.startswith("vllm:")]
    assert all(s.labels["model_name"] == "model" for s in theirs)
    names = {s.name for s in theirs}
    assert not set(SELECTORS) - names, set(SELECTORS) - names
    ours = {s.name: s.value for s in samples if not s.labels}
    value = {s.name: s.value for s in theirs if set(s.labels) == {"model_name"}}
    assert value["vllm:generation_tokens_total"] == ours["jaxllama_completion_tokens_total"]
    assert value["vllm:request_generation_tokens_sum"] == 4
    assert value["vllm:request_prompt_tokens_sum"] == 3
    assert value["vllm:request_max_num_generation_tokens_sum"] == 4
    reasons = {s.labels["finished_reason"]: s.value for s in theirs if "request_success" in s.name}
    assert reasons["length"] >= 1
    bounds = [s.labels["le"] for s in theirs if s.name == "vllm:request_prompt_tokens_bucket"]
    assert bounds[-1] == "+Inf" and float(bounds[0]) == 1


FILE = """
[[key]]
name = "small"
key = "one-key"
requests_per_minute = 2

[[key]]
name = "large"
key = "other-key"
tokens_per_minute = 6
"""


def test_each_key_has_its_own_limits(lm, engine, tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    named = keys.read(tmp_path / "keys.toml")
    with serving(lm, engine, named_keys=named) as url, client(url) as http:

        def ask(key):
            return http.post(
                "/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}
            )

        assert [ask("one-key").status_code for _ in range(3)] == [200, 200, 429]
        refused = ask("one-key")
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        assert error_of(refused)["message"] == "this key may use 2 requests a minute"
        assert 25 <= int(refused.headers["retry-after"]) <= 31
        assert ask("other-key").status_code == 200  # 7 tokens: the bucket is at -1
        refused = ask("other-key")
        assert error_of(refused)["message"] == "this key may use 6 tokens a minute"
        assert ask("no-key").status_code == 401
        header = {"Authorization": "Bearer one-key"}
        assert http.get("/v1/models", headers=header).status_code == 200
        assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("how", ["stream", "whole", "background", "stopped"])
def test_tokens_count_whoever_ends_the_answer(lm, monkeypatch, how):
    """A client that leaves, a response in the background that is cancelled, a stop string."""
    named, used = (ApiKey("k", "n", tokens_per_minute=1000),), []
    monkeypatch.setattr(Quotas, "used", lambda quotas, owner, tokens: used.append(tokens))
    with (
        FakeEngine(answer=lambda request: itertools.repeat(97)) as engine,
        serving(lm, engine, named_keys=named) as url,
        client(url) as http,
    ):
        http.headers["Authorization"] = "Bearer k"

        body = {"model": NAME, "prompt": "abc", "max_tokens": 60, "n": 2, "ignore_eos": True}
        with engine.held(5):
            if how == "background":
                asked = {"model": NAME, "input": "abc", "max_output_tokens": 60, "background": True}
                begun = http.post("/v1/responses", json=asked).json()
                assert engine.wait_for(lambda: [r.written for r in engine.live.values()] == [5])
                http.post(f"/v1/responses/{begun['id']}/cancel")
            elif how == "stopped":
                http.post("/v1/completions", json={**body, "n": 1, "stop": "aaa"})
            else:
                with contextlib.suppress(httpx.ReadTimeout):
                    asked = {**body, "stream": how == "stream"}
                    with http.stream("POST", "/v1/completions", json=asked, timeout=0.5):
                        assert engine.wait_for(
                            lambda: [r.written for r in engine.live.values()] == [5, 5]
                        )
            [prompt, *_] = [len(request.prompt) for request in engine.requests]
            wait_until(lambda: sum(used) == prompt + {"background": 5, "stopped": 3}.get(how, 10))


def test_a_library_s_warning_is_a_line_of_the_log():
    code = """
import logging.config
from jaxllama.serving import logs
logging.config.dictConfig(logs.configuration())
logging.getLogger("python_multipart").warning("Skipping data after last boundary")
"""
    # A process of its own: a configuration closes the handlers of those before it, pytest's too.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = json.loads(ended.stderr)
    assert line["event"] == "Skipping data after last boundary" and line["level"] == "warning"


def test_buckets_fill_again():
    now = [0.0]
    key = ApiKey("k", "n", requests_per_minute=2, tokens_per_minute=60)
    quotas = Quotas([key], lambda: now[0])
    assert quotas.admit(key.owner) is None and quotas.admit(key.owner) is None
    refused = quotas.admit(key.owner)
    assert (refused.limit, refused.value, refused.seconds) == ("requests_per_minute", 2, 30)
    now[0] = 30
    assert quotas.admit(key.owner) is None
    quotas.used(key.owner, 90)
    now[0] = 60
    refused = quotas.admit(key.owner)  # from -30 to 0 in the half minute
    assert (refused.limit, round(refused.seconds, 6)) == ("tokens_per_minute", 1)
    assert quotas.admit("another owner") is None
    quotas.used("another owner", 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one or more"),
        ("x = 1", "one or more"),
        ("[[key]]\nname = 'a'", "number 1: key"),
        ("[[key]]\nname = 'a'\nkey = 'b'\nlimit = 3", "limit"),
        ("[[key]]\nname = 'a'\nkey = 'b'\ntokens_per_minute = 0", "tokens_per_minute = 0"),
        ("[[key]]\nname = 'a'\nkey = 'b'\n[[key]]\nname = 'c'\nkey = 'b'", "twice"),
        ("[[key]", "keys.toml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, words):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(JaxLlamaError, match=re.escape(words)):
        keys.read(tmp_path / "keys.toml")

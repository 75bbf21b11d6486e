"""``jaxllama serve`` and ``jaxllama bench serve`` as processes: kill -9, restart, SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

import httpx2 as httpx

from jaxllama.cli import serve as server
from jaxllama.cli.main import main, parser
from jaxllama.engine.journal import Journal
from jaxllama.engine.options import EngineOptions
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed.load_generator import Lengths
from jaxllama.serving.http import process as server_process
from tests.helpers.http_server import client, serve, tiny_checkpoint, wait_until
from tests.helpers.models import HYBRIDS

# Long enough that a signal arrives in the middle.
LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 600, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("serve"))


def first_chunks(lines: Iterator[str], count: int) -> list[dict]:
    data = (line[6:] for line in lines if line.startswith("data: "))
    return [json.loads(next(data)) for _ in range(count)]


def tokens_of(chunks: list[dict]) -> list[str]:
    return [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]


SIZES = ("--max-slots", "1", "--max-len", "1024", "--deterministic")


@pytest.mark.slow
def test_killed_and_restarted(folder):
    state = ("--state", str(folder / "killed"))
    with serve(folder, *SIZES, *state) as (process, url, _), client(url) as http:
        ask = http.stream("POST", "/v1/completions", json={**LONG, "stream": True})
        with contextlib.suppress(httpx.HTTPError), ask as reply:
            lines = reply.iter_lines()
            began = first_chunks(lines, 3)
            process.send_signal(signal.SIGKILL)
            assert "data: [DONE]" not in list(lines), "killed too late"
        assert process.wait(60) == -signal.SIGKILL
    call_id = began[0]["id"]
    with serve(folder, *SIZES, *state) as (_, url, _), client(url) as http:
        answer = http.get(f"/v1/completions/{call_id}").json()
        [choice] = answer["choices"]
        tokens = choice["logprobs"]["tokens"]
        assert len(tokens) == LONG["max_tokens"] and choice["finish_reason"] == "length"
        sent = tokens_of(began)
        assert sent and tokens[: len(sent)] == sent, "what the killed server had said stands"
        assert "\njaxllama_compilations_total 0.0\n" in http.get("/metrics").text


def test_asked_measured_drained(folder, capsys):
    names = ("--served-model-name", "tiny", "--served-model-name", "other")
    names += ("--allowed-origin", "https://page", "--state", str(folder / "state"))
    with serve(folder, *SIZES, *names) as (process, url, log), client(url) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
        asked = http.get("/health", headers={"Origin": "https://page"})
        assert asked.headers["access-control-allow-origin"] == "https://page"
        words = ["bench", "serve", "--url", url, "--requests", "6", "--rate", "50", "--json"]
        words += ["--prompt-tokens", "2:9", "--new-tokens", "~4", "--goodput", "ttft=60"]
        assert main(words) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["requests"], report["answered"], report["failed"]) == (6, 6, 0)
        assert report["goodput_share"] == 1
        assert report["e2e_s"]["p50"] >= report["ttft_s"]["p50"] > 0
        assert report["output_tokens"] == sum(Lengths("~4").draw(*_drawn(6)))

        names = (
            "time_to_first_token_seconds_count 6.0",
            "queue_seconds_count 6.0",
            "slots 1.0",
            "requests_running 0.0",
        )
        until = time.monotonic() + 20  # the engine's counts come a step behind its last answer
        while True:
            page = http.get("/metrics").text
            missing = [name for name in names if f"\njaxllama_{name}\n" not in page]
            if not missing or time.monotonic() > until:
                break
            time.sleep(0.05)
        assert not missing
        assert float(re.search(r"jaxllama_inter_token_seconds_count (.*)\n", page)[1]) > 0

        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
            lines = reply.iter_lines()
            first_chunks(lines, 1)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]", "what was in flight is answered"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
        with pytest.raises(httpx.HTTPError):
            http.get("/health")
        logged = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [line for line in logged if line["event"] == "request"]
    assert {line["outcome"] for line in lines if "outcome" in line} == {"answered"}
    assert all({"time", "level", "request_id", "status", "seconds"} <= set(line) for line in lines)
    assert "Once" not in log.read_text(), "prompts are not logged"


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_killed_server_of_delta_layers_repeats_its_answer(family, tmp_path):
    """Its successor answers to the last bit, with its prefix cache empty and known."""
    body = {**LONG, "seed": 1}
    folder = tiny_checkpoint(tmp_path, HYBRIDS[family].replace(vocab_size=264))
    flags = (
        "--max-slots",
        "2",
        "--max-len",
        "1024",
        "--deterministic",
        "--state",
        str(tmp_path / "s"),
    )
    with serve(folder, *flags) as (process, url, _), client(url) as http:
        ask = http.stream("POST", "/v1/completions", json={**body, "stream": True})
        with contextlib.suppress(httpx.HTTPError), ask as reply:
            # The stream closes with this iterator, and the server would cancel the call.
            lines = reply.iter_lines()
            began = first_chunks(lines, 3)
            process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    with serve(folder, *flags) as (_, url, _), client(url) as http:
        found = http.get(f"/v1/completions/{began[0]['id']}").json()
        again = http.post("/v1/completions", json=body).json()
    assert "choices" in found, found
    [choice] = found["choices"]
    assert choice["logprobs"]["tokens"][: len(tokens_of(began))] == tokens_of(began)
    assert [choice] == again["choices"]


def test_flags_are_the_options_of_the_server_and_its_engine(monkeypatch):
    told = []
    monkeypatch.setattr(server_process, "serve", lambda options, load: told.append(options))
    monkeypatch.setattr(server, "take_memory", lambda: None)
    flags = [
        "--max-slots",
        "2",
        "--max-len",
        "128",
        "--served-model-name",
        "one",
        "--served-model-name",
        "other",
        "--allowed-origin",
        "https://page",
        "--prefill-rows",
        "1",
        "--token-budget",
        "32",
        "--cache-tokens",
        "200",
        "--memory-share",
        "0.5",
        "--page-size",
        "8",
        "--no-prefix-cache",
        "--steps-per-call",
        "2",
        "--draft",
        "ngram",
        "--draft-tokens",
        "3",
        "--kv-dtype",
        "fp8",
        "--host-cache-gb",
        "100.5",
        "--disk-cache",
        "prefixes",
        "--disk-cache-gb",
        "9",
        "--api-servers",
        "3",
        "--drain-timeout",
        "4",
    ]
    assert main(["serve", *flags]) == 0
    [options] = told
    draft = options.engine.pop("draft")
    assert draft(None) == "ngram"
    assert options.engine == {
        "max_slots": 2,
        "max_len": 128,
        "prefill_rows": 1,
        "token_budget": 32,
        "cache_tokens": 200,
        "memory_share": 0.5,
        "page_size": 8,
        "prefix_cache": False,
        "steps_per_call": 2,
        "host_cache_gb": 100.5,
        "disk_cache": "prefixes",
        "disk_cache_gb": 9.0,
        "draft_tokens": 3,
        "kv_dtype": "float8_e4m3fn",
    }
    assert (options.names, options.origins) == (("one", "other"), ("https://page",))
    assert (options.api_servers, options.drain_timeout) == (3, 4)


def test_every_engine_option_is_a_flag():
    """Under the same name, and shown: an older name is hidden. Clients that load adapters need a
    server."""
    only_served = {"lora_slots", "max_lora_rank"}
    for command in ("serve", "batch"):
        shown = commands_of(command).format_help()
        for field in dataclasses.fields(EngineOptions):
            name = field.name.replace("_", "-")
            if command == "batch" and field.name in only_served:
                assert f"--{name}" not in shown
                continue
            assert f"--{name} " in shown or f"--no-{name} " in shown or f"--{name}\n" in shown
        assert "--slots" not in shown and "--chunk" not in shown


def commands_of(name: str):
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices[name]


def test_a_line_says_what_the_engine_does(monkeypatch, caplog):
    """Every so often, and not where nothing happened."""
    monkeypatch.setattr(server_process, "INTERVAL", 0.01)
    none = dict.fromkeys((field.name for field in dataclasses.fields(EngineStats)), 0)
    first = EngineStats(**{**none, "cache_capacity": 100, "finished": {}})
    busy = dataclasses.replace(
        first,
        steps=5,
        prompt_tokens=80,
        prefix_hit_tokens=20,
        completion_tokens=40,
        running=3,
        waiting=1,
        cache_tokens=50,
    )
    lost = dataclasses.replace(busy, steps=6, cache_tokens=0, cache_capacity=0)  # all replicas
    told = iter([first, busy, *[lost] * 1000])

    async def watch():
        task = asyncio.create_task(server_process.report(SimpleNamespace(stats=lambda: next(told))))
        await asyncio.sleep(0.2)
        task.cancel()

    with caplog.at_level("INFO", "jaxllama.serving"):
        asyncio.run(watch())
    line, last = (r.fields for r in caplog.records if r.message == "throughput")
    assert (line["running"], line["waiting"], line["cache_share"]) == (3, 1, 0.5)
    assert line["prefix_hit_share"] == 0.25 and last["cache_share"] == 0
    assert line["prompt_tokens_per_s"] == pytest.approx(2 * line["output_tokens_per_s"], rel=0.01)


CHILD = str(Path(__file__).parents[1] / "helpers" / "serve_child.py")


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_process_after_telling_everybody(folder):
    """With status 1, so that a supervisor starts it again."""
    with (
        serve(folder, "--max-slots", "1", "--max-len", "2048", program=(CHILD, "step")) as served,
        client(served[1]) as http,
        ThreadPoolExecutor(3) as pool,
    ):
        process, _, log = served
        streamed = pool.submit(http.post, "/v1/completions", json={**LONG, "stream": True})
        others = [pool.submit(http.post, "/v1/completions", json=LONG) for _ in range(2)]
        last = [line for line in streamed.result().text.split("\n\n") if line][-1]
        # An event of its stream; or its whole answer, where the others came first.
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        for other in others:
            assert other.result().status_code == 503
            assert "the device is gone" in other.result().json()["error"]["message"]
        assert process.wait(60) == 1
        *logged, error = log.read_text().splitlines()
    assert error == "error: the engine failed: RuntimeError: the device is gone"
    assert any("Traceback" in json.loads(line).get("exception", "") for line in logged)


@pytest.mark.slow
def test_an_engine_that_stalls_fails_the_probe_and_ends_with_sigterm(folder):
    """The process answers, so a supervisor learns of it from /live alone."""
    flags = ("--max-slots", "1", "--max-len", "2048", "--drain-timeout", "1")
    with (
        serve(folder, *flags, program=(CHILD, "stall")) as (process, url, log),
        client(url) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        assert http.get("/live").status_code == 200
        asked = pool.submit(http.post, "/v1/completions", json=LONG)
        wait_until(lambda: http.get("/live").status_code == 503)
        assert "the engine hangs: its step has not ended" in http.get("/live").json()["status"]
        assert http.get("/ready").status_code == 503
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1 and time.monotonic() - began < 30
        assert asked.result().status_code == 503
        assert log.read_text().splitlines()[-1].endswith("thread jaxllama-engine does not end")


@pytest.mark.slow
def test_embeddings_end_with_the_drain_timeout(folder):
    flags = ("--max-slots", "1", "--max-len", "2048", "--drain-timeout", "1")
    with (
        serve(folder, *flags, program=(CHILD, "embedding")) as (process, url, _),
        client(url) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        body = {"model": "tiny", "input": ["word"] * 600}  # 300 s of work
        reply = pool.submit(http.post, "/v1/embeddings", json=body)
        assert http.post("/v1/embeddings", json={**body, "input": "word"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(60) == 0
        assert time.monotonic() - began < 1 + 5
        assert (reply.result().status_code, reply.result().headers["retry-after"]) == (503, "1")


def _drawn(count: int):
    """What the load generator has drawn before the answers' lengths."""
    rng = np.random.default_rng(0)
    Lengths("2:9").draw(rng, count)
    return rng, count


OFFLOADED = ["--policy", "0 100 100 0 100 0"]
RAY = ["--ray", "auto", "--hosts-per-replica", "2"]
TINY = ["--model", "{tiny}", "--port", "0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*OFFLOADED, "--replicas", "2"], "--replicas: an offloaded"),
        ([*OFFLOADED, "--mesh", "model=1", *TINY], "--policy and --mesh exclude each other"),
        (
            [*OFFLOADED, "--max-slots", "3", *TINY],
            "max_slots = 3: with a policy the slots are the 8 rows",
        ),
        (["--chunk", "64", "--max-len", "32", *TINY], "prefill_chunk = 64: exceeds max_len = 32"),
        (["--slots", "0", *TINY], "--slots = 0"),
        (["--mesh", "model=2", *TINY], "model=2: needs 2 devices"),
        (["--host", "256.0.0.1"], "cannot listen on http://256.0.0.1:8000"),
        (["--state", "{tiny}/config.json", *TINY], "--state"),
        (["--max-replicas", "2"], "--max-replicas needs --ray"),
        (["--hosts-per-replica", "2"], "--hosts-per-replica needs --ray"),
        (["--ray", "auto", "--api-servers", "2"], "--api-servers: on a Ray cluster"),
        (["--ray", "auto", "--lora-slots", "2"], "--lora-slots: engines on a Ray cluster"),
        ([*RAY, "--mesh", "model=3"], "--hosts-per-replica = 2: --mesh has 3 devices"),
        (["--ray", "auto", "--replicas", "3", "--max-replicas", "2"], "--max-replicas = 2: fewer"),
    ],
)
def test_what_cannot_be_served_is_one_line(words, message, folder, capsys, monkeypatch):
    """``test_options`` has what is wrong whatever the model is."""
    idle = SimpleNamespace(kill=lambda: None)
    monkeypatch.setattr(server_process.front_end, "start", lambda listener: idle)
    words = [word.replace("{tiny}", str(folder / "tiny")) for word in words]
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_nobody_listens(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 2
    assert url.removeprefix("http://") in capsys.readouterr().err


def test_a_second_server_does_not_take_the_state(tmp_path):
    first = Journal(tmp_path)
    first.accept("a", "chat", 1, "{}")
    with pytest.raises(JaxLlamaError, match="another server uses this folder"):
        Journal(tmp_path)
    first.close()
    again = Journal(tmp_path)
    assert [accepted.id for accepted in again.unfinished()] == ["a"]
    again.finish("a", "{}")
    again.finish("a", '{"error": 1}')
    assert again.find("a").text == "{}" and again.unfinished() == [], "answered once"
    again.close()


def test_lengths_follow_their_words():
    rng = np.random.default_rng(1)
    assert set(Lengths("7").draw(rng, 50)) == {7}
    assert set(Lengths("2:4").draw(rng, 200)) == {2, 3, 4}
    drawn = np.array(Lengths("~100").draw(rng, 20_000))
    # A log-normal of sigma 1 has mean 100 by construction; cutting at 8 x takes 2.5% off.
    assert 92 < drawn.mean() < 101 and drawn.min() >= 1 and drawn.max() <= 800

"""``jaxllama serve`` and ``jaxllama bench serve`` as processes: kill -9, restart, SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

import httpx2 as httpx

from jaxllama.bench.load_generator import Lengths
from jaxllama.cli.main import main, parser
from jaxllama.serving.engine.options import EngineOptions
from jaxllama.serving.engine.stats import Stats
from jaxllama.serving.http import process as server_process
from tests.helpers.http_server import client, serve, tiny_checkpoint
from tests.helpers.models import LLAMA

CFG = LLAMA.replace(vocab_size=260)
# Long enough that a signal arrives in the middle.
LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("serve"), CFG)


def first_chunks(lines: Iterator[str], count: int) -> list[dict]:
    data = (line[6:] for line in lines if line.startswith("data: "))
    return [json.loads(next(data)) for _ in range(count)]


def tokens_of(chunks: list[dict]) -> list[str]:
    return [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]


def test_killed_restarted_drained(folder, capsys):
    state = ("--state", str(folder / "state"))
    with (
        serve(folder, "--max-slots", "1", "--max-len", "2048", *state) as (process, url, _),
        client(url) as http,
    ):
        ask = http.stream("POST", "/v1/completions", json={**LONG, "stream": True})
        with contextlib.suppress(httpx.HTTPError), ask as reply:
            lines = reply.iter_lines()
            began = first_chunks(lines, 3)
            process.send_signal(signal.SIGKILL)
            assert "data: [DONE]" not in list(lines), "killed too late"
        assert process.wait(60) == -signal.SIGKILL
    call_id = began[0]["id"]

    with (
        serve(folder, "--max-slots", "1", "--max-len", "2048", *state) as (process, url, log),
        client(url) as http,
    ):
        answer = http.get(f"/v1/completions/{call_id}").json()
        [choice] = answer["choices"]
        tokens = choice["logprobs"]["tokens"]
        assert len(tokens) == LONG["max_tokens"] and choice["finish_reason"] == "length"
        sent = tokens_of(began)
        assert sent and tokens[: len(sent)] == sent, "what the killed server had said stands"

        words = ["bench", "serve", "--url", url, "--requests", "6", "--rate", "50", "--json"]
        words += ["--prompt-tokens", "2:9", "--new-tokens", "~4", "--goodput", "ttft=60"]
        assert main(words) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["requests"], report["answered"], report["failed"]) == (6, 6, 0)
        assert report["goodput_share"] == 1
        assert report["e2e_s"]["p50"] >= report["ttft_s"]["p50"] > 0
        assert report["output_tokens"] == sum(Lengths("~4").draw(*_drawn(6)))

        page = http.get("/metrics").text
        for name in ("time_to_first_token_seconds_count 7.0", "queue_seconds_count 7.0",
                     "compilations_total 0.0", "slots 1.0", "requests_running 0.0"):  # fmt: skip
            assert f"\njaxllama_{name}\n" in page
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


@pytest.mark.parametrize(
    "draft", ["ngram", pytest.param("{}/tiny:layers=1", marks=pytest.mark.slow)]
)
def test_names_origins_and_engine_options(folder, draft):
    flags = ["--max-slots", "2", "--max-len", "128", "--served-model-name", "tiny",
             "--served-model-name", "other", "--allowed-origin", "https://page",
             "--prefill-rows", "1", "--token-budget", "32", "--cache-tokens", "200",
             "--memory-share", "0.5", "--page-size", "8", "--no-prefix-cache",
             "--steps-per-call", "2", "--draft", draft.format(folder),
             "--draft-tokens", "3"]  # fmt: skip
    with serve(folder, *flags) as (_, url, _), client(url) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
        ask = {"model": "other", "prompt": "ab", "max_tokens": 2}
        reply = http.post("/v1/completions", json=ask, headers={"Origin": "https://page"})
        assert reply.json()["model"] == "other"
        assert reply.headers["access-control-allow-origin"] == "https://page"
        page = http.get("/metrics").text
        assert "jaxllama_cache_pages 25.0" in page
        assert "jaxllama_cache_capacity_tokens 200.0" in page
        ask = {"prompt": "abcabcabc", "max_tokens": 2}
        http.post("/v1/completions", json={"model": "tiny", **ask}).raise_for_status()
        page = http.get("/metrics").text
        told = re.findall(r"^jaxllama_(?:drafted|accepted)_tokens_total (.*)$", page, re.M)
        # One of two tokens may be a draft's; n-grams find none in the first text.
        assert float(told[0]) == (1 if draft == "ngram" else 2) >= float(told[1])


def test_an_offloaded_model_is_served(folder):
    """Rows that come together run together; what it cannot do is said."""
    policy = "0 100 0 100 0 100 gpu_batch_size=2 num_gpu_batches=2"
    flags = ["--max-len", "128", "--policy", policy]
    with serve(folder, *flags) as (_, url, _), client(url) as http:

        def ask(path="completions", **body) -> httpx.Response:
            body = {"prompt": "ab", "max_tokens": 6, "ignore_eos": True, "temperature": 0} | body
            return http.post(f"/v1/{path}", json={"model": "tiny", **body})

        bodies = [{"prompt": "ab"}, {"prompt": "xyz"}, {"n": 2, "logprobs": 0, "seed": 1}]
        with ThreadPoolExecutor(3) as pool:
            first, *others = pool.map(lambda body: ask(**body).json(), bodies)
        assert [c["finish_reason"] for c in others[1]["choices"]] == ["length"] * 2, others
        again = ask(stream=True).text
        chunks = [json.loads(line[6:]) for line in again.split("\n\n")[:-2]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == first["choices"][0]["text"] and len(chunks) > 1
        for refused, words in (
            ({"guided_regex": "a+"}, "grammar = "),
            ({"logprobs": 2}, "logprobs = 2"),
            ({"echo": True, "logprobs": 0, "max_tokens": 0}, "the model is offloaded"),
        ):
            reply = ask(**refused)
            assert reply.status_code == 400 and words in reply.json()["error"]["message"], refused
        assert "jaxllama_completion_tokens_total 30.0" in http.get("/metrics").text


def test_every_engine_option_is_a_flag():
    """Under the same name, and shown: an older name is hidden."""
    for command in ("serve", "batch"):
        shown = commands_of(command).format_help()
        for field in dataclasses.fields(EngineOptions):
            name = field.name.replace("_", "-")
            assert f"--{name} " in shown or f"--no-{name} " in shown or f"--{name}\n" in shown
        assert "--slots" not in shown and "--chunk" not in shown


def commands_of(name: str):
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices[name]


def test_a_line_says_what_the_engine_does(monkeypatch, caplog):
    """Every so often, and not where nothing happened."""
    monkeypatch.setattr(server_process, "INTERVAL", 0.01)
    none = dict.fromkeys((field.name for field in dataclasses.fields(Stats)), 0)
    first = Stats(**{**none, "cache_capacity": 100, "finished": {}})
    busy = dataclasses.replace(first, steps=5, prompt_tokens=80, prefix_hit_tokens=20,
                               completion_tokens=40, running=3, waiting=1,
                               cache_tokens=50)  # fmt: skip
    told = iter([first, busy, *[busy] * 1000])

    async def watch():
        task = asyncio.create_task(server_process.report(SimpleNamespace(stats=lambda: next(told))))
        await asyncio.sleep(0.2)
        task.cancel()

    with caplog.at_level("INFO", "jaxllama.serving"):
        asyncio.run(watch())
    [line] = [record.fields for record in caplog.records if record.message == "throughput"]
    assert (line["running"], line["waiting"], line["cache_share"]) == (3, 1, 0.5)
    assert line["prefix_hit_share"] == 0.25
    assert line["prompt_tokens_per_s"] == pytest.approx(2 * line["output_tokens_per_s"], rel=0.01)


CHILD = str(Path(__file__).parents[1] / "helpers" / "serve_child.py")


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
    import numpy as np

    rng = np.random.default_rng(0)
    Lengths("2:9").draw(rng, count)
    return rng, count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--policy", "0 100 100 0 100 0", "--replicas", "2"], "--replicas: an offloaded"),
        (
            [
                "serve",
                "--policy",
                "0 100 100 0 100 0",
                "--mesh",
                "model=1",
                "--model",
                "{tiny}",
                "--port",
                "0",
            ],
            "--policy and --mesh exclude each other",
        ),
        (
            [
                "serve",
                "--policy",
                "0 100 100 0 100 0",
                "--max-slots",
                "3",
                "--model",
                "{tiny}",
                "--port",
                "0",
            ],
            "max_slots = 3: the policy has 8 rows of a block",
        ),
        (
            ["serve", "--chunk", "64", "--max-len", "32", "--model", "{tiny}", "--port", "0"],
            "prefill_chunk = 64: exceeds max_len = 32",
        ),
        (["serve", "--port", "70000"], "--port = 70000: must be at least 0 and at most 65535"),
        (["serve", "--max-slots", "0", "--model", "{tiny}", "--port", "0"], "--max-slots = 0"),
        (["serve", "--slots", "0", "--model", "{tiny}", "--port", "0"], "--slots = 0"),
        (
            ["serve", "--mesh", "model=2", "--model", "{tiny}", "--port", "0"],
            "model=2: needs 2 devices",
        ),
        (["serve", "--api-key", "a b "], "--api-key: must be printable ASCII"),
        (["serve", "--host", "256.0.0.1"], "cannot listen on http://256.0.0.1:8000"),
        (["serve", "--state", "{tiny}/config.json", "--model", "{tiny}", "--port", "0"], "--state"),
        (["bench", "serve", "--url", "ftp://x"], "'ftp://x' is no http:// or https:// address"),
        (["bench", "serve", "--prompt-tokens", "9:2"], "'9:2' is no length"),
        (["bench", "serve", "--goodput", "ttft"], "expected KEY=SECONDS"),
        (["bench", "serve", "--goodput", "x=1"], "allowed are ttft, tpot, e2e"),
        (["bench", "serve", "--requests", "0"], "--requests = 0"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, folder, capsys):
    assert main([word.replace("{tiny}", str(folder / "tiny")) for word in words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_nobody_listens(capsys):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["bench", "serve", "--url", url]) == 2
    assert url.removeprefix("http://") in capsys.readouterr().err


def test_a_second_server_does_not_take_the_state(tmp_path):
    from jaxllama.errors import JaxLlamaError
    from jaxllama.serving.journal import Journal

    first = Journal(tmp_path)
    first.accept("a", "chat", 1, "{}")
    with pytest.raises(JaxLlamaError, match="locked"):
        Journal(tmp_path)
    first.close()
    again = Journal(tmp_path)
    assert [accepted.id for accepted in again.unfinished()] == ["a"]
    again.finish("a", "{}")
    again.finish("a", '{"error": 1}')
    assert again.find("a").text == "{}" and again.unfinished() == [], "answered once"
    again.close()


def test_lengths_follow_their_words():
    import numpy as np

    rng = np.random.default_rng(1)
    assert set(Lengths("7").draw(rng, 50)) == {7}
    assert set(Lengths("2:4").draw(rng, 200)) == {2, 3, 4}
    drawn = np.array(Lengths("~100").draw(rng, 20_000))
    # A log-normal of sigma 1 has mean 100 by construction; cutting at 8 x takes 2.5% off.
    assert 92 < drawn.mean() < 101 and drawn.min() >= 1 and drawn.max() <= 800

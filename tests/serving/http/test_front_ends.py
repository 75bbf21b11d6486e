"""Several front ends of one engine, as processes: one port, one journal, one count; what dies."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

import httpx2 as httpx

from tests.helpers.http_server import children, client, serve, tiny_checkpoint, wait_until

SHORT = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "seed": 1, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 500}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("front-ends"))


def counted(http: httpx.Client, name: str) -> float:
    page = http.get("/metrics").text
    found = re.findall(rf"^jaxllama_{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def streamed(url: str, body: dict, began: threading.Event | None = None, **headers) -> list[dict]:
    """The chunks of a stream, the last one perhaps an error; what broke off ends early."""
    chunks: list[dict] = []
    try:
        with (
            client(url) as http,
            http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
            ) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line[6:]))
                    if began is not None:
                        began.set()
    except httpx.HTTPError:
        pass
    return chunks


def text_of(chunks: list[dict]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def is_whole(chunks: list[dict]) -> bool:
    return chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_front_ends_share_all_and_die_alone(folder):
    flags = (
        "--max-slots",
        "4",
        "--max-len",
        "1024",
        "--deterministic",
        "--api-servers",
        "2",
        "--state",
        str(folder / "state"),
    )
    with serve(folder, *flags) as (process, url, log), client(url) as http:
        assert len(pids := children(process.pid)) == 2
        # One count and one space of ids, whichever front end is asked.
        with ThreadPoolExecutor(8) as pool:
            ask = {**SHORT, "stop": ["\0\0\0"]}
            texts = list(pool.map(lambda n: text_of(streamed(url, ask)), range(16)))
            replies = list(pool.map(lambda n: _post(url, SHORT, "same"), range(8)))
        assert len(set(texts)) == 1
        ids = [reply["id"] for reply in replies]
        assert len(set(ids)) == 8 and "cmpl-same" in ids
        assert counted(http, "completion_tokens_total") == 24 * 8
        assert counted(http, "requests_finished_total") == 24
        assert counted(http, "http_requests_total") >= 24
        for reply in replies:
            with client(url) as other:
                assert other.get(f"/v1/completions/{reply['id']}").json() == reply
        said = http.post(
            "/v1/responses", json={"model": "tiny", "input": "a", "max_output_tokens": 2}
        ).json()
        for _ in range(6):
            with client(url) as other:
                assert other.get(f"/v1/responses/{said['id']}").json() == said
        stop = {**SHORT, "max_tokens": 400, "stop": [texts[0][3:5]]}
        whole = http.post("/v1/completions", json=stop).json()
        assert whole["choices"][0]["finish_reason"] == "stop"
        kept = whole["usage"]["completion_tokens"]
        assert counted(http, "completion_tokens_total") == 24 * 8 + 2 + kept, "not one that is cut"

        # A front end that is killed takes its own streams along, and another takes its place.
        began = [threading.Event() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            streams = [
                pool.submit(streamed, url, LONG, event, **{"X-Request-Id": f"long{n}"})
                for n, event in enumerate(began)
            ]
            assert all(event.wait(60) for event in began)
            os.kill(pids[0], signal.SIGKILL)
            ended = [stream.result() for stream in streams]
        broken = [n for n, chunks in enumerate(ended) if not is_whole(chunks)]
        others = {text_of(chunks) for chunks in ended if is_whole(chunks)}
        wait_until(lambda: len(children(process.pid)) == 2 and pids[0] not in children(process.pid))
        for n in broken:  # what it owed, the next one answers
            reply = http_retry(url, f"/v1/completions/cmpl-long{n}")
            [choice] = reply["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["text"].startswith(text_of(ended[n])), "what had been said stands"
            others.add(choice["text"])
        assert len(others) == 1, "one body, one answer"
        assert text_of(streamed(url, SHORT)) == texts[0]
        [line] = [entry for entry in logged(log) if entry["event"] == "a front end has ended"]
        assert line["status"] == -signal.SIGKILL and line["cancelled"] == len(broken)

        # The engine's process dies: a clear answer, a clear line, and nobody is left.
        left = children(process.pid)
        with ThreadPoolExecutor(1) as pool:
            began = threading.Event()
            stream = pool.submit(streamed, url, LONG, began)
            assert began.wait(60)
            process.send_signal(signal.SIGKILL)
            error = stream.result()[-1]["error"]
        assert error["code"] == "engine_failed" and "engine's process has ended" in error["message"]
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
        told = collections.Counter(entry["event"] for entry in logged(log))
        assert told["the engine's process has ended"] == 2


def _post(url: str, body: dict, request_id: str) -> dict:
    with client(url) as http:
        headers = {"X-Request-Id": request_id}
        return http.post("/v1/completions", json=body, headers=headers).json()


def http_retry(url: str, path: str) -> dict:
    """A front end that is dying may have taken the connection."""
    for _ in range(50):
        try:
            with client(url) as http:
                return http.get(path).json()
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("nobody answers")


def logged(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]

"""Replicas: which one a request goes to, and two of them as a server."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.engine.request import Request
from jaxllama.serving.ipc.replicas import Flight, Replica, ReplicaChoice
from tests.helpers.http_server import client, serve, tiny_checkpoint
from tests.serving.http.test_front_ends import children, counted, streamed, text_of

BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "seed": 1, "ignore_eos": True}


def request(first: int, length: int = 70) -> Request:
    return Request(str(first), (first,) * length, 30)


class Busy:
    work = 0


def three() -> tuple[ReplicaChoice, list[Busy]]:
    some = [Busy(), Busy(), Busy()]
    return ReplicaChoice(some), some


@pytest.mark.core
def test_a_request_goes_where_the_least_is_to_do():
    choice, (a, b, c) = three()
    a.work, b.work, c.work = 300, 100, 200
    assert choice.order(request(1)) == [b, c, a]
    a.work = b.work = c.work = 0
    assert {choice.order(request(n))[0] for n in range(3)} == {a, b, c}, "in turns"


@pytest.mark.core
def test_a_request_goes_where_its_beginning_was_read_unless_that_has_too_much_to_do():
    choice, (a, b, c) = three()
    choice.remember(request(7), c)
    a.work, b.work, c.work = 0, 50, 400
    assert choice.order(request(7, 200))[0] is c, "other words behind the same 64"
    assert choice.order(request(8))[0] is a
    assert choice.order(request(7, 63))[0] is a, "too short to tell"
    c.work = 401
    assert choice.order(request(7))[0] is a, "more than four requests' work above the least"


def test_work_is_what_is_in_flight():
    one = Replica.__new__(Replica)
    one.flights = {1: Flight(request(1), print), 2: Flight(request(2, 10), print)}
    assert one.work == 70 + 30 + 10 + 30


@pytest.mark.slow
def test_two_replicas_are_one_server(tmp_path):
    folder: Path = tiny_checkpoint(tmp_path)
    flags = ("--max-slots", "2", "--max-len", "1024", "--replicas", "2")
    long = {**BODY, "prompt": "b" * 200, "max_tokens": 1}
    with (
        serve(folder, *flags) as (process, url, log),
        client(url) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        assert len(children(process.pid)) == 3, "two engines and a front end"
        want = text_of(streamed(url, BODY))
        assert {*pool.map(lambda _: text_of(streamed(url, BODY)), range(3))} == {want}
        assert counted(http, "slots") == 4
        assert counted(http, "completion_tokens_total") == 32
        assert counted(http, "requests_finished_total") == 4
        for _ in range(4):
            assert http.post("/v1/completions", json=long).json()["usage"]["prompt_tokens"] == 200
        usage = http.post("/v1/completions", json=long).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128, "where it was read before"
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 4000}).status_code == 400
        stop = {**BODY, "max_tokens": 200, "stop": [want[2:4]]}
        [choice] = http.post("/v1/completions", json=stop).json()["choices"]
        assert choice["text"] == want[: want.index(want[2:4])]
        rows = http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "a"]}).json()
        first, second = (row["embedding"] for row in rows["data"])
        assert first == second, "one on each"

        began = threading.Event()
        stream = pool.submit(streamed, url, {**BODY, "max_tokens": 900}, began)
        assert began.wait(60)
        for pid in children(process.pid):
            if "replicas" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        assert stream.result()[-1]["error"]["code"] == "engine_failed"
        assert process.wait(60) == 1
        *_, error = log.read_text().splitlines()
    assert error.startswith("error: the engine failed: replica ") and error.endswith("status -9")

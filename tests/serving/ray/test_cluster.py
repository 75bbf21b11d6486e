"""A Ray cluster of two nodes in this machine: rates, lost nodes, the command.

Needs the extra ``ray``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
pytest.importorskip("ray.serve", reason="ray has no serve: pip install -e '.[ray]'")
pytest.importorskip("httpx2")

import ray
from ray import serve
from ray.cluster_utils import Cluster

import jaxllama as jl
from jaxllama.serving.http import batch
from jaxllama.serving.http.process import local_app
from jaxllama.serving.http.server import ServerSettings
from jaxllama.serving.ray.app import ReplicaPool, application_of
from jaxllama.serving.ray.hosts import StartOnHosts
from tests.helpers.http_server import chunks_of, client, tiny_checkpoint, wait_until
from tests.helpers.http_server import serve as model_server
from tests.helpers.ray_engine import ROWS, start
from tests.serving.http.test_front_ends import children, counted, streamed, text_of

# Ray's own code warns of itself, and leaves sockets and processes to its exit.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SLOT = {"CPU": 1}  # a node has room for one replica
BODY = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "seed": 1, "ignore_eos": True}
TOKENS = "completion_tokens_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def deploy(replicas: int, most: int | None = None, **more: float) -> None:
    pool = ReplicaPool(replicas, most or replicas, ROWS, 256, SLOT, **more)
    application = application_of(ServerSettings("tiny", 0), pool, start())
    serve.run(application, name="jaxllama", route_prefix="/")


def body(number: int, n: int) -> dict:
    return {
        "model": "tiny",
        "prompt": f"{number} asks",
        "max_tokens": n,
        "seed": number,
        "ignore_eos": True,
    }


def rate(url: str, n_clients: int, seconds: float = 5, windows: int = 4) -> float:
    """Tokens a second while all rows are taken, in the window least disturbed by the machine."""
    ended = threading.Event()

    def ask(number: int) -> None:
        with client(url) as http:
            while not ended.is_set():
                assert http.post("/v1/completions", json=body(number, 100)).status_code == 200

    with client(url) as http, ThreadPoolExecutor(n_clients) as pool:
        asked = [pool.submit(ask, number) for number in range(n_clients)]
        time.sleep(3)
        found = 0.0
        for _ in range(windows):
            before, began = counted(http, TOKENS), time.monotonic()
            time.sleep(seconds)
            found = max(found, (counted(http, TOKENS) - before) / (time.monotonic() - began))
        ended.set()
        for one in asked:
            one.result()
    return found


def test_two_replicas_write_twice_as_much_as_one(url):
    deploy(1)
    one = rate(url, 12)
    deploy(2)
    two = rate(url, 24)
    print(f"one replica {one:.0f} tokens/s, two {two:.0f}: {two / one:.3f}")
    assert two >= 1.9 * one


class Stream(threading.Thread):
    """Reads a streamed completion; pieces: (time, text) of each chunk."""

    def __init__(self, url: str, number: int, n: int) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, {**body(number, n), "stream": True}
        self.body["stream_options"] = {"include_usage": True}
        self.id = f"request-{number}"
        self.pieces: list[tuple[float, str]] = []
        self.raw = ""

    def run(self) -> None:
        ids = {"X-Request-Id": self.id}
        with client(self.url) as http:
            with http.stream("POST", "/v1/completions", json=self.body, headers=ids) as reply:
                for piece in reply.iter_text():
                    self.pieces.append((time.monotonic(), piece))
        self.raw = "".join(piece for _, piece in self.pieces)

    def answer(self) -> tuple[str, int]:
        """(text, number of tokens); every chunk has the request's id."""
        chunks = chunks_of(self.raw)
        assert {chunk["id"] for chunk in chunks} == {f"cmpl-{self.id}"}
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return text, chunks[-1]["usage"]["completion_tokens"]


def lost(session: Path) -> list[dict]:
    """What the front end logged of requests that lost their replica."""
    lines = [
        line
        for log in session.glob("logs/worker-*.err")
        for line in log.read_text(errors="replace").splitlines()
        if '"a request has lost its replica"' in line
    ]
    return [json.loads(line[line.index("{") :]) for line in lines]


def test_a_killed_node_loses_no_token(cluster, url):
    """Streams and whole answers under load; another node takes the lost one's place."""
    deploy(2)
    session = Path(cluster.head_node.get_session_dir_path())
    n, n_tokens = 24, 150
    with client(url) as http, ThreadPoolExecutor(n) as pool:

        def whole(number: int) -> str:
            reply = http.post("/v1/completions", json=body(number, n_tokens))
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["text"]

        undisturbed = list(pool.map(whole, range(n)))
        before = len(lost(session))
        streams = [Stream(url, number, n_tokens) for number in range(0, n, 2)]
        for stream in streams:
            stream.start()
        wholes = [pool.submit(whole, number) for number in range(1, n, 2)]
        wait_until(lambda: sum(len(stream.pieces) > 10 for stream in streams) > 3)
        killed = time.monotonic()
        [victim] = [node for node in cluster.worker_nodes]
        cluster.remove_node(victim, allow_graceful=False)
        for stream in streams:
            stream.join(180)
        assert [one.result(180) for one in wholes] == undisturbed[1::2]
        for stream, text in zip(streams, undisturbed[::2], strict=True):
            assert stream.answer() == (text, n_tokens)
        news = lost(session)[before:]
        assert news, "the killed node had requests"
        streamed = {f"cmpl-{s.id}/0" for s in streams}
        assert any(one["tokens"] and one["id"] in streamed for one in news)
        longest = max(
            b - a
            for stream in streams
            for (a, _), (b, _) in zip(stream.pieces, stream.pieces[1:], strict=False)
            if b > killed
        )
        print(f"{len(news)} requests lost their replica; the longest pause was {longest:.2f} s")
        assert http.get("/health").status_code == 200

        cluster.add_node(num_cpus=1)
        wait_until(lambda: serve.status().applications["jaxllama"].status == "RUNNING")
        wait_until(lambda: slots(http) == 2 * ROWS)
        assert whole(0) == undisturbed[0]


def slots(http) -> float:
    return counted(http, "slots")


def processes(pid: int, name: str) -> list[int]:
    """The descendants of a process whose command line has this text."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
            found += processes(child, name)
    return found


def test_the_command_serves_a_model_and_replaces_a_killed_engine(cluster, tmp_path):
    """Two engines of a real model; a request of the killed one goes on with the same tokens."""
    serve.shutdown()  # its port is the other tests'
    folder = tiny_checkpoint(tmp_path)
    flags = ("--ray", cluster.address, "--replicas", "2", "--max-len", "1024")
    flags += ("--state", f"{tmp_path / 'state'}")
    asked = {**BODY, "max_tokens": 900}
    with model_server(folder, *flags) as (process, url, _), client(url) as http:
        bodies = [{**asked, "seed": seed, "temperature": 1.0} for seed in range(6)]
        want = [text_of(streamed(url, body)) for body in bodies]
        assert len(set(want)) == 6
        engines = processes(os.getpid(), "ServeReplica:jaxllama:engine")
        assert len(engines) == 2
        session = Path(cluster.head_node.get_session_dir_path())
        before = len(lost(session))
        with ThreadPoolExecutor(6) as pool:
            began = threading.Event()
            asked = [pool.submit(streamed, url, body, began) for body in bodies]
            assert began.wait(60)
            os.kill(engines[0], signal.SIGKILL)
            got = [text_of(one.result()) for one in asked]
        assert got == want and len(lost(session)) > before
        wait_until(lambda: counted(http, "slots") == 32)
        assert http.post("/v1/completions", json={**BODY, "max_tokens": 4000}).status_code == 400
        stop = {**BODY, "max_tokens": 200, "stop": [text_of(streamed(url, BODY))[2:4]]}
        [choice] = http.post("/v1/completions", json=stop).json()["choices"]
        assert choice["finish_reason"] == "stop"
        for letter in "cdefgh":  # at the engine that has read it
            long = {**BODY, "prompt": letter * 200, "max_tokens": 1}
            assert http.post("/v1/completions", json=long).json()["usage"]["prompt_tokens"] == 200
            usage = http.post("/v1/completions", json=long).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
        answer = http.post("/v1/completions", json=BODY).json()
        assert http.get(f"/v1/completions/{answer['id']}").json()["choices"] == answer["choices"]
        rows = http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "a"]}).json()
        first, second = (row["embedding"] for row in rows["data"])
        assert first == second
        process.terminate()
        assert process.wait(60) == 0
    assert not processes(os.getpid(), "ServeReplica:jaxllama:engine")


def test_replicas_follow_the_load(cluster):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deploy(1, 2, up=1.0, down=2.0)
    with client(url) as http, ThreadPoolExecutor(24) as pool:
        assert slots(http) == ROWS
        ended = threading.Event()

        def ask(number: int) -> None:
            with client(url) as own:
                while not ended.is_set():
                    own.post("/v1/completions", json=body(number, 50)).raise_for_status()

        asked = [pool.submit(ask, number) for number in range(24)]
        wait_until(lambda: slots(http) == 2 * ROWS)
        ended.set()
        for one in asked:
            one.result()
        wait_until(lambda: slots(http) == ROWS)


async def texts_of(app, bodies: list[dict]) -> list[str]:
    replies = [await batch.post(app, "/v1/completions", body, "id") for body in bodies]
    return [reply["choices"][0]["text"] for _, reply in replies]


def test_a_replica_over_two_hosts_and_the_end_of_one(cluster, tmp_path):
    """A mesh over both nodes: the tokens of one process, also after the second one was killed."""
    serve.shutdown()
    wait_until(lambda: ray.available_resources().get("CPU") == 2)
    folder = tiny_checkpoint(tmp_path) / "tiny"
    options = {"max_slots": 4, "max_len": 512, "prefill_chunk": 16}
    load = functools.partial(jl.load, folder, mesh="model=2")
    pool = ReplicaPool(1, 1, 4, 256, {"CPU": 1}, hosts=2)
    application = application_of(ServerSettings("tiny", 0), pool, StartOnHosts(load, options, 2))
    url = f"http://127.0.0.1:{(port := free_port())}"
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(application, name="jaxllama", route_prefix="/")
    prompts = ["ab", "the second", "c" * 50, "again", "five", "six"]
    asked = [{**BODY, "prompt": prompt, "max_tokens": 400, "temperature": 0} for prompt in prompts]
    with local_app(jl.load(folder), "tiny", options) as (app, _):
        want = asyncio.run(texts_of(app, asked))
    with client(url) as http, ThreadPoolExecutor(6) as threads:
        assert [text_of(one) for one in threads.map(lambda b: streamed(url, b), asked)] == want
        began = threading.Event()
        again = [threads.submit(streamed, url, body, began) for body in asked]
        assert began.wait(60)
        [other] = processes(os.getpid(), "ray::Follower")
        os.kill(other, signal.SIGKILL)
        assert [text_of(one.result()) for one in again] == want
        assert http.post("/v1/embeddings", json={"model": "tiny", "input": "a"}).status_code == 400
    serve.shutdown()

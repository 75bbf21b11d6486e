"""Several models behind one port: started on first use, ended by the budget, routed by name.

The models are small processes that only say their name; the slow test has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("aiohttp")

import httpx2 as httpx
import uvicorn

from jaxllama.cli.main import main
from jaxllama.serving.api.keys import ApiKey
from jaxllama.serving.http import model_pool
from jaxllama.serving.http.model_pool import ModelPool, ModelSpec
from jaxllama.serving.http.model_router import RouterSettings, application
from tests.helpers.cases import on_demand
from tests.helpers.http_server import (
    children,
    client,
    error_of,
    started,
    tiny_checkpoint,
    wait_until,
)

openai = on_demand("openai")
# A model: answers with its name and what it received, streams slowly, ends with its parent.
MODEL = """
import http.server, json, os, sys, threading, time
name = sys.argv[-1]
if name == "broken":
    sys.exit("error: no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Request-Id", "its own")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("die"):
            os._exit(3)
        time.sleep(body.get("wait", 0))
        if not body.get("stream"):
            names = ("authorization", "traceparent", "x-request-id")
            head = {n: self.headers[n] for n in names}
            told = {"name": name, "pid": os.getpid(), "path": self.path, "head": head}
            told["model"] = body.get("model")
            return self.reply(200, json.dumps(told).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(3):
            part = b"data: %d\\n\\n" % n
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(part), part))
            time.sleep(0.05)
        self.wfile.write(b"0\\r\\n\\r\\n")
    def do_GET(self):
        is_mine = self.path.endswith(name)
        self.reply(200 if is_mine else 404, json.dumps({"name": name}).encode())
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print(f"jaxllama serves {name} on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


PROGRAM = (sys.executable, "-S", "-c", MODEL)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(model_pool, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(model_pool, "AGAIN_SECONDS", 0.3)


def spec(name: str, memory: int = 10, *aliases: str) -> ModelSpec:
    return ModelSpec(name, (name,), aliases, memory)


@contextlib.contextmanager
def routing(pool: ModelPool, **settings):
    """The router's address, on a thread of its own."""
    config = uvicorn.Config(
        application(pool, RouterSettings(**settings)), log_config=None, lifespan="on"
    )
    server = uvicorn.Server(config)
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def ask(http, model: str | None, **body):
    named = {} if model is None else {"model": model}
    return http.post("/v1/completions", json={**named, **body})


@pytest.mark.core
def test_models_are_started_used_and_ended_by_the_budget():
    pool = ModelPool(PROGRAM, [spec("a", 10, "alias"), spec("b"), spec("c", 20)], budget=20)
    with routing(pool) as url, client(url) as http:
        assert pool.loaded == {} and http.get("/health").status_code == 200
        listed = http.get("/v1/models").json()["data"]
        assert [(m["id"], m["loaded"]) for m in listed] == [
            ("a", False),
            ("b", False),
            ("c", False),
        ]
        trace = f"00-{'1' * 32}-{'2' * 16}-01"
        sent = {"traceparent": trace, "authorization": "Bearer x", "x-request-id": "mine"}
        first = http.post("/v1/completions", json={"model": "a"}, headers=sent)
        told = first.json()
        assert (told["name"], told["path"]) == ("a", "/v1/completions")
        assert told["head"] == sent, "handed on as they are"
        assert first.headers.get_list("x-request-id") == ["mine"]
        assert ask(http, "alias").json()["pid"] == ask(http, "a:adapter").json()["pid"]
        assert ask(http, None).json()["pid"] == told["pid"], "the first model"
        assert ask(http, None).json()["model"] == "a", "which needs a name"
        deep = b'{"model": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        typed = {"content-type": "application/json"}
        assert http.post("/v1/completions", content=deep, headers=typed).status_code == 400
        assert ask(http, "b").json()["name"] == "b" and pool.loaded == {"a": 10, "b": 10}
        ask(http, "a")
        assert ask(http, "c").json()["name"] == "c" and pool.loaded == {"c": 20}
        again = ask(http, "b").json()
        assert again["name"] == "b" and pool.loaded == {"b": 10} and pool.starts["b"] == 2
        with http.stream("POST", "/v1/completions", json={"model": "b", "stream": True}) as reply:
            parts = list(reply.iter_text())
        assert "".join(parts) == "data: 0\n\ndata: 1\n\ndata: 2\n\n" and len(parts) > 1
        assert http.get("/v1/responses/x-b").json() == {"name": "b"}
        assert http.get("/v1/responses/x-a").status_code == 404
        page = http.get("/metrics").text
        assert 'jaxllama_model_starts{model="b"} 2.0' in page
        assert 'jaxllama_model_loaded{model="a"} 0.0' in page
        for model, param in (("nobody", "model"), (7, None)):
            reply = ask(http, model)
            assert reply.status_code in (400, 404) and error_of(reply)["param"] == param
        assert "page.js" in http.get("/").text


def test_a_busy_model_ends_after_its_answers_and_lets_others_in():
    pool = ModelPool(PROGRAM, [spec("a"), spec("b")], budget=10)
    with routing(pool) as url, client(url) as http:
        ask(http, "a")
        done: list[str] = []

        def long(model: str, wait: float) -> None:
            with client(url) as own:
                done.append(ask(own, model, wait=wait).json()["name"])

        threads = [threading.Thread(target=long, args=("a", 0.3))]
        threads[0].start()
        wait_until(lambda: pool._running["a"].in_flight)
        for model in ("b", "a"):
            threads.append(threading.Thread(target=long, args=(model, 0)))
            threads[-1].start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert done == ["a", "b", "a"] and pool.starts == {"a": 2, "b": 1}


def test_a_client_that_leaves_ends_its_request_and_no_start():
    pool = ModelPool(PROGRAM, [spec("a")])
    with routing(pool) as url, client(url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"model": "a"}, timeout=0.02)  # as it starts
        wait_until(lambda: pool.loaded)
        wait_until(lambda: not pool._running["a"].in_flight)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"model": "a", "wait": 5}, timeout=0.2)
        begin = time.monotonic()
        wait_until(lambda: not pool._running["a"].in_flight)
        assert time.monotonic() - begin < 4 and pool.starts == {"a": 1}


def test_models_that_fail_end_and_start_again(monkeypatch):
    pool = ModelPool(PROGRAM, [spec("a"), spec("broken")], unload_after=0.4)
    with routing(pool) as url, client(url) as http:
        first = ask(http, "a").json()["pid"]
        reply = ask(http, "a", die=True)
        assert reply.status_code == 503 and error_of(reply)["code"] == "model_failed"
        wait_until(lambda: ask(http, "a").status_code == 200)
        assert ask(http, "a").json()["pid"] != first
        for _ in range(2):
            reply = ask(http, "broken")
            assert reply.status_code == 503 and "did not start" in error_of(reply)["message"]
        wait_until(lambda: not pool.loaded)
        assert ask(http, "a").json()["name"] == "a" and pool.starts["a"] == 3
        monkeypatch.setattr(model_pool, "MAX_WAITING", 0)
        wait_until(lambda: not pool.loaded)
        assert ask(http, "a").status_code == 429


def test_strangers_start_no_model():
    pool = ModelPool(PROGRAM, [spec("a")])
    keys, hosts = (ApiKey("secret", "me", 1),), ()
    with routing(pool, keys=keys, hosts=hosts, max_body=100) as url, client(url) as http:
        assert ask(http, "a").status_code == 401
        own = {"authorization": "Bearer secret"}
        reply = http.post(
            "/v1/completions", json={"model": "a"}, headers={**own, "host": "evil.com"}
        )
        assert reply.status_code == 421
        reply = http.post("/v1/completions", json={"model": "a" * 200}, headers=own)
        assert reply.status_code == 413
        assert http.post("/v1/completions", content=b"{", headers=own).status_code == 415
        typed = {**own, "content-type": "application/json"}
        for broken in (
            b"{",
            b'{"a":' * 2000,
            b"[" * 90,
            b'{"model": "\xff"}',
            b'{"model": 5}',
            b"[]",
        ):
            assert (
                http.post("/v1/completions", content=broken[:100], headers=typed).status_code == 400
            )
        assert pool.starts == {"a": 0}
        for _ in range(3):  # the model counts for the key's limits
            reply = http.post("/v1/completions", json={"model": "a"}, headers=own)
            assert reply.json()["head"]["authorization"] == "Bearer secret"


CONFIG = """
port = 0
memory-gb = 8
api-key = ["secret", "other"]
state = "{state}"
[[model]]
model = "{folder}"
name = "small"
max-slots = 2
[[model]]
model = "{folder}"
max-len = 64
memory-gb = 3
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-slots = 4\n[[model]]\nmodel = 'a'", "--max-slots: belongs into a [[model]] table"),
        ("[[model]]\nname = 'a'", "model: is required"),
        ("[[model]]\nmodel = 'a'\nport = 3", "[[model]] a: port: is an option of the server"),
        ("[[model]]\nmodel = 'a'\nmax-slot = 3", "a: max-slot: unrecognized arguments: --max-slot"),
        ("[[model]]\nmodel = 'a'\nmax-slot = false", "a: max-slot: unrecognized arguments: --max-"),
        ("[[model]]\nmodel = 'a'\nmemory-gb = inf", "memory-gb: must be a number above 0 and at"),
        ("[[model]]\nmodel = 'a'\nserved-model-name = 5", "served-model-name: expected a text"),
        ("[[model]]\nmodel = 'a'\n[[model]]\nmodel = 'a'", "the name a is there twice"),
        ("memory-gb = 2\n[[model]]\nmodel = 'a'\nmemory-gb = 3", "3 is more than the server's 2"),
        ("[[model]]\nmodel = 'a'\nmemory-gb = 'x'", "memory-gb: must be a number above 0"),
        ("[[model]]\nmodel = 'a'\nname = 'a:b'", "name: must be a text without ':'"),
        ("model = 'a'\nmemory-gb = 2", "--memory-gb: needs [[model]] tables"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path, capsys, text, says):
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_real_models_behind_one_port(tmp_path, monkeypatch):
    """Two models of one checkpoint: each started by its first request, and gone with the server."""
    monkeypatch.undo()
    folder = tiny_checkpoint(tmp_path)
    file = tmp_path / "server.toml"
    file.write_text(CONFIG.format(folder=folder / "tiny", state=tmp_path / "state"))
    server = functools.partial(started, tmp_path, "--config", str(file), names="2 models")
    with server() as (process, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        with client as api, client.with_options(api_key="other") as other:
            assert [model.id for model in api.models.list()] == ["small", "tiny"]
            ask = {"prompt": "ab", "max_tokens": 5, "temperature": 0}
            with pytest.raises(openai.AuthenticationError):
                api.with_options(api_key="wrong").completions.create(model="tiny", **ask)
            whole = {name: api.completions.create(model=name, **ask) for name in ("small", "tiny")}
            answers = {name: answer.choices[0].text for name, answer in whole.items()}
            assert len(set(answers.values())) == 1
            with pytest.raises(openai.BadRequestError, match="64"):
                api.completions.create(model="tiny", prompt="a" * 80, max_tokens=1)
            assert api.completions.create(model="small", prompt="a" * 80, max_tokens=1)
            parts = api.completions.create(model="tiny", stream=True, **ask)
            assert "".join(part.choices[0].text for part in parts) == answers["tiny"]
            path = f"/completions/{whole['tiny'].id}"
            assert api.get(path, cast_to=dict)["choices"][0]["text"] == answers["tiny"]
            with pytest.raises(openai.NotFoundError):
                other.get(path, cast_to=dict)
        models = children(process.pid)
        assert len(models) == 2
        process.kill()  # without a word to its models
        wait_until(lambda: not any(map(is_alive, models)))
    with server() as (process, *_):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_model_that_starts_while_its_last_process_ends_stays(monkeypatch):
    def process(status: int | None = None) -> Any:
        stub: Any = SimpleNamespace(returncode=status)
        return model_pool._Process(stub, "", 10)

    monkeypatch.setattr(model_pool, "LOOK_SECONDS", 0)
    pool = ModelPool((), [spec("a"), spec("b")], unload_after=0)
    pool._running = {"a": process(), "b": process(status=3)}
    started = {"a": process(), "b": process()}

    async def stop(_: object) -> None:
        pool._running = dict(started)
        for running in started.values():
            running.in_flight = 1

    monkeypatch.setattr(pool, "_stop", stop)

    async def reap() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await pool._reap()

    asyncio.run(reap())
    assert pool._running == started

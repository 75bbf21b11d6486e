"""Limits of connections before a request reaches the application: bytes, seconds, connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.serving.http import limits, middleware
from tests.helpers.http_server import NAME, client, serving

BODY = json.dumps({"model": NAME, "prompt": "ab", "max_tokens": 6, "stream": True}).encode()
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ASK = b"%bContent-Length: %d\r\n\r\n%b" % (POST, len(BODY), BODY)
ENGINE = {"max_queue": 64}
MUCH = limits.HEAD_BYTES + 5000


@pytest.mark.parametrize("trusted", [None, "127.0.0.1"])
def test_only_a_trusted_proxy_names_the_client(monkeypatch, trusted):
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    monkeypatch.setattr(limits.logs, "configuration", lambda: None)
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["client"][0])

    config = limits.uvicorn_config(app, 1)
    config.load()
    scope = {
        "type": "http",
        "client": ("127.0.0.1", 5),
        "headers": [(b"x-forwarded-for", b"10.9.8.7")],
    }
    asyncio.run(config.loaded_app(scope, None, None))
    assert seen == ["127.0.0.1" if trusted is None else "10.9.8.7"]


@contextlib.contextmanager
def connected(url: str, data: bytes = b"", source: str = "127.0.0.1"):
    port = int(url.rsplit(":", 1)[1])
    address = ("127.0.0.1", port)
    with socket.create_connection(address, 30, (source, 0)) as connection:
        connection.sendall(data)
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def status(answer: bytes) -> int | None:
    return int(answer.split()[1]) if answer else None


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


TOO_LARGE = {
    "a URL": b"GET /" + b"a" * MUCH,
    "a header": GET + b"X: " + b"a" * MUCH,
    "a header's name": GET + b"a" * MUCH,
    "many headers": GET + b"X: a\r\n" * (MUCH // 6 + 1),
    "nothing but blank lines": b"\r\n" * MUCH,
    "trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * (2 * MUCH // 6),
    "a chunk's extension": CHUNKED + b"2;" + b"a" * (2 * MUCH),
    "the second request": GET + b"\r\n" + GET + b"X: " + b"a" * (2 * MUCH),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_headers_have_a_largest_size(url, name):
    with connected(url, TOO_LARGE[name]) as connection:
        answer = rest(connection)
    last = answer[answer.rindex(b"HTTP/1.1 ") :]
    assert status(last) == 431
    assert "larger than 65536 bytes" in json.loads(last.split(b"\r\n\r\n")[1])["error"]["message"]


@pytest.mark.core
def test_headers_below_the_largest_size_are_served(url):
    fits = GET + b"Connection: close\r\nX: "
    fits += b"a" * (limits.HEAD_BYTES - len(fits) - 4) + b"\r\n\r\n"
    with connected(url, fits) as connection:
        assert status(rest(connection)) == 200
    # Not even where a long body, or another request, comes with them.
    body = BODY + b" " * limits.HEAD_BYTES
    ask = b"%bContent-Length: %d\r\n\r\n%b" % (POST, len(body), body)
    with connected(url, ask + GET + b"Connection: close\r\n\r\n") as connection:
        assert rest(connection).count(b"HTTP/1.1 200 ") == 2


SLOW = {
    "nothing": (b"", [None]),
    "half a line": (b"GET /hea", [408]),
    "half the headers": (GET, [408]),
    "half a body that nobody reads": (GET + b"Content-Length: 99\r\n\r\n{", [200]),
    "half a body": (POST + b"Content-Length: 99\r\n\r\n{", [408]),
    "half a chunk": (CHUNKED + b"63\r\n{", [408]),
    "half a second request": (GET + b"\r\n" + GET, [200, 408]),
}


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "drips"])
def test_half_requests_end_in_time(url, monkeypatch, drips):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.4)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.6)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(connected(url, data)) for name, (data, _) in SLOW.items()
        }
        end = time.monotonic() + 0.35
        while drips and time.monotonic() < end:
            for name, connection in opened.items():
                if name != "nothing":
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"a")
            time.sleep(0.02)
        answers = {name: rest(connection) for name, connection in opened.items()}
    for name, (_, want) in SLOW.items():
        found = [status(b"HTTP/1.1 " + part) for part in answers[name].split(b"HTTP/1.1 ")[1:]]
        assert (found or [None]) == want, name


def test_a_long_answer_is_not_cut(url, engine, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.1)
    with contextlib.ExitStack() as stack:
        # The second request is complete, and the third is not, while the first is answered.
        with engine.held():
            connection = stack.enter_context(connected(url, ASK + ASK + GET))
            time.sleep(0.4)
        answers = rest(connection).split(b"HTTP/1.1 ")[1:]
    assert [status(b"HTTP/1.1 " + answer) for answer in answers] == [200, 200, 408]
    assert all(b"[DONE]" in answer for answer in answers[:2])


@pytest.mark.core
def test_half_requests_keep_no_whole_ones_out(lm, engine):
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(lm, engine, limits.Peers(limit=8)))
        half = [stack.enter_context(connected(url, GET)) for _ in range(40)]
        with client(url) as http:
            assert http.get("/health").status_code == 200
        left = [connection for connection in half if is_open(connection)]
        assert len(left) < 8
        # What waits for an answer stays; when nothing else is left, the newcomer is refused.
        with engine.held():
            asking = [stack.enter_context(connected(url, ASK)) for _ in range(8)]
            assert engine.wait_for(lambda: len(engine.live) == 8)
            with connected(url) as connection:
                refused = rest(connection)
        assert status(refused) == 429 and b"too many connections" in refused
        for connection in asking:
            data = b""
            while b"[DONE]" not in data:
                assert (part := connection.recv(1 << 16))
                data += part


@pytest.mark.core
def test_one_address_leaves_descriptors_to_others(lm, engine, monkeypatch):
    monkeypatch.setattr(limits.Peers, "total", 12)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(lm, engine))
        mine = [stack.enter_context(connected(url, GET)) for _ in range(30)]
        other = stack.enter_context(connected(url, GET, "127.0.0.2"))
        with client(url) as http:
            assert http.get("/health").status_code == 200
        assert sum(map(is_open, mine)) <= 6 and is_open(other)


def test_connections_follow_from_the_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4000, 4000))
    peers = limits.Peers()
    assert 3000 < peers.total < 4000 - limits.SPARE
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    assert peers.total == 2, "one to serve, one to refuse"

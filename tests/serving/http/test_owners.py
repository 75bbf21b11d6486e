"""What belongs to an API key: its cached prompts, its answers; and which Host a server answers."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.serving.http.middleware import is_local
from jaxllama.serving.http.process import ServeOptions
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, client, serving

KEYS = ("one", "two")
ASK = {"model": NAME, "prompt": "ab" * 20, "max_tokens": 2, "seed": 1}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "ab" * 20}], "max_tokens": 2}
RESPONSE = {"model": NAME, "input": "ab", "max_output_tokens": 2}
PATHS = {"/v1/completions": ASK, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}
MESSAGE = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "ab"}]}


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def http(lm, engine, tmp_path_factory):
    state = str(tmp_path_factory.mktemp("state"))
    with serving(lm, engine, api_keys=KEYS, state=state) as url, client(url) as http:
        yield http


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_belongs_to_the_key_that_asked(http, path):
    answer = http.post(path, json=PATHS[path], headers=as_key("one")).json()
    where = f"{path}/{answer['id']}"
    found = http.get(where, headers=as_key("two"))
    missing = http.get(f"{path}/nothing", headers=as_key("two"))
    assert found.status_code == missing.status_code == 404
    told = [reply.json()["error"] for reply in (found, missing)]
    told[0]["message"] = told[0]["message"].replace(answer["id"], "nothing")
    assert told[0] == told[1], "as if it were not there"
    if path == "/v1/responses":
        goes_on = {**RESPONSE, "previous_response_id": answer["id"]}
        assert http.post(path, json=goes_on, headers=as_key("two")).status_code == 404
        assert http.delete(where, headers=as_key("two")).status_code == 404
        assert http.post(path, json=goes_on, headers=as_key("one")).status_code == 200
    assert http.get(where, headers=as_key("one")).json() == answer


@pytest.mark.core
def test_an_owed_answer_belongs_to_the_key_that_asked(lm, tmp_path):
    """After a restart too, and the row has the cached prompts of its owner."""
    settings = {"api_keys": KEYS, "state": str(tmp_path)}
    body = {**ASK, "stream": True, "cache_salt": "s"}
    headers = {**as_key("one"), "X-Request-Id": "a"}
    with (
        FakeEngine() as first,
        first.held(),
        serving(lm, first, **settings) as url,
        client(url) as http,
        http.stream("POST", "/v1/completions", json=body, headers=headers),
    ):
        assert first.wait_for(lambda: first.live)
        first.stop()
    with FakeEngine() as second, serving(lm, second, **settings) as url, client(url) as http:
        assert http.get("/v1/completions/cmpl-a", headers=as_key("one")).status_code == 200
        assert http.get("/v1/completions/cmpl-a", headers=as_key("two")).status_code == 404
    assert second.requests == first.requests


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages"])
def test_cached_prompts_are_shared_under_one_key_and_salt(http, engine, path):
    def salt(key: str, **fields) -> str:
        body = {**PATHS.get(path, MESSAGE), **fields}
        reply = http.post(path, json=body, headers=as_key(key))
        assert reply.status_code == 200
        return engine.requests[-1].cache_salt

    salts = [
        salt("one"),
        salt("two"),
        salt("one", cache_salt="a"),
        salt("two", cache_salt="a"),
        salt("one", cache_salt="b"),
    ]
    assert len(set(salts)) == 5
    assert [salt("one"), salt("one", cache_salt="a")] == [salts[0], salts[2]]
    assert not any(key in salt for key in KEYS for salt in salts), "the key itself goes nowhere"
    for wrong in ("", 1, "a" * 257):
        body = {**PATHS.get(path, MESSAGE), "cache_salt": wrong}
        refused = http.post(path, json=body, headers=as_key("one"))
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("cache_salt")


# Which Host


HOSTS = {
    "localhost": 200,
    "LOCALHOST:8000": 200,
    "127.0.0.1:8000": 200,
    "127.0.0.2": 200,
    "[::1]:8000": 200,
    "api.localhost": 200,
    "localhost.": 200,
    "my.name": 200,
    "My.Name:1": 200,
    "evil.example.com": 421,
    "evil.example.com:8000": 421,
    "localhost.evil.com": 421,
    "127.0.0.1.evil.com": 421,
    "10.0.0.1": 421,
    "": 421,
    "[::2]": 421,
    "my.name.evil.com": 421,
}


@pytest.mark.core
def test_only_known_hosts_are_answered(lm, engine):
    with serving(lm, engine, hosts=("my.name:80",)) as url, client(url) as http:
        got = {host: http.get("/health", headers={"Host": host}).status_code for host in HOSTS}
        assert got == HOSTS
        refused = http.post("/v1/completions", json=ASK, headers={"Host": "evil.example.com"})
        error = refused.json()["error"]
        assert error["code"] == "unknown_host" and "--allowed-host" in error["message"]
        assert "'evil.example.com'" in error["message"]
    with serving(lm, engine) as url, client(url) as http:
        assert http.get("/health", headers={"Host": "evil.example.com"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "keys", "allowed", "known"),
    [
        ("127.0.0.1", (), (), ()),
        ("localhost", (), (), ()),
        ("::1", (), (), ()),
        ("127.0.0.1", (), ("a",), ("a",)),
        ("127.0.0.1", (), ("*",), None),
        ("127.0.0.1", ("key",), (), None),  # a web page does not know it
        ("0.0.0.0", (), (), None),
        ("0.0.0.0", ("key",), ("a",), ("a",)),
    ],
)
def test_a_local_server_without_keys_knows_local_names(monkeypatch, host, keys, allowed, known):
    monkeypatch.delenv("JAXLLAMA_API_KEY", raising=False)
    options = ServeOptions("m", host, api_keys=keys, hosts=allowed)
    assert options.known_hosts == known
    assert is_local(host) == (host != "0.0.0.0")


def test_the_journal_does_not_hold_the_key(lm, engine, tmp_path):
    with serving(lm, engine, api_keys=("the-secret-key",), state=str(tmp_path)) as url:
        with client(url) as http:
            http.post("/v1/completions", json=ASK, headers=as_key("the-secret-key"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"the-secret-key" in file.read_bytes() for file in files)


def test_no_secret_and_no_text_of_a_client_is_logged(http, caplog):
    caplog.set_level("DEBUG", "jaxllama.serving")
    tools = [{"type": "web_search", "secret-option": 1}]
    for body, key in ((MESSAGE, "one"), ({**MESSAGE, "tools": tools}, "two"), (MESSAGE, "guess-9")):
        headers = {"x-api-key": key, "X-Request-Id": "seen"}
        text = [{"role": "user", "content": "my-private-text"}]
        http.post("/v1/messages?key=one", json={**body, "messages": text}, headers=headers)
    lines = [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    assert any("seen" in line for line in lines)
    for secret in ("my-private-text", "guess-9", "key=one", "secret-option"):
        assert not any(secret in line for line in lines), secret


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_deep_and_large_bodies_are_refused(http, path):
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    schema = b'{"type":"function","function":{"name":"f","parameters":%b}}'
    if path == "/v1/messages":
        schema = b'{"name":"f","input_schema":%b}'
    head = b'{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"a"}],"tools":['
    headers = {**as_key("one"), "Content-Type": "application/json"}
    for body in (head + schema % deep + b"]}", head + b",".join([schema % b"{}"] * 129) + b"]}"):
        assert http.post(path, content=body, headers=headers).status_code == 400

"""Batch files: answered, resumed, refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.cli.main import main
from jaxllama.engine.engine import Engine
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import batch
from jaxllama.serving.http.server import ServerSettings, create_app
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, client, serving, tiny_checkpoint

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1}
COMPLETION = {"model": NAME, "prompt": "ab", "max_tokens": 6, "seed": 1}


@pytest.fixture
def engine():
    with FakeEngine(max_queue=3) as engine:
        yield engine


@pytest.fixture
def app(lm, engine):
    return create_app(lm, engine, ServerSettings(NAME, 96), Metrics())


def write(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(path) -> dict[str, dict]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in read}) == len(read)
    return {line["custom_id"]: line for line in read}


def asked(custom_id: str, url: str, body: dict) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


MIXED = [
    asked("chat", "/v1/chat/completions", CHAT),
    asked("text", "/v1/completions", COMPLETION),
    asked("many", "/v1/completions", {**COMPLETION, "n": 3}),
    asked("vector", "/v1/embeddings", {"input": "abc"}),
    asked("hot", "/v1/completions", {**COMPLETION, "temperature": 9}),
    asked("lost", "/v1/nowhere", {}),
    *(asked(f"more {n}", "/v1/completions", {**COMPLETION, "seed": n}) for n in range(20)),
]


def test_a_file_is_answered_as_the_server_answers(lm, engine, app, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, MIXED)
    counts = batch.run(app, NAME, source, target, at_once=6, show=False)
    assert counts == {"answered": 24, "failed": 2, "kept": 0}, "the queue of 3 was full, and waited"
    got = lines_of(target)
    assert got.keys() == {line["custom_id"] for line in MIXED}
    assert got["lost"]["response"]["status_code"] == 404
    assert got["hot"]["response"]["body"]["error"]["param"] == "temperature"
    with serving(lm, engine) as url, client(url) as http:
        for name in ("chat", "text", "many", "vector"):
            line = next(line for line in MIXED if line["custom_id"] == name)
            want = http.post(line["url"], json={"model": NAME, **line["body"]}).json()
            mine = got[name]["response"]["body"]
            assert mine.get("choices", mine.get("data")) == want.get("choices", want.get("data"))
            assert got[name]["error"] is None and got[name]["id"].startswith("batch_req_")


@pytest.mark.core
def test_a_run_goes_on_where_it_was_killed(engine, app, tmp_path):
    source, target, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "all.jsonl"))
    write(source, MIXED)
    batch.run(app, NAME, source, whole, at_once=1, show=False)  # the line of three choices first
    data = whole.read_text()
    cut = data.index("\n", len(data) // 2) + 30  # in the middle of a line
    target.write_text(data[:cut])
    done = data[:cut].count("\n")
    before = len(engine.requests)
    counts = batch.run(app, NAME, source, target, at_once=2, show=False)
    assert counts["kept"] == done and sum(counts.values()) == len(MIXED)
    assert len(engine.requests) - before <= len(MIXED) - done
    first, second = lines_of(whole), lines_of(target)
    assert first.keys() == second.keys()
    for name, line in first.items():
        mine = second[name]["response"]["body"]
        assert mine.get("choices") == line["response"]["body"].get("choices"), "seeds are named"
    assert batch.run(app, NAME, source, target, at_once=2, show=False)["kept"] == len(MIXED)


def test_an_engine_that_fails_ends_the_run_and_keeps_its_answers(engine, app, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, MIXED[:1])

    def broken(request):
        raise RuntimeError("as asked")
        yield

    engine.answer = broken
    with pytest.raises(JaxLlamaError, match="as asked"):
        batch.run(app, NAME, source, target, at_once=2, show=False)
    assert target.read_text() == ""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "needs custom_id"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "needs custom_id"),
        ('{"custom_id": 1, "url": "/", "body": {}}', "are texts"),
        ('{"custom_id": "chat", "url": "/", "body": {}}', "there twice"),
        ('{"custom_id": "a", "url": "/", "body": {}, "method": "GET"}', "method is POST"),
        ('{"custom_id": "a", "url": "/", "body": {"stream": true}}', "stream"),
    ],
)
def test_a_line_that_is_none_is_named_before_anything_is_asked(app, engine, tmp_path, line, reason):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(MIXED[0]) + "\n\n" + line + "\n")
    with pytest.raises(JaxLlamaError, match=f"in.jsonl:3: .*{reason}"):
        batch.run(app, NAME, source, target, at_once=2, show=False)
    assert not engine.requests and not target.exists()
    write(source, MIXED[:1])
    target.write_text("my notes\n")
    with pytest.raises(JaxLlamaError, match="out.jsonl:1: no answer of a batch"):
        batch.run(app, NAME, source, target, at_once=2, show=False)
    assert target.read_text() == "my notes\n"


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        Engine, "warm_up_behind", lambda engine: None
    )  # only what is used is compiled
    folder = tiny_checkpoint(tmp_path)
    write(tmp_path / "in.jsonl", MIXED[:3])
    words = [
        "batch",
        str(tmp_path / "in.jsonl"),
        str(tmp_path / "out.jsonl"),
        "--json",
        "--model",
        str(folder / NAME),
        "--max-slots",
        "1",
        "--max-len",
        "64",
        "--deterministic",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"answered": 3, "failed": 0, "kept": 0}
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"answered": 0, "failed": 0, "kept": 3}
    [choice] = lines_of(tmp_path / "out.jsonl")["text"]["response"]["body"]["choices"]
    assert choice["finish_reason"] in ("stop", "length")

"""The journal of ``serve --state``: a disk that is full, and who may read the file."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.engine import journal as journals
from jaxllama.engine.journal import Entry, Journal, JournalAnswer, JournalUnavailable
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import messages
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import server
from jaxllama.serving.ipc import journalled
from jaxllama.serving.ipc.hub import Hub
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, client, serving, wait_until

ASK = {"model": NAME, "prompt": "ab", "max_tokens": 6, "seed": 1}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


class Disk:
    """A database on a disk that may be full: then nothing can be written."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database, self.is_full = database, False

    def execute(self, query: str, *values):
        if self.is_full and not query.startswith("SELECT") and query != "PRAGMA user_version":
            raise sqlite3.OperationalError("database or disk is full")
        return self._database.execute(query, *values)

    def close(self) -> None:
        self._database.close()


@pytest.fixture
def disk(monkeypatch) -> list[Disk]:
    """The disk of the journal that is opened next."""
    disks: list[Disk] = []

    def opened(folder) -> Journal:
        journal = Journal(folder)
        journal._db = Disk(journal._db)
        disks.append(journal._db)
        return journal

    monkeypatch.setattr(server, "Journal", opened)
    monkeypatch.setattr(journalled, "RETRY", 0.05)
    return disks


@pytest.mark.core
def test_a_full_disk_refuses_what_it_cannot_keep_and_nothing_else(
    lm, engine, disk, tmp_path, caplog
):
    caplog.set_level(logging.WARNING, "jaxllama.serving")
    with (
        serving(lm, engine, state=str(tmp_path)) as url,
        client(url) as http,
        ThreadPoolExecutor(3) as pool,
    ):

        def post(body: dict, id: str):
            return http.post("/v1/completions", json=body, headers={"X-Request-Id": id})

        with engine.held():
            whole = pool.submit(post, ASK, "whole")
            streamed = pool.submit(post, {**ASK, "stream": True}, "streamed")
            assert engine.wait_for(lambda: len(engine.live) == 2)
            database = disk[0]._database
            wait_until(lambda: len(database.execute("SELECT id FROM calls").fetchall()) == 2)
            disk[0].is_full = True
        # Who is there already is answered.
        answer = whole.result()
        assert answer.status_code == 200 and streamed.result().text.endswith("[DONE]\n\n")
        wait_until(lambda: http.get("/health").status_code == 503)
        health = http.get("/health")
        assert "database or disk is full" in health.json()["status"]
        # So is an answer that could not be written, when it is asked for again.
        assert http.get("/v1/completions/cmpl-whole").json() == answer.json()
        # A newcomer that the journal must hold is refused, before it costs anything.
        asked = len(engine.requests)
        for path, body in (("completions", ASK), ("chat/completions", {**CHAT, "stream": True})):
            refused = http.post(f"/v1/{path}", json=body)
            error = refused.json()["error"]
            assert refused.status_code == 503 and error["code"] == "state_unavailable"
            assert "database or disk is full" in error["message"]
            assert int(refused.headers["retry-after"]) >= 1
        assert len(engine.requests) == asked
        for path, body in (
            ("/v1/responses", {"model": NAME, "input": "hi", "max_output_tokens": 2}),
            ("/v1/embeddings", {"model": NAME, "input": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            assert http.post(path, json=body).status_code == 200, "needs no journal"
        # There is room again: nothing is lost.
        disk[0].is_full = False
        wait_until(lambda: http.get("/health").status_code == 200)
        assert post(ASK, "later").status_code == 200
        for id in ("whole", "streamed", "later"):
            stored = http.get(f"/v1/completions/cmpl-{id}")
            assert stored.json()["choices"] == answer.json()["choices"]
        told = [record.getMessage() for record in caplog.records]
        assert told == ["the journal cannot be used", "the journal can be used again"]
    assert Journal(tmp_path).unfinished() == []


def damage(journal: Journal) -> None:
    """Overwrite every page but the first, as a failing disk may."""
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal._db.execute("PRAGMA shrink_memory")
    with open(os.path.join(journal.folder, journals.FILE), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


def test_a_damaged_journal_is_told_by_health_and_by_the_next_start(
    lm, engine, monkeypatch, tmp_path, caplog
):
    opened: list[Journal] = []

    def opening(folder) -> Journal:
        opened.append(Journal(folder))
        return opened[-1]

    monkeypatch.setattr(server, "Journal", opening)
    monkeypatch.setattr(journalled, "RETRY", 0.01)
    with serving(lm, engine, state=str(tmp_path)) as url, client(url) as http:
        assert http.post("/v1/completions", json=ASK).status_code == 200
        assert http.get("/health").status_code == 200
        damage(opened[0])
        for _ in range(3):
            refused = http.post("/v1/completions", json=ASK)
            error = refused.json()["error"]
            assert refused.status_code == 503 and error["code"] == "state_unavailable"
            assert "journal.sqlite is damaged: restore it, or move it away" in error["message"]
            assert "is damaged" in http.get("/health").json()["status"]
        assert http.get("/v1/completions/cmpl-a").status_code == 503
        # What needs no journal goes on.
        assert http.post("/v1/embeddings", json={"model": NAME, "input": "a"}).status_code == 200
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert told == ["the journal cannot be used"]
    with pytest.raises(JaxLlamaError, match="journal.sqlite is damaged: restore it"):
        Journal(tmp_path)


def test_a_request_that_cannot_be_written_is_refused_and_stops(lm, engine, disk, tmp_path):
    """The first one finds out that the disk is full."""
    with serving(lm, engine, state=str(tmp_path)) as url, client(url) as http:
        http.post("/v1/completions", json=ASK)
        disk[0].is_full = True
        with engine.held():
            assert http.post("/v1/completions", json=ASK).status_code == 503
            assert engine.wait_for(lambda: not engine.live), "its row is cancelled"


def test_what_was_never_written_is_owed_by_the_next_server(lm, engine, disk, tmp_path, caplog):
    with serving(lm, engine, state=str(tmp_path)) as url, client(url) as http:
        http.post("/v1/completions", json=ASK)
        with ThreadPoolExecutor(1) as pool:
            with engine.held():
                answer = pool.submit(
                    http.post, "/v1/completions", json=ASK, headers={"X-Request-Id": "a"}
                )
                assert engine.wait_for(lambda: engine.live)
                wait_until(lambda: http.get("/health").status_code == 200)
                disk[0].is_full = True
            assert answer.result().status_code == 200
    told = [record.getMessage() for record in caplog.records]
    assert "answers were not written: the next server owes them" in told
    left = Journal(tmp_path)
    assert [entry.id for entry in left.unfinished()] == ["cmpl-a"]
    left.close()


@pytest.mark.core
def test_what_a_failed_engine_never_began_is_owed_by_the_next_server(lm, tmp_path):
    """A stored error would be the answer for ever, of a body that did nothing wrong."""
    left = Journal(tmp_path)
    left.accept("cmpl-a", "completion", 1, json.dumps(ASK))
    left.close()
    with FakeEngine() as broken:
        broken.failure = "the engine failed: the device is gone"
        with serving(lm, broken, state=str(tmp_path)) as url, client(url) as http:
            asked = http.get("/v1/completions/cmpl-a")
            assert asked.status_code == 503 and asked.json()["error"]["code"] == "stopping"
            assert not broken.requests
    with FakeEngine() as engine, serving(lm, engine, state=str(tmp_path)) as url:
        with client(url) as http:
            answer = http.get("/v1/completions/cmpl-a").json()
    assert len(answer["choices"][0]["text"]) == 6


def test_a_message_that_fails_ends_no_front_end(lm, engine, caplog):
    """An exception that nobody expected belongs into the log: the socket stays open."""
    port = Hub(engine, {}, Metrics(), None).open(lambda data: None)
    port.on_ready = lambda: 1 / 0
    heard = []
    port.on_pong = lambda: heard.append("pong")
    frames = [messages.encode(message) for message in (messages.Ready(), messages.Pong())]

    async def receive() -> None:
        port.received(b"".join(frames))

    import asyncio

    asyncio.run(receive())
    assert heard == ["pong"] and "ZeroDivisionError" in caplog.text


# Who may read it


def rights(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there", [False, True], ids=["new", "readable before"])
def test_only_its_owner_reads_the_journal(tmp_path, there):
    folder = tmp_path / "state"
    if there:
        folder.mkdir(0o755)
        for suffix in ("", "-wal"):
            (folder / f"journal.sqlite{suffix}").touch(0o644)
    mask = os.umask(0)
    try:
        journal = Journal(folder)
        journal.accept("a", "chat", 1, "body", "mine")
    finally:
        os.umask(mask)
    files = sorted(file.name for file in folder.iterdir())
    assert files[:2] == ["journal.sqlite", "journal.sqlite-wal"]
    assert {rights(folder / name) for name in files} == {0o600}
    if not there:
        assert rights(folder) == 0o700
    journal.close()


def test_a_journal_of_an_earlier_version_goes_on(tmp_path):
    old = sqlite3.connect(tmp_path / journals.FILE, isolation_level=None)
    old.execute(
        "CREATE TABLE calls (number INTEGER PRIMARY KEY, id TEXT UNIQUE, kind TEXT, "
        "created INTEGER, body TEXT, answer TEXT)"
    )
    old.execute("INSERT INTO calls (id, kind, created, body) VALUES ('a', 'chat', 7, '{}')")
    old.close()
    for _ in range(2):
        journal = Journal(tmp_path)
        assert journal.unfinished() == [Entry("a", "chat", 7, "{}", "")]
        assert journal.find("a") == JournalAnswer("", "chat", "") and journal.find("b") is None
        journal.close()


def test_an_answers_age_counts_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "KEPT", 3)
    journal = Journal(tmp_path)
    for number in range(10):
        journal.accept(f"c{number}", "chat", 1, "{}")
    for number in (9, 8, 0, 7, 1):
        journal.finish(f"c{number}", "answer")
    for number in range(10, 14):
        journal.accept(f"c{number}", "chat", 1, "{}")
    assert journal.find("c1").text == journal.find("c7").text == "answer"
    for number in range(10, 14):
        journal.finish(f"c{number}", "answer")
    assert journal.find("c1") is None and journal.find("c13").text == "answer"
    assert [entry.id for entry in journal.unfinished()] == ["c2", "c3", "c4", "c5", "c6"]
    journal.close()


@pytest.mark.core
def test_a_write_that_fails_can_be_tried_again(tmp_path):
    journal = Journal(tmp_path)
    journal._db = Disk(journal._db)
    journal.accept("a", "chat", 1, json.dumps({}))
    journal._db.is_full = True
    for write in (
        lambda: journal.accept("b", "chat", 1, "{}"),
        lambda: journal.finish("a", "{}"),
        journal.check_writable,
    ):
        with pytest.raises(JournalUnavailable, match="cannot be written: database or disk is full"):
            write()
    journal._db.is_full = False
    journal.check_writable()
    journal.finish("a", '{"b": 1}')
    assert journal.find("a").text == '{"b": 1}' and journal.find("b") is None
    journal.close()

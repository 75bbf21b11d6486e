"""/v1/files and /v1/batches with OpenAI's own client: answered, cancelled, refused, continued."""

from __future__ import annotations

import asyncio
import io
import json
import math
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.keys import owner_of
from jaxllama.serving.http import batch_worker, process
from jaxllama.serving.http.file_store import Bounds, FileStore, StoreUnavailable
from tests.helpers.cases import on_demand
from tests.helpers.collector import Collector
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import (
    NAME,
    client,
    error_of,
    serve,
    serving,
    talking,
    tiny_checkpoint,
    wait_until,
)

openai = on_demand("openai")
URL = "/v1/chat/completions"
SMALL = Bounds(file_bytes=4000, total_bytes=12_000, files=6, lines=12, open_batches=2)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(batch_worker, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(batch_worker, "LOOK_SECONDS", 0.02)


def line(number: int, **body) -> str:
    chat = {"messages": [{"role": "user", "content": f"n{number}"}], "max_tokens": 4, "seed": 1}
    entry = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": {**chat, **body}}
    return json.dumps(entry) + "\n"


def upload(api: openai.OpenAI, text: str):
    return api.files.create(file=("in.jsonl", text.encode()), purpose="batch")


def start(api: openai.OpenAI, text: str, **more):
    file = upload(api, text)
    return api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h", **more)


def ended(api: openai.OpenAI, id: str):
    final = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: api.batches.retrieve(id).status in final)
    return api.batches.retrieve(id)


def lines_of(api: openai.OpenAI, id: str) -> dict[str, dict]:
    entries = [json.loads(text) for text in api.files.content(id).text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}


def test_a_batch_is_answered_as_requests_are(lm, tmp_path):
    text = "".join(map(line, range(6))) + line(6, temperature=9) + line(7, priority=3)
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        batch = start(api, text, metadata={"run": "one"})
        assert batch.status == "validating" and batch.object == "batch"
        batch = ended(api, batch.id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == (
            "completed",
            8,
            7,
            1,
        )
        assert batch.metadata == {"run": "one"} and batch.completed_at >= batch.in_progress_at
        answers, errors = lines_of(api, batch.output_file_id), lines_of(api, batch.error_file_id)
        assert errors.keys() == {"c6"} and answers.keys() == {
            f"c{n}" for n in (0, 1, 2, 3, 4, 5, 7)
        }
        assert errors["c6"]["response"]["status_code"] == 400
        want = api.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "n3"}], max_tokens=4, seed=1
        )
        got = answers["c3"]["response"]["body"]["choices"][0]["message"]["content"]
        assert got == want.choices[0].message.content
        assert {r.priority for r in engine.requests if r.max_new_tokens == 4} == {-1, 0, 3}
        # An answer of a batch is no answer of the journal.
        with pytest.raises(openai.NotFoundError):
            api.get(f"{URL}/{answers['c3']['response']['body']['id']}", cast_to=object)
        assert [item.id for item in api.batches.list()] == [batch.id]
        files = api.files.list(order="asc").data
        assert [file.purpose for file in files] == ["batch", "batch_output", "batch_output"]
        assert api.files.retrieve(files[1].id).bytes == len(api.files.content(files[1].id).content)
        assert [file.id for file in api.files.list(purpose="batch")] == [files[0].id]
        assert api.files.list(limit=1, after=files[2].id).data[0].id == files[1].id
        assert api.files.delete(files[0].id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.content(files[0].id)
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077]


@pytest.mark.core
def test_a_batch_survives_its_server(lm, tmp_path):
    text = "".join(map(line, range(20)))
    state = {"state": str(tmp_path)}
    with FakeEngine() as engine:
        with talking(lm, engine, **state) as api:
            engine._go(18)  # then rows stand still: two lines are in flight
            id = start(api, text).id
            wait_until(lambda: api.batches.retrieve(id).request_counts.completed >= 4)
            engine.wait_for(lambda: len(engine.live) == 2)
            done = api.batches.retrieve(id).request_counts.completed
            assert 4 <= done < 20
    store = FileStore(tmp_path)
    [stored] = [store.batch(id) for id, _ in store.open()]
    path = store.path(stored.output_id)
    store.close()
    path.write_bytes(path.read_bytes()[:-7])  # as if it had been killed while it wrote
    with FakeEngine() as engine, talking(lm, engine, **state) as api:
        batch = ended(api, id)
        assert batch.status == "completed" and batch.request_counts.completed == 20
        assert lines_of(api, batch.output_file_id).keys() == {f"c{n}" for n in range(20)}
        assert len(engine.requests) <= 20 - done + 1, "no answered line is sent again"


def test_a_line_that_fails_the_engine_is_not_tried_for_ever(lm, tmp_path):
    def broken(request):
        raise RuntimeError("as asked")
        yield

    state = {"state": str(tmp_path)}
    with FakeEngine(answer=broken) as engine, talking(lm, engine, **state) as api:
        id = start(api, "".join(map(line, range(9)))).id
        wait_until(lambda: api.batches.retrieve(id).request_counts.failed)
        wait_until(lambda: not engine.live)
        failed = api.batches.retrieve(id).request_counts.failed
        assert 1 <= failed <= 2, "those that were in flight"
    with FakeEngine() as engine, talking(lm, engine, **state) as api:
        batch = ended(api, id)
        assert batch.request_counts.completed == 9 - batch.request_counts.failed >= 7
        errors = lines_of(api, batch.error_file_id).values()
        assert {e["response"]["body"]["error"]["code"] for e in errors} == {"engine_failed"}


def test_a_cancelled_batch_keeps_its_answers(lm, tmp_path):
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        file = upload(api, "".join(map(line, range(12))))
        with engine.held(20):
            batch = api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
            wait_until(lambda: api.batches.retrieve(batch.id).request_counts.completed >= 2)
            engine.wait_for(lambda: len(engine.live) == 2)
            with pytest.raises(openai.ConflictError, match="reads this file"):
                api.files.delete(file.id)
            assert api.batches.cancel(batch.id).status == "cancelling"
            batch = ended(api, batch.id)
        assert batch.status == "cancelled" and batch.error_file_id is None
        counts = batch.request_counts
        assert 2 <= counts.completed < 12 == counts.total
        assert len(lines_of(api, batch.output_file_id)) == counts.completed
        assert engine.wait_for(lambda: not engine.live), "its lines in flight were cancelled"
        with pytest.raises(openai.ConflictError, match="is cancelled"):
            api.batches.cancel(batch.id)


INVALID = [
    (line(0) + "\n{\n", 3, "needs custom_id"),
    (line(0) + line(0), 2, "there twice"),
    (line(0, stream=True), 1, "stream has no use"),
    (line(0, background=True), 1, "background has no use"),
    (line(0).replace(URL, "/v1/embeddings"), 1, "not the batch's endpoint"),
    ("".join(map(line, range(13))), 13, "at most 12 lines"),
    ("\n", None, "no lines"),
]


def test_an_invalid_file_fails_its_batch_by_line_and_the_rest_expires(lm, tmp_path, monkeypatch):
    with FakeEngine() as engine:
        with talking(lm, engine, state=str(tmp_path), files=SMALL) as api:
            for text, number, reason in INVALID:
                batch = ended(api, start(api, text).id)
                api.files.delete(batch.input_file_id)
                [error] = batch.errors.data
                assert batch.status == "failed" and error.line == number and reason in error.message
                assert str(tmp_path) not in error.message and not engine.requests
            monkeypatch.setattr("jaxllama.serving.http.file_store.WINDOW_SECONDS", 0)
            batch = ended(api, start(api, line(0) + line(1)).id)
            assert batch.status == "expired" and batch.output_file_id is None
            errors = lines_of(api, batch.error_file_id)
            assert {e["error"]["code"] for e in errors.values()} == {"batch_expired"}
            assert errors.keys() == {"c0", "c1"} and not engine.requests


@pytest.fixture
def room():
    """A function that bounds the size of every file of this process; None lifts the bound."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def bound(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))

    yield bound
    bound(None)


def test_a_batch_waits_for_a_full_disk_and_computes_no_line_twice(lm, tmp_path, room, caplog):
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        engine._go(0)
        id = start(api, "".join(map(line, range(20)))).id
        engine._go(18)
        wait_until(lambda: api.batches.retrieve(id).request_counts.completed >= 4)
        assert engine.wait_for(lambda: len(engine.live) == 2 and not engine._steps)
        sent = len(engine.requests)
        room(100)
        engine._go(math.inf)
        events = lambda: [record.getMessage() for record in caplog.records]  # noqa: E731
        wait_until(lambda: "a batch waits for the disk" in events())
        with pytest.raises(openai.InternalServerError) as refused:
            upload(api, line(0))
        assert refused.value.status_code == 503 and refused.value.code == "state_unavailable"
        time.sleep(0.2)  # ten looks
        assert len(engine.requests) == sent, "those in flight, and no other"
        assert api.batches.retrieve(id).status == "in_progress"
        assert events().count("a batch waits for the disk") == 1
        room(None)
        batch = ended(api, id)
        assert batch.status == "completed" and batch.request_counts.completed == 20
        assert lines_of(api, batch.output_file_id).keys() == {f"c{n}" for n in range(20)}
        assert len(engine.requests) == 20
        upload(api, line(0))


def test_a_batch_whose_file_is_gone_fails(lm, tmp_path):
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        file = upload(api, line(0))
        (tmp_path / "files" / file.id).unlink()
        made = api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        batch = ended(api, made.id)
        assert batch.status == "failed"
        assert batch.errors.data[0].message == "the input file is gone from the server's disk"
        with pytest.raises(openai.APIStatusError, match="contents of 'file-.*are gone") as gone:
            api.files.content(file.id)
        assert gone.value.status_code == 410
        # So does one whose answers are damaged.
        engine._go(0)
        second = start(api, "".join(map(line, range(4)))).id
        wait_until(lambda: api.batches.retrieve(second).status == "in_progress")
    store = FileStore(tmp_path)
    store.path(store.batch(second).output_id).write_text("no JSON\n")
    store.close()
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        assert "no answer of a batch" in ended(api, second).errors.data[0].message


def test_a_folder_that_cannot_be_used(lm, tmp_path):
    """A start says so in one line. A server that runs already answers all but files."""
    (tmp_path / "files").write_text("no folder")
    with pytest.raises(JaxLlamaError, match=f"--state {tmp_path}: File exists"):
        process._check_files(tmp_path)
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert api.chat.completions.create(**chat).choices
        for call in (api.files.list, api.batches.list, lambda: upload(api, line(0))):
            with pytest.raises(openai.InternalServerError, match="cannot be used: (File|Not a)"):
                call()
        (tmp_path / "files").unlink()
        assert api.files.list().data == [] and upload(api, line(0)).bytes > 0


def test_uploads_that_do_not_end_are_bounded(lm, tmp_path):
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    go, begun = threading.Event(), [threading.Event() for _ in range(2)]

    def slow(event):
        yield head + b"x" * 3800
        event.set()
        go.wait(30)
        yield b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--'

    with (
        FakeEngine() as engine,
        serving(lm, engine, state=str(tmp_path), files=SMALL) as url,
        ThreadPoolExecutor(2) as pool,
    ):

        def send(event):
            with client(url) as http:
                return http.post("/v1/files", content=slow(event), headers=kind).status_code

        sent = [pool.submit(send, event) for event in begun]
        assert all(event.wait(30) for event in begun)
        whole = {"file": ("in.jsonl", b"x" * 3000)}
        with client(url) as http:
            ask = lambda: http.post("/v1/files", files=whole, data={"purpose": "batch"})  # noqa: E731
            wait_until(lambda: ask().status_code == 429)
            assert error_of(ask())["code"] == "too_many_uploads"
            go.set()
            assert [one.result() for one in sent] == [200, 200]
            assert ask().status_code == 200


def test_sizes_are_bounded(lm, tmp_path):
    with FakeEngine() as engine:
        with talking(lm, engine, state=str(tmp_path), files=SMALL, max_body=500) as api:
            with pytest.raises(openai.APIStatusError, match="larger than 4000 bytes"):
                upload(api, "x" * 4001)
            with pytest.raises(openai.APIStatusError, match="larger than 4000 bytes"):
                upload(api, "x" * 2_000_000)
            kept = [upload(api, "x" * 4000) for _ in range(3)]
            with pytest.raises(openai.APIStatusError, match="room for files is used up"):
                upload(api, "x")
            api.files.delete(kept[0].id)
            upload(api, line(0))
            file = upload(api, line(1))
            with engine.held():
                for _ in range(2):
                    api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
                with pytest.raises(openai.RateLimitError, match="have not ended"):
                    api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    folder = tmp_path / "files"
    parts = [path for path in folder.iterdir() if path.name.startswith("part-")]
    assert not parts, "refused files leave nothing"


def test_a_key_sees_its_own_and_its_limits_hold(lm, tmp_path):
    with (
        FakeEngine() as engine,
        serving(lm, engine, state=str(tmp_path), api_keys=("one", "two")) as url,
    ):
        one, two = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            for key in ("one", "two")
        )
        with one, two:
            batch = ended(one, start(one, line(0)).id)
            assert batch.request_counts.completed == 1
            for find in (
                lambda: two.batches.retrieve(batch.id),
                lambda: two.batches.cancel(batch.id),
                lambda: two.files.retrieve(batch.input_file_id),
                lambda: two.files.content(batch.output_file_id),
                lambda: two.files.delete(batch.output_file_id),
                lambda: two.batches.create(
                    input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    find()
            assert two.files.list().data == [] and two.batches.list().data == []
            id = batch.id
    with (
        FakeEngine() as engine,
        serving(lm, engine, state=str(tmp_path), api_keys=("two",)) as url,
        client(url) as http,
    ):
        assert http.get(f"/v1/batches/{id}", headers={"x-api-key": "one"}).status_code == 401


def test_a_line_that_breaks_something_of_ours_fails_alone(lm, tmp_path, monkeypatch):
    """Half a surrogate pair as custom_id, and a line whose answer raises."""
    post = batch_worker.runner.post

    async def breaks(app, url, body, *more):
        if body.get("seed") == 13:
            raise RuntimeError("no such luck")
        return await post(app, url, body, *more)

    monkeypatch.setattr(batch_worker.runner, "post", breaks)
    half = line(0).replace("c0", "\\ud800")
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        batch = ended(api, start(api, half + line(1) + line(2, seed=13)).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert lines_of(api, batch.output_file_id).keys() == {"\ud800", "c1"}
        [failed] = lines_of(api, batch.error_file_id).values()
        assert failed["custom_id"] == "c2" and failed["error"]["code"] == "internal_error"
        assert len(engine.requests) == 2, "each line is computed once"


def test_a_batch_that_breaks_something_of_ours_fails(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_worker.runner, "finished", lambda path: 1 / 0)
    with FakeEngine() as engine, talking(lm, engine, state=str(tmp_path)) as api:
        batch = ended(api, start(api, line(0)).id)
        assert batch.status == "failed" and "internal error" in batch.errors.data[0].message


def test_the_batches_of_one_key_keep_no_other_waiting(lm, tmp_path, monkeypatch):
    """Four batches that cannot be written, and are tried again and again."""
    finished, bad = batch_worker.runner.finished, set[str]()

    def full(path):
        if "one" in path.name:
            raise OSError(28, "No space left on device")
        return finished(path)

    def named(store, id):
        return f"{id}-{'one' if id in bad else 'two'}"

    monkeypatch.setattr(batch_worker.runner, "finished", full)
    path = FileStore.path
    monkeypatch.setattr(
        FileStore, "path", lambda store, id: path(store, id).with_name(named(store, id))
    )
    with (
        FakeEngine() as engine,
        serving(lm, engine, state=str(tmp_path), api_keys=("one", "two")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as one,
        openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0) as two,
    ):
        create = FileStore.create

        def marked(store, *arguments):
            batch = create(store, *arguments)
            stored = store.batch(batch.id)
            if stored.owner == owner_of(b"one"):
                bad.update((stored.output_id, stored.error_id))
            return batch

        monkeypatch.setattr(FileStore, "create", marked)
        held = [start(one, line(0)).id for _ in range(batch_worker.RUNNING)]
        assert ended(two, start(two, line(1)).id).status == "completed"
        assert {one.batches.retrieve(id).status for id in held} <= {"validating", "in_progress"}


def test_a_worker_stops_although_it_is_woken(tmp_path):
    async def run() -> bool:
        store = FileStore(tmp_path)
        worker = batch_worker.BatchWorker(store, "m", 1, None, {})
        looking = asyncio.create_task(worker._look(None))
        await asyncio.sleep(0.2)
        worker.wake()
        looking.cancel()
        await asyncio.wait({looking}, timeout=5)
        return looking.cancelled()

    assert asyncio.run(run())


def test_uploads_of_strangers_and_without_a_folder_are_refused(lm, tmp_path):
    file = {"file": ("in.jsonl", io.BytesIO(line(0).encode()))}
    form = {"content-type": "multipart/form-data; boundary=x"}
    with FakeEngine() as engine:
        with serving(lm, engine, state=str(tmp_path)) as url, client(url) as http:
            reply = http.post(
                "/v1/files",
                data={"purpose": "batch"},
                files=file,
                headers={"origin": "https://elsewhere.example"},
            )
            assert reply.status_code == 403 and error_of(reply)["code"] == "unknown_origin"
            for origin in ("http://[", "null", url.removeprefix("http://")):
                reply = http.post("/v1/files", content=b"", headers={**form, "origin": origin})
                assert reply.status_code == 403
            for path in ("/v1/files", "/v1/batches"):
                for limit in ("9" * 5000, "0" * 5000, "-1", "1.5", ""):
                    reply = http.get(path, params={"limit": limit})
                    assert reply.status_code == 400 and error_of(reply)["param"] == "limit"
            reply = http.post(
                "/v1/files", data={"purpose": "batch"}, files=file, headers={"origin": url}
            )
            assert reply.status_code == 200
            for form, param in (
                ({"purpose": "fine-tune"}, "purpose"),
                ({"purpose": "batch", "expires_after[seconds]": "9"}, "expires_after[seconds]"),
            ):
                reply = http.post("/v1/files", data=form, files=file)
                assert reply.status_code == 400 and error_of(reply)["param"] == param
            reply = http.post("/v1/files", data={"purpose": "batch"}, files={"a": b""})
            assert error_of(reply)["param"] == "file"
            assert http.post("/v1/files", json={}).status_code == 415
            # A file name that is no text.
            part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
            parts = part % (b"purpose", b"batch"), part % (b'file"; filename="\\ud800.a', b"x")
            reply = http.post(
                "/v1/files",
                content=b"".join(parts) + b"--x--\r\n",
                headers={
                    "content-type": "multipart/form-data; boundary=x; charset=raw_unicode_escape"
                },
            )
            assert reply.status_code == 200 and reply.json()["filename"] == "?.a", reply.text
            broken = http.post(
                "/v1/files",
                content=b"--x\r\nnonsense",
                headers={"content-type": "multipart/form-data; boundary=x"},
            )
            assert broken.status_code == 400
        with serving(lm, engine) as url, client(url) as http:
            for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1"):
                reply = http.get(path)
                assert reply.status_code == 400 and "--state" in error_of(reply)["message"]


@pytest.mark.slow
def test_a_killed_server_of_two_front_ends(tmp_path):
    """A batch of 300 lines over real processes: killed in the middle, every line is there once."""
    pytest.importorskip("opentelemetry.exporter")
    folder = tiny_checkpoint(tmp_path)
    flags = ["--state", str(tmp_path / "state"), "--api-servers", "2", "--max-slots", "2"]
    flags += ["--max-len", "96", "--max-queue", "8"]
    with Collector() as collector:
        flags += ["--otlp-traces-endpoint", collector.url]
        with serve(folder, *flags) as (process, url, _):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=2) as api:
                id = start(api, "".join(line(n, max_tokens=40) for n in range(300))).id
                wait_until(lambda: api.batches.retrieve(id).request_counts.completed >= 10)
                process.kill()
                process.wait()
        with serve(folder, *flags) as (process, url, log):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=2) as api:
                batch = ended(api, id)
                assert batch.status == "completed" and batch.request_counts.completed == 300
                answers = lines_of(api, batch.output_file_id)
                assert answers.keys() == {f"c{n}" for n in range(300)}
            process.terminate()
            assert process.wait(60) == 0
        text = log.read_text()
        again = text.count('"path": "/v1/chat/completions"')
        assert 0 < again <= 292, "answered lines were not sent again"
        names = {span.name for span in collector.spans}
    assert {"POST /v1/chat/completions", "queue", "prefill", "decode"} <= names


@pytest.mark.parametrize("is_answered", [False, True], ids=["in flight", "not written"])
def test_lines_without_a_written_answer_expire_with_their_batch(tmp_path, monkeypatch, is_answered):
    store = FileStore(tmp_path)
    store.check()
    file = store.add("me", "in", io.BytesIO("".join(map(line, range(5))).encode()))
    id = store.create("me", URL, file.id, None).id
    link: Any = SimpleNamespace(failure=None)
    worker = batch_worker.BatchWorker(store, NAME, 2, link, {URL: False})
    add, now, posted = batch_worker._Lines.add, batch_worker._now(), []

    async def post(*_: object) -> tuple[int, dict]:
        posted.append(True)
        if len(posted) == 2:
            monkeypatch.setattr(batch_worker, "_now", lambda: now + 2 * 24 * 3600)
        await asyncio.sleep(0 if is_answered else 60)
        return 200, {}

    def add_errors(file: batch_worker._Lines, text: str) -> None:
        if json.loads(text)["error"] is None:
            raise OSError("no room")
        add(file, text)

    monkeypatch.setattr(batch_worker.runner, "post", post)
    monkeypatch.setattr(batch_worker._Lines, "add", add_errors)
    stored: Any = store.batch(id)
    asyncio.run(batch_worker._Run(worker, stored, cast(Any, None)).run())
    ended: Any = store.batch(id)
    assert ended.batch.status == "expired" and len(posted) == 2
    errors = [json.loads(text) for text in store.path(ended.error_id).read_text().splitlines()]
    assert sorted(entry["custom_id"] for entry in errors) == [f"c{n}" for n in range(5)]
    assert {entry["error"]["code"] for entry in errors} == {"batch_expired"}
    store.close()


def test_a_file_that_is_not_stored_leaves_nothing(tmp_path, monkeypatch):
    store = FileStore(tmp_path)
    store.check()

    def refuse(*_: object) -> None:
        raise OSError("no room")

    with pytest.raises(UnicodeEncodeError):
        store.add("me", "\ud800", io.BytesIO(b"x"))
    monkeypatch.setattr("jaxllama.serving.http.file_store.os.replace", refuse)
    with pytest.raises(StoreUnavailable):
        store.add("me", "a", io.BytesIO(b"x"))
    assert not [*tmp_path.rglob("file-*"), *tmp_path.rglob("part-*")]
    assert store.files("me", None, None, 9, True) == ([], False)
    store.close()

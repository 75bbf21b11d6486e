"""Batch files: many bodies from a file, their answers into another, without a network.

    run(app, name, source, target, at_once, show) -> {"answered": ..., "failed": ..., "kept": ...}

Lines have the form of OpenAI's Batch API. A line of input is ``{"custom_id", "method": "POST",
"url", "body"}``, and a line of output ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``. Output lines come in the order in which answers end. ``url`` is
any of the server's POST paths. A body without ``model`` means the loaded model.

A batch can be resumed: ids with an answer in ``target`` are skipped, and an incomplete last line of
a killed process is removed. A line in ``target`` is a final answer: a body that the full queue
refused is sent again, and an engine that fails ends the run without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from jaxllama import progress
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

AGAIN_SECONDS = 0.05
Line = tuple[str, str, JsonObject]  # custom_id, url, body
# Fields that a line's body cannot have: what they ask for needs a client that waits.
WITHOUT_USE = ("stream", "background")


class InvalidLine(JaxLlamaError):
    """A line that is no request of a batch. number: from 1 on. reason: without the file's name."""

    def __init__(self, source: Path, number: int, reason: str) -> None:
        super().__init__(f"{source}:{number}: {reason}")
        self.number, self.reason = number, reason


def run(
    app: ASGIApp, name: str, source: Path, target: Path, at_once: int, show: bool = True
) -> dict[str, int]:
    """Answer a batch file and return the numbers of answers.

    at_once: number of bodies in flight. Raises JaxLlamaError for an invalid line, before anything
    is answered, and for an engine that fails.
    """
    lines, kept = left(source, target)
    rest = iter(lines)
    with answer_file(target, len(lines), kept, show) as (counts, add):

        async def work() -> None:
            for line in rest:
                add(*await answer(app, name, line))

        asyncio.run(together(work, min(at_once, len(lines))))
    return counts


def left(source: Path, target: Path) -> tuple[list[Line], int]:
    """Return (the lines without an answer in ``target``, the number of answers there)."""
    done = finished(target)
    return [line for line in read(source) if line[0] not in done], len(done)


@contextlib.contextmanager
def answer_file(
    target: Path, total: int, kept: int, show: bool
) -> Generator[tuple[dict[str, int], Callable[[int, str], None]]]:
    """Yield (the numbers of answers, the function that adds a line by its status and counts it)."""
    counts = {"answered": 0, "failed": 0, "kept": kept}
    bar = progress.working("answering", total, show, unit="requests")
    with open(target, "a", encoding="utf-8") as out, bar as step:

        def add(status: int, line: str) -> None:
            out.write(line)
            out.flush()
            counts["answered" if status == 200 else "failed"] += 1
            step()

        yield counts, add


async def answer(app: ASGIApp, name: str, line: Line) -> tuple[int, str]:
    """Return (the status, the line of output) of a line of input.

    Raises JaxLlamaError if the engine fails.
    """
    custom_id, url, body = line
    request_id = uuid.uuid4().hex
    body = {"model": name, **body}
    while True:
        status, reply = await post(app, url, body, request_id)
        if status not in (429, 503):
            break
        if status == 503:
            raise JaxLlamaError(reply["error"]["message"])
        await asyncio.sleep(AGAIN_SECONDS)
    return status, answer_line(custom_id, request_id, status, reply)


def answer_line(custom_id: str, request_id: str, status: int, answer: JsonObject) -> str:
    """Return the line of an answer."""
    response: JsonObject = {"status_code": status, "request_id": request_id, "body": answer}
    return output_line(custom_id, request_id, response, None)


def output_line(
    custom_id: str, request_id: str, response: JsonObject | None, error: JsonObject | None
) -> str:
    """Return the line of a line of input: its answer, or the reason why there is none."""
    entry = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    line = json.dumps(entry, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        line = json.dumps(entry)
    return line + "\n"


async def together(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run some workers at the same time, and raise the exception of the first that fails."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def post(
    app: ASGIApp, path: str, body: JsonObject, request_id: str, state: JsonObject | None = None
) -> tuple[int, JsonObject]:
    """Return the application's answer to one body: (status, JSON).

    state: the ``state`` of the request's scope, for the application's middleware.
    """
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {} if state is None else state,
    }
    sent: list[Message] = []
    arrived = False

    async def receive() -> Message:
        nonlocal arrived
        if arrived:
            await asyncio.Event().wait()  # the client never leaves
        arrived = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


def read(source: Path) -> list[Line]:
    """Return the lines of a batch file. Raises InvalidLine naming the first invalid line."""
    return list(iterate(source))


def iterate(source: Path) -> Iterator[Line]:
    """Yield the lines of a batch file, checked one by one. Raises InvalidLine."""
    seen: set[str] = set()
    for number, text in _numbered(source):
        try:
            entry = json.loads(text)
            custom_id, url, body = entry["custom_id"], entry["url"], entry["body"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidLine(source, number, "needs custom_id, url and body") from None
        if not (isinstance(custom_id, str) and isinstance(url, str) and isinstance(body, dict)):
            raise InvalidLine(source, number, "custom_id and url are texts, body is an object")
        if entry.get("method", "POST") != "POST":
            raise InvalidLine(source, number, "method is POST")
        if custom_id in seen:
            raise InvalidLine(source, number, f"custom_id {custom_id!r} is there twice")
        for field in WITHOUT_USE:
            if body.get(field):
                raise InvalidLine(source, number, f"{field} has no use in a batch")
        seen.add(custom_id)
        yield custom_id, url, body


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None


def finished(target: Path) -> set[str]:
    """Return the ids with an answer in ``target``, and remove an incomplete last line."""
    if not target.exists():
        return set()
    done: set[str] = set()
    with open(target, "r+b") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                done.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise JaxLlamaError(f"{target}:{number}: no answer of a batch: not mine") from None
            end += len(line)
        file.truncate(end)
    return done

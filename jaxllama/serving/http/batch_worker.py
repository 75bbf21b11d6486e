"""The worker of a front end that runs the batches of ``/v1/batches``.

    async with BatchWorker(store, name, at_once, link).running(app): ...
    worker.wake()                  a batch is new, or was cancelled

Contract. Each front end has a worker, and each batch one worker at a time (``FileStore.claimed``).
If a front end ends, another one or its successor continues its batches, so a batch survives a
restart. A line with an answer on disk is not sent again. A line that was in flight is sent again.
The lines of all batches share ``at_once`` places, so that clients that wait find room in the
engine's queue. They run behind requests of the usual priority.

Lines take the way of a request of their owner's key: they count for its limits, for the metrics and
for the log. The journal leaves them out, because the batch remembers them. An answer with status
200 goes to the output file, any other to the error file. A full queue, a key's limit and a journal
that cannot be written delay a line. A line that was in flight when the engine failed gets that
error, so that a line which fails the engine is not tried for ever. Other lines, and those of a
process that was killed, stay for the next server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TextIO

from starlette.types import ASGIApp

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.batch_schemas import BatchError, BatchErrors, BatchObject
from jaxllama.serving.http import batch as runner
from jaxllama.serving.http.batch import InvalidLine, Line
from jaxllama.serving.http.file_store import FileStore, StoredBatch
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

LOOK_SECONDS = 2.0  # between two looks for batches of front ends that have ended
BEAT_SECONDS = 0.5  # between two looks at a running batch: is it cancelled, and its counts
RUNNING = 4  # batches of one key that a front end runs at once
AGAIN_SECONDS = {"rate_limit_exceeded": 1.0, "queue_full": 0.1}
PRIORITY = -1  # of a line that names none
INTERNAL = "internal error: the server's log has the reason"
EXPIRED = "the batch ended before this line began"
_log = logging.getLogger("jaxllama.serving")


class BatchWorker:
    """Runs batches; the module docstring has the rules.

    name: the model of lines without one. urls: paths of lines, and whether their bodies have a
    priority.
    """

    def __init__(
        self,
        store: FileStore,
        name: str,
        at_once: int,
        link: EngineClient,
        urls: Mapping[str, bool],
    ) -> None:
        self._urls = urls
        self._store, self._name, self._link = store, name, link
        self._places = asyncio.Semaphore(at_once)
        self._at_once = at_once
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: collections.Counter[str] = collections.Counter()  # of the tasks
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    @contextlib.asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncGenerator[None]:
        """Run batches within the block; those that have not ended stay for the next worker."""
        looking = asyncio.create_task(self._look(app))
        try:
            yield
        finally:
            tasks = [looking, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, app: ASGIApp) -> None:
        while True:
            self._woken.clear()
            try:
                found = await asyncio.to_thread(self._store.open)
            except sqlite3.Error as error:
                _log.error("the batches cannot be read", extra={"fields": {"reason": str(error)}})
                found = []
            for id, owner in found:
                if id not in self._tasks and self._owners[owner] < RUNNING:
                    self._start(id, owner, app)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), LOOK_SECONDS)

    def _start(self, id: str, owner: str, app: ASGIApp) -> None:
        task = asyncio.create_task(self._claim(id, app))
        self._tasks[id] = task
        self._owners[owner] += 1

        def ended(_: object) -> None:
            del self._tasks[id]
            self._owners[owner] -= 1
            self.wake()

        task.add_done_callback(ended)

    async def _claim(self, id: str, app: ASGIApp) -> None:
        try:
            stored = await asyncio.to_thread(self._store.batch, id)
            if stored is None:
                return
            with self._store.claimed(stored) as is_ours:
                if is_ours:
                    run = _Run(
                        self._store, stored, self._name, app, self._places, self._link, self._urls
                    )
                    try:
                        await run.run(self._at_once)
                    except Exception as error:
                        if isinstance(error, (OSError, sqlite3.Error)):
                            raise
                        _log.error("an error of ours", exc_info=error)
                        await run.fail(JaxLlamaError(INTERNAL))
                    return
        except (OSError, sqlite3.Error) as error:  # of the disk: tried again
            fields = {"batch": id, "reason": str(error)}
            _log.error("a batch cannot be written", extra={"fields": fields})
        await asyncio.sleep(LOOK_SECONDS)  # another front end runs it


class _Run:
    """One batch on its way."""

    def __init__(
        self,
        store: FileStore,
        stored: StoredBatch,
        name: str,
        app: ASGIApp,
        places: asyncio.Semaphore,
        link: EngineClient,
        urls: Mapping[str, bool],
    ) -> None:
        self._urls = urls
        self._store, self._stored, self._name, self._link = store, stored, name, link
        self._app, self._places, self._id = app, places, stored.batch.id
        self._completed = self._failed = 0
        self._is_stopping = asyncio.Event()

    async def run(self, at_once: int) -> None:
        stored = await asyncio.to_thread(self._store.batch, self._id)
        if stored is None or stored.batch.status not in ("validating", "in_progress", "cancelling"):
            return  # it ended before it was claimed
        source = self._store.path(stored.input_id)
        if stored.batch.status == "validating":
            try:
                total = await asyncio.to_thread(self._check, stored.batch.endpoint)
            except JaxLlamaError as error:
                await self.fail(error)
                return
            batch = await self._update(lambda batch: _begin(batch, total))
            _log.info("a batch begins", extra={"fields": {"batch": self._id, "lines": total}})
        else:
            batch = stored.batch
        paths = self._store.path(stored.output_id), self._store.path(stored.error_id)
        answered, refused = await asyncio.to_thread(lambda: tuple(map(runner.finished, paths)))
        self._completed, self._failed = len(answered), len(refused)
        lines = (line for line in runner.iterate(source) if line[0] not in answered | refused)
        with (
            open(paths[0], "a", encoding="utf-8", opener=_private) as output,
            open(paths[1], "a", encoding="utf-8", opener=_private) as errors,
        ):
            watching = asyncio.create_task(self._watch(batch, output, errors))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(at_once):
                        group.create_task(self._work(lines, output, errors))
            except ExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, sqlite3.Error):
                    await watching
            await self._finish(lines, errors)

    def _check(self, endpoint: str) -> int:
        """Return the number of lines. Raises JaxLlamaError for an invalid one."""
        total, source = 0, self._store.path(self._stored.input_id)
        for _, url, _ in runner.iterate(source):
            total += 1
            if url != endpoint:
                raise InvalidLine(source, total, f"url is not the batch's endpoint {endpoint}")
            if total > self._store.bounds.lines:
                bound = self._store.bounds.lines
                raise InvalidLine(source, total, f"a batch has at most {bound} lines")
        if not total:
            raise JaxLlamaError("the file has no lines")
        return total

    async def fail(self, error: Exception) -> None:
        """End the batch with this error."""
        line = error.number if isinstance(error, InvalidLine) else None
        source = f"{self._store.path(self._stored.input_id)}: "
        text = error.reason if isinstance(error, InvalidLine) else str(error).removeprefix(source)

        def change(batch: BatchObject) -> None:
            batch.status, batch.failed_at = "failed", _now()
            batch.errors = BatchErrors("list", [BatchError("invalid_batch", text, None, line)])
            self._count(batch)

        await asyncio.to_thread(self._store.end, self._id, change)

    async def _watch(self, batch: BatchObject, output: TextIO, errors: TextIO) -> None:
        """Store the counts from time to time, and stop the lines when no more are wanted."""
        while not self._is_stopping.is_set():
            if batch.status == "cancelling" or _now() >= batch.expires_at:
                break
            size = os.fstat(output.fileno()).st_size + os.fstat(errors.fileno()).st_size
            if not await asyncio.to_thread(self._store.has_room, size):
                break
            await asyncio.sleep(BEAT_SECONDS)
            batch = await self._update(self._count)
        self._is_stopping.set()

    async def _work(self, lines: Iterator[Line], output: TextIO, errors: TextIO) -> None:
        while not self._is_stopping.is_set():
            async with self._places:
                line = None if self._is_stopping.is_set() else next(lines, None)
                if line is None:
                    return
                try:
                    status, text = await self._answer(line)
                except Exception as error:  # of this line: the others go on
                    _log.error("an error of ours", exc_info=error)
                    status, text = 500, _unanswered(line[0], "internal_error", INTERNAL)
                if not status:
                    return
                file = output if status == 200 else errors
                file.write(text)
                file.flush()
                self._completed += status == 200
                self._failed += status != 200

    async def _answer(self, line: Line) -> tuple[int, str]:
        """Return the status and the line of an answer; the status 0 if the batch stops."""
        custom_id, url, body = line
        body = {"model": self._name, **body}
        if self._urls[url]:
            body.setdefault("priority", PRIORITY)
        while not self._is_stopping.is_set():
            if self._link.failure is not None:  # this process ends soon
                await asyncio.sleep(1)
                continue
            request_id = uuid.uuid4().hex
            state: JsonObject = {"batch_owner": self._stored.owner}
            status, answer = await self._post(url, body, request_id, state)
            code = answer.get("error", {}).get("code") if status in (429, 503) else None
            if code == "engine_failed" and self._link.is_lost:
                continue
            if status == 429 or (status == 503 and code != "engine_failed"):
                await asyncio.sleep(AGAIN_SECONDS.get(code or "", 1.0))
            elif status:
                return status, runner.answer_line(custom_id, request_id, status, answer)
        return 0, ""

    async def _post(
        self, url: str, body: JsonObject, request_id: str, state: JsonObject
    ) -> tuple[int, JsonObject]:
        """Return the answer to a body; status 0 if the batch stops meanwhile."""
        asked = asyncio.create_task(runner.post(self._app, url, body, request_id, state))
        stopping = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait((asked, stopping), return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else (0, {})
        finally:
            for task in (asked, stopping):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _finish(self, lines: Iterator[Line], errors: TextIO) -> None:
        """End the batch: all lines are answered, or it was cancelled or has expired."""
        stored = await asyncio.to_thread(self._store.batch, self._id)
        assert stored is not None
        batch, total = stored.batch, stored.batch.request_counts.total
        if batch.status == "cancelling":
            await self._end(_cancelled)
        elif self._completed + self._failed == total:
            await self._update(_finalizing)
            await self._end(_completed)
        elif _now() >= batch.expires_at:
            for custom_id, _, _ in lines:
                errors.write(_unanswered(custom_id, "batch_expired", EXPIRED))
            errors.flush()
            await self._end(_expired)
        else:
            await self.fail(JaxLlamaError("the server's room for files is used up"))
        fields = {"batch": self._id, "completed": self._completed, "failed": self._failed}
        _log.info("a batch has ended", extra={"fields": fields})

    def _count(self, batch: BatchObject) -> None:
        batch.request_counts.completed = self._completed
        batch.request_counts.failed = self._failed

    async def _update(self, change: Callable[[BatchObject], None]) -> BatchObject:
        return await asyncio.to_thread(self._store.update, self._id, change)

    async def _end(self, change: Callable[[BatchObject], None]) -> None:
        def count(batch: BatchObject) -> None:
            self._count(batch)
            change(batch)

        await asyncio.to_thread(self._store.end, self._id, count)


def _begin(batch: BatchObject, total: int) -> None:
    if batch.status == "validating":  # not cancelled meanwhile
        batch.status, batch.in_progress_at = "in_progress", _now()
    batch.request_counts.total = total


def _finalizing(batch: BatchObject) -> None:
    batch.finalizing_at = _now()


def _completed(batch: BatchObject) -> None:
    batch.status, batch.completed_at = "completed", _now()


def _cancelled(batch: BatchObject) -> None:
    batch.status, batch.cancelled_at = "cancelled", _now()


def _expired(batch: BatchObject) -> None:
    batch.status, batch.expired_at = "expired", _now()


def _unanswered(custom_id: str, code: str, message: str) -> str:
    """Return the output line of a line without an answer."""
    error: JsonObject = {"code": code, "message": message}
    return runner.output_line(custom_id, uuid.uuid4().hex, None, error)


def _now() -> int:
    return int(time.time())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

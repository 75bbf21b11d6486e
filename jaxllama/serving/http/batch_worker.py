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
that cannot be written delay a line. On a full disk a batch keeps the answers that it has and waits.
A batch whose input file is gone fails. A line that was in flight when the engine failed gets that
error, so that a line which fails the engine is not tried for ever. Other lines, and those of a
process that was killed, stay for the next server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

from starlette.types import ASGIApp

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.batch_schemas import BatchError, BatchErrors, BatchObject
from jaxllama.serving.http import batch as runner
from jaxllama.serving.http.batch import InvalidLine, Line
from jaxllama.serving.http.file_store import FileStore, StoredBatch, StoreUnavailable
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

LOOK_SECONDS = 2.0  # between two looks for batches of front ends that have ended
BEAT_SECONDS = 0.5  # between two looks at a running batch: is it cancelled, and its counts
RUNNING = 4  # batches that a front end runs at once
AGAIN_SECONDS = {"rate_limit_exceeded": 1.0, "queue_full": 0.1}
PRIORITY = -1  # of a line that names none
_PRIORITIZED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_log = logging.getLogger("jaxllama.serving")


class BatchWorker:
    """Runs batches; the module docstring has the rules. name: the model of lines without one."""

    def __init__(self, store: FileStore, name: str, at_once: int, link: EngineClient) -> None:
        self._store, self._name, self._link = store, name, link
        self._places = asyncio.Semaphore(at_once)
        self._at_once = at_once
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self._reported: tuple[str, str] | None = None

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
            except StoreUnavailable as error:
                self._report("the batches cannot be read", error)
                found = []
            for id in found:
                if id not in self._tasks and len(self._tasks) < RUNNING:
                    self._start(id, app)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), LOOK_SECONDS)

    def _start(self, id: str, app: ASGIApp) -> None:
        task = asyncio.create_task(self._claim(id, app))
        self._tasks[id] = task

        def ended(_: object) -> None:
            del self._tasks[id]
            self.wake()

        task.add_done_callback(ended)

    async def _claim(self, id: str, app: ASGIApp) -> None:
        try:
            stored = await asyncio.to_thread(self._store.batch, id)
            if stored is None:
                return
            with self._store.claimed(stored) as is_ours:
                if is_ours:
                    run = _Run(self._store, stored, self._name, app, self._places, self._link)
                    await run.run(self._at_once)
                    return
        except StoreUnavailable as error:  # tried again
            self._report("a batch cannot be written", error)
        await asyncio.sleep(LOOK_SECONDS)  # another front end runs it

    def _report(self, event: str, error: StoreUnavailable) -> None:
        """Log an error of the disk, but not the same one at every look."""
        if (event, error.reason) != self._reported:
            self._reported = event, error.reason
            _log.error(event, extra={"fields": {"reason": error.reason}})


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
    ) -> None:
        self._store, self._stored, self._name, self._link = store, stored, name, link
        self._app, self._places, self._id = app, places, stored.batch.id
        self._completed = self._failed = 0
        self._is_stopping = asyncio.Event()
        self._is_waiting = False  # whether the log says that the disk refuses answers

    async def run(self, at_once: int) -> None:
        try:
            await self._run(at_once)
        except JaxLlamaError as error:  # of the input, or of the answers on the disk
            await self._fail(error)
        except OSError as error:
            raise StoreUnavailable(error, self._store.path(self._stored.input_id).parent) from None

    async def _run(self, at_once: int) -> None:
        stored = await asyncio.to_thread(self._store.batch, self._id)
        if stored is None or stored.batch.status not in ("validating", "in_progress", "cancelling"):
            return  # it ended before it was claimed
        source = self._store.path(stored.input_id)
        if not await asyncio.to_thread(source.exists):
            raise JaxLlamaError("the input file is gone from the server's disk")
        if stored.batch.status == "validating":
            total = await asyncio.to_thread(self._check, stored.batch.endpoint)
            batch = await self._update(lambda batch: _begin(batch, total))
            _log.info("a batch begins", extra={"fields": {"batch": self._id, "lines": total}})
        else:
            batch = stored.batch
        paths = self._store.path(stored.output_id), self._store.path(stored.error_id)
        answered, refused = await asyncio.to_thread(lambda: tuple(map(runner.finished, paths)))
        self._completed, self._failed = len(answered), len(refused)
        lines = (line for line in runner.iterate(source) if line[0] not in answered | refused)
        with (
            contextlib.closing(_Lines(paths[0])) as output,
            contextlib.closing(_Lines(paths[1])) as errors,
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
                with contextlib.suppress(asyncio.CancelledError):
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

    async def _fail(self, error: Exception) -> None:
        line = error.number if isinstance(error, InvalidLine) else None
        source = f"{self._store.path(self._stored.input_id)}: "
        text = error.reason if isinstance(error, InvalidLine) else str(error).removeprefix(source)

        def change(batch: BatchObject) -> None:
            batch.status, batch.failed_at = "failed", _now()
            batch.errors = BatchErrors("list", [BatchError("invalid_batch", text, None, line)])
            self._count(batch)

        await asyncio.to_thread(self._store.end, self._id, change)

    async def _watch(self, batch: BatchObject, output: _Lines, errors: _Lines) -> None:
        """Store the counts from time to time, and stop the lines when no more are wanted."""
        while not self._is_stopping.is_set():
            if batch.status == "cancelling" or _now() >= batch.expires_at:
                break
            with contextlib.suppress(StoreUnavailable):  # the next look may succeed
                if not await asyncio.to_thread(self._store.has_room, output.size + errors.size):
                    break
                await asyncio.sleep(BEAT_SECONDS)
                batch = await self._update(self._count)
                continue
            await asyncio.sleep(BEAT_SECONDS)
        self._is_stopping.set()

    async def _work(self, lines: Iterator[Line], output: _Lines, errors: _Lines) -> None:
        while not self._is_stopping.is_set():
            async with self._places:
                line = None if self._is_stopping.is_set() else next(lines, None)
                if line is None:
                    return
                status, text = await self._answer(line)
                if not status:
                    return
                if not await self._keep(text, output if status == 200 else errors):
                    return
                self._completed += status == 200
                self._failed += status != 200

    async def _keep(self, text: str, file: _Lines) -> bool:
        """Write an answer, as soon as the disk takes it; return False if the batch stops first."""
        while True:
            try:
                file.add(text)
                return True
            except OSError as error:
                if not self._is_waiting:
                    self._is_waiting = True
                    fields = {"batch": self._id, "reason": error.strerror or str(error)}
                    _log.error("a batch waits for the disk", extra={"fields": fields})
            if self._is_stopping.is_set():
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), LOOK_SECONDS)

    async def _answer(self, line: Line) -> tuple[int, str]:
        """Return the status and the line of an answer; the status 0 if the batch stops."""
        custom_id, url, body = line
        body = {"model": self._name, **body}
        if url in _PRIORITIZED:
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

    async def _finish(self, lines: Iterator[Line], errors: _Lines) -> None:
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
                errors.add(_expired_line(custom_id))
            await self._end(_expired)
        else:
            await self._fail(JaxLlamaError("the server's room for files is used up"))
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


class _Lines:
    """A file to which whole lines are added; a line that the disk refuses leaves nothing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def add(self, line: str) -> None:
        """Add a line. Raises OSError."""
        data, before = line.encode(), self.size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        os.close(self._file)


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


def _expired_line(custom_id: str) -> str:
    error: JsonObject = {
        "code": "batch_expired",
        "message": "the batch ended before this line began",
    }
    return runner.output_line(custom_id, uuid.uuid4().hex, None, error)


def _now() -> int:
    return int(time.time())

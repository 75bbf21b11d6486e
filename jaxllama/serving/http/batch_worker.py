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
import collections
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path

from starlette.types import ASGIApp

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.batch_schemas import BatchError, BatchErrors, BatchObject, BatchStatus
from jaxllama.serving.http import batch as runner
from jaxllama.serving.http.batch import InvalidLine, Line
from jaxllama.serving.http.file_store import FileStore, StoredBatch, StoreUnavailable
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.typing import JsonObject

LOOK_SECONDS = 2.0  # between two looks for batches of front ends that have ended
BEAT_SECONDS = 0.5  # between two looks at a running batch: is it cancelled, and its counts
RUNNING = 4  # batches of one key that a front end runs at once
AGAIN_SECONDS = {"rate_limit_exceeded": 1.0, "queue_full": 0.1}
PRIORITY = -1  # of a line that names none
INTERNAL = "internal error: the server's log has the reason"
EXPIRED = "the batch ended before this line was answered"
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
        self.store, self.name, self.at_once, self.link, self.urls = store, name, at_once, link, urls
        self.places = asyncio.Semaphore(at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: collections.Counter[str] = collections.Counter()  # of the tasks
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
                found = await asyncio.to_thread(self.store.open)
            except StoreUnavailable as error:
                self._report("the batches cannot be read", error)
                found = []
            for id, owner in found:
                if id not in self._tasks and self._owners[owner] < RUNNING:
                    self._start(id, owner, app)
            # ``wait_for`` of Python 3.11 loses a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._woken.wait()

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
            stored = await asyncio.to_thread(self.store.batch, id)
            if stored is None:
                return
            with self.store.claimed(stored) as is_ours:
                if is_ours:
                    await _Run(self, stored, app).run()
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

    def __init__(self, worker: BatchWorker, stored: StoredBatch, app: ASGIApp) -> None:
        self._worker, self._store, self._stored = worker, worker.store, stored
        self._app, self._id = app, stored.batch.id
        self._completed = self._failed = 0
        self._dropped: list[Line] = []  # taken, but without an answer on disk as the batch stopped
        self._is_stopping = asyncio.Event()
        self._is_waiting = False  # whether the log says that the disk refuses answers

    async def run(self) -> None:
        """Run the batch to its end. Raises StoreUnavailable: a later run goes on."""
        try:
            await self._run()
        except JaxLlamaError as error:  # of the input, or of the answers on the disk
            await self._fail(error)
        except StoreUnavailable:
            raise
        except OSError as error:
            raise StoreUnavailable(error, self._store.path(self._stored.input_id).parent) from None
        except Exception as error:
            _log.error("an error of ours", exc_info=error)
            await self._fail(JaxLlamaError(INTERNAL))

    async def _run(self) -> None:
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
                await runner.together(
                    lambda: self._work(lines, output, errors), self._worker.at_once
                )
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
        """End the batch with this error."""
        line = error.number if isinstance(error, InvalidLine) else None
        source = f"{self._store.path(self._stored.input_id)}: "
        text = error.reason if isinstance(error, InvalidLine) else str(error).removeprefix(source)

        await self._end("failed", BatchError("invalid_batch", text, None, line))

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
            async with self._worker.places:
                line = None if self._is_stopping.is_set() else next(lines, None)
                if line is None:
                    return
                try:
                    status, text = await self._answer(line)
                except Exception as error:  # of this line: the others go on
                    _log.error("an error of ours", exc_info=error)
                    status, text = 500, _unanswered(line[0], "internal_error", INTERNAL)
                is_kept = status and await self._keep(text, output if status == 200 else errors)
                if not is_kept:
                    self._dropped.append(line)
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
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_stopping.wait()

    async def _answer(self, line: Line) -> tuple[int, str]:
        """Return the status and the line of an answer; the status 0 if the batch stops."""
        custom_id, url, body = line
        body = {"model": self._worker.name, **body}
        if self._worker.urls[url]:
            body.setdefault("priority", PRIORITY)
        while not self._is_stopping.is_set():
            if self._worker.link.failure is not None:  # this process ends soon
                await asyncio.sleep(1)
                continue
            request_id = uuid.uuid4().hex
            state: JsonObject = {"batch_owner": self._stored.owner}
            status, answer = await self._post(url, body, request_id, state)
            code = answer.get("error", {}).get("code") if status in (429, 503) else None
            if code == "engine_failed" and self._worker.link.is_lost:
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
            await self._end("cancelled")
        elif self._completed + self._failed == total:
            await self._update(_finalizing)
            await self._end("completed")
        elif _now() >= batch.expires_at:
            for custom_id, _, _ in (*self._dropped, *lines):
                errors.add(_unanswered(custom_id, "batch_expired", EXPIRED))
            await self._end("expired")
        else:
            await self._fail(JaxLlamaError("the server's room for files is used up"))
        fields = {"batch": self._id, "completed": self._completed, "failed": self._failed}
        _log.info("a batch has ended", extra={"fields": fields})

    def _count(self, batch: BatchObject) -> None:
        batch.request_counts.completed = self._completed
        batch.request_counts.failed = self._failed

    async def _update(self, change: Callable[[BatchObject], None]) -> BatchObject:
        return await asyncio.to_thread(self._store.update, self._id, change)

    async def _end(self, status: BatchStatus, error: BatchError | None = None) -> None:
        def change(batch: BatchObject) -> None:
            self._count(batch)
            batch.status = status
            setattr(batch, f"{status}_at", _now())
            if error is not None:
                batch.errors = BatchErrors("list", [error])

        await asyncio.to_thread(self._store.end, self._id, change)


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


def _unanswered(custom_id: str, code: str, message: str) -> str:
    """Return the output line of a line without an answer."""
    error: JsonObject = {"code": code, "message": message}
    return runner.output_line(custom_id, uuid.uuid4().hex, None, error)


def _now() -> int:
    return int(time.time())

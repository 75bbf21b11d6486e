"""Several models as processes: started on first use, and ended to keep a memory budget.

    pool = ModelPool(program, specs, budget, unload_after)
    async with pool.use("name") as url: ...       the model's server; it stays within the block
    await pool.close()

Contract. Each model is a ``jaxllama serve`` of its own on a free local port, so its memory is free
again when it ends. One model starts at a time. If the next one does not fit the budget, the least
recently used model takes no more requests. It ends when its last request has its answer. So no
model is kept away by another one's traffic. A process that ends by itself is started again by the
next request. The processes end with this one, however it ends: their standard input is a pipe from
it.

A model's size is the one that its spec names. Without one it is its files' size before it has
started, and its resident memory afterwards (Linux).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllama.serving.api.schemas import ApiError

MAX_WAITING = 256  # requests that wait for models to start; more get 429
AGAIN_SECONDS = 5.0  # after a failed start, in which requests fail without another one
LOOK_SECONDS = 1.0
KILL_SECONDS = 30.0  # more than the process's own drain
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_LISTENS = re.compile(rb"jaxllama serves .* on (http://\S+)\n")
_log = logging.getLogger("jaxllama.serving")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model of a server of several.

    name: for clients. words: of ``jaxllama serve``. aliases: further names. memory: bytes that it
    takes, None if they are found out.
    """

    name: str
    words: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    memory: int | None = None


def size_of_files(model: str) -> int:
    """Return the bytes of a model's files, 0 for a model that is not on this machine."""
    path = Path(model)
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for kind in WEIGHTS for file in path.glob(kind))


class _Process:
    """A model's process that listens."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, memory: int) -> None:
        self.process, self.url, self.memory = process, url, memory
        self.in_flight, self.is_leaving = 0, False
        self.last_used = time.monotonic()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def is_open(self) -> bool:
        return not self.is_leaving and self.process.returncode is None


class ModelPool:
    """The models; the module docstring has the rules.

    program: the words before each model's own; it prints the line of ``jaxllama serve``, and ends
    when its standard input does. budget: bytes of all models together, None for no bound.
    unload_after: seconds after which an unused model ends, None for never. environment: further
    variables of each model, by its name. drain: seconds that a process may take to end.
    """

    def __init__(
        self,
        program: Sequence[str],
        specs: Sequence[ModelSpec],
        budget: int | None = None,
        unload_after: float | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        drain: float = KILL_SECONDS,
    ) -> None:
        self._program = tuple(program)
        self.specs = {spec.name: spec for spec in specs}
        self._names = {alias: spec.name for spec in specs for alias in (spec.name, *spec.aliases)}
        self._budget, self._unload_after, self._drain = budget, unload_after, drain
        self._environment = environment or {}
        self._sizes = {spec.name: spec.memory for spec in specs}
        self._running: dict[str, _Process] = {}
        self._starting = asyncio.Lock()
        self._starts: dict[str, asyncio.Task[_Process]] = {}
        self._wanted: collections.Counter[str] = collections.Counter()  # requests that wait
        self._failed: dict[str, float] = {}
        self.starts = dict.fromkeys(self.specs, 0)
        self._reaper: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> dict[str, int]:
        """The bytes of each model that runs."""
        return {name: running.memory for name, running in self._running.items() if running.is_open}

    def resolve(self, name: str | None) -> str:
        """Return the model that a client's name means: an alias, or with an adapter behind ":".

        None is the first model. Raises ApiError 404.
        """
        if name is None:
            return next(iter(self.specs))
        found = self._names.get(name) or self._names.get(name.partition(":")[0])
        if found is None:
            message = f"model: no model {name[:100]!r}; there are {', '.join(self._names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[str]:
        """Yield the address of a model's server. Raises ApiError 429 or 503."""
        running = await self._get(name)
        try:
            yield running.url
        finally:
            self._leave(running)

    def urls(self) -> list[str]:
        """Return the addresses of the models that run."""
        return [running.url for running in self._running.values() if running.is_open]

    async def _get(self, name: str) -> _Process:
        if (running := self._enter(name)) is not None:
            return running
        if self._wanted.total() >= MAX_WAITING:
            message = f"{self._wanted.total()} requests wait for models to start"
            raise ApiError(429, message, code="queue_full", retry_after=5)
        task = self._starts.get(name)
        if task is None:
            task = self._starts[name] = asyncio.create_task(self._started(name))
            task.add_done_callback(lambda done: self._forget_start(name, done))
        self._wanted[name] += 1
        try:
            # A client that leaves does not end the start, which others may wait for.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                self._leave(task.result())
            raise
        finally:
            self._wanted[name] -= 1

    async def _started(self, name: str) -> _Process:
        """Return a model that runs, with the requests that wait for it counted.

        They are counted before the lock is free, so another model's start lets them be answered.
        """
        async with self._starting:
            running = self._running.get(name)
            if running is None or not running.is_open:
                running = await self._start(name)
            if self._wanted[name]:
                running.in_flight += self._wanted[name]
                running.idle.clear()
            return running

    def _forget_start(self, name: str, done: asyncio.Task[_Process]) -> None:
        self._starts.pop(name, None)
        if not done.cancelled():
            done.exception()  # those who waited have it; they may all have left

    def _leave(self, running: _Process) -> None:
        running.in_flight -= 1
        running.last_used = time.monotonic()
        if not running.in_flight:
            running.idle.set()

    def _enter(self, name: str) -> _Process | None:
        """Count a request of a model that runs."""
        running = self._running.get(name)
        if running is None or not running.is_open:
            return None
        running.in_flight += 1
        running.idle.clear()
        return running

    async def _start(self, name: str) -> _Process:
        if time.monotonic() - self._failed.get(name, -AGAIN_SECONDS) < AGAIN_SECONDS:
            raise _not_started(name)
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        spec, size = self.specs[name], self._sizes[name]
        if size is None:
            size = size_of_files(_model_of(spec))
        while self._budget is not None and self._used() + size > self._budget and self._running:
            # The least used of those that nobody uses at present, or else of all.
            running = self._running.items()
            victim, _ = min(running, key=lambda item: (item[1].in_flight > 0, item[1].last_used))
            await self._end(victim)
        begin = time.monotonic()
        _log.info("a model starts", extra={"fields": {"model": name}})
        process = await asyncio.create_subprocess_exec(
            *self._program,
            *spec.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                **self._environment.get(name, {}),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            start_new_session=True,  # Ctrl-C goes to this process only, which ends them
        )
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except asyncio.CancelledError:
            process.kill()
            raise
        found = _LISTENS.fullmatch(line)
        if found is None:
            self._failed[name] = time.monotonic()
            await self._stop(process)
            raise _not_started(name)
        memory = size
        if spec.memory is None:
            memory = self._sizes[name] = resident(process.pid) or size
        self.starts[name] += 1
        running = self._running[name] = _Process(process, found[1].decode(), memory)
        seconds = round(time.monotonic() - begin, 2)
        fields = {"model": name, "seconds": seconds, "bytes": memory}
        _log.info("a model runs", extra={"fields": fields})
        return running

    def _used(self) -> int:
        return sum(running.memory for running in self._running.values())

    async def _end(self, name: str) -> None:
        """End a model when its last request has its answer."""
        running = self._running[name]
        running.is_leaving = True
        if running.process.returncode is None:
            await running.idle.wait()
        await self._stop(running.process)
        if self._running.get(name) is running:  # no other process was started meanwhile
            del self._running[name]
        _log.info("a model has ended", extra={"fields": {"model": name}})

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _reap(self) -> None:
        """Forget processes that have ended, and end models that were not used for long."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name, running in list(self._running.items()):
                if self._running.get(name) is not running:
                    continue  # it has ended while the loop waited for another one
                if running.process.returncode is not None and not running.is_leaving:
                    fields = {"model": name, "status": running.process.returncode}
                    _log.error("a model's process has ended", extra={"fields": fields})
                    self._running.pop(name, None)
                elif (
                    self._unload_after is not None
                    and running.is_open
                    and not running.in_flight
                    and time.monotonic() - running.last_used >= self._unload_after
                ):
                    await self._end(name)

    async def close(self) -> None:
        """End all models at once; each lets its requests end for its own drain time."""
        tasks: list[asyncio.Task[Any]] = [*self._starts.values()]
        if self._reaper is not None:
            tasks.append(self._reaper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = [running.process for running in self._running.values()]
        await asyncio.gather(*map(self._stop, processes))
        self._running.clear()


def _model_of(spec: ModelSpec) -> str:
    words = list(spec.words)
    marks = [word for word in words if word.startswith("--model=")]
    return marks[-1].partition("=")[2] if marks else ""


def _not_started(name: str) -> ApiError:
    message = f"the model {name} did not start: the server's log has the reason"
    return ApiError(503, message, code="model_failed", retry_after=int(AGAIN_SECONDS))


def resident(pid: int) -> int:
    """Return the resident bytes of a process and its children, 0 where the system has no /proc."""
    total, page, waiting = 0, os.sysconf("SC_PAGE_SIZE"), [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            total += int((process / "statm").read_text().split()[1]) * page
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
    return total

"""The replicas of one host: each is a process with the model, on a device of its own.

    pool = LocalPool(count, start)       a ``pool.Pool``; start() -> Started, picklable
    about = pool.start()                 waits until all replicas have loaded and compiled
    pool.kill()

This process talks to a replica (``replica``) as a front end does. A request goes to the replica
with the least work, counted in tokens of prompts and answers in flight. A replica that has read the
beginning of the prompt before is preferred, if it has at most ``SLACK`` requests' work more than
the least.

A replica that ends, fails, stands still or sends no report counts as lost. Another process is
started in its place, later each time if it dies before it is ready. If that happens while no other
replica is left, the pool has failed, so that a supervisor starts the server again.

Left out: replicas on several hosts, or each on a mesh.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from jaxllama.engine.request import EngineFailed, QueueFull, Request
from jaxllama.engine.stats import EngineStats
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import messages
from jaxllama.serving.api.messages import EngineReport, TextPiece
from jaxllama.serving.ipc.pool import Read, ReplicaLost, Taken
from jaxllama.serving.ipc.replica import REPORT, About, Start
from jaxllama.serving.ipc.wire import Child, Exchange, Pulse, Wire, delay

PREFIXES = (1024, 256, 64)  # lengths, in tokens, of the beginnings by which prompts are recognized
REMEMBERED = 8192  # number of remembered beginnings
SLACK = 4
END = 10  # seconds for a replica to end by itself
DEVICES = "CUDA_VISIBLE_DEVICES"
_log = logging.getLogger("jaxllama.serving")


class Process(Exchange):
    """A replica's process, as the parent sees it. work: tokens of its requests in flight."""

    def __init__(self, number: int, child: Child) -> None:
        super().__init__()
        self.number, self.child, self.work = number, child, 0
        self.wire, self._pulse = Wire(), Pulse()
        self._failed = asyncio.Event()
        self._failure = ""
        self.stats: EngineStats
        self._times: list[tuple[str, float]] = []
        self._runs: dict[int, tuple[Read, asyncio.Future[None]]] = {}

    def about(self) -> About:
        """Wait until the replica has loaded its model and compiled, and return its description."""
        while data := self.child.socket.recv(1 << 16):
            for message in self._frames.feed(data):
                if isinstance(message, messages.Failed):
                    raise JaxLlamaError(message.reason)
                about: About = pickle.loads(message.setup)
                self.stats = about.stats
                return about
        status = self.child.process.wait()
        raise JaxLlamaError(f"a replica ended with status {status} as it started")

    async def begin(self) -> None:
        self.wire.on_data = self.received
        self.open(self.wire.write)
        await self.wire.open(self.child.socket)

    async def ended(self) -> str:
        """Wait until the replica is lost, end its requests with ReplicaLost, and return why."""
        waits = (self.wire.gone.wait(), self._pulse.lost(), self._failed.wait())
        gone, hung, failed = tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        reason = self._failure if failed.done() else "it does not answer"
        if gone.done():
            reason = f"it ended with status {await asyncio.to_thread(self.child.process.wait)}"
        for task in (hung, failed, gone):
            task.cancel()
        self.close(lambda: ReplicaLost(reason))
        for _, over in self._runs.values():
            if not over.done():
                over.set_exception(ReplicaLost(reason))
        return reason

    def report(self) -> EngineReport:
        """Return the newest figures, with the times since the last call."""
        times, self._times = self._times, []
        return EngineReport(str(self.child.process.pid), self.stats, times, None)

    async def run(self, request: Request, taken: Taken, read: Read) -> None:
        """Run a request, as ``pool.Pool.run`` does."""
        number, work = next(self._numbers), len(request.prompt) + request.max_new_tokens
        over = asyncio.get_running_loop().create_future()
        self._runs[number] = read, over
        self.work += work
        try:
            await self.call(
                lambda call: messages.Submit(call, request.id, number, [request], "", None, False)
            )
            taken()
            await over
        except asyncio.CancelledError:
            self.tell(messages.End(number, "cancelled", 0))
            raise
        finally:
            self.work -= work
            del self._runs[number]
            if over.done() and not over.cancelled():
                over.exception()  # else asyncio reports one that nobody has read

    def read(self, pieces: Sequence[TextPiece]) -> None:
        for piece in pieces:
            read, over = self._runs.get(piece.number, (None, None))
            if read is None or over is None or over.done():
                continue
            try:
                if read((piece,)):
                    over.set_result(None)
            except Exception as error:
                over.set_exception(error)

    def handle(self, message: Any) -> None:
        if isinstance(message, EngineReport):
            self._pulse.beat()
            self.stats = message.stats
            self._times += message.times
            if message.failure is not None:
                self._failure = message.failure
                self._failed.set()


class HasWork(Protocol):
    """Something with work: the number of prompt and answer tokens in flight."""

    @property
    def work(self) -> int: ...


Some = TypeVar("Some", bound=HasWork)
Name = TypeVar("Name")


class KnownPrefixes(Generic[Name]):
    """Remembers which replica has read the beginning of a prompt; for use in any thread."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[int, Name] = collections.OrderedDict()
        self._lock = threading.Lock()

    def readers(self, request: Request) -> list[Name]:
        """Return the replicas that have read a beginning of the prompt, the longest first."""
        with self._lock:
            return [self._known[key] for key in _beginnings(request) if key in self._known]

    def remember(self, request: Request, name: Name) -> None:
        with self._lock:
            for key in _beginnings(request):
                self._known[key] = name
                self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


def _beginnings(request: Request) -> list[int]:
    """Return hashes of the prompt's beginnings, the longest first."""
    prompt = request.prompt
    return [hash((request.cache_key, prompt[:n])) for n in PREFIXES if len(prompt) >= n]


class ReplicaChoice(Generic[Some]):
    """Chooses the replica of a request among ``replicas``, which may change."""

    def __init__(self, replicas: Sequence[Some]) -> None:
        self._all, self._known = replicas, KnownPrefixes[Some]()
        self._turns = itertools.count()
        self.remember = self._known.remember

    def order(self, request: Request) -> list[Some]:
        """Return the replicas, least work first; one that has read the prompt's beginning leads."""
        order = sorted(self.in_turn(), key=lambda replica: replica.work)
        if not order:
            return []
        room = order[0].work + SLACK * (len(request.prompt) + request.max_new_tokens)
        for replica in self._known.readers(request):
            if replica in order and replica.work <= room:
                order.remove(replica)
                order.insert(0, replica)
                break
        return order

    def in_turn(self) -> list[Some]:
        """Return the replicas; each call begins with the next one."""
        turn = next(self._turns) % max(len(self._all), 1)
        return [*self._all[turn:], *self._all[:turn]]


class LocalPool:
    """Replicas as processes of this host; the module docstring has the interface.

    Raises JaxLlamaError if there are too few devices.
    """

    def __init__(self, count: int, start: Start) -> None:
        named = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        if named and len(named) < count:
            raise JaxLlamaError(f"--replicas = {count}: ${DEVICES} has {len(named)}")
        self._devices = named or [str(number) for number in range(count)]
        self._start = pickle.dumps(start)
        self._is_closed = False
        self._processes = {number: self._process(number) for number in range(count)}
        self._living: list[Process] = []  # in the order of their starts
        self._some = asyncio.Event()  # set while there are some
        self._choice = ReplicaChoice(self._living)
        self._starting = 0
        self._failure: str | None = None

    def _process(self, number: int) -> Process:
        child = Child("jaxllama.serving.ipc.replica", {DEVICES: self._devices[number]})
        return Process(number, child)

    def start(self) -> About:
        """Return a description after all replicas have started; its ``max_len`` is the least."""
        processes = self._processes.values()
        for replica in processes:
            replica.child.socket.sendall(self._start)
        return min((replica.about() for replica in processes), key=lambda about: about.max_len)

    # The interface of a Pool

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._keeping = [
            asyncio.create_task(self._keep(replica)) for replica in self._processes.values()
        ]
        await self._some.wait()

    async def run(self, request: Request, taken: Taken, read: Read) -> None:
        await self._some.wait()
        full: list[QueueFull] = []
        for replica in self._choice.order(request):
            try:
                await replica.run(
                    request, functools.partial(self._taken, request, replica, taken), read
                )
                return
            except QueueFull as error:
                full.append(error)
        if not full:
            raise ReplicaLost("no replica is left")
        waiting = sum(replica.stats.waiting for replica in self._living)
        raise QueueFull.of(waiting, min(error.retry_after for error in full))

    def _taken(self, request: Request, replica: Process, taken: Taken) -> None:
        self._choice.remember(request, replica)
        taken()

    async def forward(self, name: str, arguments: Sequence[Any]) -> Any:
        await self._some.wait()
        replica = self._choice.in_turn()[0]
        return await replica.call(lambda call: messages.HubRequest(call, name, list(arguments)))

    async def reports(self) -> list[EngineReport]:
        await asyncio.sleep(REPORT)
        if self._failure is not None:
            raise EngineFailed(self._failure)
        return [replica.report() for replica in self._living]

    def stop(self) -> None:
        self._is_closed = True
        for replica in list(self._processes.values()):
            if replica in self._living:
                self._loop.call_soon_threadsafe(replica.wire.close)
            else:
                replica.child.process.kill()
        self.kill(END)

    def kill(self, after: float = 0) -> None:
        """End the processes that have not ended by themselves ``after`` so many seconds."""
        self._is_closed = True
        for replica in list(self._processes.values()):
            try:
                replica.child.process.wait(after)
            except subprocess.TimeoutExpired:
                replica.child.process.kill()
                replica.child.process.wait()

    # On the event loop

    async def _keep(self, replica: Process) -> None:
        """Serve with a replica until it is lost; then start another in its place."""
        while True:
            await replica.begin()
            self._living.append(replica)
            self._some.set()
            reason = await replica.ended()
            self._living.remove(replica)
            if not self._living:
                self._some.clear()
            if self._is_closed:
                return
            fields = {"replica": replica.number, "reason": reason}
            _log.error("a replica is lost", extra={"fields": fields})
            replica.wire.close()
            replica.child.process.kill()
            again = await self._started_again(replica.number)
            if again is None:
                return
            replica = again
            _log.warning("a replica runs again", extra={"fields": {"replica": replica.number}})

    async def _started_again(self, number: int) -> Process | None:
        """Start a replica in the place of a lost one, if need be after a while; None: closed."""
        for died in itertools.count():
            await asyncio.sleep(delay(died))
            if self._is_closed:
                return None
            self._starting += 1
            try:
                replica = self._processes[number] = self._process(number)
                replica.child.socket.sendall(self._start)
                await asyncio.to_thread(replica.about)
            except (JaxLlamaError, OSError) as error:
                if self._is_closed:
                    return None
                fields = {"replica": number, "reason": str(error)}
                _log.error("a replica cannot be started", extra={"fields": fields})
                if not self._living and self._starting == 1:
                    self._failure = f"the engine failed: no replica is left: {error}"
            else:
                return replica
            finally:
                self._starting -= 1
        return None

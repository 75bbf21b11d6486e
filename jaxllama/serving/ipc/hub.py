"""The engine as its front ends see it, with everything that they share.

    hub = Hub(engine, forward_passes(lm), metrics, journal)
    port = hub.open(send)                  a new front end; send(bytes) writes to it
    port.received(data); port.close()      bytes from the front end; the front end is gone

Contract. A body's requests are queued all or none, under an id that no other answer has. New tokens
go to the row's front end, all tokens of a step in one message. If a front end dies, its rows are
cancelled, and the next front end takes over the bodies that it owed by the journal. Counts are
exact whatever front ends do. The front end of a request with stop strings finds the end of its
text. Tokens and reason are counted when the front end reports that end.

While the journal cannot be written (a full disk), requests for it are refused with
JournalUnavailable, and everything else goes on (``journalled``).

One event loop calls all this. The engine's thread leaves its news and wakes that loop. Grammars are
compiled in threads of their own. ``embed``, ``rank`` and ``score`` share one thread that computes
one row at a time, so bodies take turns. Rows of a client that has left are not computed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxllama.engine.journal import Journal, JournalUnavailable
from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    FinishReason,
    Request,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api import messages
from jaxllama.serving.api.keys import Quotas
from jaxllama.serving.api.messages import IdTaken, RowEvent
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.ipc.journalled import JournalledAnswers
from jaxllama.serving.ipc.served import Adapting, Passes, Served
from jaxllama.serving.ipc.stored_responses import StoredResponses

EMPTY = "no engine runs: another one is being started"
THREADS = "hub"  # the beginning of the names of a hub's threads
_log = logging.getLogger("jaxllama.serving")


class Hub:
    """The engine and its front ends.

    passes: ``embed``, ``rank`` and ``score``. journal: None for none; ``close`` closes it. waits:
    whether the engine's ``submit`` blocks. quotas: the use of each API key.
    """

    def __init__(
        self,
        engine: Served,
        passes: Passes,
        metrics: Metrics,
        journal: Journal | None,
        waits: bool = False,
        quotas: Quotas | None = None,
    ) -> None:
        self.quotas = quotas or Quotas(())
        self.engine, self.metrics = engine, metrics
        self._answers = JournalledAnswers(journal, self._tell_trouble)
        # number of rows in flight, by id
        self.calls: collections.Counter[str] = collections.Counter()
        self.owed: dict[str, Port] = {}
        self.responses = StoredResponses()
        self.ports: list[Port] = []
        self._is_empty = False
        self.with_news: set[Port] = set()
        self._waiting: dict[str, list[tuple[Port, messages.HubRequest]]] = {}
        self.loaded: dict[str, str] = {}  # adapters loaded at run time: id by name
        self._passes, self.waits = passes, waits
        self._forward = ThreadPoolExecutor(1, f"{THREADS}-forward")
        self._adapters = ThreadPoolExecutor(1, f"{THREADS}-adapters")
        self.grammars = ThreadPoolExecutor(16 if waits else 4, f"{THREADS}-grammar")
        engine.listen(self._wake_ports)

    def _wake_ports(self) -> None:
        ports, self.with_news = self.with_news, set()
        for port in ports:
            port.wake()

    def open(self, send: Callable[[bytes], None]) -> Port:
        port = Port(self, send)
        self.ports.append(port)
        return port

    def welcome(self, port: Port) -> None:
        """Send a new front end the state that the others know."""
        if self.trouble is not None or self._is_empty:
            port.send(messages.Trouble(self.trouble or EMPTY))
        if self.loaded:
            port.send(messages.Adapters(self.loaded))

    def tell(self, message: messages.IpcMessage) -> None:
        for port in self.ports:
            port.send(message)

    def close(self) -> None:
        for threads in (self._forward, self._adapters, self.grammars):
            threads.shutdown(wait=False, cancel_futures=True)
        self._answers.close()

    def check(self, call: messages.Submit) -> None:
        """Raise EngineFailed, JournalUnavailable or IdTaken if a body cannot be accepted."""
        if self.engine.failure is not None:
            raise EngineFailed(self.engine.failure)
        if self.trouble is not None and call.entry is not None:
            raise JournalUnavailable(self.trouble)
        is_stored = not call.is_known and self._answers.has(call.id)
        if call.id in self.calls or is_stored or call.id in self.responses:
            raise IdTaken(call.id)

    @property
    def trouble(self) -> str | None:
        """Why the journal cannot be written, or None."""
        return self._answers.trouble

    def report_empty(self, is_empty: bool) -> None:
        """Let ``/ready`` say whether there is no replica. Requests wait meanwhile."""
        self._is_empty = is_empty
        self._tell_trouble(self.trouble)

    def _tell_trouble(self, trouble: str | None) -> None:
        """Send all front ends the journal's trouble, or else that there is no replica."""
        self.tell(messages.Trouble(trouble or (EMPTY if self._is_empty else None)))

    # The journal

    def accept(self, port: Port, call: messages.Submit) -> None:
        """Write a body to the journal before its answer begins."""
        if call.entry is not None and self._answers.accept(call.id, call.entry):
            self.owed[call.id] = port

    def finish(self, id: str, answer: str | None) -> None:
        if answer is not None:
            self._answers.finish(id, answer)
        self.owed.pop(id, None)
        for port, ask in self._waiting.pop(id, ()):
            port.answer(ask)

    # Adapters, in a thread of their own

    def _load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Load an adapter; in place of one with this name only if ``in_place``."""
        engine, before = self._adapting(), self.loaded.get(name)
        if before is not None and not in_place:
            raise JaxLlamaError(f"the adapter {name!r} is loaded already")
        id = engine.load_adapter(name, path)
        if before is not None:
            engine.unload_adapter(before)
        self.loaded = {**self.loaded, name: id}

    def _unload_adapter(self, name: str) -> None:
        engine = self._adapting()
        if name not in self.loaded:
            raise JaxLlamaError(f"no adapter {name!r} is loaded")
        engine.unload_adapter(self.loaded[name])
        self.loaded = {other: id for other, id in self.loaded.items() if other != name}

    def _adapting(self) -> Adapting:
        if not isinstance(self.engine, Adapting):
            raise JaxLlamaError("several replicas load no adapters at run time")
        return self.engine

    def _adapters_changed(self, port: Port, ask: messages.HubRequest, done: Future[object]) -> None:
        """Name the adapters to all front ends, and then answer the one that asked."""
        self.tell(messages.Adapters(self.loaded))
        port.passed(ask.call, done)

    # Questions of front ends

    def asked(self, port: Port, ask: messages.HubRequest) -> Any:
        """Return the answer to a question; None if the answer comes later."""
        if ask.name in self._passes:
            if self.engine.failure is not None:
                raise EngineFailed(self.engine.failure)
            if self.engine.closed is not None:
                raise EngineClosed(self.engine.closed)
            work = self._forward.submit(self._passes[ask.name], *ask.arguments)
            work.add_done_callback(lambda done: port.later(port.passed, ask.call, done))
            return None
        if ask.name in ("load_adapter", "unload_adapter"):
            change = getattr(self, f"_{ask.name}")
            work = self._adapters.submit(change, *ask.arguments)
            work.add_done_callback(lambda done: port.later(self._adapters_changed, port, ask, done))
            return None
        if ask.name == "find":
            id, kind, owner = ask.arguments
            answer = self._answers.find(id, kind, owner)
            if answer == "" and id in self.owed:
                self._waiting.setdefault(id, []).append((port, ask))
                return None
            return [answer]
        if ask.name == "owed":
            entries = [
                entry
                for entry in self._answers.unfinished()
                if self.owed.get(entry.id) not in self.ports
            ]
            self.owed.update({entry.id: port for entry in entries})
            return [dataclasses.astuple(entry) for entry in entries]
        if ask.name == "admit":
            refused = self.quotas.admit(*ask.arguments)
            return [None if refused is None else dataclasses.astuple(refused)]
        if ask.name == "metrics":
            return self.metrics.page()
        if ask.name == "cancel":
            id, owner = ask.arguments
            if self.responses.recall(id, owner) is not None:
                self.engine.end(f"{id}/0", "cancelled")
            return [None]
        return [getattr(self.responses, ask.name)(*ask.arguments)]


@dataclasses.dataclass(eq=False, slots=True)
class FrontEndRequest:
    """A front end's request in the engine.

    n_prompt: tokens that its prompt counts for the owner's limits; one of several choices has them.
    event: its last event. is_left: its reader is gone.
    """

    port: Port
    number: int
    call: str
    request: Request
    owner: str
    n_prompt: int
    event: Event | None = None
    is_left: bool = False
    is_counted: bool = False

    def notify(self, event: Event) -> None:
        """Queue an event, on the engine's thread; the hub's listener sends it."""
        self.port.news.append((self, event))
        self.port.hub.with_news.add(self.port)


class Port:
    """A front end, as ``Hub`` sees it."""

    def __init__(self, hub: Hub, send: Callable[[bytes], None]) -> None:
        self.hub, self._send = hub, send
        self._frames = messages.Frames(messages.from_front_end())
        self._rows: dict[int, FrontEndRequest] = {}
        self.news: collections.deque[tuple[FrontEndRequest, Event]] = collections.deque()
        self._awake, self._is_open = False, True
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_pong: Callable[[], None] = lambda: None

    def send(self, message: messages.IpcMessage) -> None:
        if self._is_open:
            self._send(messages.encode(message))

    def received(self, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        for message in self._frames.feed(data):
            try:
                self._read(message)
            except Exception as error:  # an error of one message: the front end has other clients
                _log.error("an error of ours", exc_info=error)

    def _read(self, message: messages.FromFrontEnd) -> None:
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.End():
                self._end(message)
            case messages.Finish():
                self.hub.finish(message.id, message.answer)
            case messages.ServedRequest():
                self.hub.metrics.request(
                    message.path, message.method, message.status, message.seconds
                )
                self.hub.quotas.used(message.owner, message.tokens)
            case messages.HubRequest():
                self.answer(message)
            case messages.Ready():
                self.on_ready()
            case messages.Pong():
                self.on_pong()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._rows

    def close(self) -> int:
        """Cancel the requests of a front end that is gone, and return their number."""
        self._is_open = False
        self.hub.ports.remove(self)
        living = list(self._rows.values())
        for live in living:
            if live.event is not None:
                self._over(live)
            else:
                self._leave(live)
        return len(living)

    # Requests

    def _submit(self, call: messages.Submit) -> None:
        try:
            self.hub.check(call)
            requests = [Request.from_json(request) for request in call.requests]
        except Exception as error:
            self.send(messages.refusal(error, call.call))
            return
        living: list[FrontEndRequest] = []
        for number, request in enumerate(requests, start=call.first):
            is_choice = bool(living) and request.prompt == living[-1].request.prompt
            n_prompt = 0 if is_choice else len(request.prompt)
            living.append(FrontEndRequest(self, number, call.id, request, call.owner, n_prompt))
        self._rows.update({live.number: live for live in living})
        self.hub.calls[call.id] += 1 + len(living)
        # compiling a grammar takes long
        if self.hub.waits or any(request.grammar for request in requests):
            work = self.hub.grammars.submit(self._queue, living)
            work.add_done_callback(
                lambda done: self.later(self._queued, call, living, *done.result())
            )
        else:
            self._queued(call, living, *self._queue(living))

    def _queue(self, living: Sequence[FrontEndRequest]) -> tuple[int, Exception | None]:
        """Submit requests to the engine, in any thread.

        Returns (how many it has taken, the exception of the next one).
        """
        for taken, live in enumerate(living):
            if live.is_left:
                return taken, JaxLlamaError("the client left")
            try:
                self.hub.engine.submit(live.request, live.notify, with_text=False)
            except Exception as error:
                return taken, error
        return len(living), None

    def _queued(
        self,
        call: messages.Submit,
        living: Sequence[FrontEndRequest],
        taken: int,
        error: Exception | None,
    ) -> None:
        for live in living[taken:]:
            del self._rows[live.number]
            self._release(call.id)
        if error is None:
            try:
                self.hub.accept(self, call)
            except Exception as refused:
                error = refused
        for live in living[:taken]:
            if error is not None or live.is_left or not self._is_open:
                self._leave(live)
        self._release(call.id)
        reply = messages.Reply(call.call, None)
        self.send(reply if error is None else messages.refusal(error, call.call))

    def _leave(self, live: FrontEndRequest, reason: FinishReason = "cancelled") -> None:
        live.is_left = True
        self.hub.engine.end(live.request.id, reason)

    def _end(self, end: messages.End) -> None:
        live = self._rows.get(end.number)
        if live is None:
            return
        if end.reason in ("stop", "length"):  # the front end has found the end of the text
            self._count(live, end.reason, end.kept)
        if live.event is not None:
            self._over(live)
        else:
            self._leave(live, end.reason)

    def _over(self, live: FrontEndRequest) -> None:
        assert live.event is not None and live.event.finish_reason is not None
        if live.request.stop:
            self._count(live, live.event.finish_reason, live.event.completion_tokens)
        else:
            self._count(live, live.event.finish_reason, 0)  # its tokens were counted as they came
        del self._rows[live.number]
        self._release(live.call)

    def _count(self, live: FrontEndRequest, reason: FinishReason, tokens: int) -> None:
        if not live.is_counted:
            live.is_counted = True
            self.hub.metrics.wrote(tokens)
            self.hub.metrics.ended(reason)
            n_new = tokens if live.event is None else live.event.completion_tokens
            self.hub.quotas.used(live.owner, live.n_prompt + n_new)
            if live.event is not None:
                limit = live.request.max_new_tokens
                self.hub.metrics.sized(len(live.request.prompt), n_new, limit)

    def _release(self, id: str) -> None:
        calls = self.hub.calls
        calls[id] -= 1
        if not calls[id]:
            del calls[id]

    # News

    def wake(self) -> None:
        """Wake the event loop, from the engine's thread, which never waits for the loop."""
        # Cleared before the news are read, so news that find it set are taken along.
        if not self._awake:
            self._awake = True
            self.later(self._flush)

    def later(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work`` on the event loop, from any thread."""
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(work, *arguments)
        except RuntimeError:  # the loop has ended, and with it all its clients
            self.news.clear()

    def _flush(self) -> None:
        self._awake = False
        rows: list[RowEvent] = []
        tokens = 0
        while self.news:
            live, event = self.news.popleft()
            request, is_last = live.request, event.finish_reason is not None
            if not request.stop:
                tokens += len(event.tokens)
            if not live.is_left:
                rows.append(row_event(live.number, request, event))
            if is_last:
                live.event = event
                # With stop strings the front end reports the end of the text.
                is_read = event.finish_reason in ("stop", "length") and not live.is_left
                if not (request.stop and is_read):
                    self._over(live)
        self.hub.metrics.wrote(tokens)
        if rows:
            self.send(messages.StepNews(rows))

    # Questions

    def answer(self, ask: messages.HubRequest) -> None:
        try:
            value = self.hub.asked(self, ask)
        except Exception as error:
            self.send(messages.refusal(error, ask.call))
            return
        if value is not None:
            self.send(messages.Reply(ask.call, value))

    def passed(self, call: int, done: Future[object]) -> None:
        """Send the result of a forward pass."""
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.send(messages.Reply(call, done.result()))
        elif isinstance(error, Exception):
            self.send(messages.refusal(error, call))


def row_event(number: int, request: Request, event: Event) -> RowEvent:
    """Return an event as a message; ``number`` names its request."""
    # msgspec writes tuples and lists alike.
    tokens: Any = event.tokens
    error = None if event.error is None else messages.refusal(event.error)
    row = RowEvent(number, tokens, [], [], event.finish_reason, event.cached_tokens, error)
    row.times = event.times
    if request.logprobs is not None:
        scored: Any = event.logprobs, event.top_logprobs
        row.logprobs, row.top_logprobs = scored
    return row

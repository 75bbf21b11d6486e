"""The engine's thread to asyncio: submit requests, iterate over their events, close to cancel.

    stream = await Dispatcher(engine).submit(requests)
    async for event in stream: ...                 ends when every request has had its last event
    stream.close()                                 cancels whatever has not

Contract.  ``submit`` takes all requests or none (those before the refused one are cancelled).
Every event reaches exactly one stream; after ``close`` nothing does.  The engine's thread never
waits for the event loop: it appends to a deque, and wakes the loop once for all that lies there.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.engine.request import EngineFailed, Event, Request


class Submitter(Protocol):
    """What the dispatcher needs of an engine.  failure: None, or what ended it."""

    failure: str | None

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None: ...

    def cancel(self, id: str) -> None: ...


class Stream:
    """The events of some requests.  Those of one request that wait together become one, so that a
    slow reader gets larger pieces, not a longer queue."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._waiting: dict[str, Event] = {}
        self._arrived = asyncio.Event()
        self._open: set[str] = set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if not self._open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.pop(next(iter(self._waiting)))

    def put(self, event: Event) -> None:
        earlier = self._waiting.get(event.id)
        self._waiting[event.id] = event if earlier is None else _join(earlier, event)
        self._arrived.set()
        if event.finish_reason is not None:
            self._open.discard(event.id)

    @property
    def is_over(self) -> bool:
        """Every event has been handed on."""
        return not self._open and not self._waiting

    def opened(self, id: str) -> None:
        self._open.add(id)

    def close(self) -> None:
        """Cancel what is unfinished; its later events go nowhere."""
        for id in self._open:
            self._dispatcher.cancel(id)
        self._open.clear()


def _join(first: Event, second: Event) -> Event:
    return dataclasses.replace(
        second,
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


class Dispatcher:
    """See the module docstring.  All but ``_submit`` and ``_receive`` run on the event loop."""

    def __init__(self, engine: Submitter) -> None:
        self._engine = engine
        self._streams: dict[str, Stream] = {}
        self._inbox: collections.deque[Event] = collections.deque()
        self._awake = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Raises what ``Engine.submit`` raises, JaxLlamaError for an id in flight, and EngineFailed
        once the engine has failed."""
        if self._engine.failure is not None:
            raise EngineFailed(self._engine.failure)
        self._loop = asyncio.get_running_loop()
        stream = Stream(self)
        try:
            for request in requests:
                if request.id in self._streams:
                    raise JaxLlamaError(f"request {request.id!r} is in flight already")
                self._streams[request.id] = stream
                stream.opened(request.id)
            if any(request.grammar for request in requests):  # compiling one takes a while
                await asyncio.to_thread(self._submit, requests)
            else:
                self._submit(requests)
        except BaseException:
            stream.close()
            raise
        return stream

    def ended(self, events: Sequence[Event]) -> Stream:
        """The stream of requests that have come to their ends without the engine."""
        stream = Stream(self)
        for event in events:
            stream.put(event)
        return stream

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.submit(request, self._receive)

    def has(self, id: str) -> bool:
        """Whether a request of this id is in flight."""
        return id in self._streams

    def cancel(self, id: str) -> None:
        if self._streams.pop(id, None) is not None:
            self._engine.cancel(id)

    def _receive(self, event: Event) -> None:
        """On the engine's thread."""
        self._inbox.append(event)
        # Cleared before the inbox is emptied, so an event that sees it set will be taken along.
        if not self._awake and self._loop is not None:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has ended, and with it everybody who waited
                self._inbox.clear()

    def _deliver(self) -> None:
        self._awake = False
        while self._inbox:
            event = self._inbox.popleft()
            if event.finish_reason is None:
                stream = self._streams.get(event.id)
            else:
                stream = self._streams.pop(event.id, None)
            if stream is not None:
                stream.put(event)

"""A replica in an actor of Ray Serve.

    EngineReplica(start)                   start() -> Started, called in the actor
    replica.generate(request)              yields ``ipc`` messages, as bytes
    replica.forward("embed", ...)          a pass beside the engine
    replica.about(); replica.report()      as of ``ipc.replica.Replica``

Contract. The first message of ``generate`` is a Reply, or a Refused for what ``Engine.submit``
raises. Each of its results has all tokens since the one before. The first token is sent at once,
and the others at most every ``PIECE`` seconds. The last row has a finish reason. A caller that
leaves ends its request.

An engine that fails ends its process, so that Serve starts another replica. Serve calls
``check_health``, and replaces a replica whose event loop does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

from jaxllama.engine.request import EngineFailed, Request
from jaxllama.serving.api import messages
from jaxllama.serving.ipc.replica import Replica, Start

PIECE = 0.04  # seconds between two messages of a request
LOOK = 0.5  # seconds between two checks of the engine


class EngineReplica(Replica):
    """The deployment's class; the module docstring has the interface."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._looking: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the messages of a request; its id is unique among those in flight."""
        self._watch()
        held, news, over = bytearray(), asyncio.Event(), asyncio.Event()

        def send(data: bytes) -> None:
            held.extend(data)
            news.set()
            if port.is_idle:
                over.set()

        with contextlib.closing(self.hub.open(send)) as port:
            submit = messages.Submit(0, request.id, 0, [request], "", None, False)
            port.received(messages.encode(submit))
            wait = 0.0  # before the first token, which follows the Reply
            while held or not over.is_set():
                await news.wait()
                news.clear()
                data = bytes(held)
                held.clear()
                yield data
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await over.wait()
                wait = PIECE

    async def forward(self, name: str, arguments: list[Any]) -> Any:
        self._watch()
        return await asyncio.to_thread(self.passes[name], *arguments)

    def check_health(self) -> None:
        failure = self.engine.failure or self.engine.stalled
        if failure is not None:
            raise EngineFailed(failure)

    def _watch(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._end_after_failure())

    async def _end_after_failure(self) -> None:
        while self.engine.failure is None:
            await asyncio.sleep(LOOK)
        await asyncio.sleep(LOOK)  # its last events are on their way
        log = logging.getLogger("jaxllama.serving")
        log.error("a replica ends", extra={"fields": {"reason": self.engine.failure}})
        os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "hub"):
            self.stop()

"""Inbox: holds requests and cancellations from any thread until a step of the engine takes them.

    inbox.submit(id, entry, ...); inbox.end(id, reason)  from any thread
    inbox.take()                                         by a step: the entries in order
    inbox.wait_for_work(is_busy)                         by the engine's thread
    inbox.wait_until_idle(is_alive, timeout)             by the thread that drains the engine

The inbox knows which ids are in flight: from their submission until ``forget``. A closed inbox
takes no more requests, and ``closed`` says why.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from jaxllama.engine.request import EngineClosed, FinishReason
from jaxllama.engine.scheduler import Sequence as Queued
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Tree

Entry = tuple[Literal["submit", "end"], Tree]


class Inbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: collections.deque[Entry] = collections.deque()
        self._ids: set[str] = set()
        self._new: set[str] = set()  # submitted, and neither taken nor ended
        self._ending: set[str] = set()  # their ends have not been taken
        self.closed: str | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._entries)

    def waiting(self, queued: Sequence[Queued]) -> int:
        """Return the number of waiting requests: the new ones, and ``queued``, taken before them.

        A request whose end is on its way does not count.
        """
        with self._changed:
            if not self._ending:
                return len(self._new) + len(queued)
            return len(self._new) + sum(q.request.id not in self._ending for q in list(queued))

    def submit(self, request_id: str, entry: object, queued: Sequence[Queued], most: int) -> bool:
        """Queue a request; return False if ``most`` requests wait already.

        queued: as for ``waiting``.

        Raises EngineClosed after ``close``, and JaxLlamaError for an id in flight.
        """
        with self._changed:
            if self.closed is not None:
                raise EngineClosed(self.closed)
            if request_id in self._ids:
                raise JaxLlamaError(f"request id {request_id!r} is in flight already")
            if self.waiting(queued) >= most:
                return False
            self._ids.add(request_id)
            self._new.add(request_id)
            self._entries.append(("submit", entry))
            self._changed.notify_all()
            return True

    def end(self, request_id: str, reason: FinishReason) -> None:
        """Queue the end of a request. Ids that are not in flight are ignored."""
        with self._changed:
            if request_id in self._ids:
                self._entries.append(("end", (request_id, reason)))
                self._new.discard(request_id)
                self._ending.add(request_id)
                self._changed.notify_all()

    def take(self) -> collections.deque[Entry]:
        with self._changed:
            taken, self._entries = self._entries, collections.deque()
            self._new.clear()
            self._ending.clear()
            return taken

    def forget(self, request_id: str) -> None:
        with self._changed:
            self._ids.discard(request_id)

    def close(self, reason: str) -> None:
        """Take no more requests. The first reason stays."""
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify_all()

    def stop(self) -> None:
        """Make ``wait_for_work`` return False, so that the engine's thread ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait_for_work(self, is_busy: Callable[[], bool]) -> bool:
        """Wait for an entry or for ``is_busy``; return False after ``stop``."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._entries or is_busy())
            return not self._stopped

    def wait_until_idle(self, is_alive: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until nothing is in flight or the engine's thread is dead.

        Returns False after ``timeout`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not is_alive() or not (self._ids or self._entries), timeout
            )

    def wake(self) -> None:
        """Make all waiting threads check their condition again."""
        with self._changed:
            self._changed.notify_all()

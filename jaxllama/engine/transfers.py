"""Transfers: records on their way between the device and the tiers, in threads. No jax.

    transfers.begin(held, known) -> Load     the missing pages and state of a sequence come back
    transfers.take(most) -> [Arrived, ...]   groups of them that are on the device now
    transfers.placed(arrived)                a program that puts them into place is queued
    transfers.room() -> (pages, states)      how many may be copied for the tiers now
    transfers.saved(keys, copies)            copies on the device go to host memory

Contract. The engine's thread never waits for a transfer: it asks for what has arrived. At most
``STAGED`` groups lie on the device before they are put into place, and as many copies wait for the
host, so the memory of transfers is bounded.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxllama.engine.tiers import Record, Tiers

if TYPE_CHECKING:
    from jaxllama.engine.pages import Held

STAGED = 3
LOOK = 0.1  # seconds between two looks whether the engine has stopped
OnDevice: TypeAlias = Any  # records on the device
_log = logging.getLogger("jaxllama.serving")


@dataclasses.dataclass(eq=False)
class Load:
    """The missing part of a sequence's known prefix, on its way to the device.

    keys: of its records. n_good: number of first pages that are on the device. last: the states
    after the prefix; they come when all pages are in place, so that no states wait on the device
    for the pages of another load. state: these states, on the device.
    """

    keys: tuple[bytes, ...]
    n_good: int
    left: int  # groups of pages
    last: Group | None = None
    state: OnDevice = None
    is_damaged: bool = False
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return not self.left and self.last is None

    def cancel(self) -> None:
        """Put no more of it into place."""
        self.is_cancelled = True


@dataclasses.dataclass(eq=False)
class Group:
    """Records that move together. pages: where they go; empty for the states. first: number of the
    pages before them.
    """

    load: Load
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    first: int


@dataclasses.dataclass(eq=False)
class Arrived:
    """A group of pages on the device."""

    pages: tuple[int, ...]
    records: OnDevice


class Transfers:
    """The transfers of one engine.

    Parameters
    ----------
    tiers
        Where records come from and go to.
    n
        Largest number of pages in a group.
    to_device, to_host
        Copy records, and return them when they have arrived. They raise if memory runs out.
    """

    def __init__(
        self,
        tiers: Tiers,
        n: int,
        to_device: Callable[[Sequence[Record]], OnDevice],
        to_host: Callable[[Sequence[OnDevice]], Sequence[Record]],
    ) -> None:
        self.tiers, self.n = tiers, n
        self._to_device, self._to_host = to_device, to_host
        self._staged = threading.Semaphore(STAGED)
        self._saving = 0
        self._arrived: collections.deque[tuple[Group, OnDevice]] = collections.deque()
        self._news = threading.Event()
        self._is_closed = False
        self._lock = threading.Lock()
        self._in = ThreadPoolExecutor(1, "jaxllama-tier-in")
        self._out = ThreadPoolExecutor(1, "jaxllama-tier-out")

    # To the device

    def begin(self, held: Held, known: int) -> Load:
        """Begin to load what ``held`` misses after its first ``known`` pages."""
        missing = held.missing
        assert missing is not None
        firsts = range(0, len(missing.pages), self.n)
        load = Load(missing.keys, missing.end, len(firsts))
        if missing.state is not None:
            load.last = Group(load, (missing.state,), (), missing.end)
            self.tiers.prefetch(load.last.keys)
        for first in firsts:
            keys = missing.pages[first : first + self.n]
            begin = missing.end - len(missing.pages) + first
            pages = tuple(held.pages[begin : begin + len(keys)])
            self._fetch(Group(load, keys, pages, begin))
        if not load.left and load.last is not None:
            self._fetch(load.last)
        return load

    def _fetch(self, group: Group) -> None:
        """Move a group to the device when all of its records are in host memory."""
        found = self.tiers.fetch(group.keys)
        reads = [record for record in found if isinstance(record, Future)]
        waiting = [len(reads) + 1]

        def on_record(read: Future[Record | None] | None) -> None:
            with self._lock:
                waiting[0] -= 1
                is_last = not waiting[0]
            if is_last and not self._is_closed:
                self._in.submit(self._move, group, found)

        for read in reads:
            read.add_done_callback(on_record)
        on_record(None)

    def _move(self, group: Group, found: Sequence[Record | Future[Record | None]]) -> None:
        moved = None
        try:
            records = [x.result() if isinstance(x, Future) else x for x in found]
            missing = [
                key for key, record in zip(group.keys, records, strict=True) if record is None
            ]
            self.tiers.refuse(missing)
            if not missing and not group.load.is_cancelled:
                moved = self._staged_records(records)
        except Exception as error:
            _log.warning(
                "a cached prefix cannot come back to the device (%s): it is computed again", error
            )
            self.tiers.refuse(group.keys)
        self._arrived.append((group, moved))
        self._news.set()

    def _staged_records(self, records: Sequence[Record]) -> OnDevice:
        """Return the records on the device; None if the engine has stopped."""
        while not self._staged.acquire(timeout=LOOK):
            if self._is_closed or not threading.main_thread().is_alive():
                return None
        try:
            return self._to_device(records)
        except BaseException:
            self._staged.release()
            raise

    def take(self, most: int | None = None) -> list[Arrived]:
        """Return up to ``most`` groups of pages that have arrived, and count them as in place."""
        found: list[Arrived] = []
        while self._arrived and (most is None or len(found) < most):
            group, records = self._arrived.popleft()
            load = group.load
            if records is None:
                load.is_damaged = True
                load.n_good = min(load.n_good, group.first)
            elif load.is_cancelled:
                self._staged.release()
            elif group.pages:
                found.append(Arrived(group.pages, records))
            else:
                load.state = records
            load.left -= bool(group.pages)
            if group is load.last or load.is_damaged:
                load.last = None
            elif not load.left and load.last is not None and not load.is_cancelled:
                self._fetch(load.last)
        return found

    def placed(self) -> None:
        """Give back the room of a group that is put into place."""
        self._staged.release()

    def wait(self, seconds: float) -> None:
        """Wait until a group arrives, at most so long."""
        if self._news.wait(seconds):
            self._news.clear()

    # To the tiers

    def room(self) -> tuple[int, int]:
        """Return how many pages and how many states may be copied for the tiers now."""
        calls = max(STAGED - self._saving, 0)
        return self.n * calls, calls

    def saved(self, keys: Sequence[bytes], copies: Sequence[OnDevice]) -> None:
        """Bring copies of pages or states from the device to the tiers."""
        with self._lock:
            self._saving += 1
        self._out.submit(self._save, keys, copies)

    def _save(self, keys: Sequence[bytes], copies: Sequence[OnDevice]) -> None:
        try:
            for key, record in zip(keys, self._to_host(copies), strict=True):
                self.tiers.put(key, record)
        except Exception as error:
            _log.warning("a prefix leaves the device without a copy (%s)", error)
            self.tiers.counts.lost += len(keys)
        finally:
            with self._lock:
                self._saving -= 1
            self._news.set()

    def settle(self) -> None:
        """Wait until all copies are in host memory."""
        self._out.submit(lambda: None).result()

    def close(self) -> None:
        """End the threads; the disk gets what is in host memory."""
        self._is_closed = True
        self._in.shutdown(wait=False, cancel_futures=True)
        self._out.shutdown(wait=True)
        self.tiers.close()

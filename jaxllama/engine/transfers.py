"""Transfers: blocks of records on their way between the device and the tiers, in threads. No jax.

    transfers.begin(held, known) -> Load     the missing pages and state of a sequence come back
    transfers.take(most) -> [Arrived, ...]   blocks of them that are on the device now
    transfers.placed(n)                      a program that puts n of them into place is queued
    transfers.room() -> (pages, states)      how many may be copied for the tiers now
    transfers.saved(keys, copies, kind)      copies on the device go to host memory

Contract. The engine's thread never waits for a transfer: it asks for what has arrived. The pages of
at most ``STAGED`` blocks of the largest size lie on the device before they are put into place, and
copies of as many wait for the host, so the memory of transfers is bounded. The states of one
sequence count as such a block.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jaxllama.engine.tiers import Block, Records, Tiers

if TYPE_CHECKING:
    from jaxllama.engine.pages import Held

STAGED = 3
Moved: TypeAlias = Literal["pages", "state"]
LOOK = 0.1  # seconds between two looks whether the engine has stopped
OnDevice: TypeAlias = Any  # records ``[n, size]`` on the device
_log = logging.getLogger("jaxllama.serving")


@dataclasses.dataclass(eq=False)
class Load:
    """The missing part of a sequence's known prefix, on its way to the device.

    keys: of its records. n_good: number of first pages that are on the device. last: key of the
    states after the prefix. They come when all pages are in place, so that no states wait on the
    device for the pages of another load. state: these states, on the device.
    """

    keys: tuple[bytes, ...]
    n_good: int
    left: int  # blocks of pages
    last: bytes | None = None
    state: OnDevice = None
    is_damaged: bool = False
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or (not self.left and self.last is None)

    def cancel(self) -> None:
        """Put no more of it into place."""
        self.is_cancelled = True


@dataclasses.dataclass(eq=False)
class Group:
    """Records of one block. pages: where they go; empty for the states. first: least number of
    pages of the prefix before one of them.
    """

    load: Load
    keys: list[bytes]
    pages: list[int]
    first: int


@dataclasses.dataclass(eq=False)
class Arrived:
    """A block on the device. pages: where its records go, by row."""

    pages: dict[int, int]
    data: OnDevice


class Transfers:
    """The transfers of one engine.

    Parameters
    ----------
    tiers
        Where records come from and go to.
    to_device, to_host
        Copy records, and return them when they have arrived. They raise if memory runs out.
    """

    def __init__(
        self,
        tiers: Tiers,
        to_device: Callable[[Records], OnDevice],
        to_host: Callable[[OnDevice], Records],
    ) -> None:
        self.tiers = tiers
        self._to_device, self._to_host = to_device, to_host
        self._most = tiers.sizes[0]
        self._staged, self._saving = 0, 0  # pages on the device; states count as ``_most``
        self._room = threading.Condition()
        self._arrived: collections.deque[tuple[Group, Arrived | None]] = collections.deque()
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
        begin = missing.end - len(missing.pages)
        number = {key: at for at, key in enumerate(missing.pages, begin)}
        parts = self.tiers.fetch(missing.pages)
        load = Load(missing.keys, missing.end, len(parts), missing.state)
        if missing.state is not None:
            self.tiers.prefetch([missing.state])
        for keys, source in parts:
            numbers = [number[key] for key in keys]
            pages = [held.pages[at] for at in numbers]
            self._bring(Group(load, keys, pages, min(numbers)), source)
        if not parts:
            self._bring_state(load)
        return load

    def _bring_state(self, load: Load) -> None:
        if load.last is not None:
            [(keys, source)] = self.tiers.fetch([load.last])
            self._bring(Group(load, keys, [], load.n_good), source)

    def _bring(self, group: Group, source: Block | Future[Block]) -> None:
        """Move a block to the device when it is in host memory."""
        if isinstance(source, Block):
            self._in.submit(self._move, group, lambda: source)
            return

        def on_block(read: Future[Block]) -> None:
            if not self._is_closed:
                self._in.submit(self._move, group, read.result)

        source.add_done_callback(on_block)

    def _move(self, group: Group, source: Callable[[], Block]) -> None:
        moved = None
        try:
            block = source()
            missing = [key for key in group.keys if key not in block.rows]
            self.tiers.refuse(missing)
            if not missing and not group.load.is_cancelled:
                moved = self._staged_block(group, block)
        except Exception as error:
            _log.warning(
                "a cached prefix cannot come back to the device (%s): it is computed again", error
            )
            self.tiers.refuse(group.keys)
        self._arrived.append((group, moved))
        self._news.set()

    def _staged_block(self, group: Group, block: Block) -> Arrived | None:
        """Return the block on the device; None if the engine has stopped."""
        count = len(block.data) if group.pages else self._most
        with self._room:
            while self._staged + count > STAGED * self._most:
                if self._is_closed or not threading.main_thread().is_alive():
                    return None
                self._room.wait(LOOK)
            self._staged += count
        try:
            rows = [block.rows[key] for key in group.keys]
            # States have no pages.
            pages = dict(zip(rows, group.pages, strict=False))
            return Arrived(pages, self._to_device(block.data))
        except BaseException:
            self.placed(count)
            raise

    def take(self, most: int | None = None) -> list[Arrived]:
        """Return blocks of pages that have arrived, and count them as in place.

        most: about as many of the largest blocks, or more smaller ones.
        """
        found: list[Arrived] = []
        left = (most or 0) * self._most
        while self._arrived and (most is None or left > 0):
            group, moved = self._arrived.popleft()
            load = group.load
            load.left -= bool(group.pages)
            if moved is None:
                load.is_damaged = True
                load.n_good = min(load.n_good, group.first)
            elif load.is_cancelled:
                self.placed(len(moved.data) if group.pages else None)
            elif group.pages:
                found.append(moved)
                left -= len(moved.data)
            else:
                load.state = moved.data
            if not group.pages or load.is_damaged:
                load.last = None
            elif not load.left and not load.is_cancelled:
                self._bring_state(load)
        return found

    def placed(self, n: int | None = None) -> None:
        """Give back the room of a block of ``n`` pages that is put into place, or of states."""
        with self._room:
            self._staged -= self._most if n is None else n
            self._room.notify()

    def wait(self, seconds: float) -> None:
        """Wait until a group has arrived or copies are in host memory, at most so long."""
        if self._news.wait(seconds):
            self._news.clear()

    # To the tiers

    def room(self) -> tuple[int, int]:
        """Return how many pages and how many states may be copied for the tiers now."""
        pages = max(STAGED * self._most - self._saving, 0)
        return pages, pages // self._most

    def saved(self, keys: Sequence[bytes], copies: OnDevice, kind: Moved) -> None:
        """Bring copies of pages or of states from the device to the tiers."""
        weight = len(copies) if kind == "pages" else self._most
        with self._lock:
            self._saving += weight
        self._out.submit(self._save, keys, copies, weight)

    def _save(self, keys: Sequence[bytes], copies: OnDevice, weight: int) -> None:
        try:
            self.tiers.put(keys, self._to_host(copies))
        except Exception as error:
            _log.warning("a prefix leaves the device without a copy (%s)", error)
            self.tiers.counts.lost += len(keys)
        finally:
            with self._lock:
                self._saving -= weight
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

"""Tiers: pages and states of known prefixes in host memory and on disk. No jax.

    tiers.root(weights, cache_key) -> key      of the empty prefix; ``after(key, tokens)`` goes on
    tiers.has(key)                             whether a tier has the record of this key
    tiers.fetch(keys) -> [(keys, block), ...]  or a Future of a block that is made for them
    tiers.put(keys, data)                      records that a device gave

A record is what one page, or one snapshot of the states, keeps of its tokens: bytes in host memory.
Its key is a hash of everything that its bytes depend on: the weights, the layout of the cache, the
adapter, the salt, and all tokens from the beginning. So another model, another client's salt or
another beginning never finds it.

A block is one array of some records, which came together and move together: a card's link takes
one large copy, and rows that decode hardly feel it. ``block_sizes`` are the numbers of its rows, of
which up to a quarter may be empty.
``fetch`` makes new blocks of records that it reads from disk, and of those that lie scattered over
blocks that have others too.

Contract. Records never change, so a key may be written by any server and read by any other one.
Host memory holds at most ``host_bytes`` bytes, and the disk as many as ``TierFiles`` says; each
forgets first what was used longest ago, the host's memory whole blocks. A record is written to the
disk as soon as it is in host memory, so that a server that is killed finds it again. Blocks with up
to ``BEHIND`` bytes more wait in memory for a slow disk after they have left host memory; others are
lost. Source: LRU tiers below a radix tree as in SGLang's HiCache (2025) and LMCache
(arXiv 2510.09665).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from jaxllama.engine.tier_files import TierFiles

# An array ``[n, size]`` of n records: in pinned memory, or of numpy.
Records: TypeAlias = Any
CacheKey: TypeAlias = "tuple[str | None, str]"  # an adapter and a salt

READERS, WRITERS = 8, 4  # threads; reading makes a prompt wait
BEHIND = 1 << 30  # bytes that have left host memory and wait to be written
CLOSING = 8.0  # seconds for the records that wait to be written when the engine stops
Item = TypeVar("Item")


def after(key: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a prefix that continues the prefix of ``key`` by a page's tokens."""
    data = np.array(tokens, np.int32).tobytes()
    return hashlib.blake2b(key + data, digest_size=len(key)).digest()


def state_of(key: bytes) -> bytes:
    """Return the key of the states after the prefix of ``key``."""
    return key + b"s"


@dataclasses.dataclass(frozen=True)
class Identity:
    """What all records of an engine depend on.

    weights: a hash of the weights and of the cache's layout. number: the scheduler's number of
    these weights. adapters: names of the adapters that are among the weights. nonce: of this
    process, for adapters that were loaded later and whose weights are unknown.
    """

    weights: bytes
    number: int
    adapters: tuple[str, ...]
    nonce: bytes

    def root(self, number: int, cache_key: CacheKey) -> bytes | None:
        """Return the key of the empty prefix; None for other weights than those of now."""
        if number != self.number:
            return None
        adapter, salt = cache_key
        known = adapter is None or adapter in self.adapters
        facts = self.weights, b"" if known else self.nonce, adapter, salt
        return hashlib.blake2b(repr(facts).encode(), digest_size=20).digest()


def block_sizes(most: int) -> list[int]:
    """Return the numbers of rows of a block, largest first: ``most``, quarters of it, and 1."""
    return [most, *block_sizes(max(most // 4, 1))] if most > 1 else [1]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Records side by side. rows: of ``data [n, size]``, by key."""

    data: Records
    rows: Mapping[bytes, int]

    @property
    def record_bytes(self) -> int:
        return self.data.nbytes // len(self.data)


@dataclasses.dataclass
class TierCounts:
    """What the tiers have given. lost: records that left the device or host memory uncopied."""

    host_hits: int = 0
    host_hit_bytes: int = 0
    disk_hits: int = 0
    disk_hit_bytes: int = 0
    lost: int = 0


class Tiers:
    """The records of one engine.

    Parameters
    ----------
    host_bytes
        Largest number of bytes in host memory.
    files
        The records on disk, if there are any.
    most
        Largest number of records of a block.
    pin
        Returns bytes ``[n, size]`` as a block's data.
    view
        Returns a block's bytes ``[n, size]`` without a copy.
    """

    def __init__(
        self,
        host_bytes: int,
        files: TierFiles | None,
        most: int,
        pin: Callable[[np.ndarray], Records],
        view: Callable[[Records], np.ndarray],
    ) -> None:
        self.host_bytes, self.files = host_bytes, files
        self.sizes = block_sizes(most)
        self.identity: Identity | None = None  # None: nothing is kept or found
        self.counts = TierCounts()
        self._pin, self._view = pin, view
        self._lock = threading.RLock()
        self._host: dict[bytes, Block] = {}
        # The number of ``_host``'s keys that each block has; those used longest ago come first.
        self._blocks: collections.OrderedDict[Block, int] = collections.OrderedDict()
        self.host_used = 0
        self._making: dict[bytes, Future[Block]] = {}
        self._ahead: set[bytes] = set()  # read for a request that has not fetched them yet
        self._awaited = collections.Counter[bytes]()  # fetched while they are being made
        self._unreadable: set[bytes] = set()
        # Records that wait to be written, oldest first; the bytes of those that left host memory.
        self._unwritten: collections.OrderedDict[bytes, Block] = collections.OrderedDict()
        self._left: dict[bytes, int] = {}
        self._behind = 0  # the sum of ``_left``
        self._writing = 0  # records that a thread writes now
        self._readers = ThreadPoolExecutor(READERS, "jaxllama-tier-read")
        self._writers = ThreadPoolExecutor(WRITERS, "jaxllama-tier-write")

    def root(self, number: int, cache_key: CacheKey) -> bytes | None:
        """Return the key of the empty prefix; None if nothing of it is kept."""
        return None if self.identity is None else self.identity.root(number, cache_key)

    def has(self, key: bytes) -> bool:
        """Return whether a tier has the record."""
        return self.where(key) is not None

    def knows(self, key: bytes) -> bool:
        """Return whether a tier has the record or gets it, without a look at the disk."""
        with self._lock:
            if key in self._unreadable:
                return False
            if self._found(key) is not None or key in self._making:
                return True
        return self.files is not None and self.files.nbytes_of(key) > 0

    def where(self, key: bytes) -> Literal["host", "disk"] | None:
        """Return the tier that has the record."""
        with self._lock:
            if key in self._unreadable:
                return None
            if self._found(key) is not None:
                return "host"
            if key in self._making:
                return "disk"
        return "disk" if self.files is not None and self.files.find(key) else None

    def runs(self, items: list[Item]) -> Iterator[list[Item]]:
        """Divide items into runs, each of which fills at least three quarters of a block."""
        for size in self.sizes:
            while 4 * len(items) >= 3 * size:
                yield items[:size]
                items = items[size:]

    def size_of(self, n: int) -> int:
        """Return the number of records of the block for a run of ``n``."""
        return min(size for size in self.sizes if size >= n)

    def fetch(self, keys: Sequence[bytes]) -> list[tuple[list[bytes], Block | Future[Block]]]:
        """Return the blocks of these records, each with those of the keys that are its own.

        A block that is made lacks the records that cannot be read.
        """
        with self._lock:
            found = {key: self._found(key) for key in keys}
            wanted = collections.Counter(found.values())
            for key, block in found.items():
                is_ahead = key in self._ahead
                self._ahead.discard(key)
                if block is None:
                    self._awaited[key] += 1
                else:
                    self._count("disk" if is_ahead else "host", block.record_bytes)
            for block in wanted:
                if block in self._blocks:
                    self._blocks.move_to_end(block)
            gathers = self._gathers(wanted)
            loose = [key for key in keys if found[key] in gathers]
            self._make(loose)
            made = {key: self._making[key] for key in loose}
        parts: dict[Any, list[bytes]] = {}
        for key in keys:
            parts.setdefault(made.get(key, found[key]), []).append(key)
        return [(own, source) for source, own in parts.items()]

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Begin to read these records from disk, as many as half of the host's memory holds."""
        if self.files is None:
            return
        room, ahead = self.host_bytes // 2, list[bytes]()
        with self._lock:
            for key in keys:
                size = self.files.nbytes_of(key)
                if not size or self._found(key) is not None or key in self._making:
                    continue
                room -= size
                if room < 0:
                    break
                ahead.append(key)
            self._ahead.update(ahead)
            self._make(ahead)

    def put(self, keys: Sequence[bytes], data: Records) -> None:
        """Keep records, the first rows of ``data [n, size]``, and begin to write them to disk."""
        files, block = self.files, Block(data, {key: row for row, key in enumerate(keys)})
        new = [] if files is None else [key for key in keys if not files.find(key)]
        with self._lock:
            self._unreadable.difference_update(keys)
            self._unwritten.update(dict.fromkeys(new, block))
        self._keep(block)
        for _ in new:
            with contextlib.suppress(RuntimeError):  # closed
                self._writers.submit(self._write_next)

    def refuse(self, keys: Iterable[bytes]) -> None:
        """Find these records no more, until they are put again."""
        with self._lock:
            for key in keys:
                self._unreadable.add(key)
                self._drop(key)

    def forget_host(self) -> None:
        """Empty the host's memory; what waits for the disk is written."""
        with self._lock:
            for key in list(self._host):
                self._drop(key)

    @property
    def n_host(self) -> int:
        """Number of records in host memory."""
        return len(self._host)

    def settle(self, seconds: float = CLOSING) -> bool:
        """Wait until all records are written that wait for it, at most so long."""
        until = time.monotonic() + seconds
        while self._is_behind():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _is_behind(self) -> bool:
        with self._lock:
            return bool(self._unwritten or self._writing)

    def close(self) -> None:
        """Write what waits, for at most ``CLOSING`` seconds, and end the threads."""
        self.settle()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

    # Under the lock

    def _found(self, key: bytes) -> Block | None:
        """Return the block of a record that is in memory, perhaps because it waits for the disk."""
        return self._host.get(key) or self._unwritten.get(key)

    def _gathers(self, wanted: Mapping[Block | None, int]) -> set[Block | None]:
        """Return the blocks whose wanted records go into new ones, and None for the disk's.

        wanted: numbers of records by block. They do so if fewer or far smaller blocks come of it.
        """
        most = self.sizes[0]
        few = [
            block
            for block, count in wanted.items()
            if block is not None and (2 * count < len(block.data) or 4 * count < most)
        ]
        count = sum(wanted[block] for block in few)
        n_made = len(list(self.runs([None] * count)))
        if n_made < len(few) or 2 * count < sum(len(block.data) for block in few):
            return {*few, None}
        return {None}

    def _make(self, keys: Iterable[bytes]) -> None:
        """Begin to make blocks of the records that are not being made."""
        new = [key for key in keys if key not in self._making]
        for size, alike in itertools.groupby(new, self._size):
            for run in self.runs(list(alike)):
                try:
                    future = self._readers.submit(self._made, run, size)
                except RuntimeError:  # closed
                    future = Future[Block]()
                    future.set_result(Block(np.empty((0, 0)), {}))
                self._making.update(dict.fromkeys(run, future))

    def _size(self, key: bytes) -> int:
        if (block := self._found(key)) is not None:
            return block.record_bytes
        return self.files.nbytes_of(key) if self.files is not None and self.files.find(key) else 0

    def _drop(self, key: bytes) -> None:
        block = self._host.pop(key, None)
        if block is None:
            return
        self._ahead.discard(key)
        self._blocks[block] -= 1
        if not self._blocks[block]:
            del self._blocks[block]
            self.host_used -= block.data.nbytes

    def _count(self, tier: str, nbytes: int, times: int = 1) -> None:
        counts = self.counts
        if tier == "host":
            counts.host_hits += times
            counts.host_hit_bytes += times * nbytes
        else:
            counts.disk_hits += times
            counts.disk_hit_bytes += times * nbytes

    # In threads

    def _made(self, keys: Sequence[bytes], size: int) -> Block:
        """Return a block of records from memory and disk, of those that can be read.

        size: bytes of a record, as ``_size`` found it: files may go at any time.
        """
        rows: dict[bytes, int] = {}
        try:
            data = np.empty((self.size_of(len(keys)), size), np.uint8)
            found = {key: row for row, key in enumerate(keys) if self._read(key, data[row])}
            block = Block(self._pin(data) if found else data, found)
            rows = found
            self._keep(block)
            return block
        finally:
            with self._lock:
                for key in keys:
                    self._making.pop(key, None)
                    awaited = self._awaited.pop(key, 0)
                    if key in rows:
                        self._count("disk", size, awaited)
                    else:
                        self._ahead.discard(key)
                        self._unreadable.add(key)

    def _read(self, key: bytes, out: np.ndarray) -> bool:
        """Read a record into ``out``, and return whether it is there."""
        with self._lock:
            block = self._found(key)
        if block is None:
            return self.files is not None and self.files.read(key, out)
        out[:] = self._view(block.data)[block.rows[key]]
        return True

    def _keep(self, block: Block) -> None:
        """Put a block into host memory; those used longest ago leave it."""
        with self._lock:
            for key in block.rows:
                self._drop(key)
                self._behind -= self._left.pop(key, 0)
            self._host.update(dict.fromkeys(block.rows, block))
            if block.rows:
                self._blocks[block] = len(block.rows)
                self.host_used += block.data.nbytes
            while self.host_used > self.host_bytes:
                self._evict(next(iter(self._blocks)))

    def _evict(self, block: Block) -> None:
        size = block.record_bytes
        for key in block.rows:
            if self._host.get(key) is not block:
                continue
            self._drop(key)
            if key in self._unwritten and self._behind + size > BEHIND:
                del self._unwritten[key]
                self.counts.lost += 1
            elif key in self._unwritten:
                self._left[key] = size
                self._behind += size

    def _write_next(self) -> None:
        """Write the record that has waited longest."""
        with self._lock:
            if not self._unwritten:
                return
            key, block = self._unwritten.popitem(last=False)
            self._writing += 1
            self._behind -= self._left.pop(key, 0)
        try:
            assert self.files is not None
            self.files.write(key, self._view(block.data)[block.rows[key]])
        finally:
            with self._lock:
                self._writing -= 1

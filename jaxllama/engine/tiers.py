"""Tiers: pages and states of known prefixes in host memory and on disk. No jax.

    tiers.root(weights, cache_key) -> key      of the empty prefix; ``after(key, tokens)`` goes on
    tiers.has(key)                             whether a tier has the record of this key
    tiers.fetch(keys) -> [record, ...]         or a Future of one that is read from disk
    tiers.put(key, record)                     a record that a device gave

A record is what one page, or one snapshot of the states, keeps of its tokens: bytes in host memory.
Its key is a hash of everything that its bytes depend on: the weights, the layout of the cache, the
adapter, the salt, and all tokens from the beginning. So another model, another client's salt or
another beginning never finds it.

Contract. Records never change, so a key may be written by any server and read by any other one.
Host memory holds at most ``host_bytes`` bytes, and the disk as many as ``TierFiles`` says; each
forgets first what was used longest ago. A record is written to the disk as soon as it is in host
memory, so that a server that is killed finds it again. Up to ``BEHIND`` bytes more wait in memory
for a slow disk after they have left host memory; others are lost. Source: LRU tiers below a radix
tree as in SGLang's HiCache (2025) and LMCache (arXiv 2510.09665).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxllama.engine.tier_files import TierFiles

# Bytes in host memory with ``nbytes``: an array in pinned memory, or of numpy.
Record: TypeAlias = Any
CacheKey: TypeAlias = "tuple[str | None, str]"  # an adapter and a salt

THREADS = 4  # that read files, and as many that write them
BEHIND = 1 << 30  # bytes that have left host memory and wait to be written
CLOSING = 8.0  # seconds for the records that wait to be written when the engine stops


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


@dataclasses.dataclass
class TierCounts:
    """What the tiers have given and hold. lost: pages that left the device before a copy began."""

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
    pin
        Returns bytes that were read from a file as a record.
    view
        Returns a record's bytes without a copy.
    """

    def __init__(
        self,
        host_bytes: int,
        files: TierFiles | None,
        pin: Callable[[np.ndarray], Record],
        view: Callable[[Record], np.ndarray],
    ) -> None:
        self.host_bytes, self.files = host_bytes, files
        self.identity: Identity | None = None  # None: nothing is kept or found
        self.counts = TierCounts()
        self._pin, self._view = pin, view
        self._lock = threading.Lock()
        self._host: collections.OrderedDict[bytes, Record] = collections.OrderedDict()
        self.host_used = 0
        self._reading: dict[bytes, Future[Record | None]] = {}
        self._ahead: set[bytes] = set()  # read for a request that has not fetched them yet
        self._unreadable: set[bytes] = set()
        # Records that wait to be written, oldest first; the bytes of those that left host memory.
        self._unwritten: collections.OrderedDict[bytes, Record] = collections.OrderedDict()
        self._left: dict[bytes, int] = {}
        self._behind = 0  # the sum of ``_left``
        self._writing = 0  # records that a thread writes now
        self._readers = ThreadPoolExecutor(THREADS, "jaxllama-tier-read")
        self._writers = ThreadPoolExecutor(THREADS, "jaxllama-tier-write")

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
            if key in self._host or key in self._unwritten or key in self._reading:
                return True
        return self.files is not None and self.files.size(key) > 0

    def where(self, key: bytes) -> Literal["host", "disk"] | None:
        """Return the tier that has the record."""
        with self._lock:
            if key in self._unreadable:
                return None
            if key in self._host or key in self._unwritten:
                return "host"
            if key in self._reading:
                return "disk"
        return "disk" if self.files is not None and self.files.find(key) else None

    def fetch(self, keys: Sequence[bytes]) -> list[Record | Future[Record | None]]:
        """Return the records that are in host memory, and for each other one when it is there.

        None stands for one that cannot be read.
        """
        found = list[Record | None]()
        with self._lock:
            for key in keys:
                record, is_ahead = self._host.get(key), key in self._ahead
                self._ahead.discard(key)
                if record is not None:
                    self._host.move_to_end(key)
                else:
                    record = self._unwritten.get(key)  # it has left, and waits for the disk
                if record is not None:
                    self._count("disk" if is_ahead else "host", record.nbytes)
                found.append(record)
        pairs = zip(keys, found, strict=True)
        return [self._from_disk(key) if record is None else record for key, record in pairs]

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Begin to read these records from disk, as many as half of the host's memory holds."""
        if self.files is None:
            return
        room = self.host_bytes // 2
        for key in keys:
            with self._lock:
                if key in self._host or key in self._reading or not self.files.size(key):
                    continue
                room -= self.files.size(key)
                if room < 0:
                    return
                self._ahead.add(key)
            self._read(key)

    def put(self, key: bytes, record: Record) -> None:
        """Keep a record, and begin to write it to the disk."""
        with self._lock:
            self._unreadable.discard(key)
        is_new = self.files is not None and not self.files.find(key)
        if is_new:
            with self._lock:
                self._unwritten[key] = record
        self._keep(key, record)
        if is_new:
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
        while self._unwritten or self._writing:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Write what waits, for at most ``CLOSING`` seconds, and end the threads."""
        self.settle()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

    # Under the lock

    def _drop(self, key: bytes) -> None:
        record = self._host.pop(key, None)
        if record is not None:
            self.host_used -= record.nbytes

    def _count(self, tier: str, nbytes: int) -> None:
        counts = self.counts
        if tier == "host":
            counts.host_hits += 1
            counts.host_hit_bytes += nbytes
        else:
            counts.disk_hits += 1
            counts.disk_hit_bytes += nbytes

    # In threads

    def _count_read(self, future: Future[Record | None]) -> None:
        record = None if future.cancelled() else future.result()
        if record is not None:
            with self._lock:
                self._count("disk", record.nbytes)

    def _from_disk(self, key: bytes) -> Future[Record | None]:
        future = self._read(key)
        future.add_done_callback(self._count_read)
        return future

    def _read(self, key: bytes) -> Future[Record | None]:
        with self._lock:
            found = self._reading.get(key)
            if found is None:
                try:
                    found = self._readers.submit(self._read_now, key)
                except RuntimeError:  # closed
                    return _done(None)
                self._reading[key] = found
            return found

    def _read_now(self, key: bytes) -> Record | None:
        record = None
        try:
            data = None if self.files is None else self.files.read(key)
            record = None if data is None else self._pin(data)
        finally:
            if record is not None:
                self._keep(key, record)
            with self._lock:
                self._reading.pop(key, None)
                if record is None:
                    self._unreadable.add(key)
        return record

    def _keep(self, key: bytes, record: Record) -> None:
        """Put a record into host memory; those used longest ago leave it."""
        with self._lock:
            self._drop(key)
            self._host[key] = record
            self._behind -= self._left.pop(key, 0)
            self.host_used += record.nbytes
            while self.host_used > self.host_bytes:
                old, gone = self._host.popitem(last=False)
                self.host_used -= gone.nbytes
                if old in self._unwritten and self._behind + gone.nbytes > BEHIND:
                    del self._unwritten[old]
                    self.counts.lost += 1
                elif old in self._unwritten:
                    self._left[old] = gone.nbytes
                    self._behind += gone.nbytes

    def _write_next(self) -> None:
        """Write the record that has waited longest."""
        with self._lock:
            if not self._unwritten:
                return
            key, record = self._unwritten.popitem(last=False)
            self._writing += 1
            self._behind -= self._left.pop(key, 0)
        try:
            assert self.files is not None
            self.files.write(key, self._view(record))
        finally:
            with self._lock:
                self._writing -= 1


def _done(record: Record | None) -> Future[Record | None]:
    future: Future[Record | None] = Future()
    future.set_result(record)
    return future

"""TierFiles: pages and states on disk, a file each, which a later server finds again.

    files.find(key) -> bool                files.nbytes_of(key) -> bytes
    files.write(key, data) -> bool         files.read(key, out) -> bool

Contract. A file has its final name only when it is complete, so several servers may use one folder.
A reader takes a file that another server has deleted as one that is not there. ``read`` gives
what was written or nothing: it compares the length and a CRC-32. A damaged file is deleted, and the
log has one sentence about it. If the disk refuses a write, the log has one sentence, and nothing is
written for ``PAUSE`` seconds. The folder holds at most ``limit`` bytes: the files that were used
longest ago are deleted first, those of other models and servers too.

Only the owner may read the files, because they follow from prompts. A key is a hash, from which the
prompt cannot be computed. Files are not flushed: a loss of power may damage the newest ones, and
the checksum finds that.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import re
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError

PAUSE = 60.0
LOOK = 60.0  # seconds between two looks for the files of other servers
STALE = 3600.0  # age in seconds of an incomplete file whose writer counts as dead
_HEADER = struct.Struct("<8sQI44x")  # mark, bytes, CRC-32; 64 bytes
_MARK = b"jlpage1\n"
_SUFFIX = ".page"
_PART = re.compile(r"\.[0-9a-f]{32}")  # a ``_part_name``; other dot files are a user's
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that say nothing of a file
_log = logging.getLogger("jaxllama.serving")


class TierFiles:
    """The files in ``folder``; the module docstring has the contract.

    Raises JaxLlamaError if the folder cannot be used. limit: bytes; None stands for half of what
    the disk has room for.
    """

    def __init__(self, folder: str | Path, limit: int | None = None) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._sizes: collections.OrderedDict[str, int] = collections.OrderedDict()  # oldest first
        self.nbytes = self._coming = 0  # _coming: of files that threads write now
        self._looked = self._paused = -float("inf")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._path(_part_name()), "xb") as file:
                os.unlink(file.name)
            self._look()
            disk = os.statvfs(self.folder)
        except OSError as error:
            raise JaxLlamaError(
                f"disk_cache = {self.folder}: {error.strerror or error}: name a folder that can "
                "be written to"
            ) from None
        free = disk.f_bavail * disk.f_frsize
        self.limit = (free + self.nbytes) // 2 if limit is None else limit
        if self._sizes:
            _log.info(
                "disk_cache: %s has %d pages, %.2f GB", folder, len(self._sizes), self.nbytes / 1e9
            )

    def __len__(self) -> int:
        return len(self._sizes)

    def find(self, key: bytes) -> bool:
        """Return whether there is a file for the key, perhaps of another server."""
        name = key.hex()
        with self._lock:
            if name in self._sizes:
                return True
        try:
            size = os.stat(self._path(name)).st_size
        except OSError:
            return False
        self._add(name, size)
        return True

    def nbytes_of(self, key: bytes) -> int:
        """Return the bytes of a record that ``find`` has found; 0 for others."""
        return max(self._sizes.get(key.hex(), 0) - _HEADER.size, 0)

    def read(self, key: bytes, out: np.ndarray) -> bool:
        """Read a record into ``out``, uint8 of its size, unless it is missing or damaged."""
        name = key.hex()
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                _read(file.fileno(), out)
            os.utime(path)
        except FileNotFoundError:
            self._forget(name)
            return False
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            _log.warning("%s cannot be read (%s): its tokens are computed again", path, why)
            if getattr(error, "errno", None) not in _OF_THE_PROCESS:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                self._forget(name)
            return False
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return True

    def write(self, key: bytes, data: np.ndarray) -> bool:
        """Write a file, and return whether it is there. The disk may refuse; that is no error."""
        name, size = key.hex(), _HEADER.size + data.nbytes
        if self.find(key):
            return True
        with self._lock:
            if self._coming + size > self.limit or time.monotonic() < self._paused:
                return False
            self._coming += size
        try:
            return self._put(name, size, data)
        finally:
            with self._lock:
                self._coming -= size

    def _put(self, name: str, size: int, data: np.ndarray) -> bool:
        self._make_room()
        path = self._path(name)
        part = path.with_name(_part_name())
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(part, data)
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part)
            self._paused = time.monotonic() + PAUSE
            _log.warning(
                "disk_cache: %s cannot be written to (%s): nothing is kept there for %.0f s",
                self.folder,
                error.strerror or error,
                PAUSE,
            )
            return False
        self._add(name, size)
        return True

    def path(self, key: bytes) -> Path:
        """Return where the key's file is, if there is one."""
        return self._path(key.hex())

    def _path(self, name: str) -> Path:
        if name.startswith("."):
            return self.folder / name
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _add(self, name: str, size: int) -> None:
        with self._lock:
            self.nbytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size

    def _forget(self, name: str) -> None:
        with self._lock:
            self.nbytes -= self._sizes.pop(name, 0)

    def _make_room(self) -> None:
        """Delete the files that were used longest ago, until those that come fit the limit."""
        if time.monotonic() > self._looked + LOOK:  # all servers together have the limit
            with contextlib.suppress(OSError):
                self._look()
        while self.nbytes + self._coming > self.limit:
            with self._lock:
                if not self._sizes:
                    return
                name, found = self._sizes.popitem(last=False)
                self.nbytes -= found
            with contextlib.suppress(OSError):  # another server may have deleted it
                os.unlink(self._path(name))

    def _look(self) -> None:
        """Read the names, sizes and times of all files, and delete what dead writers left."""
        self._looked, now = time.monotonic(), time.time()
        found = []
        with self._lock:
            before = dict(self._sizes)
        for entry in _entries(self.folder):
            with contextlib.suppress(OSError):
                facts = entry.stat()
                if _PART.fullmatch(entry.name) and now - facts.st_mtime > STALE:
                    os.unlink(entry.path)
                elif entry.name.endswith(_SUFFIX):
                    name = entry.name.removesuffix(_SUFFIX)
                    found.append((facts.st_mtime_ns, name, facts.st_size))
        with self._lock:  # other threads have written and deleted files since
            gone = before.keys() - self._sizes.keys()
            known = {name: size for _, name, size in sorted(found) if name not in gone}
            known |= {name: size for name, size in self._sizes.items() if name not in before}
            self._sizes = collections.OrderedDict(known)
            self.nbytes = sum(self._sizes.values())


def _part_name() -> str:
    """Return a name for an incomplete file."""
    return f".{uuid.uuid4().hex}"


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files of the folder and of its folders that may be read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
                continue
            with contextlib.suppress(PermissionError), os.scandir(entry.path) as files:
                yield from files


def _write(path: Path, data: np.ndarray) -> None:
    """Write a new file. Raises OSError."""
    header = _HEADER.pack(_MARK, data.nbytes, zlib.crc32(data.data))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for part in (memoryview(header), data.data):
            done = 0
            while done < len(part):
                done += file.write(part[done:])


def _read(descriptor: int, out: np.ndarray) -> None:
    """Read an open file into ``out``. Raises OSError, or ValueError for a damaged file."""
    size = os.fstat(descriptor).st_size
    header = os.read(descriptor, _HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{size} bytes")
    mark, nbytes, check = _HEADER.unpack(header)
    if mark != _MARK or size != _HEADER.size + nbytes or nbytes != len(out):
        raise ValueError(f"{size} bytes, not what was written")
    done = 0
    while done < nbytes:
        count = os.readv(descriptor, [out.data[done:]])
        if not count:
            raise ValueError(f"{done} of {nbytes} bytes")
        done += count
    if zlib.crc32(out.data) != check:
        raise ValueError("its checksum is another one")

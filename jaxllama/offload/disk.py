"""DiskFile: a checked scratch file, read and written by threads.

    extent = file.write(array)      file.read(extent) -> array      file.free(extent)
    file.begin(extent)() is file.read(extent); begun ahead, it keeps the disk busy meanwhile

Contract: ``read`` returns what was written or raises JaxLlamaError, because it compares every
chunk's length and CRC-32. The file has no name (it is unlinked when it is made). So nothing is left
behind however the process ends, and no other process can remove or replace it. Space is allocated
before it is written, so a full disk is one error at the beginning of a write.

Chunks are read with positioned reads into the destination, and not through a mapping. The pages of
a mapping count as memory in use beside the copy, and the purpose of the disk is to save host
memory.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxllama.checkpoints.hf.load import aligned_empty
from jaxllama.errors import JaxLlamaError

CHUNK = 1 << 22  # bytes that one thread reads and checks at a time
_ALIGN = 1 << 12  # extents begin at pages


@dataclasses.dataclass(frozen=True)
class Extent:
    """The place of an array's bytes, and their checksums."""

    offset: int
    nbytes: int
    checks: tuple[int, ...]  # CRC-32 of each chunk
    shape: tuple[int, ...]
    dtype: np.dtype


class DiskFile:
    """One nameless file in ``directory``; the module docstring has the contract."""

    def __init__(self, directory: str | Path, threads: int = 4) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory, buffering=0) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise JaxLlamaError(f"{self.directory}: {error.strerror or error}") from None
        self.close = weakref.finalize(self, os.close, self._fd)
        self._pool = ThreadPoolExecutor(threads, "offload-disk")
        self._lock = threading.Lock()
        self._end = 0
        self._holes: dict[int, list[int]] = {}  # size -> offsets that are free again

    @property
    def fileno(self) -> int:
        return self._fd

    @property
    def nbytes(self) -> int:
        """Bytes of the file, holes included."""
        return self._end

    def write(self, array: np.ndarray) -> Extent:
        """Write an array. Raises JaxLlamaError when the disk has no room."""
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        offset = self._take(len(view))
        jobs = [
            self._pool.submit(self._write_chunk, view[at : at + CHUNK], offset + at)
            for at in range(0, len(view), CHUNK)
        ]
        try:
            checks = tuple(job.result() for job in jobs)
        except OSError as error:
            raise self._error(error, len(view)) from None
        return Extent(offset, len(view), checks, array.shape, array.dtype)

    def begin(self, extent: Extent) -> Callable[[], np.ndarray]:
        """Begin to read; the returned function waits, and returns the result of ``read``."""
        out = aligned_empty(extent.nbytes, np.dtype(np.uint8))
        view = out.data
        jobs = [
            self._pool.submit(
                self._read_chunk, view[at : at + CHUNK], extent.offset + at, extent.checks[i]
            )
            for i, at in enumerate(range(0, extent.nbytes, CHUNK))
        ]

        def result() -> np.ndarray:
            for job in jobs:
                job.result()
            return out.view(extent.dtype).reshape(extent.shape)

        return result

    def read(self, extent: Extent) -> np.ndarray:
        """Return the array, 64-byte aligned. Raises JaxLlamaError for missing or wrong bytes."""
        return self.begin(extent)()

    def read_rows(self, extent: Extent, rows: np.ndarray) -> np.ndarray:
        """Return some rows of the array without its checks, for an embedding's look-up."""
        out = np.empty((len(rows), *extent.shape[1:]), extent.dtype)
        width = extent.nbytes // extent.shape[0]
        for view, row in zip(out.reshape(len(rows), -1).view(np.uint8), rows, strict=True):
            self._fill(view.data, extent.offset + int(row) * width)
        return out

    def free(self, extent: Extent) -> None:
        """Allow the bytes to be overwritten."""
        with self._lock:
            self._holes.setdefault(_room(extent.nbytes), []).append(extent.offset)

    def drop_cache(self) -> None:
        """Ask the system to drop its cache of the file, so that reads come from the disk."""
        os.fsync(self._fd)
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _take(self, nbytes: int) -> int:
        room = _room(nbytes)
        with self._lock:
            if self._holes.get(room):
                return self._holes[room].pop()
            offset = self._end
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._fd, offset, max(room, 1))
                else:  # macOS, where a full disk is found by the write
                    os.ftruncate(self._fd, offset + max(room, 1))
            except OSError as error:
                raise self._error(error, nbytes) from None
            self._end += room
            return offset

    def _write_chunk(self, view: memoryview, offset: int) -> int:
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)
        return zlib.crc32(view)

    def _read_chunk(self, view: memoryview, offset: int, check: int) -> None:
        self._fill(view, offset)
        if zlib.crc32(view) != check:
            raise JaxLlamaError(
                f"{self.directory}: offloaded data at byte {offset} is not what was written "
                "(checksum): the disk or another process changed it"
            )

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise JaxLlamaError(f"{self.directory}: {error.strerror or error}") from None
            if count == 0:
                raise JaxLlamaError(
                    f"{self.directory}: offloaded data ends at byte {offset + done}: the file was "
                    "truncated"
                )
            done += count

    def _error(self, error: OSError, nbytes: int) -> JaxLlamaError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return JaxLlamaError(
                f"{self.directory}: no room for {nbytes} more bytes of offloaded data after "
                f"{self._end}"
            )
        return JaxLlamaError(f"{self.directory}: {error.strerror or error}")


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN

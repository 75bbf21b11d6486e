"""Memory for weights in pages of 2 MB, where the system has them.

    empty(shape, dtype) -> numpy's array, which begins at a multiple of 64 bytes

A step of decode reads every weight once.  With pages of 4 KB it misses the translation cache at
each page, and the CPU's prefetcher stops at each page's end.  Linux gives large pages to memory
that asks for them (``madvise``), in whole pages, so small arrays share a region.  A region is freed
when its last array is.  Other systems, and Linux without large pages, give what numpy gives.
"""

from __future__ import annotations

import math
import mmap
import threading

import numpy as np
from numpy.typing import DTypeLike

PAGE = 1 << 21
REGION = 16 * PAGE  # what small arrays share
ALIGNMENT = 64  # jax takes an array that begins so without a copy


class _Region:
    """A part of the address space; its pages take memory once they are written."""

    def __init__(self, size: int) -> None:
        # A mapping may begin in the middle of a page, so it has one more than it needs.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, size + PAGE, flags=private)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(mapped, np.uint8)
        start = -room.ctypes.data % PAGE
        self._room = room[start : start + size]
        self._used = 0

    def take(self, size: int) -> np.ndarray | None:
        """So many bytes, if they are left."""
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        if begin + size > len(self._room):
            return None
        self._used = begin + size
        return self._room[begin : begin + size]


_lock = threading.Lock()
_shared: _Region | None = None


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of any content, from a multiple of 64 bytes on, in large pages where there are."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    taken = _taken(size) if size and hasattr(mmap, "MADV_HUGEPAGE") else None
    if taken is None:
        room = np.empty(size + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        taken = room[start : start + size]
    return taken.view(dtype).reshape(shape)


def _taken(size: int) -> np.ndarray | None:
    global _shared
    try:
        if size > REGION // 2:
            return _Region(size).take(size)
        with _lock:
            found = None if _shared is None else _shared.take(size)
            if found is None:
                _shared = _Region(REGION)
                found = _shared.take(size)
            return found
    except OSError:  # a system without large pages, or a limit of the address space
        return None

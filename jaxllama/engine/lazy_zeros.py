"""Zero arrays that take memory only as they are written (Linux, CPU).

    zeros(shape)         an array whose pages the system backs on first write

An empty cache is an array of zeros, and writing the zeros makes the system back all of it: 1 GiB
beside a model of 98 MB. ``zeros`` gives those pages back. The system reads such pages as zeros, so
the array keeps its values.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import jax
import jax.numpy as jnp

LEAST = 2**20  # bytes from which an array's pages are given back


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of this shape and dtype on the CPU. Without madvise the memory stays backed."""
    array = jnp.zeros(shape.shape, shape.dtype)
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or array.nbytes < LEAST:
        return array
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        begin = array.block_until_ready().unsafe_buffer_pointer()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (begin + array.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))
    return array

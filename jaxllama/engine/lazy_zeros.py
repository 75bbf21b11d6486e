"""Give memory that holds nothing back to the system (Linux, CPU).

    zeros(shape)         an array that takes memory as it is written
    trim()               what the C library keeps of freed memory

An empty cache is filled with zeros, so the system backs all of it with memory: 1 GiB beside a model
of 98 MB.  Anonymous memory that was given back reads as zeros, so the arrays keep their values.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import jax
import jax.numpy as jnp

LEAST = 2**20  # bytes of an array for which the call pays


def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape and dtype on the CPU; a system without madvise backs them with memory."""
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


def trim() -> None:
    """Give back what the C library's allocator holds: compiling leaves it much that is free."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

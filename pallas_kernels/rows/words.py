"""Rows of arrays as words: how a GPU moves codes at its memory's rate.

    words_of(rows) -> uint32 [n, size]      of_words(words, like) -> rows
    set_rows(array, places, words)          in place where the caller donates the array
    gather(arrays, places) -> records       uint32 [n, size]: rows of all arrays side by side
    scatter(arrays, places, records)        in place where the caller donates the arrays

``gather`` and ``scatter`` are one kernel for all arrays where all rows are multiples of 16 bytes.
XLA has a launch for each array.

XLA writes each byte by an atomic exchange of its word, 48 GB/s on an H200, unless it knows that the
places differ. It then writes words, 16 bytes at once. A GPU must not write halves of a byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES


def row_bytes(array: jax.Array) -> int:
    """Return the bytes of a row of ``array [N, ...]``."""
    return packed_bytes(math.prod(array.shape[1:]), array.dtype)


def words_of(rows: jax.Array) -> jax.Array:
    """Return ``rows [n, ...]`` as words ``[n, size]``: uint32, or smaller ones for odd rows."""
    nbytes = row_bytes(rows)
    word = next(x for x in (jnp.uint32, jnp.uint16, jnp.uint8) if not nbytes % x.dtype.itemsize)
    bits = 4 if rows.dtype.name in NIBBLES else 8 * rows.dtype.itemsize
    if (count := 8 * word.dtype.itemsize // bits) > 1:
        rows = rows.reshape(len(rows), -1, count)
    return lax.bitcast_convert_type(rows, word).reshape(len(rows), -1)


def of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Undo ``words_of``; like: an array of the same shape behind its first axis, and dtype."""
    return lax.bitcast_convert_type(words, like.dtype).reshape(len(words), *like.shape[1:])


def set_rows(array: jax.Array, places: jax.Array, words: jax.Array) -> jax.Array:
    """Return ``array [N, ...]`` with the rows of ``words_of`` at distinct ``places [n]``.

    Rows of places past the end are dropped, and these places may be equal.
    """
    # XLA's CPU client would copy the array to see it as words.
    return lax.platform_dependent(array, places, words, cpu=_set, default=_set_words)


def _set(array: jax.Array, places: jax.Array, words: jax.Array) -> jax.Array:
    rows = of_words(words, array)
    return array.at[places].set(rows, mode="drop", unique_indices=True)


def _set_words(array: jax.Array, places: jax.Array, words: jax.Array) -> jax.Array:
    new = words_of(array).at[places].set(words, mode="drop", unique_indices=True)
    return of_words(new, array)


def gather(arrays: Sequence[jax.Array], places: jax.Array) -> jax.Array:
    """Return the records ``[n, size]`` of the rows at ``places [n]`` of all ``arrays [N, ...]``.

    The record of a place past the end may have any bytes.
    """
    if (sizes := _kernel_sizes(arrays)) is not None:
        from pallas_kernels.rows import words_kernel

        return words_kernel.gather(arrays, places, sizes)
    parts = [words_of(jnp.take(array, places, axis=0, mode="clip")) for array in arrays]
    return jnp.concatenate(parts, axis=1)


def scatter(
    arrays: Sequence[jax.Array], places: jax.Array, records: jax.Array
) -> Sequence[jax.Array]:
    """Return ``arrays [N, ...]`` with the rows of ``gather``'s records at distinct ``places [n]``.

    Rows of places past the end are dropped, and these places may be equal.
    """
    if (sizes := _kernel_sizes(arrays)) is not None:
        from pallas_kernels.rows import words_kernel

        return words_kernel.scatter(arrays, places, records, sizes)
    begin, new = 0, []
    for array in arrays:
        end = begin + row_bytes(array) // 4
        new.append(set_rows(array, places, records[:, begin:end]))
        begin = end
    return new


def _kernel_sizes(arrays: Sequence[jax.Array]) -> list[int] | None:
    """Return the bytes of a row of each array for the kernel, or None where there is none."""
    sizes = [row_bytes(array) for array in arrays]
    is_aligned = not any(size % 16 for size in sizes)
    return sizes if is_aligned and dispatch.hopper_reason(*arrays) is None else None

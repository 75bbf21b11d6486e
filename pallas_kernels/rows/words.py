"""Rows of arrays as words: how a GPU moves codes at its memory's rate.

    words_of(rows) -> uint32 [n, size]      of_words(words, like) -> rows
    set_rows(array, places, words)          in place where the caller donates the array

XLA writes each byte by an atomic exchange of its word, 48 GB/s on an H200, unless it knows that the
places differ. It then writes words, 16 bytes at once. A GPU must not write halves of a byte.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES


def words_of(rows: jax.Array) -> jax.Array:
    """Return ``rows [n, ...]`` as words ``[n, size]``: uint32, or smaller ones for odd rows."""
    nbytes = packed_bytes(math.prod(rows.shape[1:]), rows.dtype)
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

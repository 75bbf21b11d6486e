"""Rows of x by expert: ``out[i] = x[order[i] // fan]``.

A warp copies a row at a time, 16 bytes a lane, with all of the row's loads under way at once.  The
kernel of many pairs reads such rows by the copy engine, and two blocks of a cluster may share them.

Copies: each warp, through registers.  Waits: for the kernel before; no barrier.  Writes: each lane
stores the vectors that it has loaded.
"""

from __future__ import annotations

import jax

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value

WARPS = 8  # of a block
_BLOCKS = 4  # of a multiprocessor, at most by registers
_AT_ONCE = 12  # vectors of 16 bytes that a lane has under way


def sorted_rows(x: jax.Array, order: jax.Array, fan: int) -> jax.Array:
    """Rows of x in the order of pairs, ``[P, K]``.

    x: ``[P / fan, K]``, a row of a multiple of 16 bytes.  order: int32 ``[P]``; an entry past the
    last pair, which no part has, may be anything.
    """
    n_rows, k = x.shape
    n_pairs, row_bytes = order.shape[0], k * x.dtype.itemsize
    blocks = gpu().sms * _BLOCKS

    def body(gmem, smem) -> None:
        del smem
        source, pairs, out = p.address(gmem.x), p.address(gmem.order), p.address(gmem.out)
        p.await_kernel()
        thread = p.register("tid.x")
        lane = thread & 31
        first = p.register("ctaid.x") * WARPS + (thread >> 5)

        def copy(i: Value, _: list[Value]) -> list[Value]:
            (pair,) = p.load_global(p.offset(pairs, i, 4), 1)
            row = pair if fan == 1 else pair // fan
            begin = p.offset_rows(source, p.minimum(row, n_rows - 1), row_bytes)
            copy_row(begin, p.offset_rows(out, i, row_bytes), lane, row_bytes // 16)
            return []

        p.loop(first, n_pairs, blocks * WARPS, [], copy)

    return launch(
        body,
        {"x": x, "order": order},
        {"out": jax.ShapeDtypeStruct((n_pairs, k), x.dtype)},
        name="experts_rows",
        grid=blocks,
        warpgroups=WARPS // 4,
        registers=True,
    )[0]


def copy_row(source: Value, to: Value, lane: Value, vectors: int) -> None:
    """Copy so many vectors of 16 bytes by a warp.  Lanes past the end copy the last one again."""
    for c in range(0, vectors, 32 * _AT_ONCE):
        count = -(-min(vectors - c, 32 * _AT_ONCE) // 32)
        places = [lane + (c + 32 * i) for i in range(count)]
        if c + 32 * count > vectors:
            places[-1] = p.minimum(places[-1], vectors - 1)
        found = [p.load_global(p.offset(source, at, 16), 4) for at in places]
        for at, words in zip(places, found, strict=True):
            p.store_global(p.offset(to, at, 16), words)

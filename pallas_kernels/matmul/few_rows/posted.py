"""The kernels' side of a sum over devices (``matmul.sums``): store a part, wait for all parts.

Copies: a lane loads its 8 values of each device's row.  Waits: ``total`` loads these again until
none of their words is ``EMPTY``; there is no barrier.  Writes: ``empty`` stores ``EMPTY``, and
``collect`` the sums.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.launch import launch
from pallas_kernels.matmul.call import EMPTY
from pallas_kernels.ptx import Value

_THREADS = 128


@dataclasses.dataclass(frozen=True)
class Posts:
    """Rows of ``width`` values of ``peers`` devices."""

    peers: int
    width: int

    # --- by the product that posts ---

    def place(self, table: Value, peer: Value) -> Value:
        """Return where a peer expects this device's row; numbers past the last are the last's."""
        return p.load_address(p.offset(table, p.minimum(peer, self.peers - 1), 8))

    def empty(self, table: Value, thread: Value, threads: int) -> None:
        """Empty the slot of two sums ago.  thread: the number among all blocks' ``threads``."""
        pieces = self.peers * self.width // 4
        slot = p.load_address(table, 8 * (self.peers + 1))
        for first in range(0, pieces, threads):
            piece = thread + first
            at = p.offset(slot, piece, 16)
            p.when(piece < pieces, lambda at=at: p.store_global(at, [p.ci(EMPTY)] * 4))

    # --- by the kernel that polls ---

    def slot(self, table: Value) -> Value:
        """Return this device's slot of the sum."""
        return p.load_address(table, 8 * self.peers)

    def ask(self, slot: Value, piece: Value) -> list[Value]:
        """Load 8 neighbouring values of every device's row, which may not be there yet."""
        at = p.offset(slot, piece, 32)
        starts = (4 * self.width * peer + half for peer in range(self.peers) for half in (0, 16))
        return [word for start in starts for word in p.load_posted(at, start)]

    def total(self, words: list[Value], slot: Value, piece: Value) -> list[Value]:
        """Return the sums of 8 values, once all devices have posted them."""
        at = p.offset(slot, piece, 32)
        totals = [p.cf(0.0)] * 8
        for peer in range(self.peers):
            values = []
            for half in (0, 1):
                first, start = 8 * peer + 4 * half, 4 * self.width * peer + 16 * half
                four = p.await_posted(words[first : first + 4], at, EMPTY, start)
                values += [p.from_bits(word) for word in four]
            totals = [a + b for a, b in zip(totals, values, strict=True)]
        return totals


def collect(order: jax.Array, table: jax.Array) -> jax.Array:
    """Return the sum that a product has posted, float32 ``[1, width]``.

    order: the product's result, ``[1, width]``, which has no values.
    """
    posts = Posts(table.shape[1] - 2, order.shape[1])
    pieces = posts.width // 8

    def body(gmem, smem) -> None:
        del smem
        slot = posts.slot(p.address(gmem.table))
        p.await_kernel()
        piece = p.register("ctaid.x") * _THREADS + p.register("tid.x")
        mine = p.minimum(piece, pieces - 1)
        totals = posts.total(posts.ask(slot, mine), slot, mine)
        at = p.offset(p.address(gmem.out), mine, 32)
        p.store_global(at, totals)

    (out,) = launch(
        body,
        {"order": order, "table": table},
        {"out": jax.ShapeDtypeStruct(order.shape, jnp.float32)},
        name="collect_posted",
        grid=-(-pieces // _THREADS),
        registers=True,
    )
    return out

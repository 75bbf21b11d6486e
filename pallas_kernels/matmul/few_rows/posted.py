"""Partial sums of one row that every device stores in the memory of all devices.

A device has a mailbox in its own memory: float32 ``[SLOTS, peers, width]``, at first full of
``EMPTY``.  The sums of a step go through the slots in turn.  A product with a ``post`` stores its row
in its own place of every device's mailbox.  The product behind it polls its device's mailbox until no
word is ``EMPTY``, and adds the rows in the order of the devices.  So all devices have the same bits,
in every run.

    product t         empties slot (t - 2) % SLOTS of its own mailbox, and posts to slot t % SLOTS
    product behind    polls slot t % SLOTS

Why no word is lost: a device posts t + 2 after it has all of t + 1.  So everywhere the readers of
slot t have ended by then, and product t + 2 may empty it.  Posts to the same slot come with t + 4,
after all of t + 3, and a device posts t + 3 when its product t + 2 has ended.

A table for each sum says where the slots are: int32 ``[1, peers + 2, 2]``, the halves of addresses.
The first ``peers`` are this device's place in the mailbox of each peer.  Then come its own mailbox's
slot of this sum, and the slot to empty.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import Value

SLOTS = 4
EMPTY = 0xFFFFFFFF  # a NaN that no instruction makes


def tables(mailboxes: list[int], width: int, n_sums: int) -> np.ndarray:
    """Return the tables of the sums of a step, int32 ``[n_sums, peers, peers + 2, 2]``.

    mailboxes: the address of each device's.  n_sums: a multiple of ``SLOTS``, because the first sum
    of a step follows the last one of the step before.
    """
    if n_sums % SLOTS:
        raise ValueError(f"{n_sums} sums a step: not a multiple of {SLOTS}")
    peers = len(mailboxes)
    row, slot = 4 * width, 4 * width * peers
    found = np.zeros((n_sums, peers, peers + 2), np.int64)
    for number in range(n_sums):
        here, older = slot * (number % SLOTS), slot * ((number - 2) % SLOTS)
        for me, mine in enumerate(mailboxes):
            found[number, me, :peers] = [box + here + row * me for box in mailboxes]
            found[number, me, peers:] = mine + here, mine + older
    return found.view(np.int32).reshape(n_sums, peers, peers + 2, 2)


@dataclasses.dataclass(frozen=True)
class Posts:
    """Rows of ``width`` values of ``peers`` devices."""

    peers: int
    width: int

    # --- by the product that posts ---

    def place(self, table: Value, lane: Value) -> Value:
        """Return where a lane's peer expects this device's row; lanes from ``peers`` on have the
        last one's."""
        return p.load_address(p.offset(table, p.minimum(lane, self.peers - 1), 8))

    def empty(self, table: Value, thread: Value, threads: int) -> None:
        """Empty the slot of two sums ago.  thread: the number among all blocks' ``threads``."""
        pieces = self.peers * self.width // 4
        slot = p.load_address(table, 8 * (self.peers + 1))
        for first in range(0, pieces, threads):
            piece = p.add(thread, first)
            at = p.offset(slot, piece, 16)
            p.when(p.less(piece, pieces), lambda at=at: p.store_global(at, [p.ci(EMPTY)] * 4))

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
            totals = [arith.addf(a, b) for a, b in zip(totals, values, strict=True)]
        return totals

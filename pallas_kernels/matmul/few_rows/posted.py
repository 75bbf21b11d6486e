"""Partial sums of one row that each device stores in the memory of all devices.

Every device has a mailbox in its own memory: float32 ``[SLOTS, peers, width]``, at first full of
``EMPTY``.  A product with a ``post`` stores its row in its own place of every device's mailbox.  The
next product with a norm polls its device's mailbox until no word is ``EMPTY``, and adds the rows in
the order of the devices.  So all devices have the same bits, in every run.

    product t       posts to slot t % SLOTS, and empties slot (t - 2) % SLOTS of its own mailbox
    product behind  polls slot t % SLOTS

Why nothing is overwritten: a device posts t + 2 after it has all of t + 1, so the readers of slot t
have ended everywhere by then, and t + 2 empties it.  Posts to the same slot come with t + 4, after
all of t + 3, which each device posts when its t + 2 has ended.

A table says where the mailboxes are: int32 ``[1, peers + 1, 2]``, halves of addresses.  The first are
this device's place in each peer's mailbox, the last is its own mailbox.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import Value

SLOTS = 4
EMPTY = 0xFFFFFFFF  # a NaN that no instruction makes


@dataclasses.dataclass(frozen=True)
class Slot:
    """One slot of the mailboxes of ``peers`` devices, for rows of ``width`` values."""

    index: int
    peers: int
    width: int

    def at(self, index: int | None = None) -> int:
        """Return the slot's first byte in a mailbox."""
        return 4 * self.peers * self.width * ((self.index if index is None else index) % SLOTS)

    # --- by the product that posts ---

    def place(self, table: Value, lane: Value) -> Value:
        """Return where the lane's peer wants this device's row; of lanes below ``peers``."""
        mine = p.minimum(lane, self.peers - 1)
        return p.load_address(p.offset(table, mine, 8))

    def post(self, place: Value, row: Value, value: Value) -> None:
        p.post(p.offset(place, row, 4), value, self.at())

    def empty_older(self, table: Value, thread: Value, threads: int) -> None:
        """Empty the slot of two sums ago; thread: of all blocks'."""
        pieces = self.peers * self.width // 4
        mailbox = p.load_address(table, 8 * self.peers)
        for first in range(0, pieces, threads):
            piece = p.add(thread, first)
            at = p.offset(mailbox, piece, 16)
            store = lambda at=at: p.store_global(at, [p.ci(EMPTY)] * 4, self.at(self.index - 2))  # noqa: E731
            if first + threads <= pieces:
                store()
            else:
                p.when(p.less(piece, pieces), store)

    # --- by the product that polls ---

    def ask(self, mailbox: Value, piece: Value) -> list[Value]:
        """Load 8 neighbouring values of every row, which may be empty yet."""
        at = p.offset(mailbox, piece, 32)
        return [
            word
            for peer in range(self.peers)
            for half in (0, 16)
            for word in p.load_posted(at, self.at() + 4 * self.width * peer + half)
        ]

    def total(self, words: list[Value], mailbox: Value, piece: Value) -> list[Value]:
        """Return the sums of 8 values over the devices, when all have posted them."""
        at, totals = p.offset(mailbox, piece, 32), None
        for peer in range(self.peers):
            values = []
            for half in (0, 1):
                first = 8 * peer + 4 * half
                start = self.at() + 4 * self.width * peer + 16 * half
                four = p.await_posted(words[first : first + 4], at, EMPTY, start)
                values += [p.from_bits(word) for word in four]
            if totals is None:
                totals = values
            else:
                totals = [arith.addf(a, b) for a, b in zip(totals, values, strict=True)]
        assert totals is not None
        return totals

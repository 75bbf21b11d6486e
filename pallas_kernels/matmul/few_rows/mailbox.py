"""Mailboxes: memory of each device into which all devices store their parts of a sum of one row.

A device has a mailbox in its own memory: float32 ``[SLOTS, peers, width]``, at first full of
``EMPTY``.  The sums of a step go through the slots in turn.  A product that posts stores its row in
its own place of every device's mailbox.  The kernel behind it polls its device's mailbox until no
word is ``EMPTY``, and adds the rows in the order of the devices.  So all devices have the same
bits, in every run.

    product t         empties slot (t - 2) % SLOTS of its own mailbox, and posts to slot t % SLOTS
    kernel behind     polls slot t % SLOTS

Why no word is lost: a device posts t + 2 after it has all of t + 1.  So everywhere the readers of
slot t have ended by then, and product t + 2 may empty it.  Posts to the same slot come with t + 4,
after all of t + 3.  A device posts t + 3 when its product t + 2 has ended.

A table for each sum says where the slots are: int32 ``[1, peers + 2, 2]``, halves of addresses.
The first ``peers`` are this device's place in the mailbox of each peer.  Then come its own
mailbox's slot of this sum, and the slot to empty.
"""

from __future__ import annotations

import numpy as np

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

"""The ring of the decode kernel where there is no copy engine (before Hopper): one for each warp.

A warp copies the tokens of its own kv head by ``cp.async``, 16 bytes a lane. It waits only for its
own groups of copies, so no two warps wait for each other. A group is the keys or the values of a
step. Groups are closed in the order in which the steps wait for them, so the number of younger ones
is known. Every fill closes a group, also one that copies nothing.

The tokens lie as in ``attention.ring``, for a team of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pallas_kernels import ptx as p
from pallas_kernels.attention.ring import RUNS, Ring

_PIECE = 16  # bytes of one copy


class WarpRing(Ring):
    """``Ring`` of one warp: ``member`` and ``barriers`` are unused."""

    def start(self, condition: p.Value | None, fills: Sequence[Callable[[], None]]) -> None:
        for fill in fills:
            self._group(condition, fill)

    def _group(self, condition: p.Value | None, fill: Callable[[], None]) -> None:
        """Copy where the condition holds (None: always), and close the group in any case."""
        if condition is None:
            fill()
        else:
            p.when(condition, fill)
        p.copies_commit()

    def fill(self, token0: p.Value, slot: p.Value, values: bool, entry: p.Value | None) -> None:
        pieces = self.token_bytes // _PIECE  # of a token
        at_once = 32 // pieces  # tokens
        token = self.lane >> (pieces.bit_length() - 1)
        piece = (self.lane & (pieces - 1)) * _PIECE
        run = token >> (self.per_run.bit_length() - 1)
        to = (
            self.ring
            + slot * self.slot_bytes
            + run * self.stride
            + (token & (self.per_run - 1)) * self.token_bytes
            + piece
            + (self.depth * self.slot_bytes if values else 0)
        )
        shift = self.pages.shift(token0, entry) if self.pages else None
        unit = max(at_once, self.per_run)  # tokens of a turn: whole runs

        def copy(done: p.Value, carry: list[p.Value]) -> list[p.Value]:
            # Unrolled, the turns' addresses take more registers than there are.
            (at,) = carry
            for rest in range(0, unit, at_once):
                here = p.smaller(first + done + rest, self.last)
                source = p.offset(self.source(here, shift, values), piece)
                p.copy_async(at, source, rest * self.token_bytes)
            return [at + unit // self.per_run * self.stride]

        first = token0 + token
        p.loop(0, p.opaque(RUNS * self.per_run), unit, [to], copy)

    def wait(self, slot: p.Value, parity: p.Value, values: bool) -> None:
        del slot, parity, values
        # A step closes two groups.  With one step in the ring the keys of the next come before the
        # values of this one; with more, the values of ``depth - 1`` steps ahead before the keys.
        p.copies_wait(1 if self.depth == 1 else 2 * self.depth - 2)
        p.warp_barrier()

    def release(self, slot: p.Value, values: bool) -> None:
        del slot, values
        p.warp_barrier()

    def refill(
        self, token0: p.Value, slot: p.Value, parity: p.Value, values: bool, entry: p.Value | None
    ) -> None:
        self.refill_if(None, token0, slot, parity, values, entry)

    def refill_if(
        self,
        condition: p.Value | None,
        token0: p.Value,
        slot: p.Value,
        parity: p.Value,
        values: bool,
        entry: p.Value | None,
    ) -> None:
        del parity
        token = token0 + self.depth * self.apart
        inside = p.at_most(token, self.last)
        if condition is not None:
            inside = condition & inside
        self._group(inside, lambda: self.fill(token, slot, values, entry))

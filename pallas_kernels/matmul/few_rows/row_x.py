"""x of the one-row kernel, on its way to shared memory, with the sum of its squares.

Copies: a thread loads 8 values at a time of x, the norm's weight and the pending term into
registers (``ask``).
Waits: a posted sum is polled (``Posts.total``).  ``row`` has the block's barrier between ``store``
and ``factor``.
Writes: a thread stores x times the norm's weight in shared memory, and a warp its sum of x's
squares (``store``).  Block 0 stores x with what was pending in device memory (``store_total``).
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands, add_squares
from pallas_kernels.matmul.few_rows.plan import RowDivision
from pallas_kernels.matmul.few_rows.row_loops import Floats, Nibbles
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats


@dataclasses.dataclass(frozen=True)
class Input:
    """x on its way to shared memory, to where the inner loop reads it.

    squares: shared memory of a sum for every warp.  slot: this device's slot of a posted sum, or
    None.
    """

    plan: RowDivision
    operands: FewRowsOperands
    loop: Floats | Nibbles
    thread: Value
    squares: Value
    slot: Value | None

    def ask(self, early: bool):
        """8 values a thread of x and of the norm's weight, those that are asked for before the
        first of w, or the others: [(piece, is it one, is it x's, x, gamma, pending)]."""
        operands, pieces, of_x = self.operands, self.plan.padded_k // 8, self.plan.k // 8
        threads = 32 * self.plan.warps
        rounds = range(0, pieces, threads)
        at_once = 4 if operands.gamma is None else 2
        asked = []
        for first in rounds[:at_once] if early else rounds[at_once:]:
            piece = self.thread + first
            inside = None
            if first + threads > pieces:
                # Threads behind the end store a piece a second time: behind a condition, the
                # assembler would put the loads of x last.  A warp's pieces stay neighbours.
                inside, piece = piece < pieces, piece % pieces
            source = piece if of_x == pieces else p.minimum(piece, of_x - 1)
            words, is_x = p.load_global(p.offset(operands.x, source, 16), 4), None
            if of_x < pieces:
                is_x = piece < of_x
                words = [p.where(is_x, word, 0) for word in words]
            gamma = None if operands.gamma is None else self.eight("gamma", source)
            pending = None
            if self.slot is not None:
                pending = operands.posts.ask(self.slot, source)
            elif operands.pending is not None:
                pending = self.eight("pending", source)
            asked.append((piece, inside, is_x, words, gamma, pending))
        return asked

    def eight(self, name: str, piece: Value) -> list[Value]:
        size = 32 if self.operands.kinds[name] == "f32" else 16
        return self.operands.eight(name, p.offset(getattr(self.operands, name), piece, size))

    def store(self, asked, warp: Value, lane: Value) -> None:
        """x times the norm's weight to shared memory, and the warps' sums of x's squares."""
        total = p.cf(0.0)
        for piece, inside, is_x, words, gamma, pending in [*asked, *self.ask(early=False)]:
            if self.slot is not None:
                source = p.minimum(piece, self.plan.k // 8 - 1)
                pending = self.operands.posts.total(pending, self.slot, source)
            if pending is not None:
                if is_x is not None:  # zeros behind x stay zeros
                    pending = [p.where(is_x, value, 0.0) for value in pending]
                place = functools.partial(p.offset, index=piece, stride=16)
                block = functools.partial(p.register, "ctaid.x")
                words = self.operands.store_total(words, pending, place, block, is_x)
            values = floats(words)
            if gamma is not None:
                is_one = None if inside is None else lambda inside=inside: inside
                total = add_squares(total, values, is_one)
                values = [v * g for v, g in zip(values, gamma, strict=True)]
            self.loop.store_x(piece, *self.loop.prepared(values))
        if self.operands.gamma is not None:
            total = p.over_lanes(total)
            at = self.squares + warp * 4
            p.when(lane < 1, lambda: p.store_shared(at, [total]))

    def factor(self) -> Value | None:
        """The norm's factor from all warps' sums, behind the block's barrier, or None."""
        if self.operands.gamma is None:
            return None
        total = p.load_float(self.squares)
        for w in range(1, self.plan.warps):
            total = total + p.load_float(self.squares, 4 * w)
        return self.operands.factor(total)

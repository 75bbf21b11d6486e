"""Addresses of weights that lie in different places, which one program reads as one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class RowOffsets:
    """Where a piece's codes (a lane's of them), scales or zeros begin.

    A piece is a tile of 16 rows, or one row.  stride: bytes of a piece.  firsts, moves: of other
    weights behind the first, the first piece, and bytes from where it would lie behind the first to
    where it does.
    """

    base: Value | None
    stride: int
    firsts: Sequence[int] = ()
    moves: Sequence[Value] | None = None

    def and_others(self, start: Value, firsts: Sequence[int], refs: Sequence[Value]) -> RowOffsets:
        near = [p.offset(start, p.ci(first), self.stride) for first in firsts]
        moves = [p.address(ref) - at for ref, at in zip(refs, near, strict=True)]
        return dataclasses.replace(self, firsts=firsts, moves=moves)

    def from_base(self, base: Value) -> RowOffsets:
        """The same pieces from another place of the first one."""
        return dataclasses.replace(self, base=base)

    def of(self, piece: Value) -> Value:
        return self.moved(p.offset(self.base, piece, self.stride), piece)

    def moved(self, at: Value, piece: Value) -> Value:
        """``at``, an address in the piece if all pieces lay behind the first one."""
        if not self.moves:
            return at
        shift = at - at
        for first, other in zip(self.firsts, self.moves, strict=True):
            shift = p.where(piece < first, shift, other)
        return at + shift


@dataclasses.dataclass(frozen=True)
class Several:
    """The weights behind the first one, which the operands hold.

    begin: the first block (or cluster) that runs the program.  firsts: the first piece of each.
    others: references to each one's codes, scales and zeros, None where there is none.
    """

    begin: int
    firsts: Sequence[int]
    others: Sequence[Sequence[Value | None]]

    def added_to(
        self, places: Mapping[str, RowOffsets], operands: FewRowsOperands
    ) -> dict[str, RowOffsets]:
        """``places`` of the first weight, with the shifts to the others."""
        starts = operands.w, operands.scale, operands.zero
        # All codes, all scales, all zeros.
        by_part = zip(*self.others, strict=True) if self.others else [()] * 3
        return {
            name: place if start is None else place.and_others(start, self.firsts, refs)
            for (name, place), start, refs in zip(places.items(), starts, by_part, strict=True)
        }

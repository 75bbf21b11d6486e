"""Which products of one row the ring kernel takes, and how it divides them: arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_kernels.dispatch import Reason
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import RowPlan, row_plan
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme

WARPS = 12  # of 80 registers a thread: two such blocks have the registers of an SM
_RING = 96 * 1024
_HALF_SM = 112 * 1024  # of 228 KB, less what each block has besides
_SMALL = 2048  # sums of squares and barriers


@dataclasses.dataclass(frozen=True)
class RingPlan(RowPlan):
    """The division of one row's product among warps with rings.

    piece_bytes, scale_bytes, zero_bytes: of one row in a slot.  depth: slots of a warp.
    unrolled: pieces of a row at most that are not a loop.
    """

    kernel: ClassVar[str] = "quantized_matmul_ring_mosaic"
    piece_bytes: int = 1024
    scale_bytes: int = 0
    zero_bytes: int = 0
    depth: int = 1
    unrolled: int = 4

    @property
    def blocks(self) -> int:
        return min(self.sms, -(-self.units // self.warps))

    @property
    def pieces(self) -> int:
        """Slots that a unit of rows takes."""
        return self.k * self.bits // 8 // self.piece_bytes

    @property
    def slot_bytes(self) -> int:
        return self.rows * (self.piece_bytes + self.scale_bytes + self.zero_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of x in shared memory that 512 bytes of a row are multiplied with."""
        return super().scratch_sizes(normed=False)[0] // self.chunks

    def scratch_sizes(self, normed: bool) -> list[int]:
        """Bytes of x, of the warps' sums of its squares, of the rings, of their barriers."""
        ring = self.warps * self.depth
        return [*super().scratch_sizes(normed), ring * self.slot_bytes, 8 * ring]


def ring_plan(call: MatmulCall) -> RingPlan | Reason:
    """The ring kernel's plan, or why it has none."""
    if not call.reads_early:
        return Reason("w may not be read before the kernel before has ended")
    found = row_plan(call)
    row = found.plan if isinstance(found, Reason) else found
    if not isinstance(row, RowPlan):
        assert isinstance(found, Reason)
        return found
    scheme = FewRowsScheme.of(call.w, "bf16")
    if scheme.float4 or scheme.float8:
        return Reason(f"the ring kernel has no loop of {call.w.dtype.name}")
    if call.n % 2:
        return Reason(f"N = {call.n} is odd")
    row_bytes = call.k * row.bits // 8
    in_groups = row.bits == 4
    for piece in (1024, 512):
        pieces = row_bytes // piece
        sizes = (scheme.scale_row, scheme.zero_row) if in_groups else (0, 0)
        if row_bytes % piece or any(size % (16 * pieces) for size in sizes):
            continue
        scale, zero = (size // pieces for size in sizes)
        shape = dataclasses.replace(row, rows=2, units=call.n // 2, warps=WARPS)
        plan = RingPlan(**_fields(shape), piece_bytes=piece, scale_bytes=scale, zero_bytes=zero)
        x_bytes = plan.scratch_sizes(normed=True)[0]
        fits = (_HALF_SM - _SMALL - x_bytes) // (WARPS * plan.slot_bytes)
        depth = min(_RING // (WARPS * 2 * piece), fits)
        if depth < 2:
            return Reason(f"x of K = {call.k} leaves no room for a ring")
        return dataclasses.replace(plan, depth=depth)
    return Reason(f"rows of {row_bytes} bytes are no whole pieces with their scales")


def _fields(row: RowPlan) -> dict[str, int]:
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(RowPlan)
        if field.compare
    }

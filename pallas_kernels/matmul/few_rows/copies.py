"""The tile kernel's copies from device memory: codes into the ring, a tile's parameters.

Codes: each lane for itself.  Scales, bias, residual: all threads of the block, which read them
behind the batch's barrier (``tile``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.block import Params, TileBlock
from pallas_kernels.matmul.few_rows.plan import SLOT
from pallas_kernels.matmul.few_rows.several import RowOffsets
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class Copies:
    """ring: the lane's place in its first slot.  places: of "w", "scale" and "zero"."""

    block: TileBlock
    params: Params
    ring: Value
    places: Mapping[str, RowOffsets]

    def pieces(self, batch, buffer, count: int, pieces: int, start: int, source) -> None:
        """For each tile of the batch, ``pieces`` times 16 bytes from source(tile, piece) to byte
        ``start`` of its parameters."""
        plan, params = self.block.plan, self.params

        def copy(index):
            t, piece = index // pieces, index % pieces
            tile = self.block.tile_of(batch * plan.batch + t)
            slot = buffer * plan.batch + t
            to = params.base + slot * params.tile_bytes + piece * 16
            p.copy_async(to, source(tile, piece), start)

        self.block.threads(count * pieces, copy)

    def scales(self, batch, buffer) -> None:
        """Scales and zeros of the batch's tiles: the tile's 16 rows are one run of bytes."""
        params = self.params
        for name, row, start in (
            ("scale", params.scale_row, 0),
            ("zero", params.zero_row, 16 * params.scale_row),
        ):
            if self.places[name].base is not None:

                def source(tile, piece, name=name):
                    return p.offset(self.places[name].of(tile), piece, 16)

                self.pieces(batch, buffer, self.block.plan.batch, row, start, source)

    def addends(self, batch, buffer, count: int) -> None:
        """Bias and residual of the batch's tiles, which are read when it ends: they replace those
        of the batch before the last, whose readers are known to be through only now."""
        operands, params = self.block.operands, self.params
        if operands.bias is not None:

            def biases(tile, piece):
                return p.offset(p.offset(operands.bias, tile, 64), piece, 16)

            self.pieces(batch, buffer, count, 4, params.bias_at, biases)
        if operands.residual is not None:

            def residuals(tile, piece):
                token, half = piece >> 1, piece & 1
                at = token * operands.n + tile * 16 + half * 8
                return p.offset(operands.residual, at, 2)

            pieces = 2 * self.block.plan.m
            self.pieces(batch, buffer, count, pieces, params.residual_at, residuals)

    def codes(self, step, piece: int, slot) -> None:
        """The lane's codes of one block of columns, rows r and r + 8."""
        at = self.places["w"].of(self.block.tile_of(step))
        for half in range(2):
            source = piece * 64 + half * self.places["w"].stride // 2
            p.copy_async(slot, at, 512 * half, source)

    def prefetch(self) -> None:
        """Asks for the first tiles, as many as the ring holds, and their scales: a thread a row."""
        plan, block = self.block.plan, self.block
        tiles = min(plan.per, max(1, plan.depth // block.n_blocks))
        for name in ("w", "scale", "zero"):
            base = getattr(block.operands, name)
            if base is None:
                continue
            places = self.places[name].from_base(base)
            parts, rows = (plan.split, 16) if name == "w" else (1, 1)
            apart = places.stride // rows
            size = apart // parts
            if size % 16:
                continue

            def ask(places=places, rows=rows, apart=apart, size=size, parts=parts):
                row = block.thread % rows
                tile = block.tile_of(block.thread // rows)
                at = p.offset(places.of(tile), row, apart)
                p.prefetch(at if parts == 1 else p.offset(at, block.rank, size), size)

            p.when(block.thread < rows * tiles, ask)

    def fill(self) -> None:
        plan, n_blocks = self.block.plan, self.block.n_blocks
        for u in range(plan.depth):
            if u < plan.per * n_blocks:
                slot = self.ring + u * SLOT
                self.codes(p.ci(u // n_blocks), u % n_blocks, slot)
            p.copies_commit()

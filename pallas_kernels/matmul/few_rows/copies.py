"""The decode matmul's copies from device memory: words into the ring, a tile's parameters."""

from __future__ import annotations

from jax._src.lib.mlir.dialects import arith

from pallas_kernels import mosaic as p
from pallas_kernels.matmul.few_rows.plan import SLOT


class Copies:
    """The part of a block's program that copies; see ``matmul.few_rows.kernel``."""

    def copy_pieces(self, batch, buffer, count: int, pieces: int, start: int, source) -> None:
        """For each tile of the batch, ``pieces`` times 16 bytes from source(tile, piece) to byte
        ``start`` of its parameters."""

        def copy(index):
            t, piece = arith.divui(index, p.ci(pieces)), arith.remui(index, p.ci(pieces))
            tile = self.tile_of(p.add(p.mul(batch, self.plan.batch), t))
            slot = p.add(p.mul(buffer, self.plan.batch), t)
            to = p.add(self.params, p.mul(slot, self.plan.param_bytes), p.mul(piece, 16))
            p.copy_async(to, source(tile, piece), start)

        self.threads(count * pieces, copy)

    def copy_scales(self, batch, buffer) -> None:
        """Scales and zeros of the batch's tiles: the tile's 16 rows are one run of bytes."""
        for name, row, start in (
            ("scale", self.scale_row, 0),
            ("zero", self.zero_row, 16 * self.scale_row),
        ):
            if getattr(self, name) is not None:

                def source(tile, piece, name=name, row=row):
                    return p.offset(self.rows_of(name, tile, row), piece, 16)

                self.copy_pieces(batch, buffer, self.plan.batch, row, start, source)

    def rows_of(self, name: str, tile, row: int):
        """Address of a tile's 16 rows of ``row`` bytes in ``name``; of the words, the lane's."""
        return p.offset(self.w_mine if name == "w" else getattr(self, name), tile, 16 * row)

    def copy_addends(self, batch, buffer, count: int) -> None:
        """Bias and residual of the batch's tiles, which are read when it ends: they replace those
        of the batch before the last, whose readers are known to be through only now."""
        if self.bias is not None:

            def biases(tile, piece):
                return p.offset(p.offset(self.bias, tile, 64), piece, 16)

            self.copy_pieces(batch, buffer, count, 4, self.bias_at, biases)
        if self.residual is not None:

            def residuals(tile, piece):
                token, half = p.shift_right(piece, 1), arith.andi(piece, p.ci(1))
                at = p.add(p.mul(token, self.n), p.mul(tile, 16), p.mul(half, 8))
                return p.offset(self.residual, at, 2)

            pieces = 2 * self.plan.m
            self.copy_pieces(batch, buffer, count, pieces, self.residual_at, residuals)

    def copy_words(self, step, block: int, slot) -> None:
        """The lane's words of one block of columns, rows r and r + 8."""
        at = self.rows_of("w", self.tile_of(step), self.row_bytes)
        for half in range(2):
            source = block * 64 + half * 8 * self.row_bytes
            p.copy_async(slot, at, 512 * half, source)

    def fill(self) -> None:
        for u in range(self.plan.depth):
            if u < self.plan.per * self.n_blocks:
                slot = p.add(self.ring, u * SLOT)
                self.copy_words(p.ci(u // self.n_blocks), u % self.n_blocks, slot)
            p.copies_commit()

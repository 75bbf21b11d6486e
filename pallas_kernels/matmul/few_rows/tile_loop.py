"""The tile kernel's inner loop: a tile of 16 rows of w times a warp's run of x.

``Copies`` brings codes into the ring, each lane for itself.  All threads of the block copy a tile's
scales, bias and residual, and read them behind the batch's barrier (``tile``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from pallas_kernels import ptx as p
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows.block import Params, TileBlock
from pallas_kernels.matmul.few_rows.plan import SLOT
from pallas_kernels.matmul.few_rows.several import RowOffsets
from pallas_kernels.matmul.few_rows.tile_x import Fragments
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


# --- the loop -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TileLoop:
    """lane_k: the lane's first column.  scales, zeros: shared memory of its row's of the first
    tile."""

    block: TileBlock
    params: Params
    lane_k: Value
    scales: Value
    zeros: Value

    @classmethod
    def of(cls, block: TileBlock, params: Params, lane_k: Value) -> TileLoop:
        weight, first = block.weight, p.ci(0)
        if weight.n_groups > 1 and not block.folds:
            first = block.k0 // weight.group
        scales = params.base + block.row * params.scale_row + first * weight.scale_bytes
        zeros = (
            params.base
            + block.row * params.zero_row
            + first * weight.zero_bytes
            + 16 * params.scale_row
        )
        return cls(block, params, lane_k, scales, zeros)

    def load_scale(self, at, byte: int = 0):
        """A scale or floating zero of shared memory, as f32."""
        if self.block.weight.scale_kind == "f32":
            return p.load_float(at, byte)
        return p.widen(p.load_shared_narrow(at, "u16", byte), self.block.weight.scale_kind)

    def load_scales(self, slot, groups: range):
        """By row half: scales, pairs to take off the words, floating zeros of these groups.

        A group of the warp; with ``fold`` a block, and what its columns of the lane need.
        """
        block, weight = self.block, self.block.weight
        scales, biases, zeros = [], [], []
        at_slot = slot * self.params.tile_bytes
        offset = p.ci(widen.code_bias(weight, block.kind))
        for half in range(2):
            at = self.scales + at_slot + half * 8 * self.params.scale_row
            at_zero = self.zeros + at_slot + half * 8 * self.params.zero_row
            if weight.float4:
                scales.append([self.float4_factors(at, b) for b in groups])
            elif block.folds:
                in_block = [(self.lane_k + b * block.columns) // weight.group for b in groups]
                scale_at = [at + g * weight.scale_bytes for g in in_block]
                zero_at = [at_zero + g * weight.zero_bytes for g in in_block]
                scales.append([self.doubled(self.load_scale(a)) for a in scale_at])
                if weight.float_zero:
                    zeros.append([self.doubled(self.load_scale(a)) for a in zero_at])
            else:
                zero_at = [at_zero + g for g in groups]
                scales.append(self.group_scales(at, groups))
            biases.append([offset] * len(groups))
            if weight.int_zero:
                raw = [p.load_shared_narrow(a, "s8") for a in zero_at]
                biases[half] = [offset + z * 0x00010001 for z in raw]
        return scales, biases, zeros

    def float4_factors(self, at, block: int) -> list[Value]:
        """The factors of the lane's 4 words of a block of columns: of one scale, or of two."""
        weight = self.block.weight
        group = (self.lane_k + block * self.block.columns) >> 5
        if weight.scale_kind == "e8m0":
            scales = p.load_shared_narrow(at + group, "u8")
        else:
            scales = p.load_shared_narrow(at + group * 2, "u16")
        return widen.float4_factors(weight, scales)

    def row_units(self, slot) -> list[Value]:
        """The factors of the sums of the lane's rows of float4 codes: r twice, and r + 8."""
        rest = p.cf(widen.FLOAT4_REST)
        if not self.block.weight.has_unit:
            return [rest] * 4
        at = self.zeros + slot * self.params.tile_bytes
        units = [p.load_float(at, half * 8 * self.params.zero_row) * rest for half in (0, 1)]
        return [units[0], units[0], units[1], units[1]]

    def group_scales(self, at, groups: range):
        weight = self.block.weight
        if weight.scale_kind != "f32" and len(groups) % 2 == 0 and weight.n_groups % 2 == 0:
            words = [p.load_shared(at, 1, 2 * g)[0] for g in groups[::2]]
            return [f(w, weight.scale_kind) for w in words for f in (p.widen, p.widen_high)]
        return [self.load_scale(at, weight.scale_bytes * g) for g in groups]

    def doubled(self, value):
        half = p.narrow(value, self.block.kind)
        return p.permute(half, half, 0x1010)

    def weights(self, word, bias, scale, zero):
        block, weight = self.block, self.block.weight
        if weight.float4:
            return widen.float4_pairs(word, scale)
        pairs = widen.word_pairs(weight, word, bias, block.kind)
        if weight.float_zero:
            return [p.fma_pairs(v, scale, zero) for v in pairs]
        if block.folds:
            return [p.mul_pairs(v, scale) for v in pairs]
        return pairs

    def run(self, slot: Value, x: Fragments, next_codes: Callable):
        """The warp's partial sums [8 tokens][4]; ``next_codes(piece)`` gives two rows' words."""
        if self.block.weight.plain:
            return self.plain(x, next_codes)
        block, weight, tokens = self.block, self.block.weight, range(self.block.plan.n_tiles)
        total, acc = self.nothing(), self.nothing()
        in_group = max(1, min(block.n_blocks, weight.group // block.columns))
        groups = block.n_blocks // in_group
        if block.folds:
            in_group, groups = 1, block.n_blocks
        at_once = groups if groups <= 4 else 1  # more scales than that crowd the registers
        pairs = weight.per_word // 2  # of a word
        for b in range(block.n_blocks):
            g = b // in_group
            if b % (in_group * at_once) == 0:
                scales, biases, zeros = self.load_scales(slot, range(g, g + at_once))
            g %= at_once
            rows = next_codes(b)
            columns = x.of(b)
            for j in range(4):
                low, high = (
                    self.weights(
                        rows[half][j],
                        biases[half][g],
                        scales[half][g][j] if weight.float4 else scales[half][g],
                        zeros[half][g] if zeros else None,
                    )
                    for half in range(2)
                )
                for s in range(0, pairs, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    for t in tokens:
                        right = columns[t][j * pairs + s : j * pairs + s + 2]
                        acc[t] = p.mma(acc[t], left, right, block.kind)
            if not block.folds and b % in_group == in_group - 1:
                by_row = [scales[0][g]] * 2 + [scales[1][g]] * 2
                total = [
                    [p.fma(*v) for v in zip(acc[t], by_row, total[t], strict=True)] for t in tokens
                ]
                acc = self.nothing()
        if weight.float4:
            units = self.row_units(slot)
            return [[v * unit for v, unit in zip(a, units, strict=True)] for a in acc]
        return acc if block.folds else total

    def plain(self, x: Fragments, next_codes: Callable):
        block, acc = self.block, self.nothing()
        for b in range(block.n_blocks):
            low, high = next_codes(b)
            columns = x.of(b)
            for j in (0, 2):
                left = [low[j], high[j], low[j + 1], high[j + 1]]
                for t in range(block.plan.n_tiles):
                    acc[t] = p.mma(acc[t], left, columns[t][j : j + 2], block.kind)
        return acc

    def nothing(self):
        return [[p.cf(0.0)] * 4 for _ in range(self.block.plan.n_tiles)]

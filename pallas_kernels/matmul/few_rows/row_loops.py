"""How a warp multiplies a row of w by x: the inner part of the kernel of one row.

``row`` loads the codes and ends the sums.  A loop class has three methods: ``store_x`` lays x out
in shared memory, ``group`` multiplies a group of loads, ``totals`` returns a lane's part of a sum.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows import widen
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import RowDivision
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class Floats:
    """The product of bfloat16 or int8, each value a float and a multiplication.

    x lies as floats in the order in which lanes read it: of the values that a lane multiplies 4 at
    a time lie beside its neighbours' 4.
    """

    plan: RowDivision
    xs: Value
    lane: Value
    in_groups = False

    @classmethod
    def of(
        cls,
        plan: RowDivision,
        scheme: FewRowsScheme,
        operands: FewRowsOperands,
        xs: Value,
        lane: Value,
    ) -> Floats:
        del scheme, operands
        return cls(plan, xs, lane)

    def prepared(self, values):
        """Return the operands of ``store_x`` for 8 columns; all lanes of the warp call it."""
        return (values,)

    def store_x(self, piece, values) -> None:
        """Columns 8 * piece and on."""
        if self.plan.bits == 16:
            chunk, lane, at = p.shift_right(piece, 5), piece, self.xs
        else:
            chunk, lane = p.shift_right(piece, 6), p.shift_right(piece, 1)
            at = p.add(self.xs, p.mul(arith.andi(piece, p.ci(1)), 1024))
        lane = arith.andi(lane, p.ci(31))
        at = p.add(at, p.mul(chunk, 128 * self.plan.per_load), p.mul(lane, 16))
        p.store_shared(at, values[:4])
        p.store_shared(at, values[4:], 512)

    def nothing(self):
        return [[p.cf(0.0)] * 2 for _ in range(self.plan.rows)]

    def group(self, chunks, words, sums):
        """sums[row][2] and the products of these chunks' words."""
        sums, values = [list(pair) for pair in sums], self.plan.per_load
        at, words = p.add(self.xs, p.mul(self.lane, 16)), iter(words)
        for chunk in chunks:
            start = 4 * 32 * values * chunk
            loaded = [p.load_shared(at, 4, start + 512 * i, "f32") for i in range(values // 4)]
            xs = [x for four in loaded for x in four]
            for pair in sums:
                weights = [v for _ in range(4) for v in widen.floats(self.plan.bits, next(words))]
                for i, (x, w) in enumerate(zip(xs, weights, strict=True)):
                    pair[i % 2] = p.fma(x, w, pair[i % 2])
        return sums

    def totals(self, sums):
        """A lane's part of every row."""
        return [arith.addf(*pair) for pair in sums]


@dataclasses.dataclass(frozen=True)
class Nibbles:
    """The product of int4 in groups of 128, two rows at a time, by mma.m16n8k16.

    Multiplying in float32 would take too many instructions a byte.  In a chunk of 1024 columns, the
    4 lanes with row index g of the mma hold group g.  Row g of the left operand is group g of the
    first row of w; row g + 8 is group g of the second.  Column g of the right operand is x of group
    g.  So the wanted products are the diagonal, and seven eighths of the mma's work is unused.

    The mma's operands are float16, whose 10 bits of mantissa hold two nibbles without a shift
    (``widen.half_nibbles``).  float16 ends at 65,504 and bfloat16 does not, so 256 columns of x are
    divided by a power of two that brings their largest below 2^15.  It multiplies a group's sum.
    """

    plan: RowDivision
    scheme: FewRowsScheme
    xs: Value
    lane: Value
    scales: Value  # the lane's group's, of the first row and chunk
    zeros: Value | None
    on_diagonal: Value  # of the lane's accumulators of a row, columns 2 c and 2 c + 1, is one?
    is_second: Value
    in_groups = True

    @classmethod
    def of(
        cls,
        plan: RowDivision,
        scheme: FewRowsScheme,
        operands: FewRowsOperands,
        xs: Value,
        lane: Value,
    ) -> Nibbles:
        group = p.shift_right(lane, 2)
        quad = arith.andi(lane, p.ci(3))
        on_diagonal = p.equal(quad, p.shift_right(lane, 3))
        is_second = p.equal(arith.andi(group, p.ci(1)), p.ci(1))
        scales = p.offset(operands.scale, group, scheme.scale_bytes)
        zeros = None if scheme.zero is None else p.offset(operands.zero, group)
        return cls(plan, scheme, xs, lane, scales, zeros, on_diagonal, is_second)

    @property
    def offset(self) -> int:
        """A pair of 8s, which the codes lack."""
        return 0x00080008

    @property
    def chunk_groups(self) -> int:
        """Groups of a row in a chunk."""
        return 1024 // self.scheme.group

    def vectors_of(self, row):
        """Where the lane's scale, and zero, of the row's first chunk are."""
        scale = p.offset(self.scales, row, self.scheme.scale_row)
        return (
            [scale]
            if self.zeros is None
            else [scale, p.offset(self.zeros, row, self.scheme.n_groups)]
        )

    def vectors(self, places, chunk: int):
        """Return the scale of the lane's group, and what is subtracted from pairs of codes."""
        at, first = places[0], self.chunk_groups * chunk
        start = self.scheme.scale_bytes * first
        if self.scheme.scale_kind == "f32":
            scale = p.load_global(at, 1, start, "f32")[0]
        else:
            scale = p.load_half(at, start)
        offset = p.ci(self.offset)
        if self.zeros is not None:
            zero = p.load_signed_byte(places[1], first)
            offset = arith.addi(offset, p.mul(zero, 0x00010001))
        return [scale, offset]

    def prepared(self, values):
        """The 8 values divided by the power of two of the warp's 256, and that power.

        The largest is below 2^15 afterwards.  Infinite values and NaN stay what they are.
        """
        largest = functools.reduce(p.maximum, [p.absolute(v) for v in values])
        exponent = p.shift_right(p.warp_largest(p.bits(largest)), 23)
        exponent = p.larger(exponent, p.ci(15))  # both powers are normal numbers
        inverse = p.from_bits(p.shift_left(arith.subi(p.ci(268), exponent), 23))
        power = p.from_bits(p.shift_left(p.add(exponent, -14), 23))
        return [arith.mulf(v, inverse) for v in values], power

    def store_x(self, piece, values, power) -> None:
        """Columns 8 * piece and on, as pairs i and i + 4, to where their words' lane reads them."""
        pairs = [p.pack(values[i], values[i + 4], "f16") for i in range(4)]
        self.store_pairs(piece, pairs)
        at = p.add(self.xs, 2 * self.plan.padded_k, p.mul(p.shift_right(piece, 5), 4))
        p.when(p.equal(arith.andi(piece, p.ci(31)), 0), lambda: p.store_shared(at, [power]))

    def store_pairs(self, piece, pairs) -> None:
        chunk, word = p.shift_right(piece, 7), arith.andi(piece, p.ci(3))
        lane = arith.andi(p.shift_right(piece, 2), p.ci(31))
        at = p.add(self.xs, p.mul(chunk, 2048), p.mul(word, 512), p.mul(lane, 16))
        p.store_shared(at, [p.from_bits(pair) for pair in pairs])

    def nothing(self):
        return [p.cf(0.0)] * 2

    def group(self, chunks, words, sums):
        """sums[row] and the scaled products of these chunks' words."""
        at, words, sums = p.add(self.xs, p.mul(self.lane, 16)), iter(words), list(sums)
        powers = p.add(self.xs, 2 * self.plan.padded_k, p.mul(p.shift_right(self.lane, 3), 4))
        kind = self.scheme.scale_kind
        for chunk in chunks:
            rows = [[next(words) for _ in range(4)] for _ in range(2)]
            scales, offsets = zip(*[[next(words) for _ in range(2)] for _ in range(2)], strict=True)
            power = p.load_float(powers, 16 * chunk)
            parts = [[p.cf(0.0)] * 4 for _ in range(self.plan.chains)]
            for i in range(4):
                low, high = (
                    widen.half_nibbles(row[i], offset)
                    for row, offset in zip(rows, offsets, strict=True)
                )
                xs = p.load_shared(at, 4, 2048 * chunk + 512 * i)
                for s in (0, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    own = s // 2 % len(parts)
                    parts[own] = p.mma(parts[own], left, xs[s : s + 2], "f16")
            acc = [functools.reduce(arith.addf, four) for four in zip(*parts, strict=True)]
            for r, scale in enumerate(scales):
                scale = scale if kind == "f32" else p.widen(scale, kind)
                part = arith.select(self.is_second, acc[2 * r + 1], acc[2 * r])
                sums[r] = p.fma(arith.mulf(part, power), scale, sums[r])
        return sums

    def totals(self, sums):
        return [arith.select(self.on_diagonal, v, p.cf(0.0)) for v in sums]


@dataclasses.dataclass(frozen=True)
class Float8(Nibbles):
    """The product of float8_e4m3fn in groups of 64 or 128 columns, as ``Nibbles`` does it.

    A chunk has 512 columns, so the 4 lanes of a row of the mma have 64 of them.
    """

    @classmethod
    def of(
        cls,
        plan: RowDivision,
        scheme: FewRowsScheme,
        operands: FewRowsOperands,
        xs: Value,
        lane: Value,
    ) -> Float8:
        group = p.shift_right(lane, 2)
        quad = arith.andi(lane, p.ci(3))
        on_diagonal = p.equal(quad, p.shift_right(lane, 3))
        is_second = p.equal(arith.andi(group, p.ci(1)), p.ci(1))
        own = p.shift_right(lane, (scheme.group // 16).bit_length() - 1)
        scales = p.offset(operands.scale, own, scheme.scale_bytes)
        return cls(plan, scheme, xs, lane, scales, None, on_diagonal, is_second)

    def vectors_of(self, row):
        """Where the lane's scale of the row's first chunk is."""
        return [p.offset(self.scales, row, self.scheme.scale_row)]

    def vectors(self, places, chunk: int):
        """Return the scale of the lane's group."""
        start = 512 // self.scheme.group * self.scheme.scale_bytes * chunk
        if self.scheme.scale_kind == "f32":
            return [p.load_global(places[0], 1, start, "f32")[0]]
        return [p.load_half(places[0], start)]

    def prepared(self, values):
        return (values,)

    def store_x(self, piece, values) -> None:
        """Columns 8 * piece and on, as pairs i and i + 2 of two words."""
        pairs = [p.pack(values[i], values[i + 2]) for i in (0, 1, 4, 5)]
        chunk, half = p.shift_right(piece, 6), arith.andi(piece, p.ci(1))
        lane = arith.andi(p.shift_right(piece, 1), p.ci(31))
        at = p.add(self.xs, p.mul(chunk, 1024), p.mul(half, 512), p.mul(lane, 16))
        p.store_shared(at, [p.from_bits(pair) for pair in pairs])

    def group(self, chunks, words, sums):
        """sums[row] and the scaled products of these chunks' words."""
        at, words, sums = p.add(self.xs, p.mul(self.lane, 16)), iter(words), list(sums)
        kind = self.scheme.scale_kind
        for chunk in chunks:
            rows = [[next(words) for _ in range(4)] for _ in range(2)]
            scales = [next(words) for _ in range(2)]
            acc = [p.cf(0.0)] * 4
            for i in range(4):
                if i % 2 == 0:
                    xs = p.load_shared(at, 4, 1024 * chunk + 256 * i)
                low, high = (widen.word_pairs(self.scheme, row[i], p.ci(0)) for row in rows)
                left = [low[0], high[0], low[1], high[1]]
                acc = p.mma(acc, left, xs[i % 2 * 2 : i % 2 * 2 + 2])
            for r, scale in enumerate(scales):
                scale = scale if kind == "f32" else p.widen(scale, kind)
                part = arith.select(self.is_second, acc[2 * r + 1], acc[2 * r])
                sums[r] = p.fma(part, scale, sums[r])
        return sums


@dataclasses.dataclass(frozen=True)
class OneSum(Nibbles):
    """Products whose scales multiply the weights, as bfloat16: the mma's sums run over the row."""

    def prepared(self, values):
        return (values,)

    def store_x(self, piece, values) -> None:
        self.store_pairs(piece, [p.pack(values[i], values[i + 4]) for i in range(4)])

    def nothing(self):
        return [p.cf(0.0)] * 4


@dataclasses.dataclass(frozen=True)
class Float4(OneSum):
    """The product of float4_e2m1fn with a scale for 32 or 16 columns, as ``Nibbles`` does it.

    A lane's 32 columns of a chunk share one scale, or two.  It multiplies the weights, exactly, so
    sums run over the whole row.
    """

    @classmethod
    def of(
        cls,
        plan: RowDivision,
        scheme: FewRowsScheme,
        operands: FewRowsOperands,
        xs: Value,
        lane: Value,
    ) -> Float4:
        group = p.shift_right(lane, 2)
        quad = arith.andi(lane, p.ci(3))
        on_diagonal = p.equal(quad, p.shift_right(lane, 3))
        is_second = p.equal(arith.andi(group, p.ci(1)), p.ci(1))
        scales = p.offset(operands.scale, lane, 32 // scheme.group)
        return cls(plan, scheme, xs, lane, scales, None, on_diagonal, is_second)

    def vectors_of(self, row):
        """Where the lane's scales of the row's first chunk are."""
        return [p.offset(self.scales, row, self.plan.k // self.scheme.group)]

    def vectors(self, places, chunk: int):
        """Return the lane's scales, as they are stored."""
        start = 1024 // self.scheme.group * chunk
        if self.scheme.scale_kind == "e8m0":
            return [p.load_signed_byte(places[0], start)]
        return [p.load_half(places[0], start)]

    def group(self, chunks, words, sums):
        """The accumulators of the mma, with the products of these chunks' words."""
        at, words, acc = p.add(self.xs, p.mul(self.lane, 16)), iter(words), list(sums)
        for chunk in chunks:
            rows = [[next(words) for _ in range(4)] for _ in range(2)]
            factors = [widen.float4_factors(self.scheme, next(words)) for _ in range(2)]
            for i in range(4):
                low, high = (
                    widen.float4_pairs(row[i], factor[i])
                    for row, factor in zip(rows, factors, strict=True)
                )
                xs = p.load_shared(at, 4, 2048 * chunk + 512 * i)
                for s in (0, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    acc = p.mma(acc, left, xs[s : s + 2])
        return acc

    def totals(self, sums):
        parts = [arith.select(self.is_second, sums[2 * r + 1], sums[2 * r]) for r in range(2)]
        return [arith.mulf(v, p.cf(widen.FLOAT4_REST)) for v in super().totals(parts)]


@dataclasses.dataclass(frozen=True)
class FoldedNibbles(OneSum):
    """The product of int4 in groups of 32 or 64 columns, as ``Nibbles`` does it.

    A lane's 32 columns of a chunk share one scale.  It multiplies the weights, which are rounded to
    bfloat16, so sums run over the whole row.
    """

    @classmethod
    def of(
        cls,
        plan: RowDivision,
        scheme: FewRowsScheme,
        operands: FewRowsOperands,
        xs: Value,
        lane: Value,
    ) -> FoldedNibbles:
        made = Nibbles.of(plan, scheme, operands, xs, lane)
        group = p.shift_right(lane, (scheme.group // 32).bit_length() - 1)
        scales = p.offset(operands.scale, group, scheme.scale_bytes)
        zeros = None if scheme.zero is None else p.offset(operands.zero, group)
        return cls(plan, scheme, xs, lane, scales, zeros, made.on_diagonal, made.is_second)

    @property
    def offset(self) -> int:
        """A pair of what ``widen.biased_nibbles`` adds to the codes."""
        return self.scheme.bias

    def group(self, chunks, words, sums):
        """The accumulators of the mma, with the products of these chunks' words."""
        at, words, acc = p.add(self.xs, p.mul(self.lane, 16)), iter(words), list(sums)
        kind = self.scheme.scale_kind
        for chunk in chunks:
            rows = [[next(words) for _ in range(4)] for _ in range(2)]
            scales, offsets = zip(*[[next(words) for _ in range(2)] for _ in range(2)], strict=True)
            scales = [v if kind == "f32" else p.widen(v, kind) for v in scales]
            factors = [p.pack(scale, scale) for scale in scales]
            for i in range(4):
                low, high = (
                    widen.folded_pairs(self.scheme, row[i], offset, factor)
                    for row, offset, factor in zip(rows, offsets, factors, strict=True)
                )
                xs = p.load_shared(at, 4, 2048 * chunk + 512 * i)
                for s in (0, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    acc = p.mma(acc, left, xs[s : s + 2])
        return acc

    def totals(self, sums):
        parts = [arith.select(self.is_second, sums[2 * r + 1], sums[2 * r]) for r in range(2)]
        return super().totals(parts)

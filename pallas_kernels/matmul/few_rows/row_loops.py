"""How a warp multiplies a row of w by x: the inner part of the kernel of one row.

``row`` loads the codes and ends the sums.  A loop class has three methods: ``store_x`` lays x out
in shared memory, ``group`` multiplies a group of loads, ``totals`` returns a lane's part of a sum.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

from pallas_kernels import ptx as p
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import RowDivision, folds
from pallas_kernels.matmul.stored import StoredWeight
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
    def of(cls, plan: RowDivision, operands: FewRowsOperands, xs: Value, lane: Value) -> Floats:
        del operands
        return cls(plan, xs, lane)

    def prepared(self, values):
        """Return the operands of ``store_x`` for 8 columns; all lanes of the warp call it."""
        return (values,)

    def store_x(self, piece, values) -> None:
        """Columns 8 * piece and on."""
        if self.plan.bits == 16:
            chunk, lane, at = piece >> 5, piece, self.xs
        else:
            chunk, lane = piece >> 6, piece >> 1
            at = self.xs + (piece & 1) * 1024
        lane = lane & 31
        at = at + chunk * (128 * self.plan.per_load) + lane * 16
        p.store_shared(at, values[:4])
        p.store_shared(at, values[4:], 512)

    def nothing(self):
        return [[p.cf(0.0)] * 2 for _ in range(self.plan.rows)]

    def group(self, chunks, words, sums):
        """sums[row][2] and the products of these chunks' words."""
        sums, values = [list(pair) for pair in sums], self.plan.per_load
        at, words = self.xs + self.lane * 16, iter(words)
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
        return [first + second for first, second in sums]


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
    weight: StoredWeight
    xs: Value
    lane: Value
    scales: Value  # the lane's group's, of the first row and chunk
    zeros: Value | None
    on_diagonal: Value  # of the lane's accumulators of a row, columns 2 c and 2 c + 1, is one?
    is_second: Value
    in_groups = True

    @classmethod
    def of(cls, plan: RowDivision, operands: FewRowsOperands, xs: Value, lane: Value) -> Nibbles:
        weight, row, quad = operands.weight, lane >> 2, lane & 3
        # Lanes that share a scale, or scales of a lane.
        lanes, own = max(1, weight.group // plan.per_load), max(1, plan.per_load // weight.group)
        group = lane >> (lanes.bit_length() - 1)
        scales = p.offset(operands.scale, group, own * weight.scale_bytes)
        zeros = p.offset(operands.zero, group) if weight.int_zero else None
        is_second = p.equal(row & 1, p.ci(1))
        return cls(plan, weight, xs, lane, scales, zeros, p.equal(quad, lane >> 3), is_second)

    @property
    def offset(self) -> int | None:
        """What a zero of 0 takes off pairs of codes: a pair of 8s, which the codes lack.  None
        where codes have no zeros."""
        return 0x00080008

    def vectors_of(self, row):
        """Where the lane's scale, and zero, of the row's first chunk are."""
        scale = p.offset(self.scales, row, self.weight.scale_row)
        return (
            [scale]
            if self.zeros is None
            else [scale, p.offset(self.zeros, row, self.weight.n_groups)]
        )

    def vectors(self, places, chunk: int):
        """Return the scale of the lane's group, and what is subtracted from pairs of codes."""
        at, first = places[0], 32 * self.plan.per_load // self.weight.group * chunk
        start = self.weight.scale_bytes * first
        if self.weight.scale_kind == "f32":
            scale = p.load_global(at, 1, start, "f32")[0]
        elif self.weight.scale_kind == "e8m0":
            scale = p.load_signed_byte(at, start)
        else:
            scale = p.load_half(at, start)
        if self.offset is None:
            return [scale]
        offset = p.ci(self.offset)
        if self.zeros is not None:
            zero = p.load_signed_byte(places[1], first)
            offset = offset + zero * 0x00010001
        return [scale, offset]

    def of_chunk(self, words):
        """The next chunk's words of two rows, and by kind of vector the two rows'."""
        rows = [[next(words) for _ in range(4)] for _ in range(2)]
        count = 1 if self.offset is None else 2
        vectors = [[next(words) for _ in range(count)] for _ in range(2)]
        return rows, list(zip(*vectors, strict=True))

    def as_floats(self, scales):
        kind = self.weight.scale_kind
        return [v if kind == "f32" else p.widen(v, kind) for v in scales]

    def own_row(self, acc, r: int):
        """The accumulators' sum of the r-th row: of the lane's two columns, the diagonal's."""
        return p.where(self.is_second, acc[2 * r + 1], acc[2 * r])

    def prepared(self, values):
        """The 8 values divided by the power of two of the warp's 256, and that power.

        The largest is below 2^15 afterwards.  Infinite values and NaN stay what they are.
        """
        largest = functools.reduce(p.maximum, [p.absolute(v) for v in values])
        exponent = p.warp_largest(p.bits(largest)) >> 23
        exponent = p.larger(exponent, 15)  # both powers are normal numbers
        inverse = p.from_bits((268 - exponent) << 23)
        power = p.from_bits((exponent - 14) << 23)
        return [v * inverse for v in values], power

    def store_x(self, piece, values, power) -> None:
        """Columns 8 * piece and on, as pairs i and i + 4, to where their words' lane reads them."""
        pairs = [p.pack(values[i], values[i + 4], "f16") for i in range(4)]
        self.store_pairs(piece, pairs)
        at = self.xs + (piece >> 5) * 4 + 2 * self.plan.padded_k
        p.when(p.equal(piece & 31, 0), lambda: p.store_shared(at, [power]))

    def store_pairs(self, piece, pairs) -> None:
        chunk, word = piece >> 7, piece & 3
        lane = (piece >> 2) & 31
        at = self.xs + chunk * 2048 + word * 512 + lane * 16
        p.store_shared(at, [p.from_bits(pair) for pair in pairs])

    def nothing(self):
        return [p.cf(0.0)] * 2

    def group(self, chunks, words, sums):
        """sums[row] and the scaled products of these chunks' words."""
        at, words, sums = self.xs + self.lane * 16, iter(words), list(sums)
        powers = self.xs + (self.lane >> 3) * 4 + 2 * self.plan.padded_k
        for chunk in chunks:
            rows, (scales, offsets) = self.of_chunk(words)
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
            acc = [functools.reduce(operator.add, four) for four in zip(*parts, strict=True)]
            for r, scale in enumerate(scales):
                (scale,) = self.as_floats([scale])
                sums[r] = p.fma(self.own_row(acc, r) * power, scale, sums[r])
        return sums

    def totals(self, sums):
        return [p.where(self.on_diagonal, v, 0.0) for v in sums]


class Float8(Nibbles):
    """The product of float8_e4m3fn in groups of 64 or 128 columns, as ``Nibbles`` does it.

    A chunk has 512 columns, so the 4 lanes of a row of the mma have 64 of them.
    """

    offset = None

    def prepared(self, values):
        return (values,)

    def store_x(self, piece, values) -> None:
        """Columns 8 * piece and on, as pairs i and i + 2 of two words."""
        pairs = [p.pack(values[i], values[i + 2]) for i in (0, 1, 4, 5)]
        chunk, half = piece >> 6, piece & 1
        lane = (piece >> 1) & 31
        at = self.xs + chunk * 1024 + half * 512 + lane * 16
        p.store_shared(at, [p.from_bits(pair) for pair in pairs])

    def group(self, chunks, words, sums):
        """sums[row] and the scaled products of these chunks' words."""
        at, words, sums = self.xs + self.lane * 16, iter(words), list(sums)
        for chunk in chunks:
            rows, (scales,) = self.of_chunk(words)
            acc = [p.cf(0.0)] * 4
            for i in range(4):
                if i % 2 == 0:
                    xs = p.load_shared(at, 4, 1024 * chunk + 256 * i)
                low, high = (widen.word_pairs(self.weight, row[i], p.ci(0)) for row in rows)
                left = [low[0], high[0], low[1], high[1]]
                acc = p.mma(acc, left, xs[i % 2 * 2 : i % 2 * 2 + 2])
            for r, scale in enumerate(scales):
                (scale,) = self.as_floats([scale])
                sums[r] = p.fma(self.own_row(acc, r), scale, sums[r])
        return sums


class OneSum(Nibbles):
    """Products whose scales multiply the weights, as bfloat16: the mma's sums run over the row."""

    def prepared(self, values):
        return (values,)

    def store_x(self, piece, values) -> None:
        self.store_pairs(piece, [p.pack(values[i], values[i + 4]) for i in range(4)])

    def nothing(self):
        return [p.cf(0.0)] * 4

    def scaled(self, rows, vectors):
        """Return, of each row, the function from a word's number to its weights times scales."""
        raise NotImplementedError

    def group(self, chunks, words, sums):
        """The accumulators of the mma, with the products of these chunks' words."""
        at, words, acc = self.xs + self.lane * 16, iter(words), list(sums)
        for chunk in chunks:
            scaled = self.scaled(*self.of_chunk(words))
            for i in range(4):
                low, high = (pairs(i) for pairs in scaled)
                xs = p.load_shared(at, 4, 2048 * chunk + 512 * i)
                for s in (0, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    acc = p.mma(acc, left, xs[s : s + 2])
        return acc

    def totals(self, sums):
        return super().totals([self.own_row(sums, r) for r in range(2)])


class Float4(OneSum):
    """The product of float4_e2m1fn with a scale for 32 or 16 columns, as ``Nibbles`` does it.

    A lane's 32 columns of a chunk share one scale, or two.  It multiplies the weights, exactly, so
    sums run over the whole row.
    """

    offset = None

    def scaled(self, rows, vectors):
        factors = [widen.float4_factors(self.weight, scales) for scales in vectors[0]]
        return [
            lambda i, row=row, own=own: widen.float4_pairs(row[i], own[i])
            for row, own in zip(rows, factors, strict=True)
        ]

    def totals(self, sums):
        return [v * widen.FLOAT4_REST for v in super().totals(sums)]


class FoldedNibbles(OneSum):
    """The product of int4 in groups of 32 or 64 columns, as ``Nibbles`` does it.

    A lane's 32 columns of a chunk share one scale.  It multiplies the weights, which are rounded to
    bfloat16, so sums run over the whole row.
    """

    @property
    def offset(self) -> int:
        """A pair of what ``widen.biased_nibbles`` adds to the codes."""
        return widen.code_bias(self.weight)

    def scaled(self, rows, vectors):
        scales, offsets = vectors
        factors = [p.pack(scale, scale) for scale in self.as_floats(scales)]

        def pairs(i: int, row, offset: Value, factor: Value) -> list[Value]:
            return [p.mul_pairs(v, factor) for v in widen.word_pairs(self.weight, row[i], offset)]

        parts = zip(rows, offsets, factors, strict=True)
        return [functools.partial(pairs, row=r, offset=o, factor=f) for r, o, f in parts]


def loop_class(weight: StoredWeight) -> type[Floats | Nibbles]:
    """Return the loop of a weight's codes."""
    if weight.float4 or weight.float8:
        return Float4 if weight.float4 else Float8
    if weight.bits > 4:
        return Floats
    return FoldedNibbles if folds(weight) else Nibbles

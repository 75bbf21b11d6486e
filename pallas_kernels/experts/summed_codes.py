"""A warp's codes in the sum over a token's experts: copied, widened and multiplied.

``summed_program`` says which lane has which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows import widen
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class WarpCodes:
    """A warp's codes of w, from device memory to sums of slots.

    places: the lane's in the first row of its expert, by operand.
    x: 16 pairs.  x_sum: of the slot, for int4.
    """

    scheme: FewRowsScheme
    row_bytes: Mapping[str, int]
    places: Mapping[str, Value]
    is_odd: Value
    x: list[Value] = dataclasses.field(default_factory=list)
    x_sum: Value | None = None

    @property
    def words(self) -> int:
        """Words of a unit in registers, beside its codes."""
        return 2 * (len(self.places) - 1)

    def copy(self, unit: Value, to: Value, apart: int) -> None:
        """Copy the lane's codes of a unit's two rows to shared memory, ``apart`` bytes apart."""
        size = self.row_bytes["w"]
        at = p.offset_rows(self.places["w"], unit, 2 * size)
        for row in range(2):
            p.copy_async(to, at, row * apart, row * size)

    def load(self, unit: Value) -> list[Value]:
        """The lane's scale, and zero, of each of a unit's two rows."""
        out: list[Value] = []
        sizes = self.row_bytes
        names = [name for name in self.places if name != "w"]
        at = {name: p.offset_rows(self.places[name], unit, 2 * sizes[name]) for name in names}
        for row in range(2):
            start = row * sizes["scale"]
            if self.scheme.scale_kind == "f32":
                out += p.load_global(at["scale"], 1, start)
            elif self.scheme.scale_kind == "e8m0":
                out.append(p.load_signed_byte(at["scale"], start))
            else:
                out.append(p.load_half(at["scale"], start))
            if "zero" in at:
                out.append(p.load_signed_byte(at["zero"], row * sizes["zero"]))
        return out

    def sums(self, rows: list[list[Value]]) -> list[Value]:
        """The slot's sum of each row, in the lane of the slot that has it.

        rows: 4 words of codes, the scale, and the zero.
        """
        acc = [p.cf(0.0)] * 4
        scheme = self.scheme
        pairs_of = [self.pairs_of(row) for row in rows]
        for i in range(4):
            low, high = (pairs(i) for pairs in pairs_of)
            for s in (0, 2):
                left = [low[s], high[s], low[s + 1], high[s + 1]]
                acc = p.mma(acc, left, self.x[4 * i + s : 4 * i + s + 2])
        found = [arith.select(self.is_odd, acc[2 * r + 1], acc[2 * r]) for r in range(2)]
        if scheme.float4 or scheme.fold:
            return found
        return [self.scaled(v, *row[4:]) for v, row in zip(found, rows, strict=True)]

    def pairs_of(self, row: list[Value]) -> Callable[[int], list[Value]]:
        """The function from a word's number to its weights, of a row's words."""
        scheme = self.scheme
        if scheme.float4:
            factors = widen.float4_factors(scheme, row[4])
            return lambda i: widen.float4_pairs(row[i], factors[i])
        if not scheme.fold:
            return lambda i: widen.biased_nibbles(scheme, row[i])
        bias = p.ci(scheme.bias)
        if len(row) > 5:
            bias = arith.addi(bias, p.mul(row[5], 0x00010001))
        scale = self.as_float(row[4])
        factor = p.pack(scale, scale)
        return lambda i: widen.folded_pairs(scheme, row[i], bias, factor)

    def as_float(self, scale: Value) -> Value:
        """A scale of int4 as it is loaded."""
        kind = self.scheme.scale_kind
        assert kind is not None
        return p.from_bits(scale) if kind == "f32" else p.widen(scale, kind)

    def scaled(self, value: Value, scale: Value, zero: Value | None = None) -> Value:
        """An int4 slot's sum without its bias, times its scale."""
        assert self.x_sum is not None
        bias = p.cf(-136.0) if zero is None else p.to_float(arith.subi(p.ci(2**32 - 136), zero))
        return arith.mulf(p.fma(bias, self.x_sum, value), self.as_float(scale))

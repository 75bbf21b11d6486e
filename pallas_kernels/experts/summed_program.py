"""The program of the sum over a token's experts on Hopper: who reads which codes.

Contract.  The rows of a token's experts lie side by side as one row of ``fan`` times K columns.  A
*unit* is two neighbouring rows.  A *slot* is 128 columns of one expert, which 4 lanes of a warp
read.  A chunk is 8 slots, one instruction of a warp.  A warp keeps its chunk and goes from unit to
unit, so it loads its part of x once and needs no other warp before the end.

    warp    the kernel before has ended | the lanes' experts | x
    warp    the codes of its first ``ahead`` units -> registers
    warp    x -> its own shared memory -> registers, in the order of the codes
    warp    per unit: multiply (``WarpCodes``), 8 lanes store a sum; the next codes -> registers
    block   barrier; a thread per row and expert: its slots, the bias, the expert's weight
    block   barrier; a thread per row: the sum over experts and the only rounding

Copies: each warp loads codes and x for itself; x passes through the warp's shared memory behind a
warp barrier.
Waits: all threads for the kernel before, and at the two block barriers.
Writes: a thread stores a row's result.

Numerics.  float32 sums, in an order that depends on the shape alone.  int4: 136 plus the code is a
bfloat16, and the products of 136 (and the zero point) with x are taken off a slot's sum.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from pallas_kernels import ptx as p
from pallas_kernels.experts.summed_plan import SLOT, GroupedSumPlan
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.few_rows.operands import BYTES, load_number
from pallas_kernels.matmul.few_rows.plan import folds
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value

SCRATCH = "x", "sums", "parts"
_STREAMED = ".L1::no_allocate"


@dataclasses.dataclass(frozen=True)
class Place:
    """Columns of one of a token's experts.

    expert: its number among the token's.  is_inside: whether the row has these columns; else expert
    and column are 0, and x has zeros.
    """

    expert: Value
    column: Value
    is_inside: Value

    @classmethod
    def of(cls, plan: GroupedSumPlan, slot: Value, first: Value) -> Place:
        """first: column in the slot."""
        expert, own = slot // plan.slots, slot % plan.slots
        column = own * SLOT + first
        is_inside = (column < plan.k) & (slot < plan.row_slots)
        expert, column = (p.where(is_inside, v, 0) for v in (expert, column))
        return cls(expert, column, is_inside)


@dataclasses.dataclass(frozen=True)
class WarpCodes:
    """A warp's codes of w, from device memory to sums of slots.

    places: the lane's in the first row of its expert, by operand.
    x: 16 pairs.  x_sum: of the slot, for int4.
    """

    weight: StoredWeight
    row_bytes: Mapping[str, int]
    places: Mapping[str, Value]
    is_odd: Value
    x: list[Value] = dataclasses.field(default_factory=list)
    x_sum: Value | None = None

    @property
    def words(self) -> int:
        """Words of a unit in registers."""
        return 2 * (4 + len(self.places) - 1)

    def load(self, unit: Value) -> list[Value]:
        """The lane's words of a unit's two rows: 4 of codes each, its scale and its zero."""
        out: list[Value] = []
        sizes = self.row_bytes
        at = {name: p.offset_rows(v, unit, 2 * sizes[name]) for name, v in self.places.items()}
        for row in range(2):
            out += p.load_global(at["w"], 4, row * sizes["w"], cache=_STREAMED)
            start = row * sizes["scale"]
            if self.weight.scale_kind == "f32":
                out += p.load_global(at["scale"], 1, start)
            elif self.weight.scale_kind == "e8m0":
                out.append(p.load_signed_byte(at["scale"], start))
            else:
                out.append(p.load_half(at["scale"], start))
            if "zero" in at:
                out.append(p.load_signed_byte(at["zero"], row * sizes["zero"]))
        return out

    def sums(self, words: list[Value]) -> list[Value]:
        """The slot's sum of each row, in the lane of the slot that has it."""
        half = len(words) // 2
        rows = [words[:half], words[half:]]
        acc = [p.cf(0.0)] * 4
        weight = self.weight
        pairs_of = [self.pairs_of(row) for row in rows]
        for i in range(4):
            low, high = (pairs(i) for pairs in pairs_of)
            for s in (0, 2):
                left = [low[s], high[s], low[s + 1], high[s + 1]]
                acc = p.mma(acc, left, self.x[4 * i + s : 4 * i + s + 2])
        found = [p.where(self.is_odd, acc[2 * r + 1], acc[2 * r]) for r in range(2)]
        if weight.float4 or folds(weight):
            return found
        return [self.scaled(v, *row[4:]) for v, row in zip(found, rows, strict=True)]

    def pairs_of(self, row: list[Value]) -> Callable[[int], list[Value]]:
        """The function from a word's number to its weights, of a row's words of ``load``."""
        weight = self.weight
        if weight.float4:
            factors = widen.float4_factors(weight, row[4])
            return lambda i: widen.float4_pairs(row[i], factors[i])
        if not folds(weight):
            return lambda i: widen.biased_nibbles(row[i])
        bias = p.ci(widen.code_bias(weight))
        if len(row) > 5:
            bias = bias + row[5] * 0x00010001
        scale = self.as_float(row[4])
        factor = p.pack(scale, scale)
        return lambda i: [p.mul_pairs(v, factor) for v in widen.word_pairs(weight, row[i], bias)]

    def as_float(self, scale: Value) -> Value:
        """A scale of int4 as it is loaded."""
        kind = self.weight.scale_kind
        assert kind is not None
        return p.from_bits(scale) if kind == "f32" else p.widen(scale, kind)

    def scaled(self, value: Value, scale: Value, zero: Value | None = None) -> Value:
        """An int4 slot's sum without its bias, times its scale."""
        assert self.x_sum is not None
        bias = p.cf(-136.0) if zero is None else p.to_float(2**32 - 136 - zero)
        return p.fma(bias, self.x_sum, value) * self.as_float(scale)


class Sums(NamedTuple):
    """Where a lane's sums of a slot go, and whether it has one."""

    at: Value
    has_one: Value


@dataclasses.dataclass(frozen=True)
class UnitsOfWarp:
    """A warp's units of w, of the block's from ``first`` to ``end``, one after the other.

    member: the warp's number among those that share its chunk of columns.
    """

    plan: GroupedSumPlan
    member: Value
    first: Value
    end: Value
    codes: WarpCodes

    def unit_of(self, i: Value | int) -> Value:
        step = p.ci(i) if isinstance(i, int) else i
        return self.first + (step * self.plan.members + self.member)

    def has(self, i: Value | int, unit: Value) -> Value | None:
        """Whether the warp has this unit; None if all have it."""
        plan, works = self.plan, self.member < self.plan.members
        if isinstance(i, int) and (i + 1) * plan.members <= plan.least_units:
            return None if plan.members * plan.chunks == plan.warps else works
        return (unit < self.end) & works

    def load(self, i: Value | int) -> list[Value]:
        """The codes of the i-th unit, zeros where there is none."""
        unit = self.unit_of(i)
        condition = self.has(i, unit)
        if condition is None:
            return self.codes.load(unit)
        nothing = [p.ci(0)] * self.codes.words
        return p.choose(condition, lambda: self.codes.load(unit), nothing)

    def multiply(self, i: Value | int, words: list[Value], sums: Sums) -> None:
        """Store the sums of the i-th unit's slots."""
        unit, pitch = self.unit_of(i), self.plan.pitch
        condition = self.has(i, unit)

        def body() -> None:
            at = sums.at + (unit - self.first) * (8 * pitch)
            for r, value in enumerate(self.codes.sums(words)):
                p.store_shared_if(sums.has_one, at, value, 4 * pitch * r)

        if condition is None:
            body()
        else:
            p.when(condition, body)

    def multiply_all(self, ring: list[list[Value]], sums: Sums) -> None:
        """All units of the warp, ``ahead`` of them under way."""
        ahead, rounds = self.plan.ahead, self.plan.rounds
        if rounds <= ahead:
            for i in range(rounds):
                self.multiply(i, ring[i], sums)
            return
        words = len(ring[0])

        def step(i: Value, carry: list[Value]) -> list[Value]:
            carry = list(carry)
            for a in range(ahead):
                part = slice(a * words, (a + 1) * words)
                self.multiply(i + a, carry[part], sums)
                carry[part] = self.load(i + (a + ahead))
            return carry

        p.loop(0, rounds, ahead, [v for words in ring for v in words], step)


@dataclasses.dataclass(frozen=True)
class SumProgram:
    """memory: addresses of the operands and the result, by name; None where there is none.

    kinds: of the bias and the result.
    """

    plan: GroupedSumPlan
    weight: StoredWeight
    memory: Mapping[str, Value]
    row_bytes: Mapping[str, int]
    n_experts: int
    kinds: Mapping[str, str]
    smem: SimpleNamespace

    def run(self) -> None:
        """Emit one block's program while the kernel is traced."""
        plan = self.plan
        thread = p.register("tid.x")
        warp, lane = thread >> 5, thread & 31
        block = p.register("ctaid.x")
        token, block = block // plan.blocks, block % plan.blocks
        p.await_kernel()
        first, end = (at * plan.units // plan.blocks for at in (block, block + 1))
        member, chunk = warp // plan.chunks, warp % plan.chunks
        slot = chunk * 8 + (lane >> 2)
        place = Place.of(plan, slot, (lane & 3) * 32)
        expert = self.clamped(self.expert_at(token, place.expert))
        x = self.ask_x(token, chunk, lane)
        units = UnitsOfWarp(plan, member, first, end, self.codes(place, expert, lane))
        sums = Sums(p.shared_address(self.smem.sums) + slot * 4, p.equal(lane & 3, lane >> 3))
        ring = [units.load(i) for i in range(plan.ahead)]
        units = dataclasses.replace(units, codes=self.with_x(units.codes, x, warp, lane))
        asked = self.ask(thread, token, first, end)
        units.multiply_all(ring, sums)
        p.barrier()  # all slots' sums are there
        self.finish(thread, token, first, end, asked)

    # --- before the products ---

    def expert_at(self, token: Value, index: Value) -> Value:
        """The token's expert of this number, as it is given."""
        at = self.pair(token, index)
        return p.load_global(p.offset(self.memory["experts"], at, 4), 1)[0]

    def pair(self, token: Value, index: Value) -> Value:
        """The place in experts and weights; of the shared expert that of the one before it."""
        if self.memory["shared"] is None:
            return token * self.plan.fan + index
        return token * (self.plan.fan - 1) + p.smaller(index, self.plan.fan - 2)

    def is_shared(self, index: Value) -> Value:
        return p.equal(index, self.plan.fan - 1)

    def clamped(self, expert: Value) -> Value:
        """An expert that w has."""
        return p.smaller(p.larger(expert, 0), self.n_experts - 1)

    def ask_x(self, token: Value, chunk: Value, lane: Value) -> list[Value]:
        """The chunk's x as it lies: 8 columns a lane, 4 times."""
        plan, out = self.plan, []
        for i in range(4):
            piece = chunk * 128 + (lane + 32 * i)
            part = Place.of(plan, piece >> 4, (piece & 15) * 8)
            row = token * plan.fan + part.expert
            at = p.offset(p.offset(self.memory["x"], row, 2 * plan.k), part.column, 2)
            words = p.load_global(at, 4)
            out += [p.where(part.is_inside, word, 0) for word in words]
        return out

    def codes(self, place: Place, expert: Value, lane: Value) -> WarpCodes:
        weight = self.weight
        group = place.column >> (weight.group.bit_length() - 1)
        starts = {"w": place.column >> 1, "scale": group * weight.scale_bytes, "zero": group}
        names = ["w", "scale"] + (["zero"] if weight.int_zero else [])
        places = {
            name: p.offset_rows(at, expert, self.plan.n * self.row_bytes[name])
            for name in names
            for at in [p.offset(self.memory[name], starts[name])]
        }
        if self.memory["shared"] is not None:
            apart = {name: p.offset(self.memory["shared"][name], starts[name]) for name in names}
            is_shared = self.is_shared(place.expert)
            places = {name: p.where(is_shared, apart[name], at) for name, at in places.items()}
        return WarpCodes(weight, self.row_bytes, places, p.bit(lane, 2))

    def with_x(self, codes: WarpCodes, words: list[Value], warp: Value, lane: Value) -> WarpCodes:
        """x in the order of the codes: a lane's 32 columns."""
        base = p.shared_address(self.smem.x) + warp * 2048
        # Piece 4 l + i is the lane l's, at 512 i + 16 l.
        to = (lane & 3) * 512 + (lane >> 2) * 16
        for i in range(4):
            p.store_shared(base + to, words[4 * i : 4 * i + 4], 128 * i)
        p.warp_barrier()
        source = base + lane * 16
        loaded = [p.load_shared(source, 4, 512 * i) for i in range(4)]
        pairs = [pair for four in loaded for pair in widen.x_pairs(self.weight, four)]
        if self.weight.float4 or folds(self.weight):
            return dataclasses.replace(codes, x=pairs)
        parts = [f(v) for v in pairs for f in (p.widen, p.widen_high)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
        total = p.over_lanes(parts[0], (1, 2))
        return dataclasses.replace(codes, x=pairs, x_sum=total)

    # --- behind them ---

    def ask(self, item: Value, token: Value, first: Value, end: Value) -> SimpleNamespace:
        """Return (is it one; its expert's weight; bias, factor of w) of an item of ``finish``."""
        plan = self.plan
        row, index = item // plan.fan, item % plan.fan
        has_one = first + (row >> 1) < end
        row = p.where(has_one, first * 2 + row, first * 2)
        expert = self.expert_at(token, index)
        found = SimpleNamespace(has_one=has_one, bias=None, factor=None, is_own=None)
        found.weight = load_number(self.memory["weights"], self.pair(token, index), "f32")
        shared = self.memory["shared"]
        if shared is not None:
            found.weight = p.where(self.is_shared(index), 1.0, found.weight)
        if plan.partial:
            found.is_own = expert < self.n_experts
        expert = self.clamped(expert)
        if self.memory["bias"] is not None:
            kind = self.kinds["bias"]
            base = p.offset(self.memory["bias"], expert, BYTES[kind] * plan.n)
            found.bias = load_number(base, row, kind)
        if self.weight.has_unit:
            unit = p.offset(self.memory["zero"], expert, 4 * plan.n)
            if shared is not None:
                unit = p.where(self.is_shared(index), shared["zero"], unit)
            found.factor = load_number(unit, row, "f32")
        return found

    def finish(
        self, thread: Value, token: Value, first: Value, end: Value, asked: SimpleNamespace
    ) -> None:
        plan, threads = self.plan, 32 * self.plan.warps
        for start in range(0, plan.items, threads):
            item = thread + start
            here = asked if start == 0 else self.ask(item, token, first, end)
            p.when(here.has_one, functools.partial(self.finish_item, item, here))
        p.barrier()
        parts = p.shared_address(self.smem.parts)
        for start in range(0, 2 * plan.most_units, threads):
            row = thread + start

            def store(row: Value = row) -> None:
                at = parts + row * (4 * plan.fan)
                values = [p.load_float(at, 4 * j) for j in range(plan.fan)]
                index = token * plan.n + (first * 2 + row)
                self.store(index, functools.reduce(operator.add, values))

            p.when(row >> 1 < end - first, store)

    def finish_item(self, item: Value, asked: SimpleNamespace) -> None:
        """One row of one expert, times the expert's weight."""
        plan = self.plan
        row, index = item // plan.fan, item % plan.fan
        at = row * plan.pitch + index * plan.slots
        at = p.shared_address(self.smem.sums) + at * 4
        slots = [p.load_float(at, 4 * i) for i in range(plan.slots)]
        value = functools.reduce(operator.add, slots)
        if self.weight.float4:
            value = value * widen.FLOAT4_REST
        if asked.factor is not None:
            value = value * asked.factor
        if asked.bias is not None:
            value = value + asked.bias
        value = value * asked.weight
        if asked.is_own is not None:
            value = p.where(asked.is_own, value, 0.0)
        p.store_shared(p.shared_address(self.smem.parts) + item * 4, [value])

    def store(self, index: Value, value: Value) -> None:
        """The only rounding."""
        kind = self.kinds["out"]
        if self.memory["residual"] is not None:
            value = value + load_number(self.memory["residual"], index, kind)
        at = p.offset(self.memory["out"], index, BYTES[kind])
        if kind == "f32":
            p.store_global(at, [value])
        else:
            p.store_global_half(at, p.narrow(value, kind))

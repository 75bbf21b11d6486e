"""The program of one token's experts on Hopper: who reads which codes, and how sums are joined.

Contract.  A token has ``fan`` experts.  A *unit* is a pair of rows of w.  There are two forms:

    not joined   a unit belongs to one expert: a row of gate and its row of up, or two neighbours
    joined       out = sum_j weights[j] * (x[j] @ w[expert j].T + bias): a unit is two neighbours of
                 the output, of all experts, whose columns lie side by side as one row

A *slot* is 128 columns of a row, which 4 lanes of a warp read.  A chunk is 8 slots, one instruction
of a warp.  A warp keeps its chunk and goes from unit to unit, so it loads its part of x once and
needs no other warp before the end.

    warp    the kernel before has ended | its experts, x
    warp    the codes of its first ``ahead`` units -> registers
    warp    x -> its own shared memory -> registers, in the order of the codes
    warp    per unit: multiply (``Codes``), 8 lanes store a slot's sum; the next codes -> registers
    block   barrier; a thread per unit adds up slots, then bias, gate and the only rounding.
            Joined: a thread per row and expert, a barrier, and a thread per row.

Numerics.  float32 sums, in an order that depends on the shape alone.  int4: 128 + u is a bfloat16,
and the products of 136 (and the zero point) with x are taken off a slot's sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.token_plan import SLOT, TokenPlan
from pallas_kernels.fused_parts import gated
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows import widen
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

SCRATCH = "x", "sums", "parts"
_STREAMED = ".L1::no_allocate"


def divided(index: Value, by: int) -> tuple[Value, Value]:
    """(quotient, remainder)."""
    return arith.divui(index, p.ci(by)), arith.remui(index, p.ci(by))


@dataclasses.dataclass(frozen=True)
class Lane:
    """What a lane reads of a row: 32 columns from ``column`` on of its expert.

    slot: in the row of all experts.  expert: its number among the token's.  is_inside: whether the
    row has these columns; else column is 0, and x has zeros.
    """

    slot: Value
    expert: Value
    column: Value
    is_inside: Value

    @classmethod
    def of(cls, plan: TokenPlan, slot: Value, first: Value) -> Lane:
        """first: column in the slot."""
        expert, own = divided(slot, plan.slots) if plan.joined else (p.ci(0), slot)
        column = p.add(p.mul(own, SLOT), first)
        is_inside = arith.andi(p.less(column, plan.k), p.less(slot, plan.row_slots))
        expert, column = (arith.select(is_inside, v, p.ci(0)) for v in (expert, column))
        return cls(slot, expert, column, is_inside)


@dataclasses.dataclass(frozen=True)
class Codes:
    """A warp's codes of w, from device memory to sums of slots.

    near, far: where the lane's part of unit 0 would be, by operand, if all units were in the expert
    of the block's first unit, or in the next; joined: they are in the lane's expert.
    boundary: the first unit of the next expert.
    x: 16 pairs.  x_sum: of the slot, for int4.
    """

    plan: TokenPlan
    scheme: FewRowsScheme
    row_bytes: Mapping[str, int]
    near: Mapping[str, Value]
    far: Mapping[str, Value] | None
    boundary: Value | None
    is_odd: Value
    x: list[Value] = dataclasses.field(default_factory=list)
    x_sum: Value | None = None

    @property
    def words(self) -> int:
        """Words of a unit in registers."""
        return 2 * (4 + len(self.near) - 1)

    def load(self, unit: Value) -> list[Value]:
        """The lane's words of a unit's two rows: 4 of codes each, its scale and its zero."""
        out, at = [], self.near
        if self.far is not None:
            assert self.boundary is not None
            is_near = p.less(unit, self.boundary)
            at = {name: arith.select(is_near, at[name], far) for name, far in self.far.items()}
        rows = self.plan.unit_rows
        at = {name: p.offset_rows(v, unit, rows * self.row_bytes[name]) for name, v in at.items()}
        for row in (0, self.plan.apart):
            start = {name: row * size for name, size in self.row_bytes.items()}
            out += p.load_global(at["w"], 4, start["w"], cache=_STREAMED)
            if self.scheme.scale_kind == "f32":
                out += p.load_global(at["scale"], 1, start["scale"])
            elif self.scheme.scale_kind == "e8m0":
                out.append(p.load_signed_byte(at["scale"], start["scale"]))
            else:
                out.append(p.load_half(at["scale"], start["scale"]))
            if "zero" in at:
                out.append(p.load_signed_byte(at["zero"], start["zero"]))
        return out

    def sums(self, words: list[Value]) -> list[Value]:
        """The slot's sum of each row, in the lanes of ``is_mine``."""
        half = len(words) // 2
        rows = [words[:half], words[half:]]
        acc = [p.cf(0.0)] * 4
        factors = [self.factors(row[4]) if self.scheme.float4 else None for row in rows]
        for i in range(4):
            low, high = (
                self.pairs(row[i], None if f is None else f[i])
                for row, f in zip(rows, factors, strict=True)
            )
            for s in (0, 2):
                left = [low[s], high[s], low[s + 1], high[s + 1]]
                acc = p.mma(acc, left, self.x[4 * i + s : 4 * i + s + 2])
        found = [arith.select(self.is_odd, acc[2 * r + 1], acc[2 * r]) for r in range(2)]
        if self.scheme.float4:
            return found
        return [self.scaled(v, *row[4:]) for v, row in zip(found, rows, strict=True)]

    def pairs(self, word: Value, factor: Value | None) -> list[Value]:
        if factor is not None:
            return widen.float4_pairs(word, factor)
        return widen.biased_nibbles(self.scheme, word)

    def factors(self, scales: Value) -> list[Value]:
        return widen.float4_factors(self.scheme, scales)

    def scaled(self, value: Value, scale: Value, zero: Value | None = None) -> Value:
        """An int4 slot's sum without its bias, times its scale."""
        assert self.x_sum is not None
        bias = p.cf(-136.0) if zero is None else p.to_float(arith.subi(p.ci(-136 % 2**32), zero))
        kind = self.scheme.scale_kind
        scale = p.from_bits(scale) if kind == "f32" else p.widen(scale, kind)
        return arith.mulf(p.fma(bias, self.x_sum, value), scale)


@dataclasses.dataclass(frozen=True)
class TokenProgram:
    """memory: addresses of the operands and the result, by name; None where there is none."""

    plan: TokenPlan
    scheme: FewRowsScheme
    memory: Mapping[str, Value | None]
    row_bytes: Mapping[str, int]
    n_experts: int
    gate: Gate | None
    out_kind: str
    smem: SimpleNamespace

    def run(self) -> None:
        """Emit one block's program while the kernel is traced."""
        plan = self.plan
        thread = p.register("tid.x")
        warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
        token, block = divided(p.register("ctaid.x"), plan.blocks)
        p.await_kernel()
        member, chunk = divided(warp, plan.chunks)
        works = p.less(member, plan.members)
        first, end = (
            arith.divui(p.mul(at, plan.units), p.ci(plan.blocks)) for at in (block, p.add(block, 1))
        )
        slot = p.add(p.mul(chunk, 8), p.shift_right(lane, 2))
        mine = Lane.of(plan, slot, p.mul(p.masked(lane, 3), 32))
        experts = self.ask_experts(token, mine, first)
        x = self.ask_x(token, chunk, lane)
        codes = self.codes(mine, lane, first, experts)
        on_diagonal = p.equal(p.masked(lane, 3), p.shift_right(lane, 3))
        sums_at = p.add(p.shared_address(self.smem.sums), p.mul(slot, 4))

        def unit_of(i: Value | int) -> Value:
            step = p.ci(i) if isinstance(i, int) else i
            return p.add(first, p.add(p.mul(step, plan.members), member))

        def has(i: Value | int, unit: Value) -> Value | None:
            """Whether the warp has this unit; None if all have it."""
            if isinstance(i, int) and (i + 1) * plan.members <= plan.least_units:
                return None if plan.members * plan.chunks == plan.warps else works
            return arith.andi(p.less(unit, end), works)

        def load(i: Value | int) -> list[Value]:
            unit = unit_of(i)
            condition = has(i, unit)
            if condition is None:
                return codes.load(unit)
            return p.choose(condition, lambda: codes.load(unit), [p.ci(0)] * codes.words)

        def multiply(i: Value | int, words: list[Value]) -> None:
            unit = unit_of(i)
            condition = has(i, unit)

            def body() -> None:
                at = p.add(sums_at, p.mul(arith.subi(unit, first), 8 * plan.pitch))
                for r, value in enumerate(codes.sums(words)):
                    p.store_shared_if(on_diagonal, at, value, 4 * plan.pitch * r)

            if condition is None:
                body()
            else:
                p.when(condition, body)

        ring = [load(i) for i in range(plan.ahead)]
        codes = self.with_x(codes, x, warp, lane)
        asked = self.ask(thread, token, first, end)
        self.go(ring, load, multiply)
        p.barrier()
        self.finish(thread, token, first, end, asked)

    def go(self, ring: list[list[Value]], load: Callable, multiply: Callable) -> None:
        """All units of a warp, ``ahead`` of them under way."""
        ahead, rounds = self.plan.ahead, self.plan.rounds
        if rounds <= ahead:
            for i in range(rounds):
                multiply(i, ring[i])
            return
        words = len(ring[0])

        def step(i: Value, carry: list[Value]) -> list[Value]:
            carry = list(carry)
            for a in range(ahead):
                part = slice(a * words, (a + 1) * words)
                multiply(p.add(i, a), carry[part])
                carry[part] = load(p.add(i, a + ahead))
            return carry

        p.loop(0, rounds, ahead, [v for words in ring for v in words], step)

    # --- before the products ---

    def expert_at(self, token: Value, index: Value) -> Value:
        """The token's expert of this number, as it is given."""
        at = p.add(p.mul(token, self.plan.fan), index)
        return p.load_global(p.offset(self.memory["experts"], at, 4), 1)[0]

    def ask_experts(self, token: Value, mine: Lane, first: Value) -> list[Value]:
        """The lane's expert, or those of the block's first unit and of the next expert's units."""
        if self.plan.joined:
            indices = [mine.expert]
        else:
            index = arith.divui(first, p.ci(self.plan.half))
            indices = [index, p.minimum(p.add(index, 1), self.plan.fan - 1)]
        return [self.clamped(self.expert_at(token, index)) for index in indices]

    def clamped(self, expert: Value) -> Value:
        """An expert that w has."""
        return p.smaller(p.larger(expert, p.ci(0)), p.ci(self.n_experts - 1))

    def ask_x(self, token: Value, chunk: Value, lane: Value) -> list[Value]:
        """The chunk's x as it lies: 8 columns a lane, 4 times."""
        plan, out = self.plan, []
        for i in range(4):
            piece = p.add(p.mul(chunk, 128), p.add(lane, 32 * i))
            part = Lane.of(plan, p.shift_right(piece, 4), p.mul(p.masked(piece, 15), 8))
            row = p.add(p.mul(token, plan.fan), part.expert) if plan.joined else token
            at = p.offset(p.offset(self.memory["x"], row, 2 * plan.k), part.column, 2)
            words = p.load_global(at, 4)
            out += [arith.select(part.is_inside, word, p.ci(0)) for word in words]
        return out

    def codes(self, mine: Lane, lane: Value, first: Value, experts: list[Value]) -> Codes:
        plan, scheme = self.plan, self.scheme
        group = p.shift_right(mine.column, scheme.group.bit_length() - 1)
        starts = {
            "w": p.shift_right(mine.column, 1),
            "scale": p.mul(group, scheme.scale_bytes),
            "zero": group,
        }
        names = ["w", "scale"] + (["zero"] if scheme.zero == "int" else [])
        places = {name: p.offset(self.memory[name], starts[name]) for name in names}
        near, *far = [
            {
                name: p.offset_rows(at, e, plan.n * self.row_bytes[name])
                for name, at in places.items()
            }
            for e in experts
        ]
        is_odd, boundary = p.bit(lane, 2), None
        if not plan.joined:
            index = arith.divui(first, p.ci(plan.half))
            boundary = p.mul(p.add(index, 1), plan.half)
            moved = [self.moved(near, index), self.moved(far[0], p.add(index, 1))]
            near, far = moved[0], moved[1:]
        return Codes(plan, scheme, self.row_bytes, near, far[0] if far else None, boundary, is_odd)

    def moved(self, places: Mapping[str, Value], index: Value) -> dict[str, Value]:
        """Places of the expert ``index`` of a token, moved to where unit 0 would be."""
        out = {}
        for name, at in places.items():
            before = arith.subi(at, at)
            size = self.plan.half * self.plan.unit_rows * self.row_bytes[name]
            out[name] = arith.subi(at, p.offset_rows(before, index, size))
        return out

    def index_of(self, unit: Value) -> tuple[Value, Value]:
        """(the number of a unit's expert among the token's, its first row)."""
        index, own = divided(unit, self.plan.half)
        return index, p.mul(own, self.plan.unit_rows)

    def with_x(self, codes: Codes, words: list[Value], warp: Value, lane: Value) -> Codes:
        """x in the order of the codes: a lane's 32 columns."""
        base = p.add(p.shared_address(self.smem.x), p.mul(warp, 2048))
        # Piece 4 l + i is the lane l's, at 512 i + 16 l.
        to = p.add(p.mul(p.masked(lane, 3), 512), p.mul(p.shift_right(lane, 2), 16))
        for i in range(4):
            p.store_shared(p.add(base, to), words[4 * i : 4 * i + 4], 128 * i)
        p.warp_barrier()
        source = p.add(base, p.mul(lane, 16))
        loaded = [p.load_shared(source, 4, 512 * i) for i in range(4)]
        pairs = [pair for four in loaded for pair in widen.x_pairs(self.scheme, four)]
        if self.scheme.float4:
            return dataclasses.replace(codes, x=pairs)
        parts = [f(v) for v in pairs for f in (p.widen, p.widen_high)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [arith.addf(*two) for two in zip(parts[:half], parts[half:], strict=True)]
        (total,) = parts
        for distance in (1, 2):
            total = arith.addf(total, p.shuffle_xor(total, distance))
        return dataclasses.replace(codes, x=pairs, x_sum=total)

    # --- behind them ---

    def ask(self, thread: Value, token: Value, first: Value, end: Value) -> SimpleNamespace:
        """What the thread's item of ``finish`` needs: expert, weight, biases, factors of rows."""
        plan = self.plan
        if plan.joined:
            row, index = divided(thread, plan.fan)
            unit = p.add(first, p.shift_right(row, 1))
            rows = [p.add(p.mul(first, 2), row)]
        else:
            unit = p.add(first, thread)
        has_one = p.less(unit, end)
        unit = arith.select(has_one, unit, first)
        if plan.joined:
            rows = [arith.select(has_one, rows[0], p.mul(first, 2))]
            expert = self.expert_at(token, index)
        else:
            index, row = self.index_of(unit)
            rows = [row, p.add(row, plan.apart)]
            expert = self.clamped(self.expert_at(token, index))
        found = SimpleNamespace(has_one=has_one, unit=unit, rows=rows, weight=None, is_own=None)
        if plan.joined:
            at = p.add(p.mul(token, plan.fan), index)
            found.weight = p.load_global(p.offset(self.memory["weights"], at, 4), 1, 0, "f32")[0]
            found.is_own = p.less(expert, self.n_experts) if plan.partial else None
            expert = self.clamped(expert)
        names = {"biases": self.memory["bias"]}
        names["factors"] = self.memory["zero"] if self.scheme.zero == "unit" else None
        for key, base in names.items():
            values = None
            if base is not None:
                size = 4 * plan.n
                at = p.offset(base, expert, size)
                values = [p.load_global(p.offset(at, r, 4), 1, 0, "f32")[0] for r in rows]
            setattr(found, key, values)
        return found

    def total(self, at: Value, first: int = 0, count: int | None = None) -> Value:
        """The sum of slots in shared memory."""
        count = self.plan.row_slots if count is None else count
        values = [p.load_float(at, 4 * (first + i)) for i in range(count)]
        return functools.reduce(arith.addf, values)

    def row_value(self, value: Value, asked: SimpleNamespace, i: int) -> Value:
        if self.scheme.float4:
            value = arith.mulf(value, p.cf(widen.FLOAT4_REST))
        if asked.factors is not None:
            value = arith.mulf(value, asked.factors[i])
        return value if asked.biases is None else arith.addf(value, asked.biases[i])

    def finish(
        self, thread: Value, token: Value, first: Value, end: Value, asked: SimpleNamespace
    ) -> None:
        plan, threads = self.plan, 32 * self.plan.warps
        sums = p.shared_address(self.smem.sums)
        rounds = -(-plan.items // threads)
        for i in range(rounds):
            item = p.add(thread, threads * i)
            here = asked if i == 0 else self.ask(item, token, first, end)
            body = self.finish_joined if plan.joined else self.finish_unit
            p.when(here.has_one, functools.partial(body, sums, item, token, first, here))
        if not plan.joined:
            return
        p.barrier()
        parts = p.shared_address(self.smem.parts)
        rows = 2 * plan.most_units
        for start in range(0, rows, threads):
            row = p.add(thread, start)

            def body(row: Value = row) -> None:
                at = p.add(parts, p.mul(row, 4 * plan.fan))
                values = [p.load_float(at, 4 * j) for j in range(plan.fan)]
                self.store(token, p.add(p.mul(first, 2), row), functools.reduce(arith.addf, values))

            p.when(p.less(p.shift_right(row, 1), arith.subi(end, first)), body)

    def finish_unit(
        self, sums: Value, item: Value, token: Value, first: Value, asked: SimpleNamespace
    ) -> None:
        """A unit's two rows: its results."""
        plan = self.plan
        at = p.add(sums, p.mul(item, 8 * plan.pitch))
        values = [self.total(p.add(at, 4 * plan.pitch * r)) for r in range(2)]
        values = [self.row_value(v, asked, r) for r, v in enumerate(values)]
        index = asked.unit if self.gate is not None else p.mul(asked.unit, 2)
        if self.gate is not None:
            values = [gated(self.gate, *values)]
        for r, value in enumerate(values):
            self.store(token, p.add(index, r), value)

    def finish_joined(
        self, sums: Value, item: Value, token: Value, first: Value, asked: SimpleNamespace
    ) -> None:
        """One row of one expert, times the expert's weight."""
        plan = self.plan
        row, index = divided(item, plan.fan)
        at = p.add(sums, p.mul(p.add(p.mul(row, plan.pitch), p.mul(index, plan.slots)), 4))
        value = self.row_value(self.total(at, 0, plan.slots), asked, 0)
        value = arith.mulf(value, asked.weight)
        if asked.is_own is not None:
            value = arith.select(asked.is_own, value, p.cf(0.0))
        p.store_shared(p.add(p.shared_address(self.smem.parts), p.mul(item, 4)), [value])

    def store(self, token: Value, index: Value, value: Value) -> None:
        """The only rounding."""
        at = p.add(p.mul(token, self.plan.results), index)
        if self.out_kind == "f32":
            p.store_global(p.offset(self.memory["out"], at, 4), [value])
        else:
            p.store_global_half(p.offset(self.memory["out"], at, 2), p.narrow(value, "bf16"))

"""The product of one row on Hopper, ``x[K] w[N, K]^T``, and the work around it.

Contract.  w is in the plain layout: bfloat16, int8 with one scale a row, int4 in groups of 32, 64
or 128, MXFP4, NVFP4, or float8 in groups of 64 or 128. x is bfloat16.  Every instruction of a
warp reads 512 bytes of one row of w that lie side by side, into registers.  The warp multiplies
them there: one row needs no tile in shared memory.

A row may end inside the last read (``plan.row_plan``): int4 in groups of 128 at a multiple of 128
columns, float8 at one of 64, float4 and int4 in smaller groups at one of 32.

Division of work.  A block of 16 or 24 warps per SM, or two of 8.  A warp has one or two rows of w
at a time (with SwiGLU a row of gate and its row of up).  Neighbouring warps have neighbouring rows,
so all SMs read from one place of w.  With one block an SM, all blocks have a share of a last round
that is not full.

    all      the first of w -> L2 | the kernel before has ended | x and the norm's weight, then the
             first of w -> registers             (``prefetch``, ``Input.ask``, ``load``)
    all      x times that weight -> shared memory; sum of x's squares; barrier     (``Input.store``)
    warp     per group of 4 loads: the next group -> registers, multiply this one   (``row_loops``)
    warp     sum over lanes; lane 0: fused parts, one rounding, store                   (``finish``)

Copies: each lane loads its own codes into registers, a group ahead of their use.  All threads load
x and the norm's weight into registers and store their product in shared memory.
Waits: all threads at one block barrier, until x is stored; after it no warp waits for another.
A product that posts has one more barrier a round (``Poster``).  A posted sum is polled.
Writes: lane 0 of a warp stores its unit's results.  Block 0 stores the sum of x and what was
pending.  With ``Poster`` warp i posts the block's results to device i; further warps post nothing.
All threads empty the slot of two sums ago.

Numerics.  Float32, in an order that depends on K alone.  The norm's factor and an int8 row's scale
multiply the sum.  x times the norm's weight stays float32 beside bfloat16 and int8.  Beside int4 in
groups of 128 it is rounded once to float16, divided by a power of two that 256 columns share, and a
group's sum is scaled.  Beside float8, float4 and int4's smaller groups it is rounded once to
bfloat16.  Sums of float8's groups are scaled.  Scales of float4 multiply the weights, exactly.
Those of int4's smaller groups multiply the weights, too, and that product is rounded to bfloat16.

Floor: w's bytes at 4.3 TB/s.  On an H200, us [floor]: 28672 x 4096 with norm and SwiGLU bfloat16
54.2 [54.6], int8 29.0 [27.3], int4 16.3 [14.5].  The other shapes and attempts:
``docs/lab/matmul.md``.
Command: ``python -m benchmarks.kernels.matmul quantized_matmul --tokens 1``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows.operands import (
    FewRowsOperands,
    as_float,
    lane_sums,
    load_word,
)
from pallas_kernels.matmul.few_rows.plan import RowDivision
from pallas_kernels.matmul.few_rows.posted import Posts
from pallas_kernels.matmul.few_rows.row_loops import Floats, Nibbles, loop_class
from pallas_kernels.matmul.few_rows.row_x import Input
from pallas_kernels.matmul.few_rows.several import RowOffsets, Several
from pallas_kernels.ptx import Value

_STREAMED = ".L1::no_allocate"
SCRATCH = "x", "squares"  # as ``RowDivision.scratch_sizes`` has it


@dataclasses.dataclass(frozen=True)
class WeightRows:
    """A warp's rows of w, one unit of them after the other.

    places: of whole rows of "w", "scale" and "zero".
    w: the lane's place in a row.
    last_w, last_loop: w and loop of a short chunk, where lanes past the row's end have the place of
    the last lane inside.  They multiply it by the zeros behind x.
    """

    plan: RowDivision
    operands: FewRowsOperands
    loop: Floats | Nibbles
    lane: Value
    places: Mapping[str, RowOffsets]
    w: RowOffsets
    last_w: RowOffsets
    last_loop: Floats | Nibbles

    def of(self, unit: Value) -> list[Value]:
        """The unit's rows: side by side, or one of gate and one of up."""
        swiglu = self.operands.swiglu
        row = unit if swiglu else unit * self.plan.rows
        return [row, row + (self.plan.units if swiglu else 1)][: self.plan.rows]

    def prefetch(self, unit: Value) -> None:
        """Asks for the unit's first loads, its scales and its zeros: a lane for each."""
        row_bytes = self.places["w"].stride
        runs = [(self.places["w"], min(row_bytes, 512 * len(self.plan.groups[0])))]
        if self.loop.in_groups:
            parts = self.places["scale"], self.places["zero"]
            runs += [(place, place.stride) for place in parts if place.base is not None]

        def one(place: RowOffsets, row: Value, size: int) -> None:
            p.prefetch(place.of(row), size)

        for i, row in enumerate(self.of(unit)):
            for j, (place, size) in enumerate(runs):
                if place.stride % 16 == 0:
                    mine = p.equal(self.lane, len(runs) * i + j)
                    p.when(mine, functools.partial(one, place, row, size))

    def load(self, unit: Value, group: Sequence[int]) -> list[Value]:
        """Load a lane's part of these chunks of the unit's rows.

        That is 4 words of each row, and with groups of columns its own scale and zero.
        """
        rows = self.of(unit)
        whole = [chunk for chunk in group if not self.plan.is_short(chunk)]
        out = self.load_from(self.w, self.loop, rows, whole) if whole else []
        if len(whole) < len(group):
            out += self.load_from(self.last_w, self.last_loop, rows, group[-1:])
        return out

    def load_from(
        self, w: RowOffsets, loop: Floats | Nibbles, rows: Sequence[Value], group: Sequence[int]
    ) -> list[Value]:
        out = []
        places = [w.of(row) for row in rows]
        vectors = [self.vectors_of(loop, row) for row in rows] if loop.in_groups else []
        for chunk in group:
            for place in places:
                out += p.load_global(place, 4, 512 * chunk, cache=_STREAMED)
            out += [v for at in vectors for v in loop.vectors(at, chunk)]
        return out

    def vectors_of(self, loop: Nibbles, row: Value) -> list[Value]:
        """Where the lane's scale, and zero, of the row's first chunk are."""
        parts = self.places["scale"], self.places["zero"]
        return [part.moved(at, row) for part, at in zip(parts, loop.vectors_of(row), strict=False)]

    @property
    def ends(self) -> dict[str, str]:
        """Operands in device memory that ``FewRowsOperands.finish`` takes: {parameter: name}."""
        names = {"scales": "scale", "biases": "bias", "residual": "residual"}
        if self.loop.in_groups:
            del names["scales"]
        if self.operands.weight.float4 and self.operands.weight.has_unit:
            names["scales"] = "zero"
        return {
            key: name for key, name in names.items() if getattr(self.operands, name) is not None
        }

    def ask(self, unit: Value) -> list[Value]:
        """Request the unit's ``ends``, as words: a conversion would wait for them."""
        rows, operands = self.of(unit), self.operands

        def base(name: str, row: Value) -> Value:
            at = getattr(operands, name)
            return self.places[name].moved(at, row) if name in self.places else at

        return [
            load_word(base(name, row), row, operands.kinds[name])
            for name in self.ends.values()
            for row in rows
        ]

    def finish(
        self,
        unit: Value,
        sums: Sequence[Value],
        asked: Sequence[Value],
        factor: Value | None,
        kept: Value | None,
    ) -> None:
        """kept: shared memory for the results of a block that posts them; None stores them."""
        totals = lane_sums(self.loop.totals(sums))

        def store():
            words = iter(asked)
            ends = {
                key: [as_float(next(words), self.operands.kinds[name]) for _ in totals]
                for key, name in self.ends.items()
            }
            values = self.operands.finish(totals, factor=factor, **ends)
            if kept is not None:
                for i, value in enumerate(values):
                    p.store_shared(kept, [value], 4 * i)
                return
            first = unit * len(values)
            for i, value in enumerate(values):
                self.operands.store(first + i, value)

        p.when(self.lane < 1, store)


@dataclasses.dataclass(frozen=True)
class Poster:
    """A block's results of a round, which lie side by side, on their way to all devices.

    Warp i posts all of them to device i, so that few large packets cross the link.

    kept: shared memory for the results of two rounds, which take turns.
    place: this row's place in the mailbox of the warp's device.
    """

    plan: RowDivision
    posts: Posts
    kept: Value
    place: Value
    block: Value
    warp: Value
    lane: Value

    def buffer(self, turn: Value) -> Value:
        """Return where the warp keeps its results of a round."""
        size, rows = self.plan.warps * self.plan.rows, self.plan.rows
        return self.kept + (turn & 1) * (4 * size) + self.warp * (4 * rows)

    def post(self, turn: Value) -> None:
        """By all warps, behind a round."""
        p.barrier()
        size = self.plan.warps * self.plan.rows
        first = turn * self.plan.blocks + self.block
        row = first * size + self.lane
        is_mine = (self.lane < size) & (row < self.posts.width)
        kept = self.kept + (turn & 1) * (4 * size) + self.lane * 4

        def store():
            p.post(p.offset(self.place, row, 4), p.load_float(kept))

        p.when(is_mine & (self.warp < self.posts.peers), store)


class RowProgram:
    """The program of one block.  Everything is emitted while the kernel is traced.

    smem: x, and squares of it.  block: its number, if it is not the grid's.  several: the weights
    behind w.
    """

    def __init__(
        self,
        plan: RowDivision,
        operands: FewRowsOperands,
        smem: SimpleNamespace,
        block: Value | None = None,
        several: Several | None = None,
    ):
        self.plan, self.operands = plan, operands
        self.xs, self.squares = (p.shared_address(getattr(smem, name)) for name in SCRATCH)
        self.thread = p.register("tid.x")
        self.warp, self.lane = self.thread >> 5, self.thread & 31
        self.block = p.register("ctaid.x") if block is None else block
        self.place_units()
        self.rows = self.place_rows(several)
        self.place_sums()

    def place_units(self) -> None:
        """The warp's first and last unit.  Neighbouring warps of a block have neighbours."""
        plan = self.plan
        self.stride = plan.blocks * plan.warps
        behind = self.stride * (plan.rounds - 1)
        self.first = self.block * plan.warps + self.warp
        self.last = self.first + behind
        if plan.spread and plan.is_last_short and self.operands.post is None:
            # Each block has a share of the last round, not the first blocks all of it.  Posted rows
            # of a block stand behind each other.
            self.last = self.warp * plan.blocks + self.block + behind
            self.first = self.first if plan.rounds > 1 else self.last

    def place_rows(self, several: Several | None) -> WeightRows:
        plan, operands, lane = self.plan, self.operands, self.lane
        places = {
            "w": RowOffsets(operands.w, plan.k * plan.bits // 8),
            "scale": RowOffsets(operands.scale, operands.weight.scale_row),
            "zero": RowOffsets(operands.zero, operands.weight.zero_row),
        }
        if several is not None:
            places = several.added_to(places, operands)
        w = places["w"].from_base(p.offset(operands.w, lane, 16))
        make_loop = functools.partial(loop_class(operands.weight).of, plan, operands, self.xs)
        loop = last_loop = make_loop(lane)
        last_w = w
        if plan.last_lanes < 32:
            last_lane = p.minimum(lane, plan.last_lanes - 1)
            last_w = w.from_base(p.offset(operands.w, last_lane, 16))
            last_loop = make_loop(last_lane)
        return WeightRows(plan, operands, loop, lane, places, w, last_w, last_loop)

    def place_sums(self) -> None:
        """What the sums over devices need: where a pending one lies, and who posts the result."""
        operands, posts = self.operands, self.operands.posts
        slot = None if operands.posted is None else posts.slot(operands.posted)
        self.poster = None
        if operands.post is not None:  # without a norm, so that the memory for squares is free
            place = posts.place(operands.post, self.warp)
            where = self.squares, place, self.block, self.warp, self.lane
            self.poster = Poster(self.plan, posts, *where)
        self.source = Input(self.plan, operands, self.rows.loop, self.thread, self.squares, slot)

    def run(self, *, waits: bool = True) -> None:
        """waits: for the kernel before; False if that has ended (``experts.kernel``)."""
        plan, poster = self.plan, self.poster
        ready, ends = self.begin(waits)
        self.n_ready = len(ready)
        p.barrier()  # x is there
        self.factor = self.source.factor()
        if plan.rounds > 1:
            carry = p.loop(0, plan.rounds - 1, 1, [*ready, *ends], self.round)
            ready, ends = carry[: self.n_ready], carry[self.n_ready :]
        turn = p.ci(plan.rounds - 1)
        p.when(self.last < plan.units, lambda: self.product(turn, self.last, ready, ends))
        if poster is not None:
            poster.post(turn)

    def begin(self, waits: bool) -> tuple[list[Value], list[Value]]:
        """x to shared memory; (words, ends) of the first unit's first group, on their way."""
        plan, operands, rows, source = self.plan, self.operands, self.rows, self.source
        start = p.minimum(self.first, plan.units - 1)
        if waits:
            operands.prefetch(self.thread)
            rows.prefetch(start)
            p.await_kernel()
        if operands.post is not None:
            threads = 32 * plan.warps
            number = self.block * threads + self.thread
            operands.posts.empty(operands.post, number, threads * plan.blocks)
        asked = source.ask(early=True)
        ready = rows.load(start, plan.groups[0])
        # A unit's bias comes with its first loads: a trip to memory of its own would be waited for.
        ends = rows.ask(start)
        source.store(asked, self.warp, self.lane)
        return ready, ends

    def round(self, i: Value, carry: list[Value]) -> list[Value]:
        """A unit, and the first loads of the next one."""
        unit = i * self.stride + self.first
        later = p.where(i < self.plan.rounds - 2, unit + self.stride, self.last)
        # A warp without another unit reads its first one again, and stores nothing of it.
        later = p.where(later < self.plan.units, later, self.first)
        carry = self.product(i, unit, carry[: self.n_ready], carry[self.n_ready :], later)
        if self.poster is not None:
            self.poster.post(i)
        return carry

    def product(
        self,
        turn: Value,
        unit: Value,
        ready: list[Value],
        ends: list[Value],
        later: Value | None = None,
    ) -> list[Value]:
        """Multiply a unit, group by group, and finish it.

        later: the warp's next unit, whose first loads and ends are returned.
        """
        rows, groups, following = self.rows, self.plan.groups, ends
        sums = rows.loop.nothing()
        for i, group in enumerate(groups):
            now = ready
            if i + 1 < len(groups):
                ready = rows.load(unit, groups[i + 1])
            elif later is not None:
                ready, following = rows.load(later, groups[0]), rows.ask(later)
            sums = rows.loop.group(group, now, sums)
        kept = None if self.poster is None else self.poster.buffer(turn)
        rows.finish(unit, sums, ends, self.factor, kept)
        return [*ready, *following]

"""The product of one row with a weight that no kernel of the program writes: a deep ring.

Contract.  That of ``row``, for bfloat16, int8 with one scale a row and int4 in groups of 128, with
or without integer zeros.  The weight is settled (``call.settled_weights``): it may be read before
the kernel before has ended.

Division of work.  A block has half of an SM: its registers and its shared memory.  So two kernels
in succession live on one SM, and the second one's weights arrive while the first one works.

    warp     all slots of its ring <- the first pieces of its rows of w         (``Ring.fill``)
    all      the kernel before has ended | x and the norm's weight -> shared memory, as in ``row``
    warp     per piece: its slot is full; multiply; the slot <- a later piece
    warp     sum over lanes; lane 0: fused parts, one rounding, store

Each warp has a ring of its own.  A slot has one piece of the warp's two rows of w, with the scales
and zeros of its columns.  Lane 0 starts the bulk copies, and a barrier a slot counts their bytes.
The warp that has multiplied a slot fills it again, so no barrier says "empty".

Numerics.  Those of ``row``: float32, in an order that depends on K alone.

Floor: w's bytes at 4.3 TB/s.  Measured: ``docs/lab/launches.md``.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.ring_plan import RingPlan
from pallas_kernels.matmul.few_rows.row import Input, WeightRows
from pallas_kernels.matmul.few_rows.row_loops import Floats, Nibbles
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

SCRATCH = "x", "squares", "ring", "barriers"  # as ``RingPlan.scratch_sizes`` has it


@dataclasses.dataclass(frozen=True)
class Ring:
    """A warp's slots.  base, barriers: addresses of its own in shared memory."""

    plan: RingPlan
    scheme: FewRowsScheme
    rows: WeightRows
    lane: Value
    base: Value
    barriers: Value

    def initialise(self) -> None:
        def body() -> None:
            for slot in range(self.plan.depth):
                p.barrier_init(p.add(self.barriers, 8 * slot), 1)
            p.barriers_ready()

        p.when(p.less(self.lane, 1), body)
        p.warp_barrier()

    def full(self, slot: Value) -> Value:
        """The slot's barrier."""
        return p.add(self.barriers, p.mul(slot, 8))

    def fill(self, unit: Value, piece: Value, slot: Value) -> None:
        """Copy a piece of the unit's rows; nothing if there is no such unit."""
        is_mine = arith.andi(p.less(self.lane, 1), p.less(unit, self.plan.units))
        p.when(is_mine, functools.partial(self._copy, unit, piece, slot))

    def _copy(self, unit: Value, piece: Value, slot: Value) -> None:
        plan, operands, full = self.plan, self.rows.operands, self.full(slot)
        at = p.add(self.base, p.mul(slot, plan.slot_bytes))
        p.barrier_expect(full, plan.slot_bytes)
        indices = [p.add(p.mul(row, plan.pieces), piece) for row in self.rows.of(unit)]
        start = 0
        for base, size in (
            (operands.w, plan.piece_bytes),
            (operands.scale, plan.scale_bytes),
            (operands.zero, plan.zero_bytes),
        ):
            for index in indices if size else ():
                assert base is not None
                p.copy_bulk(at, p.offset_rows(base, index, size), size, full, start)
                start += size

    def words(self, slot: Value) -> list[Value]:
        """The lane's words of a slot, in the order of ``WeightRows.load``."""
        plan, scheme = self.plan, self.scheme
        at = p.add(self.base, p.mul(slot, plan.slot_bytes))
        lane, group = p.add(at, p.mul(self.lane, 16)), p.shift_right(self.lane, 2)
        scales, zeros = p.add(at, p.mul(group, scheme.scale_bytes)), p.add(at, group)
        out = []
        for chunk in range(plan.piece_bytes // 512):
            for i in range(plan.rows):
                out += p.load_shared(lane, 4, i * plan.piece_bytes + 512 * chunk)
            for i in range(plan.rows if plan.scale_bytes else 0):
                begin = plan.rows * plan.piece_bytes
                own = begin + i * plan.scale_bytes + 8 * scheme.scale_bytes * chunk
                if scheme.scale_kind == "f32":
                    out.append(p.load_float(scales, own))
                else:
                    out.append(p.load_shared_narrow(scales, "u16", own))
                own = begin + plan.rows * plan.scale_bytes + i * plan.zero_bytes + 8 * chunk
                out.append(self._offset(zeros, own))
        return out

    def _offset(self, zeros: Value, at: int) -> Value:
        """What is taken off pairs of codes: ``Nibbles.vectors``."""
        bias = p.ci(self.scheme.bias)
        if not self.plan.zero_bytes:
            return bias
        zero = p.load_shared_narrow(zeros, "s8", at)
        return arith.addi(bias, p.mul(zero, 0x00010001))

    def after(self, slot: Value, parity: Value) -> list[Value]:
        """The next slot, and the parity of its barrier."""
        wraps = p.equal(slot, self.plan.depth - 1)
        parity = arith.select(wraps, arith.xori(parity, p.ci(1)), parity)
        return [arith.select(wraps, p.ci(0), p.add(slot, 1)), parity]


def run(
    plan: RingPlan, scheme: FewRowsScheme, operands: FewRowsOperands, smem: SimpleNamespace
) -> None:
    """Emit one block's program while the kernel is traced.  smem: by the names of ``SCRATCH``."""
    xs, squares, slots, barriers = (p.shared_address(getattr(smem, name)) for name in SCRATCH)
    thread = p.register("tid.x")
    warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
    # Blocks first, then warps: the last round's units are spread over all SMs.
    first = p.add(p.mul(warp, plan.blocks), p.register("ctaid.x"))
    kind = Nibbles if plan.bits == 4 else Floats
    loop = kind.of(plan, scheme, operands, xs, lane)
    source = Input(plan, operands, loop, thread, squares)
    rows = WeightRows(plan, scheme, operands, loop, lane, operands.w, operands.w, loop)
    ring = Ring(
        plan,
        scheme,
        rows,
        lane,
        base=p.add(slots, p.mul(warp, plan.depth * plan.slot_bytes)),
        barriers=p.add(barriers, p.mul(warp, 8 * plan.depth)),
    )
    stride, pieces, chunks = plan.blocks * plan.warps, plan.pieces, plan.piece_bytes // 512

    def fill_all() -> None:
        for i in range(plan.depth):
            ring.fill(p.add(first, stride * (i // pieces)), p.ci(i % pieces), p.ci(i))

    ring.initialise()
    p.read_settled(fill_all)
    p.await_kernel()
    source.store(source.ask(early=True), warp, lane)
    p.barrier()
    factor = source.factor()

    def multiply(unit: Value, piece: Value | int, slot: Value, parity: Value, sums):
        """A piece of the unit's rows, and a later one into its slot."""
        p.barrier_wait(ring.full(slot), parity)
        words, moved = ring.words(slot), loop
        if isinstance(piece, int):
            ahead = piece + plan.depth
            later, ahead = p.add(unit, stride * (ahead // pieces)), p.ci(ahead % pieces)
        else:
            at = p.add(xs, p.mul(piece, chunks * plan.chunk_bytes))
            moved = dataclasses.replace(loop, xs=at)
            ahead = p.add(piece, plan.depth)
            rounds = arith.divui(ahead, p.ci(pieces))
            later = p.add(unit, p.mul(rounds, stride))
            ahead = arith.subi(ahead, p.mul(rounds, pieces))
        start = piece * chunks if isinstance(piece, int) else 0
        sums = moved.group(range(start, start + chunks), words, sums)
        p.warp_barrier()
        ring.fill(later, ahead, slot)
        return sums, ring.after(slot, parity)

    def step(i: Value, carry: list[Value]) -> list[Value]:
        unit = p.add(p.mul(i, stride), first)
        asked, sums = rows.ask(unit), loop.nothing()
        if pieces <= plan.unrolled:
            for piece in range(pieces):
                sums, carry = multiply(unit, piece, *carry, sums)
        else:
            flat, tree = jax.tree.flatten(sums)

            def one(piece: Value, state: list[Value]) -> list[Value]:
                slot, parity, *flat = state
                sums, after = multiply(unit, piece, slot, parity, tree.unflatten(flat))
                return [*after, *jax.tree.leaves(sums)]

            slot, parity, *flat = p.loop(0, pieces, 1, [*carry, *flat], one)
            sums, carry = tree.unflatten(flat), [slot, parity]
        rows.finish(unit, sums, asked, factor)
        return carry

    last = p.ci(plan.units + stride - 1)
    rounds = arith.divui(arith.subi(last, first), p.ci(stride))
    p.loop(0, rounds, 1, [p.ci(0), p.ci(0)], step)

"""The probe's kernel: one row times a weight, in blocks of half an SM with a deep ring.

Each warp has a ring of its own: ``depth`` slots of one piece of its two rows of w, with their
scales.  Lane 0 starts the bulk copies; one mbarrier a slot counts the bytes.  The warp that has
multiplied a slot fills it again, so no warp produces for others and no barrier says "empty".  The
norm, x, the products and the fused work are those of the one-row kernel (``few_rows.row``).

``order`` says what stands before ``griddepcontrol.wait``:

    after     wait, then the next kernel may begin, then fill the ring
    before    fill the ring, wait, then the next may begin
    half      fill half of the ring, wait, then the next may begin, ask for x, fill the rest
    x first   wait, then the next may begin, ask for x, fill the ring
    early     the next may begin, fill the ring, wait
    nobody    fill the ring, and no wait: wrong values, the bound of any such form

Only weights that no kernel of the same program computes may be read before the wait.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.kernel import Weight, kinds_of, parts_of
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import RowPlan, divide_row
from pallas_kernels.matmul.few_rows.row import Input, WeightRows
from pallas_kernels.matmul.few_rows.row_loops import Floats, Nibbles
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

WARPS = 12  # of 80 registers a thread: two such blocks have the registers of an SM
HALF_SM = 112 * 1024  # of 228 KB, less what a block has besides
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """row: of x and of a warp's rows.  ring: bytes of a block at most.  piece: bytes of a row in a
    slot at most.  order: of filling and waiting, see the module."""

    row: RowPlan
    scale_bytes: int  # of a row of w
    ring: int
    order: str
    piece: int
    one_sm: bool = False  # nothing else needs room on the SM

    @property
    def row_bytes(self) -> int:
        return self.row.k * self.row.bits // 8

    @property
    def piece_bytes(self) -> int:
        return min(self.row_bytes, self.piece)

    @property
    def pieces(self) -> int:
        return self.row_bytes // self.piece_bytes

    @property
    def scale_piece(self) -> int:
        return self.scale_bytes // self.pieces

    @property
    def slot_bytes(self) -> int:
        return self.row.rows * (self.piece_bytes + self.scale_piece)

    @property
    def depth(self) -> int:
        x_bytes, codes = self.row.scratch_sizes(normed=True)[0], self.row.rows * self.piece_bytes
        wanted = self.ring // (self.row.warps * codes)
        fits = (HALF_SM - 2048 - x_bytes) // (self.row.warps * self.slot_bytes)
        return max(1, wanted if self.one_sm else min(wanted, fits))

    @property
    def blocks(self) -> int:
        return min(self.row.sms, -(-self.row.units // self.row.warps))


def plan_of(
    w: Weight, swiglu: bool, ring: int, order: str, warps: int = WARPS, piece: int = 1024
) -> RingPlan:
    row = divide_row(w, swiglu)
    row = dataclasses.replace(row, rows=2, units=w.shape[0] // 2, warps=warps)
    scale_bytes = FewRowsScheme.of(w, "bf16").scale_row if row.bits == 4 else 0
    return RingPlan(row, scale_bytes, ring * 1024, order, piece, one_sm=ring > 96)


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

    def fill(self, unit: Value, piece: int, slot: Value) -> None:
        """Copy a piece of the unit's rows and its scales; by lane 0, if there is such a unit."""
        plan, operands = self.plan, self.rows.operands
        exists = arith.andi(p.less(self.lane, 1), p.less(unit, plan.row.units))

        def body() -> None:
            full = p.add(self.barriers, p.mul(slot, 8))
            at = p.add(self.base, p.mul(slot, plan.slot_bytes))
            p.barrier_expect(full, plan.slot_bytes)
            for i, row in enumerate(self.rows.of(unit)):
                index = p.add(p.mul(row, plan.pieces), piece)
                source = p.offset_rows(operands.w, index, plan.piece_bytes)
                p.copy_bulk(at, source, plan.piece_bytes, full, i * plan.piece_bytes)
                if plan.scale_bytes:
                    source = p.offset_rows(operands.scale, index, plan.scale_piece)
                    begin = plan.row.rows * plan.piece_bytes + i * plan.scale_piece
                    p.copy_bulk(at, source, plan.scale_piece, full, begin)

        p.when(exists, body)

    def words(self, slot: Value) -> list[Value]:
        """The lane's words of a slot, in the order of ``WeightRows.load``."""
        plan = self.plan
        at = p.add(self.base, p.mul(slot, plan.slot_bytes))
        lane = p.add(at, p.mul(self.lane, 16))
        group = p.add(at, p.mul(p.shift_right(self.lane, 2), self.scheme.scale_bytes))
        out = []
        for chunk in range(plan.piece_bytes // 512):
            for i in range(plan.row.rows):
                out += p.load_shared(lane, 4, i * plan.piece_bytes + 512 * chunk)
            for i in range(plan.row.rows if plan.scale_bytes else 0):
                begin = plan.row.rows * plan.piece_bytes + i * plan.scale_piece
                begin += 8 * self.scheme.scale_bytes * chunk
                out += [p.load_shared_narrow(group, "u16", begin), p.ci(self.scheme.bias)]
        return out


def _mark() -> None:
    owner = ir.InsertionPoint.current.block.owner
    while owner.parent is not None:
        owner = owner.parent
    owner.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()


def allow_next() -> None:
    """The kernel behind this one may begin, and this one waits for none before it."""
    if p._overlaps():
        p.ptx("griddepcontrol.launch_dependents;")
        _mark()


def run(plan: RingPlan, scheme: FewRowsScheme, operands: FewRowsOperands, smem: Any) -> None:
    """Emit a block's program while the kernel is traced."""
    xs, squares, ring_at, barriers = (
        p.shared_address(getattr(smem, name)) for name in ("x", "squares", "ring", "barriers")
    )
    thread = p.register("tid.x")
    warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
    # The last round's units are spread over all SMs.
    first = p.add(p.mul(warp, plan.blocks), p.register("ctaid.x"))
    kind = Nibbles if plan.row.bits == 4 else Floats
    loop = kind.of(plan.row, scheme, operands, xs, lane)
    source = Input(plan.row, operands, loop, thread, squares)
    rows = WeightRows(plan.row, scheme, operands, loop, lane, operands.w, operands.w, loop)
    ring = Ring(
        plan,
        scheme,
        rows,
        lane,
        p.add(ring_at, p.mul(warp, plan.depth * plan.slot_bytes)),
        p.add(barriers, p.mul(warp, 8 * plan.depth)),
    )
    stride, pieces, chunks = plan.blocks * plan.row.warps, plan.pieces, plan.piece_bytes // 512

    def fill(begin: int, end: int) -> None:
        for i in range(begin, end):
            ring.fill(p.add(first, stride * (i // pieces)), i % pieces, p.ci(i))

    early = {"after": 0, "x first": 0, "half": plan.depth // 2}.get(plan.order, plan.depth)
    if plan.order == "early":
        allow_next()
    ring.initialise()
    fill(0, early)
    (allow_next if plan.order == "nobody" else p.await_kernel)()
    if plan.order == "after":
        fill(early, plan.depth)
    asked = source.ask(early=True)
    if plan.order in ("half", "x first"):
        fill(early, plan.depth)
    source.store(asked, warp, lane)
    p.barrier()
    factor = source.factor()

    def step(i: Value, carry: list[Value]) -> list[Value]:
        unit = p.add(p.mul(i, stride), first)
        slot, parity = carry
        asked, sums = rows.ask(unit), loop.nothing()
        for piece in range(pieces):
            p.barrier_wait(p.add(ring.barriers, p.mul(slot, 8)), parity)
            words = ring.words(slot)
            sums = loop.group(range(piece * chunks, (piece + 1) * chunks), words, sums)
            p.warp_barrier()
            ahead = piece + plan.depth
            ring.fill(p.add(unit, stride * (ahead // pieces)), ahead % pieces, slot)
            wraps = p.equal(slot, plan.depth - 1)
            parity = arith.select(wraps, arith.xori(parity, p.ci(1)), parity)
            slot = arith.select(wraps, p.ci(0), p.add(slot, 1))
        rows.finish(unit, sums, asked, factor)
        return [slot, parity]

    units = p.ci(plan.row.units + stride - 1)
    rounds = arith.divui(arith.subi(units, first), p.ci(stride))
    p.loop(0, rounds, 1, [p.ci(0), p.ci(0)], step)


@functools.partial(jax.jit, static_argnames=("swiglu", "plan"))
def ring_matmul(
    x: jax.Array,
    w: Weight,
    *,
    plan: RingPlan,
    gamma: jax.Array | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
) -> jax.Array:
    """x [1, K] bf16, w [N, K] -> [1, N] (with SwiGLU N / 2) bf16: the product and what is fused."""
    n, k = w.shape
    inputs = {"x": x, **parts_of(w), "gamma": gamma, "residual": residual}
    outs = {"out": jax.ShapeDtypeStruct((1, n // 2 if swiglu else n), x.dtype)}
    facts = {"k": k, "kinds": kinds_of(inputs | outs), "eps": EPS, "swiglu": swiglu}
    scheme = FewRowsScheme.of(w, "bf16")

    def body(gmem: Any, smem: Any) -> None:
        run(plan, scheme, FewRowsOperands.of(vars(gmem), **facts), smem)

    x_bytes, square_bytes = plan.row.scratch_sizes(normed=True)
    sizes = {
        "x": x_bytes,
        "squares": square_bytes,
        "ring": plan.row.warps * plan.depth * plan.slot_bytes,
        "barriers": 8 * plan.row.warps * plan.depth,
    }
    (out,) = launch(
        body,
        inputs,
        outs,
        name="ring_probe",
        grid=plan.blocks,
        warpgroups=plan.row.warps // 4,
        scratch={name: size // 4 for name, size in sizes.items()},
        registers=True,
    )
    return out

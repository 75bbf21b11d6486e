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

Numerics.  Float32, in an order that depends on K alone.  The norm's factor and an int8 row's scale
multiply the sum.  x times the norm's weight stays float32.  Beside int4 it is rounded once to
float16, divided by a power of two that 256 columns share, and a group's sum is scaled.  Beside
float4 it is rounded once to bfloat16, and the scales multiply the weights, exactly.  Scales of
int4's smaller groups multiply the weights, too, and that product is rounded to bfloat16.

Floor: w's bytes at 4.3 TB/s.  On an H200, us [floor]: 28672 x 4096 with norm and SwiGLU bfloat16
54.2 [54.6], int8 29.0 [27.3], int4 16.3 [14.5].  The other shapes and attempts:
``docs/lab/matmul.md``.
Command: ``python -m benchmarks.kernels.matmul quantized_matmul --tokens 1``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.fused_parts import floats
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.operands import (
    FewRowsOperands,
    add_squares,
    as_float,
    load_word,
    over_lanes,
)
from pallas_kernels.matmul.few_rows.plan import RowPlan
from pallas_kernels.matmul.few_rows.posted import Posts
from pallas_kernels.matmul.few_rows.row_loops import (
    Float4,
    Float8,
    Floats,
    FoldedNibbles,
    Nibbles,
)
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

_STREAMED = ".L1::no_allocate"
SCRATCH = "x", "squares"  # as ``RowPlan.scratch_sizes`` has it


@dataclasses.dataclass(frozen=True)
class Input:
    """x on its way to shared memory, to where the inner loop reads it.

    squares: shared memory of a sum for every warp.
    """

    plan: RowPlan
    operands: FewRowsOperands
    loop: Floats | Nibbles
    thread: Value
    squares: Value
    slot: Value | None

    def ask(self, early: bool):
        """8 values a thread of x and of the norm's weight, those that are asked for before the
        first of w, or the others: [(piece, is it one, is it x's, x, gamma, pending)]."""
        operands, pieces, of_x = self.operands, self.plan.padded_k // 8, self.plan.k // 8
        threads = 32 * self.plan.warps
        rounds = range(0, pieces, threads)
        at_once = 4 if operands.gamma is None else 2
        asked = []
        for first in rounds[:at_once] if early else rounds[at_once:]:
            piece = p.add(self.thread, first)
            inside = None
            if first + threads > pieces:
                # Threads behind the end store a piece a second time: behind a condition, the
                # assembler would put the loads of x last.  A warp's pieces stay neighbours.
                inside, piece = p.less(piece, pieces), arith.remui(piece, p.ci(pieces))
            source = piece if of_x == pieces else p.minimum(piece, of_x - 1)
            words, is_x = p.load_global(p.offset(operands.x, source, 16), 4), None
            if of_x < pieces:
                is_x = p.less(piece, of_x)
                words = [arith.select(is_x, word, p.ci(0)) for word in words]
            gamma = None if operands.gamma is None else self.eight("gamma", source)
            pending = None
            if self.slot is not None:
                pending = operands.posts.ask(self.slot, source)
            elif operands.pending is not None:
                pending = self.eight("pending", source)
            asked.append((piece, inside, is_x, words, gamma, pending))
        return asked

    def eight(self, name: str, piece: Value) -> list[Value]:
        size = 32 if self.operands.kinds[name] == "f32" else 16
        return self.operands.eight(name, p.offset(getattr(self.operands, name), piece, size))

    def store(self, asked, warp: Value, lane: Value) -> None:
        """x times the norm's weight to shared memory, and the warps' sums of x's squares."""
        total = p.cf(0.0)
        for piece, inside, is_x, words, gamma, pending in [*asked, *self.ask(early=False)]:
            if self.slot is not None:
                source = p.minimum(piece, self.plan.k // 8 - 1)
                pending = self.operands.posts.total(pending, self.slot, source)
            if pending is not None:
                if is_x is not None:  # zeros behind x stay zeros
                    pending = [arith.select(is_x, value, p.cf(0.0)) for value in pending]
                place = functools.partial(p.offset, index=piece, stride=16)
                block = functools.partial(p.register, "ctaid.x")
                words = self.operands.store_total(words, pending, place, block, is_x)
            values = floats(words)
            if gamma is not None:
                is_one = None if inside is None else lambda inside=inside: inside
                total = add_squares(total, values, is_one)
                values = [arith.mulf(v, g) for v, g in zip(values, gamma, strict=True)]
            self.loop.store_x(piece, *self.loop.prepared(values))
        if self.operands.gamma is not None:
            (total,) = over_lanes([total])
            at = p.add(self.squares, p.mul(warp, 4))
            p.when(p.less(lane, 1), lambda: p.store_shared(at, [total]))

    def factor(self) -> Value | None:
        if self.operands.gamma is None:
            return None
        total = p.load_float(self.squares)
        for w in range(1, self.plan.warps):
            total = arith.addf(total, p.load_float(self.squares, 4 * w))
        return self.operands.factor(total)


@dataclasses.dataclass(frozen=True)
class WeightRows:
    """A warp's rows of w, one unit of them after the other.

    w: the lane's place in the first row.
    last_w, last_loop: w and loop of a short chunk, where lanes past the row's end have the place of
    the last lane inside.  They multiply it by the zeros behind x.
    """

    plan: RowPlan
    scheme: FewRowsScheme
    operands: FewRowsOperands
    loop: Floats | Nibbles
    lane: Value
    w: Value
    last_w: Value
    last_loop: Floats | Nibbles

    def of(self, unit: Value) -> list[Value]:
        """The unit's rows: side by side, or one of gate and one of up."""
        swiglu = self.operands.swiglu
        row = unit if swiglu else p.mul(unit, self.plan.rows)
        return [row, p.add(row, self.plan.units if swiglu else 1)][: self.plan.rows]

    def prefetch(self, unit: Value) -> None:
        """Asks for the unit's first loads, its scales and its zeros: a lane for each."""
        plan, scheme = self.plan, self.scheme
        row_bytes = plan.k * plan.bits // 8
        runs = [(self.operands.w, row_bytes, min(row_bytes, 512 * len(plan.groups[0])))]
        if self.loop.in_groups:
            parts = (self.operands.scale, scheme.scale_row), (self.operands.zero, scheme.zero_row)
            runs += [(base, row, row) for base, row in parts if base is not None]

        def one(base: Value, row: Value, apart: int, size: int) -> None:
            p.prefetch(p.offset(base, row, apart), size)

        for i, row in enumerate(self.of(unit)):
            for j, (base, apart, size) in enumerate(runs):
                if apart % 16 == 0:
                    mine = p.equal(self.lane, len(runs) * i + j)
                    p.when(mine, functools.partial(one, base, row, apart, size))

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
        self, w: Value, loop: Floats | Nibbles, rows: Sequence[Value], group: Sequence[int]
    ) -> list[Value]:
        out = []
        row_bytes = self.plan.k * self.plan.bits // 8
        places = [p.offset(w, row, row_bytes) for row in rows]
        vectors = [loop.vectors_of(row) for row in rows] if loop.in_groups else []
        for chunk in group:
            for place in places:
                out += p.load_global(place, 4, 512 * chunk, cache=_STREAMED)
            out += [v for at in vectors for v in loop.vectors(at, chunk)]
        return out

    @property
    def ends(self) -> dict[str, str]:
        """Operands in device memory that ``FewRowsOperands.finish`` takes: {parameter: name}."""
        names = {"scales": "scale", "biases": "bias", "residual": "residual"}
        if self.loop.in_groups:
            del names["scales"]
        if self.scheme.zero == "unit":
            names["scales"] = "zero"
        return {
            key: name for key, name in names.items() if getattr(self.operands, name) is not None
        }

    def ask(self, unit: Value) -> list[Value]:
        """Request the unit's ``ends``, as words: a conversion would wait for them."""
        rows, operands = self.of(unit), self.operands
        return [
            load_word(getattr(operands, name), row, operands.kinds[name])
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
        totals = over_lanes(self.loop.totals(sums))

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
            first = p.mul(unit, len(values))
            for i, value in enumerate(values):
                self.operands.store(p.add(first, i), value)

        p.when(p.less(self.lane, 1), store)


@dataclasses.dataclass(frozen=True)
class Poster:
    """A block's results of a round, which lie side by side, on their way to all devices.

    Each warp posts all of them to one device, so that few large packets cross the link.

    kept: shared memory for the results of two rounds, which take turns.
    place: this row's place in the mailbox of the warp's device.
    """

    plan: RowPlan
    posts: Posts
    kept: Value
    place: Value
    block: Value
    warp: Value
    lane: Value

    def buffer(self, turn: Value) -> Value:
        """Return where the warp keeps its results of a round."""
        size, rows = self.plan.warps * self.plan.rows, self.plan.rows
        return p.add(self.kept, p.mul(p.masked(turn, 1), 4 * size), p.mul(self.warp, 4 * rows))

    def post(self, turn: Value) -> None:
        """By all warps, behind a round."""
        p.barrier()
        size = self.plan.warps * self.plan.rows
        first = p.add(p.mul(turn, self.plan.blocks), self.block)
        row = p.add(p.mul(first, size), self.lane)
        is_mine = arith.andi(p.less(self.lane, size), p.less(row, self.posts.width))
        kept = p.add(self.kept, p.mul(p.masked(turn, 1), 4 * size), p.mul(self.lane, 4))

        def store():
            p.post(p.offset(self.place, row, 4), p.load_float(kept))

        p.when(arith.andi(is_mine, p.less(self.warp, self.posts.peers)), store)


def run(
    plan: RowPlan,
    scheme: FewRowsScheme,
    operands: FewRowsOperands,
    smem: SimpleNamespace,
    block: Value | None = None,
) -> None:
    """Emit one block's program while the kernel is traced.  smem: x, and squares of it.  block: its
    number, if it is not the grid's and the kernel before has ended (``experts.kernel``)."""
    xs, squares = (p.shared_address(getattr(smem, name)) for name in SCRATCH)
    thread = p.register("tid.x")
    warp = p.shift_right(thread, 5)
    lane = arith.andi(thread, p.ci(31))
    # Neighbouring warps of a block have neighbouring rows.
    has_waited = block is not None
    block = p.register("ctaid.x") if block is None else block
    groups, stride = plan.groups, plan.blocks * plan.warps
    first = p.add(p.mul(block, plan.warps), warp)
    last = p.add(first, stride * (plan.rounds - 1))
    if plan.spread and plan.is_last_short and operands.post is None:
        # Each block has a share of the last round, not the first blocks all of it.  Posted rows of
        # a block stand behind each other.
        last = p.add(p.mul(warp, plan.blocks), block, stride * (plan.rounds - 1))
        first = first if plan.rounds > 1 else last
    w = p.offset(operands.w, lane, 16)
    kind = (FoldedNibbles if scheme.fold else Nibbles) if plan.bits == 4 else Floats
    kind = Float4 if scheme.float4 else Float8 if scheme.float8 else kind
    make_loop = functools.partial(kind.of, plan, scheme)
    loop = last_loop = make_loop(operands, xs, lane)
    last_w = w
    if plan.last_lanes < 32:
        last_lane = p.minimum(lane, plan.last_lanes - 1)
        last_w = p.offset(operands.w, last_lane, 16)
        last_loop = make_loop(operands, xs, last_lane)
    posts, poster = operands.posts, None
    slot = None if operands.posted is None else posts.slot(operands.posted)
    if operands.post is not None:  # without a norm, so that the memory for squares is free
        place = posts.place(operands.post, warp)
        poster = Poster(plan, posts, squares, place, block, warp, lane)
    source = Input(plan, operands, loop, thread, squares, slot)
    rows = WeightRows(plan, scheme, operands, loop, lane, w, last_w, last_loop)

    start = p.minimum(first, plan.units - 1)
    if not has_waited:
        operands.prefetch(thread)
        rows.prefetch(start)
        p.await_kernel()
    if operands.post is not None:
        threads = 32 * plan.warps
        posts.empty(operands.post, p.add(p.mul(block, threads), thread), threads * plan.blocks)
    asked = source.ask(early=True)
    ready = rows.load(start, groups[0])
    # A unit's bias comes with its first loads: a trip to memory of its own would be waited for.
    ends = rows.ask(start)
    n_ready = len(ready)
    source.store(asked, warp, lane)
    p.barrier()
    factor = source.factor()

    def product(turn, unit, ready, ends, later=None):
        """later: the warp's next unit, whose first loads and ends are returned."""
        following = ends
        sums = loop.nothing()
        for i, group in enumerate(groups):
            now = ready
            if i + 1 < len(groups):
                ready = rows.load(unit, groups[i + 1])
            elif later is not None:
                ready, following = rows.load(later, groups[0]), rows.ask(later)
            sums = loop.group(group, now, sums)
        rows.finish(unit, sums, ends, factor, None if poster is None else poster.buffer(turn))
        return [*ready, *following]

    def step(i, carry):
        unit = p.add(p.mul(i, stride), first)
        later = arith.select(p.less(i, plan.rounds - 2), p.add(unit, stride), last)
        # A warp without another unit reads its first one again, and stores nothing of it.
        later = arith.select(p.less(later, plan.units), later, first)
        carry = product(i, unit, carry[:n_ready], carry[n_ready:], later)
        if poster is not None:
            poster.post(i)
        return carry

    if plan.rounds > 1:
        carry = p.loop(0, plan.rounds - 1, 1, [*ready, *ends], step)
        ready, ends = carry[:n_ready], carry[n_ready:]
    turn = p.ci(plan.rounds - 1)
    p.when(p.less(last, plan.units), lambda: product(turn, last, ready, ends))
    if poster is not None:
        poster.post(turn)

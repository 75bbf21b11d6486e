"""The end of a GLA layer's step: each head's norm and the gate, in float32.

    y = o * rsqrt(mean o^2 + eps) * weight * silu(gate)                per head

Where a head's blocks are a cluster, the step's kernel ends with this.  Elsewhere it ends with o,
and ``gated_norm`` is a kernel behind it, one warp per head.

Both take the squares in one order: the four columns of a lane, the lanes by halves, then the blocks
one by one.  Both emit the same instructions for it (``squares``, ``norm_factor``, ``finished``).  A
head's bits therefore depend neither on the number of rows nor on which of the two kernels ran.
Squares are added by fused multiply-adds.  XLA's form has no such order: it tiles its sums by the
number of rows.

Copies: a lane of ``gated_norm`` loads its four columns of each 128 of o, weight and gate.
Waits: for the kernel before.  A warp shares nothing with others; its lanes exchange sums by
shuffles.
Writes: a lane stores the same columns of y.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from pallas_kernels import ptx as p
from pallas_kernels.launch import launch
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import KIND, floats, packed, silu

_WIDTH = 128  # columns that a warp takes at once, four a lane


def squares(o: Sequence[Value], lanes: int) -> Value:
    """Sum of the squares of ``4 * lanes`` columns, which as many neighbouring lanes hold."""
    total = p.cf(0.0)
    for x in o:
        total = p.fma(x, x, total)
    return p.over_lanes(total, [d for d in p.WARP if d < lanes])


def finished(
    o: Sequence[Value], factor: Value, weight: Sequence[Value], gate: Sequence[Value] | None
) -> list[Value]:
    """The columns times the norm's factor and weight, and through the gate if there is one."""
    y = [x * factor * w for x, w in zip(o, weight, strict=True)]
    if gate is not None:
        y = [x * silu(g) for x, g in zip(y, gate, strict=True)]
    return y


def norm_factor(total: Value, dv: int, eps: float) -> Value:
    """``rsqrt(mean + eps)`` of a sum of squares of ``dv`` columns."""
    return p.rsqrt(p.fma(total, 1.0 / dv, eps))


@dataclasses.dataclass(frozen=True)
class HeadNormShape:
    """count: rows times heads.  columns: of a block of the step.

    pitch, start: of the gate's rows, in elements; a call without a gate has a pitch of 0.
    """

    count: int
    heads: int
    dv: int
    columns: int
    eps: float
    pitch: int
    start: int
    kind: str


class _Head:
    """One warp's head of a row."""

    def __init__(self, shape: HeadNormShape, gmem):
        self.shape, self.gmem = shape, gmem
        thread = p.register("tid.x")
        self.lane = thread & 31
        self.index = p.register("ctaid.x") * 4 + (thread >> 5)

    def run(self) -> None:
        p.await_kernel()
        p.when(self.index < self.shape.count, self.finish)

    def finish(self) -> None:
        shape, starts = self.shape, range(0, self.shape.dv, _WIDTH)
        column = self.lane * 4

        def place(ref: Value, first: Value, size: int) -> Value:
            """Address of the lane's first column of a row that begins at element ``first``."""
            return p.offset(p.offset(p.address(ref), first, size), column, size)

        def pairs(at: Value) -> list[list[Value]]:
            return [floats(p.load_global(at, 2, 2 * start), shape.kind) for start in starts]

        here = self.index * shape.dv
        at = place(self.gmem.o, here, 4)
        o = [p.load_global(at, 4, 4 * start, "f32") for start in starts]
        weight = pairs(place(self.gmem.weight, p.ci(0), 2))
        gates: list[list[Value] | None] = [None] * len(starts)
        if shape.pitch:
            row, head = self.index // shape.heads, self.index % shape.heads
            first = row * shape.pitch + head * shape.dv + shape.start
            gates = [*pairs(place(self.gmem.gate, first, 2))]
        factor = norm_factor(self.total(o), shape.dv, shape.eps)
        out = place(self.gmem.out, here, 2)
        for start, x, w, gate in zip(starts, o, weight, gates, strict=True):
            p.store_global(out, packed(finished(x, factor, w, gate), shape.kind), 2 * start)

    def total(self, o: Sequence[Sequence[Value]]) -> Value:
        """Sum of the head's squares in the step kernel's order: of every ``columns`` columns, a
        block's there, over their lanes; then of these sums from left to right."""
        total, lanes = None, self.shape.columns // 4
        for values in o:
            mine = squares(values, lanes)
            for first in range(0, 32, lanes):
                of_columns = mine if lanes == 32 else p.shuffle_from(mine, first)
                total = of_columns if total is None else total + of_columns
        assert total is not None
        return total


@functools.partial(jax.jit, static_argnames=("start", "eps", "columns"))
def gated_norm(
    o: jax.Array, weight: jax.Array, gate: jax.Array | None, *, start: int, eps: float, columns: int
) -> jax.Array:
    """Return the norm of each head of o through the gate, ``[N, H, Dv]`` of the weight's dtype.

    o: float32 ``[N, H, Dv]``; 128 divides Dv.  weight: bfloat16 or float16 ``[Dv]``.  gate:
    ``[N, pitch]``, rows with the gate of all heads from column ``start`` on.  columns: of a block
    of the step, 64 or 128.
    """
    n, heads, dv = o.shape
    pitch = 0 if gate is None else gate.shape[1]
    kind = KIND[weight.dtype.name]
    shape = HeadNormShape(n * heads, heads, dv, columns, eps, pitch, start, kind)
    (y,) = launch(
        lambda gmem, _: _Head(shape, gmem),
        {"o": o, "weight": weight, "gate": gate},
        {"out": jax.ShapeDtypeStruct((n, heads, dv), weight.dtype)},
        name="gla_head_norm",
        grid=-(-shape.count // 4),
        warpgroups=1,
        registers=True,
    )
    return y

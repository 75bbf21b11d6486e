"""Rows times their experts' prepared weights: the handler of ``grouped_matmul``.

    y[p] = x[p] @ w[e].T        for the pairs starts[e] <= p < starts[e + 1] of expert e

The pairs are sorted by expert.  A chunk is a run of tiles of one expert.  It does nothing if no
pair has that expert, so only the chosen experts' codes are read.  Everything else is as in
``cpu.matmul``: x is rounded to 8 bits in blocks, a block's sum is exact, and sums follow the order
of K.  So a pair's result does not depend on other pairs.

Leaves out: the rows that AVX2 holds in the first-level cache for prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.handler import CpuPlan, Phase
from pallas_kernels.cpu.matmul import TILE, Matmul, TilesOfRows
from pallas_kernels.cpu.weight import CpuWeight, block_size
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target


class GroupedPlan(CpuPlan):
    """How the handler computes a call."""

    kernel = "grouped_matmul_cpu"


def plan(w: CpuWeight, n_pairs: int, swiglu: bool) -> CpuPlan | Reason:
    """The handler's plan for a weight ``[E, N, K]``, or why it has none.

    swiglu: whether silu(gate) * up follows at once, which the handler does where it can.
    """
    if reason := jit.unavailable():
        return reason
    n_experts, n, k = w.shape
    target = jit.host()
    mean = -(-n_pairs // n_experts)
    program = GroupedMatmul(
        bits=w.form.bits,
        block=block_size(k, w.groups),
        group=w.group_size if w.groups > 1 else 0,
        scale=w.scale.dtype.name,
        zero=None if w.zero is None else w.zero.dtype.name,
        minimum=w.form.minimum,
        rows=next(r for r in (1, 2, 4, 8) if r >= min(mean, target.rows)),
        float4=w.form.is_float4,
        unit=w.form.has_unit,
        swiglu=swiglu and n % (2 * TILE) == 0,
    )
    return GroupedPlan(program, target.name)


def run(plan: CpuPlan, x: jax.Array, w: CpuWeight, starts: jax.Array) -> jax.Array:
    """float32 ``[P, N]`` (half as wide with SwiGLU) of x ``[P, K]`` and starts int32 ``[E + 1]``.

    w's experts follow each other as the tiles of one weight.
    """
    program, (n_pairs, _) = plan.program, x.shape
    parts = (w.q, w.scale) if w.zero is None else (w.q, w.scale, w.zero)
    if program.unit and w.unit is not None:
        parts = (*parts, w.unit)
    tiles = [v.reshape(-1, *v.shape[2:]) for v in parts]
    blocks = w.padded_k // program.block
    scratch = n_pairs * (w.padded_k + 8 * blocks + 4 * w.groups)
    n = w.form.n // 2 if program.swiglu else w.form.n
    results = [
        jax.ShapeDtypeStruct((n_pairs, n), jnp.float32),
        jax.ShapeDtypeStruct((scratch,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call(jit.name_of(plan), results)
    return call(x.astype(jnp.float32), *tiles, starts)[0]


@dataclasses.dataclass(frozen=True)
class GroupedMatmul(Matmul):
    """``Matmul`` with one more operand, the experts' first pairs."""

    @property
    def arguments(self) -> int:
        return super().arguments + 1

    def phases(self, target: Target) -> Sequence[Phase]:
        rounded = super().phases(target)[0]

        def multiplied(e: Emitter, call: CallFrame, i: Value) -> None:
            _TilesOfExperts(self, e, call).chunk(i)

        def runs(e: Emitter, call: CallFrame) -> Value:
            body = _TilesOfExperts(self, e, call)
            return body.experts * body.runs

        return [rounded, Phase(runs, multiplied)]


class _TilesOfExperts(TilesOfRows):
    """A run of one expert's tiles times that expert's rows."""

    def __init__(self, program: GroupedMatmul, e: Emitter, call: CallFrame) -> None:
        last = program.arguments - 1
        self.starts = call.argument(last)
        self.experts = call.argument_dim(last, 0) - 1
        super().__init__(program, e, call)
        self.runs = (self.tiles + self.run - 1) // self.run
        self.base = e.i64(0)  # of the chunk's expert

    def count_tiles(self) -> Value:
        return self.e.b.udiv(super().count_tiles(), self.experts)

    def chunk(self, i: Value) -> None:
        e, b, rows = self.e, self.e.b, self.p.rows
        expert = i // self.runs
        first = (i - expert * self.runs) * self.run
        end = e.least(first + self.run, self.tiles)
        self.base = expert * self.all_tiles
        at = expert * 4
        start: Value
        stop: Value
        start, stop = (b.sext(e.load(self.starts, e.I32, at + offset), e.I64) for offset in (0, 4))
        last = stop - 1

        def some_rows(r: Value) -> None:
            each = [e.least(r + j, last) for j in range(rows)]
            e.loop(end, lambda tile: self.tile(tile, each), start=first)

        e.loop(stop, some_rows, start=start, step=rows)

    def tile(self, tile: Value, rows: list[Value]) -> None:
        own = self.base + tile
        sums, up = self.products(own, rows), None
        if self.p.swiglu:
            up = self.products(own + self.tiles, rows)
        self.store(tile, rows, sums, up)

"""Rows times their experts' prepared weights: the handler of ``grouped_matmul``.

    y[p] = x[p] @ w[e].T        for the pairs starts[e] <= p < starts[e + 1] of expert e

``run_apart`` reads experts that lie one by one, by their addresses.

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
from pallas_kernels.cpu.matmul import TILE, Matmul, TilesOfRows, rows_in_registers
from pallas_kernels.cpu.weight import CpuWeight
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
    return GroupedPlan(grouped_program(w, n_pairs, w.shape[0], swiglu), jit.host().name)


def grouped_program(
    w: CpuWeight, n_pairs: int, n_experts: int, swiglu: bool, apart: bool = False
) -> GroupedMatmul:
    """Return the program of a weight ``[E, N, K]``; swiglu: as for ``plan``."""
    rows = rows_in_registers(-(-n_pairs // n_experts), w.form, jit.host())
    is_fused = swiglu and w.shape[1] % (2 * TILE) == 0
    return GroupedMatmul.of(w, rows, swiglu=is_fused, apart=apart)


def run(plan: CpuPlan, x: jax.Array, w: CpuWeight, starts: jax.Array) -> jax.Array:
    """float32 ``[P, N]`` (half as wide with SwiGLU) of x ``[P, K]`` and starts int32 ``[E + 1]``.

    w's experts follow each other as the tiles of one weight.
    """
    return _called(plan.program, x, w, starts)


def run_apart(
    x: jax.Array,
    w: CpuWeight,
    starts: jax.Array,
    addresses: jax.Array,
    n_experts: int,
    swiglu: bool,
) -> tuple[jax.Array, bool]:
    """(float32 ``[P, N]`` of x ``[P, K]``, whether it has passed the gate, as in ``plan``).

    The pairs ``starts[g] <= p < starts[g + 1]`` are of the expert with its parts at
    ``addresses[g]``.

    starts: int32 ``[G + 1]``.  addresses: int32 ``[G, parts, 2]``, low words before high ones.
    w: any expert ``[1, N, K]``, of which only the shape is read.
    n_experts: from which the pairs were chosen.
    """
    program = grouped_program(w, len(x), n_experts, swiglu, apart=True)
    return _called(program, x, w, addresses, starts), program.swiglu


def _called(program: GroupedMatmul, x: jax.Array, w: CpuWeight, *where: jax.Array) -> jax.Array:
    tiles = [v.reshape(-1, *v.shape[2:]) for v in program.parts_of(w)]
    call = jax.ffi.ffi_call(jit.register(program), program.results_of(w, x.shape[0]))
    return call(x.astype(jnp.float32), *tiles, *where)[0]


@dataclasses.dataclass(frozen=True)
class GroupedMatmul(Matmul):
    """``Matmul`` with one more operand, the experts' first pairs.

    apart: before it stand the addresses of the experts' parts.
    """

    apart: bool = False

    @property
    def arguments(self) -> int:
        return super().arguments + 1 + self.apart

    def phases(self, target: Target) -> Sequence[Phase]:
        rounded = super().phases(target)[0]

        def multiplied(e: Emitter, call: CallFrame, i: Value) -> None:
            TilesOfExperts(self, e, call).chunk(i)

        def runs(e: Emitter, call: CallFrame) -> Value:
            body = TilesOfExperts(self, e, call)
            return body.experts * body.runs

        return [rounded, Phase(runs, multiplied)]


class TilesOfExperts(TilesOfRows):
    """A run of one expert's tiles times that expert's rows."""

    def __init__(self, program: GroupedMatmul, e: Emitter, call: CallFrame) -> None:
        last = program.arguments - 1
        self.starts = call.argument(last)
        self.experts = call.argument_dim(last, 0) - 1
        self.apart = program.apart
        self.parts: dict[int, Value] = {}  # of the chunk's expert, if it lies apart
        super().__init__(program, e, call)
        self.runs = (self.tiles + self.run - 1) // self.run
        self.base = e.i64(0)  # of the chunk's expert

    def count_tiles(self) -> Value:
        tiles = super().count_tiles()
        return tiles if self.apart else self.e.b.udiv(tiles, self.experts)

    def part(self, argument: int) -> Value:
        return self.parts[argument] if self.parts else super().part(argument)

    def addresses(self, expert: Value) -> Value:
        """Where the addresses of a listed expert's parts lie."""
        where = self.p.arguments - 2
        stride = self.call.argument_dim(where, 1) * 8
        return self.e.at(self.call.argument(where), expert * stride)

    def chunk(self, i: Value) -> None:
        e, b, rows = self.e, self.e.b, self.p.rows
        expert = i // self.runs
        first = (i - expert * self.runs) * self.run
        end = e.least(first + self.run, self.tiles)
        if self.apart:
            table = self.addresses(expert)
            for i in range(self.p.fused - 1):
                word = e.load(table, e.I64, 8 * i, align=4)
                self.parts[1 + i] = b.inttoptr(word, e.PTR)
            self.q = self.parts[1]
        else:
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

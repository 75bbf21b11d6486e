"""One step of the gated delta rule on Hopper, the state updated in place.

    S <- a S        d = beta (v - k^T S)        S <- S + k d^T        o = scale * q S

of each row and head: q, k [Dk], v, d, o [Dv], S [Dk, Dv]; a is one number, or [Dk].
One block per (row, value head, 128 value channels, or 64 where there are few heads).  d needs all
of the block's part of the state.  So that part stays in registers from the one read to the one
write, 16 rows of 16 bytes a lane.  k^T S and q^T S meet in shared memory once, and o is q^T (a S) +
(q k) d.

    warps: S in flight | fill_table: a, k, q -> smem | barrier
           | products: k^T a S, q^T a S, q k -> smem | barrier | d | a S + k d -> memory
    warp 0: write: o -> memory

Copies: a lane loads its 16 rows of S, v of its columns, and beta into registers.  Each of the first
Dk threads loads a, k and q of one key channel into a table in shared memory.
Waits: all warps at two block barriers: for the table, then for the warps' sums.
Writes: a lane stores its rows of S to where they were; the first ``lanes`` threads store o.

Floor: 8 bytes per state element at 4.3 TB/s, 62 us at 64 rows x 32 heads x 128 x 128.  Result:
69 us on one H200.  Command: ``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from types import SimpleNamespace
from typing import ClassVar

import jax

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.launch import in_place, launch
from pallas_kernels.operands import half_reason
from pallas_kernels.ptx import LOG2E
from pallas_kernels.rows.fused_parts import KIND, floats, packed

ROWS = 16  # of the state that a lane holds, four columns of each


@dataclasses.dataclass(frozen=True)
class DeltaStepPlan:
    """columns: value channels of a block."""

    kernel: ClassVar[str] = "gated_delta_step_mosaic"
    columns: int

    def __str__(self) -> str:
        return f"blocks of {self.columns} value channels"


def plan(q: jax.Array, k: jax.Array, v: jax.Array) -> DeltaStepPlan | Reason:
    """How ``gated_delta_step`` computes a call."""
    if reason := half_reason(q=q, k=k, v=v):
        return Reason(reason)
    if q.shape[-1] not in (64, 128, 256):
        return Reason(f"q has Dk = {q.shape[-1]}, which is not 64, 128 or 256")
    batch, heads, dv = v.shape
    if dv % 128:
        return Reason(f"v has Dv = {dv}, not a multiple of 128")
    few = planned_rows(batch) * heads * dv // 128 <= gpu().sms // 2 and q.shape[-1] > 64
    return DeltaStepPlan(64 if few else 128)


@dataclasses.dataclass(frozen=True)
class _Shape:
    heads: int
    group: int  # value heads of a key head
    dk: int
    dv: int
    scale: float
    columns: int
    by_channel: bool  # a decay for every key channel
    kind: str  # of the 16-bit floats

    @property
    def warps(self) -> int:
        return self.dk * self.columns // (128 * ROWS)

    @property
    def pitch(self) -> int:
        """Bytes of a warp's sums: the two of every column, then one number."""
        return 4 * (2 * self.columns + 4)


class _Step:
    """The program of one thread.  Everything is emitted while the kernel is traced."""

    def __init__(self, gmem, smem, shape: _Shape):
        self.shape = shape
        names = "q", "k", "v", "log_decay", "beta", "state", "out"
        self.memory = SimpleNamespace(**{x: p.address(getattr(gmem, x)) for x in names})
        self.table, self.sums = p.shared_address(smem.table), p.shared_address(smem.sums)
        self.thread = p.register("tid.x")
        self.warp, self.lane = self.thread >> 5, self.thread & 31
        block, blocks = p.register("ctaid.x"), p.ci(shape.dv // shape.columns)
        # head: among the heads of all rows.
        self.head, part = block // blocks, block % blocks
        self.key_head = self.head // shape.group
        self.lanes = shape.columns // 4  # to a row of the state
        self.at_once = 32 // self.lanes
        self.mine = (self.lane & (self.lanes - 1)) * 4
        self.column = part * shape.columns + self.mine
        first = self.warp * (ROWS * self.at_once)
        self.first = first + self.lane // self.lanes

    def run(self) -> None:
        shape, memory = self.shape, self.memory
        state = p.offset(memory.state, self.head, 4 * shape.dk * shape.dv)
        state = p.offset(state, self.first * shape.dv + self.column, 4)
        step = 4 * shape.dv * self.at_once
        old = [p.load_global(state, 4, step * r, "f32") for r in range(ROWS)]
        values = p.offset(p.offset(memory.v, self.head, 2 * shape.dv), self.column, 2)
        values = floats(p.load_global(values, 2, cache=p.READ_ONLY), shape.kind)
        weight = p.offset(memory.beta, self.head, 4)
        (weight,) = p.load_global(weight, 1, 0, "f32", cache=p.READ_ONLY)
        self.fill_table()
        p.barrier()
        decayed, keys = self.products(old)
        p.barrier()

        at = self.sums + self.mine * 4
        seen = self.total(at, 4)
        change = [weight * (x - y) for x, y in zip(values, seen, strict=True)]
        for r, (row, key) in enumerate(zip(decayed, keys, strict=True)):
            new = [p.fma(key, d, x) for x, d in zip(row, change, strict=True)]
            p.store_global(state, new, step * r)
        p.when(self.thread < self.lanes, lambda: self.write(at, change))

    def fill_table(self) -> None:
        """a, k and q of every key channel to shared memory."""
        shape, threads = self.shape, 32 * self.shape.warps
        for base in range(0, shape.dk, threads):
            d = self.thread + base
            if shape.dk - base >= threads:
                self.fill_entry(d)
            else:
                p.when(d < shape.dk, functools.partial(self.fill_entry, d))

    def fill_entry(self, d) -> None:
        shape, memory = self.shape, self.memory
        if shape.by_channel:
            at = p.offset(p.offset(memory.log_decay, self.head, 4 * shape.dk), d, 4)
        else:
            at = p.offset(memory.log_decay, self.head, 4)
        (g,) = p.load_global(at, 1, 0, "f32", cache=p.READ_ONLY)
        key, query = (self.load_channel(x, d) for x in (memory.k, memory.q))
        decay = p.exp2(g * LOG2E)
        words = [decay, key, query * shape.scale, p.cf(0.0)]
        p.store_shared(self.table + d * 16, words)

    def load_channel(self, base, d):
        """Channel d of the head's q or k."""
        at = p.offset(p.offset(base, self.key_head, 2 * self.shape.dk), d, 2)
        return p.widen(p.load_half(at, cache=p.READ_ONLY), self.shape.kind)

    def products(self, old):
        """The lane's rows of a S and of k; the warp's k^T a S, q^T a S and q k to shared memory."""
        shape, zero = self.shape, p.cf(0.0)
        seen, asked, both = [zero] * 4, [zero] * 4, zero
        entries = self.table + self.first * 16
        decayed, keys = [], []
        for r, row in enumerate(old):
            decay, key, query, _ = p.load_shared(entries, 4, 16 * self.at_once * r, "f32")
            row = [decay * x for x in row]
            seen = [p.fma(key, x, y) for x, y in zip(row, seen, strict=True)]
            asked = [p.fma(query, x, y) for x, y in zip(row, asked, strict=True)]
            both = p.fma(query, key, both)
            decayed.append(row)
            keys.append(key)
        found = [*seen, *asked, both]
        if self.at_once > 1:
            found = [x + p.shuffle_xor(x, 16) for x in found]
        to = self.sums + self.warp * shape.pitch
        at = to + self.mine * 4
        p.store_shared(at, found[:4])
        p.store_shared(at, found[4:8], 4 * shape.columns)
        p.store_shared(to, found[8:], 8 * shape.columns)
        return decayed, keys

    def total(self, at, n: int, offset: int = 0):
        """n sums over the warps."""
        shape = self.shape
        parts = [p.load_shared(at, n, offset + shape.pitch * w, "f32") for w in range(shape.warps)]
        return [functools.reduce(operator.add, x) for x in zip(*parts, strict=True)]

    def write(self, at, change) -> None:
        shape = self.shape
        asked = self.total(at, 4, 4 * shape.columns)
        (both,) = self.total(self.sums, 1, 8 * shape.columns)
        y = [p.fma(both, d, x) for x, d in zip(asked, change, strict=True)]
        to = p.offset(p.offset(self.memory.out, self.head, 2 * shape.dv), self.column, 2)
        p.store_global(to, packed(y, shape.kind))


@functools.partial(jax.jit, static_argnames=("scale", "plan"))
def gated_delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
    plan: DeltaStepPlan,
) -> tuple[jax.Array, jax.Array]:
    """``gated_delta.op.gated_delta_step``; the state is updated in place: donate it and no copy is
    made."""
    b, h, dk, dv = state.shape
    shape = _Shape(
        h,
        h // q.shape[1],
        dk,
        dv,
        float(scale),
        plan.columns,
        log_decay.ndim == 3,
        KIND[v.dtype.name],
    )

    def run(state):
        operands = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
        (out,) = launch(
            functools.partial(_Step, shape=shape),
            operands,
            {"out": jax.ShapeDtypeStruct(v.shape, v.dtype)},
            name="gated_delta_step",
            grid=b * h * (dv // shape.columns),
            warpgroups=shape.warps // 4,
            registers=True,
            scratch={"table": 4 * dk, "sums": shape.warps * shape.pitch // 4},
        )
        return out

    return in_place(run, state)

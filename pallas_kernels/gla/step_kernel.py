"""One GLA step on Hopper, the state updated in place; alone, or with what a layer has around it.

    S <- exp(log_decay)[:, None] * S + k v^T        o = scale * q S

``gla_step`` is that.  ``gla.token`` begins at the layer's projections of one token and ends before
its output product:

    log_decay = max(logsigmoid(W low + bias) / normalizer, clamp_min)
    y         = o * rsqrt(mean o^2 + eps) * weight * silu(gate)              per head

float32 throughout, rounded once.  A row whose length is 0 stands still: its state keeps its bits.

A stream over the state: every float is read once, updated in a register, written back to the same
place, and has by then been added to its column of o.  One block per (row, head, 128 value channels,
or 64 where there are few heads); a warp takes Dk / warps rows of S, 16 bytes per lane at a time, a
batch of them in flight; the warps' partial rows of o meet in shared memory.  The norm is over all
value channels of a head, whose blocks are a cluster: each sends its sum of squares to all
(st.async, counted by a barrier, so that nobody waits for the stores of the state).

    warps: first batch of S in flight | q, k, decay -> smem | barrier
           | per row: a*S + k*v, o += q*S, store | next batch ... | partial o -> smem | barrier
    warp 0: o [| squares -> peers | norm, gate] | store

The state arrives as a mutable reference, so the kernel's input and output are one buffer.

Floor: 8 bytes per state element at 4.3 TB/s, 62 us at 64 rows x 32 heads x 128 x 128; the vectors
are 1%.  Result: 67 us (4.0 TB/s) on one H200.  ``gla.token`` and what was tried: NOTES.md.
Command: ``python -m pallas_kernels.bench.gla``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fused_parts import floats, silu
from pallas_kernels.launch import in_place, launch
from pallas_kernels.ptx import LOG2E

BATCH = 16  # loads of 16 bytes that a lane has in flight


@dataclasses.dataclass(frozen=True)
class Shape:
    """``pitches``, ``starts``: of q, k, v (and low, gate) in their rows, in elements."""

    heads: int
    kv_heads: int
    dk: int
    dv: int
    scale: float
    pitches: tuple[int, ...]
    starts: tuple[int, ...]
    columns: int  # value channels of a block, four to a lane
    warps: int
    rank: int = 0
    eps: float = 0.0
    normalizer: float = 1.0
    clamp_min: float | None = None

    @property
    def blocks(self) -> int:
        """Of a head."""
        return self.dv // self.columns


class Operands(NamedTuple):
    """Device memory of a call; None for what it does not have."""

    q: Any
    k: Any
    v: Any
    low: Any
    gate: Any
    log_decay: Any
    decay_weight: Any
    decay_bias: Any
    lengths: Any
    norm: Any
    state: Any
    out: Any


class _Step:
    """One block's program.  Everything it does is emitted while the kernel is traced."""

    def __init__(self, shape: Shape, operands: Operands, scratch):
        self.shape = shape
        self.memory = Operands(*(None if ref is None else p.address(ref) for ref in operands))
        self.table, self.sums, *exchange = (p.shared_address(ref) for ref in scratch)
        self.thread = p.register("tid.x")
        self.warp = p.shift_right(self.thread, 5)
        self.lane = p.masked(self.thread, 31)
        self.normed = operands.norm is not None
        if self.normed and shape.blocks > 1:
            head, self.block = p.register("clusterid.x"), p.register("cluster_ctarank")
            (self.barrier,) = exchange
            self.shares = p.add(self.barrier, 16)
        else:
            block = p.register("ctaid.x")
            head, self.block = (f(block, p.ci(shape.blocks)) for f in (arith.divui, arith.remui))
        self.whole_head = head
        self.row, self.head = (f(head, p.ci(shape.heads)) for f in (arith.divui, arith.remui))
        self.kv_head = arith.divui(self.head, p.ci(shape.heads // shape.kv_heads))
        self.lanes = shape.columns // 4  # to a row of the state
        self.part = p.mul(p.masked(self.lane, self.lanes - 1), 4)
        self.column = p.add(p.mul(self.block, shape.columns), self.part)

    def stream(self, index: int, column):
        """Address of a column of the row's q, k, v, low or gate."""
        base = p.offset(self.memory[index], self.row, 2 * self.shape.pitches[index])
        return p.offset(base, p.add(column, self.shape.starts[index]), 2)

    def load_pairs(self, at, n: int):
        """2 n bfloat16 of device memory as floats."""
        return floats(p.load_global(at, n))

    def run(self) -> None:
        shape, normed = self.shape, self.normed
        if normed and shape.blocks > 1:
            self.begin_exchange()
        at_once = 32 // self.lanes  # rows of the state in one load of the warp
        rows = shape.dk // shape.warps  # of this warp: contiguous
        first = p.add(p.mul(self.warp, rows), arith.divui(self.lane, p.ci(self.lanes)))
        rows //= at_once  # of this lane
        state = p.offset(self.memory.state, self.whole_head, 4 * shape.dk * shape.dv)
        state = p.offset(state, p.add(p.mul(first, shape.dv), self.column), 4)
        batch, step = min(BATCH, rows), 4 * shape.dv * at_once
        pending = [p.load_global(state, 4, step * r, "f32", cache="") for r in range(batch)]

        self.moves = None
        if self.memory.lengths is not None:
            (length,) = p.load_global(p.offset(self.memory.lengths, self.row, 4), 1)
            self.moves = p.less(p.ci(0), length)
        self.fill_table()
        v = self.load_pairs(self.stream(2, p.add(p.mul(self.kv_head, shape.dv), self.column)), 2)
        if self.moves is not None:
            v = [arith.select(self.moves, x, p.cf(0.0)) for x in v]
        if normed:
            weight = self.load_pairs(p.offset(self.memory.norm, self.column, 2), 2)
        gate = None
        if self.memory.gate is not None:
            at = self.stream(4, p.add(p.mul(self.head, shape.dv), self.column))
            gate = self.load_pairs(at, 2)
        p.barrier()

        out = [p.cf(0.0)] * 4
        entries = p.add(self.table, p.mul(first, 16))
        for start in range(0, rows, batch):
            current = pending
            following = range(start + batch, min(start + 2 * batch, rows))
            pending = [p.load_global(state, 4, step * r, "f32", cache="") for r in following]
            for i, old in enumerate(current):
                decay, k, q, _ = p.load_shared(entries, 4, 16 * at_once * (start + i), "f32")
                new = [p.fma(decay, s, arith.mulf(k, x)) for s, x in zip(old, v, strict=True)]
                out = [p.fma(q, s, o) for s, o in zip(new, out, strict=True)]
                p.store_global(state, new, step * (start + i))
        if at_once > 1:
            out = [arith.addf(x, p.shuffle_xor(x, 16)) for x in out]
        mine = p.add(self.sums, p.mul(self.part, 4))
        p.store_shared(p.add(mine, p.mul(self.warp, 4 * shape.columns)), out)
        p.barrier()
        if normed and shape.blocks > 1:
            p.cluster_wait()

        def finish():
            total = p.load_shared(mine, 4, 0, "f32")
            for w in range(1, shape.warps):
                part = p.load_shared(mine, 4, 4 * shape.columns * w, "f32")
                total = [arith.addf(x, y) for x, y in zip(total, part, strict=True)]
            y = self.finished(total, weight, gate) if normed else total
            at = p.offset(self.memory.out, self.whole_head, 2 * shape.dv)
            pairs = [p.pack(*y[i : i + 2], "bf16") for i in (0, 2)]
            p.store_global(p.offset(at, self.column, 2), pairs)

        p.when(p.less(self.warp, 1), finish)

    def fill_table(self) -> None:
        """(decay, k, scaled q) of every key channel."""
        shape = self.shape
        low = None
        if self.memory.log_decay is None:
            low = [x for c in range(0, shape.rank, 8)
                   for x in self.load_pairs(self.stream(3, p.ci(c)), 4)]  # fmt: skip

        def entry(d):
            key = p.add(p.mul(self.kv_head, shape.dk), d)
            q_at = self.stream(0, p.add(p.mul(self.head, shape.dk), d))
            q = p.widen(p.load_half(q_at), "bf16")
            k = p.widen(p.load_half(self.stream(1, key)), "bf16")
            decay = p.exp2(self.log_decay_of(d) if low is None else self.low_rank_decay(low, key))
            if self.moves is not None:
                k = arith.select(self.moves, k, p.cf(0.0))
                decay = arith.select(self.moves, decay, p.cf(1.0))
            words = [decay, k, arith.mulf(q, p.cf(shape.scale)), p.cf(0.0)]
            p.store_shared(p.add(self.table, p.mul(d, 16)), words)

        threads = 32 * shape.warps
        for base in range(0, shape.dk, threads):
            d = p.add(self.thread, base)
            if shape.dk - base >= threads:
                entry(d)
            else:
                p.when(p.less(d, shape.dk), functools.partial(entry, d))

    def log_decay_of(self, d):
        """Binary logarithm."""
        at = p.offset(self.memory.log_decay, self.whole_head, 4 * self.shape.dk)
        (g,) = p.load_global(p.offset(at, d, 4), 1, 0, "f32")
        return arith.mulf(g, p.cf(LOG2E))

    def low_rank_decay(self, low, key):
        """Binary logarithm."""
        shape = self.shape
        row = p.offset(self.memory.decay_weight, key, 2 * shape.rank)
        x = p.widen(p.load_half(p.offset(self.memory.decay_bias, key, 2)), "bf16")
        for c in range(0, shape.rank, 8):
            for w, y in zip(self.load_pairs(p.offset(row, p.ci(c), 2), 4), low[c:], strict=False):
                x = p.fma(w, y, x)
        x = arith.mulf(x, p.cf(LOG2E))
        away = p.exp2(arith.mulf(p.absolute(x), p.cf(-1.0)))
        x = arith.subf(p.minimum(x, p.cf(0.0)), p.log2(arith.addf(away, p.cf(1.0))))
        x = arith.mulf(x, p.cf(1.0 / shape.normalizer))
        if shape.clamp_min is not None:
            x = p.maximum(x, p.cf(shape.clamp_min * LOG2E))
        return x

    def begin_exchange(self) -> None:
        """Nobody sends before all blocks of the cluster have begun, which ``cluster_wait`` is."""

        def initialise():
            p.barrier_init(self.barrier, 1)
            p.barriers_ready()
            p.barrier_expect(self.barrier, 8 * self.shape.blocks)

        p.when(p.less(self.thread, 1), initialise)
        p.cluster_arrive()

    def finished(self, o, weight, gate):
        """Norm and gate of the lane's columns, by warp 0."""
        squares = p.cf(0.0)
        for x in o:
            squares = p.fma(x, x, squares)
        for distance in (16, 8, 4, 2, 1):
            if distance < self.lanes:
                squares = arith.addf(squares, p.shuffle_xor(squares, distance))
        if self.shape.blocks > 1:
            squares = self.over_blocks(squares)
        factor = p.rsqrt(p.fma(squares, p.cf(1.0 / self.shape.dv), p.cf(self.shape.eps)))
        y = [arith.mulf(arith.mulf(x, factor), w) for x, w in zip(o, weight, strict=True)]
        if gate is None:
            return y
        return [arith.mulf(x, silu(g)) for x, g in zip(y, gate, strict=True)]

    def over_blocks(self, squares):
        def send():
            to = p.peer_address(p.add(self.shares, p.mul(self.block, 8)), self.lane)
            barrier = p.peer_address(self.barrier, self.lane)
            p.send_peer(to, [squares, p.cf(0.0)], barrier)

        p.when(p.less(self.lane, self.shape.blocks), send)
        p.barrier_wait(self.barrier, p.ci(0))
        total = p.load_float(self.shares)
        for i in range(1, self.shape.blocks):
            total = arith.addf(total, p.load_float(self.shares, 8 * i))
        return total


@dataclasses.dataclass(frozen=True)
class Plan:
    """columns: value channels of a block.  warps: of a block."""

    kernel: ClassVar[str] = "gla_step_mosaic"
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"blocks of {self.columns} value channels and {self.warps} warps"


def operands_reason(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> str | None:
    """What GLA's kernels cannot read of q, k and v, whose value channels come by ``block``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}, the kernel takes bfloat16"
    if q.shape[-1] not in (64, 128, 256):
        return f"q has Dk = {q.shape[-1]}, which is not 64, 128 or 256"
    if v.shape[-1] % block:
        return f"v has Dv = {v.shape[-1]}, not a multiple of {block}"
    return None


def plan(q: jax.Array, k: jax.Array, v: jax.Array) -> Plan | Reason:
    """How ``gla_step`` computes a call: the state is updated in place, so it cannot be padded."""
    if v.shape[-1] % 128:
        return Reason(f"v has Dv = {v.shape[-1]}, not a multiple of 128")
    reason = operands_reason(q, k, v, 128)
    return Reason(reason) if reason else divided(*q.shape, v.shape[-1])


def divided(batch: int, heads: int, dk: int, dv: int) -> Plan:
    """With few heads blocks are narrow, as far as a cluster holds a head, and a lane has all its
    rows in flight at once."""
    few = batch * heads * dv // 128 <= gpu().sms // 2
    columns = 64 if few and dv <= 512 else 128
    return Plan(columns, max(4, dk * columns // (128 * BATCH)) if few else 4)


def _call(shape: Shape, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [B, H, Dv], state) of operands that are arrays."""
    normed = operands.norm is not None
    batch = operands.state.shape[0]
    present = [x is not None for x in operands]

    def body(*refs):
        refs = iter(refs)
        inputs = Operands(*(next(refs) if there else None for there in present))
        _Step(shape, inputs._replace(out=next(refs)), list(refs)).run()

    cluster = shape.blocks if normed else 1
    scratch = [4 * shape.dk, shape.warps * shape.columns]

    def run(state):
        return launch(
            body, operands._replace(state=state),
            jax.ShapeDtypeStruct((batch, shape.heads, shape.dv), operands.v.dtype), name="gla_step",
            grid=batch * shape.heads * shape.blocks // cluster, cluster=cluster,
            warpgroups=shape.warps // 4, registers=True,
            scratch=scratch + [4 + 2 * shape.blocks] * (cluster > 1),
        )  # fmt: skip

    return in_place(run, operands.state)


@functools.partial(jax.jit, static_argnames=("scale", "plan"))
def gla_step(q, k, v, log_decay, state, scale: float, plan: Plan | None = None):
    """q, k, log_decay [B, H, Dk], v [B, H, Dv], float32 state [B, H, Dk, Dv] -> (o, state).

    bf16 q, k, v; Dk % 64 == 0, Dv % 128 == 0.  The state is aliased: donate it and no copy is made.
    """
    b, h, dk = q.shape
    dv = v.shape[-1]
    pitches = (h * dk, h * dk, h * dv)
    plan = plan or divided(b, h, dk, dv)
    shape = Shape(h, h, dk, dv, float(scale), pitches, (0, 0, 0), plan.columns, plan.warps)
    operands = Operands(*[None] * len(Operands._fields))
    return _call(shape, operands._replace(q=q, k=k, v=v, log_decay=log_decay, state=state))


@functools.partial(jax.jit, static_argnames=("starts", "options", "plan"))
def gla_token(
    streams: tuple[jax.Array, ...],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array,
    state: jax.Array,
    *,
    starts: tuple[int, ...],
    options: tuple[float, float, float | None],
    plan: Plan,
):
    """See ``pallas_kernels.gla.token``.

    streams: the rows ``[B, pitch]`` that hold q, k, v, low and, where there is one, gate, each from
    its column of ``starts`` on.  options: eps, normalizer, clamp_min.
    """
    b, h, dk, dv = state.shape
    weight, bias = decay
    eps, normalizer, clamp_min = options
    shape = Shape(
        h, weight.shape[0] // dk, dk, dv, dk**-0.5, tuple(x.shape[1] for x in streams), starts,
        plan.columns, plan.warps, weight.shape[1], eps, normalizer, clamp_min,
    )  # fmt: skip
    named = dict(zip(("q", "k", "v", "low", "gate"), streams, strict=False))
    operands = Operands(*[None] * len(Operands._fields))._replace(
        **named, decay_weight=weight, decay_bias=bias, lengths=lengths, norm=norm, state=state
    )
    return _call(shape, operands)

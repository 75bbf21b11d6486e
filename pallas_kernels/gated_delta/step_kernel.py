"""One step of the gated delta rule on Hopper, the state updated in place.

    S <- a S        d = beta (v - k^T S)        S <- S + k d^T        o = scale * q S

One block per (row, value head, 128 value channels, or 64 where there are few heads).  Its part of
the state is in registers from the one read to the one write, 16 rows of 16 bytes a lane, because d
needs all of it: k^T S and q^T S meet in shared memory once, and o is q^T (a S) + (q k) d.

    warps: S in flight | a, k, q -> smem | barrier | k^T a S, q^T a S, q k -> smem | barrier
           | d | a S + k d -> memory                                    warp 0: o -> memory

Floor: 8 bytes per state element at 4.3 TB/s, 62 us at 64 rows x 32 heads x 128 x 128.  Result:
69 us on one H200.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fused_parts import KIND, floats, packed
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import in_place, launch
from pallas_kernels.operands import half_reason
from pallas_kernels.ptx import LOG2E

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
    few = batch * heads * dv // 128 <= gpu().sms // 2 and q.shape[-1] > 64
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


def _sum(xs):
    return functools.reduce(arith.addf, xs)


def _body(shape: _Shape, *refs) -> None:
    q, k, v, log_decay, beta, state, out, *scratch = refs
    q, k, v, log_decay, beta, state, out = (
        p.address(ref) for ref in (q, k, v, log_decay, beta, state, out)
    )
    table, sums = (p.shared_address(ref) for ref in scratch)
    thread = p.register("tid.x")
    warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
    block, blocks = p.register("ctaid.x"), p.ci(shape.dv // shape.columns)
    head, part = arith.divui(block, blocks), arith.remui(block, blocks)  # head: of all rows
    key_head = arith.divui(head, p.ci(shape.group))
    lanes = shape.columns // 4  # to a row of the state
    at_once = 32 // lanes
    mine = p.mul(p.masked(lane, lanes - 1), 4)
    column = p.add(p.mul(part, shape.columns), mine)
    first = p.add(p.mul(warp, ROWS * at_once), arith.divui(lane, p.ci(lanes)))
    state = p.offset(state, head, 4 * shape.dk * shape.dv)
    state = p.offset(state, p.add(p.mul(first, shape.dv), column), 4)
    step = 4 * shape.dv * at_once
    old = [p.load_global(state, 4, step * r, "f32") for r in range(ROWS)]
    values = p.offset(p.offset(v, head, 2 * shape.dv), column, 2)
    values = floats(p.load_global(values, 2, cache=p.READ_ONLY), shape.kind)
    (weight,) = p.load_global(p.offset(beta, head, 4), 1, 0, "f32", cache=p.READ_ONLY)

    def entry(d):
        if shape.by_channel:
            at = p.offset(p.offset(log_decay, head, 4 * shape.dk), d, 4)
        else:
            at = p.offset(log_decay, head, 4)
        (g,) = p.load_global(at, 1, 0, "f32", cache=p.READ_ONLY)
        key, query = (
            p.widen(
                p.load_half(p.offset(p.offset(x, key_head, 2 * shape.dk), d, 2), cache=p.READ_ONLY),
                shape.kind,
            )
            for x in (k, q)
        )
        decay = p.exp2(arith.mulf(g, p.cf(LOG2E)))
        words = [decay, key, arith.mulf(query, p.cf(shape.scale)), p.cf(0.0)]
        p.store_shared(p.add(table, p.mul(d, 16)), words)

    threads = 32 * shape.warps
    for base in range(0, shape.dk, threads):
        d = p.add(thread, base)
        if shape.dk - base >= threads:
            entry(d)
        else:
            p.when(p.less(d, shape.dk), functools.partial(entry, d))
    p.barrier()

    zero = p.cf(0.0)
    seen, asked, both = [zero] * 4, [zero] * 4, zero
    entries = p.add(table, p.mul(first, 16))
    decayed, keys = [], []
    for r, row in enumerate(old):
        decay, key, query, _ = p.load_shared(entries, 4, 16 * at_once * r, "f32")
        row = [arith.mulf(decay, x) for x in row]
        seen = [p.fma(key, x, y) for x, y in zip(row, seen, strict=True)]
        asked = [p.fma(query, x, y) for x, y in zip(row, asked, strict=True)]
        both = p.fma(query, key, both)
        decayed.append(row)
        keys.append(key)
    found = [*seen, *asked, both]
    if at_once > 1:
        found = [arith.addf(x, p.shuffle_xor(x, 16)) for x in found]
    # Of a warp: the two sums of every column, then one number.
    pitch = 4 * (2 * shape.columns + 4)
    to = p.add(sums, p.mul(warp, pitch))
    at = p.add(to, p.mul(mine, 4))
    p.store_shared(at, found[:4])
    p.store_shared(at, found[4:8], 4 * shape.columns)
    p.store_shared(to, found[8:], 8 * shape.columns)
    p.barrier()

    def total(at, n, offset=0):
        parts = [p.load_shared(at, n, offset + pitch * w, "f32") for w in range(shape.warps)]
        return [_sum(x) for x in zip(*parts, strict=True)]

    at = p.add(sums, p.mul(mine, 4))
    seen = total(at, 4)
    change = [arith.mulf(weight, arith.subf(x, y)) for x, y in zip(values, seen, strict=True)]
    for r, (row, key) in enumerate(zip(decayed, keys, strict=True)):
        new = [p.fma(key, d, x) for x, d in zip(row, change, strict=True)]
        p.store_global(state, new, step * r)

    def finish():
        asked, (both,) = total(at, 4, 4 * shape.columns), total(sums, 1, 8 * shape.columns)
        y = [p.fma(both, d, x) for x, d in zip(asked, change, strict=True)]
        to = p.offset(p.offset(out, head, 2 * shape.dv), column, 2)
        p.store_global(to, packed(y, shape.kind))

    p.when(p.less(thread, lanes), finish)


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
) -> tuple[Any, Any]:
    """q, k [B, Hk, Dk], v [B, H, Dv], float32 log_decay [B, H] or [B, H, Dk], beta [B, H] and state
    [B, H, Dk, Dv] -> (o [B, H, Dv], state).  The state is aliased: donate it and no copy is made.
    """
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
        return launch(
            functools.partial(_body, shape),
            (q, k, v, log_decay, beta, state),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            name="gated_delta_step",
            grid=b * h * (dv // shape.columns),
            warpgroups=shape.warps // 4,
            registers=True,
            scratch=[4 * dk, shape.warps * (2 * shape.columns + 4)],
        )

    return in_place(run, state)

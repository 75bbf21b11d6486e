"""One token of a gated delta layer on Hopper: what stands between its projections and its output.

    x         = silu(sum_w conv[:, w] x_{t - W + 1 + w})                   of q, k and v
    q, k      = q / |q|, k / |k|
    beta      = beta_max sigmoid(b)        a = exp(-exp(a_log) softplus(a + dt))
    S <- a S        d = beta (v - k^T S)        S <- S + k d^T        o = Dk ** -0.5 q S
    y         = o * rsqrt(mean o^2 + eps) * weight * silu(z)

float32, rounded where the ops one after the other round: behind the convolution, q's and k's
lengths, and o.  A row whose length is 0 stands still.

One block per (row, value head) of 128 value channels.  The state is in registers from the one read
to the one write, as in ``step_kernel``.  The value heads of a key head all read its last inputs,
which the first of them replaces: they are a cluster, and nobody writes before all have read.

    warps: S in flight | last inputs, taps -> q, k, v, |q|^2, |k|^2 -> smem | barrier | lengths
           | k^T a S, q^T a S, q k -> smem | barrier | d | a S + k d, last inputs -> memory
    warp 0: o, norm, gate -> memory

Floor: 8 bytes per state element at 4.3 TB/s.  What was measured: NOTES.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels import ptx as p
from pallas_kernels.fused_parts import floats, silu
from pallas_kernels.gated_delta.reference import EPSILON
from pallas_kernels.launch import in_place, launch
from pallas_kernels.ptx import LOG2E

ROWS = 16  # of the state that a lane holds, four columns of each
COLUMNS = 128  # value channels of a head


@dataclasses.dataclass(frozen=True)
class Plan:
    """warps: of a block."""

    kernel: ClassVar[str] = "gated_delta_token_mosaic"
    warps: int

    def __str__(self) -> str:
        return f"blocks of a value head and {self.warps} warps"


@dataclasses.dataclass(frozen=True)
class Shape:
    """pitches, starts: of qkvz and ba in their rows, in elements.  taps: of the convolution."""

    heads: int
    group: int  # value heads of a key head
    dk: int
    taps: int
    pitches: tuple[int, int]
    starts: tuple[int, int]
    eps: float
    beta_max: float
    gated: bool

    @property
    def warps(self) -> int:
        return self.dk // ROWS

    @property
    def features(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.heads // self.group * self.dk + self.heads * COLUMNS


class Operands(NamedTuple):
    """Device memory of a call."""

    qkvz: Any
    ba: Any
    conv: Any
    a_log: Any
    dt: Any
    norm: Any
    lengths: Any
    state: Any
    last: Any
    out: Any


def _rounded(x: Any):
    return p.widen(p.narrow(x, "bf16"), "bf16")


class _Token:
    """One block's program.  Everything it does is emitted while the kernel is traced."""

    def __init__(self, shape: Shape, refs: Operands, scratch: list[Any]):
        self.shape, self.memory = shape, Operands(*map(p.address, refs))
        self.table, self.values, self.sums = (p.shared_address(ref) for ref in scratch)
        self.thread = p.register("tid.x")
        self.warp, self.lane = p.shift_right(self.thread, 5), p.masked(self.thread, 31)
        if shape.group > 1:
            key, self.rank = p.register("clusterid.x"), p.register("cluster_ctarank")
            self.whole_head = p.add(p.mul(key, shape.group), self.rank)
        else:
            self.whole_head, self.rank = p.register("ctaid.x"), p.ci(0)
        self.row, self.head = (
            f(self.whole_head, p.ci(shape.heads)) for f in (arith.divui, arith.remui)
        )
        key_heads = shape.heads // shape.group
        key_head = arith.divui(self.head, p.ci(shape.group))
        q = p.mul(key_head, shape.dk)
        self.starts = (
            q,
            p.add(q, key_heads * shape.dk),
            p.add(p.mul(self.head, COLUMNS), 2 * key_heads * shape.dk),
        )
        self.column = p.mul(self.lane, 4)

    def stream(self, index: int, column: Any):
        """Address of a column of the row's qkvz (0) or ba (1)."""
        base = p.offset(self.memory[index], self.row, 2 * self.shape.pitches[index])
        return p.offset(base, p.add(column, self.shape.starts[index]), 2)

    def run(self) -> None:
        shape = self.shape
        first = p.mul(self.warp, ROWS)
        state = p.offset(self.memory.state, self.whole_head, 4 * shape.dk * COLUMNS)
        state = p.offset(state, p.add(p.mul(first, COLUMNS), self.column), 4)
        step = 4 * COLUMNS
        old = [p.load_global(state, 4, step * r, "f32", cache="") for r in range(ROWS)]
        (length,) = p.load_global(p.offset(self.memory.lengths, self.row, 4), 1)
        moves = p.less(p.ci(0), length)
        keep = self.convolved()
        if shape.group > 1:
            p.cluster_arrive()  # what was read has been summed up
        decay, beta = self.gates()
        weight = floats(p.load_global(p.offset(self.memory.norm, self.column, 2), 2))
        z = None
        if shape.gated:
            at = p.add(p.mul(self.head, COLUMNS), p.add(self.column, shape.features))
            z = floats(p.load_global(self.stream(0, at), 2))
        p.barrier()

        def length_of(index: int):
            """One over it, of q (0) or k (1); the sums of 32 channels each."""
            at = p.add(self.values, 4 * (COLUMNS + index * (shape.dk // 32)))
            total = p.load_float(at)
            for w in range(1, shape.dk // 32):
                total = arith.addf(total, p.load_float(at, 4 * w))
            return p.rsqrt(arith.addf(total, p.cf(EPSILON)))

        of_q, of_k = length_of(0), length_of(1)
        zero, scale = p.cf(0.0), p.cf(shape.dk**-0.5)
        seen, asked, both = [zero] * 4, [zero] * 4, zero
        rows, keys = [], []
        for r, row in enumerate(old):
            at = p.add(self.table, p.mul(first, 4))
            query = _rounded(arith.mulf(p.load_float(at, 4 * r), of_q))
            key = _rounded(arith.mulf(p.load_float(at, 4 * (shape.dk + r)), of_k))
            query = arith.mulf(query, scale)
            row = [arith.mulf(decay, x) for x in row]
            seen = [p.fma(key, x, y) for x, y in zip(row, seen, strict=True)]
            asked = [p.fma(query, x, y) for x, y in zip(row, asked, strict=True)]
            both = p.fma(query, key, both)
            rows.append(row)
            keys.append(key)
        # Of a warp: the two sums of every column, then one number.
        pitch = 4 * (2 * COLUMNS + 4)
        to = p.add(self.sums, p.mul(self.warp, pitch))
        at = p.add(to, p.mul(self.column, 4))
        p.store_shared(at, seen)
        p.store_shared(at, asked, 4 * COLUMNS)
        p.store_shared(to, [both], 8 * COLUMNS)
        p.barrier()

        def total(at, n, offset=0):
            parts = [p.load_shared(at, n, offset + pitch * w, "f32") for w in range(shape.warps)]
            return [functools.reduce(arith.addf, x) for x in zip(*parts, strict=True)]

        at = p.add(self.sums, p.mul(self.column, 4))
        v = p.load_shared(p.add(self.values, p.mul(self.column, 4)), 4, 0, "f32")
        change = [arith.mulf(beta, arith.subf(x, y)) for x, y in zip(v, total(at, 4), strict=True)]
        if shape.group > 1:
            p.cluster_wait()

        def write():
            for r, (row, key) in enumerate(zip(rows, keys, strict=True)):
                p.store_global(state, [p.fma(key, d, x) for x, d in zip(row, change, strict=True)],
                               step * r)  # fmt: skip
            keep()

        p.when(moves, write)

        def finish():
            asked, (both,) = total(at, 4, 4 * COLUMNS), total(self.sums, 1, 8 * COLUMNS)
            o = [_rounded(p.fma(both, d, x)) for x, d in zip(asked, change, strict=True)]
            squares = zero
            for x in o:
                squares = p.fma(x, x, squares)
            for distance in (16, 8, 4, 2, 1):
                squares = arith.addf(squares, p.shuffle_xor(squares, distance))
            factor = p.rsqrt(p.fma(squares, p.cf(1.0 / COLUMNS), p.cf(shape.eps)))
            y = [arith.mulf(arith.mulf(x, factor), w) for x, w in zip(o, weight, strict=True)]
            if z is not None:
                y = [arith.mulf(x, silu(g)) for x, g in zip(y, z, strict=True)]
            to = p.offset(self.memory.out, self.whole_head, 2 * COLUMNS)
            pairs = [p.pack(*y[i : i + 2], "bf16") for i in (0, 2)]
            p.store_global(p.offset(to, self.column, 2), pairs)

        p.when(p.less(self.warp, 1), finish)

    def convolved(self) -> Callable[[], None]:
        """q, k (the table) and v (the values) of the head, and behind v the sums of squares of 32
        channels of q and k each.  What stores the new last inputs."""
        dk = self.shape.dk
        is_key = p.less(p.ci(dk - 1), self.thread)  # as many threads as channels of q and k
        d = p.masked(self.thread, dk - 1)
        feature = p.add(arith.select(is_key, self.starts[1], self.starts[0]), d)
        y, keep = self.channel(feature)
        p.store_shared(p.add(self.table, p.mul(self.thread, 4)), [y])
        squares = arith.mulf(y, y)
        for distance in (16, 8, 4, 2, 1):
            squares = arith.addf(squares, p.shuffle_xor(squares, distance))
        at = p.add(self.values, p.mul(self.warp, 4))
        p.when(p.less(self.lane, 1), lambda: p.store_shared(at, [squares], 4 * COLUMNS))
        d = p.masked(self.thread, COLUMNS - 1)  # those beyond do as the others do
        y, keep_v = self.channel(p.add(self.starts[2], d))
        p.store_shared(p.add(self.values, p.mul(d, 4)), [y])

        def store():
            p.when(p.less(self.rank, 1), keep)
            p.when(p.less(self.thread, COLUMNS), keep_v)

        return store

    def channel(self, feature: Any):
        """(the convolution there, what stores its last inputs)."""
        shape, size = self.shape, 2 * self.shape.features
        last = p.offset(self.memory.last, self.row, size * (shape.taps - 1))
        last = p.offset(last, feature, 2)
        given = [p.load_half(last, size * w) for w in range(shape.taps - 1)]
        given.append(p.load_half(self.stream(0, feature)))
        taps = p.offset(self.memory.conv, feature, 2 * shape.taps)
        weights = floats(p.load_global(taps, shape.taps // 2))
        y = p.cf(0.0)
        for x, w in zip(given, weights, strict=True):
            y = p.fma(p.widen(x, "bf16"), w, y)

        def keep():
            for w, x in enumerate(given[1:]):
                p.store_global_half(p.offset(last, p.ci(w), size), x)

        return _rounded(silu(y)), keep

    def gates(self):
        """(a, beta), of every thread."""
        shape = self.shape
        b, a = (
            p.widen(p.load_half(self.stream(1, p.add(self.head, n))), "bf16")
            for n in (0, shape.heads)
        )
        rate, dt = (
            p.widen(p.load_half(p.offset(x, self.head, 2)), "bf16")
            for x in (self.memory.a_log, self.memory.dt)
        )
        one, log2e = p.cf(1.0), p.cf(LOG2E)
        beta = p.divide(p.cf(shape.beta_max), arith.addf(p.exp2(arith.mulf(b, p.cf(-LOG2E))), one))
        x = arith.mulf(arith.addf(a, dt), log2e)
        away = p.exp2(arith.mulf(p.absolute(x), p.cf(-1.0)))
        softplus = arith.addf(p.maximum(x, p.cf(0.0)), p.log2(arith.addf(away, one)))  # binary
        rate = p.exp2(arith.mulf(rate, log2e))
        return p.exp2(arith.mulf(arith.mulf(rate, softplus), p.cf(-1.0))), beta


@functools.partial(jax.jit, static_argnames=("starts", "options", "plan"))
def gated_delta_token(
    streams: tuple[jax.Array, jax.Array],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array,
    state: jax.Array,
    last: jax.Array,
    *,
    starts: tuple[int, int],
    options: tuple[float, float, bool],
    plan: Plan,
):
    """See ``pallas_kernels.gated_delta.token``.

    streams: the rows ``[B, pitch]`` that hold qkvz and ba, each from its column of ``starts`` on.
    options: eps, beta_max, is there z.
    """
    b, h, dk, dv = state.shape
    eps, beta_max, gated = options
    key_heads = (conv.shape[0] - h * dv) // (2 * dk)
    shape = Shape(
        h, h // key_heads, dk, conv.shape[1], tuple(x.shape[1] for x in streams), starts, eps,
        beta_max, gated,
    )  # fmt: skip
    given = (*streams, conv, *decay, norm, lengths)

    def body(*refs):
        n = len(Operands._fields)
        _Token(shape, Operands(*refs[:n]), list(refs[n:])).run()

    def run(refs):
        return launch(
            body, (*given, *refs), jax.ShapeDtypeStruct((b, h, dv), streams[0].dtype),
            name="gated_delta_token", grid=b * key_heads if shape.group > 1 else b * h,
            cluster=shape.group, warpgroups=plan.warps // 4, registers=True,
            scratch=[2 * dk, COLUMNS + shape.warps, shape.warps * (2 * COLUMNS + 4)],
        )  # fmt: skip

    y, (state, last) = in_place(run, (state, last))
    return y, state, last

"""Attention of several query tokens a row over keys and values in floats or a cache: a handler.

    out[b, t, n] = softmax_s(scale q[b, t, n] . k[b, s, n // G]) v[b, s, n // G],
                   positions[b, t] - window < s <= positions[b, t]

A chunk is a row, a kv head and a tile of query tokens, with their G heads about ``ROWS``.  Keys
come in blocks of ``KEYS``, of which k is laid out by features and v by keys, as float32, once for
the tile; 4 queries at a time meet 16 vectors of scores in registers, and then 16 of sums (fewer
where there are fewer registers).  The softmax is online and in float32.  Blocks that a tile does
not see are not read, and nothing behind the last key that it sees.

A chunk's work depends on its own queries, so bits do not on threads or other rows.

Source: FlashAttention (arXiv 2205.14135).  Leaves out: what ``cpu.attention`` does, and a cap on
scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.attention import FLOATS, STACK, Cached, fixed
from pallas_kernels.cpu.cache import LANES, Form, Heads, Places, form
from pallas_kernels.cpu.handler import CpuPlan, Phase, Program
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import Frame
    from pallas_kernels.cpu.target import Target

ROWS = 64  # of a tile: query tokens times the heads that share a kv head
KEYS = 64
AT_ONCE = 4  # rows


class PrefillPlan(CpuPlan):
    kernel = "prefill_cpu"


def plan(
    q: jax.Array, k: Cached, table: jax.Array | None, softcap: float | None
) -> CpuPlan | Reason:
    """Of ``attend``, or why there is none."""
    if q.dtype not in FLOATS:
        return Reason(f"q is {q.dtype.name}")
    if softcap is not None:
        return Reason("the handler does not cap scores")
    if isinstance(found := form(k), Reason):
        return found
    if reason := jit.unavailable():
        return reason
    program = Prefill(found, q.shape[2] // found.heads, table is not None)
    if program.stack > STACK:
        text = f"{program.group} heads of {found.width} features on one"
        return Reason(f"{text} take {program.stack} bytes of stack")
    return PrefillPlan(program, jit.host().name)


def attend(
    q: jax.Array, k: Cached, v: Cached, positions: jax.Array, table: jax.Array | None, *,
    window: int | None, scale: float, plan: CpuPlan,
) -> jax.Array:  # fmt: skip
    """``q [B, T, N, H]`` at ``positions [B, T]`` over ``k, v [B, S, K, H]`` (or pages, by a table)
    -> ``[B, T, N, H]`` in q's dtype.  A query at -1 sees nothing and gives zeros."""
    operands = [q.astype(jnp.float32), positions, *jax.tree.leaves((k, v, table))]
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    out = jax.ffi.ffi_call(jit.register(plan.program), result)(*operands, **fixed(window, scale))
    return out.astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Prefill(Program):
    """group: query heads to a kv head.  paged: through a table.

    Operands: q, positions, k, v, table.  Attributes: scale, window.
    """

    cache: Form
    group: int
    paged: bool

    results = 1

    @property
    def arguments(self) -> int:
        return 2 + 2 * self.cache.arrays + self.paged

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return max(1, ROWS // self.group)

    @property
    def rows(self) -> int:
        """Of a tile, for which there is room."""
        return -(-self.tokens * self.group // AT_ONCE) * AT_ONCE

    @property
    def stack(self) -> int:
        """Bytes: queries, sums, what the softmax knows of a row; keys, values; scores."""
        width = self.cache.width
        return 4 * (self.rows * (2 * width + 2 * LANES) + 2 * KEYS * width + AT_ONCE * KEYS)

    def phases(self, target: Target) -> Sequence[Phase]:
        def count(e: Emitter, call: Frame) -> Value:
            batch, tokens = (call.argument_dim(0, axis) for axis in (0, 1))
            tiles = e.b.mul(e.divide_up(tokens, self.tokens), e.i64(self.cache.heads))
            return e.b.mul(batch, tiles)

        def tile(e: Emitter, call: Frame, i: Value) -> None:
            _Tile(self, e, call).chunk(i)

        return [Phase(count, tile)]


class _Tile:
    def __init__(self, program: Prefill, e: Emitter, call: Frame) -> None:
        self.p, self.e, self.call, self.b = program, e, call, e.b
        f = program.cache
        self.k, self.v = (Heads.of(f, call, 2 + i * f.arrays) for i in range(2))
        self.places = Places(e, call, 2, 2 + 2 * f.arrays if program.paged else None)
        size = 4 * program.rows * f.width
        self.queries, self.sums = e.room(size), e.room(size)
        # Of a row the largest score (16 times the same), the weights' sum by lanes.
        self.tops, self.totals = (e.room(64 * program.rows) for _ in range(2))
        self.keys, self.values = (e.room(4 * KEYS * f.width) for _ in range(2))
        self.scores = e.room(4 * AT_ONCE * KEYS)
        self.at_once = 4 if e.target.rows == 8 else 1  # vectors of scores or sums for each row

    def chunk(self, i: Value) -> None:
        e, b, p = self.e, self.b, self.p
        self.n_tokens = self.call.argument_dim(0, 1)
        tiles = e.divide_up(self.n_tokens, p.tokens)
        self.head = b.urem(i, e.i64(p.cache.heads))
        i = b.udiv(i, e.i64(p.cache.heads))
        self.row = b.udiv(i, tiles)
        # The last ones see the most keys: they go first.
        tile = b.sub(b.sub(tiles, e.i64(1)), b.urem(i, tiles))
        self.first = b.mul(tile, e.i64(p.tokens))
        count = e.least(e.i64(p.tokens), b.sub(self.n_tokens, self.first))
        self.count = b.mul(count, e.i64(p.group))
        self.groups = e.divide_up(self.count, AT_ONCE)
        self.window = b.sext(self.call.attribute(1, e.I32), e.I64)
        self.take_queries()
        begin, end = self.seen(count)

        def block(s: Value) -> None:
            self.take_keys(s, begin, b.sub(end, e.i64(1)))
            e.loop(self.groups, lambda group: self.rows_of(group, s))

        # From a multiple of KEYS on, so that bits do not depend on the tile's other rows.
        e.loop(end, block, start=b.and_(begin, e.i64(-KEYS)), step=KEYS)
        e.loop(self.count, self.finish)

    # --- what the tile is -----------------------------------------------------------------------

    def position(self, token: Value) -> Value:
        """Of the tile's token, i64."""
        e, b = self.e, self.b
        at = b.add(b.mul(self.row, self.n_tokens), b.add(self.first, token))
        found = b.sext(e.load(self.call.argument(1), e.I32, b.mul(at, e.i64(4))), e.I64)
        return e.least(found, b.sub(self.places.capacity, e.i64(1)))

    def seen(self, count: Value) -> tuple[Value, Value]:
        """The first key that one of the tokens sees, and the one behind the last."""
        e, b = self.e, self.b

        def one(t: Value, begin: Value, end: Value) -> list[Value]:
            behind = b.add(self.position(t), e.i64(1))
            first = b.sub(behind, self.window)
            found = b.select(b.icmp_signed(">", behind, end), behind, end)
            return [e.least(first, begin), found]

        begin, end = e.loop(count, one, [e.i64(1 << 40), e.i64(0)])
        return b.select(b.icmp_signed("<", begin, e.i64(0)), e.i64(0), begin), end

    def vector_at(self, room: Value, row: Value, i: int = 0, vectors: int = 1) -> Value:
        """The i-th of a row's vectors in an array of the stack."""
        at = self.b.add(self.b.mul(row, self.e.i64(64 * vectors)), self.e.i64(64 * i))
        return self.e.at(room, at)

    def head_at(self, pointer: Value, row: Value) -> Value:
        """The floats of a row of the tile in ``[B, T, N, H]``."""
        e, b, p = self.e, self.b, self.p
        token, g = b.udiv(row, e.i64(p.group)), b.urem(row, e.i64(p.group))
        index = b.add(b.mul(self.row, self.n_tokens), b.add(self.first, token))
        index = b.mul(index, e.i64(p.group * p.cache.heads))
        index = b.add(index, b.add(b.mul(self.head, e.i64(p.group)), g))
        return e.at(pointer, b.mul(index, e.i64(4 * p.cache.width)))

    def take_queries(self) -> None:
        """Rows that there are not, of the last four, are the last again."""
        e, b, many = self.e, self.b, self.p.cache.vectors
        scale = e.splat(self.call.attribute(0, e.F32))
        last = b.sub(self.count, e.i64(1))

        def one(row: Value) -> None:
            at = self.head_at(self.call.argument(0), e.least(row, last))
            x = [b.fmul(e.load(at, e.vector(e.F32), 64 * i), scale) for i in range(many)]
            for i, value in enumerate(self.k.as_stored(x)):
                e.store(value, self.vector_at(self.queries, row, i, many), align=64)
                e.store(e.floats(0.0), self.vector_at(self.sums, row, i, many), align=64)
            e.store(e.floats(float("-inf")), self.vector_at(self.tops, row), align=64)
            e.store(e.floats(0.0), self.vector_at(self.totals, row), align=64)

        e.loop(b.mul(self.groups, e.i64(AT_ONCE)), one)

    def take_keys(self, s: Value, first: Value, last: Value) -> None:
        """KEYS keys from s on, and values: k ``[H, KEYS]``, v ``[KEYS, H]``.  The first and the
        last that are seen stand for those around them."""
        e, b, f = self.e, self.b, self.p.cache

        def some(j: Value) -> None:
            each = (e.least(b.add(s, b.add(j, e.i64(t))), last) for t in range(LANES))
            each = (b.select(b.icmp_signed("<", t, first), first, t) for t in each)
            tokens = [self.places.token(self.row, t) for t in each]
            for i in range(0, f.vectors, 2):
                many = min(2, f.vectors - i)
                rows = [self.k.floats(token, self.head, i, many) for token in tokens]
                for m in range(many):
                    for lane, value in enumerate(e.transposed([row[m] for row in rows])):
                        at = b.mul(b.add(e.i64((LANES * (i + m) + lane) * KEYS), j), e.i64(4))
                        e.store(value, self.keys, at, align=64)
            for t, token in enumerate(tokens):
                place = b.add(j, e.i64(t))
                for i, value in enumerate(self.v.floats(token, self.head, 0, f.vectors)):
                    e.store(value, self.vector_at(self.values, place, i, f.vectors), align=64)

        e.loop(KEYS, some, step=LANES)

    # --- rows, four at a time -------------------------------------------------------------------

    def rows_of(self, group: Value, s: Value) -> None:
        e, b = self.e, self.b
        first = b.mul(group, e.i64(AT_ONCE))
        rows = [b.add(first, e.i64(r)) for r in range(AT_ONCE)]
        for i in range(0, KEYS // LANES, self.at_once):
            self.score(rows, i)
        fades = [self.weigh(row, r, s) for r, row in enumerate(rows)]
        for i in range(0, self.p.cache.vectors, self.at_once):
            self.add(rows, fades, i, min(self.at_once, self.p.cache.vectors - i))

    def score(self, rows: list[Value], i: int) -> None:
        """Of the i-th vectors of keys."""
        e, b = self.e, self.b
        queries = [self.vector_at(self.queries, row, 0, self.p.cache.vectors) for row in rows]

        def feature(f: Value, *sums: Value) -> list[Value]:
            at = b.mul(f, e.i64(4 * KEYS))
            keys = [e.load(e.at(self.keys, at), e.vector(e.F32), 64 * (i + m), align=64)
                    for m in range(self.at_once)]  # fmt: skip
            made = []
            for r, query in enumerate(queries):
                q = e.splat(e.load(query, e.F32, b.mul(f, e.i64(4))))
                of_row = sums[r * self.at_once : (r + 1) * self.at_once]
                made += [e.fma(q, key, total) for key, total in zip(keys, of_row, strict=True)]
            return made

        zeros = [e.floats(0.0)] * (AT_ONCE * self.at_once)
        for n, total in enumerate(e.loop(self.p.cache.width, feature, zeros)):
            r, m = divmod(n, self.at_once)
            e.store(total, self.scores, 4 * KEYS * r + 64 * (i + m), align=64)

    def weigh(self, row: Value, r: int, s: Value) -> Value:
        """Scores of a row to weights; returns what its sums so far fade by."""
        e, b = self.e, self.b
        none = e.floats(float("-inf"))
        token = b.udiv(e.least(row, b.sub(self.count, e.i64(1))), e.i64(self.p.group))
        behind = b.sub(b.add(self.position(token), e.i64(1)), s)
        scores = []
        for i in range(KEYS // LANES):
            score = e.load(self.scores, e.vector(e.F32), 4 * KEYS * r + 64 * i, align=64)
            end = b.sub(behind, e.i64(LANES * i))
            score = b.select(e.lanes_below(end), score, none)
            score = b.select(e.lanes_below(b.sub(end, self.window)), none, score)
            scores.append(score)
        top_at, total_at = (self.vector_at(v, row) for v in (self.tops, self.totals))
        old = e.load(top_at, e.vector(e.F32), align=64)
        largest = scores[0]
        for score in scores[1:]:
            largest = e.larger(score, largest)
        top = e.larger(e.splat(e.largest(largest)), old)
        e.store(top, top_at, align=64)
        base = b.select(b.fcmp_ordered("==", top, none), e.floats(0.0), top)
        fade = e.exp(b.fsub(old, base))
        total = b.fmul(e.load(total_at, e.vector(e.F32), align=64), fade)
        for i, score in enumerate(scores):
            hidden = b.fcmp_ordered("==", score, none)
            weight = b.select(hidden, e.floats(0.0), e.exp(b.fsub(score, base)))
            e.store(weight, self.scores, 4 * KEYS * r + 64 * i, align=64)
            total = b.fadd(total, weight)
        e.store(total, total_at, align=64)
        return fade

    def add(self, rows: list[Value], fades: list[Value], i: int, many: int) -> None:
        """Weights times values, of the i-th vectors of a head on, to the faded sums."""
        e, b, f = self.e, self.b, self.p.cache
        places = [self.vector_at(self.sums, row, i + m, f.vectors) for row in rows
                  for m in range(many)]  # fmt: skip
        sums = [b.fmul(e.load(at, e.vector(e.F32), align=64), fades[n // many])
                for n, at in enumerate(places)]  # fmt: skip

        def key(t: Value, *sums: Value) -> list[Value]:
            values = [e.load(self.vector_at(self.values, t, i + m, f.vectors), e.vector(e.F32))
                      for m in range(many)]  # fmt: skip
            made = []
            for r in range(AT_ONCE):
                at = b.add(b.mul(t, e.i64(4)), e.i64(4 * KEYS * r))
                weight = e.splat(e.load(self.scores, e.F32, at))
                of_row = sums[r * many : (r + 1) * many]
                made += [e.fma(weight, v, total) for v, total in zip(values, of_row, strict=True)]
            return made

        for at, value in zip(places, e.loop(KEYS, key, sums), strict=True):
            e.store(value, at, align=64)

    def finish(self, row: Value) -> None:
        e, b, many = self.e, self.b, self.p.cache.vectors
        total = e.sum(e.load(self.vector_at(self.totals, row), e.vector(e.F32), align=64))
        some = b.fcmp_unordered("une", total, e.f32(0.0))
        total = e.splat(b.select(some, total, e.f32(1.0)))
        sums = [e.load(self.vector_at(self.sums, row, i, many), e.vector(e.F32), align=64)
                for i in range(many)]  # fmt: skip
        out = self.head_at(self.call.result(0), row)
        for i, value in enumerate(self.v.in_order([b.fdiv(v, total) for v in sums])):
            e.store(value, out, 64 * i)

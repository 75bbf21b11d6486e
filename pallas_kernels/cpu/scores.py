"""Scores of 16 cached keys with the queries of their head, two ways, in emitted code.

    ways.take(n, x)          query n, H floats
    ways.keys(token, head)   16 keys; token(t): the t-th's place
    ways.score(n)            a vector of their products with query n

``FloatScores``: keys in float32, each product's lanes summed at the end.  ``CodeScores``, of int8:
queries as sums of three codes of 8 bits, q = s (a + b / 254 + c / 254^2), which leaves an error of
2^-24 of the largest, so that products are of integers, four to a lane and none across lanes; half
the time of the first with four queries to a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pallas_kernels.cpu.cache import LANES, Heads

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value

KEYS = LANES
LEVELS = 3
STEP = 254.0  # from a level to the next
Token = Callable[[int], "Value"]


def scores_of(heads: Heads, queries: int) -> FloatScores | CodeScores:
    return (CodeScores if heads.form.dtype == "int8" else FloatScores)(heads, queries)


class FloatScores:
    def __init__(self, heads: Heads, queries: int) -> None:
        self.heads, self.e, self.size = heads, heads.e, 4 * heads.form.width
        self.queries, self.block = (self.e.room(n * self.size) for n in (queries, KEYS))

    def take(self, n: Value, x: list[Value]) -> None:
        for i, value in enumerate(self.heads.as_stored(x)):
            at = self.e.b.add(self.e.b.mul(n, self.e.i64(self.size)), self.e.i64(64 * i))
            self.e.store(value, self.queries, at, align=64)

    def keys(self, token: Token, head: Value) -> None:
        for t in range(KEYS):
            values = self.heads.load(token(t), head, 0, self.heads.form.vectors)
            for i, value in enumerate(values):
                self.e.store(value, self.block, self.size * t + 64 * i, align=64)

    def score(self, n: Value) -> Value:
        e, b = self.e, self.e.b
        kind, count = e.vector(e.F32), self.heads.form.vectors
        at = e.at(self.queries, b.mul(n, e.i64(self.size)))
        q = [e.load(at, kind, 64 * i, align=64) for i in range(count)]
        totals = []
        for t in range(KEYS):
            total = None
            for i, value in enumerate(q):
                key = e.load(self.block, kind, self.size * t + 64 * i, align=64)
                total = b.fmul(value, key) if total is None else e.fma(value, key, total)
            totals.append(total)
        return e.sums(totals)


class CodeScores:
    def __init__(self, heads: Heads, queries: int) -> None:
        self.heads, self.e, width = heads, heads.e, heads.form.width
        # Of a query its codes by levels, their sums times what keys are raised by, its scale.
        self.end = LEVELS * width
        self.size = self.end + 16
        self.queries, self.block = self.e.room(queries * self.size), self.e.room(KEYS * width)

    def take(self, n: Value, x: list[Value]) -> None:
        e, b = self.e, self.e.b
        at = e.at(self.queries, b.mul(n, e.i64(self.size)))
        largest = e.max_magnitude(x)
        # So small that 127 / largest is infinite, or NaN: codes 0, and the scale as it is.
        normal = b.fcmp_ordered(">", largest, e.f32(1e-30))
        inverse = e.splat(b.select(normal, b.fdiv(e.f32(127.0), largest), e.f32(0.0)))
        scale = b.fmul(largest, e.f32(1 / 127))
        e.store(scale, at, self.end + 4 * LEVELS)
        step = e.splat(scale)
        for level in range(LEVELS):
            total, rest = e.splat(e.i32(0)), []
            for i, value in enumerate(x):
                code = e.round_to_i32(b.fmul(value, inverse))
                e.store(b.trunc(code, e.vector(e.I8)), at, level * self.end // LEVELS + LANES * i)
                total = b.add(total, code)
                exact = b.sitofp(code, e.vector(e.F32))
                rest.append(e.fma(b.fneg(exact), step, value))
            raised = b.mul(e.sum(total), e.i32(-e.code_offset(8)))
            e.store(raised, at, self.end + 4 * level)
            x, step = rest, b.fmul(step, e.floats(1 / STEP))
            inverse = b.fmul(inverse, e.floats(STEP))

    def keys(self, token: Token, head: Value) -> None:
        """By four features of all 16 keys: lane t is key t's."""
        e, b = self.e, self.e.b
        by_word = [i % 4 * 4 + i // 4 for i in range(KEYS)]
        rows = [self.heads.at(token(t), head) for t in range(KEYS)]
        for i in range(0, self.heads.form.width, LANES):
            quarters = []
            for t in range(0, KEYS, 4):
                four = [e.load(row, e.vector(e.I32, 4), i) for row in rows[t : t + 4]]
                pairs = (e.join(*four[:2]), e.join(*four[2:]))
                quarters.append(e.pick(*[e.join(*pairs)] * 2, by_word))
            for j, value in enumerate(_transposed(e, quarters)):
                codes = e.raised(b.bitcast(value, e.vector(e.I8, 64)), 8)
                e.store(codes, self.block, KEYS * (i + 4 * j), align=64)

    def score(self, n: Value) -> Value:
        e, b = self.e, self.e.b
        at = e.at(self.queries, b.mul(n, e.i64(self.size)))
        # Two sums of a level, so that one need not wait for the other.
        sums = [e.splat(e.load(at, e.I32, self.end + 4 * i)) for i in range(LEVELS)]
        sums += [e.splat(e.i32(0))] * LEVELS
        for i in range(0, self.heads.form.width, 4):
            codes = e.load(self.block, e.vector(e.I8, 64), KEYS * i, align=64)
            for level in range(LEVELS):
                four = e.splat(e.load(at, e.I32, level * self.end // LEVELS + i))
                pair = codes, b.bitcast(four, e.vector(e.I8, 64))
                to = level + i // 4 % 2 * LEVELS
                sums[to] = e.dots(sums[to], [pair], 8, raised=True)
        sums = [b.add(u, v) for u, v in zip(sums[:LEVELS], sums[LEVELS:], strict=True)]
        first, *more = (b.sitofp(v, e.vector(e.F32)) for v in sums)
        total = more.pop()
        for value in (*more[::-1], first):
            total = e.fma(total, e.floats(1 / STEP), value)
        return b.fmul(total, e.splat(e.load(at, e.F32, self.end + 4 * LEVELS)))


def _transposed(e: Emitter, rows: list[Value]) -> list[Value]:
    """Of four vectors of four quarters: vector i has their i-th quarters."""
    halves = []
    for i in (0, 8):
        picked = [*range(i, i + 8), *range(16 + i, 24 + i)]
        halves.append([e.pick(a, b, picked) for a, b in (rows[:2], rows[2:])])
    made = []
    for a, b in halves:
        for i in (0, 4):
            picked = [j + i + start for start in (0, 8, 16, 24) for j in range(4)]
            made.append(e.pick(a, b, picked))
    return made

"""Scores of 16 cached keys with the queries of their head, two ways, in emitted code.

    ways.take(n, x)          query n, H floats
    ways.keys(token, head)   16 keys; token(t): the t-th's place
    ways.score(n)            a vector of their products with query n

``FloatScores`` has keys in float32 and sums each product's lanes at the end. ``CodeScores`` is for
int8 keys. It writes a query as a sum of three 8-bit codes, ``q = s (a + b / 254 + c / 254^2)``. The
error is 2^-24 of the query's largest value. Its products are of integers, four to a lane, and no
sum runs across lanes. It takes half the time of ``FloatScores`` with four queries to a head.

``FloatColumns`` and ``CodeColumns`` give the same bits for ``BLOCK`` keys and many queries.

Every attention handler adds in one order.  A query's bits depend on nothing else:

    part:   ``PART`` keys from a multiple of ``PART`` on, whatever the query sees
    block:  ``BLOCK`` keys of a part.  In turn ``weigh`` gives exp(score - largest so far), and what
            was summed before fades by exp(largest before - largest so far)
    join:   the parts' sums, in turn, by the same rule

``cpu.attention`` (few query tokens, parts shared among threads) and ``cpu.prefill`` (many) call
these two functions.  A key that a query does not see has weight 0.  A block or part without keys
changes no sum.  So a query's result is the same in a step, a prompt, a padded prompt and a batch.

A score is 16 sums, each over every 16th feature in turn, added by halves (``Emitter.sums``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pallas_kernels.cpu.cache import LANES, CacheHeads

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value

KEYS = LANES
LEVELS = 3
STEP = 254.0  # from a level to the next
Token = Callable[[int], "Value"]


def scores_of(heads: CacheHeads, queries: int) -> FloatScores | CodeScores:
    return (CodeScores if heads.form.dtype == "int8" else FloatScores)(heads, queries)


def columns_of(heads: CacheHeads, queries: int) -> FloatColumns | CodeColumns:
    """Return the scores of ``BLOCK`` keys at once, with the same bits as ``scores_of``."""
    return (CodeColumns if heads.form.dtype == "int8" else FloatColumns)(heads, queries)


class FloatScores:
    def __init__(self, heads: CacheHeads, queries: int, keys: int = KEYS) -> None:
        self.heads, self.e, self.size = heads, heads.e, 4 * heads.form.width
        self.queries, self.block = (self.e.room(n * self.size) for n in (queries, keys))

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
        e = self.e
        kind, count = e.vector(e.F32), self.heads.form.vectors
        at = e.at(self.queries, n * self.size)
        q = [e.load(at, kind, 64 * i, align=64) for i in range(count)]
        totals = []
        for t in range(KEYS):
            total = None
            for i, value in enumerate(q):
                key = e.load(self.block, kind, self.size * t + 64 * i, align=64)
                total = value * key if total is None else e.fma(value, key, total)
            totals.append(total)
        return e.sums(totals)


class FloatColumns(FloatScores):
    """``FloatScores`` of ``BLOCK`` keys, laid out by features, with the same sums: for many
    queries."""

    def __init__(self, heads: CacheHeads, queries: int) -> None:
        super().__init__(heads, queries, BLOCK)
        # Queries and vectors of keys that share what is loaded, as registers allow.
        self.at_once = 2 if self.e.target.rows == 8 else 1

    def keys(self, token: Token, head: Value, first: Value | int = 0) -> None:
        """16 keys, the block's from ``first`` on."""
        e, count = self.e, self.heads.form.vectors
        first = first * 4 if not isinstance(first, int) else e.i64(4 * first)
        for i in range(0, count, 2):
            many = min(2, count - i)
            rows = [self.heads.load(token(t), head, i, many) for t in range(KEYS)]
            for m in range(many):
                for lane, value in enumerate(e.transposed([row[m] for row in rows])):
                    at = first + 4 * BLOCK * (LANES * (i + m) + lane)
                    e.store(value, self.block, at, align=64)

    def scores(self, rows: Sequence[Value], out: Value) -> None:
        """Store scores of the queries ``rows`` with the block's keys in ``out[rows, BLOCK]``."""
        e, n = self.e, self.at_once
        for r in range(0, len(rows), n):
            queries = [e.at(self.queries, row * self.size) for row in rows[r : r + n]]

            def some(j: Value, r: int = r, queries: list[Value] = queries) -> None:
                keys = e.at(self.block, j * 4)
                to = e.at(out, j * 4 + 4 * BLOCK * r)
                for i, value in enumerate(self._by_halves(queries, keys, 0, 1)):
                    of_row, of_vector = divmod(i, n)
                    e.store(value, to, 4 * BLOCK * of_row + 64 * of_vector, align=64)

            e.loop(BLOCK, some, step=LANES * n)

    def _by_halves(self, queries: list[Value], keys: Value, lane: int, step: int) -> list[Value]:
        """The sums of the lanes from ``lane`` on, every ``step``-th: as ``Emitter.sums`` adds."""
        e = self.e
        if step < LANES:
            halves = (
                self._by_halves(queries, keys, start, 2 * step) for start in (lane, lane + step)
            )
            return [low + high for low, high in zip(*halves, strict=True)]
        totals: list[Value] = []
        for i in range(self.heads.form.vectors):
            feature = LANES * i + lane
            columns = [
                e.load(keys, e.vector(e.F32), 4 * BLOCK * feature + 64 * m, align=64)
                for m in range(self.at_once)
            ]
            each = (e.splat(e.load(query, e.F32, 4 * feature)) for query in queries)
            pairs = [(q, key) for q in each for key in columns]
            if totals:
                totals = [e.fma(*pair, t) for pair, t in zip(pairs, totals, strict=True)]
            else:
                totals = [e.b.fmul(*pair) for pair in pairs]
        return totals


class CodeScores:
    def __init__(self, heads: CacheHeads, queries: int, keys: int = KEYS) -> None:
        self.heads, self.e, width = heads, heads.e, heads.form.width
        # A query's record: its codes level by level, each level's sum of codes times the offset
        # that is added to keys, and the query's scale.
        self.end = LEVELS * width
        self.size = self.end + 16
        self.queries, self.block = self.e.room(queries * self.size), self.e.room(keys * width)

    def take(self, n: Value, x: list[Value]) -> None:
        e, b = self.e, self.e.b
        at = e.at(self.queries, n * self.size)
        largest = e.max_magnitude(x)
        # So small that 127 / largest is infinite, or NaN: codes 0, and the scale as it is.
        normal = b.fcmp_ordered(">", largest, e.f32(1e-30))
        inverse = e.splat(b.select(normal, b.fdiv(e.f32(127.0), largest), e.f32(0.0)))
        scale = largest * (1 / 127)
        e.store(scale, at, self.end + 4 * LEVELS)
        step = e.splat(scale)
        for level in range(LEVELS):
            total, rest = e.splat(e.i32(0)), []
            for i, value in enumerate(x):
                code = e.round_to_i32(value * inverse)
                e.store(b.trunc(code, e.vector(e.I8)), at, level * self.end // LEVELS + LANES * i)
                total = total + code
                exact = b.sitofp(code, e.vector(e.F32))
                rest.append(e.fma(b.fneg(exact), step, value))
            raised = e.sum(total) * -e.code_offset(8)
            e.store(raised, at, self.end + 4 * level)
            x, step = rest, step * (1 / STEP)
            inverse = inverse * STEP

    def keys(self, token: Token, head: Value, first: Value | int = 0) -> None:
        """By four features of all 16 keys: lane t is key t's.  first: of them in the block."""
        e, b = self.e, self.e.b
        block = self._block(first)
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
                e.store(codes, block, KEYS * (i + 4 * j), align=64)

    def _block(self, first: Value | int) -> Value:
        e, width = self.e, self.heads.form.width
        offset = first * width if isinstance(first, int) else first * width
        return e.at(self.block, offset)

    def score(self, n: Value, first: Value | int = 0) -> Value:
        e, b = self.e, self.e.b
        block = self._block(first)
        at = e.at(self.queries, n * self.size)
        # Two sums of a level, so that one need not wait for the other.
        sums = [e.splat(e.load(at, e.I32, self.end + 4 * i)) for i in range(LEVELS)]
        sums += [e.splat(e.i32(0))] * LEVELS
        for i in range(0, self.heads.form.width, 4):
            codes = e.load(block, e.vector(e.I8, 64), KEYS * i, align=64)
            for level in range(LEVELS):
                four = e.splat(e.load(at, e.I32, level * self.end // LEVELS + i))
                pair = codes, b.bitcast(four, e.vector(e.I8, 64))
                to = level + i // 4 % 2 * LEVELS
                sums[to] = e.dots(sums[to], [pair], 8, raised=True)
        sums = [u + v for u, v in zip(sums[:LEVELS], sums[LEVELS:], strict=True)]
        first, *more = (b.sitofp(v, e.vector(e.F32)) for v in sums)
        total = more.pop()
        for value in (*more[::-1], first):
            total = e.fma(total, e.floats(1 / STEP), value)
        return total * e.splat(e.load(at, e.F32, self.end + 4 * LEVELS))


class CodeColumns(CodeScores):
    """``CodeScores`` of ``BLOCK`` keys, for many queries."""

    def __init__(self, heads: CacheHeads, queries: int) -> None:
        super().__init__(heads, queries, BLOCK)

    def scores(self, rows: Sequence[Value], out: Value) -> None:
        """As ``FloatColumns.scores``, without the keys' scales."""
        e = self.e
        for r, row in enumerate(rows):

            def some(j: Value, r: int = r, row: Value = row) -> None:
                to = e.at(out, j * 4 + 4 * BLOCK * r)
                e.store(self.score(row, j), to, align=64)

            e.loop(BLOCK, some, step=KEYS)


def _transposed(e: Emitter, rows: list[Value]) -> list[Value]:
    """Transpose four vectors of four quarters: result i holds quarter i of every vector."""
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


# --- softmax --------------------------------------------------------------------------------------


PART = 256
BLOCK = 64


def weigh(
    e: Emitter, scores: Sequence[Value], first: Value, end: Value, top: Value, total: Value
) -> tuple[list[Value], Value, Value, Value]:
    """Return (weights, fade, top, total) of a block for one query.

    scores: the block's, as vectors.  first, end: i64, the keys of the block that the query sees.
    top: the largest score of the part so far, in every lane; -inf before there is one.
    total: the weights' sum so far, lane by lane.  fade: of all that was summed before.
    """
    b, none = e.b, e.floats(float("-inf"))
    seen = []
    for i, score in enumerate(scores):
        start = e.i64(LANES * i)
        score = b.select(e.lanes_below(end - start), score, none)
        seen.append(b.select(e.lanes_below(first - start), none, score))
    largest = seen[0]
    for score in seen[1:]:
        largest = e.larger(score, largest)
    new_top = e.larger(e.splat(e.largest(largest)), top)
    base = _base(e, new_top)
    fade = e.exp(top - base)
    total, weights = total * fade, []
    for score in seen:
        hidden = b.fcmp_ordered("==", score, none)
        weight = b.select(hidden, e.floats(0.0), e.exp(score - base))
        weights.append(weight)
        total = total + weight
    return weights, fade, new_top, total


def join(e: Emitter, before: Sequence[Value], part: Sequence[Value]) -> list[Value]:
    """Return [top, total, *sums] of the parts ``before``, in turn, and one more.

    Each is [top, total, *sums]; top and total are the same in every lane.
    """
    top = e.larger(part[0], before[0])
    base = _base(e, top)
    fade, share = e.exp(before[0] - base), e.exp(part[0] - base)
    pairs = zip(before[1:], part[1:], strict=True)
    return [top, *(e.fma(share, new, fade * old) for old, new in pairs)]


def _base(e: Emitter, top: Value) -> Value:
    """Return the number that is subtracted from scores: ``top``, or 0 where no key was seen."""
    none = e.b.fcmp_ordered("==", top, e.floats(float("-inf")))
    return e.b.select(none, e.floats(0.0), top)

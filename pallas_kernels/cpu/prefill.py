"""Attention of several query tokens a row over keys and values in floats or a cache: a program.
``cpu.attend`` plans and calls it.

    out[r, n] = softmax_s(scale q[r, n] . k[b, s, n // G]) v[b, s, n // G],
                lengths[r] - window <= s < lengths[r],      r = b T + t

A chunk is a row of the cache, a kv head and a tile of query tokens.  A tile has about ``ROWS``
query rows: its tokens times their G heads.  A tile takes keys in blocks and converts each block
once to float32, k laid out by features and v by keys.  Several queries at a time meet 16 keys in
registers.  The softmax is online and in float32, in the order of ``cpu.scores``.  So a query has
the bits that ``cpu.attention`` gives it.  A tile reads only the blocks that it sees, and nothing
after the last key that it sees.

With RoPE (``new``) a phase before writes the new tokens into the cache, as ``cpu.attention`` does;
a chunk rotates its queries.

A chunk's work depends only on its own queries, so its bits do not depend on threads or other rows.

Source: FlashAttention (arXiv 2205.14135).  Leaves out: the cases that ``cpu.attention`` leaves
out, and a cap on scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallas_kernels.cpu.attention import Attend
from pallas_kernels.cpu.cache import LANES
from pallas_kernels.cpu.handler import Phase
from pallas_kernels.cpu.parts import SCALE, CallRows, Write
from pallas_kernels.cpu.scores import BLOCK, PART, columns_of, join, weigh

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target

ROWS = 64  # of a tile: query tokens times the heads that share a kv head
AT_ONCE = 4  # rows
WRITTEN = 32  # tokens in a chunk of the phase that writes


@dataclasses.dataclass(frozen=True)
class Prefill(Attend):
    """Fields, operands and attributes are those of ``Attend``.  Results: heads, k, v."""

    @property
    def results(self) -> int:
        return 1 + 2 * self.cache.arrays * self.new

    @property
    def tokens(self) -> int:
        """Query tokens of a tile."""
        return max(1, ROWS // self.group)

    @property
    def rows(self) -> int:
        """Query rows for which a tile has room: a multiple of ``AT_ONCE``."""
        return -(-self.tokens * self.group // AT_ONCE) * AT_ONCE

    @property
    def stack(self) -> int:
        """Bytes of queries and sums, the softmax's numbers of a row, keys, values and scores."""
        width = self.cache.width
        floats = self.rows * (3 * width + 4 * LANES + 4)
        return 4 * (floats + 2 * BLOCK * (width + 1) + AT_ONCE * BLOCK)

    def phases(self, target: Target) -> Sequence[Phase]:
        def count_written(e: Emitter, call: CallFrame) -> Value:
            return e.divide_up(CallRows(self, e, call).batch, WRITTEN)

        def written(e: Emitter, call: CallFrame, i: Value) -> None:
            body, first = Write(self, e, call), i * WRITTEN
            end = e.least(body.batch, first + WRITTEN)
            e.loop(end, body.write_row, start=first)

        def count_tiles(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            tiles = e.divide_up(body.sharing, self.tokens) * self.cache.heads
            return body.owners * tiles

        def tile(e: Emitter, call: CallFrame, i: Value) -> None:
            _Tile(self, e, call).chunk(i)

        tiles = Phase(count_tiles, tile)
        return [Phase(count_written, written), tiles] if self.new else [tiles]


class _Tile(Write):
    def __init__(self, program: Prefill, e: Emitter, call: CallFrame) -> None:
        super().__init__(program, e, call)
        f = program.cache
        self.scored = columns_of(self.k, program.rows)
        # Each query's sums over the current part, and over the parts before it.
        size = 4 * program.rows * f.width
        self.sums, self.joined = e.room(size), e.room(size)
        # The part's largest score and its weights' sum lane by lane, and those of the parts before.
        self.tops, self.totals, self.joined_tops, self.joined_totals = (
            e.room(64 * program.rows) for _ in range(4)
        )
        self.firsts, self.ends = (e.room(8 * program.rows) for _ in range(2))
        self.values = e.room(4 * BLOCK * f.width)
        self.k_scales, self.v_scales = (e.room(4 * BLOCK) for _ in range(2))  # of int8
        self.scores = e.room(4 * AT_ONCE * BLOCK)
        self.at_once = 4 if e.target.rows == 8 else 1  # vectors of sums for each row

    def chunk(self, i: Value) -> None:
        e, b, p = self.e, self.b, self.p
        tiles = e.divide_up(self.sharing, p.tokens)
        self.head = i % p.cache.heads
        i = i // p.cache.heads
        self.owner = i // tiles
        # The last ones see the most keys: they go first.
        tile = tiles - 1 - (i % tiles)
        first = tile * p.tokens
        count = e.least(e.i64(p.tokens), self.sharing - first)
        self.first = self.owner * self.sharing + first
        self.count = count * p.group
        self.groups = e.divide_up(self.count, AT_ONCE)
        begin, end = self.take_queries()

        def part(s: Value) -> None:
            behind = e.least(end, s + PART)
            start = begin & -BLOCK
            start = b.select(s > start, s, start)
            e.loop(behind, block, start=start, step=BLOCK)
            e.loop(self.count, self.join)

        def block(s: Value) -> None:
            self.take_keys(s, begin, end - 1)
            e.loop(self.groups, lambda group: self.rows_of(group, s))

        e.loop(end, part, start=begin & -PART, step=PART)
        e.loop(self.count, self.give)

    # --- what the tile is -----------------------------------------------------------------------

    def vector_at(self, room: Value, row: Value, i: int = 0, vectors: int = 1) -> Value:
        """The i-th of a row's vectors in an array of the stack."""
        at = row * self.e.i64(64 * vectors) + self.e.i64(64 * i)
        return self.e.at(room, at)

    def take_queries(self) -> tuple[Value, Value]:
        """The first key that one of the tile's tokens sees, and the one behind the last.  Rows
        that there are not, of the last four, are the last again."""
        e, b, p = self.e, self.b, self.p
        scale = e.splat(self.call.attribute(SCALE, e.F32))
        last, group = self.count - 1, e.i64(p.group)
        heads = p.heads + 2 * p.cache.heads * p.new

        def one(i: Value, begin: Value, behind: Value) -> list[Value]:
            of = e.least(i, last)
            row = self.first + of // group
            found = self.row(row)
            word = i * 8
            e.store(found.first, self.firsts, word, align=8)
            e.store(found.end, self.ends, word, align=8)
            n = self.head * group + (of % group)
            x = self.vectors(self.heads_at(self.call.argument(0), row, n, heads))
            if p.new:
                x = self.turned(x, row, 0)
            self.scored.take(i, [v * scale for v in x])
            self.begin_part(i)
            for m in range(p.cache.vectors):
                at = self.vector_at(self.joined, i, m, p.cache.vectors)
                e.store(e.floats(0.0), at, align=64)
            e.store(e.floats(float("-inf")), self.vector_at(self.joined_tops, i), align=64)
            e.store(e.floats(0.0), self.vector_at(self.joined_totals, i), align=64)
            sees = found.end > 0
            begin = b.select(sees, e.least(found.first, begin), begin)
            more = found.end > behind
            return [begin, b.select(more, found.end, behind)]

        # Where no token sees a key the loop over keys is empty.
        rows = self.groups * AT_ONCE
        begin, end = e.loop(rows, one, [e.i64(1 << 40), e.i64(0)])
        return begin, end

    def begin_part(self, row: Value) -> None:
        e, many = self.e, self.p.cache.vectors
        for i in range(many):
            e.store(e.floats(0.0), self.vector_at(self.sums, row, i, many), align=64)
        e.store(e.floats(float("-inf")), self.vector_at(self.tops, row), align=64)
        e.store(e.floats(0.0), self.vector_at(self.totals, row), align=64)

    def take_keys(self, s: Value, first: Value, last: Value) -> None:
        """A block of keys and values from s on; values ``[BLOCK, H]``.  The first and the last
        that are seen stand for those around them."""
        e, b, f = self.e, self.b, self.p.cache

        def some(j: Value) -> None:
            each = (e.least(s + (j + t), last) for t in range(LANES))
            each = (b.select(t < first, first, t) for t in each)
            tokens = [self.places.token(self.owner, t) for t in each]
            self.scored.keys(tokens.__getitem__, self.head, j)
            for t, token in enumerate(tokens):
                place = j + t
                for i, value in enumerate(self.v.load(token, self.head, 0, f.vectors)):
                    e.store(value, self.vector_at(self.values, place, i, f.vectors), align=64)
            if f.dtype == "int8":
                for heads, room in ((self.k, self.k_scales), (self.v, self.v_scales)):
                    scales = e.gather([heads.scale(token, self.head) for token in tokens])
                    e.store(scales, room, j * 4, align=64)

        e.loop(BLOCK, some, step=LANES)

    # --- rows, four at a time -------------------------------------------------------------------

    def rows_of(self, group: Value, s: Value) -> None:
        first = group * AT_ONCE
        rows = [first + r for r in range(AT_ONCE)]
        self.scored.scores(rows, self.scores)
        fades = [self.weigh(row, r, s) for r, row in enumerate(rows)]
        for i in range(0, self.p.cache.vectors, self.at_once):
            self.add(rows, fades, i, min(self.at_once, self.p.cache.vectors - i))

    def weigh(self, row: Value, r: int, s: Value) -> Value:
        """Scores of a row to weights; returns what its sums so far fade by."""
        e = self.e
        vectors = range(BLOCK // LANES)

        def block_of(room: Value, start: int = 0) -> list[Value]:
            return [e.load(room, e.vector(e.F32), start + 64 * i, align=64) for i in vectors]

        scores, is_int8 = block_of(self.scores, 4 * BLOCK * r), self.p.cache.dtype == "int8"
        if is_int8:
            pairs = zip(scores, block_of(self.k_scales), strict=True)
            scores = [score * scale for score, scale in pairs]
        word = row * 8
        first, end = (e.load(room, e.I64, word, align=8) - s for room in (self.firsts, self.ends))
        top_at, total_at = (self.vector_at(v, row) for v in (self.tops, self.totals))
        top, total = (e.load(at, e.vector(e.F32), align=64) for at in (top_at, total_at))
        weights, fade, top, total = weigh(e, scores, first, end, top, total)
        e.store(top, top_at, align=64)
        e.store(total, total_at, align=64)
        if is_int8:
            pairs = zip(weights, block_of(self.v_scales), strict=True)
            weights = [weight * scale for weight, scale in pairs]
        for i, weight in enumerate(weights):
            e.store(weight, self.scores, 4 * BLOCK * r + 64 * i, align=64)
        return fade

    def add(self, rows: list[Value], fades: list[Value], i: int, many: int) -> None:
        """Weights times values, of the i-th vectors of a head on, to the faded sums."""
        e, f = self.e, self.p.cache
        places = [
            self.vector_at(self.sums, row, i + m, f.vectors) for row in rows for m in range(many)
        ]
        sums = [
            e.load(at, e.vector(e.F32), align=64) * fades[n // many] for n, at in enumerate(places)
        ]

        def key(t: Value, *sums: Value) -> list[Value]:
            values = [
                e.load(self.vector_at(self.values, t, i + m, f.vectors), e.vector(e.F32))
                for m in range(many)
            ]
            made = []
            for r in range(AT_ONCE):
                at = t * 4 + 4 * BLOCK * r
                weight = e.splat(e.load(self.scores, e.F32, at))
                of_row = sums[r * many : (r + 1) * many]
                made += [e.fma(weight, v, total) for v, total in zip(values, of_row, strict=True)]
            return made

        for at, value in zip(places, e.loop(BLOCK, key, sums), strict=True):
            e.store(value, at, align=64)

    # --- after a part ---------------------------------------------------------------------------

    def rooms(self, row: Value, *rooms: Value) -> list[Value]:
        """Where a row's vectors are in arrays of the stack, the last one of sums."""
        *first, sums = rooms
        many = self.p.cache.vectors
        return [
            *(self.vector_at(room, row) for room in first),
            *(self.vector_at(sums, row, i, many) for i in range(many)),
        ]

    def join(self, row: Value) -> None:
        """A part's sums to those of the parts before."""
        e = self.e
        places = self.rooms(row, self.joined_tops, self.joined_totals, self.joined)
        before = [e.load(at, e.vector(e.F32), align=64) for at in places]
        own = self.rooms(row, self.tops, self.totals, self.sums)
        top, total, *sums = (e.load(at, e.vector(e.F32), align=64) for at in own)
        joined = join(e, before, [top, e.splat(e.sum(total)), *sums])
        for at, value in zip(places, joined, strict=True):
            e.store(value, at, align=64)
        self.begin_part(row)

    def give(self, row: Value) -> None:
        e, p = self.e, self.p
        places = self.rooms(row, self.joined_tops, self.joined_totals, self.joined)
        sums = (e.load(at, e.vector(e.F32), align=64) for at in places)
        group = e.i64(p.group)
        n = self.head * group + (row % group)
        row = self.first + row // group
        out = self.heads_at(self.call.result(0), row, n, p.heads)
        self.finish(out, [*sums], n)

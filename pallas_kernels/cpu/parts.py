"""The emitted code of ``cpu.attention``: attention over one part of a row's keys, and the join.

Rows     a call's rows, the keys that each sees, its parts, and where the parts' records are
Write    new tokens into the cache; a phase before the others where a row of it has several
Part     phase 1: queries (rotated, where they are new), scores, weights, sums of values
Join     phase 2

A row is a query; consecutive ones, equally many, share a row of the cache (its table's, where it
has one).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pallas_kernels.cpu.cache import LANES, AttendForm, CacheForm, CacheHeads, CachePlaces
from pallas_kernels.cpu.scores import BLOCK, KEYS, PART, join, scores_of, weigh

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame

VALUES = 32  # between two visits to the sums in memory
AHEAD = 1 << 16  # distance of the prefetch in bytes, so that the weights' loop does not wait
EPS, SCALE, WINDOW = range(3)  # attributes, in the order of their names
MOST_AHEAD = 64  # tokens at most, because the place of each is looked up


def ahead(form: CacheForm) -> int:
    """Return the distance of the prefetch in tokens."""
    tokens = AHEAD // (form.heads * form.bytes) // KEYS * KEYS
    return min(max(tokens, KEYS), MOST_AHEAD)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """The keys and parts of one row, as i64.

    first, end: the row sees the keys ``first <= s < end``.
    part, parts: the number of its first part, counted from the cache row's first token, and the
    count of its parts.
    """

    first: Value
    end: Value
    part: Value
    parts: Value


class CallRows:
    """The sizes and addresses that both phases read from the call."""

    def __init__(self, program: AttendForm, e: Emitter, call: CallFrame) -> None:
        self.p, self.e, self.call, self.b = program, e, call, e.b
        self.batch = call.argument_dim(0, 0)
        table = 2 + 2 * program.cache.arrays if program.paged else None
        self.places = CachePlaces(e, call, 2, table)
        self.owners = call.argument_dim(2 if table is None else table, 0)  # rows of the cache
        self.sharing = self.batch // self.owners

    def row(self, row: Value) -> RowParts:
        e, b = self.e, self.b
        length: Value = b.sext(e.load(self.call.argument(1), e.I32, row * 4), e.I64)
        if self.p.new:
            inside: Value = b.icmp_unsigned("<", length, self.places.capacity)
            if self.p.paged:
                owner = row // self.sharing
                entry = self.places.entry(owner, b.select(inside, length, e.i64(0)))
                inside = inside & b.icmp_unsigned("<", entry, self.places.pages)
            length = b.select(inside, length + 1, e.i64(0))
        length = e.limited(length, self.places.capacity)
        seen = b.sext(self.call.attribute(WINDOW, e.I32), e.I64)
        first = length - e.least(length, seen)
        part = first // PART
        parts = e.divide_up(length, PART) - part
        none = b.icmp_signed("==", parts, e.i64(0))
        return RowParts(first, length, part, b.select(none, e.i64(1), parts))

    def most_parts(self) -> Value:
        def row(i: Value, most: Value) -> list[Value]:
            parts = self.row(i).parts
            return [self.b.select(parts > most, parts, most)]

        return self.e.loop(self.batch, row, [self.e.i64(1)])[0]

    def record(self, row: Value, part: Value, parts: Value, head: Value) -> Value:
        """Where a part's sums of a head are; of each row there is room for ``parts``."""
        e = self.e
        index = (row * parts + part) * self.p.heads + head
        return e.at(self.call.result(1), index * (4 * (self.p.cache.width + LANES)))

    def heads_at(self, pointer: Value, row: Value, head: Value, heads: int) -> Value:
        """A head's floats in ``[rows, heads, H]``."""
        e = self.e
        index = row * heads + head
        return e.at(pointer, index * (4 * self.p.cache.width))

    def vectors(self, pointer: Value, count: int | None = None) -> list[Value]:
        """A head's, or the first ones."""
        e = self.e
        many = self.p.cache.vectors if count is None else count
        return [e.load(pointer, e.vector(e.F32), 64 * i) for i in range(many)]

    def finish(self, out: Value, joined: list[Value], n: Value) -> None:
        """Sums over their total, in natural order; zeros where nothing was seen.

        joined: [top, total, *sums] of the query head n.  Its sink joins as a part with one key,
        whose value is zero.
        """
        e, b, p = self.e, self.b, self.p
        if p.sinks:
            sink = e.load(self.call.argument(p.arguments - 1), e.F32, n * 4)
            zeros = [e.floats(0.0)] * p.cache.vectors
            joined = join(e, joined, [e.splat(sink), e.floats(1.0), *zeros])
        _, total, *sums = joined
        some = b.fcmp_unordered("une", total, e.floats(0.0))
        total = b.select(some, total, e.floats(1.0))
        kept = CacheHeads(self.p.cache, e, [out]).in_order([b.fdiv(v, total) for v in sums])
        for i, value in enumerate(kept):
            e.store(value, out, 64 * i)


class Write(CallRows):
    """The new tokens of one row of the cache."""

    def __init__(self, program: AttendForm, e: Emitter, call: CallFrame) -> None:
        super().__init__(program, e, call)
        f, arrays = program.cache, program.cache.arrays
        self.k, self.v = (CacheHeads.of(f, call, 2 + i * arrays) for i in range(2))

    def chunk(self, i: Value) -> None:
        e = self.e

        def one(t: Value) -> None:
            self.write_row(i * self.sharing + t)

        e.loop(self.sharing, one)

    def write_row(self, row: Value) -> None:
        """The row's new token, where it has one."""
        e = self.e
        end = self.row(row).end
        with e.when(end > 0):
            owner = row // self.sharing
            self.write(row, self.places.token(owner, end - 1))

    def turned(self, x: list[Value], row: Value, which: int) -> list[Value]:
        """A head of q (which = 0) or k (1) after its norm and RoPE."""
        e, b, p = self.e, self.b, self.p
        at = 2 + 2 * p.cache.arrays + p.paged
        if p.norm:
            total = x[0] * x[0]
            for value in x[1:]:
                total = e.fma(value, value, total)
            mean = e.sum(total) * (1 / p.cache.width)
            root = e.sqrt(mean + self.call.attribute(EPS, e.F32))
            factor = e.splat(b.fdiv(e.f32(1.0), root))
            weights = self.vectors(self.call.argument(at + 2 + which))
            x = [v * factor * w for v, w in zip(x, weights, strict=True)]
        half = len(x) // 2
        start = row * (2 * p.cache.width)
        cos, sin = (self.vectors(e.at(self.call.argument(at + i), start), half) for i in (0, 1))
        pairs = list(zip(x[:half], x[half:], cos, sin, strict=True))
        first = [u * c - v * s for u, v, c, s in pairs]
        return first + [v * c + u * s for u, v, c, s in pairs]

    def write(self, row: Value, token: Value) -> None:
        """The row's new token."""
        e, p = self.e, self.p
        all_heads = p.heads + 2 * p.cache.heads

        def one(head: Value) -> None:
            for i, heads in enumerate((self.k, self.v)):
                n = head + (p.heads + i * p.cache.heads)
                x = self.vectors(self.heads_at(self.call.argument(0), row, n, all_heads))
                heads.store(token, head, x if i else self.turned(x, row, 1))

        e.loop(p.cache.heads, one)


class KeyPart(Write):
    """A part of a row's keys: all heads.  Rows that share a row of the cache take a part in turn,
    while it is near."""

    def __init__(self, program: AttendForm, e: Emitter, call: CallFrame) -> None:
        super().__init__(program, e, call)
        f = program.cache
        self.scored = scores_of(self.k, program.heads)
        self.sums = e.room(4 * program.heads * f.width)
        self.scores = e.room(4 * program.heads * PART)
        self.fades = e.room(4 * program.heads * (PART // VALUES))  # of sums, at each visit
        self.ahead = ahead(f)
        # Where the part's tokens are and those behind, or the row's last, which are asked for.
        self.tokens = e.room(8 * (PART + self.ahead))
        self.scales = e.room(4 * f.heads * PART)  # of values in int8

    def chunk(self, i: Value) -> None:
        e, b = self.e, self.b
        parts = self.most_parts()
        i, turn = i // self.sharing, i % self.sharing
        owner, part = i // parts, i % parts
        row = owner * self.sharing + turn
        found = self.row(row)
        with e.when(part < found.parts):
            begin = (found.part + part) * PART
            left = found.end - begin
            count = e.least(left, e.i64(PART))
            # Keys of the part that the row does not see, and whole blocks of them.
            hidden = e.limited(found.first - begin, e.i64(PART))
            start = hidden & -BLOCK
            self.find(owner, begin, found.first, left)
            self.take_queries(row)
            if self.p.new:
                is_last: Value = b.icmp_signed("==", part + 1, found.parts)
                is_it = is_last & b.icmp_signed("==", self.sharing, e.i64(1))
                with e.when(is_it & (count > 0)):
                    self.write(row, self.token(count - 1))
            self.ask(count)
            e.loop(count, lambda j: self.some_keys(j, count), start=start, step=KEYS)
            self.weigh(row, part, parts, hidden, count)
            values = lambda j: self.some_values(j, hidden, count)  # noqa: E731
            e.loop(count, values, start=start, step=VALUES)
            self.give(row, part, parts, found)

    # --- before -------------------------------------------------------------------------------

    def find(self, owner: Value, begin: Value, first: Value, left: Value) -> None:
        """Find the places of a part's tokens from ``begin`` on.

        left: tokens that the row has from there on.  first: the first token that is seen; its place
        replaces those of the tokens before it.
        """
        e, b = self.e, self.b
        many = e.least(left, e.i64(PART + self.ahead))

        def keep(place: Value, j: Value) -> None:
            e.store(place, self.tokens, j * 8, align=8)

        with e.when(left > 0):

            def one(j: Value) -> None:
                token = begin + j
                token = b.select(token < first, first, token)
                keep(self.places.token(owner, token), j)

            e.loop(many, one)
            last = self.token(many - 1)
            e.loop(PART + self.ahead, lambda j: keep(last, j), start=many)

    def ask(self, count: Value) -> None:
        """Prefetch the first ``count`` keys.

        The loops after it prefetch the later keys, the values and the next part.
        """
        e = self.e

        def one(j: Value) -> None:
            token = self.token(j)
            e.loop(self.p.cache.heads, lambda head: self.k.prefetch(token, head))
            self.ask_scales(token)

        e.loop(e.least(count, e.i64(self.ahead)), one)

    def ask_next(self, heads: CacheHeads, token: Value, n: Value) -> None:
        """For the n-th head from a token's first on: as they lie, whatever is read meanwhile."""
        count = self.e.i64(self.p.cache.heads)
        heads.prefetch(self.token(token + n // count), n % count)

    def ask_scales(self, token: Value) -> None:
        if self.p.cache.dtype == "int8":
            for heads in (self.k, self.v):
                heads.prefetch_scales(token)

    def token(self, j: Value) -> Value:
        return self.e.load(self.tokens, self.e.I64, j * self.e.i64(8), align=8)

    def take_queries(self, row: Value) -> None:
        """Scaled, and rotated where they are new; sums begin at 0."""
        e, width = self.e, self.p.cache.width
        scale = e.splat(self.call.attribute(SCALE, e.F32))
        heads = self.p.heads + 2 * self.p.cache.heads * self.p.new

        def one(n: Value) -> None:
            x = self.vectors(self.heads_at(self.call.argument(0), row, n, heads))
            if self.p.new:
                x = self.turned(x, row, 0)
            self.scored.take(n, [v * scale for v in x])
            for i in range(self.p.cache.vectors):
                at = n * (4 * width) + 64 * i
                e.store(e.floats(0.0), self.sums, at, align=64)

        e.loop(self.p.heads, one)

    # --- keys ---------------------------------------------------------------------------------

    def some_keys(self, j: Value, count: Value) -> None:
        """Scores of 16 keys from the j-th on; where there are fewer, those behind stand in."""
        e, b = self.e, self.b
        later = j + self.ahead
        e.loop(KEYS, lambda t: self.ask_scales(self.token(later + t)))
        whole = (count + (KEYS - 1)) & -KEYS
        inside = later < whole
        later = b.select(inside, later, later - whole)
        asked = self.k.or_else(inside, self.v)
        e.loop(self.p.cache.heads, lambda head: self.keys_of(j, head, asked, later))

    def keys_of(self, j: Value, head: Value, asked: CacheHeads, later: Value) -> None:
        e, f = self.e, self.p.cache
        places = [self.token(j + t) for t in range(KEYS)]
        self.scored.keys(places.__getitem__, head)
        for t in range(KEYS):
            self.ask_next(asked, later, head * KEYS + t)
        scale = None
        if f.dtype == "int8":
            scale, of_values = (
                e.gather([x.scale(at, head) for at in places]) for x in (self.k, self.v)
            )
            at = (head * PART + j) * 4
            e.store(of_values, self.scales, at, align=64)

        def query(g: Value) -> None:
            n = head * self.p.group + g
            scores = self.scored.score(n)
            if scale is not None:
                scores = scores * scale
            at = (n * PART + j) * 4
            e.store(scores, self.scores, at, align=64)

        e.loop(self.p.group, query)

    # --- weights ------------------------------------------------------------------------------

    def weigh(self, row: Value, part: Value, parts: Value, hidden: Value, count: Value) -> None:
        """Scores of the keys from ``hidden`` on to weights; the record gets their sum and the
        largest score."""
        e, b = self.e, self.b
        per_head = PART // VALUES
        visits = BLOCK // VALUES

        def one(n: Value) -> None:
            scores = e.at(self.scores, n * (4 * PART))
            fades = e.at(self.fades, n * (4 * per_head))

            def block(j: Value, top: Value, total: Value) -> list[Value]:
                at = e.at(scores, j * 4)
                found = [
                    e.load(at, e.vector(e.F32), 64 * i, align=64) for i in range(BLOCK // LANES)
                ]
                weights, fade, top, total = weigh(e, found, hidden - j, count - j, top, total)
                if self.p.cache.dtype == "int8":
                    head = n // self.p.group
                    scales = head * (4 * PART) + j * 4
                    scales = e.at(self.scales, scales)
                    weights = [
                        w * e.load(scales, e.vector(e.F32), 64 * i, align=64)
                        for i, w in enumerate(weights)
                    ]
                for i, weight in enumerate(weights):
                    e.store(weight, at, 64 * i, align=64)
                kept = e.at(fades, j // VALUES * 4)
                e.store(b.extract_element(fade, e.i32(0)), kept)
                for visit in range(1, visits):
                    e.store(e.f32(1.0), kept, 4 * visit)
                return [top, total]

            start = hidden & -BLOCK
            none = [e.floats(float("-inf")), e.floats(0.0)]
            top, total = e.loop(count, block, none, start=start, step=BLOCK)
            end = e.at(self.record(row, part, parts, n), 4 * self.p.cache.width)
            e.store(e.sum(total), end)
            e.store(b.extract_element(top, e.i32(0)), end, 4)

        e.loop(self.p.heads, one)

    # --- values -------------------------------------------------------------------------------

    def some_values(self, first: Value, hidden: Value, count: Value) -> None:
        """Weights times values of the tokens from ``first`` on, but for those that are hidden,
        added to the faded sums."""
        e, b = self.e, self.b
        end = e.least(count, first + VALUES)
        self.visit = first // VALUES
        first = b.select(first < hidden, hidden, first)
        inside = first + self.ahead < count
        asked = self.v.or_else(inside, self.k)
        e.loop(self.p.cache.heads, lambda head: self.values_of(head, first, end, asked))

    def values_of(self, head: Value, first: Value, end: Value, asked: CacheHeads) -> None:
        f, group = self.p.cache, self.p.group
        room = 2 * self.e.target.rows  # vectors of sums in registers
        queries = min(4, group)
        vectors = min(f.vectors, max(2, room // queries))
        for g in range(0, group, queries):
            for i in range(0, f.vectors, vectors):
                many = min(vectors, f.vectors - i)
                of = range(g, min(g + queries, group))
                self.values_in(head, first, end, of, i, many, None if g or i else asked)

    def values_in(
        self,
        head: Value,
        first: Value,
        end: Value,
        queries: range,
        i: int,
        many: int,
        asked: CacheHeads | None,
    ) -> None:
        e, f = self.e, self.p.cache
        n = head * self.p.group
        places, sums = [], []
        for g in queries:
            query = n + g
            fade = query * (PART // VALUES) + self.visit
            fade = e.splat(e.load(self.fades, e.F32, fade * 4))
            at = query * (4 * f.width)
            for m in range(many):
                place = at + 64 * (i + m)
                places.append(place)
                sums.append(e.load(self.sums, e.vector(e.F32), place, align=64) * fade)

        def one(t: Value, *sums: Value) -> list[Value]:
            token = self.token(t)
            values = self.v.load(token, head, i, many)
            if asked is not None:
                done = head * VALUES + (t - first)
                self.ask_next(asked, first + self.ahead, done)
            made = []
            for j, g in enumerate(queries):
                at = ((n + g) * PART + t) * 4
                weight = e.splat(e.load(self.scores, e.F32, at))
                of_query = sums[j * many : (j + 1) * many]
                made += [e.fma(weight, v, s) for v, s in zip(values, of_query, strict=True)]
            return made

        sums = e.loop(end, one, sums, start=first)
        for at, value in zip(places, sums, strict=True):
            e.store(value, self.sums, at, align=64)

    # --- after --------------------------------------------------------------------------------

    def give(self, row: Value, part: Value, parts: Value, found: RowParts) -> None:
        """The sums to the part's record, or the heads of a row that has one part."""
        e, b, width = self.e, self.b, self.p.cache.width
        alone = b.icmp_signed("==", found.parts, e.i64(1))

        def one(n: Value) -> None:
            record = self.record(row, part, parts, n)
            sums = self.vectors(e.at(self.sums, n * (4 * width)))
            with b.if_else(alone) as (whole, several):
                with whole:
                    top, total = (e.splat(e.load(record, e.F32, 4 * width + at)) for at in (4, 0))
                    out = self.heads_at(self.call.result(0), row, n, self.p.heads)
                    self.finish(out, [top, total, *sums], n)
                with several:
                    for i, value in enumerate(sums):
                        e.store(value, record, 64 * i)

        e.loop(self.p.heads, one)


class Join(CallRows):
    """The parts of a row's heads of one kv head."""

    def chunk(self, i: Value) -> None:
        e = self.e
        kv_heads, group = e.i64(self.p.cache.heads), e.i64(self.p.group)
        row, head = i // kv_heads, i % kv_heads
        found, parts = self.row(row), self.most_parts()
        with e.when(found.parts > 1):
            n = head * group
            e.loop(group, lambda g: self.head(row, n + g, found.parts, parts))

    def head(self, row: Value, n: Value, count: Value, parts: Value) -> None:
        e, f = self.e, self.p.cache
        end = 4 * f.width

        def add(part: Value, *before: Value) -> list[Value]:
            record = self.record(row, part, parts, n)
            top, total = (e.splat(e.load(record, e.F32, end + at)) for at in (4, 0))
            return join(e, before, [top, total, *self.vectors(record)])

        none = [e.floats(float("-inf")), *[e.floats(0.0)] * (1 + f.vectors)]
        joined = e.loop(count, add, none)
        out = self.heads_at(self.call.result(0), row, n, self.p.heads)
        self.finish(out, joined, n)

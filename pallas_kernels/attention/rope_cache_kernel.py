"""RoPE and the cache write on Hopper: one kernel, the cache in place; one token a row, or many.

    warp: slot -> its head of q | k | v -> rotate (not v) -> round -> [int4: hadamard -> round]
          -> [extremes of a group, by shuffles] -> q out, or words and scales into the cache

For one token a row (``_write``), a warp takes one of the N + 2K heads of the fused projection.  For
many tokens, or many rows (``_write_tokens``), it takes the N / K + 2 heads of one kv head.  Tables
are then read once for all of these, and many loads are in flight.  A block has four warps, which
share nothing.

Copies: a lane loads its features of a head, of cos and of sin into registers.
Waits: for the kernel before; no warp waits for another, and there are no barriers.
Writes: the same lanes store q, and codes or words of k and v; lane 0 stores scales and zero points.
``_write_tokens`` may also store new keys and values for the caller.  k and v of a token outside the
cache, or without a page, do not go into the cache.

A lane holds features (2 lane, 2 lane + 1) of each 64 of a head's first half, and their partners in
the second half.  So every bit of a feature's number is a bit of the lane's number or of a
register's.  A butterfly of the Walsh-Hadamard transform is a shuffle or two additions.

Floor: a launch; 64 rows of 48 heads of 128 are 0.8 MB.  Result, one H200, that shape, microseconds
(XLA): bfloat16 12.0 (15.5), int8 8.8 (16.9); docs/lab/attention.md.  Command: ``python -m
benchmarks.kernels.attention``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.attention.operands import Cached, NewTokens, capacity_of
from pallas_kernels.attention.pages import BlockTable, Paging
from pallas_kernels.device import gpu
from pallas_kernels.launch import in_place, launch
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rounding import CODES
from pallas_kernels.rows.fused_parts import KIND, floats, packed

WARPS = 4
TEAM = 8  # query heads that a warp of many tokens loads at once


class _Heads:
    """A warp's share of heads of ``h`` features, and of their words in a cache of ``dtype``."""

    def __init__(self, h, dtype, groups, kind):
        self.h, self.dtype, self.groups, self.kind = h, dtype, groups, kind
        self.quantized, self.half = dtype in CODES, h // 2
        self.runs = max(1, self.half // 64)  # of 64 features, two to a lane
        self.lane = p.register("tid.x") & 31
        # With heads of 64 the upper lanes repeat the lower: same loads, same stores.
        lane = self.lane if self.half >= 64 else self.lane & (self.half // 2 - 1)
        self.pair = lane * 2

    def feature(self, i):
        """First feature of word i, beside the lane's own offset."""
        return i // self.runs * self.half + 64 * (i % self.runs)

    def group_of(self, i):
        """The group of word i.

        A group has at least 64 features, so a word's lanes lie in one.  With heads of 64 one group
        holds both halves.
        """
        return self.feature(i) * self.groups // self.h

    def load(self, base):
        """Words of the head at ``base``."""
        base = p.offset(base, self.pair, 2)
        return [p.load_global(base, 1, 2 * self.feature(i))[0] for i in range(2 * self.runs)]

    def put(self, base, words):
        base = p.offset(base, self.pair, 2)
        for i, word in enumerate(words):
            p.store_global(base, [word], 2 * self.feature(i))

    def load_table(self, ref, row):
        """The angles' cos or sin of the lane's features."""
        base = p.offset(p.offset(p.address(ref), row, 4 * self.half), self.pair, 4)
        return [x for r in range(self.runs) for x in p.load_global(base, 2, 256 * r, "f32")]

    def turned(self, words, cos, sin):
        x = floats(words, self.kind)
        first, second = x[: 2 * self.runs], x[2 * self.runs :]

        def sums(a, b, turns):
            return [x * c + y * s for x, c, y, s in zip(a, cos, b, turns, strict=True)]

        low = sums(first, second, [-s for s in sin])
        return packed(low, self.kind) + packed(sums(second, first, sin), self.kind)

    def in_basis(self, words):
        if self.dtype != "int4":
            return words
        values = floats(words, self.kind)
        return packed(hadamard_of_lanes(values, self.lane, min(32, self.h // 4)), self.kind)

    def rounded(self, words):
        """(numbers of each group, pairs of codes: two integers, of float8 one word)."""
        values = floats(words, self.kind)
        if self.dtype == "int4":
            values = [p.minimum(p.maximum(v, -65504.0), 65504.0) for v in values]
        numbers = [
            _numbers(
                [
                    v
                    for i in range(len(words))
                    if self.group_of(i) == s
                    for v in values[2 * i : 2 * i + 2]
                ],
                self.dtype,
            )
            for s in range(self.groups)
        ]
        codes = []
        for i in range(len(words)):
            steps = values[2 * i : 2 * i + 2]
            *_, zero, inverse = numbers[self.group_of(i)]
            if self.dtype == "int4":
                steps = [v - zero for v in steps]
            steps = [v * inverse for v in steps]
            if self.dtype == "float8_e4m3fn":
                codes.append([p.to_e4m3(*steps)])
                continue
            low, high = (-128, 127) if self.dtype == "int8" else (-8, 7)
            ints = [p.to_integer(v) for v in steps]
            codes.append([p.larger(p.smaller(v, high), low) for v in ints])
        return numbers, codes

    def store(self, refs, line, words, rounded):
        """line: (ref, bytes of a head there) -> where this token's head lies."""
        if not self.quantized:
            self.put(line(refs[0], 2 * self.h), words)
            return
        numbers, codes = rounded
        for at, ref in enumerate(refs[1:]):
            size = 2 if self.dtype == "int4" else 4
            base = line(ref, size * self.groups)

            def write(at=at, size=size, base=base):
                for s in range(self.groups):
                    x = numbers[s][at]
                    if size == 4:
                        p.store_global(base, [x], 4 * s)
                    else:
                        p.store_global_half(p.offset(base, p.ci(2 * s)), p.narrow(x, "f16"))

            p.when(self.lane < 1, write)
        bits = 4 if self.dtype == "int4" else 8
        base = line(refs[0], self.h * bits // 8)
        base = p.offset(base, (self.pair * bits) >> 3)
        mask = (1 << bits) - 1
        for i, code in enumerate(codes):
            word = code[0]
            if len(code) == 2:
                low, high = (x & mask for x in code)
                word = low | (high << bits)
            to = p.offset(base, p.ci(self.feature(i) * bits // 8))
            p.store_byte(to, word) if bits == 4 else p.store_global_half(to, word)

    def as_stored(self, rounded):
        """The words that a reader of the cache would get."""
        numbers, codes = rounded
        words = []
        for i, code in enumerate(codes):
            scale, zero, _ = numbers[self.group_of(i)]
            values = p.from_e4m3(*code) if len(code) == 1 else [p.to_float(x) for x in code]
            values = [x * scale for x in values]
            if self.dtype == "int4":
                values = [x + zero for x in values]
            words += packed(values, self.kind)
        return words


class CachePlace:
    """Where a token's heads lie in a cache; row: of the cache, or of the table."""

    def __init__(self, slot, row, n_kv, capacity, pages):
        self.slot, self.row, self.n_kv, self.capacity, self.pages = slot, row, n_kv, capacity, pages
        self.entry = pages.entry(slot) if pages else None

    def line(self, head):
        """As ``_Heads.store`` asks for it."""

        def of(ref, size):
            base, token = p.address(ref), self.slot
            if self.pages:
                token = self.slot + self.pages.shift(self.slot, self.entry)
            else:
                base = p.offset(base, self.row, self.capacity * self.n_kv * size)
            return p.offset(p.offset(base, token, self.n_kv * size), head, size)

        return of

    def exists(self):
        there = self.slot < self.capacity
        return there & self.pages.holds(self.entry) if self.pages else there


def _unit(total):
    """Which of ``total`` this warp works on; those past the last repeat it."""
    warp = p.register("tid.x") >> 5
    return p.minimum(p.register("ctaid.x") * WARPS + warp, total - 1)


def _write(gmem, smem, *, shape, paging, dtype, groups, kind):
    """One token of a row: a warp has one head."""
    del smem
    batch, n, n_kv, h, capacity = shape
    heads = n + 2 * n_kv

    unit = _unit(batch * heads)
    p.await_kernel()
    row, head = unit // heads, unit % heads
    own = _Heads(h, dtype, groups, kind)
    (slot,) = p.load_global(p.offset(p.address(gmem.slots), row, 4), 1)
    pages = BlockTable(gmem.table, row, paging) if paging else None
    place = CachePlace(slot, row, n_kv, capacity, pages)
    raw = own.load(p.offset(p.address(gmem.qkv), unit, 2 * h))
    tables = [own.load_table(ref, row) for ref in (gmem.cos, gmem.sin)]
    is_v = head >= n + n_kv
    turned = own.turned(raw, *tables)
    words = own.in_basis([p.where(is_v, w, t) for w, t in zip(raw, turned, strict=True)])

    def write_query():
        own.put(p.offset(p.address(gmem.q), row * n + head, 2 * h), words)

    p.when(head < n, write_query)

    def write_cache(of, first_head):
        rounded = own.rounded(words) if own.quantized else None
        own.store(of, place.line(head - first_head), words, rounded)

    there = place.exists()
    is_k = (head < n + n_kv) & (head >= n)
    p.when(there & is_k, lambda: write_cache(gmem.k, n))
    p.when(there & is_v, lambda: write_cache(gmem.v, n + n_kv))


def _write_tokens(gmem, smem, *, shape, paging, dtype, groups, kind):
    """Many tokens of a row: a warp has the heads of one kv head.

    gmem.new_k, new_v: rotated keys, and values, as a reader of the cache gets them; or None.
    """
    del smem
    batch, width, n, n_kv, h, capacity = shape
    heads, team = n + 2 * n_kv, n // n_kv

    unit = _unit(batch * width * n_kv)
    p.await_kernel()
    token, kv_head = unit // n_kv, unit % n_kv
    row, first = token // width, kv_head * team
    own = _Heads(h, dtype, groups, kind)
    (slot,) = p.load_global(p.offset(p.address(gmem.slots), token, 4), 1)
    pages = BlockTable(gmem.table, row, paging) if paging else None
    place = CachePlace(slot, row, n_kv, capacity, pages)
    source = p.offset(p.address(gmem.qkv), token, 2 * h * heads)

    def load(head):
        return own.load(p.offset(source, head, 2 * h))

    k, v = (load(kv_head + past) for past in (n, n + n_kv))
    tables = [own.load_table(ref, token) for ref in (gmem.cos, gmem.sin)]
    to = p.offset(p.offset(p.address(gmem.q), token, 2 * h * n), first, 2 * h)
    for begin in range(0, team, TEAM):
        some = range(begin, min(begin + TEAM, team))
        loaded = [load(first + i) for i in some]
        for i, words in zip(some, loaded, strict=True):
            own.put(p.offset(to, p.ci(i), 2 * h), own.in_basis(own.turned(words, *tables)))
    there = place.exists()
    of_cache, new = (gmem.k, gmem.v), (gmem.new_k, gmem.new_v)
    for words, of, ref in zip((own.turned(k, *tables), v), of_cache, new, strict=True):
        words = own.in_basis(words)
        rounded = own.rounded(words) if own.quantized else None

        def write(words=words, of=of, rounded=rounded):
            own.store(of, place.line(kv_head), words, rounded)

        p.when(there, write)
        if ref is not None:
            stored = own.as_stored(rounded) if rounded else words
            own.put(p.offset(p.address(ref), unit, 2 * h), stored)


def _numbers(values, dtype):
    """(scale, zero point, inverse scale), float32, of a group of which this lane holds ``values``,
    as ``quantize_kv`` has them."""

    def over_lanes(f, x):
        return p.over_lanes(x, (1, 2, 4, 8, 16), f)

    if dtype == "int4":
        high = over_lanes(p.maximum, functools.reduce(p.maximum, values))
        low = over_lanes(p.minimum, functools.reduce(p.minimum, values))
        scale = _to_float16((high - low) * (1 / 15))
        middle = (low + high) * 0.5
        zero = _to_float16(p.fma(scale, 0.5, middle))
    else:
        best = over_lanes(p.maximum, functools.reduce(p.maximum, [p.absolute(v) for v in values]))
        scale, zero = p.divide(best, CODES[dtype][1]), p.cf(0.0)
    some = scale > 0.0
    inverse = p.divide(1.0, p.where(some, scale, 1.0))
    return scale, zero, p.where(some, inverse, 0.0)


def _to_float16(x):
    return p.widen(p.narrow(x, "f16"), "f16")


@jax.jit
def rope_and_write(x: NewTokens) -> tuple[jax.Array, Cached, Cached]:
    """See ``pallas_kernels.attention.rope_cache``."""
    batch, heads, h = x.qkv.shape
    n_kv = x.k.shape[2]
    out = {"q": jax.ShapeDtypeStruct((batch, heads - 2 * n_kv, h), x.qkv.dtype)}
    if batch >= gpu().attention.shared_rope_rows:
        out |= {"new_k": None, "new_v": None}
        (q, *_), cache = _run(_write_tokens, (batch, 1), batch * n_kv, out, x)
    else:
        (q,), cache = _run(_write, (batch,), batch * heads, out, x)
    return q, *cache


@jax.jit
def rope_and_write_tokens(x: NewTokens) -> tuple[jax.Array, jax.Array, jax.Array, Cached, Cached]:
    """See ``pallas_kernels.attention.rope_cache``."""
    (batch, width, heads, h), n_kv = x.qkv.shape, x.k.shape[2]
    out = {
        name: jax.ShapeDtypeStruct((batch, width, n, h), x.qkv.dtype)
        for name, n in (("q", heads - 2 * n_kv), ("new_k", n_kv), ("new_v", n_kv))
    }
    new, cache = _run(_write_tokens, (batch, width), batch * width * n_kv, out, x)
    return *new, *cache


def _run(body, tokens, units, out, x: NewTokens):
    """tokens: rows, and tokens of each for ``_write_tokens``. units: warps' worth of work."""
    heads, h = x.qkv.shape[-2:]
    n_kv, paging = x.k.shape[2], Paging.of(x.k, x.table)
    body = functools.partial(
        body,
        shape=(*tokens, heads - 2 * n_kv, n_kv, h, capacity_of(x.k, x.table)),
        paging=paging,
        dtype=jnp.dtype(x.k.dtype).name,
        groups=x.k.scale.shape[-1] if isinstance(x.k, QTensor) else 1,
        kind=KIND[x.qkv.dtype.name],
    )
    operands = {name: getattr(x, name) for name in ("qkv", "cos", "sin", "slots", "table")}

    def run(cache):
        k, v = (jax.tree.leaves(y) for y in cache)
        return launch(
            body,
            {**operands, "k": k, "v": v},
            out,
            name="rope_and_cache_write",
            grid=-(-units // WARPS),
            registers=True,
        )

    return in_place(run, (x.k, x.v))

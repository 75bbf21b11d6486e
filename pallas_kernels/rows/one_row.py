"""One thread's work on one row of the row-wise kernel (``rows.kernel``): load, compute, join the
block's sums, store.

``rows.kernel`` says who copies, who waits and who writes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.ptx import LOG2E
from pallas_kernels.rows.fused_parts import floats, packed
from pallas_kernels.rows.plan import BYTES, QMAX, RowsPlan

_FLOAT_MAX = 3.4028234663852886e38
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves round(v), ties to even, in the low byte


def _f32(code: str, *args: p.Value) -> p.Value:
    return p.ptx(code, *args, results=p.f32(), volatile=False)


def _max(a: p.Value, b: p.Value) -> p.Value:
    return _f32("max.NaN.f32 $0, $1, $2;", a, b)


def _max_abs(a: p.Value, b: p.Value) -> p.Value:
    return _f32("{ .reg .f32 m; abs.f32 m, $2; max.NaN.f32 $0, $1, m; }", a, b)


def _tree(values: Sequence[p.Value], join: Callable[[p.Value, p.Value], p.Value]) -> p.Value:
    """Pairwise, always in the same order."""
    while len(values) > 1:
        odd = [values[-1]] if len(values) % 2 else []
        values = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def _warp_sum(value: p.Value) -> p.Value:
    return p.over_lanes(value)


def _warp_max(value: p.Value) -> p.Value:
    """The largest of values that are not negative.

    Their bits have the same order, and NaN is last.
    """
    return p.from_bits(p.warp_largest(p.bits(value)))


def load_chunk(base: p.Value, at: int, inside: p.Value | None, hint: str = "") -> list[p.Value]:
    """16 bytes, zeros where ``inside`` (i1) is false."""
    load = f"ld.global{hint}.v4.b32"
    if inside is None:
        return list(p.ptx(f"{load} {{$0,$1,$2,$3}}, [$4+{at}];", base, results=[p.i32()] * 4))
    code = (
        "{ .reg .pred q; .reg .b32 a, b, c, d; setp.ne.u32 q, $5, 0; "
        "mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0; "
        f"@q {load} {{a,b,c,d}}, [$4+{at}]; "
        "mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }"
    )
    return list(p.ptx(code, base, p.unsigned(inside), results=[p.i32()] * 4))


def _floats(words: Sequence[p.Value], kind: str) -> list[p.Value]:
    return [p.from_bits(word) for word in words] if kind == "f32" else floats(words, kind)


def _silu(gate: p.Value) -> p.Value:
    power = _f32("ex2.approx.f32 $0, $1;", gate * -LOG2E)
    return gate * _f32("rcp.approx.f32 $0, $1;", power + 1.0)


def _pack(values: Sequence[p.Value], kind: str) -> list[p.Value]:
    """Eight f32 as words of ``kind``."""
    if kind == "f32":
        return [p.bits(value) for value in values]
    if kind == "s8":
        ints = [p.bits(value + _ROUND) for value in values]
        pairs = [p.permute(ints[i], ints[i + 1], 0x0040) for i in range(0, 8, 2)]
        return [p.permute(pairs[i], pairs[i + 1], 0x5410) for i in (0, 2)]
    if kind == "e4m3":
        return [p.to_e4m3_word(values[i : i + 4]) for i in (0, 4)]
    return packed(values, kind)


class RowShare:
    """One thread's share of a row: every ``threads``-th chunk of 8 columns."""

    def __init__(self, gmem: SimpleNamespace, smem: SimpleNamespace, plan: RowsPlan):
        op = plan.op
        self.op, self.plan = op, plan
        self.thread = p.register("tid.x")
        chunks = op.width // 8 // plan.split
        self.inside = [
            None if first + plan.threads <= chunks else self.thread < chunks - first
            for first in range(0, chunks, plan.threads)
        ]
        column = self.thread * 8
        if plan.split > 1:
            self.rank = p.register("cluster_ctarank")
            column = column + self.rank * (8 * chunks)

        def start(ref: p.Value | None) -> p.Value | None:
            return None if ref is None else p.address(ref)

        def mine(ref: p.Value | None, size: int) -> p.Value | None:
            return None if ref is None else p.offset(p.address(ref), column, size)

        def shared(ref: p.Value | None) -> p.Value | None:
            return None if ref is None else p.shared_address(ref)

        self.x_start, self.x = start(gmem.x), mine(gmem.x, 2)
        self.residual_start, self.residual = start(gmem.residual), mine(gmem.residual, 2)
        self.weight = mine(gmem.weight, BYTES[op.weight or op.x])
        self.first, self.adapter = mine(gmem.first, BYTES[op.x]), start(gmem.adapter)
        self.out, self.scale = mine(gmem.out, BYTES[op.out]), start(gmem.scale)
        self.sum, self.inner = mine(gmem.sum, 2), start(gmem.inner)
        self.given = start(gmem.given)
        self.partial, self.inner_sums = shared(smem.partial), shared(smem.inner_sums)
        self.ring = shared(smem.ring)

    def at(self, chunk: int, size: int) -> int:
        """Byte offset of this thread's ``chunk`` from its first."""
        return 8 * size * self.plan.threads * chunk

    def halves(self) -> list[int]:
        """Byte offsets of the arrays that lie side by side in a row of x."""
        return [0, 2 * self.op.width] if self.op.form == "gate" else [0]

    def load(self, row: p.Value) -> list[p.Value]:
        """The words of a row, chunk by chunk; then those of the residual."""
        sources = [(p.offset(self.x, row, self.op.row_bytes), self.halves())]
        if self.op.residual:
            sources.append((p.offset(self.residual, row, self.op.row_bytes), [0]))
        return [
            word
            for base, halves in sources
            for chunk, inside in enumerate(self.inside)
            for half in halves
            for word in load_chunk(base, self.at(chunk, 2) + half, inside, ".L1::no_allocate")
        ]

    def load_shared(self, slot: p.Value) -> list[p.Value]:
        """The same out of a ring slot, where a chunk beyond the row holds something else."""
        base = slot + self.thread * 16
        words = []
        for source in range(2 if self.op.residual else 1):
            for chunk, inside in enumerate(self.inside):
                for half in self.halves():
                    at = source * self.op.row_bytes + self.at(chunk, 2) + half
                    got = p.load_shared(base, 4, at)
                    if inside is not None:
                        got = [p.where(inside, word, 0) for word in got]
                    words += got
        return words

    def load_weight(self) -> list[p.Value]:
        if self.weight is None:
            return []
        size = BYTES[self.op.weight]
        return [
            word
            for chunk, inside in enumerate(self.inside)
            for part in range(size // 2)
            for word in load_chunk(self.weight, self.at(chunk, size) + 16 * part, inside)
        ]

    def _guarded(self, chunk: int, body: Callable[[], None]) -> None:
        if self.inside[chunk] is None:
            body()
        else:
            p.when(self.inside[chunk], body)

    def add_residual(self, row: p.Value, words: list[p.Value]) -> list[p.Value]:
        if not self.op.residual:
            return words
        n = len(words) // 2
        words = [p.add_pairs(words[i], words[i + n], self.op.x) for i in range(n)]
        base = p.offset(self.sum, row, self.op.row_bytes)
        for chunk in range(len(self.inside)):
            part = words[4 * chunk : 4 * chunk + 4]
            self._guarded(
                chunk, lambda chunk=chunk, part=part: p.store_global(base, part, self.at(chunk, 2))
            )
        return words

    @property
    def joins(self) -> bool:
        """Whether a row's threads exchange a sum or a largest value."""
        return self.op.form == "norm" or self.op.finds_scales

    def values(self, chunk: int, words: list[p.Value]) -> list[p.Value]:
        """Eight values of the form, or of a norm the eight that it weighs."""
        op = self.op
        if op.form != "gate":
            return _floats(words[4 * chunk : 4 * chunk + 4], op.x)
        gate = _floats(words[8 * chunk : 8 * chunk + 4], op.x)
        up = _floats(words[8 * chunk + 4 : 8 * chunk + 8], op.x)
        return [_silu(g) * u for g, u in zip(gate, up, strict=True)]

    def compute(self, words: list[p.Value], weight: list[p.Value]):
        """(t of each chunk, this thread's sum of squares or None, its max|t| or None)."""
        op, zero = self.op, p.cf(0.0)
        squares, peaks, chunks = [zero] * 4, [zero] * 4, []
        for chunk in range(len(self.inside)):
            t = self.values(chunk, words)
            if op.form == "norm":
                for i, s in enumerate(t):
                    squares[i % 4] = p.fma(s, s, squares[i % 4])
                n = 2 * BYTES[op.weight]
                w = _floats(weight[n * chunk : n * chunk + n], op.weight)
                t = [a * b for a, b in zip(t, w, strict=True)]
            if op.finds_scales:
                for i, value in enumerate(t):
                    peaks[i % 4] = _max_abs(peaks[i % 4], value)
            chunks.append(t)
        total = _tree(squares, operator.add) if op.form == "norm" else None
        return chunks, total, _tree(peaks, _max) if op.finds_scales else None

    def join(self, total: p.Value | None, peak: p.Value | None, turn: p.Value):
        """(sum of total, largest peak) of the whole row.  turn: 0 or 1, alternating by row, so
        that one barrier a row is enough."""
        warps, split, zero = self.plan.threads // 32, self.plan.split, p.cf(0.0)
        total = None if total is None else _warp_sum(total)
        peak = None if peak is None else _warp_max(peak)
        pair = [p.bits(zero if value is None else value) for value in (total, peak)]
        here = self.partial + turn * (8 * warps)
        warp, lane = self.thread >> 5, self.thread & 31
        mine = here + warp * 8
        p.when(lane < 1, lambda: p.store_shared(mine, pair))
        if split == 1:
            p.barrier()
            words = p.load_shared(here, 2 * warps)
            sums, peaks = (
                [p.from_bits(w) for w in words[::2]],
                [p.from_bits(w) for w in words[1::2]],
            )
            return (
                None if total is None else _tree(sums, operator.add),
                None if peak is None else _tree(peaks, _max),
            )
        # A lane reads one warp of one block.
        p.cluster_barrier()
        valid = lane < split * warps
        index = p.where(valid, lane, 0)
        rank, warp = index // warps, index % warps
        there = p.peer_address(here + warp * 8, rank)
        got = [p.where(valid, p.load_peer(there, 4 * i), zero) for i in range(2)]
        # No block may leave while others read its memory: the wait is at the end of the kernel.
        if self.op.adapters is None:
            p.cluster_arrive("release")
        return (
            None if total is None else _warp_sum(got[0]),
            None if peak is None else _warp_max(got[1]),
        )

    def load_given(self) -> Callable[[p.Value | None], p.Value] | None:
        """Load the given scale, if there is one: (the norm's factor) -> the factor of t."""
        if self.given is None:
            return None
        (scale,) = p.load_global(self.given, 1, 0, "f32")
        inverse = _f32("rcp.rn.f32 $0, $1;", scale)
        return lambda norm: inverse if norm is None else inverse * norm

    def norm_factor(self, total: p.Value | None) -> p.Value | None:
        if total is None:
            return None
        mean = total * (1.0 / self.op.width) + self.op.eps
        return p.rsqrt(mean)

    def factor(self, row: p.Value, factor: p.Value | None, peak: p.Value | None):
        """Return the factor of t or None, by the norm's ``factor``; store the row's scale."""
        op, zero = self.op, p.cf(0.0)
        if peak is None:
            return factor
        largest = peak if factor is None else peak * factor
        scale = p.divide(largest, QMAX[op.out])
        # A row of zeros with eps = 0 has factor inf.
        scale = p.where(p.equal(peak, zero), zero, scale)
        inverse = _f32("rcp.rn.f32 $0, $1;", scale)
        inverse = inverse if factor is None else inverse * factor
        # A subnormal scale's reciprocal overflows; with the largest float |word| is <= qmax still.
        inverse = p.minimum(inverse, _FLOAT_MAX)
        owner = self.thread
        if self.plan.split > 1:
            owner = owner + self.rank
        at = p.offset(self.scale, row, 4)
        p.when(owner < 1, lambda: p.store_global(at, [scale]))
        return p.where(scale > zero, inverse, zero)

    def store(self, row: p.Value, chunks: list[list[p.Value]], factor: p.Value | None) -> None:
        for chunk, values in enumerate(chunks):
            self.store_chunk(row, chunk, values, factor)

    def store_chunk(
        self, row: p.Value, chunk: int, values: list[p.Value], factor: p.Value | None
    ) -> None:
        size = BYTES[self.op.out]
        base = p.offset(self.out, row, size * self.op.width)
        if factor is not None:
            values = [value * factor for value in values]
        if self.given is not None and self.op.out == "s8":  # e4m3's conversion has its ends
            ends = p.cf(-128.0), p.cf(127.0)
            values = [p.minimum(p.maximum(value, ends[0]), ends[1]) for value in values]
        words = _pack(values, self.op.out)

        self._guarded(chunk, lambda: p.store_global(base, words, self.at(chunk, size)))

    def row(
        self, row, words, weight, turn, release: Callable[[], None] = lambda: None, inner=None
    ) -> None:
        """release: called when every thread of the block has taken its words.  inner: an ``Inner``,
        where the row has adapters."""
        words = self.add_residual(row, words)
        given = self.load_given()
        if not self.joins:
            if self.plan.ring:  # every thread has its words
                p.barrier()
                release()
            for chunk in range(len(self.inside)):
                factor = None if given is None else given(None)
                self.store_chunk(row, chunk, self.values(chunk, words), factor)
            return
        chunks, total, peak = self.compute(words, weight)
        total, peak = self.join(total, peak, turn)
        release()
        norm = self.norm_factor(total)
        self.store(row, chunks, self.factor(row, norm, peak) if given is None else given(norm))
        if inner is not None:
            inner.products(chunks, norm)

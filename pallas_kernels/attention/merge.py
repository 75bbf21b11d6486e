"""The second kernel of decode attention on Hopper: chunks' outputs into one.

    out = sum_c 2^(top_c - top) out_c / sum_c 2^(top_c - top) sum_c        top = max_c top_c

A head's sink is one more share: of maximum ``sink``, sum 1 and outputs 0 (``with_sink``).
``merge_parts`` sums parts of a row that have all been written.

One block per (row, query head).  A lane holds H / 32 columns; the warps take chunks in turn, a
batch of loads at a time, each with a maximum of its own, and meet in shared memory.  Chunks without
a visible key were never written and are not read.

Copies: a lane loads its columns of each part from device memory into registers.
Waits: for the kernel before; in ``ChunkMerge`` once at the block's barrier, for the warps' sums.
Writes: warp 0 of a block (in ``_merge_parts`` every warp its own head) stores the head's output.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.launch import launch
from pallas_kernels.rows.fused_parts import KIND, packed

NEG_INF = float("-inf")


def merge_chunks(
    parts: jax.Array,
    stats: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None = None,
    *,
    capacity: int,
    chunk: int,
    window: int | None,
    rotated: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """``parts [B, chunks, N, H]``, ``stats [B, chunks, N, 2]`` (base-2 maximum and sum), float32
    -> ``[B, N, H]``, with ``rotated`` rotated by ``hadamard``; what sees 0 keys gives zeros.

    lengths: ``[B]``, or ``[B, T]`` of T tokens of N / T heads, one after the other.  sinks: float32
    ``[N / T]``, or None.
    """
    batch, splits, n, h = parts.shape
    warps = 16 if splits > 32 else 4
    facts = {"shape": (capacity, n, h), "chunk": chunk, "window": window, "warps": warps}
    facts |= {"kind": KIND[jnp.dtype(out_dtype).name], "rotated": rotated}

    (out,) = launch(
        functools.partial(ChunkMerge, heads=batch * n // lengths.size, **facts),
        {"parts": parts, "stats": stats, "lengths": lengths, "sinks": sinks},
        {"out": jax.ShapeDtypeStruct((batch, n, h), out_dtype)},
        name="decode_attention_merge",
        grid=batch * n,
        warpgroups=warps // 4,
        scratch={"sums": warps * 32 * (2 + h // 32)},
        registers=True,
    )
    return out


def merge_parts(
    parts: jax.Array,
    stats: jax.Array,
    sinks: jax.Array | None = None,
    *,
    rotated: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """``parts [B, parts, N, H]``, ``stats [B, parts, N, 2]``, sinks as ``merge_chunks`` has them.

    All parts are written; one without a visible key has the sum 0.
    """
    batch, splits, n, h = parts.shape
    merge = functools.partial(
        _merge_parts, shape=parts.shape, kind=KIND[jnp.dtype(out_dtype).name], rotated=rotated
    )
    (out,) = launch(
        merge,
        {"parts": parts, "stats": stats, "sinks": sinks},
        {"out": jax.ShapeDtypeStruct((batch, n, h), out_dtype)},
        name="decode_attention_merge",
        grid=-(-batch * n // 4),
        registers=True,
    )
    return out


def _merge_parts(gmem, smem, *, shape, kind, rotated):
    """A warp for each (row, query head)."""
    del smem
    batch, splits, n, h = shape
    thread, block = p.register("tid.x"), p.register("ctaid.x")
    lane, columns = thread & 31, h // 32
    index = block * 4 + (thread >> 5)
    p.await_kernel()

    def merge():
        row, head = index // n, index % n
        line = row * (splits * n) + head
        stats = p.offset(p.address(gmem.stats), line, 8)
        part = p.offset(p.offset(p.address(gmem.parts), line, 4 * h), lane, 4 * columns)
        shares = []
        for i in range(splits):
            peak, whole = p.load_global(stats, 2, 8 * n * i, "f32")
            shares.append((peak, whole, p.load_global(part, columns, 4 * h * n * i, "f32")))
        sums = combine(shares)
        some = 0 < p.bits(sums[1])  # else the outputs may be NaN
        _, whole, *x = with_sink(sums, gmem.sinks, head)
        inverse = p.divide(1.0, p.where(some, whole, 1.0))
        x = [p.where(some, v * inverse, 0.0) for v in x]
        if rotated:
            x = hadamard_of_lanes(x, lane, 32)
        base = p.offset(p.offset(p.address(gmem.out), index, 2 * h), lane, 2 * columns)
        p.store_global(base, packed(x, kind))

    p.when(index < batch * n, merge)


class ChunkMerge:
    """One block per (row, query head): sum the chunks' parts, each faded to the common maximum.

    heads: query heads of a token.  N is tokens times heads: ``block // heads`` is the (row, token)
        whose length it is, and ``block % heads`` the query head whose sink it is.
    """

    def __init__(self, gmem, smem, *, shape, heads, chunk, window, warps, kind, rotated):
        self.gmem, self.smem, self.heads = gmem, smem, heads
        self.chunk, self.window = chunk, window
        self.warps, self.kind, self.rotated = warps, kind, rotated
        self.capacity, self.n, self.h = shape
        self.splits = -(-self.capacity // chunk)
        self.columns = self.h // 32  # of a lane
        thread, self.block = p.register("tid.x"), p.register("ctaid.x")
        self.warp, self.lane = thread >> 5, thread & 31

    def run(self) -> None:
        p.await_kernel()
        self.find_chunks()
        size = self.leave(self.sum_chunks())
        p.barrier()  # all warps' sums are there
        self.finish(size)

    def find_chunks(self) -> None:
        """The chunks that the row's queries see, and where they lie."""
        n, h, token = self.n, self.h, self.block // self.heads
        (length,) = p.load_global(p.offset(p.address(self.gmem.lengths), token, 4), 1)
        self.length = p.larger(p.smaller(length, self.capacity), 0)
        self.first = p.ci(0)
        if self.window is not None:
            self.first = p.larger(self.length - self.window, 0) // self.chunk
        self.stop = (self.length + (self.chunk - 1)) // self.chunk
        self.row, self.head = self.block // n, self.block % n
        line = self.row * self.splits * n + self.head
        self.stats = p.offset(p.address(self.gmem.stats), line, 8)
        part = p.offset(p.address(self.gmem.parts), line, 4 * h)
        self.part = p.offset(part, self.lane, 4 * self.columns)

    def sum_chunks(self) -> list:
        """[maximum, sum, *the lane's columns] of the warp's chunks, a batch of loads at a time."""
        batch = min(8, -(-self.splits // self.warps))

        def add(i, carry):
            loaded = [self.load_chunk(i + b * self.warps) for b in range(batch)]
            return combine([tuple(carry[:2]) + (carry[2:],), *loaded])

        start = [p.cf(NEG_INF)] + [p.cf(0.0)] * (1 + self.columns)
        return p.loop(self.first + self.warp, self.stop, self.warps * batch, start, add)

    def load_chunk(self, index):
        """(maximum, sum, columns) of a chunk; past the last chunk that one, without weight."""
        inside = p.below(index, self.stop)
        index = p.smaller(index, self.stop - 1)
        at = p.offset_rows(self.stats, index, 8 * self.n)
        at_part = p.offset_rows(self.part, index, 4 * self.h * self.n)
        peak, whole = p.load_global(at, 2, kind="f32")
        peak = p.where(inside, peak, NEG_INF)
        return peak, whole, p.load_global(at_part, self.columns, kind="f32")

    def leave(self, sums: list) -> int:
        """Leave the warp's sums in shared memory; return how many of a lane there are."""
        self.table = p.shared_address(self.smem.sums) + self.lane * 4
        here = self.table + self.warp * (4 * 32 * len(sums))
        for i, x in enumerate(sums):
            p.store_shared(here, [x], 128 * i)
        return len(sums)

    def finish(self, size: int) -> None:
        """By warp 0."""
        p.when(self.warp < 1, lambda: self.write(self.merged(size)))

    def merged(self, size: int) -> list:
        """The lane's columns of all warps' sums."""
        shares = [
            [p.load_float(self.table, 128 * (w * size + i)) for i in range(size)]
            for w in range(self.warps)
        ]
        joined = combine([(top, whole, out) for top, whole, *out in shares])
        _, whole, *total = with_sink(joined, self.gmem.sinks, self.head % self.heads)
        some = 0 < self.length
        inverse = p.divide(1.0, p.where(some, whole, 1.0))
        return [x * inverse for x in total]

    def write(self, values: list) -> None:
        if self.rotated:
            values = hadamard_of_lanes(values, self.lane, 32)
        base = p.offset(p.address(self.gmem.out), self.row * self.n + self.head, 2 * self.h)
        base = p.offset(base, self.lane, 2 * self.columns)
        p.store_global(base, packed(values, self.kind))


def with_sink(sums, sinks_ref, head):
    """[maximum, sum, *out] of ``combine``, with the sink of a query head where there are any."""
    if sinks_ref is None:
        return sums
    (sink,) = p.load_global(p.offset(p.address(sinks_ref), head, 4), 1, kind="f32")
    sink = sink * math.log2(math.e)
    top, whole, *out = sums
    return combine([(top, whole, out), (sink, p.cf(1.0), [p.cf(0.0)] * len(out))])


def combine(shares):
    """[maximum, sum, *out] of shares (maximum, sum, out), in order; the maximum of an empty share
    is -inf, and what it holds has to be finite."""
    top = functools.reduce(p.maximum, [peak for peak, _, _ in shares])
    # Where nothing has been seen, any finite number keeps the weights at zero.
    base = p.maximum(top, -3.0e38)
    total, sums = p.cf(0.0), [p.cf(0.0)] * len(shares[0][2])
    for peak, whole, out in shares:
        weight = p.exp2(peak - base)
        total = p.fma(whole, weight, total)
        sums = [p.fma(x, weight, y) for x, y in zip(out, sums, strict=True)]
    return [top, total, *sums]

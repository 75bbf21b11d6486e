"""The second kernel of decode attention on Hopper: chunks' outputs into one.

    out = sum_c 2^(top_c - top) out_c / sum_c 2^(top_c - top) sum_c        top = max_c top_c

A head's sink is one more share: of maximum ``sink``, sum 1 and outputs 0 (``with_sink``).
``merge_parts`` sums parts of a row that have all been written.

One block per (row, query head).  A lane holds H / 32 columns; the warps take chunks in turn, a
batch of loads at a time, each with a maximum of its own, and meet in shared memory.  Chunks without
a visible key were never written and are not read.

Copies: a lane loads its columns of each part from device memory into registers.
Waits: for the kernel before; in ``_merge`` once at the block's barrier, for the warps' sums.
Writes: warp 0 of a block (in ``_merge_parts`` every warp its own head) stores the head's output.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.attention.codes import hadamard_of_lanes
from pallas_kernels.fused_parts import KIND, packed
from pallas_kernels.launch import launch

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
    merge = functools.partial(
        _merge,
        chunk=chunk,
        shape=(capacity, n, h),
        window=window,
        heads=batch * n // lengths.size,
        kind=KIND[jnp.dtype(out_dtype).name],
        warps=warps,
        rotated=rotated,
    )
    (out,) = launch(
        merge,
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
            vector = min(columns, 4)
            x = [
                value
                for c in range(0, columns, vector)
                for value in p.load_global(part, vector, 4 * h * n * i + 4 * c, "f32")
            ]
            shares.append((peak, whole, x))
        sums = combine(shares)
        some = 0 < p.bits(sums[1])  # else the outputs may be NaN
        _, whole, *x = with_sink(sums, gmem.sinks, head)
        inverse = p.divide(p.cf(1.0), p.where(some, whole, 1.0))
        x = [p.where(some, v * inverse, 0.0) for v in x]
        if rotated:
            x = hadamard_of_lanes(x, lane, 32)
        base = p.offset(p.offset(p.address(gmem.out), index, 2 * h), lane, 2 * columns)
        _store(base, packed(x, kind))

    p.when(index < batch * n, merge)


def _merge(
    gmem,
    smem,
    *,
    chunk,
    shape,
    heads,
    window,
    kind,
    warps,
    rotated,
):
    """One block per (row, query head): sum the splits' parts, each faded to the common maximum;
    ``heads`` share a length."""
    capacity, n, h = shape
    splits = -(-capacity // chunk)
    thread, block = p.register("tid.x"), p.register("ctaid.x")
    warp, lane = thread >> 5, thread & 31
    row, head = block // n, block % n
    own = block // heads
    p.await_kernel()
    (length,) = p.load_global(p.offset(p.address(gmem.lengths), own, 4), 1)
    length = p.larger(p.smaller(length, p.ci(capacity)), p.ci(0))
    first = p.ci(0)
    if window is not None:
        first = p.larger(length - window, p.ci(0)) // chunk
    stop = (length + (chunk - 1)) // chunk
    line = row * splits * n + head
    stats = p.offset(p.address(gmem.stats), line, 8)
    columns = h // 32
    part = p.offset(p.offset(p.address(gmem.parts), line, 4 * h), lane, 4 * columns)

    batch_of = min(8, -(-splits // warps))
    vector = min(columns, 4)

    def add(i, carry):
        loaded = []
        for b in range(batch_of):
            index = i + b * warps
            inside = p.below(index, stop)
            index = p.smaller(index, stop - 1)
            at, at_part = p.offset_rows(stats, index, 8 * n), p.offset_rows(part, index, 4 * h * n)
            peak, whole = p.load_global(at, 2, kind="f32")
            values = [
                x
                for c in range(0, columns, vector)
                for x in p.load_global(at_part, vector, 4 * c, "f32")
            ]
            loaded.append((p.where(inside, peak, NEG_INF), whole, values))
        return combine([tuple(carry[:2]) + (carry[2:],), *loaded])

    start = [p.cf(NEG_INF)] + [p.cf(0.0)] * (1 + columns)
    sums = p.loop(first + warp, stop, warps * batch_of, start, add)
    table = p.shared_address(smem.sums) + lane * 4
    here = table + warp * (4 * 32 * len(sums))
    for i, x in enumerate(sums):
        p.store_shared(here, [x], 128 * i)
    p.barrier()

    def write():
        shares = [
            [p.load_float(table, 128 * (w * len(sums) + i)) for i in range(len(sums))]
            for w in range(warps)
        ]
        joined = combine([(top, whole, out) for top, whole, *out in shares])
        _, whole, *total = with_sink(joined, gmem.sinks, head % heads)
        some = 0 < length
        inverse = p.divide(p.cf(1.0), p.where(some, whole, 1.0))
        values = [x * inverse for x in total]
        if rotated:
            values = hadamard_of_lanes(values, lane, 32)
        base = p.offset(p.address(gmem.out), row * n + head, 2 * h)
        base = p.offset(base, lane, 2 * columns)
        _store(base, packed(values, kind))

    p.when(warp < 1, write)


def _store(base, words) -> None:
    """Store words, four together."""
    for i in range(0, len(words), 4):
        p.store_global(base, words[i : i + 4], 4 * i)


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
    base = p.maximum(top, p.cf(-3.0e38))
    total, sums = p.cf(0.0), [p.cf(0.0)] * len(shares[0][2])
    for peak, whole, out in shares:
        weight = p.exp2(peak - base)
        total = p.fma(whole, weight, total)
        sums = [p.fma(x, weight, y) for x, y in zip(out, sums, strict=True)]
    return [top, total, *sums]

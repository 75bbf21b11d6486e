"""The second kernel of decode attention on Hopper: chunks' outputs into one.

    out = sum_c 2^(top_c - top) out_c / sum_c 2^(top_c - top) sum_c        top = max_c top_c

One block per (row, query head).  A lane holds H / 32 columns, the warps take chunks in turn, and
their sums meet in shared memory.  Chunks without a visible key were never written and are not read.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention_ptx as a
from pallas_kernels import mosaic as p
from pallas_kernels.attention_words import KIND

NEG_INF = float("-inf")


def merge_chunks(
    parts: jax.Array, stats: jax.Array, lengths: jax.Array, *, capacity: int, chunk: int,
    window: int | None, out_dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    """``parts [B, chunks, N, H]``, ``stats [B, chunks, N, 2]`` (base-2 maximum and sum), float32
    -> ``[B, N, H]``; a row of length 0 gives zeros."""
    batch, splits, n, h = parts.shape
    warps = 16 if splits > 32 else 4
    merge = functools.partial(
        _merge, chunk=chunk, shape=(batch, capacity, n, h), window=window,
        kind=KIND[jnp.dtype(out_dtype).name], warps=warps,
    )  # fmt: skip

    def decode_attention_merge(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(merge)(*refs)

    return plgpu.kernel(
        decode_attention_merge,
        out_type=jax.ShapeDtypeStruct((batch, n, h), out_dtype),
        grid=(batch * n,),
        grid_names=("heads",),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((warps * 32 * (1 + h // 32),), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(parts, stats, lengths)


def _merge(ctx, part_ref, stats_ref, lengths_ref, out_ref, sums_ref, *, chunk, shape, window, kind,
           warps):  # fmt: skip
    """One block per (row, query head): sum the splits' parts, each faded to the common maximum."""
    del ctx
    batch, capacity, n, h = shape
    splits = -(-capacity // chunk)
    thread, block = p.register("tid.x"), p.register("ctaid.x")
    warp, lane = p.shift_right(thread, 5), arith.andi(thread, p.ci(31))
    row, head = arith.divui(block, p.ci(n)), arith.remui(block, p.ci(n))
    (length,) = a.load_words(p.offset(p.address(lengths_ref), row, 4), 1, cache=".nc")
    length = a.larger(a.smaller(length, p.ci(capacity)), p.ci(0))
    first = p.ci(0)
    if window is not None:
        first = arith.divui(a.larger(p.add(length, -window), p.ci(0)), p.ci(chunk))
    stop = arith.divui(p.add(length, chunk - 1), p.ci(chunk))
    line = p.add(p.mul(p.mul(row, splits), n), head)
    stats = p.offset(p.address(stats_ref), line, 8)
    columns = h // 32
    part = p.offset(p.offset(p.address(part_ref), line, 4 * h), lane, 4 * columns)

    def best(i, carry):
        index = p.add(i, lane)
        at = a.offset_rows(stats, a.smaller(index, p.add(stop, -1)), 8 * n)
        return [a.maximum(carry[0], a.load_words(at, 1, kind="f32", cache=".nc")[0])]

    (top,) = a.loop(first, stop, p.ci(32), [p.cf(NEG_INF)], best)
    for lanes in (1, 2, 4, 8, 16):
        top = a.maximum(top, a.shuffle_xor(top, lanes))

    batch_of = 4 if splits > 2 * warps else 2 if splits > warps else 1
    vector = min(columns, 4)

    def add(i, carry):
        total, out = carry[0], carry[1:]
        loaded = []
        for b in range(batch_of):
            index = p.add(i, b * warps)
            inside = a.below(index, stop)
            index = a.smaller(index, p.add(stop, -1))
            at, at_part = a.offset_rows(stats, index, 8 * n), a.offset_rows(part, index, 4 * h * n)
            values = [
                x
                for c in range(0, columns, vector)
                for x in a.load_words(at_part, vector, 4 * c, kind="f32", cache=".nc")
            ]
            loaded.append((inside, a.load_words(at, 2, kind="f32", cache=".nc"), values))
        for inside, (peak, whole), values in loaded:
            weight = arith.select(inside, a.exp2(arith.subf(peak, top)), p.cf(0.0))
            total = p.fma(whole, weight, total)
            out = [p.fma(x, weight, y) for x, y in zip(values, out, strict=True)]
        return [total, *out]

    start = [p.cf(0.0)] * (1 + columns)
    sums = a.loop(p.add(first, warp), stop, p.ci(warps * batch_of), start, add)
    table = p.add(p.shared_address(sums_ref), p.mul(lane, 4))
    if warps > 1:
        here = p.add(table, p.mul(warp, 4 * 32 * (1 + columns)))
        for i, x in enumerate(sums):
            p.store_shared(here, x, 128 * i)
        p.barrier()

    def write():
        total = sums
        for w in range(1, warps):
            total = [
                arith.addf(x, p.load_shared(table, 128 * (w * (1 + columns) + i)))
                for i, x in enumerate(total)
            ]
        some = p.less(p.ci(0), length)
        inverse = a.divide(p.cf(1.0), arith.select(some, total[0], p.cf(1.0)))
        values = [arith.mulf(x, inverse) for x in total[1:]]
        base = p.offset(p.address(out_ref), p.add(p.mul(row, n), head), 2 * h)
        base = p.offset(base, lane, 2 * columns)
        pairs = [a.pack(x, y, kind) for x, y in zip(values[::2], values[1::2], strict=True)]
        a.store_words(base, pairs)

    p.when(p.less(warp, 1), write)

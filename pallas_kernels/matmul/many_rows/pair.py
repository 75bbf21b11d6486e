"""Products of two operands of one dtype on Hopper: W8A8, FP8 and, of few rows, 16-bit floats.

    out[m, n] = acc[m, n] * scale_x[m] * scale_w[n] + low[m, n] + bias[n]      one cast at the end

Contract: x [M, K], w [N, K], both int8 (acc in int32, exact), e4m3, bf16 or f16; 16 bytes divide a
row, N % 8 == 0, any M: copies past an edge bring zeros, stores past an edge are not made.

    feeder    : TMA x, w of step i+1 | i+2 | ... | next tile's scales, next tile's step 0 | ...
    compute 0 : wait i | wgmma i | release i-1 | ...      rows   0.. 63 of a 128 x 256 tile
    compute 1 : wait i | wgmma i | release i-1 | ...      rows  64..127
    both      : after the last step  acc -> float32 * scales + bias -> shared memory -> TMA store

The weight tile is multicast to the two blocks of a cluster, which lie below each other in M: the
pair reads 256 + 256 rows of K for 256 x 256 outputs, which is what keeps L2 ahead of the tensor
cores (48 bytes a cycle and SM would be needed without; 32 with).

Few rows (``m`` 64: the warpgroups side by side in n; a cluster's blocks share x) are bound by the
bytes of w.  ``split`` lets
the two blocks of a cluster read half of K each, so that 64 clusters of 64 rows of w have as much to
do as 128 blocks of 32 and read half of x: each block sends the sums of one warpgroup to the other's
shared memory and finishes the other.  ``swiglu`` gives a warpgroup rows of gate and the same of up.

A low-rank term (LoRA: ``inner[M, R] second[N, R]^T``, 16-bit floats into a float32 sum beside the
other) comes through the same ring, behind a tile's last step of K, in slots of 64 ranks.

FP8 sums.  ``promote`` gives the tensor cores a fresh accumulator every few steps of 128 and adds it
to a float32 one in registers.  Two accumulators of 256 columns do not fit 232 registers, so fp8
tiles have at most 192 columns, and where a thread has 168 (``plan``) 160.

Floor: 132 SMs x 8192 op/cycle x ~1.75 GHz = 1890 TOPS.  On an H200, K = 4096, N = 14336, M = 8192,
bf16 output, bias: int8 1616 to 1625 (XLA's bare int8 dot 1493, with scales 929), e4m3 1461 to 1489;
M = 64 18.1 us.  What was tried: ``matmul/NOTES.md``; ``python -m benchmarks.kernels.prefill``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.pipeline import (
    REGISTERS,
    drain,
    feeder,
    launch,
    meet_peer,
    my_tiles,
    ring_barriers,
    ring_next,
    ring_slot,
    tile_of,
)
from pallas_kernels.matmul.many_rows.plan import BLOCK_BYTES, PairTile

_LAYOUT = plgpu.Layout.WGMMA
LOW_BLOCK = BLOCK_BYTES // 2  # ranks of a low-rank term in a slot


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a product has beside its two operands."""

    scales: bool
    bias: bool
    swiglu: bool  # w [2, N, K] is gate and up; a tile has as many rows of either
    sources: tuple[int, ...] = ()  # of a low-rank term: the rows of w that each has


def _body(*refs, tile: PairTile, extras: Extras, m: int, n: int, k: int, acc_dtype):
    x, w, *refs = refs
    has_scales, has_bias, swiglu = extras.scales, extras.bias, extras.swiglu
    vectors = [refs.pop(0) for _ in range(2 * has_scales + has_bias)]
    low = [refs.pop(0) for _ in range(bool(extras.sources) + len(extras.sources))]
    out, *buffers, sx_sm, sw_sm, b_sm, full, empty, s_full, s_empty = refs[:11]
    sums = refs[11:]
    vectors_sm = (*((sx_sm, sw_sm) if has_scales else ()), b_sm)
    (x_rows, x_sm, *x_low), (w_rows, w_sm, *w_low), (o_rows, o_sm) = map(pipeline.views, buffers)
    wg, pair = lax.axis_index("wg"), lax.axis_index("pair")
    n_clusters, stages = tile.sms // (tile.cluster * tile.split), tile.stages
    out_cols = tile.cols // 2 if swiglu else tile.cols  # of a warpgroup
    wide = tile.n // 2 if swiglu else tile.n
    few = tile.m == 64  # blocks of a cluster share x, else w
    m_cluster, n_cluster = (1, tile.cluster) if few else (tile.cluster, 1)
    grid = pl.cdiv(m, tile.m * m_cluster), pl.cdiv(n, wide * n_cluster)
    box = pipeline.rows_of_box(m, tile.m)
    block_k = BLOCK_BYTES // x.dtype.itemsize
    steps = pl.cdiv(k, block_k) // tile.split
    ranks = low[1].shape[1] if low else 0  # of all adapters
    low_steps = pl.cdiv(ranks, LOW_BLOCK)
    loads = steps + low_steps
    part = lax.axis_index("part")
    tiles = my_tiles(grid[0] * grid[1], n_clusters)
    axes = "pair" if tile.cluster > 1 else None
    x_axes, w_axes = (axes, None) if few else (None, axes)

    def origin(t):
        mi, ni = tile_of(t, grid, n_clusters, 0, tile.width)
        if tile.cluster > 1:
            mi, ni = (mi, ni * n_cluster + pair) if few else (mi * m_cluster + pair, ni)
        return mi * tile.m, ni * wide

    pipeline.await_kernel(w, wide, tile, m)

    @feeder(wg, 2)
    def copy_tiles():
        def one_tile(t, _):
            m0, n0 = origin(t)
            if vectors:
                slot = t % 2
                pl.when(t >= 2)(lambda: plgpu.barrier_wait(s_empty.at[slot]))
                for ref, ref_sm in zip(vectors, vectors_sm, strict=False):
                    span = pl.ds(m0 if ref_sm is sx_sm else n0, ref_sm.shape[1])
                    plgpu.copy_gmem_to_smem(ref.at[span], ref_sm.at[slot], s_full.at[slot])

            def load(j, at):
                ks = pl.ds((part * steps + j) * block_k, block_k)
                pl.when(t * loads + j >= stages)(lambda: plgpu.barrier_wait(empty.at[at]))
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(m0, box), ks],
                    x_rows.at[at, pl.ds(0, box)],
                    full.at[at],
                    collective_axes=x_axes,
                )
                if swiglu:  # a warpgroup's rows of gate, then the same of up
                    for half in range(2):
                        rows = pl.ds(n0 + half * out_cols, out_cols)
                        plgpu.copy_gmem_to_smem(w.at[:, rows, ks], w_rows.at[at, half], full.at[at])
                else:
                    rows = pl.ds(n0, tile.n)
                    plgpu.copy_gmem_to_smem(
                        w.at[rows, ks], w_rows.at[at], full.at[at], collective_axes=w_axes
                    )
                return ring_next(at, 1, stages)

            at = lax.fori_loop(0, steps, load, ring_slot(t * loads, stages))
            if low:
                lax.fori_loop(0, low_steps, functools.partial(load_low, t, m0, n0), at)

        def load_low(t, m0, n0, j, at):
            """The inner products and second factors of the source that the tile's rows are of."""
            inner, *second = low
            pl.when(t * loads + steps + j >= stages)(lambda: plgpu.barrier_wait(empty.at[at]))
            begin = 0
            for source, (size, b) in enumerate(zip(extras.sources, second, strict=True)):

                @pl.when((n0 >= begin) & (n0 < begin + size))
                def copy(source=source, begin=begin, b=b):
                    ranks_of = pl.ds(source * ranks + j * LOW_BLOCK, LOW_BLOCK)
                    plgpu.copy_gmem_to_smem(
                        inner.at[pl.ds(m0, box), ranks_of],
                        x_low[0].at[at, pl.ds(0, box)],
                        full.at[at],
                    )
                    ks = pl.ds(j * LOW_BLOCK, LOW_BLOCK)
                    rows = pl.ds(n0 - begin, tile.n)
                    plgpu.copy_gmem_to_smem(b.at[rows, ks], w_low[0].at[at], full.at[at])

                begin += size
            return ring_next(at, 1, stages)

        lax.fori_loop(0, tiles, one_tile, None)
        drain(empty, tiles * loads, stages)
        if vectors:
            drain(s_empty, tiles, 2)

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(REGISTERS[2][1], action="increase")
        row0 = 0 if few else wg * tile.rows
        col0 = wg * tile.cols if few else 0  # in the tile
        out0 = wg * out_cols if few else 0

        def operands(x_sm, w_sm, at):
            a, b = x_sm.at[at], w_sm.at[at]
            if few:
                b = w_sm.at[at, pl.ds(col0, tile.cols)]
            else:
                a = x_sm.at[at, pl.ds(row0, tile.rows)]
            return a, b.transpose((1, 0))

        def accumulate(first, count, acc, views=(x_sm, w_sm)):
            """acc += the products of slots first .. first + count; one wgmma stays in flight."""

            def step(j, at):
                plgpu.barrier_wait(full.at[at])
                plgpu.wgmma(acc, *operands(*views, at))
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(empty.at[ring_next(at, stages - 1, stages)], predicate=j > 0)
                return ring_next(at, 1, stages)

            end = lax.fori_loop(0, count, step, ring_slot(first, stages))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[ring_next(end, stages - 1, stages)])
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        def product(t):
            ref = plgpu.ACC((tile.rows, tile.cols), acc_dtype)
            if not tile.promote:
                return pl.run_scoped(functools.partial(accumulate, t * loads, steps), ref)

            def part(p, total):
                first = t * loads + p * tile.promote
                return total + pl.run_scoped(
                    functools.partial(accumulate, first, tile.promote), ref
                )

            zero = plgpu.layout_cast(jnp.zeros(ref.shape, acc_dtype), _LAYOUT)
            total = lax.fori_loop(0, steps // tile.promote, part, zero)
            if rest := steps % tile.promote:
                first = t * loads + steps - rest
                total += pl.run_scoped(functools.partial(accumulate, first, rest), ref)
            return total

        def low_rank(t):
            if not low:
                return None
            views = x_low[1], w_low[1]
            run = functools.partial(accumulate, t * loads + steps, low_steps, views=views)
            return pl.run_scoped(run, plgpu.ACC((tile.rows, tile.cols), jnp.float32))

        def one_tile(t, _):
            m0, n0 = origin(t)
            acc, added = product(t), low_rank(t)
            finish_all = functools.partial(finish, t, m0, n0, added)
            if tile.split == 1:
                return finish_all(acc)
            sum_sm, sum_full, sum_empty = sums
            meet_peer(t, acc, part, lambda: wg, sum_sm, sum_full, sum_empty.at[wg], finish_all)

        def finish(t, m0, n0, added, acc):
            slot = t % 2
            if vectors:
                plgpu.barrier_wait(s_full.at[slot])
            epi = o_sm.shape[-1]

            def vector(ref, start, size, axis):
                v = plgpu.load(ref.at[slot, pl.ds(start, size)], layout=_LAYOUT.reduce(1 - axis))
                return lax.broadcast_in_dim(v.astype(jnp.float32), (64, epi), [axis])

            pieces = [(r, c) for r in range(0, tile.rows, 64) for c in range(0, out_cols, epi)]
            for piece, (r, c) in enumerate(pieces):
                y = acc[r : r + 64, c : c + epi]
                if swiglu:
                    y = jax.nn.silu(y) * acc[r : r + 64, out_cols + c : out_cols + c + epi]
                if has_scales:
                    y = y.astype(jnp.float32)
                    y = y * vector(sx_sm, row0 + r, 64, 0) * vector(sw_sm, col0 + c, epi, 1)
                if added is not None:
                    y = y + added[r : r + 64, c : c + epi]
                if has_bias:
                    y = y + vector(b_sm, col0 + c, epi, 1)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                o_sm[wg, piece % 2] = y.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    o_rows.at[wg, piece % 2],
                    out.at[pl.ds(m0 + row0 + r, 64), pl.ds(n0 + out0 + c, epi)],
                )
            if vectors:
                plgpu.barrier_arrive(s_empty.at[slot])

        lax.fori_loop(0, tiles, one_tile, None)
        if tile.split > 1:  # a block must not leave while the other may signal it
            sent = jnp.logical_and(part != wg, tiles > 0)
            pl.when(sent)(lambda: plgpu.barrier_wait(sums[2].at[wg]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tile", "swiglu"))
def pair_matmul(
    x: jax.Array,
    w: jax.Array,
    scale_x: jax.Array | None,
    scale_w: jax.Array | None,
    bias: jax.Array | None,
    out_dtype,
    tile: PairTile,
    swiglu: bool = False,
    low_rank: tuple[jax.Array, tuple[jax.Array, ...]] | None = None,
) -> jax.Array:
    """x [M, K], w [N, K] both int8, e4m3, bf16 or f16; scale_x [M] and scale_w [N] floats or both
    None, bias [N] floats.

    swiglu: w's rows are gate, then up, and silu(gate) * up [M, N / 2] is returned; only for one
        tile of 64 rows, without scales, bias and split.
    low_rank: added in float32; (inner [M, S R], S second factors [N_s, R]), 16-bit floats: the N_s
        rows of w that are source s's get ``inner[:, s R : s R + R]`` times its factors transposed.
        Only for one tile of 64 rows whose columns divide every N_s, and with scales.
    """
    (m, k), n = x.shape, w.shape[0]
    if swiglu:
        n //= 2
        w = w.reshape(2, n, k)
    acc_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    name = "quantized_matmul_" + {"int8": "w8a8", "float8_e4m3fn": "fp8"}.get(x.dtype.name, "plain")
    has_scales, has_bias = scale_x is not None, bias is not None
    inner, second = (None, ()) if low_rank is None else low_rank
    extras = Extras(has_scales, has_bias, swiglu, tuple(b.shape[0] for b in second))
    low = {} if inner is None else {"low": inner.dtype}
    body = functools.partial(_body, tile=tile, extras=extras, m=m, n=n, k=k, acc_dtype=acc_dtype)
    unused = plgpu.SMEM((32,), jnp.float32)
    copied = -(-tile.n // 64) * 64  # of a vector: whole units of 128 bytes
    block_k = BLOCK_BYTES // x.dtype.itemsize
    epi = math.gcd(tile.cols // (1 + swiglu), 64 // jnp.dtype(out_dtype).itemsize)
    sums = []
    if tile.split > 1:
        swizzle = 4 * math.gcd(tile.cols, 32)
        sums = [
            plgpu.SMEM((64, tile.cols), acc_dtype, transforms=pipeline.tiled(acc_dtype, swizzle)),
            plgpu.Barrier(num_arrivals=1),
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=1, num_barriers=2),
        ]
    finishing = 2 // tile.split  # warpgroups
    scratch = [
        pipeline.rows_and_tiles((tile.stages, tile.m, block_k), x.dtype, **low),
        pipeline.rows_and_tiles((tile.stages, tile.n, block_k), w.dtype, (2, 2) * swiglu, **low),
        pipeline.rows_and_tiles((2, 2, 64, epi), out_dtype),
        plgpu.SMEM((2, tile.m), scale_x.dtype) if has_scales else unused,
        plgpu.SMEM((2, copied), scale_w.dtype) if has_scales else unused,
        plgpu.SMEM((2, copied), bias.dtype) if has_bias else unused,
        *ring_barriers(tile.stages, 2 + swiglu),
        plgpu.Barrier(num_arrivals=max(1, 2 * has_scales + has_bias), num_barriers=2),
        plgpu.Barrier(num_arrivals=finishing, num_barriers=2),
        *sums,
    ]
    args = [a for a in (x, w, scale_x, scale_w, bias, inner, *second) if a is not None]
    out_type = jax.ShapeDtypeStruct((m, n), out_dtype)
    return launch(name, body, args, out_type, scratch, tile)

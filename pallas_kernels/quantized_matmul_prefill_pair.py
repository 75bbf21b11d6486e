"""W8A8 and FP8 products on Hopper: both operands 8-bit, scales and bias in the epilogue.

    out[m, n] = acc[m, n] * scale_x[m] * scale_w[n] + bias[n]        one cast at the end

Contract: x [M, K], w [N, K], both int8 (acc in int32, exact) or both e4m3; K % 16 == 0, N % 8 == 0,
any M: copies past an edge bring zeros, stores past an edge are not made.

    feeder    : TMA x, w of step i+1 | i+2 | ... | next tile's scales, next tile's step 0 | ...
    compute 0 : wait i | wgmma i | release i-1 | ...      rows   0.. 63 of a 128 x 256 tile
    compute 1 : wait i | wgmma i | release i-1 | ...      rows  64..127
    both      : after the last step  acc -> float32 * scales + bias -> shared memory -> TMA store

The weight tile is multicast to the two blocks of a cluster, which lie below each other in M: the
pair reads 256 + 256 rows of K for 256 x 256 outputs, which is what keeps L2 ahead of the tensor
cores (48 bytes a cycle and SM would be needed without; 32 with).

FP8 sums.  ``promote`` gives the tensor cores a fresh accumulator every few steps of 128 and adds it
to a float32 one in registers.  Two accumulators of 256 columns do not fit 232 registers, so fp8
tiles have at most 192 columns.

NOTES (H200, K=4096, N=14336, M=8192, bf16 output, bias; TOPS)
    floor: 132 SMs x 8192 op/cycle x ~1.75 GHz = 1890; XLA's bare int8 dot 1493, with scales 929
    128 x 256 tile, cluster of 2, 4 stages, snake of 16      1616-1625
    snake of 8: same; of 32: 1533 (the wave's operands leave L2); of 4: 1575
    no cluster: 1568; 3 stages: 1588; 256 x 128: 1560-1589; 128 x 192: 1605
    one or no wgmma left in flight at the wait: same
    e4m3, one sum of K=4096                1493, error 1.3e-3 (7e-2 on positive operands)
    e4m3, promote every 128 columns        1301, 1.3e-4 (6e-4)
    e4m3, promote every 256                1461-1489, 2.2e-4 (2.2e-3)     <- the default
    e4m3, promote every 512 / 1024         1434 / 1428, 3.5e-4 / 5.7e-4
    64-column partial sums instead of 192  530: the wait after each is not hidden
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import prefill_pipeline as pipeline
from pallas_kernels.prefill_pipeline import (
    REGISTERS,
    drain,
    launch,
    my_tiles,
    ring_barriers,
    ring_next,
    ring_slot,
    tile_of,
)

BLOCK_K = 128  # bytes of K in a slot: one swizzle
_LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class PairTile:
    """One block's tile and pipeline.

    m, n: rows of x and of w.  m == 64 puts the two warpgroups side by side in n.
    cluster: 2 blocks that lie below each other in m share (multicast) the weight tile.
    width: of the planar snake, in tiles of m.
    promote: 0, or fp8: steps of 128 after which the tensor cores' sum is added to a float32 one.
    split: parts of K, each a tile of its own whose bare sum goes to memory.
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    cluster: int = 2
    width: int = 16
    promote: int = 0
    split: int = 1

    @property
    def rows(self) -> int:
        return 64 if self.m == 64 else self.m // 2

    @property
    def cols(self) -> int:
        return self.n // 2 if self.m == 64 else self.n


def _body(*refs, tile: PairTile, m: int, n: int, k: int, has_bias: bool, acc_dtype):
    whole = tile.split == 1
    x, w, *refs = refs
    vectors = [refs.pop(0) for _ in range(2 + has_bias)] if whole else []
    out, *buffers, sx_sm, sw_sm, b_sm, full, empty, s_full, s_empty = refs
    (x_rows, x_sm), (w_rows, w_sm), (o_rows, o_sm) = map(pipeline.views, buffers)
    wg, pair = lax.axis_index("wg"), lax.axis_index("pair")
    n_clusters, stages = pipeline.N_SM // tile.cluster, tile.stages
    n_tiles = pl.cdiv(n, tile.n)
    grid = pl.cdiv(pl.cdiv(m, tile.m), tile.cluster), n_tiles * tile.split
    steps = pl.cdiv(k, BLOCK_K) // tile.split
    tiles = my_tiles(grid[0] * grid[1], n_clusters)
    axes = "pair" if tile.cluster > 1 else None

    def origin(t):
        mi, ni = tile_of(t, grid, n_clusters, 0, tile.width)
        part, ni = (0, ni) if whole else (ni // n_tiles, lax.rem(ni, n_tiles))
        return (mi * tile.cluster + pair) * tile.m, ni * tile.n, part

    @pl.when(wg == 2)
    def feed():
        plgpu.set_max_registers(REGISTERS[2][0], action="decrease")

        def one_tile(t, _):
            m0, n0, part = origin(t)
            if whole:
                slot = t % 2
                pl.when(t >= 2)(lambda: plgpu.barrier_wait(s_empty.at[slot]))
                spans = pl.ds(m0, tile.m), *[pl.ds(n0, tile.n)] * 2
                for ref, span, ref_sm in zip(vectors, spans, (sx_sm, sw_sm, b_sm), strict=False):
                    plgpu.copy_gmem_to_smem(ref.at[span], ref_sm.at[slot], s_full.at[slot])

            def load(j, at):
                ks = pl.ds((part * steps + j) * BLOCK_K, BLOCK_K)
                pl.when(t * steps + j >= stages)(lambda: plgpu.barrier_wait(empty.at[at]))
                plgpu.copy_gmem_to_smem(x.at[pl.ds(m0, tile.m), ks], x_rows.at[at], full.at[at])
                plgpu.copy_gmem_to_smem(
                    w.at[pl.ds(n0, tile.n), ks], w_rows.at[at], full.at[at], collective_axes=axes
                )
                return ring_next(at, 1, stages)

            lax.fori_loop(0, steps, load, ring_slot(t * steps, stages))

        lax.fori_loop(0, tiles, one_tile, None)
        drain(empty, tiles * steps, stages)
        if whole:
            drain(s_empty, tiles, 2)

    @pl.when(wg < 2)
    def compute():
        plgpu.set_max_registers(REGISTERS[2][1], action="increase")
        side_by_side = tile.m == 64
        row0 = 0 if side_by_side else wg * tile.rows
        col0 = wg * tile.cols if side_by_side else 0

        def operands(at):
            a, b = x_sm.at[at], w_sm.at[at]
            if side_by_side:
                b = w_sm.at[at, pl.ds(col0, tile.cols)]
            else:
                a = x_sm.at[at, pl.ds(row0, tile.rows)]
            return a, b.transpose((1, 0))

        def accumulate(first, count, acc):
            """acc += the products of slots first .. first + count; one wgmma stays in flight."""

            def step(j, at):
                plgpu.barrier_wait(full.at[at])
                plgpu.wgmma(acc, *operands(at))
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
                return pl.run_scoped(functools.partial(accumulate, t * steps, steps), ref)

            def part(p, total):
                first = t * steps + p * tile.promote
                return total + pl.run_scoped(
                    functools.partial(accumulate, first, tile.promote), ref
                )

            zero = plgpu.layout_cast(jnp.zeros(ref.shape, acc_dtype), _LAYOUT)
            total = lax.fori_loop(0, steps // tile.promote, part, zero)
            if rest := steps % tile.promote:
                first = t * steps + steps - rest
                total += pl.run_scoped(functools.partial(accumulate, first, rest), ref)
            return total

        def one_tile(t, _):
            m0, n0, part = origin(t)
            acc = product(t)
            slot = t % 2
            if whole:
                plgpu.barrier_wait(s_full.at[slot])
            epi = o_sm.shape[-1]

            def vector(ref, start, size, axis):
                v = plgpu.load(ref.at[slot, pl.ds(start, size)], layout=_LAYOUT.reduce(1 - axis))
                return lax.broadcast_in_dim(v.astype(jnp.float32), (64, epi), [axis])

            pieces = [(r, c) for r in range(0, tile.rows, 64) for c in range(0, tile.cols, epi)]
            for piece, (r, c) in enumerate(pieces):
                y = acc[r : r + 64, c : c + epi]
                if whole:
                    y = y.astype(jnp.float32)
                    y = y * vector(sx_sm, row0 + r, 64, 0) * vector(sw_sm, col0 + c, epi, 1)
                if has_bias:
                    y = y + vector(b_sm, col0 + c, epi, 1)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                o_sm[wg, piece % 2] = y.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    o_rows.at[wg, piece % 2],
                    out.at[part, pl.ds(m0 + row0 + r, 64), pl.ds(n0 + col0 + c, epi)],
                )
            if whole:
                plgpu.barrier_arrive(s_empty.at[slot])

        lax.fori_loop(0, tiles, one_tile, None)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tile"))
def pair_matmul(
    x: jax.Array,
    w: jax.Array,
    scale_x: jax.Array,
    scale_w: jax.Array,
    bias: jax.Array | None,
    out_dtype,
    tile: PairTile,
) -> jax.Array:
    """x [M, K], w [N, K] both int8 or both e4m3; scale_x [M], scale_w [N], bias [N] floats."""
    (m, k), n = x.shape, w.shape[0]
    acc_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    name = "quantized_matmul_" + ("w8a8" if x.dtype == jnp.int8 else "fp8")
    whole = tile.split == 1
    has_bias = whole and bias is not None
    kernel_dtype = out_dtype if whole else acc_dtype
    epi = 64 // jnp.dtype(kernel_dtype).itemsize
    body = functools.partial(
        _body, tile=tile, m=m, n=n, k=k, has_bias=has_bias, acc_dtype=acc_dtype
    )
    scratch = [
        pipeline.rows_and_tiles((tile.stages, tile.m, BLOCK_K), x.dtype),
        pipeline.rows_and_tiles((tile.stages, tile.n, BLOCK_K), w.dtype),
        pipeline.rows_and_tiles((2, 2, 64, epi), kernel_dtype),
        plgpu.SMEM((2, tile.m), scale_x.dtype),
        plgpu.SMEM((2, tile.n), scale_w.dtype),
        plgpu.SMEM((2, tile.n), bias.dtype) if has_bias else plgpu.SMEM((32,), jnp.float32),
        *ring_barriers(tile.stages, 2, tile.cluster),
        plgpu.Barrier(num_arrivals=2 + has_bias, num_barriers=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
    ]
    args = (x, w, *((scale_x, scale_w) if whole else ()), *((bias,) if has_bias else ()))
    out_type = jax.ShapeDtypeStruct((tile.split, m, n), kernel_dtype)
    out = launch(name, body, args, out_type, scratch, tile.cluster)
    if whole:
        return out[0]
    # XLA makes one kernel of this; in the same order every time, and int32 is exact anyway.
    total = functools.reduce(jnp.add, [out[i] for i in range(tile.split)]).astype(jnp.float32)
    total = total * scale_x.astype(jnp.float32)[:, None] * scale_w.astype(jnp.float32)
    total = total if bias is None else total + bias.astype(jnp.float32)
    return total.astype(out_dtype)

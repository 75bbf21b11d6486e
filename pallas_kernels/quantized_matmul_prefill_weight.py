"""W4A16 and W8A16 products on Hopper for many rows: weights become floats in registers.

    out[m, n] = row[n] * sum_k x[m, k] * a[n, k] + bias[n]
    a         = (q - zero) * scale    or    q * scale + zero

Contract: x [M, K] bf16 or f16, any M; w [N, K] int4 (packed) or int8 in the plain layout;
N % 8 == 0, K % 64 == 0; groups of 32 or a multiple of 64 columns.  a is rounded to x's dtype; sums
are float32.

Operands are swapped: 64 rows of w are wgmma's register operand and the tokens its N, so a weight is
dequantized once per 256 tokens and never written back.  The output tile is transposed on its way
through shared memory.

    feeder    : TMA x, w, scales of slot i+1 | i+2 | ... | next tile's | ...
    compute 0 : wait i, i+1 | words -> floats | wgmma x 8 ............ | release i | release i+1 |
    compute 1 : ....... wgmma x 8 | release | wait | words -> floats | wgmma x 8 ...
    both      : after the last step  acc * row + bias -> 16 bits, transposed -> TMA store

The two warpgroups fall into step by themselves: while one turns words into floats the other's
wgmmas keep the tensor cores busy.  Two slots cost ~270 instructions a thread (int4: two shuffles
and a permute a word, then LOP3, subtract, multiply a pair) against 2 x 1024 cycles of wgmma.
The activations are multicast to the two blocks of a cluster, which lie side by side in N.

NOTES (H200, K=4096, N=14336, int4 in groups of 128 unless said; TFLOP/s at M = 8192 / 2048)
    floor: XLA's bf16 product 840 / 826; humming 702 / 680 in the same run
    one slot at a time, 5 stages               722 / 730
      ... the next slot dequantized while wgmmas run: 623; ptxas serializes wgmma (C7513)
    4 stages                                   753 / 760   (with 5, a 64-bit remainder by 5 a slot)
    two slots a step                           759 / 771;  four: 501, the ring is one step long
    snake of 16 instead of 8                   776 / 771
    the ring's place carried in the loop, slots released one by one
                                               785 / 786;  int8 745 -> 758
    5 stages: same; int8 with stores of 32 tokens, to make room: 771 (timed, values not checked)
    integer zeros 762 / 751; tokens = 128: 563, 192: 661 (a weight is dequantized more often)
    M=64 (64 tokens): 28.8 us with one pair of warpgroups, 25.9 with two (``parts``).  Without XLA's
    transpose of the scales (1.4 us): 23.9, and 22.6 with a feeder of one warp, as all four of a
    warpgroup arrive on the slot's barrier for every copy (M=128: 31.8 to 30.6; M=32 and M=2048: no
    change).  A cluster of one: 22.4.  The rest is issue: ~115 instructions a slot and thread on
    112 of 132 SMs are 8.4 us, and the memory's 7 do not hide behind them.
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
    tiled,
)

BLOCK_K = 64  # columns in a slot: one swizzle of 16-bit activations
ROWS = 128  # of w per block, 64 per compute warpgroup
_LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class WeightTile:
    """One block's tile and pipeline.

    tokens: rows of x, the N of its wgmma.
    cluster: 2 blocks side by side in w's rows share (multicast) the activations.
    width: of the planar snake, in tiles of w's rows.
    unroll: slots that are dequantized before their wgmmas are issued.
    store: tokens per store of the epilogue.
    parts: pairs of warpgroups that take turns at the slots; their sums meet in shared memory.
    """

    tokens: int = 256
    stages: int = 4
    cluster: int = 2
    width: int = 8
    unroll: int = 2
    store: int = 64
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which vectors there are, and how many columns a group has."""

    group: int
    scale: bool  # per group, in the loop
    zero: str | None  # per group, in the loop: "int" before the scale, "float" after it
    row: bool  # per row, in the epilogue
    bias: bool

    @property
    def groups_per_slot(self) -> int:
        return max(1, BLOCK_K // self.group)

    @property
    def slots_per_group(self) -> int:
        return max(1, self.group // BLOCK_K)


def _body(*refs, tile: WeightTile, scheme: Scheme, m: int, n: int, k: int):
    refs = list(refs)
    x, w = refs.pop(0), refs.pop(0)
    scale = refs.pop(0) if scheme.scale else None
    zero = refs.pop(0) if scheme.zero else None
    row = refs.pop(0) if scheme.row else None
    bias = refs.pop(0) if scheme.bias else None
    out, x_buffer, w_sm, s_sm, z_sm, o_buffer, r_sm, b_sm, sum_sm, *barriers = refs
    (x_rows, x_sm), (o_rows, o_sm) = map(pipeline.views, (x_buffer, o_buffer))
    full, empty, r_full, r_empty, sum_full, sum_empty = barriers
    wg, pair = lax.axis_index("wg"), lax.axis_index("pair")
    n_clusters, tokens, stages = pipeline.N_SM // tile.cluster, tile.tokens, tile.stages
    grid = pl.cdiv(m, tokens), pl.cdiv(n, ROWS * tile.cluster)
    steps = k // BLOCK_K
    tiles = my_tiles(grid[0] * grid[1], n_clusters)
    unroll = tile.unroll if steps % tile.unroll == 0 else 1
    computing = 2 * tile.parts
    feeder_registers, compute_registers = REGISTERS[computing]
    axes = "pair" if tile.cluster > 1 else None
    grouped = [(v, v_sm) for v, v_sm in ((scale, s_sm), (zero, z_sm)) if v is not None]
    vectors = [(v, v_sm) for v, v_sm in ((row, r_sm), (bias, b_sm)) if v is not None]

    def origin(t):
        mi, ni = tile_of(t, grid, n_clusters, 1, tile.width)
        return mi * tokens, (ni * tile.cluster + pair) * ROWS

    @pl.when(wg == computing)
    def feed():
        plgpu.set_max_registers(feeder_registers, action="decrease")

        def copy_tiles():
            def one_tile(t, _):
                m0, n0 = origin(t)
                slot, rows = t % 2, pl.ds(n0, ROWS)
                if vectors:
                    pl.when(t >= 2)(lambda: plgpu.barrier_wait(r_empty.at[slot]))
                    for vector, vector_sm in vectors:
                        plgpu.copy_gmem_to_smem(
                            vector.at[rows], vector_sm.at[slot], r_full.at[slot]
                        )

                def load(j, at):
                    ks = pl.ds(j * BLOCK_K, BLOCK_K)
                    pl.when(t * steps + j >= stages)(lambda: plgpu.barrier_wait(empty.at[at]))
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(m0, tokens), ks],
                        x_rows.at[at],
                        full.at[at],
                        collective_axes=axes,
                    )
                    plgpu.copy_gmem_to_smem(w.at[rows, ks], w_sm.at[at], full.at[at])
                    first = (j // scheme.slots_per_group) * scheme.groups_per_slot
                    groups = pl.ds(first, scheme.groups_per_slot)
                    for vector, vector_sm in grouped:
                        plgpu.copy_gmem_to_smem(
                            vector.at[groups, rows], vector_sm.at[at], full.at[at]
                        )
                    return ring_next(at, 1, stages)

                lax.fori_loop(0, steps, load, ring_slot(t * steps, stages))

            lax.fori_loop(0, tiles, one_tile, None)
            drain(empty, tiles * steps, stages)
            if vectors:
                drain(r_empty, tiles, 2)

        # One warp: each of four would arrive on the slot's barrier for every copy.
        @plgpu.warp_map
        def of_warp(warp):
            @pl.when(warp == 0)
            def _():
                copy_tiles()

    @pl.when(wg < computing)
    def compute():
        plgpu.set_max_registers(compute_registers, action="increase")
        half, part = wg % 2, wg // 2
        mine = pl.ds(half * 64, 64)

        def per_column(ref, at):
            """[64, BLOCK_K]: what the groups' vectors say of each weight."""
            parts = [
                lax.broadcast_in_dim(
                    plgpu.load(ref.at[at, g, mine], layout=_LAYOUT.reduce(1)), (64, BLOCK_K), [0]
                )
                for g in range(scheme.groups_per_slot)
            ]
            if len(parts) == 1:
                return parts[0]
            column = plgpu.broadcasted_iota(jnp.int32, (64, BLOCK_K), 1, layout=_LAYOUT)
            return jnp.where(column < scheme.group, *parts)

        def dequantized(at):
            """The slot's weights as wgmma's register operand, in x's dtype."""
            wide = plgpu.Layout.WGMMA_UPCAST_2X
            if w.dtype == jnp.int4:
                wide = plgpu.Layout.WGMMA_UPCAST_4X
            words = plgpu.load(w_sm.at[at, mine], layout=wide)
            a = plgpu.layout_cast(words, _LAYOUT).astype(x.dtype)
            if scheme.zero == "int":
                a = a - per_column(z_sm, at)  # exact: small integers
            if scheme.scale:
                a = a * per_column(s_sm, at)
            if scheme.zero == "float":
                a = a + per_column(z_sm, at)
            return a

        def accumulate(t, acc):
            def step(_, at):
                slots = [ring_next(at, u, stages) for u in range(unroll)]
                for at in slots:
                    plgpu.barrier_wait(full.at[at])
                for at, a in [(at, dequantized(at)) for at in slots]:
                    plgpu.wgmma(acc, a, x_sm.at[at].transpose((1, 0)))
                for u, at in enumerate(slots):
                    plgpu.wgmma_wait(unroll - 1 - u)
                    plgpu.barrier_arrive(empty.at[at])
                return ring_next(slots[-1], 1 + skip, stages)

            skip = (tile.parts - 1) * unroll
            turns = (steps // unroll - part + tile.parts - 1) // tile.parts
            lax.fori_loop(0, turns, step, ring_slot(t * steps + part * unroll, stages))
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        def one_tile(t, _):
            m0, n0 = origin(t)
            ref = plgpu.ACC((64, tokens), jnp.float32)
            acc = pl.run_scoped(functools.partial(accumulate, t), ref)
            if tile.parts == 1:
                return finish(t, m0, n0, acc)

            @pl.when(part == 1)
            def _():
                pl.when(t > 0)(lambda: plgpu.barrier_wait(sum_empty.at[half]))
                sum_sm[half] = acc
                plgpu.barrier_arrive(sum_full.at[half])

            @pl.when(part == 0)
            def _():
                plgpu.barrier_wait(sum_full.at[half])
                total = acc + plgpu.load(sum_sm.at[half], layout=_LAYOUT)
                plgpu.barrier_arrive(sum_empty.at[half])
                finish(t, m0, n0, total)

        def finish(t, m0, n0, acc):
            chunk = o_sm.shape[2]
            slot = t % 2
            if vectors:
                plgpu.barrier_wait(r_full.at[slot])

            def vector(ref):
                v = plgpu.load(ref.at[slot, mine], layout=_LAYOUT.reduce(1)).astype(jnp.float32)
                return lax.broadcast_in_dim(v, (64, chunk), [0])

            row_scale = vector(r_sm) if scheme.row else None
            row_bias = vector(b_sm) if scheme.bias else None
            if vectors:
                plgpu.barrier_arrive(r_empty.at[slot])
            for piece, c in enumerate(range(0, tokens, chunk)):
                y = acc[:, c : c + chunk]
                if row_scale is not None:
                    y = y * row_scale
                if row_bias is not None:
                    y = y + row_bias
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                o_sm.at[half, piece % 2].transpose((1, 0))[...] = plgpu.layout_cast(
                    y.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
                )
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    o_rows.at[half, piece % 2],
                    out.at[pl.ds(m0 + c, chunk), pl.ds(n0 + 64 * half, 64)],
                )

        lax.fori_loop(0, tiles, one_tile, None)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("out_dtype", "group", "float_zero", "tile"))
def weight_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    zero: jax.Array | None,
    row: jax.Array | None,
    bias: jax.Array | None,
    out_dtype,
    *,
    group: int,
    float_zero: bool = False,
    tile: WeightTile,
) -> jax.Array:
    """x [M, K] bf16 or f16; w [N, K] int4 or int8; scale, zero [K / group, N] in x's dtype;
    row (a scale), bias [N] floats.  Returns [M, N] in out_dtype, 16 bits wide."""
    (m, k), n = x.shape, w.shape[0]
    kind = None if zero is None else "float" if float_zero else "int"
    scheme = Scheme(group, scale is not None, kind, row is not None, bias is not None)
    bits = 4 if w.dtype == jnp.int4 else 8
    unused = plgpu.SMEM((32,), jnp.float32)
    grouped = plgpu.SMEM((tile.stages, scheme.groups_per_slot, ROWS), x.dtype)

    partial_sums = plgpu.SMEM((2, 64, tile.tokens), jnp.float32, transforms=tiled(jnp.float32, 128))

    def vector(v):
        return unused if v is None else plgpu.SMEM((2, ROWS), v.dtype)

    copies = 2 + (scale is not None) + (zero is not None)
    n_vectors = (row is not None) + (bias is not None)
    scratch = [
        pipeline.rows_and_tiles((tile.stages, tile.tokens, BLOCK_K), x.dtype),
        plgpu.SMEM(
            (tile.stages, ROWS, BLOCK_K), w.dtype, transforms=tiled(w.dtype, BLOCK_K * bits // 8)
        ),
        unused if scale is None else grouped,
        unused if zero is None else grouped,
        pipeline.rows_and_tiles((2, 2, min(tile.store, tile.tokens), 64), out_dtype),
        vector(row),
        vector(bias),
        partial_sums if tile.parts > 1 else unused,
        *ring_barriers(tile.stages, copies, tile.cluster),
        plgpu.Barrier(num_arrivals=max(1, n_vectors), num_barriers=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
        plgpu.Barrier(num_arrivals=1, num_barriers=2),
        plgpu.Barrier(num_arrivals=1, num_barriers=2),
    ]
    body = functools.partial(_body, tile=tile, scheme=scheme, m=m, n=n, k=k)
    args = [a for a in (x, w, scale, zero, row, bias) if a is not None]
    out_type = jax.ShapeDtypeStruct((m, n), out_dtype)
    name = f"quantized_matmul_w{bits}a16"
    return launch(name, body, args, out_type, scratch, tile.cluster, 2 * tile.parts)

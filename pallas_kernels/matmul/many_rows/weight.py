"""W4A16, W8A16 and W4A8 products on Hopper for many rows: codes widen in registers.

    out[m, n] = token[m] * row[n] * sum_k x[m, k] * a[n, k] + bias[n]
    a         = (q - zero) * scale    or    q * scale + zero

Contract: x [M, K] bf16 or f16, any M; w [N, K] int4 (packed) or int8 in the plain layout;
N % 8 == 0, K % 64 == 0; groups of 32 or a multiple of 64 columns.  a is rounded to x's dtype; sums
are float32.  Or x in 8-bit codes, w int4, K % 128 == 0, groups of multiples of 128: of int8 beside
scales in two levels (``QTensor.unit`` is row) a is int8, and sums are int32, both exact; else what
is multiplied is q - zero in x's dtype, exact, and every 128 columns' sum times scale is added in
float32 (``unpack``).

Operands are swapped: 64 rows of w are wgmma's register operand and the tokens its N, so a weight is
dequantized once per 256 tokens and never written back.  The output tile is transposed on its way
through shared memory.

    feeder    : TMA x, w, scales of slot i+1 | i+2 | ... | next tile's | ...
    compute 0 : wait i, i+1 | codes -> floats | wgmma x 8 ............ | release i | release i+1 |
    compute 1 : ....... wgmma x 8 | release | wait | codes -> floats | wgmma x 8 ...
    both      : after the last step  acc * row + bias -> 16 bits, transposed -> TMA store

The two warpgroups fall into step by themselves: while one turns codes into floats the other's
wgmmas keep the tensor cores busy.  Two slots cost ~270 instructions a thread (int4: two shuffles
and a permute 32 bits, then LOP3, subtract, multiply a pair; with ``stored`` scales a load of a byte
and a multiplication instead of those, ``unpack``) against 2 x 1024 cycles of wgmma.
The activations are multicast to the two blocks of a cluster, which lie side by side in N.

Up to 64 tokens blocks are short of work rather than of operands: ``parts`` lets more warpgroups
take turns at the slots, ``split`` gives the two blocks of a cluster half of K each, and the groups'
vectors come once a tile, as they are stored (``stored``).

Floor: XLA's bf16 product, 840 TFLOP/s at K = 4096, N = 14336, M = 8192 on an H200 (humming 702 in
the same run); int4 in groups of 128 785, int8 758; M = 64 21.9 us.  What was tried:
``matmul/NOTES.md``; ``python -m benchmarks.kernels.prefill``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows import pipeline, unpack
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
    tiled,
)
from pallas_kernels.matmul.many_rows.plan import WeightTile, part_groups

_LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class SlotVectors:
    """Which vectors there are, and how many columns a group and a slot have."""

    group: int
    block: int
    scale: bool  # per group, in the loop
    zero: str | None  # per group, in the loop: "int" before the scale, "float" after it
    row: bool  # per row, in the epilogue
    bias: bool
    token: bool  # per row of x, in the epilogue
    codes: bool  # x has 8 bits, and so have the weights that it is multiplied by
    scaled: bool  # scales multiply sums of 128 columns, not weights
    unpacked: bool  # int4 becomes the operand byte by byte (``unpack``)

    @property
    def groups_per_slot(self) -> int:
        return max(1, self.block // self.group)

    @property
    def slots_per_group(self) -> int:
        return max(1, self.group // self.block)


def _body(*refs, tile: WeightTile, scheme: SlotVectors, m: int, n: int, k: int):
    refs = list(refs)
    x, w = refs.pop(0), refs.pop(0)
    scale = refs.pop(0) if scheme.scale else None
    zero = refs.pop(0) if scheme.zero else None
    row = refs.pop(0) if scheme.row else None
    bias = refs.pop(0) if scheme.bias else None
    token = refs.pop(0) if scheme.token else None
    out, x_buffer, w_buffer, s_sm, z_sm, o_buffer, r_sm, b_sm, t_sm, sum_sm, *barriers = refs
    (x_rows, x_sm), (o_rows, o_sm) = map(pipeline.views, (x_buffer, o_buffer))
    w_sm, w_bytes = pipeline.views(w_buffer) if scheme.unpacked else (w_buffer, None)
    block_k, acc_dtype = scheme.block, jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    full, empty, r_full, r_empty, sum_full, sum_empty, *peer = barriers
    wg, pair, k_part = (lax.axis_index(axis) for axis in ("wg", "pair", "part"))
    n_clusters = tile.sms // (tile.cluster * tile.split)
    tokens, stages = tile.tokens, tile.stages
    grid = pl.cdiv(m, tokens), pl.cdiv(n, tile.rows * tile.cluster)
    box = pipeline.rows_of_box(m, tokens)
    steps = k // block_k // tile.split
    first_step = k_part * steps
    tiles = my_tiles(grid[0] * grid[1], n_clusters)
    slots = tile.vector_slots(m, n)
    unroll = tile.unrolled(k)
    across = tile.rows // 64  # warpgroups side by side in w's rows
    computing = across * tile.parts
    compute_registers = REGISTERS[computing][1]
    axes = "pair" if tile.cluster > 1 else None
    grouped = [(v, v_sm) for v, v_sm in ((scale, s_sm), (zero, z_sm)) if v is not None]
    vectors = [(v, v_sm) for v, v_sm in ((row, r_sm), (bias, b_sm)) if v is not None]
    if tile.stored:
        grouped, vectors = [], grouped + vectors
    if scheme.token:
        vectors.append((token, t_sm))

    def origin(t):
        mi, ni = tile_of(t, grid, n_clusters, 1, tile.width)
        n0 = ni if tile.cluster == 1 else ni * tile.cluster + pair
        return mi * tokens, n0 * tile.rows

    def group_of(j):
        """The first group of slot j."""
        return (j // scheme.slots_per_group) * scheme.groups_per_slot

    pipeline.await_kernel(w, tile.rows, tile, m)

    @feeder(wg, computing)
    def copy_tiles():
        def one_tile(t, _):
            m0, n0 = origin(t)
            slot, rows = lax.rem(t, slots), pl.ds(n0, tile.rows)
            if vectors:
                pl.when(t >= slots)(lambda: plgpu.barrier_wait(r_empty.at[slot]))
                for vector, vector_sm in vectors:
                    source = vector.at[pl.ds(m0, tokens) if vector is token else rows]
                    if vector_sm.ndim == 3:
                        groups = vector_sm.shape[2]
                        first = k_part * groups if groups < vector.shape[1] else 0
                        source = vector.at[rows, pl.ds(first, groups)]
                    plgpu.copy_gmem_to_smem(source, vector_sm.at[slot], r_full.at[slot])

            def load(j, at):
                ks = pl.ds((first_step + j) * block_k, block_k)
                pl.when(t * steps + j >= stages)(lambda: plgpu.barrier_wait(empty.at[at]))
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(m0, box), ks],
                    x_rows.at[at, pl.ds(0, box)],
                    full.at[at],
                    collective_axes=axes,
                )
                plgpu.copy_gmem_to_smem(w.at[rows, ks], w_sm.at[at], full.at[at])
                first = group_of(first_step + j)
                groups = pl.ds(first, scheme.groups_per_slot)
                for vector, vector_sm in grouped:
                    plgpu.copy_gmem_to_smem(vector.at[groups, rows], vector_sm.at[at], full.at[at])
                return ring_next(at, 1, stages)

            lax.fori_loop(0, steps, load, ring_slot(t * steps, stages))

        lax.fori_loop(0, tiles, one_tile, None)
        drain(empty, tiles * steps, stages)
        if vectors:
            drain(r_empty, tiles, slots)

    @pl.when(wg < computing)
    def compute():
        plgpu.set_max_registers(compute_registers, action="increase")
        half, part = wg % across, wg // across
        mine = pl.ds(half * 64, 64)

        def stored_at(ref, t, j, g=0):
            """Of a tile's stored vectors, those of slot j's g-th group: shared memory has this
            block's groups, or all."""
            j = j if ref.shape[2] < k // scheme.group else first_step + j
            return ref.at[lax.rem(t, slots), mine, group_of(j) + g]

        def per_column(ref, t, j, at):
            """[64, block_k]: what the groups' vectors say of each weight."""

            def of_group(g):
                if tile.stored:
                    v = pipeline.load_column(stored_at(ref, t, j, g), x.dtype)
                else:
                    v = plgpu.load(ref.at[at, g, mine], layout=_LAYOUT.reduce(1))
                return lax.broadcast_in_dim(v, (64, block_k), [0])

            parts = [of_group(g) for g in range(scheme.groups_per_slot)]
            if len(parts) == 1:
                return parts[0]
            column = plgpu.broadcasted_iota(jnp.int32, (64, block_k), 1, layout=_LAYOUT)
            return jnp.where(column < scheme.group, *parts)

        def dequantized(t, j, at):
            """The slot's weights as wgmma's register operand, in x's dtype."""
            if scheme.unpacked:
                codes, scales = w_bytes.at[at, mine], stored_at(s_sm, t, j)
                zeros = None if zero is None else stored_at(z_sm, t, j)
                if scheme.codes:
                    multiples = None if scheme.scaled else scales
                    return unpack.to_8_bits(x.dtype, codes, zeros, multiples)
                return unpack.to_bfloat16(codes, scales, zeros)
            wide = plgpu.Layout.WGMMA_UPCAST_2X
            if w.dtype == jnp.int4:
                wide = plgpu.Layout.WGMMA_UPCAST_4X
            codes = plgpu.load(w_sm.at[at, mine], layout=wide)
            a = plgpu.layout_cast(codes, _LAYOUT).astype(x.dtype)
            if scheme.zero == "int":
                a = a - per_column(z_sm, t, j, at)  # exact: small integers
            if scheme.scale:
                a = a * per_column(s_sm, t, j, at)
            if scheme.zero == "float":
                a = a + per_column(z_sm, t, j, at)
            return a

        def accumulate(t, acc):
            def step(turn, at):
                places = [ring_next(at, u, stages) for u in range(unroll)]
                j = (turn * tile.parts + part) * unroll
                for at in places:
                    plgpu.barrier_wait(full.at[at])
                weights = [dequantized(t, j + u, at) for u, at in enumerate(places)]
                for at, a in zip(places, weights, strict=True):
                    plgpu.wgmma(acc, a, x_sm.at[at].transpose((1, 0)))
                for u, at in enumerate(places):
                    plgpu.wgmma_wait(unroll - 1 - u)
                    plgpu.barrier_arrive(empty.at[at])
                return ring_next(places[-1], 1 + skip, stages)

            skip = (tile.parts - 1) * unroll
            turns = (steps // unroll - part + tile.parts - 1) // tile.parts
            lax.fori_loop(0, turns, step, ring_slot(t * steps + part * unroll, stages))
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        def accumulate_scaled(t):
            """The sum in float32 of every slot's sum times its group's scale."""

            def step(turn, carry):
                at, total = carry
                j = turn * tile.parts + part
                plgpu.barrier_wait(full.at[at])
                a = dequantized(t, j, at)
                column = pipeline.load_column(stored_at(s_sm, t, j), jnp.float32)
                if acc_dtype == jnp.float32:
                    column = column * (1 / unpack.E4M3_STEP)

                def product(acc):
                    plgpu.wgmma(acc, a, x_sm.at[at].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[at])
                    return plgpu.wgmma_accumulator_load(acc, wait_n=None)

                sums = pl.run_scoped(product, plgpu.ACC((64, tokens), acc_dtype))
                scales = lax.broadcast_in_dim(column, (64, tokens), [0])
                return ring_next(at, tile.parts, stages), total + sums.astype(jnp.float32) * scales

            turns = (steps - part + tile.parts - 1) // tile.parts
            nothing = plgpu.layout_cast(jnp.zeros((64, tokens), jnp.float32), _LAYOUT)
            first = ring_slot(t * steps + part, stages)
            return lax.fori_loop(0, turns, step, (first, nothing))[1]

        def one_tile(t, _):
            m0, n0 = origin(t)
            if tile.stored:
                plgpu.barrier_wait(r_full.at[lax.rem(t, slots)])
            if scheme.scaled:
                acc = accumulate_scaled(t)
            else:
                ref = plgpu.ACC((64, tokens), acc_dtype)
                acc = pl.run_scoped(functools.partial(accumulate, t), ref)
            if tile.parts == 1:
                return whole(t, m0, n0, acc)

            @pl.when(part > 0)
            def _():
                place = (part - 1) * across + half
                pl.when(t > 0)(lambda: plgpu.barrier_wait(sum_empty.at[place]))
                sum_sm[place] = acc
                plgpu.barrier_arrive(sum_full.at[place])
                if tile.stored:
                    plgpu.barrier_arrive(r_empty.at[lax.rem(t, slots)])

            @pl.when(part == 0)
            def _():
                total = acc
                for other in range(tile.parts - 1):
                    place = other * across + half
                    plgpu.barrier_wait(sum_full.at[place])
                    total += plgpu.load(sum_sm.at[place], layout=_LAYOUT)
                    plgpu.barrier_arrive(sum_empty.at[place])
                whole(t, m0, n0, total)

        def whole(t, m0, n0, acc):
            """All of K, of which a block may have half."""
            if tile.split == 1:
                return finish(t, m0, n0, acc)
            peer_sm, peer_full, peer_empty = peer
            of_pair = peer_sm.at[half // 2]  # of two warpgroups' rows one's are sent
            finish_all = functools.partial(finish, t, m0, n0)

            def sent():
                if vectors:
                    plgpu.barrier_arrive(r_empty.at[lax.rem(t, slots)])

            meet_peer(
                t,
                acc,
                k_part,
                lambda: half % 2,
                of_pair,
                peer_full,
                peer_empty.at[half],
                finish_all,
                sent,
            )

        def finish(t, m0, n0, acc):
            chunk = o_sm.shape[2]
            slot = lax.rem(t, slots)
            if vectors and not tile.stored:
                plgpu.barrier_wait(r_full.at[slot])

            def vector(ref):
                v = plgpu.load(ref.at[slot, mine], layout=_LAYOUT.reduce(1)).astype(jnp.float32)
                return lax.broadcast_in_dim(v, (64, chunk), [0])

            row_scale = vector(r_sm) if scheme.row else None
            row_bias = vector(b_sm) if scheme.bias else None
            if vectors and not scheme.token:
                plgpu.barrier_arrive(r_empty.at[slot])
            for piece, c in enumerate(range(0, tokens, chunk)):
                y = acc[:, c : c + chunk]
                if scheme.token:
                    v = plgpu.load(t_sm.at[slot, pl.ds(c, chunk)], layout=_LAYOUT.reduce(0))
                    y = y.astype(jnp.float32) * lax.broadcast_in_dim(v, (64, chunk), [1])
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
            if scheme.token:
                plgpu.barrier_arrive(r_empty.at[slot])

        lax.fori_loop(0, tiles, one_tile, None)
        if tile.split > 1:  # a block must not leave while the other may signal it
            sent = (part == 0) & (k_part != half % 2) & (tiles > 0)
            pl.when(sent)(lambda: plgpu.barrier_wait(peer[2].at[half]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@functools.partial(jax.jit, static_argnames=("out_dtype", "group", "float_zero", "tile"))
def weight_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    zero: jax.Array | None,
    row: jax.Array | None,
    bias: jax.Array | None,
    out_dtype,
    token: jax.Array | None = None,
    *,
    group: int,
    float_zero: bool = False,
    tile: WeightTile,
) -> jax.Array:
    """x [M, K] bf16 or f16; w [N, K] int4 or int8; scale, zero [K / group, N] in x's dtype, or
    ``tile.stored`` [N, K / group]; row (a scale), bias [N], token (a scale) [M] floats.  Or x int8
    or e4m3, w int4, zero int8, scale int8 or floats, both stored.  Returns [M, N] in out_dtype, 16
    bits wide."""
    (m, k), n = x.shape, w.shape[0]
    if not tile.divides(k):
        raise ValueError(f"quantized_matmul: {tile} does not divide K = {k}")
    kind = None if zero is None else "float" if float_zero else "int"
    ends = row is not None, bias is not None, token is not None
    codes = x.dtype.itemsize == 1
    scaled = codes and (x.dtype != jnp.int8 or row is None)
    unpacked = w.dtype == jnp.int4 and tile.stored and group % tile.block == 0
    scheme = SlotVectors(group, tile.block, scale is not None, kind, *ends, codes, scaled, unpacked)
    bits = 4 if w.dtype == jnp.int4 else 8
    unused = plgpu.SMEM((32,), jnp.float32)
    across = tile.rows // 64

    def of_groups(v):
        if v is None:
            return unused
        if tile.stored:
            groups = part_groups(v, tile.split)
            return plgpu.SMEM((tile.vector_slots(m, n), tile.rows, groups), v.dtype)
        return plgpu.SMEM((tile.stages, scheme.groups_per_slot, tile.rows), v.dtype)

    def partial_sums(count):
        width = min(tile.tokens, 32) * 4
        shape = (count, 64, tile.tokens)
        dtype = jnp.int32 if codes and not scaled else jnp.float32
        return plgpu.SMEM(shape, dtype, transforms=tiled(dtype, width))

    def vector(v, size=tile.rows):
        return unused if v is None else plgpu.SMEM((tile.vector_slots(m, n), size), v.dtype)

    n_grouped = (scale is not None) + (zero is not None)
    copies = 2 + n_grouped * (not tile.stored)
    n_vectors = sum(ends) + n_grouped * tile.stored
    # Who tells the feeder that a tile's vectors have been read.
    readers = across * tile.parts if tile.stored else across
    peer = []
    if tile.split > 1:
        peer = [
            partial_sums(-(-across // 2)),
            # One for all senders: jax 0.11.2 signals the wrong one of several.
            plgpu.Barrier(num_arrivals=-(-across // 2)),
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=1, num_barriers=across),
        ]
    slot_bytes = tile.block * bits // 8  # of a row
    w_slots = plgpu.SMEM(
        (tile.stages, tile.rows, tile.block), w.dtype, transforms=tiled(w.dtype, slot_bytes)
    )
    if unpacked:
        plain_bytes = plgpu.SMEM((tile.stages, tile.rows, slot_bytes), jnp.int8)
        w_slots = plgpu.RefUnion(w_slots, plain_bytes)
    scratch = [
        pipeline.rows_and_tiles((tile.stages, tile.tokens, tile.block), x.dtype),
        w_slots,
        of_groups(scale),
        of_groups(zero),
        pipeline.rows_and_tiles((across, 2, min(tile.store, tile.tokens), 64), out_dtype),
        vector(row),
        vector(bias),
        vector(token, tile.tokens),
        partial_sums(across * (tile.parts - 1)) if tile.parts > 1 else unused,
        *ring_barriers(tile.stages, copies, across),
        plgpu.Barrier(num_arrivals=max(1, n_vectors), num_barriers=2),
        plgpu.Barrier(num_arrivals=readers, num_barriers=2),
        plgpu.Barrier(num_arrivals=1, num_barriers=across * max(1, tile.parts - 1)),
        plgpu.Barrier(num_arrivals=1, num_barriers=across * max(1, tile.parts - 1)),
        *peer,
    ]
    body = functools.partial(_body, tile=tile, scheme=scheme, m=m, n=n, k=k)
    args = [a for a in (x, w, scale, zero, row, bias, token) if a is not None]
    out_type = jax.ShapeDtypeStruct((m, n), out_dtype)
    name = f"quantized_matmul_w{bits}a{8 * x.dtype.itemsize}"
    return launch(name, body, args, out_type, scratch, tile, computing=across * tile.parts)

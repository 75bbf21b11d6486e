"""The parts of the two prefill kernels: persistent blocks, their tile order, their memory views.

Both are persistent: one block per SM, in clusters of one or two, walks the output tiles in a
planar-snake order.  Neighbouring clusters then work on neighbouring tiles, so that L2 still has the
operands that another cluster just read.  The last warpgroup feeds a ring of shared-memory slots by
TMA, and two to four warpgroups consume it.  The ring runs on across tiles: the next tile's operands
arrive during the epilogue.

``feed`` runs the copies in the first warp of the last warpgroup.  A slot's ``full`` barrier counts
its copies' bytes; each warpgroup that computes waits there.  They arrive at ``empty``, and the
feeder waits there before it copies into the slot again (``ring_barriers``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir, memref, vector
from pallas_kernels.launch import REF, Views, inline, launch

AHEAD = 512  # bytes of a row of w that are prefetched to L2 before the previous kernel has ended
# Registers a thread of the feeder and of a compute warpgroup, by the number of compute warpgroups.
# ``primitives.refused`` compares their sum with the launch's.
REGISTERS = {2: (40, 232), 3: (40, 152), 4: (32, 112)}


def tiled(dtype, swizzle: int):
    """The transforms of a shared-memory operand of wgmma."""
    bits = 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))


def rows_and_tiles(shape: tuple[int, ...], dtype, divided: tuple[int, ...] = (), low=None) -> Views:
    """One memory, two views: ``rows`` for copies, which then clip anywhere, and wgmma's ``tiles``.

    The last axis is one swizzle wide (32, 64 or 128 bytes), so both have the same bytes.
    divided: further axes into which ``rows`` divides the rows.
    low: a dtype in which the same bytes have two views more, ``low_rows`` and ``low_tiles``.
    """
    swizzle = shape[-1] * jnp.dtype(dtype).itemsize
    *lead, rows, width = shape
    by_rows = (*lead, *divided, rows // math.prod(divided), width)
    views = Views(
        rows=plgpu.SMEM(by_rows, dtype, transforms=(plgpu.SwizzleTransform(swizzle),)),
        tiles=plgpu.SMEM(shape, dtype, transforms=tiled(dtype, swizzle)),
    )
    if low is not None:
        other = rows_and_tiles((*lead, rows, swizzle // jnp.dtype(low).itemsize), low)
        views |= {f"low_{name}": kind for name, kind in other.items()}
    return views


def rows_of_box(m: int, rows: int) -> int:
    """Rows of x to copy for a tile of ``rows``.

    A tile that holds all of x needs no more rows than there are.  Zeros for rows past the edge take
    longer than rows (4096 x 4096 in bf16: 15.8 us for 8 rows, 12.4 for 64).  The rows that are not
    copied reach only results that are not stored.
    """
    return rows if m > rows else min(rows, -(-m // 16) * 16)


def ring_barriers(stages: int, copies: int, readers: int = 2):
    """A ring's barriers: ``full`` counts copies, ``empty`` the readers of all blocks that share.

    One thread of a warpgroup arrives on a barrier of a cluster, even if that has one block.  On a
    block's own barrier all 128 threads arrive, for two cycles each.
    """
    return {
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.ClusterBarrier(
            collective_axes=("pair",), num_arrivals=readers, num_barriers=stages
        ),
    }


def load_strided(values, dtype, axis: int) -> jax.Array:
    """A strided slice of shared memory as one value per row (axis 0) or column of wgmma's layout.

    A thread has rows r and r + 8 of 16, or two neighbours of 8 columns.
    """
    shape, layout = values.shape, plgpu.Layout.WGMMA.reduce(1 - axis)
    out_type = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)

    @inline(REF, out=out_type)
    def load(ref):
        kind = mgpu.utils.dtype_to_ir_type(dtype)
        thread = p.register("tid.x") & 127
        if axis == 0:
            in_eight = (thread >> 2) & 7
            first = (thread >> 5) * 16 + in_eight
        else:
            first = (thread & 3) * 2

        def loaded(index: int):
            at = arith.index_cast(ir.IndexType.get(), first + index)
            value = memref.load(ref, [at])
            if value.type == kind:
                return value
            integer = isinstance(value.type, ir.IntegerType)
            return (arith.sitofp if integer else arith.extf)(kind, value)

        out = mgpu.FragmentedArray.splat(
            mgpu.utils.c(0, kind), shape, layout.to_mgpu(), is_signed=None
        )
        registers = out.registers.copy()
        for i in range(registers.size):
            place = np.unravel_index(i, registers.shape)
            held = [loaded(8 * i + j) for j in range(1 + axis)]
            registers[place] = vector.from_elements(registers[place].type, held)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(values)


def warpgroup_barrier() -> None:
    """Wait until all of the warpgroup's threads are here, and have read what they were to read."""

    @inline()
    def wait():
        p.warpgroup_barrier()

    wait()


def my_tiles(total: int, n_clusters: int) -> jax.Array:
    """How many of ``total`` cluster tiles this cluster computes."""
    cluster = lax.axis_index("cluster")
    return (total - cluster + n_clusters - 1) // n_clusters


def tile_of(t: jax.Array, grid: tuple[int, int], n_clusters: int, minor: int, width: int):
    """Coordinates of this cluster's t-th tile."""
    return snake(t * n_clusters + lax.axis_index("cluster"), grid, minor, width)


def snake(index: jax.Array, grid: tuple[int, int], minor: int, width: int):
    """``plgpu.planar_snake`` without a division by a number that the assembler does not know.

    Where the last part is narrower, LLVM divides by the part's width.  nvJitLink makes this a call
    of a function, beside which ptxas waits for every wgmma (C7509).  A product with the reciprocal
    has the same floor for an index below 2^22.
    """
    major, whole = grid[1 - minor], grid[minor] // width
    last = grid[minor] - whole * width
    if not whole or not last:
        return plgpu.planar_snake(index, grid, minor, width if whole else last)
    part = lax.div(index, jnp.int32(width * major))
    inside = index - part * (width * major)
    is_last = part == whole
    share = jnp.where(is_last, jnp.float32(1 / last), jnp.float32(1 / width))
    along = ((inside.astype(jnp.float32) + 0.5) * share).astype(jnp.int32)
    across = part * width + inside - along * jnp.where(is_last, jnp.int32(last), jnp.int32(width))
    along = jnp.where(lax.rem(part, jnp.int32(2)) == 0, along, major - 1 - along)
    return (across, along) if minor == 0 else (along, across)


def ring_slot(i: jax.Array, stages: int) -> jax.Array:
    """Where the ring's i-th load lies; i >= 0, so no floor-division's fix-ups."""
    return lax.rem(i, jnp.asarray(stages, i.dtype))


def ring_next(at: jax.Array, by: int, stages: int) -> jax.Array:
    """The slot ``by`` <= stages after ``at``: no division in the inner loops."""
    at = at + by
    return jnp.where(at >= stages, at - stages, at)


def feed(
    warpgroup: jax.Array,
    computing: int,
    copy_tiles: Callable[[], None],
    others: Sequence[Callable[[], None]] = (),
) -> None:
    """Run a function in the first warp of the last warpgroup, and ``others`` in the next warps.

    Each of the four warps would arrive on a slot's barrier for every copy.
    """

    def of_warp(warp) -> None:
        for i, run_warp in enumerate((copy_tiles, *others)):
            pl.when(warp == i)(run_warp)

    def run() -> None:
        plgpu.set_max_registers(REGISTERS[computing][0], action="decrease")
        plgpu.warp_map(of_warp)

    pl.when(warpgroup == computing)(run)


def in_one_warp(copies: Callable[[], None]) -> None:
    """Run a function in the first warp of this warpgroup."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(copies))


def meet_peer(t, acc, part, finishing, sums, full, empty, finish, sent=lambda: None) -> None:
    """One of a cluster's two blocks sends its sums of half of K to the other, which finishes them.

    part: this block's half.  finishing: () -> the half whose block finishes.  sums: memory of the
    finishing block; full, empty: what tells that they are there, and have been read.
    """

    @pl.when(part != finishing())
    def _():
        pl.when(t > 0)(lambda: plgpu.barrier_wait(empty))
        plgpu.async_store_smem(acc, sums, full, cluster_idx=1 - part, cluster_dim="part")
        plgpu.barrier_arrive(empty)
        sent()

    @pl.when(part == finishing())
    def _():
        plgpu.barrier_wait(full)
        other = plgpu.load(sums, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all of the warpgroup have read
        plgpu.barrier_arrive(empty)
        finish(acc + other)


def await_kernel(w, rows: int, tile, m: int) -> None:
    """``ptx.await_kernel``.  Up to 64 rows of x, where the bytes of w decide, L2 is asked first for
    what the ring begins with: the rows of the block's first tile (which lie in blocks' order).

    w: [N, K], or [2, N, K] of which a tile has ``rows`` of each.
    """
    *sets, n, k = w.shape
    pitch = k * 4 // 8 if w.dtype == jnp.int4 else k * jnp.dtype(w.dtype).itemsize
    part = pitch // tile.split
    size = min(part, AHEAD) // 16 * 16 if m <= 64 else 0

    @inline(REF)
    def begin(w):
        if size:
            thread, block = p.register("tid.x"), p.register("clusterid.x")
            pair, k_part = p.register("cluster_ctaid.y"), p.register("cluster_ctaid.x")
            first = (block * tile.cluster + pair) * rows
            row = first + (thread % rows)
            of = thread // rows
            at = p.offset(p.address(w), of * n + row, pitch)
            mine = (of < math.prod(sets)) & (row < n)
            p.when(mine, lambda: p.prefetch(p.offset(at, k_part, part), size))
        p.await_kernel()

    begin(w)


def drain(empty, last: jax.Array, stages: int) -> None:
    """Waits for the last slots' release: a block must not leave while another may signal it.

    last: loads made in all.
    """

    def wait(i, _):
        plgpu.barrier_wait(empty.at[ring_slot(i, stages)])

    lax.fori_loop(jnp.maximum(last - stages, 0), last, wait, None)


def launch_persistent(
    body, operands, out, *, name: str, scratch, tile, computing: int = 2, feeds: bool = True
):
    """Launch a body on every SM, as ``launch`` does: ``computing`` warpgroups and, last, a feeder
    (unless ``feeds`` is False).

    The ``tile.cluster`` blocks that share an operand are axis "pair" of a cluster.  The
    ``tile.split`` blocks that have a part of K each are axis "part".
    """
    return launch(
        body,
        operands,
        out,
        name=name,
        grid={"cluster": tile.sms // (tile.cluster * tile.split)},
        cluster={"pair": tile.cluster, "part": tile.split},
        warpgroups=computing + feeds,
        scratch=scratch,
        reduction_scratch_bytes=0,
    )

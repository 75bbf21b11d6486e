"""What the two prefill kernels share: persistent blocks, their tile order, their memory views.

Both are persistent: one block per SM, in clusters of one or two, walks the output tiles in a
planar-snake order (neighbouring clusters work on neighbouring tiles, so that what one reads is in
L2 for the next).  The last warpgroup feeds a ring of shared-memory slots by TMA; two warpgroups
consume it.  The ring runs on across tiles: the next tile's operands arrive during the epilogue.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

N_SM = 132
# Registers a thread of the feeder and of a compute warpgroup, by the number of the latter: their
# sum may not pass what the launch gave (3 * 168, 5 * 96), or setmaxnreg waits for ever.
REGISTERS = {2: (40, 232), 4: (32, 112)}


def tiled(dtype, swizzle: int):
    """The transforms of a shared-memory operand of wgmma."""
    bits = 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize
    return (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),
        plgpu.SwizzleTransform(swizzle),
    )


def rows_and_tiles(shape: tuple[int, ...], dtype) -> plgpu.RefUnion:
    """One memory, two views: rows for the copies, which then clip anywhere, and wgmma's tiles.

    The last axis is one swizzle wide (32, 64 or 128 bytes), so both have the same bytes.
    """
    swizzle = shape[-1] * jnp.dtype(dtype).itemsize
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(swizzle),)),
        plgpu.SMEM(shape, dtype, transforms=tiled(dtype, swizzle)),
    )


def views(union):
    """(rows, tiles) of ``rows_and_tiles``."""
    return union


def ring_barriers(stages: int, copies: int, cluster: int):
    """full (an arrival per copy) and empty (both compute warpgroups of all blocks that share)."""
    empty = plgpu.Barrier
    if cluster > 1:
        empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        empty(num_arrivals=2, num_barriers=stages),
    ]


def my_tiles(total: int, n_clusters: int) -> jax.Array:
    """How many of ``total`` cluster tiles this cluster computes."""
    cluster = lax.axis_index("cluster")
    return (total - cluster + n_clusters - 1) // n_clusters


def tile_of(t: jax.Array, grid: tuple[int, int], n_clusters: int, minor: int, width: int):
    """Coordinates of this cluster's t-th tile."""
    index = t * n_clusters + lax.axis_index("cluster")
    return plgpu.planar_snake(index, grid, minor, width)


def ring_slot(i: jax.Array, stages: int) -> jax.Array:
    """Where the ring's i-th load lies; i >= 0, so no floor-division's fix-ups."""
    return lax.rem(i, jnp.asarray(stages, i.dtype))


def ring_next(at: jax.Array, by: int, stages: int) -> jax.Array:
    """The slot ``by`` <= stages after ``at``: no division in the inner loops."""
    at = at + by
    return jnp.where(at >= stages, at - stages, at)


def drain(empty, last: jax.Array, stages: int) -> None:
    """Waits for the last slots' release: a block must not leave while another may signal it.

    last: loads made in all.
    """

    def wait(i, _):
        plgpu.barrier_wait(empty.at[ring_slot(i, stages)])

    lax.fori_loop(jnp.maximum(last - stages, 0), last, wait, None)


def launch(name: str, body, args, out_type, scratch_types, cluster: int, computing: int = 2):
    """Runs a kernel body on every SM: ``computing`` warpgroups and, the last, a feeder.

    name: in profiles.
    """
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        kernel_name=name,
        grid=(N_SM // cluster,),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("pair",),
        num_threads=computing + 1,
        thread_name="wg",
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    return kernel(*args)

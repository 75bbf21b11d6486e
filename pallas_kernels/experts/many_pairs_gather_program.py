"""The rows of x that a tile of many pairs reads, gathered into the ring's slots.

A part's pairs lie in the table ``pairs``, and pair p reads row p // fan of x.  Two warps copy the
rows, 16 bytes a lane and copy (cp.async), to where wgmma's swizzle of 128 bytes has them:

    lane     8 lanes have 128 bytes of a row, so a warp copies 4 rows at once and both warps 8
    slot     its copies, and an arrival on ``full`` that happens when they are there
    readers  ``full`` | fence: copies are the generic proxy's, wgmma the asynchronous | wgmma |
             a lane of each warp arrives on ``empty``

So no sorted copy of x is written to device memory, and none is read.  Rows behind the part's last
are its last row again.  Mosaic's barriers cannot be passed to inline code, so these are words of
shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.launch import Views
from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.plan import BLOCK_K
from pallas_kernels.ptx import Value

WARPS = 2
SLOT_BYTES = 2 * BLOCK_K  # of a row in a slot
_SPLAT, _SCALAR = plgpu.Layout.WG_SPLAT((128,)), plgpu.Layout.WG_SPLAT(())
_AT_ONCE = 8  # rows that both warps copy together


def rows_of_slots(stages: int, tokens: int) -> Views:
    """Shared memory of the rows: wgmma's ``tiles``, and ``bytes``."""
    shape = stages, tokens, BLOCK_K
    tiles = plgpu.SMEM(shape, jnp.bfloat16, transforms=pipeline.tiled(jnp.bfloat16, SLOT_BYTES))
    return Views(tiles=tiles, bytes=plgpu.SMEM((stages, tokens, SLOT_BYTES), jnp.int8))


def barriers_of_slots(stages: int):
    """Shared memory of the barriers ``[2, stages, 2]``: full, then empty, of 8 bytes each."""
    return plgpu.SMEM((2, stages, 2), jnp.int32)


@dataclasses.dataclass(frozen=True)
class GatherShape:
    """What the copying warps need to know of a block's tiles.

    fan: pairs of a row of x.  pitch: bytes of a row.  steps: slots of a tile.  columns: tiles of a
    part.  n_clusters: clusters that share the tiles.  tokens: rows of a slot.  widths: how many of
    them are read, the least that has a block's.  shared: whether two blocks share a part
    (``half_of``).
    """

    fan: int
    pitch: int
    steps: int
    columns: int
    n_clusters: int
    tokens: int
    widths: tuple[int, ...]
    shared: bool = False


def half_of(count, tokens: int):
    """Rows that the first of two blocks has of a part of ``count``: each one or two warpgroups'."""
    return jnp.where(count <= tokens, tokens // 2, tokens)


class RowGather:
    """The barriers of the gathered rows, and the code of both sides.

    ref: the memory that ``barriers_of_slots`` describes.  readers: warpgroups that read a slot.
    """

    def __init__(self, ref, stages: int, readers: int):
        self.ref, self.stages, self.readers = ref, stages, readers

    def start(self) -> None:
        """By all threads of the block, before anything else."""

        def emit(ctx, barriers) -> None:
            del ctx

            def initialise() -> None:
                base = p.shared_address(barriers)
                for i in range(self.stages):
                    p.barrier_init(p.add(base, 8 * i), 32 * WARPS)
                    p.barrier_init(p.add(base, 8 * (self.stages + i)), 4 * self.readers)
                p.barriers_ready()

            p.when(p.equal(p.register("tid.x"), 0), initialise)
            p.barrier()

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(self.ref)

    # --- the warpgroups that multiply ---

    def wait(self, at, load) -> None:
        """Until the rows of the ring's load number ``load``, in slot ``at``, are there."""
        turn = lax.div(load, jnp.asarray(self.stages, load.dtype))
        parity = lax.rem(turn, jnp.asarray(2, load.dtype))

        def emit(ctx, barrier, parity) -> None:
            del ctx
            p.barrier_wait(p.shared_address(barrier), parity.registers.flat[0])
            p.ptx("fence.proxy.async.shared::cta;")

        splat = plgpu.layout_cast(jnp.full((128,), parity, jnp.int32), _SPLAT)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT))(emit)(self.ref.at[0, at], splat)

    def release(self, at) -> None:
        """This warpgroup has read slot ``at``."""

        def emit(ctx, barrier) -> None:
            del ctx
            at = p.shared_address(barrier)
            is_first = p.equal(p.masked(p.register("tid.x"), 31), 0)
            p.when(is_first, lambda: p.barrier_arrive(at))

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(self.ref.at[1, at])

    # --- the warps that copy ---

    def copy(self, gmem, slots, how: GatherShape, warp: int) -> None:
        """Copy the rows of all of this block's tiles.  warp: this warp's place among ``WARPS``."""
        refs = gmem.x, gmem.pairs, gmem.work, slots, self.ref
        emit = functools.partial(self.emit_copies, how, warp)
        types = (plgpu.RefType(),) * len(refs), (_SCALAR,) * 2
        place = lax.axis_index("cluster"), lax.axis_index("pair")
        plgpu.inline_mgpu(arg_types=(*types[0], *types[1]))(emit)(*refs, *place)

    def emit_copies(
        self, how: GatherShape, warp: int, ctx, x, pairs, work, slots, barriers, cluster, pair
    ) -> None:
        del ctx
        cluster, pair = (one.registers.flat[0] for one in (cluster, pair))
        lane = p.masked(p.register("tid.x"), 31)
        row = p.add(p.shift_right(lane, 3), 4 * warp)  # of eight
        chunk = p.masked(lane, 7)
        source = p.offset(p.address(x), chunk, 16)
        place = p.add(p.mul(row, SLOT_BYTES), p.mul(arith.xori(chunk, row), 16))
        to = p.add(p.shared_address(slots), place)
        full = p.shared_address(barriers)
        at_work, at_pairs = p.address(work), p.address(pairs)
        (parts,) = p.load_global(at_work, 1)
        total = p.mul(parts, how.columns)

        def tile(index: Value, carry: Sequence[Value]) -> list[Value]:
            part = arith.divui(index, p.ci(how.columns))
            _, first, end, _ = p.load_global(p.offset(at_work, p.add(part, 1), 16), 4)
            if how.shared:
                is_short = p.less(arith.subi(end, first), how.tokens + 1)
                half = arith.select(is_short, p.ci(how.tokens // 2), p.ci(how.tokens))
                first = p.add(first, arith.muli(pair, half))
                end = p.smaller(p.add(first, half), end)
            count, last = arith.subi(end, first), arith.subi(end, p.ci(1))
            most = how.tokens // _AT_ONCE
            places = [p.smaller(p.add(first, row, _AT_ONCE * i), last) for i in range(most)]
            found = [p.load_global(p.offset(at_pairs, place, 4), 1)[0] for place in places]
            rows = [f if how.fan == 1 else arith.divui(f, p.ci(how.fan)) for f in found]

            def steps(n_rows: int) -> list[Value]:
                def step(j: Value, carry: Sequence[Value]) -> list[Value]:
                    slot, phase = carry
                    barrier = p.add(full, p.mul(slot, 8))
                    empty = p.add(barrier, 8 * self.stages)
                    p.barrier_wait(empty, arith.xori(phase, p.ci(1)))
                    columns = p.offset(source, j, SLOT_BYTES)
                    rows_at = p.add(to, p.mul(slot, how.tokens * SLOT_BYTES))
                    for i in range(n_rows // _AT_ONCE):
                        begin = p.offset_rows(columns, rows[i], how.pitch)
                        p.copy_async(rows_at, begin, _AT_ONCE * SLOT_BYTES * i, line=True)
                    p.copies_arrive(barrier)
                    following = p.add(slot, 1)
                    is_last = p.equal(following, self.stages)
                    slot = arith.select(is_last, p.ci(0), following)
                    return [slot, arith.select(is_last, arith.xori(phase, p.ci(1)), phase)]

                return p.loop(0, how.steps, 1, carry, step)

            result = list(carry)
            widths = [0, *how.widths]
            if how.shared:  # the second block may have none, and then keeps step with the first
                none = p.at_most(count, p.ci(0))
                result = p.choose(none, lambda: steps(0), result)
            for below, width in itertools.pairwise(widths):
                is_width = arith.andi(p.below(p.ci(below), count), p.at_most(count, p.ci(width)))
                result = p.choose(is_width, lambda width=width: steps(width), result)
            return result

        p.loop(cluster, total, how.n_clusters, [p.ci(0), p.ci(0)], tile)

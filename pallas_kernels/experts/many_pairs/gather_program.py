"""The rows of x that a tile of many pairs reads, gathered into the ring's slots.

A part's pairs lie in the table ``pairs``, and pair p reads row p // fan of x.  Two warps copy the
rows, 16 bytes a lane and copy (cp.async), to where wgmma's swizzle of 128 bytes has them:

    two warps   ``empty`` | 8 lanes have 128 bytes of a row, so both copy 8 rows at once | an
                arrival on ``copied`` that happens when a slot's copies are there
    a third     the weight's copy | ``copied`` | fence: copies are the generic proxy's, wgmma the
                asynchronous | ``ready``
    readers     ``ready`` | wgmma | a lane of each warp arrives on ``empty``

So no sorted copy of x is written to device memory, and none is read.  Readers wait for one barrier,
and need no fence.  Rows behind the part's last, up to the copied width, are its last row again.
Mosaic's barriers cannot be passed to inline code, so these are words of shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import REF, Views, inline
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
    """Shared memory of the barriers ``[3, stages, 2]``, 8 bytes each: copied, ready and empty."""
    return plgpu.SMEM((3, stages, 2), jnp.int32)


@dataclasses.dataclass(frozen=True)
class GatherShape:
    """Facts about a block's tiles that the copying warps need.

    fan: pairs of a row of x.  pitch: bytes of a row.  steps: slots of a tile.  columns: tiles of a
    part.  n_clusters: clusters that share the tiles.  tokens: rows of a slot.  widths: how many of
    them are read, the least that has a block's.  cluster: blocks of a cluster, which have a part
    each; the last cluster's last may have none.
    """

    fan: int
    pitch: int
    steps: int
    columns: int
    n_clusters: int
    tokens: int
    widths: tuple[int, ...]
    cluster: int = 1


class RowGather:
    """The barriers of the gathered rows, and the code of all three sides.

    ref: the memory that ``barriers_of_slots`` describes.  readers: warpgroups that read a slot.
    """

    def __init__(self, ref, stages: int, readers: int):
        self.ref, self.stages, self.readers = ref, stages, readers

    def workers(self, gmem, slots, how: GatherShape, loads, full) -> list[Callable[[], None]]:
        """What the warps beside the weight's do.  slots: the rows' bytes.  loads: of the ring.
        full: the barriers of the weight."""
        copies = [functools.partial(self.copy, gmem, slots, how, warp) for warp in range(WARPS)]
        return [*copies, functools.partial(self.hand_over, loads, full)]

    def start(self) -> None:
        """By all threads of the block, before anything else."""

        @inline(REF)
        def emit(barriers) -> None:
            def initialise() -> None:
                base = p.shared_address(barriers)
                for i in range(self.stages):
                    for kind, arrivals in enumerate((32 * WARPS, 1, 4 * self.readers)):
                        p.barrier_init(base + 8 * (kind * self.stages + i), arrivals)
                p.barriers_ready()

            p.when(p.equal(p.register("tid.x"), 0), initialise)
            p.barrier()

        emit(self.ref)

    # --- the warpgroups that multiply ---

    def wait(self, at, load) -> None:
        """Until the ring's load number ``load``, rows and weight, is in slot ``at``."""

        @inline(REF, _SPLAT)
        def emit(barrier, parity) -> None:
            p.barrier_wait(p.shared_address(barrier), parity.registers.flat[0])

        splat = plgpu.layout_cast(jnp.full((128,), self.parity(load), jnp.int32), _SPLAT)
        emit(self.ref.at[1, at], splat)

    def parity(self, load):
        """Parity of the phase in which load number ``load`` arrives."""
        turn = lax.div(load, jnp.asarray(self.stages, load.dtype))
        return lax.rem(turn, jnp.asarray(2, load.dtype))

    def release(self, at) -> None:
        """This warpgroup has read slot ``at``."""

        @inline(REF)
        def emit(barrier) -> None:
            at = p.shared_address(barrier)
            is_first = p.equal(p.register("tid.x") & 31, 0)
            p.when(is_first, lambda: p.barrier_arrive(at))

        emit(self.ref.at[2, at])

    # --- the warp that hands slots over ---

    def hand_over(self, loads, full) -> None:
        """Say of each of the ring's loads that it is there.  full: the barriers of the weight."""

        @inline(REF, REF, _SCALAR)
        def emit(copied, ready, parity) -> None:
            p.barrier_wait(p.shared_address(copied), parity.registers.flat[0])
            p.ptx("fence.proxy.async.shared::cta;")
            is_first = p.equal(p.register("tid.x") & 31, 0)
            at = p.shared_address(ready)
            p.when(is_first, lambda: p.barrier_arrive(at))

        def step(load, at):
            plgpu.barrier_wait(full.at[at])
            parity = self.parity(load).astype(jnp.int32)
            emit(self.ref.at[0, at], self.ref.at[1, at], parity)
            return pipeline.ring_next(at, 1, self.stages)

        lax.fori_loop(0, loads, step, jnp.asarray(0, jnp.int32))

    # --- the warps that copy ---

    def copy(self, gmem, slots, how: GatherShape, warp: int) -> None:
        """Copy the rows of all of this block's tiles.  warp: this warp's place among ``WARPS``."""
        refs = gmem.x, gmem.pairs, gmem.work, slots, self.ref

        @inline(*[REF] * len(refs), _SCALAR, _SCALAR)
        def emit(*args) -> None:
            *memory, cluster, pair = args
            cluster, pair = (one.registers.flat[0] for one in (cluster, pair))
            RowCopies(how, self.stages, warp, pair, *memory).run(cluster)

        emit(*refs, lax.axis_index("cluster"), lax.axis_index("pair"))


class RowCopies:
    """The program of a warp that copies the rows of a block's tiles, a slot at a time.

    warp: its place among ``WARPS``.  pair: the block's in its cluster.
    """

    def __init__(
        self, how: GatherShape, stages: int, warp: int, pair, x, pairs, work, slots, barriers
    ):
        self.how, self.stages, self.pair = how, stages, pair
        self.lane = p.register("tid.x") & 31
        self.row = (self.lane >> 3) + 4 * warp  # of eight
        chunk = self.lane & 7
        self.source = p.offset(p.address(x), chunk, 16)
        self.to = p.shared_address(slots) + (self.row * SLOT_BYTES + (chunk ^ self.row) * 16)
        self.copied = p.shared_address(barriers)
        self.work, self.pairs = p.address(work), p.address(pairs)

    def run(self, cluster: Value) -> None:
        how = self.how
        (parts,) = p.load_global(self.work, 1)
        groups = parts
        if how.cluster > 1:
            groups = (parts + (how.cluster - 1)) // how.cluster
        total = groups * how.columns
        self.last_tile, self.last_part = (p.larger(n - 1, 0) for n in (total, parts))
        spans = [v for i in range(2) for v in self.part_of(cluster + i * how.n_clusters)]
        p.loop(cluster, total, how.n_clusters, [p.ci(0), p.ci(0), *spans], self.tile)

    def part_of(self, index: Value) -> list[Value]:
        """The first pair of this block's part of a tile, and their end."""
        how = self.how
        part = p.smaller(index, self.last_tile) // how.columns
        if how.cluster > 1:
            part = part * how.cluster + self.pair
        at = p.smaller(part, self.last_part)
        first, end = p.load_global(p.offset(self.work, at + 1, 16), 4)[1:3]
        return [p.where(self.last_part < part, end, first), end]

    def tile(self, index: Value, carry: Sequence[Value]) -> list[Value]:
        """Copy a tile's rows; carry: (slot, phase, this tile's pairs, the next one's)."""
        how = self.how
        *carry, first, end, next_first, next_end = carry
        # The next tile's pairs come to L1 meanwhile, and the part behind it to registers.
        line = p.smaller(next_first + self.lane * 32, next_end - 1)
        p.prefetch_line(p.offset(self.pairs, line, 4))
        following = [next_first, next_end, *self.part_of(index + 2 * how.n_clusters)]
        self.rows = self.rows_of(first, end - 1)
        count, result = end - first, list(carry)
        if how.cluster > 1:  # a block without pairs keeps step with the others
            none = p.at_most(count, 0)
            result = p.choose(none, lambda: self.copy_slots(0, carry), result)
        for below, width in itertools.pairwise([0, *how.widths]):
            is_width = p.below(below, count) & p.at_most(count, width)
            copy = functools.partial(self.copy_slots, width, carry)
            result = p.choose(is_width, copy, result)
        return [*result, *following]

    def rows_of(self, first: Value, last: Value) -> list[Value]:
        """The lane's rows of x among a tile's."""
        how = self.how
        most = how.tokens // _AT_ONCE
        places = [p.smaller(first + self.row + _AT_ONCE * i, last) for i in range(most)]
        found = [p.load_global(p.offset(self.pairs, place, 4), 1)[0] for place in places]
        return [f if how.fan == 1 else f // how.fan for f in found]

    def copy_slots(self, n_rows: int, carry: Sequence[Value]) -> list[Value]:
        """Copy so many rows into each of a tile's slots; (slot, phase) behind them."""
        step = functools.partial(self.copy_slot, n_rows)
        return p.loop(0, self.how.steps, 1, carry, step)

    def copy_slot(self, n_rows: int, j: Value, carry: Sequence[Value]) -> list[Value]:
        """wait until the slot is empty | copies | an arrival when they are there"""
        slot, phase = carry
        barrier = self.copied + slot * 8
        empty = barrier + 16 * self.stages
        p.barrier_wait(empty, phase ^ 1)
        columns = p.offset(self.source, j, SLOT_BYTES)
        to = self.to + slot * (self.how.tokens * SLOT_BYTES)
        for i in range(n_rows // _AT_ONCE):
            begin = p.offset_rows(columns, self.rows[i], self.how.pitch)
            p.copy_async(to, begin, _AT_ONCE * SLOT_BYTES * i, line=True)
        p.copies_arrive(barrier)
        following = slot + 1
        is_last = p.equal(following, self.stages)
        return [p.where(is_last, 0, following), p.where(is_last, phase ^ 1, phase)]


class SortedRows:
    """The same for rows that lie by expert in memory already: the weight's feeder copies them."""

    def __init__(self, full):
        self.full = full

    def start(self) -> None:
        pass

    def wait(self, at, load) -> None:
        del load
        plgpu.barrier_wait(self.full.at[at])

    def release(self, at) -> None:
        pass

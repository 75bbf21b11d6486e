"""An even share of a product for every cluster: tiles that two clusters compute, and how they meet.

With 112 tiles on 132 multiprocessors 15% of them are idle. So the tiles of the last round are
divided in groups of L tiles and L + 1 clusters. A group's steps of K, one tile behind the other,
are cut into L + 1 even parts:

    cluster 0      | tile 0, first 6/7 |
    cluster 1      | tile 0, last 1/7 | tile 1, first 5/7 |
    ...
    cluster 6      | tile 5, last 6/7 |

A cluster computes the last part of a tile first, and leaves its sums in device memory. The first
part of a tile is its cluster's last work. At its end the feeder waits for the tile's counter, and
copies the sums of the other cluster through the ring, as if they were further steps. Then the
order of additions is always the same, and so are the bits.

A cluster waits for the one behind it alone, which has left its sums before it waits itself. The
clusters are numbered from the grid's last, so the blocks that are waited for begin first, and no
order in which the device starts blocks can stop the kernel.

The counters are an operand, which a kernel leaves as it found it. They are even or odd and less
than 2; each warpgroup that has left its sums adds 2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir, vector
from pallas_kernels.matmul.many_rows.plan import WeightTile

SLOTS = 2  # of the ring that bring the sums of 64 rows: half of the tokens each
COPIES = 2  # of a slot, as x and w are two


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one tile; integers of the kernel, or of the host.

    first: step of K.  steps: their number.  begun: steps of the cluster before it.
    shared: index of the tile among those that two clusters compute.
    sends: the other cluster finishes the tile.  receives: the other cluster's sums are added.
    """

    tile: jax.Array
    first: jax.Array | int
    steps: jax.Array | int
    begun: jax.Array | int
    shared: jax.Array | int = 0
    sends: jax.Array | bool = False
    receives: jax.Array | bool = False


@dataclasses.dataclass(frozen=True)
class Shares:
    """How ``tiles`` of ``steps`` each are divided among ``clusters``.

    unit: steps that no cut divides.  More than half of the last round's clusters have a tile.
    """

    tiles: int
    clusters: int
    steps: int
    unit: int

    @property
    def rest(self) -> int:
        """Tiles of the last round, which are shared."""
        return self.tiles % self.clusters

    def parts(self, cluster):
        """Tile of the last round whose first steps are the cluster's; how many; and how many steps
        it has of the tile before."""
        groups = self.clusters - self.rest
        length, wider = divmod(self.rest, groups)
        clusters = wider * (length + 2)
        of_wider = self._parts_of(cluster, 0, length + 1)
        of_others = self._parts_of(cluster - clusters, wider * (length + 1), length)
        pairs = zip(of_wider, of_others, strict=True)
        return [jnp.where(cluster < clusters, a, b) for a, b in pairs]

    def _parts_of(self, cluster, begin: int, length: int):
        """The same where all groups have ``length`` tiles.  Divisors are constants: a division by
        another number is a call, beside which wgmma waits."""
        units = self.steps // self.unit
        group = lax.div(cluster, length + 1)
        i = cluster - group * (length + 1)

        def cut(i):
            return lax.div(i * (length * units) + length, length + 1)

        tile = begin + group * length + i
        return tile, (cut(i + 1) - i * units) * self.unit, (i * units - cut(i)) * self.unit

    def segments(self, cluster, t):
        """The cluster's number of segments and of steps, and its t-th segment."""
        full = self.tiles // self.clusters
        tile, head, tail = self.parts(cluster)
        has_tail = (tail > 0).astype(jnp.int32)
        count = has_tail + full + (head > 0).astype(jnp.int32)
        kind = t + 1 - has_tail  # 0: the tail; full + 1: the head
        is_tail, is_head = kind == 0, kind == full + 1
        shared = jnp.where(is_tail, tile - 1, tile)
        last_round = full * self.clusters + shared
        whole = (kind - 1) * self.clusters + cluster
        receives = is_head & (head < self.steps)
        segment = Segment(
            tile=jnp.where(is_tail | is_head, last_round, whole),
            first=jnp.where(is_tail, self.steps - tail, 0),
            steps=jnp.where(is_tail, tail, jnp.where(is_head, head, self.steps)),
            begun=jnp.where(is_tail, 0, tail + (kind - 1) * self.steps),
            shared=shared,
            sends=is_tail,
            receives=receives,
        )
        return count, tail + full * self.steps + head, segment


def counters(count: int) -> np.ndarray:
    """The counters' operand; alternating, or XLA would write it anew for each call."""
    return (np.arange(-(-count // 4) * 4) % 2).astype(np.int32)


def sums_type(shares: Shares, tile: WeightTile) -> jax.ShapeDtypeStruct:
    """Words of all sums that are left: by block, slot and copy."""
    blocks, slots = shares.rest * tile.cluster, SLOTS * tile.rows // 64
    shape = blocks, slots, COPIES, tile.tokens // 8, 128
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def slot_of(piece: int, half, parts: int, unroll: int):
    """Slot of the ring, behind the last step, that has half the sums of 64 rows.

    piece: which half of the tokens; of ``parts`` == 2 it is the set of warpgroups that adds it.
    half: which 64 rows.
    """
    return 2 * half + piece if parts == 2 and unroll == 1 else 2 * piece + half


def leave(acc: jax.Array, places, counter) -> None:
    """Write the sums of 64 rows to device memory, and count it.

    places: two references to a slot's words, of the first and second half of the tokens.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *(plgpu.RefType(),) * 3))
    def write(ctx, acc, *refs):
        del ctx
        thread = arith.andi(p.register("tid.x"), p.ci(127))
        held = _words(acc)
        half = len(held) // 2
        for piece, ref in enumerate(refs[:2]):
            at = p.offset(p.address(ref), thread, 16)
            for i in range(0, half, 4):
                first = piece * half + i
                p.store_global(at, held[first : first + 4], 512 * i)
        p.ptx("fence.proxy.async.global;")
        p.warpgroup_barrier()
        p.when(p.equal(thread, 0), lambda: p.add_released(p.address(refs[2]), 2))

    write(acc, *places, counter)


def await_sums(counter, count: int) -> None:
    """Wait, in one warp, until ``count`` warpgroups have left their sums; restore the counter."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, counter):
        del ctx
        p.await_count(p.address(counter), 2 * count)
        p.ptx("fence.proxy.async.global;")

    wait(counter)


def add(acc: jax.Array, piece: int, slot) -> jax.Array:
    """Add a slot's words, half the sums of 64 rows, to a warpgroup's."""
    kind = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=kind)
    def added(ctx, acc, slot):
        del ctx
        thread = arith.andi(p.register("tid.x"), p.ci(127))
        at = p.add(p.shared_address(slot), p.mul(thread, 16))
        is_float = isinstance(acc.mlir_dtype, ir.F32Type)
        registers = acc.registers.copy()
        size = registers.size // 2
        words = [w for i in range(0, 2 * size, 4) for w in p.load_shared(at, 4, 512 * i)]
        for i in range(size):
            place = np.unravel_index(piece * size + i, registers.shape)
            old = registers[place]
            pair = vector.from_elements(ir.VectorType.get((2,), p.i32()), words[2 * i : 2 * i + 2])
            other = vector.bitcast(old.type, pair)
            registers[place] = (arith.addf if is_float else arith.addi)(old, other)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=acc.layout, _is_signed=acc.is_signed
        )

    return added(acc, slot)


def _words(acc) -> list[p.Value]:
    """A thread's sums as words, in the order of its registers."""
    pairs = ir.VectorType.get((2,), p.i32())
    out = []
    for register in acc.registers.flat:
        pair = vector.bitcast(pairs, register)
        out += [vector.extract(pair, [], [i]) for i in range(2)]
    return out

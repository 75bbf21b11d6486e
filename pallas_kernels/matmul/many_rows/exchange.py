"""How a cluster leaves its sums of a shared tile, and how another adds them (``shares``).

    Multiplier, last step of the part   sums -> device memory | fence | counter + 2
    Feeder of the other cluster         ... its last slot | counter? | sums -> the ring's next slots
    Multiplier of the other cluster     ... its last step | slots' words + its own sums

The sums keep the order of the registers: each thread writes 16 bytes beside its neighbour's, and
the thread in its place reads them.  So no layout matters, and no access has a bank conflict.

The counters are an operand, which the kernel leaves as it found it.  They are 0 or 1, to which each
warpgroup that has left its sums adds 2.  XLA keeps the constant in device memory from call to call,
so no kernel has to clear it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith, ir, vector
from pallas_kernels.matmul.many_rows.plan import WeightTile
from pallas_kernels.matmul.many_rows.shares import Shares

SLOTS = 2  # of the ring that bring the sums of 64 rows: half of the tokens each
COPIES = 2  # of a slot, as x and w are two


def counters(count: int) -> np.ndarray:
    """The counters' operand; alternating, or XLA would write it anew for each call."""
    return (np.arange(-(-count // 4) * 4) % 2).astype(np.int32)


def sums_type(shares: Shares, tile: WeightTile) -> jax.ShapeDtypeStruct:
    """Words of all sums that are left: by block, slot and copy."""
    blocks, slots = shares.rest * tile.cluster, SLOTS * tile.rows // 64
    shape = blocks, slots, COPIES, tile.tokens // 8, 128
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def slot_of(piece: int, half, tile: WeightTile, unroll: int):
    """Slot of the ring, behind the last step, that has half the sums of 64 rows.

    piece: which half of the tokens; with ``tile.parts`` == 2 it is the set of warpgroups that adds
    it.  half: which 64 rows.
    """
    if tile.parts == 2 and unroll == 1:
        return 2 * half + piece
    return piece * (tile.rows // 64) + half


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
        pair = ir.VectorType.get((2,), p.i32())
        for i in range(0, size, 2):
            words = p.load_shared(at, 4, 1024 * i)
            for n in range(2):
                place = np.unravel_index(piece * size + i + n, registers.shape)
                other = vector.from_elements(pair, words[2 * n : 2 * n + 2])
                other = vector.bitcast(registers[place].type, other)
                registers[place] = (arith.addf if is_float else arith.addi)(registers[place], other)
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

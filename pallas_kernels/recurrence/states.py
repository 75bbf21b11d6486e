"""A state between device memory and wgmma's registers, and rows of one back, without staging.

Also a chunk's values as wgmma's register operand, [64 value channels, 64 tokens], for the scans.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import ir, llvm
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    ChannelLane,
    float_pairs,
    half_pairs,
    thread_in_warpgroup,
    wgmma_array,
)

_WGMMA = plgpu.Layout.WGMMA


def _state_pointer(ref, column: int, rows_stride: int):
    """Device address of the thread's element (channel ``column`` + its pair offset, its row)."""
    thread = thread_in_warpgroup()
    warp, lane = thread >> 5, thread & 31
    row = (warp << 4) + (lane >> 2)
    dk = (lane & 3) << 1
    offset = (dk + column) * rows_stride + row
    return p.offset(p.address(ref), offset << 2)


def read_state(dk: int, dv: int):
    """S^T [64, Dk] in WGMMA registers from a device slice [Dk, 64] of a [.., Dk, Dv] array."""

    @inline(REF, out=plgpu.ShapeDtypeStruct((CHUNK, dk), jnp.float32, layout=_WGMMA))
    def read(ref):

        def pairs():
            base = _state_pointer(ref, 0, dv)
            for tile in range(dk // 8):
                for half in range(2):
                    yield [
                        mgpu.utils.inline_ptx(
                            f"ld.global.nc.f32 $0, [$1+{4 * ((8 * tile + e) * dv + 8 * half)}];",
                            base,
                            result_types=p.f32(),
                            has_side_effects=True,
                        )
                        for e in range(2)
                    ]

        return wgmma_array((CHUNK, dk), p.f32(), float_pairs(pairs()))

    return read


def write_state(dv: int):
    @inline(REF, _WGMMA)
    def write(ref, state):
        base = _state_pointer(ref, 0, dv)
        for i, register in enumerate(state.registers.reshape(-1)):
            tile, half = i // 2, i % 2
            for e in range(2):
                value = llvm.extractelement(register, p.ci(e))
                p.store_global(base, [value], 4 * ((8 * tile + e) * dv + 8 * half))

    return write


def write_rows(width: int, dk: int):
    """A bf16 [64, width] array in WGMMA registers to rows of Dk on the device, without staging.

    The four lanes of a row hold two columns each of every 8-column tile; a 4x4 transpose by
    shuffles gives each lane one whole tile of four, so that stores are 16 bytes.
    """

    @inline(REF, _WGMMA)
    def write(ref, rows):
        thread = thread_in_warpgroup()
        warp, lane = thread >> 5, thread & 31
        row = (warp << 4) + (lane >> 2)
        c = lane & 3
        offset = row * (2 * dk) + (c << 4)
        base = p.offset(p.address(ref), offset)
        words = [mgpu.utils.bitcast(x, p.i32()) for x in rows.registers.reshape(-1)]
        for half in range(2):
            for first in range(0, width // 8, 4):
                w = [words[2 * (first + n) + half] for n in range(4)]
                for step in range(2):
                    side = p.bit(c, step)
                    for a in (0, 1) if step else (0, 2):
                        b = a + (1 << step)
                        x, y = w[a], w[b]
                        other = p.shuffle_xor(p.where(side, x, y), 1 << step)
                        w[a], w[b] = p.where(side, other, x), p.where(side, y, other)
                p.store_global(base, w, 16 * first + 16 * dk * half)

    return write


@inline(
    plgpu.RefType(ROWS),
    plgpu.Layout.WG_SPLAT((128,)),
    out=plgpu.ShapeDtypeStruct((64, CHUNK), jnp.bfloat16, layout=_WGMMA),
)
def read_transposed(tile, mask):
    """V^T [64 dv, 64 tokens] from the swizzled rows of tokens, where the mask's bits are ones."""
    base, mask = ChannelLane().column_matrices(p.shared_address(tile)), mask.registers.flat[0]

    def words():
        loads = [p.load_matrices(base, 2048 * block, transposed=True) for block in range(4)]
        yield from (w & mask for four in loads for w in four)

    return wgmma_array((64, CHUNK), ir.BF16Type.get(), half_pairs(words()))


def by_token(vectors, slot, n: int):
    """A chunk's n-th vector of floats over the rows of [64 dv, 64 tokens]."""
    e = plgpu.load(vectors.at[slot, n], layout=_WGMMA.reduce(0))
    return lax.broadcast_in_dim(e, (64, CHUNK), [1])


def store_transposed(tile, x) -> None:
    """Store [64 dv, 64 tokens] as rows of tokens."""
    tile.transpose((1, 0))[...] = plgpu.layout_cast(
        x.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
    )

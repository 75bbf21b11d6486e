"""The common parts of register steps in chunk kernels: a thread's place, the work of a persistent
warpgroup, products of tiles, and bundles of registers.

Registers travel from one ``launch.inline`` call to the next as one Pallas array, a "bundle".  Its
element i * 128 + thread is register i of thread.  Tiles are 64 rows of 128 bytes with TMA's
128-byte swizzle.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.jax_internals import ir, llvm, vector
from pallas_kernels.launch import Views

CHUNK = 64  # tokens
SLICE = 64  # key channels of a step
TILE = 8192  # bytes of a bf16 [64, 64] or an f32 [64, 32] tile
# Tiles of 128-byte rows.  Without a tiling the copies accept any number of tokens (what is past the
# end arrives as zeros, or is not written).
ROWS = (plgpu.SwizzleTransform(128),)
# In shared memory the bytes of ``ROWS``.
BF16_TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def tiles(*shape: int):
    """Shared memory of a bfloat16 operand of wgmma."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=BF16_TILE)


def tokens(*shape: int) -> Views:
    """One memory, two views: ``rows`` of 128 bytes for the copies, wgmma's ``tiles``."""
    return Views(rows=plgpu.SMEM(shape, jnp.bfloat16, transforms=ROWS), tiles=tiles(*shape))


def blocks_for(n_work: int, warpgroups: int) -> int:
    """Blocks of a grid whose warpgroups share ``n_work`` items, one wave of them."""
    return min(gpu().sms, -(-n_work // warpgroups))


def worker_items(n_work: int, warpgroups: int):
    """(this warpgroup of its block, how many items it has, the number of its i-th)."""
    wg = lax.axis_index("warpgroup")
    worker = lax.axis_index("block") * warpgroups + wg
    stride = blocks_for(n_work, warpgroups) * warpgroups
    return wg, (n_work - worker + stride - 1) // stride, lambda i: worker + i * stride


def digits(item, *sizes: int) -> list:
    """An item's place along axes of these sizes, the first one running fastest; then the rest."""
    places = []
    for size in sizes:
        places.append(item % size)
        item = item // size
    return [*places, item]


def thread_in_warpgroup():
    """0..127, read anew where it is used: addresses computed from it are then not carried, and
    spilled, through a whole persistent loop."""
    return p.register("tid.x", volatile=True) & 127


def bundle_layout(n: int):
    return plgpu.Layout.WG_STRIDED((n * 128,), vec_size=1)


def bundle_type(n: int):
    return plgpu.ShapeDtypeStruct((n * 128,), jnp.float32, layout=bundle_layout(n))


def bundle(values):
    """f32 or i32 registers as one Pallas array, from one call of ``launch.inline`` to the next."""
    kind = ir.VectorType.get((1,), p.f32())
    registers = np.empty((len(values),), dtype=object)
    for i, x in enumerate(values):
        x = x if x.type == p.f32() else p.from_bits(x)
        registers[i] = vector.from_elements(kind, [x])
    return mgpu.FragmentedArray(
        _registers=registers, _layout=bundle_layout(len(values)).to_mgpu(), _is_signed=None
    )


def wgmma_array(shape, kind, values):
    """A bf16 or f32 array in wgmma's registers, from their pairs in order.

    values: an iterator, which is asked after the array's own registers are emitted.
    """
    layout = plgpu.Layout.WGMMA.to_mgpu()
    zero = mgpu.utils.c(0.0, kind)
    array = mgpu.FragmentedArray.splat(zero, shape, layout, is_signed=None)
    registers = array.registers.copy()
    registers.reshape(-1)[:] = list(values)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def float_pairs(pairs):
    """Pairs of f32 as registers."""
    kind = ir.VectorType.get((2,), p.f32())
    return (vector.from_elements(kind, pair) for pair in pairs)


def half_pairs(words):
    """Words of two bf16 as registers."""
    kind = ir.VectorType.get((2,), ir.BF16Type.get())
    return (mgpu.utils.bitcast(word, kind) for word in words)


def unbundle(array, *shape_groups):
    """The registers again, cut into lists of the given lengths."""
    values = [llvm.extractelement(x, p.ci(0)) for x in array.registers.flat]
    out, at = [], 0
    for n in shape_groups:
        out.append(values[at : at + n])
        at += n
    return out


class ThreadPlace:
    """Where a thread is: its warp and lane; in mma's own numbering row g of an 8x8 tile and column
    pair c: g = lane // 4, c = lane % 4."""

    def __init__(self):
        thread = thread_in_warpgroup()
        self.warp = thread >> 5
        self.lane = thread & 31
        self.g = self.lane >> 2
        self.c = self.lane & 3

    def pair(self, base, row, chunk):
        """Address of the thread's column pair in 16 bytes ``chunk``, swizzled, of a tile's row."""
        return base + (row << 7) + (chunk << 4) + (self.c << 2)

    def row_matrices(self, base):
        """ldmatrix addresses of 16 rows of a [rows, 64] bf16 tile, by 16-column step."""
        row, side = self.lane & 15, self.lane >> 4
        low, seven = base + (row << 7), row & 7
        return [low + (((side + 2 * kk) ^ seven) << 4) for kk in range(4)]


class ChannelLane(ThreadPlace):
    """The place of a thread in a warp w that owns channels 16w .. 16w + 15."""

    def column_matrices(self, base):
        """The transposed kind: 16 rows x the warp's 16 channels; add 2048 per further 16 rows."""
        inner = self.lane & 7
        half = (self.lane >> 3) & 1
        row = ((self.lane >> 4) << 3) + inner
        chunk = ((self.warp << 1) + half) ^ inner
        return base + (row << 7) + (chunk << 4)

    def gate_words(self, base):
        """Addresses [h][e] of f32 (token 2c + e, channel 16w + 8h + g); add 1024 per 8 tokens."""
        out = []
        for h in range(2):
            row = []
            for e in range(2):
                token = (self.c << 1) + e
                chunk = ((self.warp & 1) << 2) + (self.g >> 2) + 2 * h
                row.append(
                    base
                    + ((self.warp >> 1) << 13)
                    + (token << 7)
                    + ((chunk ^ token) << 4)
                    + ((self.g & 3) << 2)
                )
            out.append(row)
        return out


def zero_acc():
    return [p.cf(0.0)] * 4


def half_products(acc, a, b):
    """Products of rows 0-7 with rows 0-7 and of 8-15 with 8-15, in one accumulator.

    The two halves of mma's k axis serve one 8x8 tile each; zeros keep them apart.
    """
    zero = p.ci(0)
    acc = p.mma(acc, [a[0], zero, zero, a[1]], [b[0], b[1]])
    return p.mma(acc, [a[2], zero, zero, a[3]], [b[2], b[3]])


def b_tiles(m):
    """The two B fragments (rows 0-7, rows 8-15 as columns of the product) of a loaded 16x16."""
    return [[m[0], m[2]], [m[1], m[3]]]


def zeros(n: int):
    return plgpu.layout_cast(jnp.zeros((n * 128,), jnp.float32), bundle_layout(n))

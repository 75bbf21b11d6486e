"""What the gradient kernels' register steps share: a thread's place, and bundles of registers.

What a step leaves in registers travels to the next ``inline_mgpu`` call as one Pallas array, a
"bundle", whose element i * 128 + thread is register i of thread.  Tiles are 64 rows of 128 bytes
with TMA's 128-byte swizzle.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p


def thread_in_warpgroup():
    """0..127, read anew where it is used: addresses computed from it are then not carried, and
    spilled, through a whole persistent loop."""
    return p.masked(p.register("tid.x", volatile=True), 127)


def bundle_layout(n: int):
    return plgpu.Layout.WG_STRIDED((n * 128,), vec_size=1)


def bundle_type(n: int):
    return plgpu.ShapeDtypeStruct((n * 128,), jnp.float32, layout=bundle_layout(n))


def bundle(values):
    """f32 or i32 registers as one Pallas array, to carry them between inline_mgpu calls."""
    kind = ir.VectorType.get((1,), p.f32())
    registers = np.empty((len(values),), dtype=object)
    for i, x in enumerate(values):
        x = x if x.type == p.f32() else arith.bitcast(p.f32(), x)
        registers[i] = vector.from_elements(kind, [x])
    return mgpu.FragmentedArray(
        _registers=registers, _layout=bundle_layout(len(values)).to_mgpu(), _is_signed=None
    )


def unbundle(array, *shape_groups):
    """The registers again, cut into lists of the given lengths."""
    values = [llvm.extractelement(x, p.ci(0)) for x in array.registers.flat]
    out, at = [], 0
    for n in shape_groups:
        out.append(values[at : at + n])
        at += n
    return out


class ChannelLane:
    """A thread's place: warp w owns channels 16w..16w+15; g = lane // 4, c = lane % 4."""

    def __init__(self):
        thread = thread_in_warpgroup()
        self.warp = p.shift_right(thread, 5)
        self.lane = p.masked(thread, 31)
        self.g = p.shift_right(self.lane, 2)
        self.c = p.masked(self.lane, 3)

    def row_matrices(self, base):
        """ldmatrix addresses of 16 rows of a [rows, 64] bf16 tile, by 16-column step."""
        row, side = p.masked(self.lane, 15), p.shift_right(self.lane, 4)
        low, seven = p.add(base, p.shift_left(row, 7)), p.masked(row, 7)
        return [
            p.add(low, p.shift_left(arith.xori(p.add(side, 2 * kk), seven), 4)) for kk in range(4)
        ]

    def column_matrices(self, base):
        """The transposed kind: 16 rows x the warp's 16 channels; add 2048 per further 16 rows."""
        inner = p.masked(self.lane, 7)
        half = p.masked(p.shift_right(self.lane, 3), 1)
        row = p.add(p.shift_left(p.shift_right(self.lane, 4), 3), inner)
        chunk = arith.xori(p.add(p.shift_left(self.warp, 1), half), inner)
        return p.add(base, p.shift_left(row, 7), p.shift_left(chunk, 4))

    def gate_words(self, base):
        """Addresses [h][e] of f32 (token 2c + e, channel 16w + 8h + g); add 1024 per 8 tokens."""
        out = []
        for h in range(2):
            row = []
            for e in range(2):
                token = p.add(p.shift_left(self.c, 1), e)
                chunk = p.add(
                    p.shift_left(p.masked(self.warp, 1), 2),
                    2 * h,
                    p.shift_right(self.g, 2),
                )
                row.append(
                    p.add(
                        base,
                        p.shift_left(p.shift_right(self.warp, 1), 13),
                        p.shift_left(token, 7),
                        p.shift_left(arith.xori(chunk, token), 4),
                        p.shift_left(p.masked(self.g, 3), 2),
                    )
                )
            out.append(row)
        return out


def b_tiles(m):
    """The two B fragments (rows 0-7, rows 8-15 as columns of the product) of a loaded 16x16."""
    return [[m[0], m[2]], [m[1], m[3]]]


def zeros(n: int):
    return plgpu.layout_cast(jnp.zeros((n * 128,), jnp.float32), bundle_layout(n))

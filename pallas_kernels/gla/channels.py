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

from pallas_kernels.gla import ptx as p


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
        thread = p.thread_in_warpgroup()
        self.warp = arith.shrui(thread, p.ci(5))
        self.lane = arith.andi(thread, p.ci(31))
        self.g = arith.shrui(self.lane, p.ci(2))
        self.c = arith.andi(self.lane, p.ci(3))

    def row_matrices(self, base):
        """ldmatrix addresses of 16 rows of a [rows, 64] bf16 tile, by 16-column step."""
        row, side = arith.andi(self.lane, p.ci(15)), arith.shrui(self.lane, p.ci(4))
        low, seven = p.add(base, arith.shli(row, p.ci(7))), arith.andi(row, p.ci(7))
        return [
            p.add(low, arith.shli(arith.xori(p.add(side, 2 * kk), seven), p.ci(4)))
            for kk in range(4)
        ]

    def column_matrices(self, base):
        """The transposed kind: 16 rows x the warp's 16 channels; add 2048 per further 16 rows."""
        inner = arith.andi(self.lane, p.ci(7))
        half = arith.andi(arith.shrui(self.lane, p.ci(3)), p.ci(1))
        row = p.add(arith.shli(arith.shrui(self.lane, p.ci(4)), p.ci(3)), inner)
        chunk = arith.xori(p.add(arith.shli(self.warp, p.ci(1)), half), inner)
        return p.add(base, arith.shli(row, p.ci(7)), arith.shli(chunk, p.ci(4)))

    def gate_words(self, base):
        """Addresses [h][e] of f32 (token 2c + e, channel 16w + 8h + g); add 1024 per 8 tokens."""
        out = []
        for h in range(2):
            row = []
            for e in range(2):
                token = p.add(arith.shli(self.c, p.ci(1)), e)
                chunk = p.add(
                    arith.shli(arith.andi(self.warp, p.ci(1)), p.ci(2)),
                    2 * h,
                    arith.shrui(self.g, p.ci(2)),
                )
                row.append(
                    p.add(
                        base,
                        arith.shli(arith.shrui(self.warp, p.ci(1)), p.ci(13)),
                        arith.shli(token, p.ci(7)),
                        arith.shli(arith.xori(chunk, token), p.ci(4)),
                        arith.shli(arith.andi(self.g, p.ci(3)), p.ci(2)),
                    )
                )
            out.append(row)
        return out


def b_tiles(m):
    """The two B fragments (rows 0-7, rows 8-15 as columns of the product) of a loaded 16x16."""
    return [[m[0], m[2]], [m[1], m[3]]]


def zeros(n: int):
    return plgpu.layout_cast(jnp.zeros((n * 128,), jnp.float32), bundle_layout(n))

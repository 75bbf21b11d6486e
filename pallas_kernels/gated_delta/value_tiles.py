"""A chunk's values as wgmma's register operand, [64 value channels, 64 tokens], for the scans."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import ir
from pallas_kernels.recurrence.channels import CHUNK, ROWS, ChannelLane

_WGMMA = plgpu.Layout.WGMMA


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(ROWS), plgpu.Layout.WG_SPLAT((128,))),
    return_type=plgpu.ShapeDtypeStruct((64, CHUNK), jnp.bfloat16, layout=_WGMMA),
)
def read_transposed(ctx, tile, mask):
    """V^T [64 dv, 64 tokens] from the swizzled rows of tokens, where the mask's bits are ones."""
    del ctx
    base, mask = ChannelLane().column_matrices(p.shared_address(tile)), mask.registers.flat[0]
    layout = _WGMMA.to_mgpu()
    half = ir.BF16Type.get()
    zero = mgpu.utils.c(0.0, half)
    array = mgpu.FragmentedArray.splat(zero, (64, CHUNK), layout, is_signed=None)
    registers = array.registers.copy()
    kind = ir.VectorType.get((2,), half)
    words = [w for block in range(4) for w in p.load_matrices(base, 2048 * block, transposed=True)]
    registers.reshape(-1)[:] = [mgpu.utils.bitcast(w & mask, kind) for w in words]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def by_token(vectors, slot, n: int):
    """A chunk's n-th vector of floats over the rows of [64 dv, 64 tokens]."""
    e = plgpu.load(vectors.at[slot, n], layout=_WGMMA.reduce(0))
    return lax.broadcast_in_dim(e, (64, CHUNK), [1])


def store_transposed(tile, x) -> None:
    """Store [64 dv, 64 tokens] as rows of tokens."""
    tile.transpose((1, 0))[...] = plgpu.layout_cast(
        x.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
    )

"""W4A16, W8A16 and W4A8 products on Hopper for many rows: codes widen in registers.

    out[m, n] = token[m] * row[n] * sum_k x[m, k] * a[n, k] + bias[n]
    a         = (q - zero) * scale    or    q * scale + zero

Contract.  x [M, K] bfloat16 or float16, any M.  w [N, K] int4 (packed) or int8 in the plain layout.
8 divides N, 64 divides K, and a group has 32 columns or a multiple of 64.  ``a`` is rounded to x's
dtype, and sums are float32.  Or w is MXFP4 or NVFP4 beside bfloat16; then ``a`` is exact.  Or x has
8-bit codes and w is int4; then 128 divides K and the columns of a group.  Beside scales in two
levels (``QTensor.unit`` is ``row``) int8 codes meet int8 ``a``, and int32 sums are exact.  Else the
operand is q - zero in x's dtype, which is exact. The sum of every 128 columns, times its scale, is
added in float32 (``unpack``).

Operands are swapped.  64 rows of w are wgmma's register operand, and the tokens are its N. So the
kernel dequantizes a weight once per 256 tokens and never writes it back.  The output tile is
transposed on its way through shared memory.

    Feeder.copy_tiles      TMA x, w, scales of slot i+1 | i+2 | ... | next tile's | ...
    Multiplier 0         wait i, i+1 | dequantized | wgmma x 8 ............ | release i, i+1 |
    Multiplier 1         ....... wgmma x 8 | release | wait | dequantized | wgmma x 8 ...
    both                 after the last step, finish: acc * row + bias -> 16 bits, transposed -> TMA

Copies: one warp of the last warpgroup, by TMA (``Feeder``); with ``lag`` warpgroup 0's first warp.
Waits: multipliers wait on ``full`` for a slot.  They wait on ``vectors_full`` for a tile's vectors
in ``finish``, or with ``stored`` vectors before the first step; a block that finishes no tile, when
it has sent its sums.  The copying warp waits on ``empty`` for the readers of both blocks of a
cluster, and on ``vectors_empty`` for those of its own block.  With ``parts`` warpgroups hand sums
over by ``sums_full`` and ``sums_empty``, with ``split`` blocks by ``peer_full`` and ``peer_empty``.
Writes: the warpgroup that finishes 64 rows of w stores their outputs by TMA (``finish``).

The two warpgroups fall into step by themselves: while one dequantizes, the wgmmas of the other keep
the tensor cores busy.  Two slots cost about 270 instructions a thread, against 2 x 1024 cycles of
wgmma.  For int4 these are two shuffles and a permute per 32 bits, then LOP3, subtract and multiply
per pair.  With ``stored`` scales a load of a byte and a multiplication replace them (``unpack``).
The two blocks of a cluster lie side by side in N, and the activations are multicast to both.

With ``lag`` no warpgroup only copies.  Multiplier 0 copies too, in each step after its wgmmas, so
that a thread may have 255 registers where ptxas moves none (``plan``).

Up to 64 tokens, a block has too little work to keep its warpgroups busy.  ``parts`` lets more
warpgroups take turns at the slots.  ``split`` gives each of a cluster's two blocks half of K.
``stored`` vectors come once a tile, in the layout of the QTensor.  Beside int8 codes whose sums are
int32 a slot has 256 columns: two ``pieces`` of x, and rows of 128 bytes of codes.

Floor: XLA's bfloat16 product, 840 TFLOP/s at K = 4096, N = 14336, M = 8192 on an H200 (humming 702
in the same run).  Result: int4 in groups of 128 785, int8 758; M = 64 takes 21.9 us.  Attempts:
``docs/lab/matmul.md``.  Command: ``python -m benchmarks.kernels.prefill``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.launch import Views
from pallas_kernels.matmul.many_rows import pipeline
from pallas_kernels.matmul.many_rows.pipeline import launch_persistent, ring_barriers, tiled
from pallas_kernels.matmul.many_rows.plan import SlotGroups, WeightTile, part_groups
from pallas_kernels.matmul.many_rows.weight_program import (
    WeightBlock,
    WeightOperands,
    is_unpacked,
    scales_sums,
)
from pallas_kernels.matmul.stored import StoredWeight


@functools.partial(jax.jit, static_argnames=("weight", "out_dtype", "tile"))
def weight_matmul(
    operands: WeightOperands, weight: StoredWeight, out_dtype: DTypeLike, tile: WeightTile
) -> jax.Array:
    """The product with a weight in codes, ``[M, N]`` of 16 bits; see the module's docstring.

    weight: how the weight is stored whose parts ``operands`` has.  Raises ValueError where the
    tile's slots do not divide K.
    """
    x = operands.x
    if not tile.divides(x.shape[1]):
        raise ValueError(f"quantized_matmul: {tile} does not divide K = {x.shape[1]}")
    (out,) = launch_persistent(
        functools.partial(WeightBlock, tile=tile, weight=weight),
        operands._asdict(),
        {"out": jax.ShapeDtypeStruct((x.shape[0], operands.w.shape[0]), out_dtype)},
        name=f"quantized_matmul_w{weight.bits}a{8 * x.dtype.itemsize}",
        scratch=_scratch(operands, out_dtype, weight, tile),
        tile=tile,
        computing=tile.rows // 64 * tile.parts,
        feeds=tile.lag == 0,
    )
    return out


def _scratch(
    operands: WeightOperands, out_dtype: DTypeLike, weight: StoredWeight, tile: WeightTile
) -> dict:
    """Shared memory of a block, and its barriers."""
    x, vectors = operands.x, operands._asdict()
    m, n = x.shape[0], operands.w.shape[0]
    per_slot = SlotGroups(weight.group, tile.block).groups_per_slot
    across, unused = tile.rows // 64, plgpu.SMEM((32,), jnp.float32)
    exact = x.dtype == jnp.int8 and not scales_sums(operands)
    sum_dtype = jnp.int32 if exact else jnp.float32
    # Those that tell the feeder that a tile's vectors have been read.
    readers = across * tile.parts if tile.stored else across
    of_groups = [name for name in ("scale", "zero") if vectors[name] is not None]
    of_tile = [name for name in ("row", "bias", "token") if vectors[name] is not None]
    if tile.stored:
        of_groups, of_tile = [], of_groups + of_tile

    def groups_of(v):
        if v is None:
            return unused
        if tile.stored:
            groups = part_groups(v, tile.split)
            return plgpu.SMEM((tile.vector_slots(m, n), tile.rows, groups), v.dtype)
        return plgpu.SMEM((tile.stages, per_slot, tile.rows), v.dtype)

    def vector(v, size=tile.rows):
        return unused if v is None else plgpu.SMEM((tile.vector_slots(m, n), size), v.dtype)

    def sums(count):
        shape, width = (count, 64, tile.tokens), min(tile.tokens, 32) * 4
        return plgpu.SMEM(shape, sum_dtype, transforms=tiled(sum_dtype, width))

    peer = {}
    if tile.split > 1:
        senders = -(-across // 2)
        peer = {
            "peer_sums": sums(senders),
            # One for all senders: jax 0.11.2 signals the wrong one of several.
            "peer_full": plgpu.Barrier(num_arrivals=senders),
            "peer_empty": plgpu.ClusterBarrier(
                collective_axes=("part",), num_arrivals=1, num_barriers=across
            ),
        }
    of_slots = tile.stages, tile.pieces, tile.tokens, tile.block // tile.pieces
    copies = 1 + tile.pieces + len(of_groups)
    given = plgpu.Barrier(num_arrivals=1, num_barriers=across * max(1, tile.parts - 1))
    return {
        "x": pipeline.rows_and_tiles(of_slots, x.dtype),
        "w": _slots(operands.w, weight, tile),
        "scale": groups_of(vectors["scale"]),
        "zero": groups_of(vectors["zero"]),
        "out": pipeline.rows_and_tiles((across, 2, min(tile.store, tile.tokens), 64), out_dtype),
        "row": vector(vectors["row"]),
        "bias": vector(vectors["bias"]),
        "token": vector(vectors["token"], tile.tokens),
        "sums": sums(across * (tile.parts - 1)) if tile.parts > 1 else unused,
        **ring_barriers(tile.stages, copies, across),
        "vectors_full": plgpu.Barrier(num_arrivals=max(1, len(of_tile)), num_barriers=2),
        "vectors_empty": plgpu.Barrier(num_arrivals=readers, num_barriers=2),
        "sums_full": given,
        "sums_empty": given,
        **peer,
    }


def _slots(w: jax.Array, weight: StoredWeight, tile: WeightTile):
    """The ring's slots of w; int4 that is unpacked byte by byte is read as bytes."""
    row_bytes = tile.block * weight.bits // 8
    tiles = plgpu.SMEM(
        (tile.stages, tile.rows, tile.block), w.dtype, transforms=tiled(w.dtype, row_bytes)
    )
    if not is_unpacked(weight, tile):
        return tiles
    return Views(tiles=tiles, bytes=plgpu.SMEM((tile.stages, tile.rows, row_bytes), jnp.int8))

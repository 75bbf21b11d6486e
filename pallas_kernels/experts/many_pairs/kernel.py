"""A grouped product of many pairs on Hopper: tiles of one expert's rows and some of its tokens.

    out[p] = gate(x[p // fan] @ w[experts[p]].T * row + bias[experts[p]])  float32 until the store

Contract.  x bfloat16.  w bfloat16, int8 and float8_e4m3fn by rows or groups, int4 with or without
zeros, MXFP4 or NVFP4, ``[E, N, K]``.  64 divides K, a group has a multiple of 64 columns (float4:
32 or 16), and 64 divides N.  The gate is SwiGLU, GELU's by tanh, ``ClampedGate`` or none.

    before   pairs by expert -> parts of up to ``tokens`` pairs of one expert (``sort_kernel``)
    feeder   a part's rows of x, gathered | its expert's rows of w: of gate and of up side by side
    others   codes -> bfloat16 in registers | wgmma over K | * row + bias, gate -> its pair's result

The program is the dense product's (``matmul.many_rows.weight``): w is wgmma's register operand, and
tokens are its N.  ``gather_program`` copies a tile's rows of x from where they lie.
Under a gate a warpgroup has 32 rows of gate and 32 of up, which a thread reads eight rows apart, so
the gate needs no exchange.  Consecutive tiles have one part, so that L2 still has its rows of x,
and a part's weight is read once.  Where the weight is bfloat16 and experts have many pairs, no
operand is in registers (``tokens_program``).  Where experts fill tiles of float4 codes,
another kernel sorts rows of x in memory first (``sort_kernel``), and two blocks share them.

Copies: the feeder's warp copies w and its scales by TMA (``PairsFeeder``).  Two more warps gather
rows of x by cp.async (``RowGather``), or the feeder copies sorted rows by TMA.
Waits: the feeder waits on ``empty`` for a slot that all multiplying warpgroups have read, and on
``vectors_empty`` for scales.  The gathering warps wait on barriers of their own for that.  A third
warp waits for both copies of a slot, and says ``ready``.  Multiplying warpgroups wait for ``ready``
(sorted rows: ``full``) and for ``vectors_full``.
Writes: each multiplying warpgroup stores its results at their pairs, through shared memory if they
are bfloat16.

Rows of x past a part's end are the part's last row again, or where rows are sorted another
expert's.  Rows of w past an expert's end are another's.  The sums of both are not stored.

Numerics: a weight is rounded once to bfloat16, as in the dense product.  Sums are float32; their
order depends on K alone, so a pair's result does not depend on its place.

Results: ``docs/lab/experts.md``.  Command: ``python -m benchmarks.kernels.experts``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.experts.blocks import parts_of_pairs
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs import sort_kernel
from pallas_kernels.experts.many_pairs.finish_program import PairsFinish
from pallas_kernels.experts.many_pairs.gather_program import barriers_of_slots, rows_of_slots
from pallas_kernels.experts.many_pairs.pairs_program import UNIT, PairsBlock
from pallas_kernels.experts.many_pairs.plan import (
    Tile,
    TokenTile,
    computing_of,
    has_sorted_rows,
    in_groups,
    rows_in_memory,
    stage_bytes,
)
from pallas_kernels.experts.many_pairs.sort_kernel import sorted_rows
from pallas_kernels.experts.many_pairs.tokens_program import TokenBlock
from pallas_kernels.launch import Views
from pallas_kernels.matmul.few_rows.kernel import parts_of
from pallas_kernels.matmul.many_rows.pipeline import (
    launch_persistent,
    ring_barriers,
    rows_and_tiles,
    tiled,
)
from pallas_kernels.matmul.many_rows.plan import BLOCK_K
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.matmul.widen import FLOAT4_REST
from pallas_kernels.qtensor import QTensor

_BOX = 256  # elements of an axis of a copy, at most


@functools.partial(jax.jit, static_argnames=("fan", "gate", "tile", "out_dtype", "partial"))
def grouped_tiles(
    x: jax.Array,
    w: jax.Array | QTensor,
    experts: jax.Array,
    bias: jax.Array | None = None,
    *,
    fan: int,
    gate: Gate | None,
    tile: Tile,
    out_dtype: DTypeLike,
    partial: bool = False,
) -> jax.Array:
    """The products of all pairs in out_dtype (float32 or bfloat16), ``[P, N]``, with a gate half.

    x: bfloat16 ``[P / fan, K]``; pair p reads row p // fan.  w: ``[E, N, K]``, of the module's
    docstring; under a gate N is gate, then up.  experts: int32 ``[P]``, clamped to [0, E).
    bias: float ``[E, N]``, added before the gate.  partial: an index of E is an expert that w has
    not; the pair's result may be anything.
    """
    n_experts, n, k = w.shape
    n_pairs = experts.shape[0]
    is_small = n_pairs <= sort_kernel.MOST_PAIRS and n_experts <= sort_kernel.MOST_EXPERTS
    if is_small:
        parts = sort_kernel.parts_of_pairs(experts, n_experts, tile.tokens, partial=partial)
    else:
        clamped = jnp.clip(experts, 0, n_experts - (not partial))
        parts = parts_of_pairs(clamped, n_experts, tile.tokens)
    weight, held = StoredWeight.of(w), parts_of(w)
    row = None  # the factor of an expert's row [E, N, 1] that multiplies sums
    if isinstance(w, QTensor):
        row = w.unit if weight.float4 else None if in_groups(weight) else w.scale
    flat = held["w"].reshape(n_experts * n, k)
    if has_sorted_rows(tile):
        x = sorted_rows(x, parts.order, fan)
    operands = {
        "x": x,
        "w": flat,
        "scale": _boxed(held["scale"]) if in_groups(weight) else None,
        "zero": _boxed(held["zero"]) if weight.codes == jnp.int4 else None,
        "row": None if row is None else row.astype(jnp.float32).reshape(-1),
        "bias": None if bias is None else bias.astype(jnp.float32).reshape(-1),
        "pairs": parts.order,
        "work": parts.work,
    }
    n_out = n if gate is None else n // 2
    finish = PairsFinish(
        scaled=row is not None,
        gate=gate,
        rest=FLOAT4_REST if weight.float4 else 1.0,
        bytes=jnp.dtype(out_dtype).itemsize,
    )
    block = TokenBlock if isinstance(tile, TokenTile) else PairsBlock
    facts = {"tile": tile, "weight": weight, "finish": finish, "shape": (n, k), "fan": fan}
    (out,) = launch_persistent(
        functools.partial(block, **facts),
        operands,
        {"out": jax.ShapeDtypeStruct((n_pairs, n_out), out_dtype)},
        name=f"grouped_matmul_{weight.scale_kind if weight.float4 else weight.codes.name}",
        scratch=_scratch(operands, held, weight, tile, gate is not None),
        tile=tile,
        computing=computing_of(tile),
    )
    return out


def _boxed(v: jax.Array | None) -> jax.Array | None:
    """``[E, N, groups]`` as ``[E N / 32, a, b]``: the vectors of 32 rows are one copy."""
    if v is None:
        return None
    return v.reshape(-1, *box_of(v.shape[-1], v.dtype))


def box_of(groups: int, dtype: DTypeLike) -> tuple[int, int]:
    """(a, b) with a * b values of 32 rows; b values are a multiple of 16 bytes."""
    least = 16 // jnp.dtype(dtype).itemsize
    count = UNIT * groups // least
    most = next(f for f in range(_BOX // least, 0, -1) if count % f == 0)
    return count // most, most * least


def _scratch_of_rows(tile: Tile) -> dict:
    """Shared memory of the rows of x."""
    if has_sorted_rows(tile):
        return {"x": rows_and_tiles((tile.stages, tile.tokens, BLOCK_K), jnp.bfloat16)}
    return {
        "x": rows_of_slots(tile.stages, tile.tokens),
        "row_barriers": barriers_of_slots(tile.stages),
    }


def _scratch(operands, held, weight: StoredWeight, tile: Tile, gated: bool) -> dict:
    """Shared memory of a block, and its barriers."""
    across, sets = computing_of(tile), 1 + gated
    n_rows = rows_in_memory(tile, gated)
    unused = plgpu.SMEM((32,), jnp.float32)
    of_tile = [name for name in ("scale", "zero") if operands[name] is not None]

    def vectors(name):
        v = operands[name]
        if v is None:
            return unused
        boxes = 2, n_rows // UNIT, *v.shape[1:]
        rows = 2, n_rows, held[name].shape[-1]
        return Views(boxes=plgpu.SMEM(boxes, v.dtype), rows=plgpu.SMEM(rows, v.dtype))

    w, row_bytes = operands["w"], BLOCK_K * weight.bits // 8
    shape = tile.stages, n_rows
    return {
        **_scratch_of_rows(tile),
        "w": Views(
            tiles=plgpu.SMEM((*shape, BLOCK_K), w.dtype, transforms=tiled(w.dtype, row_bytes)),
            bytes=plgpu.SMEM((*shape, row_bytes), jnp.int8),
        ),
        "stage": plgpu.SMEM((across, stage_bytes(tile, gated)), jnp.int8),
        "scale": vectors("scale"),
        "zero": vectors("zero"),
        **ring_barriers(tile.stages, sets + has_sorted_rows(tile), across),
        "vectors_full": plgpu.Barrier(num_arrivals=max(1, sets * len(of_tile)), num_barriers=2),
        "vectors_empty": plgpu.Barrier(num_arrivals=across, num_barriers=2),
    }

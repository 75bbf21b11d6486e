"""The launch of the kernels of few rows: that of one row (``row``) and that of tiles (``tile``).

Those two files say who copies, who waits and who writes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.launch import launch
from pallas_kernels.matmul.call import Around
from pallas_kernels.matmul.few_rows import row, tile
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import WARPS, RowDivision, TileDivision
from pallas_kernels.matmul.few_rows.posted import Posts
from pallas_kernels.matmul.stored import KIND, StoredWeight
from pallas_kernels.qtensor import FLOAT4, QTensor

Weight = jax.Array | QTensor
_LAST = "pending", "total"  # of the tile kernel's addresses


@functools.partial(jax.jit, static_argnames=("plan",))
def matmul(
    x: jax.Array, w: Weight, around: Around, plan: RowDivision | TileDivision
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return the product [M, N] of x [M, K] (bf16 or f16) and w [N, K].  One row may be longer.

    ``plan`` has further conditions.  With a pending term [M, K], f32 or x's dtype, the result is a
    pair, with the sum.
    """
    m, (n, k) = x.shape[0], w.shape
    if isinstance(plan, TileDivision) and plan.m < m:
        return _in_passes(plan, x, w, around)
    bias, residual, out_dtype = around.bias, around.residual, around.out
    is_row = isinstance(plan, RowDivision)
    is_apart = not is_row and plan.apart
    if is_apart:
        bias, residual, out_dtype = None, None, jnp.float32
    if bias is not None and not is_row:  # the kernel of one row reads 16 bits, too
        bias = bias.astype(jnp.float32)
    inputs = {"x": x, **parts_of(w), "bias": bias, "gamma": around.gamma, "residual": residual}
    inputs |= {name: getattr(around, name) for name in ("pending", "post", "posted")}
    parts = (plan.split,) if is_apart else ()
    outs = {"out": jax.ShapeDtypeStruct((*parts, m, n // 2 if around.swiglu else n), out_dtype)}
    outs["total"] = None if around.pending is None else jax.ShapeDtypeStruct((m, k), x.dtype)
    table = around.post if around.posted is None else around.posted
    facts = {
        "weight": StoredWeight.of(w),
        "n": n,
        "k": k,
        "kinds": kinds_of(inputs | outs),
        "eps": around.eps,
        "swiglu": around.swiglu,
        "activation": around.gate,
    }
    if table is not None:
        facts["posts"] = Posts(table.shape[1] - 2, k if around.post is None else n)

    def body(gmem, smem):
        memory = vars(gmem)
        if is_row:
            row.RowProgram(plan, FewRowsOperands.of(memory, **facts), smem).run()
        else:
            memory = dict(sorted(memory.items(), key=lambda item: item[0] in _LAST))
            tile.TileProgram(plan, FewRowsOperands.of(memory, **facts), smem).run()

    sizes = [size // 4 for size in plan.scratch_sizes(normed=around.gamma is not None)]
    if around.post is not None:
        sizes[1] = 2 * plan.warps * plan.rows  # of ``row.Poster``
    out, total = launch(
        body,
        inputs,
        outs,
        name=plan.kernel.removesuffix("_mosaic"),
        grid=plan.blocks if is_row else plan.clusters * (plan.split if is_apart else 1),
        cluster=1 if is_row or is_apart else plan.split,
        warpgroups=(plan.warps if is_row else WARPS) // 4,
        scratch=dict(zip(row.SCRATCH if is_row else tile.SCRATCH, sizes, strict=False)),
        registers=True,
    )
    if is_apart:
        return _sum_of_parts(out, around)
    return out if around.pending is None else (out, total)


def _in_passes(plan: TileDivision, x: jax.Array, w: Weight, around: Around) -> Any:
    """The product of ``plan.m`` rows at a time."""
    found = []
    for first in range(0, x.shape[0], plan.m):
        rows = slice(first, first + plan.m)
        residual, pending = (
            None if v is None else v[rows] for v in (around.residual, around.pending)
        )
        own, part = dataclasses.replace(around, residual=residual, pending=pending), x[rows]
        found.append(matmul(part, w, own, dataclasses.replace(plan, m=part.shape[0])))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _sum_of_parts(parts: jax.Array, around: Around) -> jax.Array:
    """The sum of ``[parts, M, N]`` in order, what is fused behind it, and one rounding."""
    total = functools.reduce(jnp.add, parts)
    for more in (around.bias, around.residual):
        total = total if more is None else total + more.astype(jnp.float32)
    return total.astype(around.out)


def parts_of(w: Weight) -> dict[str, jax.Array | None]:
    if not isinstance(w, QTensor):
        return {"w": w, "scale": None, "zero": None}
    if w.dtype != FLOAT4:
        return {"w": w.q, "scale": w.scale, "zero": w.zero}
    # The kernel works on bits, and Mosaic GPU knows no such dtypes.
    q, scale = (
        jax.lax.bitcast_convert_type(v, dtype)
        for v, dtype in ((w.q, jnp.int4), (w.scale, jnp.int8))
    )
    return {"w": q, "scale": scale, "zero": w.unit}


def kinds_of(arrays: Mapping[str, jax.Array | None]) -> dict[str, str]:
    """The kinds of those that hold floats."""
    names = {name: jnp.dtype(v.dtype).name for name, v in arrays.items() if v is not None}
    return {name: KIND[dtype] for name, dtype in names.items() if dtype in KIND}

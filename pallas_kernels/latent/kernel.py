"""Latent attention on Hopper: one pass over the cache, whose latents are keys and values.

See ``latent.op`` for the contract.  ``latent.decode_program`` has the program of a block of 64
query rows, and ``latent.few_program`` that of up to 16.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.merge import merge_chunks
from pallas_kernels.attention.operands import capacity_of
from pallas_kernels.latent.decode_program import HALF, LATENT, PIECES, TILE, Facts, LatentBlock
from pallas_kernels.latent.few_program import STAGES, FewBlock
from pallas_kernels.latent.plan import LatentPlan, copy_of
from pallas_kernels.launch import Views, launch
from pallas_kernels.ptx import LOG2E

ROWS = 8  # query heads are filled up to a multiple: a row of a tile in shared memory


@functools.partial(jax.jit, static_argnames=("scale", "plan"))
def latent_attention(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    table: jax.Array | None,
    *,
    scale: float,
    plan: LatentPlan,
) -> jax.Array:
    """``q [B, T, N, 576]``, ``lengths [B, T]`` -> ``[B, T, N, 512]``; see ``latent.op``."""
    batch, tokens, n, width = q.shape
    heads = -(-n // ROWS) * ROWS
    q = jnp.pad(q, ((0, 0), (0, 0), (0, heads - n), (0, 0)))
    rows, capacity = tokens * heads, capacity_of(cache, table)
    page = pool = 0
    if table is not None:
        pool, page = cache.shape[:2]
    run = TILE if table is None else copy_of(table.shape[1], page)
    splits = -(-capacity // plan.chunk)
    tiles = -(-rows // TILE)
    facts = Facts(
        tokens, rows, plan.chunk, splits, capacity, run, page, pool, scale * LOG2E, tiles % 2 == 0
    )
    out = jax.ShapeDtypeStruct((batch, rows, LATENT), q.dtype)
    stats = None
    if splits > 1:
        out = jax.ShapeDtypeStruct((batch * splits, rows, LATENT), jnp.float32)
        stats = jax.ShapeDtypeStruct((batch * splits, rows, 2), jnp.float32)

    copies = TILE // run
    if plan.few:
        block, filled = FewBlock, rows
        scratch = _few_scratch(out.dtype, copies, rows)
    else:
        block, filled = LatentBlock, facts.tiles * TILE
        scratch = _scratch(out.dtype, copies, facts.paired)

    def body(gmem, smem, barrier) -> None:
        block(gmem, smem, barrier, facts).run()

    out, stats = launch(
        body,
        {
            "q": q.reshape(batch, rows, width),
            "cache": cache,
            "lengths": lengths.reshape(-1),
            "row_lengths": by_query_row(lengths, heads, filled) if tokens > 1 else None,
            "table": table,
        },
        {"out": out, "stats": stats},
        name="latent_attention_kernel",
        grid=batch * splits * facts.tiles // (1 + facts.paired),
        cluster=1 + facts.paired,
        warpgroups=None if plan.few else 2,
        approx_math=True,
        # The program for 64 rows sums over lanes of a warp.
        reduction_scratch_bytes=4096 if plan.few else 0,
        scratch=scratch,
    )
    if splits > 1:
        out = merge_chunks(
            out.reshape(batch, splits, rows, LATENT),
            stats.reshape(batch, splits, rows, 2),
            lengths,
            capacity=capacity,
            chunk=plan.chunk,
            window=None,
            rotated=False,
            out_dtype=q.dtype,
        )
    return out.reshape(batch, tokens, heads, LATENT)[:, :, :n]


def by_query_row(lengths: jax.Array, heads: int, width: int) -> jax.Array:
    """Return int32 ``[B, width]``: the keys that each query row sees."""
    rows = jnp.repeat(lengths, heads, axis=1)
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _tiles(dtype, *shape: int):
    """Shared memory in tiles of 8 rows of 128 bytes, with TMA's swizzle."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def _scratch(out_dtype, copies: int, paired: bool) -> dict[str, object]:
    """A block's shared memory and barriers; copies: of a piece of a tile."""
    bf16 = functools.partial(_tiles, jnp.bfloat16)
    # The outputs leave from the place of the half that their warpgroup multiplied last.
    free = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=2)
    half = Views(tokens=bf16(2, TILE, HALF), out=_tiles(out_dtype, TILE, HALF))
    return {
        **{f"q_{name}": bf16(1, TILE, width) for name, (_, width) in PIECES.items()},
        **{name: half for name in ("left", "right")},
        "rope": bf16(2, TILE, PIECES["rope"][1]),
        "weights": bf16(TILE, TILE),
        "by_row": plgpu.SMEM((4, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=len(PIECES)),
        **{f"{name}_full": plgpu.Barrier(num_arrivals=copies, num_barriers=2) for name in PIECES},
        **{f"{name}_free": free if paired else None for name in PIECES},
        "weights_full": plgpu.Barrier(num_barriers=2),
        "total_ready": plgpu.Barrier(num_arrivals=2),
    }


def _few_scratch(out_dtype, copies: int, rows: int) -> dict[str, object]:
    """The same of the program for few query rows."""
    bf16 = functools.partial(_tiles, jnp.bfloat16)
    return {
        "q": bf16(rows, LATENT + PIECES["rope"][1]),
        # The outputs leave from the place of the latents.
        "latents": Views(tokens=bf16(STAGES, TILE, LATENT), out=_tiles(out_dtype, rows, LATENT)),
        "rope": bf16(TILE, PIECES["rope"][1]),
        "weights": bf16(rows, TILE),
        "q_full": plgpu.Barrier(),
        "latents_full": plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        "rope_full": plgpu.Barrier(num_arrivals=copies),
    }

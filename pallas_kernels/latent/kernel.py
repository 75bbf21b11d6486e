"""Latent attention on Hopper: one pass over the cache, whose latents are keys and values.

See ``latent.op`` for the contract.  ``latent.decode_program`` has the program of a block of 64
query rows, ``latent.few_program`` that of up to 16, and ``latent.chosen_program`` that of lists.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.attention.merge import merge_chunks
from pallas_kernels.attention.operands import LatentCodes, capacity_of
from pallas_kernels.latent.chosen_program import BARRIERS, ChosenBlock
from pallas_kernels.latent.decode_program import HALF, PIECES, Facts, LatentBlock
from pallas_kernels.latent.few_program import (
    RING,
    RUN,
    STAGES,
    CodesBlock,
    FewBlock,
    FewChosenBlock,
)
from pallas_kernels.latent.plan import LATENT, ROPE, ROWS, TILE, WIDTH, LatentPlan, copy_of
from pallas_kernels.launch import Views, inline, launch
from pallas_kernels.matmul.many_rows.pipeline import tiled
from pallas_kernels.ptx import LOG2E

Parts = tuple[jax.Array, jax.Array | None]  # sums ``[B, chunks, rows, 512]``, and (maximum, sum)s


@functools.partial(jax.jit, static_argnames=("scale", "plan"))
def latent_attention(
    q: jax.Array,
    cache: jax.Array | LatentCodes,
    lengths: jax.Array,
    table: jax.Array | None,
    *,
    scale: float,
    plan: LatentPlan,
) -> jax.Array:
    """``q [B, T, N, 576]``, ``lengths [B, T]`` -> ``[B, T, N, 512]``; see ``latent.op``."""
    n = q.shape[2]
    q = _filled_heads(q)
    parts = attended_chunks(q, cache, lengths, table, scale, plan)
    out = _merged(*parts, lengths, capacity=capacity_of(cache, table), chunk=plan.chunk)
    return out.reshape(*q.shape[:3], LATENT)[:, :, :n]


def attended_chunks(
    q: jax.Array,
    cache: jax.Array | LatentCodes,
    lengths: jax.Array,
    table: jax.Array | None,
    scale: float,
    plan: LatentPlan,
    overlaps: bool = False,
) -> Parts:
    """Return the chunks' sums of latents for ``q [B, T, N, 576]``, N a multiple of 8.

    overlaps: blocks begin while the kernel before still runs.
    """
    batch, tokens = q.shape[:2]
    heads, capacity = q.shape[2], capacity_of(cache, table)
    codes = isinstance(cache, LatentCodes)
    page = pool = 0
    if table is not None:
        pool, page = cache.shape[:2]
    run = TILE if table is None else copy_of(table.shape[1], page)
    facts = Facts(
        tokens,
        tokens * heads,
        plan.chunk,
        capacity,
        run,
        page,
        pool,
        scale * LOG2E,
        plan.paired,
        plan.codes,
        overlaps,
    )
    filled = facts.rows if plan.few else facts.tiles * TILE
    operands = {
        "q": q.reshape(batch, facts.rows, WIDTH),
        "cache": None if codes else cache,
        "lengths": lengths.reshape(-1),
        "row_lengths": by_query_row(lengths, heads, filled) if tokens > 1 else None,
        "table": table,
    }
    if codes:
        held = {"codes": cache.low.q, "scales": cache.low.scale[..., 0], "rope": cache.rope}
        operands |= held
    block = CodesBlock if codes else FewBlock if plan.few else LatentBlock
    return _launch(block, facts, operands)


# The layers of a program share its trace.
traced_chunks = jax.jit(attended_chunks, static_argnames=("scale", "plan", "overlaps"))


@functools.partial(jax.jit, static_argnames=("scale", "chunk", "few"))
def chosen_attention(
    q: jax.Array, cache: jax.Array, chosen: jax.Array, *, scale: float, chunk: int, few: bool
) -> jax.Array:
    """``q [B, N, 576]``, ``cache [tokens, 576]``, ``chosen [B, K]`` -> ``[B, N, 512]``.

    few: by the program for up to 16 heads.  Else the chunk is a multiple of ROUND.
    """
    batch, n, _ = q.shape
    q = _filled_heads(q)
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % chunk)), constant_values=-1)
    capacity = chosen.shape[1]
    facts = Facts(1, q.shape[1], chunk, capacity, TILE, 0, 0, scale * LOG2E)
    if few:
        operands = {"q": q, "cache": cache, "chosen": chosen.reshape(batch, -1, TILE)}
        # A row whose list is empty has zeros.
        lengths = jnp.where(jnp.any(chosen >= 0, axis=1), capacity, 0).astype(jnp.int32)
        parts = _launch(FewChosenBlock, facts, operands)
    else:
        lengths = jnp.sum(chosen >= 0, axis=1, dtype=jnp.int32)
        operands = {"q": q, "cache": cache, "chosen": chosen, "lengths": lengths}
        parts = _launch(ChosenBlock, facts, operands)
    return _merged(*parts, lengths, capacity=capacity, chunk=chunk)[:, :n]


def _filled_heads(q: jax.Array) -> jax.Array:
    """Fill the heads ``[..., N, 576]`` up to a multiple of ROWS."""
    return jnp.pad(q, (*((0, 0),) * (q.ndim - 2), (0, -q.shape[-2] % ROWS), (0, 0)))


def _launch(block: type[LatentBlock], facts: Facts, operands: dict[str, jax.Array | None]) -> Parts:
    """Return ``[B, chunks, rows, 512]``, and each chunk's maximum and sum if there are several."""
    q = operands["q"]
    assert q is not None
    assert facts.tiles % (1 + facts.paired) == 0, facts
    parts, splits = len(q) * facts.splits, facts.splits
    dtype = q.dtype if splits == 1 else jnp.float32
    out = jax.ShapeDtypeStruct((parts, facts.rows, LATENT), dtype)
    stats = jax.ShapeDtypeStruct((parts, facts.rows, 2), jnp.float32)

    def body(gmem, smem, barrier) -> None:
        if facts.overlaps:
            inline()(p.await_kernel)()
        block(gmem, smem, barrier, facts).run()

    out, stats = launch(
        body,
        operands,
        {"out": out, "stats": None if splits == 1 else stats},
        name=block.name,
        grid=parts * facts.tiles // (1 + facts.paired),
        cluster=1 + facts.paired,
        warpgroups=block.warpgroups,
        approx_math=True,
        reduction_scratch_bytes=block.reduction_bytes,
        scratch=_scratch(block, dtype, facts),
    )
    parts = out.reshape(len(q), splits, facts.rows, LATENT)
    return parts, None if splits == 1 else stats.reshape(len(q), splits, facts.rows, 2)


def _merged(
    parts: jax.Array, stats: jax.Array | None, seen: jax.Array, *, capacity: int, chunk: int
) -> jax.Array:
    """Return ``[B, rows, 512]``; seen: int32 ``[B]`` or ``[B, T]``, the keys of each token."""
    if stats is None:
        return parts[:, 0]
    return merge_chunks(
        parts,
        stats,
        seen,
        capacity=capacity,
        chunk=chunk,
        window=None,
        rotated=False,
        out_dtype=jnp.dtype(jnp.bfloat16),
    )


def by_query_row(lengths: jax.Array, heads: int, width: int) -> jax.Array:
    """Return int32 ``[B, width]``: the keys that each query row sees."""
    rows = jnp.repeat(lengths, heads, axis=1)
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _tiles(dtype, *shape: int):
    """Shared memory in tiles of 8 rows of 128 bytes, with TMA's swizzle."""
    return plgpu.SMEM(shape, dtype, transforms=tiled(dtype, 128))


def _scratch(block: type[LatentBlock], out_dtype, facts: Facts) -> dict[str, object]:
    """A block's shared memory and barriers."""
    if issubclass(block, FewBlock):
        return _few_scratch(block, out_dtype, facts)
    bf16 = functools.partial(_tiles, jnp.bfloat16)
    # The outputs leave from the place of the half that their warpgroup multiplied last.
    half = Views(tokens=bf16(2, TILE, HALF), out=_tiles(out_dtype, TILE, HALF))
    full = plgpu.Barrier(num_arrivals=facts.copies, num_barriers=2)
    free = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=2)
    barriers = {f"{name}_full": full for name in PIECES}
    barriers |= {f"{name}_free": free if facts.paired else None for name in PIECES}
    if block is ChosenBlock:
        barriers = {"full": plgpu.SMEM(BARRIERS, jnp.int32)}
    return {
        **{f"q_{name}": bf16(1, TILE, width) for name, (_, width) in PIECES.items()},
        "left": half,
        "right": half,
        "rope": bf16(2, TILE, ROPE),
        "weights": bf16(TILE, TILE),
        "by_row": plgpu.SMEM((4, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=len(PIECES)),
        **barriers,
        "weights_full": plgpu.Barrier(num_barriers=2),
        "total_ready": plgpu.Barrier(num_arrivals=2),
    }


# Of the arrays in shared memory; what a program lacks is None.
_FEW_ORDER = (
    *("q", "tiles", "turning", "weights", "q_full", "full"),
    *("codes", "arrived", "scales", "chosen", "listed", "free"),
)


def _few_scratch(block: type[LatentBlock], out_dtype, facts: Facts) -> dict[str, object]:
    """The same of the programs for few query rows."""
    bf16 = functools.partial(_tiles, jnp.bfloat16)
    held, arrivals, more = WIDTH, facts.copies, {}
    free = plgpu.Barrier(num_barriers=STAGES)
    if block is CodesBlock:
        # A warpgroup fills a tile of codes, beside the copies of the turning parts.
        held, arrivals = LATENT, 1 + facts.copies
        of_run = 2 * max(1, RUN // facts.run)
        more = {
            "turning": bf16(STAGES, TILE, ROPE),
            "codes": plgpu.SMEM((RING, 2, RUN, HALF), facts.codes),
            "arrived": plgpu.Barrier(num_arrivals=of_run, num_barriers=RING),
            "scales": plgpu.SMEM((STAGES, TILE), jnp.float32),
            "free": free,
        }
    if block is FewChosenBlock:
        more = {
            "chosen": plgpu.SMEM((facts.chunk // TILE, TILE), jnp.int32),
            "listed": plgpu.Barrier(),
            "free": free,
        }
    common = {
        "q": bf16(facts.rows, WIDTH),
        # The outputs leave from the place of the tiles.
        "tiles": Views(tokens=bf16(STAGES, TILE, held), out=_tiles(out_dtype, facts.rows, LATENT)),
        "weights": bf16(facts.rows, TILE),
        "q_full": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
    }
    return dict.fromkeys(_FEW_ORDER) | common | more

"""The program of a block of latent attention on Hopper: up to 16 query rows over part of a cache.

A block is one warpgroup.  Both products have the cache as their left operand, so that the query
rows are columns, and 16 of them cost a quarter of what 64 cost:

    S^T [64 tokens, rows] = K Q^T        out^T [512, rows] += L^T P^T

K is a tile of 64 tokens and L its latents.  The sums out^T stay in registers.  Copies of the next
tiles run while a tile is multiplied.  The barrier behind the weights' stores proves that every warp
has read the tile before, so that its place takes the next copy.

Weights are exp2(scale * log2(e) * score - top), where top is a query row's running maximum.  Tokens
past a row's end score -inf, and their latents are set to zero in shared memory, as 0 * NaN is NaN.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.latent.decode_program import (
    LATENT,
    PIECES,
    TILE,
    UNSEEN,
    Facts,
    LatentBlock,
    scalar,
)
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import ThreadPlace

STAGES = 3  # tiles of latents in shared memory; two are 0 to 2% slower
_WGMMA = plgpu.Layout.WGMMA
_BY_COLUMN = _WGMMA.reduce(0)


def _slot(i):
    return lax.rem(i, jnp.asarray(STAGES, i.dtype))


def _write_stats(facts: Facts):
    """Return the function that writes each query row's (maximum, sum) to ``stats [rows, 2]``."""

    @inline(REF, _BY_COLUMN, _BY_COLUMN)
    def write(stats, top, total):
        place = ThreadPlace()
        tops, totals = (
            [scalar(x, i) for x in y.registers.flat for i in range(2)] for y in (top, total)
        )
        for i, pair in enumerate(zip(tops, totals, strict=True)):
            row = (place.c << 1) + (8 * (i // 2) + i % 2)
            at = p.offset(p.address(stats), row, 8)
            mine = p.equal(place.warp, 0) & p.equal(place.g, 0) & (row < facts.rows)
            p.when(mine, functools.partial(p.store_global, at, list(pair)))

    return write


class FewBlock(LatentBlock):
    """The program of a warpgroup: all query rows of a row of the batch, over a chunk."""

    def __init__(self, gmem, smem, barrier, facts: Facts):
        super().__init__(gmem, smem, barrier, facts, round_tokens=TILE)
        self.width = facts.rows

    def attend(self) -> None:
        pl.when(self.rounds > 0)(self.begin)
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        out = plgpu.layout_cast(zeros((LATENT, self.width)), _WGMMA)
        top = plgpu.layout_cast(jnp.full((self.width,), UNSEEN, jnp.float32), _BY_COLUMN)
        sums = plgpu.layout_cast(zeros((TILE, self.width)), _WGMMA)
        self.finish(*lax.fori_loop(0, self.rounds, self.step, (out, top, sums)))

    # --- copies ---

    def begin(self) -> None:
        plgpu.copy_gmem_to_smem(self.gmem.q.at[self.row], self.smem.q, self.barrier.q_full)
        self.load_rope(0)
        for i in range(STAGES):
            self.load_latents(i)
        plgpu.barrier_wait(self.barrier.q_full)

    def load_latents(self, i) -> None:
        slot = i % STAGES if isinstance(i, int) else _slot(i)
        to, full = self.smem.latents.tokens.at[slot], self.barrier.latents_full.at[slot]
        load = functools.partial(self.copy, self.first + i * TILE, 0, LATENT, to, full)
        pl.when(i < self.rounds)(load)

    def load_rope(self, i) -> None:
        """The parts of keys with RoPE, whose place is free when the tile before has its scores."""
        start, full = self.first + i * TILE, self.barrier.rope_full
        load = functools.partial(self.copy, start, *PIECES["rope"], self.smem.rope, full)
        pl.when(i < self.rounds)(load)

    # --- a tile ---

    def step(self, i, carry):
        out, before, sums = carry
        slot = _slot(i)
        latents = self.smem.latents.tokens.at[slot]
        plgpu.barrier_wait(self.barrier.latents_full.at[slot])
        plgpu.barrier_wait(self.barrier.rope_full)

        def multiply_keys(acc):
            q = self.smem.q
            plgpu.wgmma(acc, latents, q.at[:, pl.ds(0, LATENT)].transpose((1, 0)))
            plgpu.wgmma(acc, self.smem.rope, q.at[:, pl.ds(*PIECES["rope"])].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC((TILE, self.width), jnp.float32))
        self.clear_past(i, latents)
        token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_WGMMA)
        seen = token < self.left(i)
        scores = jnp.where(seen, scores * self.facts.factor, jnp.full_like(scores, -jnp.inf))
        top = jnp.maximum(before, jnp.max(scores, axis=0))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [1]))
        fade = jnp.exp2(before - top)
        sums = sums * lax.broadcast_in_dim(fade, sums.shape, [1]) + weights
        held = self.smem.weights.transpose((1, 0))
        turned = plgpu.layout_cast(weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        held[...] = turned
        plgpu.commit_smem()
        self.load_rope(i + 1)
        # All warps have read the latents of the tile before.
        pl.when(i > 0)(lambda: self.load_latents(i + (STAGES - 1)))
        start = out * lax.broadcast_in_dim(fade, out.shape, [1])

        def multiply_latents(acc):
            plgpu.wgmma(acc, latents.transpose((1, 0)), held)

        out = pl.run_state(multiply_latents)(plgpu.ACC.init(start))
        return out, top, sums

    def left(self, i):
        """How many tokens of the tile each query row sees, or more than there are."""
        start = self.first + i * TILE
        if self.facts.tokens == 1:
            return self.end - start
        rows = self.gmem.row_lengths.at[self.row]
        seen = plgpu.load(rows, layout=_BY_COLUMN, optimized=False)
        seen = jnp.minimum(seen, self.end) - start
        return lax.broadcast_in_dim(seen, (TILE, self.width), [1])

    def clear_past(self, i, latents) -> None:
        """Set to zero the latents that no query row of this row sees."""
        inside = self.end - (self.first + i * TILE)

        @pl.when(inside < TILE)
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_WGMMA)
            for column in range(0, LATENT, TILE):
                at = latents.at[:, pl.ds(column, TILE)]
                x = plgpu.load(at, layout=_WGMMA)
                at[...] = jnp.where(row < inside, x, jnp.zeros_like(x))

    def finish(self, out, top, sums) -> None:
        """Write the outputs, and with chunks the maximum and sum of each query row."""
        total = jnp.sum(sums, axis=0)
        if self.facts.splits == 1:
            whole = 1.0 / jnp.where(total > 0.0, total, jnp.ones_like(total))
            out = (out * lax.broadcast_in_dim(whole, out.shape, [1])).astype(jnp.bfloat16)
        else:
            _write_stats(self.facts)(self.gmem.stats.at[self.part], top, total)
        staged = self.smem.latents.out
        staged.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, self.gmem.out.at[self.part])
        plgpu.wait_smem_to_gmem(0)

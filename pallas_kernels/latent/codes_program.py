"""The program of a block of latent attention on Hopper for up to 24 query rows and 8-bit codes.

    S^T = s (C Qc^T) + R Qr^T        out^T += C^T (s P)^T

C are the codes of a tile's 64 tokens, s their scales, and R the turning parts of their keys.  Codes
are exact in bfloat16.  So a second warpgroup widens them into the tile that ``FewBlock``
multiplies, and scales multiply 64 numbers of each query row: scores, and weights before they are
rounded.

TMA brings 32 tokens of codes at a time to a ring of their own, and R to a place beside the tile.
The warpgroup copies s.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.latent.decode_program import HALF
from pallas_kernels.latent.few_program import BY_TOKEN, STAGES, FilledBlock, slot_of
from pallas_kernels.latent.plan import LATENT, ROPE, TILE
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.many_rows.pipeline import tiled, warpgroup_barrier

RUN = 32  # tokens of a place of the ring of codes, in two halves of the features
RING = 3


def _pairs(kind: str, word) -> list:
    """Return four neighbouring codes as two pairs of bfloat16."""
    if kind == "float8_e4m3fn":
        return [widen.float8_pair(word, widen.NEIGHBOURS + 0x2222 * i) for i in range(2)]
    return [widen.int8_pair(p.permute(word, word, selector)) for selector in (0x1100, 0x3322)]


@functools.lru_cache
def _widening(kind: str):
    """Return the function that widens a place of the ring, ``[2, 32, 256]``, into a tile's rows."""

    @inline(plgpu.RefType(tiled(jnp.bfloat16, 128)), REF)
    def widened(tile, codes):
        """Eight threads write 128 bytes of a token, a 16-byte chunk each."""
        thread = p.register("tid.x") & 127
        part, first = thread & 7, thread >> 3
        source = p.shared_address(codes) + (first * HALF) + (part << 3)
        in_eight = first & 7
        to = p.shared_address(tile) + (first >> 3) * (8 * 2 * LATENT) + (in_eight << 7)
        to = to + ((part ^ in_eight) << 4)
        for row in range(0, RUN, 16):
            for piece in range(LATENT // 64):
                half, column = divmod(64 * piece, HALF)
                words = p.load_shared(source, 2, half * RUN * HALF + row * HALF + column)
                pairs = [pair for word in words for pair in _pairs(kind, word)]
                p.store_shared(to, pairs, row * 2 * LATENT + piece * 1024)

    return widened


@functools.lru_cache
def _copy_floats(count: int, held: int):
    """Return the function that copies so many floats, of those that a row of ``held`` has.

    Both numbers are multiples of 4, which a thread copies.
    """

    @inline(REF, REF, REF)
    def copy(to, row, source):
        thread = p.register("tid.x") & 127
        places = p.shared_address(to) + (thread << 4), p.offset(p.address(source), thread, 16)
        inside = places[1] < p.offset(p.address(row), p.ci(held), 4)
        p.when((thread < count // 4) & inside, lambda: p.copy_async(*places, 0))

    return copy


@inline()
def _floats_arrived():
    p.copies_commit()
    p.copies_wait(0)


class CodesBlock(FilledBlock):
    """The program of two warpgroups: all query rows of a row of the batch, over a chunk."""

    name = "latent_codes_kernel"
    reduction_bytes = 2048  # codes leave less than others

    # --- the first warpgroup ---

    def scores(self, i, tile):
        def multiply(keys, column: int, width: int, start):
            q = self.smem.q.at[:, pl.ds(column, width)].transpose((1, 0))
            product = lambda acc: plgpu.wgmma(acc, keys, q)  # noqa: E731
            return pl.run_state(product)(plgpu.ACC.init(start))

        zeros = jnp.zeros((TILE, self.width), jnp.float32)
        scores = multiply(tile, 0, LATENT, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        turning = self.smem.turning.at[slot_of(i)]
        return multiply(turning, LATENT, ROPE, scores * self.scale(i, scores.shape))

    def of_values(self, i, weights):
        return weights * self.scale(i, weights.shape)

    def scale(self, i, shape):
        """The tokens' scales; 1 past the end, where they may be NaN."""
        scale = plgpu.load(self.smem.scales.at[slot_of(i)], layout=BY_TOKEN, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        scale = lax.broadcast_in_dim(scale, shape, [0])
        return jnp.where(token < self.end - self.first - i * TILE, scale, jnp.ones_like(scale))

    # --- the second one ---

    def fill(self) -> None:
        for run in range(RING):
            self.fetch(jnp.int32(run))
        lax.fori_loop(0, self.rounds, self.fill_tile, None)

    def fetch(self, run) -> None:
        """Copy the codes of the run's tokens to its place in the ring."""
        place = lax.rem(run, jnp.asarray(RING, run.dtype))
        arrived = self.barrier.arrived.at[place]

        @pl.when(run < 2 * self.rounds)
        def _():
            for begin, row, tokens in self.runs(self.first + run * RUN, RUN):
                for half in range(2):
                    source = self.gmem.codes.at[row, tokens, pl.ds(half * HALF, HALF)]
                    to = self.smem.codes.at[place, half, pl.ds(begin, tokens.size)]
                    plgpu.copy_gmem_to_smem(source, to, arrived)

    def fill_tile(self, i, _) -> None:
        slot = slot_of(i)
        full, start = self.barrier.full.at[slot], self.first + i * TILE

        @pl.when(i >= STAGES)
        def _():
            plgpu.barrier_wait(self.barrier.free.at[slot])

        tile = self.smem.tiles.tokens.at[slot]
        for begin, row, tokens in self.runs(start, TILE):
            at = slot, pl.ds(begin, tokens.size)
            plgpu.copy_gmem_to_smem(self.gmem.rope.at[row, tokens], self.smem.turning.at[at], full)
            scales = self.gmem.scales.at[row]
            copy = _copy_floats(tokens.size, self.gmem.scales.shape[1])
            copy(self.smem.scales.at[at], scales, scales.at[tokens])
        for half in range(TILE // RUN):
            run = 2 * i + half
            place = lax.rem(run, jnp.asarray(RING, run.dtype))
            plgpu.barrier_wait(self.barrier.arrived.at[place])
            rows = tile.at[pl.ds(half * RUN, RUN)]
            _widening(self.facts.codes)(rows, self.smem.codes.at[place])
            warpgroup_barrier()
            self.fetch(run + RING)
        _floats_arrived()
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)

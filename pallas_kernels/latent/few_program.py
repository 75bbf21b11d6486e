"""The programs of a block of latent attention on Hopper for up to 16 query rows.

Both products have the cache as their left operand, so that the query rows are columns, and 16 of
them cost a quarter of what 64 cost:

    S^T [64 tokens, rows] = K Q^T        out^T [512, rows] += L^T P^T

K is a tile of 64 tokens and L its latents.  The sums out^T stay in registers.  Copies of the next
tile run while a tile is multiplied.

``FewBlock`` reads a run of the cache, and its warpgroup starts the copies.  ``FewChosenBlock``
reads listed tokens.  A second warpgroup of it gathers them: each token's 1,152 bytes in 16 at a
time.

Weights are exp2(scale * log2(e) * score - top), where top is a query row's running maximum.  Tokens
past a row's end score -inf, and their latents are set to zero in shared memory, as 0 * NaN is NaN.
A list's free places are gathered as zeros.

``CodesBlock`` reads 8-bit codes, for up to 24 query rows:

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
from pallas_kernels.latent.decode_program import HALF, UNSEEN, Facts, LatentBlock, scalar
from pallas_kernels.latent.plan import LATENT, ROPE, TILE, WIDTH
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.many_rows.pipeline import tiled, warpgroup_barrier
from pallas_kernels.recurrence.channels import ThreadPlace

STAGES = 2  # tiles in shared memory
_WGMMA = plgpu.Layout.WGMMA
_BY_COLUMN, BY_TOKEN = _WGMMA.reduce(0), _WGMMA.reduce(1)


def slot_of(i):
    """Return the place of tile i."""
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

    warpgroups, reduction_bytes = None, 4096

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
        for i in range(STAGES):
            self.load(jnp.int32(i))
        plgpu.barrier_wait(self.barrier.q_full)

    def load(self, i) -> None:
        to, full = self.smem.tiles.tokens.at[slot_of(i)], self.barrier.full.at[slot_of(i)]
        load = functools.partial(self.copy, self.first + i * TILE, 0, WIDTH, to, full)
        pl.when(i < self.rounds)(load)

    def release(self, i) -> None:
        """The warpgroup has read tile i, whose place takes the next but one."""
        warpgroup_barrier()
        self.load(i + STAGES)

    # --- a tile ---

    def step(self, i, carry):
        out, before, sums = carry
        tile = self.smem.tiles.tokens.at[slot_of(i)]
        plgpu.barrier_wait(self.barrier.full.at[slot_of(i)])

        scores = self.scores(i, tile)
        seen = self.seen_of(i, tile)
        scores = jnp.where(seen, scores * self.facts.factor, jnp.full_like(scores, -jnp.inf))
        top = jnp.maximum(before, jnp.max(scores, axis=0))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [1]))
        fade = jnp.exp2(before - top)
        sums = sums * lax.broadcast_in_dim(fade, sums.shape, [1]) + weights
        held = self.smem.weights.transpose((1, 0))
        of_values = self.of_values(i, weights).astype(jnp.bfloat16)
        turned = plgpu.layout_cast(of_values, plgpu.Layout.WGMMA_TRANSPOSED)
        held[...] = turned
        plgpu.commit_smem()
        start = out * lax.broadcast_in_dim(fade, out.shape, [1])
        latents = tile.at[:, pl.ds(0, LATENT)].transpose((1, 0))
        out = pl.run_state(lambda acc: plgpu.wgmma(acc, latents, held))(plgpu.ACC.init(start))
        self.release(i)
        return out, top, sums

    def scores(self, i, tile):
        """The tile's keys times the queries ``[64, rows]``."""
        del i

        def multiply_keys(acc):
            plgpu.wgmma(acc, tile, self.smem.q.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply_keys, plgpu.ACC((TILE, self.width), jnp.float32))

    def of_values(self, i, weights):
        """What the tile's latents are multiplied by."""
        del i
        return weights

    def seen_of(self, i, tile):
        """Which tokens of the tile each query row sees; latents that no row sees become zeros."""
        start, shape = self.first + i * TILE, (TILE, self.width)
        inside = self.end - start

        @pl.when(inside < TILE)
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_WGMMA)
            for column in range(0, LATENT, TILE):
                at = tile.at[:, pl.ds(column, TILE)]
                x = plgpu.load(at, layout=_WGMMA)
                at[...] = jnp.where(row < inside, x, jnp.zeros_like(x))

        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
        if self.facts.tokens == 1:
            return token < inside
        rows = self.gmem.row_lengths.at[self.row]
        seen = plgpu.load(rows, layout=_BY_COLUMN, optimized=False)
        return token < lax.broadcast_in_dim(jnp.minimum(seen, self.end) - start, shape, [1])

    def finish(self, out, top, sums) -> None:
        """Write the outputs, and with chunks the maximum and sum of each query row."""
        total = jnp.sum(sums, axis=0)
        if self.facts.splits == 1:
            whole = 1.0 / jnp.where(total > 0.0, total, jnp.ones_like(total))
            out = (out * lax.broadcast_in_dim(whole, out.shape, [1])).astype(jnp.bfloat16)
        else:
            _write_stats(self.facts)(self.gmem.stats.at[self.part], top, total)
        staged = self.smem.tiles.out
        staged.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, self.gmem.out.at[self.part])
        plgpu.wait_smem_to_gmem(0)


@inline(plgpu.RefType(tiled(jnp.bfloat16, 128)), REF, REF)
def _gather(tile, chosen, cache):
    """Copy the listed tokens ``chosen [64]`` of ``cache [tokens, 576]`` into a swizzled tile.

    Eight threads copy 128 bytes of a token at a time.  A negative place is zeros.
    """
    thread = p.register("tid.x") & 127
    part, first = thread & 7, thread >> 3
    in_eight = first & 7
    to = p.shared_address(tile) + (first >> 3) * (8 * 2 * WIDTH) + (in_eight << 7)
    to = to + ((part ^ in_eight) << 4)
    places, source = p.shared_address(chosen), p.offset(p.address(cache), part, 16)
    for row in range(0, TILE, 16):
        (place,) = p.load_shared(places + (first << 2), 1, 4 * row)
        size = p.where(p.below(place, 0), p.ci(0), p.ci(16))
        token = p.offset(source, p.larger(place, 0), 2 * WIDTH)
        for piece in range(WIDTH // 64):
            at = row * 2 * WIDTH + piece * 1024
            p.copy_async(to, token, at, 128 * piece, size, line=True)
    p.copies_commit()


def _arrived(pending: int):
    """Return the wait of a thread for all but the last copies; wgmma may read the others."""

    @inline()
    def wait():
        p.copies_wait(pending)
        p.ptx("fence.proxy.async.shared::cta;")

    return wait


class FilledBlock(FewBlock):
    """The program beside a second warpgroup, which fills the places of tiles (``fill``)."""

    warpgroups = 2

    def attend(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(super().attend)
        pl.when(warpgroup == 1)(self.fill)

    def begin(self) -> None:
        plgpu.copy_gmem_to_smem(self.gmem.q.at[self.row], self.smem.q, self.barrier.q_full)
        plgpu.barrier_wait(self.barrier.q_full)

    def release(self, i) -> None:
        plgpu.barrier_arrive(self.barrier.free.at[slot_of(i)])

    def fill(self) -> None:
        raise NotImplementedError


class FewChosenBlock(FilledBlock):
    """The program of two warpgroups: all query rows of a token over a chunk of its list."""

    name = "chosen_latents_kernel"

    def seen(self, token: int):
        del token
        return jnp.int32(self.facts.capacity)

    def begin(self) -> None:
        super().begin()
        plgpu.barrier_wait(self.barrier.listed)

    def places(self, i):
        return self.smem.chosen.at[i]

    def seen_of(self, i, tile):
        del tile
        place = plgpu.load(self.places(i), layout=BY_TOKEN, optimized=False)
        return lax.broadcast_in_dim(place, (TILE, self.width), [0]) >= 0

    def fill(self) -> None:
        """Keep the places of tiles full, a tile ahead of the one that is announced."""
        tiles = self.facts.chunk // TILE
        chosen = self.gmem.chosen.at[self.row, pl.ds(self.first // TILE, tiles)]
        plgpu.copy_gmem_to_smem(chosen, self.smem.chosen, self.barrier.listed)
        plgpu.barrier_wait(self.barrier.listed)

        def announce(i, pending: int) -> None:
            _arrived(pending)()
            plgpu.barrier_arrive(self.barrier.full.at[slot_of(i)])

        def copy(i, _) -> None:
            @pl.when(i >= STAGES)
            def _():
                plgpu.barrier_wait(self.barrier.free.at[slot_of(i)])

            _gather(self.smem.tiles.tokens.at[slot_of(i)], self.places(i), self.gmem.cache)
            pl.when(i > 0)(lambda: announce(i - 1, 1))

        lax.fori_loop(0, self.rounds, copy, None)
        announce(self.rounds - 1, 0)


# --- codes of 8 bits ------------------------------------------------------------------------------


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

"""The program of a block of latent attention on Hopper: 64 query rows over a run of the cache.

A block has two warpgroups.  Each one owns 256 of the 512 columns of the outputs, whose float32 sums
stay in its registers.  A round takes two tiles of 64 tokens: the first warpgroup multiplies the
queries by tile 0, the second by tile 1.  So every score is computed once, and each warpgroup gives
the other its weights through shared memory:

    first     wait 0 | Q K0^T | top0 -> | P0 -> | out += P0 L0          | wait P1 | out += P1 L1
    second    wait 1 | Q K1^T | wait top0 | wait P0 | out += P0 R0 | P1 -> | out += P1 R1

L and R are the left and right halves of a tile's latents, which are its values, too.  A tile is
read from device memory once.  Each half has one warpgroup that multiplies it last, and that
warpgroup starts the copy of the half that follows.  The exchange of weights orders the copy behind
the other warpgroup's scores, so the ring needs no barrier for empty places.  One tile of weights
serves both directions, because its reader is its next writer.

Weights are exp2(scale * log2(e) * score - top).  top, a row's running maximum, goes back and forth
with the weights: each warpgroup fades its sums where it changes.  Keys past a row's end score -inf.
Their latents are set to zero in shared memory, as 0 * NaN is NaN; only a row's last round does so.

Both warpgroups multiply queries at once.  With the second's P0 R0 ahead of its scores, 64 rows of
8,192 tokens and 128 heads took 594 us for 394.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import llvm
from pallas_kernels.launch import REF, inline
from pallas_kernels.recurrence.channels import ThreadPlace

LATENT = 512  # features of a latent, which is key and value
ROPE = 64  # further features of a key
HALF = LATENT // 2  # output columns of a warpgroup
TILE = 64  # query rows of a block, and tokens of a tile
ROUND = 2 * TILE  # tokens
UNSEEN = -1e30  # the maximum of a row that has seen no key: finite, so that differences are
TOTAL = 2  # the first line of sums in the table of numbers by query row
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW = _WGMMA.reduce(1)
# The first feature of a piece of a token, and its number of features.
PIECES = {"left": (0, HALF), "right": (HALF, HALF), "rope": (LATENT, ROPE)}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a launch.

    tokens: query tokens of a row.  rows: query rows of a row of the batch.  chunk: tokens of a
    block, of ``splits``.  capacity: tokens that a row can hold.  run: neighbouring tokens of a
    copy.  page: tokens of a page, 0 without pages.  pool: pages.  factor: of scores, as exponents
    of 2.
    """

    tokens: int
    rows: int
    chunk: int
    splits: int
    capacity: int
    run: int
    page: int
    pool: int
    factor: float

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE)


def _write_stats(facts: Facts):
    """Return the function that writes a tile's (maximum, sum) to ``stats [rows, 2]``."""

    @inline(REF, _BY_ROW, _BY_ROW)
    def write(stats, top, total):
        place, tile = ThreadPlace(), p.register("ctaid.x") % facts.tiles
        for half in range(2):
            pair = [scalar(x.registers.flat[half], 0) for x in (top, total)]
            row = tile * TILE + (place.warp << 4) + place.g + 8 * half
            at = p.offset(p.address(stats), row, 8)
            p.when((place.c < 1) & (row < facts.rows), functools.partial(p.store_global, at, pair))

    return write


def scalar(x, i: int):
    """Return element i of a register, which is a float or a vector of them."""
    return x if x.type == p.f32() else llvm.extractelement(x, p.ci(i))


class LatentBlock:
    """What both warpgroups of a block know: the block's place, its tokens and its copies."""

    def __init__(self, gmem, smem, barrier, facts: Facts, round_tokens: int = ROUND):
        self.gmem, self.smem, self.barrier, self.facts = gmem, smem, barrier, facts
        block = lax.axis_index("block")
        self.tile, rest = block % facts.tiles, block // facts.tiles
        self.part, self.row = rest, rest // facts.splits
        self.first = rest % facts.splits * facts.chunk
        lengths = [self.seen(t) for t in range(facts.tokens)]
        last = self.first + facts.chunk
        self.end = jnp.minimum(functools.reduce(jnp.maximum, lengths), last)
        shortest = jnp.minimum(functools.reduce(jnp.minimum, lengths), last)
        tokens = jnp.maximum(self.end - self.first, 0)
        self.rounds = (tokens + (round_tokens - 1)) // round_tokens
        # rounds without a mask
        self.whole = jnp.maximum(shortest - self.first, 0) // round_tokens

    def seen(self, token: int):
        """How many keys a query token sees."""
        length = self.gmem.lengths[self.row * self.facts.tokens + token]
        return jnp.clip(length, 0, self.facts.capacity)

    def run(self) -> None:
        # A row of length 0 has one block that writes zeros, unless a second kernel does.
        self.attend() if self.facts.splits == 1 else pl.when(self.rounds > 0)(self.attend)

    def attend(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(FirstHalf(self).run)
        pl.when(warpgroup == 1)(SecondHalf(self).run)

    # --- copies ---

    def load_queries(self) -> None:
        rows = pl.ds(self.tile * TILE, TILE)
        for name, (column, width) in PIECES.items():
            source = self.gmem.q.at[self.row, rows, pl.ds(column, width)]
            plgpu.copy_gmem_to_smem(source, getattr(self.smem, f"q_{name}"), self.barrier.q)

    def start(self, step, slot: int) -> int:
        """The first token of a round's tile."""
        return self.first + step * ROUND + slot * TILE

    def load(self, step, slot: int, name: str) -> None:
        """A piece of a round's tile; of a tile past the end, the last tokens once more."""
        column, width = PIECES[name]
        to, full = self.piece(name).at[slot], self.barrier.full.at[slot]
        self.copy(self.start(step, slot), column, width, to, full)

    def copy(self, start, column: int, width: int, to, full) -> None:
        """Columns of the 64 tokens from ``start`` on."""
        facts = self.facts
        for begin in range(0, TILE, facts.run):
            token = start + begin
            token = jnp.minimum(token, (self.end - 1) // facts.run * facts.run)
            row = self.row
            if facts.page:
                row = jnp.clip(self.gmem.table[self.row, token // facts.page], 0, facts.pool - 1)
                token = token % facts.page
            tokens = pl.ds(token, facts.run)
            source = self.gmem.cache.at[row, tokens, pl.ds(column, width)]
            plgpu.copy_gmem_to_smem(source, to.at[pl.ds(begin, facts.run)], full)

    def load_next(self, step, slot: int, name: str) -> None:
        """The piece that follows in the place of a round's."""
        pl.when(step + 1 < self.rounds)(lambda: self.load(step + 1, slot, name))

    def piece(self, name: str):
        held = getattr(self.smem, name)
        return held if name == "rope" else held.tokens


class Half:
    """The program of a warpgroup: 256 columns of the outputs, and the scores of every second tile.

    slot: of its tile.  name: of its half of the latents.
    """

    slot: int
    name: str

    def __init__(self, block: LatentBlock):
        self.block, self.facts = block, block.facts
        self.smem, self.barrier = block.smem, block.barrier

    def run(self) -> None:
        block, zeros = self.block, functools.partial(jnp.zeros, dtype=jnp.float32)
        pl.when(block.rounds > 0)(self.begin)
        top = plgpu.layout_cast(jnp.full((TILE,), UNSEEN, jnp.float32), _BY_ROW)
        total = plgpu.layout_cast(zeros((TILE,)), _BY_ROW)
        out = plgpu.layout_cast(zeros((TILE, HALF)), _WGMMA)
        carry = out, top, total
        for masked, span in (False, (0, block.whole)), (True, (block.whole, block.rounds)):
            carry = lax.fori_loop(*span, functools.partial(self.round, masked=masked), carry)
        self.finish(*carry)

    def begin(self) -> None:
        """The first tile, and the queries."""
        if self.slot == 0:
            self.block.load_queries()
        for name in PIECES:
            self.block.load(0, self.slot, name)
        plgpu.barrier_wait(self.barrier.q)

    def round(self, step, carry, *, masked: bool):
        raise NotImplementedError

    # --- scores ---

    def scores(self, step, masked: bool):
        """Q K^T of this warpgroup's tile, as exponents of 2."""
        plgpu.barrier_wait(self.barrier.full.at[self.slot])
        scores = pl.run_scoped(self.multiply_keys, plgpu.ACC((TILE, TILE), jnp.float32))
        self.block.load_next(step, self.slot, "rope")
        scores = scores * self.facts.factor
        if not masked:
            return scores
        self.clear(step)
        token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        return jnp.where(token < self.left(step), scores, jnp.full_like(scores, -jnp.inf))

    def multiply_keys(self, acc):
        for name in PIECES:
            keys = self.block.piece(name).at[self.slot]
            plgpu.wgmma(acc, getattr(self.smem, f"q_{name}"), keys.transpose((1, 0)))
        return acc[...]

    def left(self, step):
        """How many tokens of the tile each query row sees, or more than there are."""
        block, start = self.block, self.block.start(step, self.slot)
        if self.facts.tokens == 1:
            return block.end - start
        rows = block.gmem.row_lengths.at[block.row, pl.ds(block.tile * TILE, TILE)]
        seen = plgpu.load(rows, layout=_BY_ROW, optimized=False)
        return lax.broadcast_in_dim(jnp.minimum(seen, block.end) - start, (TILE, TILE), [0])

    def clear(self, step) -> None:
        """Set to zero the latents that no query row of this row sees."""
        inside = self.block.end - self.block.start(step, self.slot)

        @pl.when(inside < TILE)
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_WGMMA)
            for name in ("left", "right"):
                for column in range(0, HALF, TILE):
                    at = self.block.piece(name).at[self.slot, :, pl.ds(column, TILE)]
                    x = plgpu.load(at, layout=_WGMMA)
                    at[...] = jnp.where(row < inside, x, jnp.zeros_like(x))

    # --- exchange ---

    def publish_top(self, top) -> None:
        self.smem.by_row.at[self.slot][...] = top

    def read(self, line: int):
        """A number of each query row: a warpgroup's maxima, or from TOTAL on its sums."""
        return plgpu.load(self.smem.by_row.at[line], layout=_BY_ROW, optimized=False)

    def give_weights(self, weights, ready) -> None:
        self.smem.weights[...] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)

    # --- outputs ---

    def add(self, out, fade, weights, slot: int):
        """out * fade + weights @ the half of a tile's latents."""
        values = self.block.piece(self.name).at[slot]
        start = out * lax.broadcast_in_dim(fade, out.shape, [0])
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(start))

    def finish(self, out, top, total) -> None:
        """Write the outputs, and with chunks the maximum and sum of each query row."""
        block, smem, facts = self.block, self.smem, self.facts
        smem.by_row.at[TOTAL + self.slot][...] = total
        plgpu.barrier_arrive(self.barrier.total_ready)
        plgpu.barrier_wait(self.barrier.total_ready)
        total = total + self.read(TOTAL + 1 - self.slot)
        if facts.splits == 1:
            whole = 1.0 / jnp.where(total > 0.0, total, jnp.ones_like(total))
            out = out * lax.broadcast_in_dim(whole, out.shape, [0])
            out = out.astype(jnp.bfloat16)
        elif self.slot == 0:
            _write_stats(facts)(block.gmem.stats.at[block.part], top, total)
        staged = getattr(smem, self.name).out
        staged[...] = out
        plgpu.commit_smem()
        columns = pl.ds(PIECES[self.name][0], HALF)
        to = block.gmem.out.at[block.part, pl.ds(block.tile * TILE, TILE), columns]
        plgpu.copy_smem_to_gmem(staged, to)
        plgpu.wait_smem_to_gmem(0)


def softmax(scores, top):
    """(weights, their sums by row) of scores that are exponents of 2."""
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    return weights.astype(jnp.bfloat16), jnp.sum(weights, axis=1)


class FirstHalf(Half):
    """The left half of the outputs, and the scores of tile 0."""

    slot, name = 0, "left"

    def round(self, step, carry, *, masked: bool):
        out, before, total = carry
        block, barrier = self.block, self.barrier
        scores = self.scores(step, masked)
        top = jnp.maximum(before, jnp.max(scores, axis=1))
        self.publish_top(top)
        plgpu.barrier_arrive(barrier.top_ready)
        weights, sums = softmax(scores, top)
        self.give_weights(weights, barrier.first)
        fade = jnp.exp2(before - top)
        total = total * fade + sums
        out = self.add(out, fade, weights, 0)
        block.load_next(step, 0, "left")
        plgpu.barrier_wait(barrier.second)
        last = self.read(1)
        fade = jnp.exp2(top - last)
        out = self.add(out, fade, self.smem.weights, 1)
        block.load_next(step, 1, "left")
        return out, last, total * fade


class SecondHalf(Half):
    """The right half of the outputs, and the scores of tile 1."""

    slot, name = 1, "right"

    def round(self, step, carry, *, masked: bool):
        out, before, total = carry
        block, barrier = self.block, self.barrier
        scores = self.scores(step, masked)
        plgpu.barrier_wait(barrier.top_ready)
        first = self.read(0)
        top = jnp.maximum(first, jnp.max(scores, axis=1))
        self.publish_top(top)
        weights, sums = softmax(scores, top)
        plgpu.barrier_wait(barrier.first)
        out = self.add(out, jnp.exp2(before - first), self.smem.weights, 0)
        block.load_next(step, 0, "right")
        self.give_weights(weights, barrier.second)
        out = self.add(out, jnp.exp2(first - top), weights, 1)
        block.load_next(step, 1, "right")
        return out, top, total * jnp.exp2(before - top) + sums

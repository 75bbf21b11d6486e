"""The program of a block of latent attention on Hopper: 64 query rows over a run of the cache.

A block has two warpgroups.  Each one owns 256 of the 512 columns of the outputs, whose float32 sums
stay in its registers.  A round takes two tiles of 64 tokens: the first warpgroup multiplies the
queries by tile 0, the second by tile 1.  So every score is computed once, and each warpgroup gives
the other its weights through shared memory.  One multiplies while the other computes weights:

    first   Q K0^T, rest  | P0 -> | out += P0 L0 | next Q K0^T, left | wait P1 | out += P1 L1
    second  Q K1^T, right | wait  | out += P0 R0 | Q K1^T, rest      | P1 ->   | out += P1 R1

L and R are the left and right halves of a tile's latents, which are its values, too.  The scores of
its own half begin while a warpgroup waits for the other's weights.  A half of a
tile is free after its last product, and the warpgroup of that product copies the half that follows.
So tile 0 arrives while tile 1 is multiplied.  The exchange of weights orders the copy behind the
other warpgroup's scores.  One tile of weights serves both directions, because its reader is its
next writer.

Two blocks with the same tokens are a cluster (``paired``).  Each copies one half of the tokens for
both, once both have released the place.  That halves the reads of the L2, which limit one block.

Weights are exp2(scale * log2(e) * score - top).  top goes back and forth with the weights: each
warpgroup fades its sums where it changes.  top is a maximum of the row so far, and follows a larger
one where that is larger by SLACK.  So most rounds fade nothing.  Keys past a row's end score -inf.
Their latents are set to zero in shared memory, as 0 * NaN is NaN; only a block's last round does
so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import llvm
from pallas_kernels.latent.plan import LATENT, ROPE, ROUND, TILE
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul.many_rows.pipeline import warpgroup_barrier
from pallas_kernels.recurrence.channels import ThreadPlace

HALF = LATENT // 2  # output columns of a warpgroup
UNSEEN = -1e30  # the maximum of a row that has seen no key: finite, so that differences are
SLACK = 8.0  # weights are at most 2 ** SLACK
TOTAL = 2  # the first line of sums in the table of numbers by query row
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW = _WGMMA.reduce(1)
_SPLAT = plgpu.Layout.WG_SPLAT((128,))
# The first feature of a piece of a token, and its number of features.
PIECES = {"left": (0, HALF), "right": (HALF, HALF), "rope": (LATENT, ROPE)}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a launch.

    tokens: query tokens of a row.  rows: query rows of a row of the batch.  chunk: tokens of a
    block.  capacity: tokens that a row can hold.  run: neighbouring tokens of a copy.  page: tokens
    of a page, 0 without pages.  pool: pages.  factor: of scores, as exponents of 2.  paired: the
    blocks of two tiles of query rows are a cluster.  codes: their dtype, if latents are codes.
    overlaps: a block begins while the kernel before still runs.
    """

    tokens: int
    rows: int
    chunk: int
    capacity: int
    run: int
    page: int
    pool: int
    factor: float
    paired: bool = False
    codes: str = ""
    overlaps: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def splits(self) -> int:
        """The chunks of a row."""
        return -(-self.capacity // self.chunk)

    @property
    def copies(self) -> int:
        """The copies of a tile's piece."""
        return TILE // self.run


def _write_stats(facts: Facts):
    """Return the function that writes a tile's (maximum, sum) to ``stats [rows, 2]``."""

    @inline(REF, _BY_ROW, _BY_ROW)
    def write(stats, top, total):
        # The blocks of a cluster are neighbours.
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
    """What both warpgroups of a block know: the block's place, its tokens and its copies.

    reduction_bytes: for sums over warps.  The program for 64 rows sums over lanes of a warp.
    """

    name = "latent_attention_kernel"
    warpgroups: int | None = 2
    reduction_bytes = 0

    def __init__(self, gmem, smem, barrier, facts: Facts, round_tokens: int = ROUND):
        self.gmem, self.smem, self.barrier, self.facts = gmem, smem, barrier, facts
        block = lax.axis_index("block")
        if facts.paired:
            block = 2 * block + lax.axis_index("rank")
        self.both = {"collective_axes": "rank"} if facts.paired else {}
        self.tile, self.part = block % facts.tiles, block // facts.tiles
        self.row = self.part // facts.splits
        self.first = self.part % facts.splits * facts.chunk
        lengths = [self.seen(t) for t in range(facts.tokens)]
        self.end = jnp.minimum(functools.reduce(jnp.maximum, lengths), self.first + facts.chunk)
        tokens = jnp.maximum(self.end - self.first, 0)
        self.rounds = (tokens + (round_tokens - 1)) // round_tokens

    def seen(self, token: int):
        """How many keys a query token sees."""
        length = self.gmem.lengths[self.row * self.facts.tokens + token]
        return jnp.clip(length, 0, self.facts.capacity)

    def run(self) -> None:
        # A row of length 0 has one block that writes zeros, unless a second kernel does.
        self.attend() if self.facts.splits == 1 else pl.when(self.rounds > 0)(self.attend)

    def attend(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        for i, half in enumerate(self.halves()):
            pl.when(warpgroup == i)(half(self).run)

    def halves(self) -> tuple[type[Half], type[Half]]:
        """The programs of the warpgroups."""
        return FirstHalf, SecondHalf

    def copy(self, start, column: int, width: int, to, full) -> None:
        """Columns of the 64 tokens from ``start`` on."""
        for begin, row, tokens in self.runs(start, TILE):
            source = self.gmem.cache.at[row, tokens, pl.ds(column, width)]
            plgpu.copy_gmem_to_smem(source, to.at[pl.ds(begin, tokens.size)], full, **self.both)

    def runs(self, start, tokens: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield the parts of so many tokens from ``start`` on that one copy takes.

        They are (first token, row or page, its tokens); past the end, the last tokens once more.
        """
        facts = self.facts
        run = min(facts.run, tokens)
        for begin in range(0, tokens, run):
            token = start + begin
            token = jnp.minimum(token, (self.end - 1) // run * run)
            row = self.row
            if facts.page:
                row = jnp.clip(self.gmem.table[self.row, token // facts.page], 0, facts.pool - 1)
                token = token % facts.page
            yield begin, row, pl.ds(token, run)


class Half:
    """The program of a warpgroup: 256 columns of the outputs, and the scores of every second tile.

    slot: of its tile.  pieces: of the tile, first its own half of the latents.
    """

    slot: int
    pieces: tuple[str, ...]

    def __init__(self, block: LatentBlock):
        self.block, self.facts = block, block.facts
        self.smem, self.barrier, self.name = block.smem, block.barrier, self.pieces[0]
        self.hidden_zero = 0

    def run(self) -> None:
        block = self.block
        pl.when(block.rounds > 0)(self.begin)
        top = plgpu.layout_cast(jnp.full((TILE,), UNSEEN, jnp.float32), _BY_ROW)
        out = plgpu.layout_cast(jnp.zeros((TILE, HALF), jnp.float32), _WGMMA)
        total = plgpu.layout_cast(jnp.zeros((TILE, 8), jnp.float32), _WGMMA)
        carry = out, top, total, *self.ahead()
        self.finish(*lax.fori_loop(0, block.rounds, self.round, carry)[:3])

    def ahead(self) -> tuple:
        """What a round leaves for the next one besides its sums."""
        return ()

    def begin(self) -> None:
        """Copy the first tile, and the queries."""
        self.look_ahead((jnp.int32(0), self.slot))
        for name in self.pieces:
            self.load(0, self.slot, name)
        self.load_queries()
        plgpu.barrier_wait(self.barrier.q_full)

    def load_queries(self) -> None:
        if self.slot == 0:
            rows = pl.ds(self.block.tile * TILE, TILE)
            for name, (column, width) in PIECES.items():
                source = self.block.gmem.q.at[self.block.row, rows, pl.ds(column, width)]
                plgpu.copy_gmem_to_smem(source, self.piece("q", name), self.barrier.q_full)

    def round(self, step, carry):
        raise NotImplementedError

    # --- places of a piece of a tile ---

    def piece(self, slot: int | str, name: str):
        """The place of a piece of a tile, or of the queries."""
        if slot == "q":
            return getattr(self.smem, f"q_{name}").at[self.hidden_zero]
        held = getattr(self.smem, name)
        return (held if name == "rope" else held.tokens).at[slot + self.hidden_zero]

    def load(self, step, slot: int, name: str) -> None:
        full = getattr(self.barrier, f"{name}_full").at[slot]
        self.block.copy(self.start(step, slot), *PIECES[name], self.piece(slot, name), full)

    def arrived(self, step, slot: int, name: str) -> None:
        """Wait for a round's piece."""
        del step
        plgpu.barrier_wait(getattr(self.barrier, f"{name}_full").at[slot])

    def start(self, step, slot: int):
        """The first token of a round's tile."""
        return self.block.first + step * ROUND + slot * TILE

    def look_ahead(self, *tiles: tuple[Any, int]) -> None:
        """Prepare the copies of tiles (round, slot) that a round starts."""

    def release(self, step, slot: int, name: str) -> None:
        """This block has multiplied the piece for the last time."""
        if not self.facts.paired:
            return

        @pl.when(step + 1 < self.block.rounds)
        def _():
            warpgroup_barrier()  # as one thread arrives for all
            plgpu.barrier_arrive(getattr(self.barrier, f"{name}_free").at[slot])

    def refill(self, step, slot: int, name: str) -> None:
        """Copy the piece of the next round, once both blocks have released this one."""

        @pl.when(step + 1 < self.block.rounds)
        def _():
            if self.facts.paired:
                plgpu.barrier_wait(getattr(self.barrier, f"{name}_free").at[slot])
            self.load(step + 1, slot, name)

    # --- scores ---

    def begun(self, step):
        """Scores of the first piece of the round's tile; zeros if there is no such round."""

        def zeros():
            return plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), _WGMMA)

        def first():
            return self.products(step, self.pieces[:1], zeros())

        return lax.cond(step < self.block.rounds, first, zeros)

    def products(self, step, pieces: tuple[str, ...], scores, meanwhile=lambda: None):
        """Return scores + Q K^T of pieces; meanwhile: emits what runs beside the products."""

        def multiply(acc):
            for name in pieces:
                self.arrived(step, self.slot, name)
                keys = self.piece(self.slot, name)
                plgpu.wgmma(acc, self.piece("q", name), keys.transpose((1, 0)))
                if name == pieces[0]:
                    meanwhile()

        return pl.run_state(multiply)(plgpu.ACC.init(scores))

    def softmax(self, step, scores, before):
        """Return (top, weights, a thread's sums of them) of the tile's scores.

        before: top until now, which stays unless a score is larger by SLACK.
        """
        self.release(step, self.slot, "rope")
        self.clear(step)
        scores = self.seen_of(step, scores) * self.facts.factor
        found = jnp.max(scores, axis=1)
        top = jnp.where(found > before + SLACK, found, before)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        return top, weights.astype(jnp.bfloat16), _by_thread(weights)

    def seen_of(self, step, scores):
        """The scores of tokens that a query row sees; -inf for the others."""
        left = self.left(step)
        if self.facts.tokens == 1:
            return _masked(scores, plgpu.layout_cast(jnp.full((128,), left, jnp.int32), _SPLAT))
        token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        return jnp.where(token < left, scores, jnp.full_like(scores, -jnp.inf))

    def left(self, step):
        """How many tokens of the tile each query row sees, or more than there are."""
        block, start = self.block, self.start(step, self.slot)
        if self.facts.tokens == 1:
            return block.end - start
        rows = block.gmem.row_lengths.at[block.row, pl.ds(block.tile * TILE, TILE)]
        seen = plgpu.load(rows, layout=_BY_ROW, optimized=False)
        return lax.broadcast_in_dim(jnp.minimum(seen, block.end) - start, (TILE, TILE), [0])

    def clear(self, step) -> None:
        """Set to zero the latents that no query row of this row sees."""
        inside = self.block.end - self.start(step, self.slot)

        @pl.when(inside < TILE)
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_WGMMA)
            for name in ("left", "right"):
                for column in range(0, HALF, TILE):
                    at = self.piece(self.slot, name).at[:, pl.ds(column, TILE)]
                    x = plgpu.load(at, layout=_WGMMA)
                    at[...] = jnp.where(row < inside, x, jnp.zeros_like(x))

    # --- exchange ---

    def read(self, line: int):
        """A number of each query row: a warpgroup's maxima, or from TOTAL on its sums."""
        return plgpu.load(self.smem.by_row.at[line], layout=_BY_ROW, optimized=False)

    def give(self, top, weights) -> None:
        """Give the other warpgroup the weights of this one's tile, and the maxima they are from."""
        self.smem.by_row.at[self.slot][...] = top
        self.smem.weights[...] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barrier.weights_full.at[self.slot])

    # --- outputs ---

    def add(self, out, fade, weights, slot: int, meanwhile=lambda: None):
        """out * fade + weights @ the half of a tile's latents."""
        values = self.piece(slot, self.name)

        def multiply(acc):
            plgpu.wgmma(acc, weights, values)
            meanwhile()

        return pl.run_state(multiply)(plgpu.ACC.init(_faded(out, fade)))

    def finish(self, out, top, total) -> None:
        """Write the outputs, and with chunks the maximum and sum of each query row."""
        block, smem, facts = self.block, self.smem, self.facts
        total = jnp.sum(total, axis=1)
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


def hidden_zero(step):
    """Return zero, computed from a round's number so that the compiler does not know it.

    It keeps the operands' addresses out of registers from round to round: 1,064 bytes of spills.
    """
    return lax.shift_right_logical(step, jnp.full_like(step, 24))


def _like(array, registers):
    """Return an array of float32 with another one's layout."""
    found = np.empty(array.registers.shape, dtype=object)
    found.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=found, _layout=array.layout, _is_signed=None)


@inline(_WGMMA, _SPLAT, out=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float32, layout=_WGMMA))
def _masked(scores, inside):
    """The scores of the first columns, -inf for the others, of which most tiles have none."""
    (inside,) = inside.registers.flat
    shape, layout = scores.shape, scores.layout
    splat = functools.partial(mgpu.FragmentedArray.splat, shape=shape, layout=layout)

    def masked():
        column = mgpu.FragmentedArray.broadcasted_iota(p.i32(), shape, 1, layout, is_signed=True)
        seen = column < splat(inside, is_signed=True)
        return seen.select(scores, splat(p.cf(-math.inf))).registers.flat

    return _like(scores, p.choose(p.below(inside, TILE), masked, list(scores.registers.flat)))


@inline(_WGMMA, out=plgpu.ShapeDtypeStruct((TILE, 8), jnp.float32, layout=_WGMMA))
def _by_thread(weights):
    """The sums of a thread's weights, by column of eight."""
    return functools.reduce(operator.add, (weights[:, i : i + 8] for i in range(0, TILE, 8)))


@inline(_WGMMA, _BY_ROW, out=plgpu.ShapeDtypeStruct((TILE, HALF), jnp.float32, layout=_WGMMA))
def _faded(out, fade):
    """out * fade; the fades are 1 but for a few rounds."""
    first, second = (p.unequal(scalar(x, 0), 1.0) for x in fade.registers.flat)

    def faded():
        return (out * fade.broadcast_in_dim(out.shape, (0,), out.layout)).registers.flat

    return _like(out, p.choose(first | second, faded, list(out.registers.flat)))


def _faded_total(total, fade):
    return total * lax.broadcast_in_dim(fade, total.shape, [0])


class FirstHalf(Half):
    """The left half of the outputs, and the scores of tile 0."""

    slot, pieces = 0, ("left", "right", "rope")

    def ahead(self):
        return (self.begun(jnp.int32(0)),)

    def round(self, step, carry):
        out, before, total, begun = carry
        self.hidden_zero = hidden_zero(step)
        self.look_ahead((step + 1, 0), (step, 1))
        scores = self.products(step, self.pieces[1:], begun, lambda: self.refill_late(step))
        top, weights, sums = self.softmax(step, scores, before)
        self.give(top, weights)
        fade = jnp.exp2(before - top)
        out = self.add(out, fade, weights, 0, lambda: self.refill(step, 0, "rope"))
        self.release(step, 0, "left")
        self.refill(step, 0, "left")
        total = _faded_total(total, fade) + sums
        begun = self.begun(step + 1)  # the other warpgroup computes weights meanwhile
        plgpu.barrier_wait(self.barrier.weights_full.at[1])
        last = self.read(1)
        fade = jnp.exp2(top - last)
        out = self.add(out, fade, self.smem.weights, 1)
        self.release(step, 1, "left")
        return out, last, _faded_total(total, fade), begun

    def refill_late(self, step) -> None:
        pl.when(step > 0)(lambda: self.refill(step - 1, 1, "left"))


class SecondHalf(Half):
    """The right half of the outputs, and the scores of tile 1."""

    slot, pieces = 1, ("right", "left", "rope")

    def round(self, step, carry):
        out, before, total = carry
        self.hidden_zero = hidden_zero(step)
        self.look_ahead((step + 1, 0), (step + 1, 1))
        begun = self.begun(step)  # the other warpgroup computes weights meanwhile
        plgpu.barrier_wait(self.barrier.weights_full.at[0])
        first = self.read(0)
        out = self.add(out, jnp.exp2(before - first), self.smem.weights, 0)
        self.release(step, 0, "right")
        right = functools.partial(self.refill, step, 0, "right")
        scores = self.products(step, self.pieces[1:], begun, right)
        top, weights, sums = self.softmax(step, scores, first)
        self.give(top, weights)
        out = self.add(out, jnp.exp2(first - top), weights, 1, lambda: self.refill(step, 1, "rope"))
        self.release(step, 1, "right")
        self.refill(step, 1, "right")
        return out, top, _faded_total(total, jnp.exp2(before - top)) + sums

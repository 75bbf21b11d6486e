"""The program of a block of latent attention on Hopper: 64 query rows over a chosen list of tokens.

Two warpgroups multiply as in ``latent.decode_program``.  TMA copies no single rows into a swizzled
tile, so all threads of a warpgroup copy by ``cp.async`` while their products run:

    eight threads copy 128 bytes of a token | an arrival on a barrier that happens when the copies
    are there | a reader waits, and fences: copies are the generic proxy's, wgmma the asynchronous

A thread copies from four tokens of a tile.  It loads their places ahead of a product, and starts
the copies during the product.  A warp may end a product before its neighbours do.  So a barrier of
the warpgroup stands before the copies into what it has read.  A negative place is gathered as
zeros.  Mosaic's barriers cannot be passed to inline code, so these are words of shared memory.
"""

from __future__ import annotations

import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import llvm
from pallas_kernels.latent.decode_program import (
    PIECES,
    FirstHalf,
    Half,
    LatentBlock,
    SecondHalf,
    hidden_zero,
    scalar,
)
from pallas_kernels.latent.plan import ROUND, TILE, WIDTH
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul.many_rows.pipeline import tiled, warpgroup_barrier
from pallas_kernels.recurrence.channels import bundle, bundle_layout, bundle_type

_WGMMA = plgpu.Layout.WGMMA
_BY_ROW = _WGMMA.reduce(1)
_SPLAT = plgpu.Layout.WG_SPLAT((128,))
_AT_ONCE = 16  # tokens that a warpgroup copies together
_EACH = TILE // _AT_ONCE  # tokens of a thread
SLACK = 8.0  # weights are at most 2**SLACK
BARRIERS = 2 * len(PIECES), 2  # of a piece of a tile, in words


@inline(REF)
def _start(barriers) -> None:
    """By all threads of the block; every thread of a warpgroup arrives on a barrier."""

    def initialise() -> None:
        for i in range(BARRIERS[0]):
            p.barrier_init(p.shared_address(barriers) + 8 * i, 128)
        p.barriers_ready()

    p.when(p.equal(p.register("tid.x"), 0), initialise)
    p.barrier()


@inline(REF, _SPLAT)
def _wait(barrier, parity) -> None:
    p.barrier_wait(p.shared_address(barrier), parity.registers.flat[0])
    p.ptx("fence.proxy.async.shared::cta;")


@inline(REF, out=bundle_type(_EACH))
def _fetch(chosen):
    """Load the places of a thread's tokens, of ``chosen [64]``."""
    first = (p.register("tid.x") & 127) >> 3
    at = p.offset(p.address(chosen), first, 4)
    return bundle([p.load_global(at, 1, 4 * _AT_ONCE * i)[0] for i in range(_EACH)])


@functools.lru_cache
def _gather(column: int, width: int):
    """Return the function that copies so many columns of 64 tokens of ``cache [tokens, 576]``."""

    @inline(plgpu.RefType(tiled(jnp.bfloat16, 128)), REF, REF, bundle_layout(_EACH))
    def gather(tile, barrier, cache, places) -> None:
        thread = p.register("tid.x") & 127
        part, first = thread & 7, thread >> 3
        in_eight = first & 7
        to = p.shared_address(tile) + (first >> 3) * (8 * 2 * width) + (in_eight << 7)
        to = to + ((part ^ in_eight) << 4)
        source = p.offset(p.address(cache), part, 16)
        for i, register in enumerate(places.registers.flat):
            place = p.bits(llvm.extractelement(register, p.ci(0)))
            size = p.where(p.below(place, 0), p.ci(0), p.ci(16))
            token = p.offset_rows(source, p.larger(place, 0), 2 * WIDTH)
            for piece in range(width // 64):
                at = i * _AT_ONCE * 2 * width + piece * 1024
                p.copy_async(to, token, at, 2 * column + 128 * piece, size, line=True)
        p.copies_arrive(p.shared_address(barrier))

    return gather


def _faded(shape):
    """Return the function that multiplies sums by fades, which are 1 but for a few rounds."""

    @inline(_WGMMA, _BY_ROW, out=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_WGMMA))
    def emit(out, fade):
        changed = [p.unequal(scalar(x, 0), 1.0) for x in fade.registers.flat]

        def multiplied():
            return (out * fade.broadcast_in_dim(shape, (0,), out.layout)).registers.flat

        found = p.choose(changed[0] | changed[1], multiplied, list(out.registers.flat))
        return like(out, found)

    return emit


@inline(_WGMMA, _SPLAT, out=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float32, layout=_WGMMA))
def _masked(scores, inside):
    """Scores of the tokens inside the list, -inf for the others.  Most tiles have none of these."""
    (inside,) = inside.registers.flat
    kind = scores.layout

    def masked():
        column = mgpu.FragmentedArray.broadcasted_iota(
            p.i32(), scores.shape, 1, layout=kind, is_signed=True
        )
        least = mgpu.FragmentedArray.splat(p.cf(-math.inf), scores.shape, kind)
        seen = column < mgpu.FragmentedArray.splat(inside, scores.shape, kind, is_signed=True)
        return seen.select(scores, least).registers.flat

    return like(scores, p.choose(p.below(inside, TILE), masked, list(scores.registers.flat)))


@inline(_WGMMA, out=plgpu.ShapeDtypeStruct((TILE, 8), jnp.float32, layout=_WGMMA))
def _by_thread(weights):
    """Sums of a thread's weights, eight columns of them."""
    found = functools.reduce(
        operator.add, (weights[:, column : column + 8] for column in range(0, TILE, 8))
    )
    return found


def like(array, registers):
    found = np.empty(array.registers.shape, dtype=object)
    found.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=found, _layout=array.layout, _is_signed=None)


def faded(total, fade):
    return total * lax.broadcast_in_dim(fade, total.shape, [0])


class ChosenBlock(LatentBlock):
    """The program of two warpgroups: 64 query rows of a token over a chunk of its list."""

    name = "chosen_latents_kernel"

    def attend(self) -> None:
        _start(self.smem.full)
        warpgroup = lax.axis_index("warpgroup")
        for i, half in enumerate(self.halves()):
            pl.when(warpgroup == i)(half(self).run)

    @staticmethod
    def halves() -> tuple[type[Half], type[Half]]:
        return _First, _Second


class _Gathered(Half):
    """A half whose tiles are gathered."""

    def barrier_of(self, slot: int, name: str):
        return self.smem.full.at[2 * list(PIECES).index(name) + slot]

    def arrived(self, step, slot: int, name: str) -> None:
        parity = jnp.full((128,), step & 1, jnp.int32)
        _wait(self.barrier_of(slot, name), plgpu.layout_cast(parity, _SPLAT))

    def places(self, step, slot: int):
        """A thread's places of a tile; of a tile past the last, those of the last round."""
        step = jnp.minimum(step, self.block.rounds - 1)
        tokens = pl.ds(self.start(step, slot), TILE)
        return _fetch(self.block.gmem.chosen.at[self.block.row, tokens])

    def gather(self, slot: int, name: str, places) -> None:
        to, full = self.piece(slot, name), self.barrier_of(slot, name)
        _gather(*PIECES[name])(to, full, self.block.gmem.cache, places)

    def refill_from(self, step, slot: int, name: str, places) -> None:
        """Copy the piece of the next round, which this warpgroup has multiplied in this one."""

        @pl.when(step + 1 < self.block.rounds)
        def _():
            warpgroup_barrier()
            self.gather(slot, name, places)

    def totals(self):
        return plgpu.layout_cast(jnp.zeros((TILE, 8), jnp.float32), _WGMMA)

    def finish(self, out, top, total) -> None:
        super().finish(out, top, jnp.sum(total, axis=1))

    def products(self, step, pieces: tuple[str, ...], scores, meanwhile=lambda: None):
        """Add the products of pieces to scores."""
        multiply = functools.partial(self.multiply_keys, step, pieces=pieces, meanwhile=meanwhile)
        return pl.run_state(lambda acc: multiply(acc=acc))(plgpu.ACC.init(scores))

    def begun(self, step):
        """Scores of the first piece of the round's tile; zeros if there is no such round."""
        zeros = lambda: plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), _WGMMA)  # noqa: E731
        first = lambda: self.products(step, self.pieces[:1], zeros())  # noqa: E731
        return lax.cond(step < self.block.rounds, first, zeros)

    def softmax(self, step, scores, before):
        """(maximum, weights, their sums) of scores; the maximum changes where it grows by SLACK."""
        inside = jnp.full((128,), self.block.end - self.start(step, self.slot), jnp.int32)
        scores = _masked(scores, plgpu.layout_cast(inside, _SPLAT)) * self.facts.factor
        found = jnp.max(scores, axis=1)
        top = jnp.where(found > before + SLACK, found, before)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        return top, weights.astype(jnp.bfloat16), _by_thread(weights)

    def add(self, out, fade, weights, slot: int, meanwhile=lambda: None):
        values = self.piece(slot, self.name)

        def multiply(acc):
            plgpu.wgmma(acc, weights, values)
            meanwhile()

        start = _faded(out.shape)(out, plgpu.layout_cast(fade, _BY_ROW))
        return pl.run_state(multiply)(plgpu.ACC.init(start))

    def begin(self) -> None:
        self.load_queries()
        places = self.places(0, self.slot)
        for name in self.pieces:
            self.gather(self.slot, name, places)
        plgpu.barrier_wait(self.barrier.q_full)


class _First(_Gathered, FirstHalf):
    def ahead(self):
        return (self.begun(jnp.int32(0)),)

    def round(self, step, carry):
        out, before, total, begun = carry
        self.hidden_zero = hidden_zero(step)
        late, places = self.places(step, 1), self.places(step + 1, 0)
        scores = self.products(step, ("right", "rope"), begun, lambda: self.refill_late(step, late))
        top, weights, sums = self.softmax(step, scores, before)
        self.give(top, weights)
        fade = jnp.exp2(before - top)
        rope = functools.partial(self.refill_from, step, 0, "rope", places)
        out = self.add(out, fade, weights, 0, rope)
        self.refill_from(step, 0, "left", places)
        total = faded(total, fade) + sums
        begun = self.begun(step + 1)  # the other warpgroup computes weights meanwhile
        plgpu.barrier_wait(self.barrier.weights_full.at[1])
        last = self.read(1)
        fade = jnp.exp2(top - last)
        out = self.add(out, fade, self.smem.weights, 1)
        return out, last, faded(total, fade), begun

    def refill_late(self, step, places) -> None:
        pl.when(step > 0)(lambda: self.refill_from(step - 1, 1, "left", places))


class _Second(_Gathered, SecondHalf):
    def round(self, step, carry):
        out, before, total = carry
        self.hidden_zero = hidden_zero(step)
        places = self.places(step + 1, 0)
        begun = self.begun(step)  # the other warpgroup computes weights meanwhile
        plgpu.barrier_wait(self.barrier.weights_full.at[0])
        first = self.read(0)
        out = self.add(out, jnp.exp2(before - first), self.smem.weights, 0)
        following = self.places(step + 1, 1)
        right = functools.partial(self.refill_from, step, 0, "right", places)
        scores = self.products(step, ("left", "rope"), begun, right)
        top, weights, sums = self.softmax(step, scores, first)
        self.give(top, weights)
        rope = functools.partial(self.refill_from, step, 1, "rope", following)
        out = self.add(out, jnp.exp2(first - top), weights, 1, rope)
        self.refill_from(step, 1, "right", following)
        return out, top, faded(total, jnp.exp2(before - top)) + sums

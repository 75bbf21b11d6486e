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

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import llvm
from pallas_kernels.latent.decode_program import (
    PIECES,
    FirstHalf,
    Half,
    LatentBlock,
    SecondHalf,
)
from pallas_kernels.latent.plan import TILE, WIDTH
from pallas_kernels.launch import REF, inline
from pallas_kernels.matmul.many_rows.pipeline import tiled, warpgroup_barrier
from pallas_kernels.recurrence.channels import bundle, bundle_layout, bundle_type

_SPLAT = plgpu.Layout.WG_SPLAT((128,))
_AT_ONCE = 16  # tokens that a warpgroup copies together
_EACH = TILE // _AT_ONCE  # tokens of a thread
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


class ChosenBlock(LatentBlock):
    """The program of two warpgroups: 64 query rows of a token over a chunk of its list."""

    name = "chosen_latents_kernel"

    def attend(self) -> None:
        _start(self.smem.full)
        super().attend()

    def halves(self) -> tuple[type[Half], type[Half]]:
        return _First, _Second


class _Gathered(Half):
    """A half whose tiles are gathered."""

    def barrier_of(self, slot: int, name: str):
        return self.smem.full.at[2 * list(PIECES).index(name) + slot]

    def arrived(self, step, slot: int, name: str) -> None:
        parity = jnp.full((128,), step & 1, jnp.int32)
        _wait(self.barrier_of(slot, name), plgpu.layout_cast(parity, _SPLAT))

    def look_ahead(self, *tiles) -> None:
        """Load a thread's places; of a tile past the last, those of the last round."""
        self.places = {}
        for step, slot in tiles:
            start = self.start(jnp.minimum(step, self.block.rounds - 1), slot)
            chosen = self.block.gmem.chosen.at[self.block.row, pl.ds(start, TILE)]
            self.places[slot] = _fetch(chosen)

    def load(self, step, slot: int, name: str) -> None:
        warpgroup_barrier()
        to, full = self.piece(slot, name), self.barrier_of(slot, name)
        _gather(*PIECES[name])(to, full, self.block.gmem.cache, self.places[slot])

    def clear(self, step) -> None:
        """Free places are gathered as zeros."""


class _First(_Gathered, FirstHalf):
    pass


class _Second(_Gathered, SecondHalf):
    pass

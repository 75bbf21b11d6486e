"""GLA's chunk-local pass on Hopper: gates, gated q and k, and the 64x64 attention inside a chunk.

Per chunk of C = 64 tokens, head and batch row, and per piece of at most 128 key channels:

    A[i, j]  = scale * sum_d q[i, d] k[j, d] exp(b[i, d] - b[j, d])   for j <= i, else 0
    qg[i, d] = scale * q[i, d] exp(b[i, d])
    kg[j, d] = k[j, d] exp(b[C-1, d] - b[j, d])
    decay[d] = exp(b[C-1, d])            with b the inclusive cumulative sum of log_decay

The kernel never forms b.  With a = exp(log_decay) <= 1, a binary tree over the rows keeps two
products for every element and block size s = 1, 2, 4 .. 64:

    p = product of a from the start of its s-block to itself, inclusive
    t = product of a after itself to the end of its s-block

Pair (i, j) belongs to the level s at which i is in the second and j in the first half of one
2s-block.  There exp(b_i - b_j) = p_i t_j.  Every factor is a product of numbers in [0, 1]: nothing
can overflow, log_decay = -inf is a plain 0, and each element takes one exponential.  On level s a
row is either a query row or a key row. So one operand y = q p or k t serves both sides of y y^T.

A warp owns 16 rows, and a lane has two columns of them.  So on levels 1 .. 8 the tree joins
registers of one thread.  y goes to shared memory and comes back through ldmatrix, and mma.m16n8k16
forms the block of A on the diagonal: the A fragment of y is also the B fragment of its transpose.
Above, the four warps exchange their 16-row products and share the six 16x16 blocks off the
diagonal.

Timeline of a worker (a warpgroup; two per SM, each walks its own list of chunks), per slice of 64
channels, with three slots:

    load, store : | load n+2 | store n-1 draining          | load n+3 ...
    compute     : | exp2, levels 1 2 4 8 | exchange | y16 y32 qg kg | 16, 32 | last slice: A | store

Copies: each worker copies its slices by TMA, q, k and two halves of log_decay, two slices ahead
(``load``, ``refill``).
Waits: a worker waits for the four copies of a slot on ``ready[slot]``.  Before it refills the slot
of the slice before, it waits until that slot's stores have left.  Workers never wait for each
other; the four warps of one meet at warpgroup barriers (``gate_slice``).
Writes: TMA takes qg and kg from the places of q and k, and after the last slice A.  Warp 0 stores
decay from its registers.

Floor: 13 bytes per element of q at Dk = 128 (8 in, 5 out): 0.203 ms at (8, 4096, 16, 128, 128).
Result: 0.246 ms on one H200.  Gating multiplies in bf16 pairs, two roundings an operand, so A, qg
and kg carry 2.5e-3.  Attempts: docs/lab/gla.md.  Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import REF, Views, inline, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    SLICE,
    TILE,
    blocks_for,
    bundle,
    bundle_layout,
    bundle_type,
    digits,
    unbundle,
    worker_items,
    zero_acc,
)
from pallas_kernels.recurrence.tree import ACCUMULATORS, Lane, gate_slice, merge


class Gated(NamedTuple):
    """The results for ``gla.scan``: qg and kg bfloat16 [B, H, NC*64, Dk], A bfloat16 [B, H, pieces,
    NC*64, 64], decay float32 [B, H, NC, Dk]."""

    qg: jax.Array
    kg: jax.Array
    attention: jax.Array
    decay: jax.Array

    def reversed(self) -> Gated:
        """Return the operands of the reverse scan."""
        return self._replace(qg=self.kg, kg=self.qg)


def piece_width(dk: int) -> int:
    """Key channels one block of the chunk-local pass handles."""
    return 128 if dk % 128 == 0 else 64


WARPGROUPS = 2  # independent workers of a block
SLOTS = 3  # slices of a worker: one being loaded, one computed, one stored
_N_ACC = 4 * len(ACCUMULATORS)


def _slice_call(scale: float, first: bool, last: bool, ragged: bool):
    """A call of ``gate_slice``: (slot, table, decay[, limit][, acc]) -> acc."""

    @inline(
        plgpu.RefType(ROWS),
        REF,
        REF,
        *([plgpu.Layout.WG_SPLAT((128,))] if ragged else []),
        *([] if first else [bundle_layout(_N_ACC)]),
        out=bundle_type(_N_ACC),
    )
    def call(slot, table, decay, *rest):
        rest = list(rest)
        limit = rest.pop(0).registers.flat[0] if ragged else None
        lane = Lane(p.shared_address(slot))
        if first:
            acc = {name: zero_acc() for name in ACCUMULATORS}
        else:
            fours = unbundle(rest.pop(0), *[4] * len(ACCUMULATORS))
            acc = dict(zip(ACCUMULATORS, fours, strict=True))
        gate_slice(lane, acc, p.shared_address(table), p.address(decay), limit, scale)
        if last:
            mgpu.utils.warpgroup_barrier()  # every warp has read y: A may overwrite it
            merge(lane, acc, p.shared_address(slot) + 2 * TILE, scale)
        return bundle([x for name in ACCUMULATORS for x in acc[name]])

    return call


class _Worker:
    """The program of a warpgroup: its chunks, slice by slice of 64 channels."""

    def __init__(self, gmem, smem, barrier, *, sizes: tuple[int, int, int, int], n_work, scale):
        self.n_slices, self.n_pieces, self.n_heads, self.n_chunks = sizes
        self.gmem, self.scale, self.ragged = gmem, scale, gmem.lengths is not None
        own, self.n_items, self.item_of = worker_items(n_work, WARPGROUPS)
        self.words, self.decays = smem.slots.words.at[own], smem.slots.decays.at[own]
        self.table, self.ready = smem.tables.at[own], barrier.ready.at[own]

    def run(self) -> None:
        for n in range(2):
            i, s = n // self.n_slices, n % self.n_slices
            self.when_alive(i, i < self.n_items, functools.partial(self.load, i, s, n))
        lax.fori_loop(0, self.n_items, self.item, None)
        plgpu.wait_smem_to_gmem(0)

    def place(self, i):
        """(chunk, piece, head, row) of item i."""
        return digits(self.item_of(i), self.n_chunks, self.n_pieces, self.n_heads)

    def limit_of(self, i):
        """Tokens of the row from the item's chunk on."""
        c, _, _, b = self.place(i)
        return self.gmem.lengths[b] - c * CHUNK

    def when_alive(self, i, inside, work) -> None:
        """Run ``work`` if item i exists and its chunk starts inside its row."""
        if not self.ragged:
            pl.when(inside)(work)
            return
        pl.when(inside)(lambda: pl.when(self.limit_of(i) > 0)(work))

    # --- copies ---

    def load(self, i, s: int, slot) -> None:
        """Copy slice s of item i into a slot."""
        gmem, (c, piece, head, b) = self.gmem, self.place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), (piece * self.n_slices + s) * SLICE
        bar = self.ready.at[slot]
        for half in range(2):
            source = gmem.g.at[b, rows, head, pl.ds(at + 32 * half, 32)]
            plgpu.copy_gmem_to_smem(source, self.decays.at[slot, 2 + half], bar)
        columns = pl.ds(at, SLICE)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, head, columns], self.words.at[slot, 0], bar)
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, head, columns], self.words.at[slot, 1], bar)

    def refill(self, i, s: int) -> None:
        """Load the slice two after this one into the slot of the slice before: its stores began a
        slice ago."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        following, s_next = i + (s + 2) // self.n_slices, (s + 2) % self.n_slices
        slot = (i * self.n_slices + s + 2) % SLOTS
        load = functools.partial(self.load, following, s_next, slot)
        self.when_alive(following, following < self.n_items, load)

    # --- computing ---

    def item(self, i, _) -> None:
        if not self.ragged:
            self.compute(i)
            return
        alive = self.limit_of(i) > 0
        pl.when(alive)(lambda: self.compute(i))
        pl.when(jnp.logical_not(alive))(lambda: self.skip(i))

    def skip(self, i) -> None:
        for s in range(self.n_slices):
            self.refill(i, s)

    def compute(self, i) -> None:
        c, piece, head, b = self.place(i)
        rows, acc = pl.ds(c * CHUNK, CHUNK), ()
        limits = (jnp.full((128,), self.limit_of(i), jnp.int32),) if self.ragged else ()
        for s in range(self.n_slices):
            slot = (i * self.n_slices + s) % SLOTS
            columns = pl.ds((piece * self.n_slices + s) * SLICE, SLICE)
            plgpu.barrier_wait(self.ready.at[slot])
            last = s == self.n_slices - 1
            call = _slice_call(self.scale, s == 0, last, self.ragged)
            decay = self.gmem.decay.at[b, head, c, columns]
            acc = (call(self.words.at[slot], self.table, decay, *limits, *acc),)
            plgpu.commit_smem()
            self.refill(i, s)
            self.store(slot, (b, head, rows, columns), piece if last else None)

    def store(self, slot, place, piece) -> None:
        """Store a slice's qg and kg, and of the last one A."""
        words, gmem, (b, head, rows, columns) = self.words, self.gmem, place
        plgpu.copy_smem_to_gmem(words.at[slot, 0], gmem.qg.at[b, head, rows, columns])
        plgpu.copy_smem_to_gmem(words.at[slot, 1], gmem.kg.at[b, head, rows, columns])
        if piece is not None:
            plgpu.copy_smem_to_gmem(words.at[slot, 2], gmem.attention.at[b, head, piece, rows])


def gates(q, k, log_decay, lengths, scale: float) -> Gated:
    """Compute the gated operands of ``gla.scan``.

    Parameters
    ----------
    q, k : bfloat16 [B, T, H, Dk]
    log_decay : float32 [B, T, H, Dk]
    lengths : int32 [B] or None
        Chunks that start at or after a row's length are not written.
    """
    b, t, h, dk = q.shape
    width = piece_width(dk)
    pieces, n_slices = dk // width, width // SLICE
    nc = -(-t // CHUNK)
    n_work = nc * pieces * h * b
    slots = (WARPGROUPS, SLOTS, 4, CHUNK)
    sizes = n_slices, pieces, h, nc

    spec, half = jax.ShapeDtypeStruct, jnp.bfloat16
    results = launch(
        functools.partial(_Worker, sizes=sizes, n_work=n_work, scale=scale),
        {"q": q, "k": k, "g": log_decay, "lengths": lengths},
        {
            "qg": spec((b, h, nc * CHUNK, dk), half),
            "kg": spec((b, h, nc * CHUNK, dk), half),
            "attention": spec((b, h, pieces, nc * CHUNK, CHUNK), half),
            "decay": spec((b, h, nc, dk), jnp.float32),
        },
        name="gla_gates",
        grid=blocks_for(n_work, WARPGROUPS),
        warpgroups=WARPGROUPS,
        scratch={
            "slots": Views(
                words=plgpu.SMEM((*slots, SLICE), jnp.bfloat16, transforms=ROWS),
                decays=plgpu.SMEM((*slots, 32), jnp.float32, transforms=ROWS),
            ),
            "tables": plgpu.SMEM((WARPGROUPS, 4, SLICE), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=4, num_barriers=(WARPGROUPS, SLOTS)),
        },
    )
    return Gated(*results)

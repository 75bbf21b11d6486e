"""GLA's chunk-local pass on Hopper: gates, gated q and k, and the 64x64 attention inside a chunk.

Per chunk of C = 64 tokens, head and batch row, and per piece of at most 128 key channels:

    A[i, j]  = scale * sum_d q[i, d] k[j, d] exp(b[i, d] - b[j, d])   for j <= i, else 0
    qg[i, d] = scale * q[i, d] exp(b[i, d])
    kg[j, d] = k[j, d] exp(b[C-1, d] - b[j, d])
    decay[d] = exp(b[C-1, d])            with b the inclusive cumulative sum of log_decay

No b is ever formed.  With a = exp(log_decay) <= 1 a binary tree over the rows keeps, for every
element and block size s = 1, 2, 4 .. 64,

    p = product of a from the start of its s-block to itself, inclusive
    t = product of a after itself to the end of its s-block

and pair (i, j) belongs to the level s at which i is in the second and j in the first half of one
2s-block: exp(b_i - b_j) = p_i t_j.  Every factor is a product of numbers in [0, 1]: nothing can
overflow, log_decay = -inf is a plain 0, and only one exponential is taken per element.  On level s
a row is either a query row or a key row, so one operand y = q p or k t serves both sides of y y^T.

A warp owns 16 rows and a lane two columns of them, so on levels 1..8 the tree joins registers of
one thread; y goes to shared memory, comes back through ldmatrix, and mma.m16n8k16 forms the block
of A on the diagonal (the A fragment of y is also the B fragment of its transpose).  Above, the four
warps exchange their 16-row products and share out the six 16x16 blocks off the diagonal.

Timeline of a worker (a warpgroup; two per SM, each walks its own list of chunks), per slice of 64
channels, with three slots:

    copies  : | load n+2 | store n-1 draining          | load n+3 ...
    compute : | exp2, levels 1 2 4 8 | exchange | y16 y32 qg kg | 16, 32 | last slice: A | store n

Floor: 13 bytes per element of q at Dk = 128 (8 in, 5 out): 0.203 ms at (8, 4096, 16, 128, 128).
Result: 0.246 ms on one H200; gating multiplies in bf16 pairs, two roundings an operand: A, qg and
kg carry 2.5e-3.  What was tried: NOTES.md.  Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.launch import launch
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


def piece_width(dk: int) -> int:
    """Key channels one block of the chunk-local pass handles."""
    return 128 if dk % 128 == 0 else 64


WARPGROUPS = 2  # independent workers of a block
SLOTS = 3  # slices of a worker: one being loaded, one computed, one stored
_N_ACC = 4 * len(ACCUMULATORS)


def _slice_call(scale: float, first: bool, last: bool, ragged: bool):
    """inline_mgpu around ``gate_slice``: (slot, table, decay[, limit][, acc]) -> acc."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(ROWS),
            plgpu.RefType(),
            plgpu.RefType(),
            *([plgpu.Layout.WG_SPLAT((128,))] if ragged else []),
            *([] if first else [bundle_layout(_N_ACC)]),
        ),
        return_type=bundle_type(_N_ACC),
    )
    def call(ctx, slot, table, decay, *rest):
        del ctx
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
            merge(lane, acc, p.add(p.shared_address(slot), 2 * TILE), scale)
        return bundle([x for name in ACCUMULATORS for x in acc[name]])

    return call


def _gates_body(
    q,
    k,
    g,
    *rest,
    n_slices: int,
    n_pieces: int,
    n_heads: int,
    n_chunks: int,
    n_work: int,
    scale: float,
    ragged: bool,
):
    """See the module docstring.  Refs: [lengths,] qg, kg, attention, decay, scratch."""
    if ragged:
        lengths, *rest = rest
    qg, kg, attention, decay, (words_all, gates_all), tables, ready_all = rest
    wg, n_items, item_of = worker_items(n_work, WARPGROUPS)
    words, gate_words, ready = words_all.at[wg], gates_all.at[wg], ready_all.at[wg]

    def place(i):
        return digits(item_of(i), n_chunks, n_pieces, n_heads)

    def limit_of(i):
        c, _, _, b = place(i)
        return lengths[b] - c * CHUNK

    def when_alive(i, inside, work):
        """Run ``work`` if item i exists and its chunk starts inside its row."""
        if not ragged:
            pl.when(inside)(work)
            return

        @pl.when(inside)
        def _():
            pl.when(limit_of(i) > 0)(work)

    def load(i, s, slot):
        c, piece, head, b = place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), (piece * n_slices + s) * SLICE
        bar = ready.at[slot]
        for half in range(2):
            columns = pl.ds(at + 32 * half, 32)
            plgpu.copy_gmem_to_smem(
                g.at[b, rows, head, columns], gate_words.at[slot, 2 + half], bar
            )
        columns = pl.ds(at, SLICE)
        plgpu.copy_gmem_to_smem(q.at[b, rows, head, columns], words.at[slot, 0], bar)
        plgpu.copy_gmem_to_smem(k.at[b, rows, head, columns], words.at[slot, 1], bar)

    def ahead(i, s):
        """The slice two after slice s of item i."""
        return i + (s + 2) // n_slices, (s + 2) % n_slices

    for n in range(2):
        i, s = n // n_slices, n % n_slices
        when_alive(i, i < n_items, functools.partial(load, i, s, n))

    def item(i, _):
        def work():
            c, piece, head, b = place(i)
            rows = pl.ds(c * CHUNK, CHUNK)
            acc = ()
            limits = (jnp.full((128,), limit_of(i), jnp.int32),) if ragged else ()
            for s in range(n_slices):
                slot = (i * n_slices + s) % SLOTS
                columns = pl.ds((piece * n_slices + s) * SLICE, SLICE)
                plgpu.barrier_wait(ready.at[slot])
                last = s == n_slices - 1
                call = _slice_call(scale, s == 0, last, ragged)
                acc = (
                    call(
                        words.at[slot], tables.at[wg], decay.at[b, head, c, columns], *limits, *acc
                    ),
                )
                plgpu.commit_smem()
                refill(i, s)
                plgpu.copy_smem_to_gmem(words.at[slot, 0], qg.at[b, head, rows, columns])
                plgpu.copy_smem_to_gmem(words.at[slot, 1], kg.at[b, head, rows, columns])
                if last:
                    plgpu.copy_smem_to_gmem(words.at[slot, 2], attention.at[b, head, piece, rows])

        def refill(i, s):
            # The slot of the slice before this one: its stores began a slice ago.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            j, s_next = ahead(i, s)
            slot = (i * n_slices + s + 2) % SLOTS
            when_alive(j, j < n_items, functools.partial(load, j, s_next, slot))

        if not ragged:
            work()
            return
        alive = limit_of(i) > 0
        pl.when(alive)(work)

        @pl.when(jnp.logical_not(alive))
        def _():
            for s in range(n_slices):
                refill(i, s)

    lax.fori_loop(0, n_items, item, None)
    plgpu.wait_smem_to_gmem(0)


def gates(q, k, log_decay, lengths, scale: float):
    """qg, kg [B, H, NC*64, Dk] bf16; A [B, H, pieces, NC*64, 64] bf16; decay [B, H, NC, Dk] f32.

    lengths: int32[B] or None.  Chunks that start at or after a row's length are not written.
    """
    b, t, h, dk = q.shape
    width = piece_width(dk)
    pieces, n_slices = dk // width, width // SLICE
    nc = -(-t // CHUNK)
    n_work = nc * pieces * h * b
    body = functools.partial(
        _gates_body,
        n_slices=n_slices,
        n_pieces=pieces,
        n_heads=h,
        n_chunks=nc,
        n_work=n_work,
        scale=scale,
        ragged=lengths is not None,
    )
    slots = (WARPGROUPS, SLOTS, 4, CHUNK)
    return launch(
        body,
        (q, k, log_decay, lengths),
        (
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, pieces, nc * CHUNK, CHUNK), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, nc, dk), jnp.float32),
        ),
        name="gla_gates",
        grid=blocks_for(n_work, WARPGROUPS),
        warpgroups=WARPGROUPS,
        scratch=[
            plgpu.RefUnion(
                plgpu.SMEM((*slots, SLICE), jnp.bfloat16, transforms=ROWS),
                plgpu.SMEM((*slots, 32), jnp.float32, transforms=ROWS),
            ),
            plgpu.SMEM((WARPGROUPS, 4, SLICE), jnp.float32),
            plgpu.Barrier(num_arrivals=4, num_barriers=(WARPGROUPS, SLOTS)),
        ],
    )

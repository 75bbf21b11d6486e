"""GLA's chunk-local gradients on Hopper: dq, dk and dlog_decay from the states around a chunk.

S is the state before a chunk and E the gradient of the state after it.  dA = scale * do v^T on and
below the diagonal, and b is the cumulative log-decay inside the chunk of C tokens.

    dq_i = scale exp(b_i) (S do_i)       + sum_{j <= i} dA[i, j] exp(b_i - b_j) k_j
    dk_j = exp(b_C - b_j) (E v_j)        + sum_{i >= j} dA[i, j] exp(b_i - b_j) q_i
    dg_t = exp(b_C) <S, E> + sum_j k_j dk_j[first term] + sum_{s >= t} (q_s dq_s - k_s dk_s)

q, k, dq, dk, dg are [64, Dk] a chunk, v and do [64, Dv], S and E [Dk, Dv], dA [64, 64].
The products in the last line leave out the diagonal i = j, which does not depend on g.  <S, E> sums
over the value channels.  Most of that last sum cancels: a pair (i, j) enters at i and leaves at j.
Both times it is G[i, j] y_i y_j with the same rounded y.  So it cancels to float32, even where the
gate at t makes dg_t tiny beside q dq.

The binary tree of ``gla.gates`` keeps out every exponential.  On level s a row is a query row with
factor f = p or a key row with f = t. Its y is f q or f k.  With the symmetric G = dA + dA^T
(diagonal left out) one product per level serves both gradients:

    Z = (G on level-s pairs) y        dq += f Z on query rows,  dk += f Z on key rows

Everything is transposed, channels as rows: a warp owns 16 channels and all 64 tokens
(``recurrence.slices``).  Its y^T is the register A operand of mma.m16n8k16.  Levels 1, 8, 16 and 32
join registers of one thread.  Only levels 2 and 4 shuffle, and then block products alone.  No two
warps exchange anything but G.

Timeline of a worker (a warpgroup, two per SM), one slice of 64 key channels of one chunk at a time.
A stage is the tiles do, v, S^T, E^T of 64 value channels, and there are two slots for stages:

    item_inline, Dv = 128
        dA, dA^T of one stage | q k g in | of the other -> G | six levels: y, Z, dq dk | both
        stages: states' part, <S, E> | next stages in | dg scan | results out of q k g's slot
    item_streamed, wider values
        dA once per chunk in ``chunk_products`` | q k g G in | six levels | stages stream
        through the two slots | next q k g in | dg scan | results out of a stage's slot

Copies: each worker copies its own operands by TMA: ``load_q`` (q, k, G), ``load_g``,
``load_stage`` (do, v, S^T, E^T).  Workers share nothing.
Waits: a worker waits on ``ready`` for q, k, g (and G), on ``stage_ready[slot]`` for a stage.  It
refills a place after the warpgroup's barrier (``commit_smem``) behind its last reading.  Where
results leave from a place, it waits for these stores first (``wait_smem_to_gmem``).
Writes: TMA takes dq, dk and dlog_decay from the place of q, k and g, or from a stage's slot.

Floor: 26 bytes per element of q at Dk = Dv = 128, 0.41 ms at (8, 4096, 16, 128, 128).  Result:
0.812 ms on one H200, dg with 3e-3 relative error under strong gates.  Attempts: docs/lab/gla.md.
Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gla.gradients_registers import (
    N_EXTRA,
    finish_call,
    flux_call,
    levels_call,
    states_call,
)
from pallas_kernels.gla.products import chunk_products, products_call, symmetric_call
from pallas_kernels.launch import Views, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    SLICE,
    blocks_for,
    digits,
    worker_items,
    zeros,
)
from pallas_kernels.recurrence.op import Heads

WARPGROUPS = 2


class _Worker:
    """The program of a warpgroup: slices of 64 key channels of a chunk.

    gmem.pairs, gmem.diagonals: ``chunk_products``'s, or None where dA is made here.
    """

    def __init__(self, gmem, smem, barrier, *, sizes: tuple[int, int, int, int], n_work, scale):
        self.n_slices, self.n_chunks, self.n_heads, self.n_stages = sizes
        self.gmem, self.scale = gmem, scale
        own, self.n_items, self.item_of = worker_items(n_work, WARPGROUPS)
        views = smem.words.words, smem.words.gates, smem.stages.tiles, smem.stages.gates
        self.words, self.gates, self.stages, self.gates_out = (x.at[own] for x in views)
        self.symmetric, self.diagonal = smem.pairs.at[own], smem.diagonals.at[own]
        self.ready, self.stage_ready = barrier.ready.at[own], barrier.stage_ready.at[own]

    def run(self) -> None:
        inline = self.gmem.pairs is None
        pl.when(self.n_items > 0)(lambda: self.load_first(inline))
        item = self.item_inline if inline else self.item_streamed
        lax.fori_loop(0, self.n_items, item, None)
        plgpu.wait_smem_to_gmem(0)

    def place(self, i):
        """(slice, chunk, head, row) of item i."""
        return digits(self.item_of(i), self.n_slices, self.n_chunks, self.n_heads)

    # --- copies ---

    def load_first(self, inline: bool) -> None:
        self.load_q(0)
        self.load_g(0)
        self.load_stage(0, 0, 1)
        if inline:
            self.load_stage(0, 1, 0)

    def load_q(self, i) -> None:
        gmem, words, (s, c, head, b) = self.gmem, self.words, self.place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), pl.ds(s * SLICE, SLICE)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, head, at], words.at[0], self.ready)
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, head, at], words.at[1], self.ready)
        if gmem.pairs is None:
            return
        for tile in range(2):
            source = gmem.pairs.at[b, head, c, tile]
            plgpu.copy_gmem_to_smem(source, self.symmetric.at[tile], self.ready)
        plgpu.copy_gmem_to_smem(gmem.diagonals.at[b, head, c], self.diagonal, self.ready)

    def load_g(self, i) -> None:
        s, c, head, b = self.place(i)
        rows = pl.ds(c * CHUNK, CHUNK)
        for half in range(2):
            source = self.gmem.g.at[b, rows, head, pl.ds(s * SLICE + 32 * half, 32)]
            plgpu.copy_gmem_to_smem(source, self.gates.at[2 + half], self.ready)

    def load_stage(self, i, n, slot) -> None:
        """Copy the n-th 64 value channels of do, v, S^T and E^T."""
        gmem, (s, c, head, b) = self.gmem, self.place(i)
        rows, values, at = pl.ds(c * CHUNK, CHUNK), pl.ds(n * 64, 64), pl.ds(s * SLICE, SLICE)
        to, bar = self.stages, self.stage_ready.at[slot]
        plgpu.copy_gmem_to_smem(gmem.d_out.at[b, rows, head, values], to.at[slot, 0], bar)
        plgpu.copy_gmem_to_smem(gmem.v.at[b, rows, head, values], to.at[slot, 1], bar)
        plgpu.copy_gmem_to_smem(gmem.before.at[b, head, c, values, at], to.at[slot, 2], bar)
        plgpu.copy_gmem_to_smem(gmem.after.at[b, head, c, values, at], to.at[slot, 3], bar)

    def load_next_stages(self, i) -> None:
        self.load_stage(i + 1, 0, 1)
        self.load_stage(i + 1, 1, 0)

    def load_next(self, i) -> None:
        self.load_q(i + 1)
        self.load_g(i + 1)
        self.load_stage(i + 1, 0, 1)

    def store(self, i, tiles, gate_tiles) -> None:
        gmem, (s, c, head, b) = self.gmem, self.place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), s * SLICE
        columns = pl.ds(at, SLICE)
        plgpu.copy_smem_to_gmem(tiles.at[0], gmem.dq.at[b, rows, head, columns])
        plgpu.copy_smem_to_gmem(tiles.at[1], gmem.dk.at[b, rows, head, columns])
        for half in range(2):
            to = gmem.dg.at[b, rows, head, pl.ds(at + 32 * half, 32)]
            plgpu.copy_smem_to_gmem(gate_tiles.at[2 + half], to)

    # --- Dv = 128: dA is made here, while the results of the slice before drain ---

    def item_inline(self, i, _) -> None:
        words, stages = self.words, self.stages
        self.make_products(i)
        plgpu.commit_smem()  # also the warpgroup's barrier: G is complete
        plgpu.barrier_wait(self.ready)
        state = levels_call()(words, self.symmetric, self.diagonal)
        state, extra = states_call(self.scale, 2)(words, stages, state, zeros(N_EXTRA))
        fluxes = flux_call()(words)
        plgpu.commit_smem()
        pl.when(i + 1 < self.n_items)(lambda: self.load_next_stages(i))
        finish_call()(words, fluxes, state, extra)
        plgpu.commit_smem()
        self.store(i, words, self.gates)

    def make_products(self, i) -> None:
        """dA, dA^T of both stages -> G."""
        acc = zeros(40)
        for slot in (1, 0):
            plgpu.barrier_wait(self.stage_ready.at[slot])
            acc = products_call()(self.stages.at[slot], acc)
            if slot:
                pl.when(i > 0)(lambda: self.replace_words(i))
        symmetric_call(self.scale)(self.symmetric, self.diagonal, acc)

    def replace_words(self, i) -> None:
        """The results of the slice before have left q, k and g by now."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.load_q(i)
        self.load_g(i)

    # --- wider values: dA comes from ``chunk_products``, stages stream through the two slots ---

    def item_streamed(self, i, _) -> None:
        words = self.words
        plgpu.barrier_wait(self.ready)
        state = levels_call()(words, self.symmetric, self.diagonal)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left slot 0
        self.load_stage(i, 1, 0)
        stage = functools.partial(self.stream_stage, i)
        state, extra = lax.fori_loop(0, self.n_stages, stage, (state, zeros(N_EXTRA)))
        fluxes = flux_call()(words)
        plgpu.commit_smem()
        pl.when(i + 1 < self.n_items)(lambda: self.load_next(i))
        finish_call()(self.stages.at[0], fluxes, state, extra)
        plgpu.commit_smem()
        self.store(i, self.stages.at[0], self.gates_out.at[0])

    def stream_stage(self, i, n, carry):
        slot = 1 - n % 2
        plgpu.barrier_wait(self.stage_ready.at[slot])
        carry = states_call(self.scale, 1)(self.words, self.stages.at[slot], *carry)
        plgpu.commit_smem()
        pl.when(n + 2 < self.n_stages)(lambda: self.load_stage(i, n + 2, slot))
        return tuple(carry)


def chunk_gradients(heads: Heads, d_out, before, after, scale: float):
    """Compute dq, dk (bfloat16) and dlog_decay (float32), all [B, T, H, Dk].

    Parameters
    ----------
    before, after : bfloat16 [B, H, NC, Dv, Dk]
        The state at every chunk's start and the gradient of the state at its end, transposed
        (``scan(want_borders=True)``).
    """
    q, k, v, log_decay, _ = heads
    b, t, h, dk = q.shape
    nc, n_slices = -(-t // CHUNK), dk // SLICE
    streamed = v.shape[-1] > 128
    n_work = nc * n_slices * h * b
    wgs = WARPGROUPS
    sizes = n_slices, nc, h, v.shape[-1] // 64

    def rows(*shape, dtype=jnp.bfloat16):
        return plgpu.SMEM((wgs, *shape), dtype, transforms=ROWS)

    pairs, diagonals = chunk_products(d_out, v, scale) if streamed else (None, None)
    return launch(
        functools.partial(_Worker, sizes=sizes, n_work=n_work, scale=scale),
        {
            **{"q": q, "k": k, "g": log_decay, "v": v},
            "d_out": d_out,
            "before": before,
            "after": after,
            "pairs": pairs,
            "diagonals": diagonals,
        },
        {
            "dq": jax.ShapeDtypeStruct(q.shape, q.dtype),
            "dk": jax.ShapeDtypeStruct(k.shape, k.dtype),
            "dg": jax.ShapeDtypeStruct(log_decay.shape, jnp.float32),
        },
        name="gla_chunk_gradients",
        grid=blocks_for(n_work, wgs),
        warpgroups=wgs,
        scratch={
            "words": Views(
                words=rows(4, CHUNK, SLICE), gates=rows(4, CHUNK, 32, dtype=jnp.float32)
            ),
            "stages": Views(
                tiles=rows(2, 4, CHUNK, 64), gates=rows(2, 4, CHUNK, 32, dtype=jnp.float32)
            ),
            "pairs": rows(2, CHUNK, CHUNK),
            "diagonals": plgpu.SMEM((wgs, CHUNK), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=7 if streamed else 4, num_barriers=wgs),
            "stage_ready": plgpu.Barrier(num_arrivals=4, num_barriers=(wgs, 2)),
        },
    )

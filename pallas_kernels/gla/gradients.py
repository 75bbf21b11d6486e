"""GLA's chunk-local gradients on Hopper: dq, dk and dlog_decay from the states around a chunk.

With S the state before a chunk, E the gradient of the state after it, dA = scale * do v^T on and
below the diagonal, and b the cumulative log-decay inside the chunk of C tokens:

    dq_i = scale exp(b_i) (S do_i)       + sum_{j <= i} dA[i, j] exp(b_i - b_j) k_j
    dk_j = exp(b_C - b_j) (E v_j)        + sum_{i >= j} dA[i, j] exp(b_i - b_j) q_i
    dg_t = exp(b_C) <S, E> + sum_j k_j dk_j[first term] + sum_{s >= t} (q_s dq_s - k_s dk_s)

where the products in the last line leave out the diagonal i = j, which does not depend on g;
<S, E> sums over the value channels.  That sum lives on cancellation: a pair (i, j) enters at i and
leaves at j.  Both times it is taken as G[i, j] y_i y_j with the same rounded y, so it cancels to
float32 even where the gate at t makes dg_t tiny beside q dq.

The binary tree of ``gla.gates`` again keeps every exponential out: on level s a row is a query row
with factor f = p or a key row with f = t, y = f q or f k, and with the symmetric
G = dA + dA^T (diagonal left out) one product per level serves both gradients,

    Z = (G on level-s pairs) y        dq += f Z on query rows,  dk += f Z on key rows.

Everything is kept transposed, channels as rows: a warp owns 16 channels and all 64 tokens, so its
y^T is the register A operand of mma.m16n8k16 and levels 1, 8, 16 and 32 join registers of one
thread (token = 8 m + 2 (lane % 4) + e); only levels 2 and 4 shuffle, and then block products alone.
No two warps exchange anything but G.

Timeline of a worker (a warpgroup, two per SM), one slice of 64 key channels of one chunk at a time;
a stage is the tiles do, v, S^T, E^T of 64 value channels, and there are two slots for stages:

    Dv = 128: dA, dA^T of one stage | q k g in | of the other -> G | six levels: y, Z, dq dk | both
              stages: states' part, <S, E> | next stages in | dg scan | results out of q k g's slot
    above   : dA once per chunk in ``chunk_products`` | q k g G in | six levels | stages stream
              through the two slots | next q k g in | dg scan | results out of a stage's slot

Floor: 26 bytes per element of q at Dk = Dv = 128, 0.41 ms at (8, 4096, 16, 128, 128).  Result:
0.812 ms on one H200, dg with 3e-3 relative error under strong gates.  What was tried: NOTES.md.
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
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    SLICE,
    blocks_for,
    digits,
    worker_items,
    zeros,
)

WARPGROUPS = 2


def _gradients_body(
    q,
    k,
    g,
    v,
    d_out,
    before,
    after,
    *rest,
    n_slices: int,
    n_heads: int,
    n_chunks: int,
    n_stages: int,
    n_work: int,
    scale: float,
):
    inline = n_stages == 2  # dA is made here, while the results of the slice before drain
    if not inline:
        pair_in, diagonal_in, *rest = rest
    dq, dk, dg, *scratch = rest
    (words_all, gates_all), (stages_all, gate_out_all), pairs_all, diagonals, bar_q, bar_s = scratch
    wg, n_items, item_of = worker_items(n_work, WARPGROUPS)
    words, gate_words, stages, gate_out = (
        x.at[wg] for x in (words_all, gates_all, stages_all, gate_out_all)
    )
    pair, diagonal = pairs_all.at[wg], diagonals.at[wg]
    ready_q, ready_s = bar_q.at[wg], bar_s.at[wg]

    def place(i):
        return digits(item_of(i), n_slices, n_chunks, n_heads)

    def load_q(i):
        s, c, head, b = place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), pl.ds(s * SLICE, SLICE)
        plgpu.copy_gmem_to_smem(q.at[b, rows, head, at], words.at[0], ready_q)
        plgpu.copy_gmem_to_smem(k.at[b, rows, head, at], words.at[1], ready_q)
        if not inline:
            for tile in range(2):
                plgpu.copy_gmem_to_smem(pair_in.at[b, head, c, tile], pair.at[tile], ready_q)
            plgpu.copy_gmem_to_smem(diagonal_in.at[b, head, c], diagonal, ready_q)

    def load_g(i):
        s, c, head, b = place(i)
        rows = pl.ds(c * CHUNK, CHUNK)
        for half in range(2):
            at = pl.ds(s * SLICE + 32 * half, 32)
            plgpu.copy_gmem_to_smem(g.at[b, rows, head, at], gate_words.at[2 + half], ready_q)

    def load_stage(i, n, slot):
        s, c, head, b = place(i)
        rows, values, at = pl.ds(c * CHUNK, CHUNK), pl.ds(n * 64, 64), pl.ds(s * SLICE, SLICE)
        bar = ready_s.at[slot]
        plgpu.copy_gmem_to_smem(d_out.at[b, rows, head, values], stages.at[slot, 0], bar)
        plgpu.copy_gmem_to_smem(v.at[b, rows, head, values], stages.at[slot, 1], bar)
        plgpu.copy_gmem_to_smem(before.at[b, head, c, values, at], stages.at[slot, 2], bar)
        plgpu.copy_gmem_to_smem(after.at[b, head, c, values, at], stages.at[slot, 3], bar)

    @pl.when(n_items > 0)
    def _():
        load_q(0)
        load_g(0)
        load_stage(0, 0, 1)
        if inline:
            load_stage(0, 1, 0)

    def store(i, tiles, gate_tiles):
        s, c, head, b = place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), s * SLICE
        columns = pl.ds(at, SLICE)
        plgpu.copy_smem_to_gmem(tiles.at[0], dq.at[b, rows, head, columns])
        plgpu.copy_smem_to_gmem(tiles.at[1], dk.at[b, rows, head, columns])
        for half in range(2):
            plgpu.copy_smem_to_gmem(
                gate_tiles.at[2 + half], dg.at[b, rows, head, pl.ds(at + 32 * half, 32)]
            )

    def item_inline(i, _):
        acc = zeros(40)
        for slot in (1, 0):
            plgpu.barrier_wait(ready_s.at[slot])
            acc = products_call()(stages.at[slot], acc)
            if slot:

                @pl.when(i > 0)
                def _():  # the results of the slice before have left q, k and g by now
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_q(i)
                    load_g(i)

        symmetric_call(scale)(pair, diagonal, acc)
        plgpu.commit_smem()  # also the warpgroup's barrier: G is complete
        plgpu.barrier_wait(ready_q)
        state = levels_call()(words, pair, diagonal)
        state, extra = states_call(scale, 2)(words, stages, state, zeros(N_EXTRA))
        fluxes = flux_call()(words)
        plgpu.commit_smem()

        @pl.when(i + 1 < n_items)
        def _():
            load_stage(i + 1, 0, 1)
            load_stage(i + 1, 1, 0)

        finish_call()(words, fluxes, state, extra)
        plgpu.commit_smem()
        store(i, words, gate_words)

    def item_streamed(i, _):
        plgpu.barrier_wait(ready_q)
        state = levels_call()(words, pair, diagonal)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left slot 0
        load_stage(i, 1, 0)

        def stage(n, carry):
            slot = 1 - n % 2
            plgpu.barrier_wait(ready_s.at[slot])
            carry = states_call(scale, 1)(words, stages.at[slot], *carry)
            plgpu.commit_smem()
            pl.when(n + 2 < n_stages)(lambda: load_stage(i, n + 2, slot))
            return tuple(carry)

        state, extra = lax.fori_loop(0, n_stages, stage, (state, zeros(N_EXTRA)))
        fluxes = flux_call()(words)
        plgpu.commit_smem()

        @pl.when(i + 1 < n_items)
        def _():
            load_q(i + 1)
            load_g(i + 1)
            load_stage(i + 1, 0, 1)

        finish_call()(stages.at[0], fluxes, state, extra)
        plgpu.commit_smem()
        store(i, stages.at[0], gate_out.at[0])

    lax.fori_loop(0, n_items, item_inline if inline else item_streamed, None)
    plgpu.wait_smem_to_gmem(0)


def chunk_gradients(q, k, log_decay, v, d_out, before, after, scale: float):
    """dq, dk [B, T, H, Dk] bf16 and dlog_decay f32 of the same shape.

    before, after: bf16 [B, H, NC, Dv, Dk], the state at every chunk's start and the gradient of
        the state at its end, transposed (``gla_scan.scan(want_borders=True)``).
    """
    b, t, h, dk = q.shape
    nc, n_slices = -(-t // CHUNK), dk // SLICE
    streamed = v.shape[-1] > 128
    n_work = nc * n_slices * h * b
    wgs = WARPGROUPS
    body = functools.partial(
        _gradients_body,
        n_slices=n_slices,
        n_heads=h,
        n_chunks=nc,
        n_stages=v.shape[-1] // 64,
        n_work=n_work,
        scale=scale,
    )

    def rows(*shape, dtype=jnp.bfloat16):
        return plgpu.SMEM((wgs, *shape), dtype, transforms=ROWS)

    products = chunk_products(d_out, v, scale) if streamed else ()
    return launch(
        body,
        (q, k, log_decay, v, d_out, before, after, *products),
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(log_decay.shape, jnp.float32),
        ),
        name="gla_chunk_gradients",
        grid=blocks_for(n_work, wgs),
        warpgroups=wgs,
        scratch=[
            plgpu.RefUnion(rows(4, CHUNK, SLICE), rows(4, CHUNK, 32, dtype=jnp.float32)),
            plgpu.RefUnion(rows(2, 4, CHUNK, 64), rows(2, 4, CHUNK, 32, dtype=jnp.float32)),
            rows(2, CHUNK, CHUNK),
            plgpu.SMEM((wgs, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=7 if streamed else 4, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=4, num_barriers=(wgs, 2)),
        ],
    )

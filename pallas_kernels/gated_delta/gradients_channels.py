"""The gated delta rule's gradients inside a chunk on Hopper, for a decay of every key channel: dq,
dk and dlog_decay from the products of ``gradients_channels_products``.

With G_i the sums of log_decay from the chunk's start, dP on and below the diagonal, dN below it,
and a, s and e what came through the states,

    dq_i = exp(G_i) a_i + sum_{j <= i} dP_ij exp(G_i - G_j) k_j
    dk_i = exp(G_i) s_i + sum_{j < i} dN_ij exp(G_i - G_j) k_j
           + exp(G_64 - G_i) e_i + sum_{l >= i} (dP_li q_l + dN_li k_l) exp(G_l - G_i)
    dlog_decay_t = exp(G_64) <S, E> + sum_j k_j e_j exp(G_64 - G_j)
           + sum_{l >= t} (q_l dq_l + k_l (first line of dk_l) - k_l (second line of dk_l))

the last sum without the diagonal, which has no decay.  That is ``gla.gradients`` with two readings
of the keys, and is done as there: level by level of a binary tree, whose factors are products of
numbers in [0, 1], with every pair entering dlog_decay's sum and leaving it as the same number.

Two workers (warpgroups) of a block, one block to an SM, each walk their own list of slices of 64
key channels:

    TMA q k g | six levels | what came through the states | sums from the end | TMA out
                                                            dP dN a s e of the next <- TMA

Floor: 30 bytes per element of q at Dk = 128, 0.47 ms at (1, 8192, 64, 128, 128).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import gradients_channels_registers as registers
from pallas_kernels.gla.channels import CHUNK, ROWS, SLICE, blocks_for, digits, worker_items
from pallas_kernels.launch import launch

WARPGROUPS = 2  # workers of a block


@plgpu.inline_mgpu(
    arg_types=(*[plgpu.RefType(ROWS)] * 3, *[plgpu.RefType()] * 2),
)
def _gradients_call(ctx, words, pairs, states, diagonal, through) -> None:
    del ctx
    registers.gradients(*map(p.shared_address, (words, pairs, states, diagonal, through)))


def _body(q, k, g, pairs_in, diagonal_in, asked, seen, keys, through_in, d_q, d_k, d_g, unions,
          pairs_all, states_all, diagonals, throughs, bar_words, bar_pairs, *, group: int,
          sizes: tuple[int, int, int, int]):  # fmt: skip
    n_slices, n_chunks, n_heads, n_rows = sizes
    wg, n_items, item_of = worker_items(n_slices * n_chunks * n_heads * n_rows, WARPGROUPS)
    words, gates = (x.at[wg] for x in unions)
    pairs, states, diagonal, through = (
        x.at[wg] for x in (pairs_all, states_all, diagonals, throughs)
    )
    words_ready, pairs_ready = bar_words.at[wg], bar_pairs.at[wg]

    def place(i):
        s, c, head, b = digits(item_of(i), n_slices, n_chunks, n_heads)
        return s, c, head, b, pl.ds(c * CHUNK, CHUNK), pl.ds(s * SLICE, SLICE)

    def gate_columns(s):
        return [pl.ds(s * SLICE + 32 * half, 32) for half in range(2)]

    def load_words(i):
        s, _, head, b, rows, at = place(i)
        for n, x in enumerate((q, k)):
            plgpu.copy_gmem_to_smem(x.at[b, rows, head // group, at], words.at[n], words_ready)
        for half, columns in enumerate(gate_columns(s)):
            to = gates.at[registers.GATES + half]
            plgpu.copy_gmem_to_smem(g.at[b, rows, head, columns], to, words_ready)

    def load_pairs(i):
        _, c, head, b, rows, at = place(i)
        for n in range(4):
            plgpu.copy_gmem_to_smem(pairs_in.at[b, head, c, n], pairs.at[n], pairs_ready)
        for n, x in enumerate((asked, seen, keys)):
            plgpu.copy_gmem_to_smem(x.at[b, head, rows, at], states.at[n], pairs_ready)
        plgpu.copy_gmem_to_smem(diagonal_in.at[b, head, c], diagonal, pairs_ready)
        plgpu.copy_gmem_to_smem(through_in.at[b, head, c, at], through, pairs_ready)

    pl.when(n_items > 0)(lambda: load_pairs(0))

    def item(i, _):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left their places
        load_words(i)
        plgpu.barrier_wait(pairs_ready)
        plgpu.barrier_wait(words_ready)
        _gradients_call(words, pairs, states, diagonal, through)
        plgpu.commit_smem()
        pl.when(i + 1 < n_items)(lambda: load_pairs(i + 1))
        s, _, head, b, rows, at = place(i)
        for n, out in enumerate((d_q, d_k)):
            plgpu.copy_smem_to_gmem(words.at[n], out.at[b, rows, head, at])
        for half, columns in enumerate(gate_columns(s)):
            source = gates.at[registers.GATES + half]
            plgpu.copy_smem_to_gmem(source, d_g.at[b, rows, head, columns])

    lax.fori_loop(0, n_items, item, None)
    plgpu.wait_smem_to_gmem(0)


def chunk_gradients(q, k, log_decay, products, through):
    """(dq, dk [B, T, H, Dk] of every value head, bf16, dlog_decay [B, T, H, Dk], f32).

    products: the first five of ``gradients_channels_products.chunk_products``; through: exp(G_64)
    <S, E>, f32 [B, H, NC, Dk].
    """
    b, t, h, dk = log_decay.shape
    n_slices, nc = dk // SLICE, -(-t // CHUNK)
    sizes = n_slices, nc, h, b
    half, n = jnp.bfloat16, WARPGROUPS
    per_head = jax.ShapeDtypeStruct(log_decay.shape, half)

    def rows(*shape, dtype=half):
        return plgpu.SMEM((n, *shape), dtype, transforms=ROWS)

    words = rows(registers.TILES, CHUNK, SLICE), rows(registers.TILES, CHUNK, 32, dtype=jnp.float32)
    return launch(
        functools.partial(_body, group=h // q.shape[2], sizes=sizes),
        (q, k, log_decay, *products, through),
        (per_head, per_head, jax.ShapeDtypeStruct(log_decay.shape, jnp.float32)),
        name="gated_delta_gradients",
        grid=blocks_for(n_slices * nc * h * b, n),
        warpgroups=n,
        scratch=[
            plgpu.RefUnion(*words),
            rows(4, CHUNK, CHUNK),
            rows(3, CHUNK, SLICE),
            plgpu.SMEM((n, CHUNK), jnp.float32),
            plgpu.SMEM((n, SLICE), jnp.float32),
            plgpu.Barrier(num_arrivals=4, num_barriers=n),
            plgpu.Barrier(num_arrivals=9, num_barriers=n),
        ],
    )

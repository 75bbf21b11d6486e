"""The gated delta rule's gradients inside a chunk on Hopper, for a decay of every key channel.

dq, dk and dlog_decay come from the products of ``gradients_channels_products``.  G_i are the sums
of log_decay from the chunk's start.  dP is on and below the diagonal, dN below it.  a, s and e are
the terms that came through the states.

    dq_i = exp(G_i) a_i + sum_{j <= i} dP_ij exp(G_i - G_j) k_j
    dk_i = exp(G_i) s_i + sum_{j < i} dN_ij exp(G_i - G_j) k_j
           + exp(G_64 - G_i) e_i + sum_{l >= i} (dP_li q_l + dN_li k_l) exp(G_l - G_i)
    dlog_decay_t = exp(G_64) <S, E> + sum_j k_j e_j exp(G_64 - G_j)
           + sum_{l >= t} (q_l dq_l + k_l (first line of dk_l) - k_l (second line of dk_l))

The last sum leaves out the diagonal, which has no decay.  That is ``gla.gradients`` with two
readings of the keys, and is done in the same way: level by level of a binary tree, whose factors
are products of numbers in [0, 1].  Every pair enters and leaves dlog_decay's sum as the same
number.

Two workers (warpgroups) of a block, one block to an SM, each walk their own list of slices of 64
key channels:

    TMA a s e | six levels    | terms through the states       | sums from the end | TMA out
                       dP dN g of the next <- TMA                  q k of the next <- TMA

Copies: each worker copies its own slices by TMA: ``load_pairs`` (g, dP, dN), ``load_words`` (q, k),
``load_states`` (a, s, e, dP's diagonal, <S, E>).  Workers share nothing.
Waits: on ``pairs_ready`` and ``words_ready`` before the levels, on ``states_ready`` before the
end.  A place is refilled behind the warpgroup's barrier after its last reading.  ``load_states``
waits until the last results have left.
Writes: TMA takes dq and dk from the states' places and dlog_decay from ``gates_out``.

Floor: 30 bytes per element of q at Dk = 128, 0.47 ms at (1, 8192, 64, 128, 128).  Result: 0.866 on
one H200.  Attempts: docs/lab/gated-delta.md.
Command: ``python -m benchmarks.kernels.gated_delta``.
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
from pallas_kernels.gated_delta.gradients_channels_products import chunk_products
from pallas_kernels.gated_delta.kernel_chunks import AroundChunks
from pallas_kernels.launch import REF, Views, inline, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    SLICE,
    blocks_for,
    bundle,
    bundle_layout,
    bundle_type,
    digits,
    unbundle,
    worker_items,
)
from pallas_kernels.recurrence.op import Heads

WARPGROUPS = 2  # workers of a block


@inline(*(plgpu.RefType(ROWS),) * 2, out=bundle_type(registers.N_STATE))
def _levels_call(words, pairs):
    return bundle(registers.levels(p.shared_address(words), p.shared_address(pairs)))


@inline(*[plgpu.RefType(ROWS)] * 3, *[REF] * 2, bundle_layout(registers.N_STATE))
def _finish_call(words, states, gates_out, diagonal, through, state) -> None:
    (state,) = unbundle(state, registers.N_STATE)
    refs = words, states, gates_out, diagonal, through
    registers.finish(*map(p.shared_address, refs), state)


class _Worker:
    """The program of a warpgroup: slices of 64 key channels of a chunk and value head."""

    def __init__(self, gmem, smem, barrier, *, group: int, sizes: tuple[int, int, int, int]):
        self.gmem, self.group = gmem, group
        self.n_slices, self.n_chunks, self.n_heads, n_rows = sizes
        n_work = self.n_slices * self.n_chunks * self.n_heads * n_rows
        own, self.n_items, self.item_of = worker_items(n_work, WARPGROUPS)
        self.words, self.gates = smem.words.words.at[own], smem.words.gates.at[own]
        self.pairs, self.states, self.gates_out, self.diagonal, self.through = (
            x.at[own]
            for x in (smem.pairs, smem.states, smem.gates_out, smem.diagonal, smem.through)
        )
        self.words_ready, self.pairs_ready, self.states_ready = (
            x.at[own] for x in (barrier.words_ready, barrier.pairs_ready, barrier.states_ready)
        )

    def run(self) -> None:
        pl.when(self.n_items > 0)(self.load_first)
        lax.fori_loop(0, self.n_items, self.item, None)
        plgpu.wait_smem_to_gmem(0)

    def place(self, i):
        """(slice, chunk, head, row, tokens, channels) of item i."""
        s, c, head, b = digits(self.item_of(i), self.n_slices, self.n_chunks, self.n_heads)
        return s, c, head, b, pl.ds(c * CHUNK, CHUNK), pl.ds(s * SLICE, SLICE)

    def gate_columns(self, s):
        return [pl.ds(s * SLICE + 32 * half, 32) for half in range(2)]

    # --- copies ---

    def load_first(self) -> None:
        self.load_pairs(0)
        self.load_words(0)

    def load_words(self, i) -> None:
        """q and k."""
        _, _, head, b, rows, at = self.place(i)
        for n, x in enumerate((self.gmem.q, self.gmem.k)):
            source = x.at[b, rows, head // self.group, at]
            plgpu.copy_gmem_to_smem(source, self.words.at[n], self.words_ready)

    def load_pairs(self, i) -> None:
        """log_decay, dP and dN."""
        gmem, (s, c, head, b, rows, _) = self.gmem, self.place(i)
        for half, columns in enumerate(self.gate_columns(s)):
            to = self.gates.at[2 + half]
            plgpu.copy_gmem_to_smem(gmem.g.at[b, rows, head, columns], to, self.pairs_ready)
        for n in range(4):
            source = gmem.pairs.at[b, head, c, n]
            plgpu.copy_gmem_to_smem(source, self.pairs.at[n], self.pairs_ready)

    def load_states(self, i) -> None:
        """a, s and e, which came through the states, dP's diagonal and <S, E>."""
        gmem, ready, (_, c, head, b, rows, at) = self.gmem, self.states_ready, self.place(i)
        for n, x in enumerate((gmem.asked, gmem.seen, gmem.keys)):
            plgpu.copy_gmem_to_smem(x.at[b, head, rows, at], self.states.at[n], ready)
        plgpu.copy_gmem_to_smem(gmem.diagonal.at[b, head, c], self.diagonal, ready)
        plgpu.copy_gmem_to_smem(gmem.through.at[b, head, c, at], self.through, ready)

    # --- computing ---

    def item(self, i, _) -> None:
        """six levels | what came through the states | sums from the end | TMA out"""
        more = i + 1 < self.n_items
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left their places
        self.load_states(i)
        plgpu.barrier_wait(self.pairs_ready)
        plgpu.barrier_wait(self.words_ready)
        state = _levels_call(self.words, self.pairs)
        plgpu.commit_smem()  # all warps have read the pairs
        pl.when(more)(lambda: self.load_pairs(i + 1))
        plgpu.barrier_wait(self.states_ready)
        outs = self.states, self.gates_out
        _finish_call(self.words, *outs, self.diagonal, self.through, state)
        plgpu.commit_smem()
        pl.when(more)(lambda: self.load_words(i + 1))
        self.store(i)

    def store(self, i) -> None:
        gmem, (s, _, head, b, rows, at) = self.gmem, self.place(i)
        for n, out in enumerate((gmem.d_q, gmem.d_k)):
            plgpu.copy_smem_to_gmem(self.states.at[n], out.at[b, rows, head, at])
        for half, columns in enumerate(self.gate_columns(s)):
            plgpu.copy_smem_to_gmem(self.gates_out.at[half], gmem.d_g.at[b, rows, head, columns])


def chunk_gradients(heads: Heads, around: AroundChunks, scale: float):
    """(dq, dk [B, T, H, 128] of every value head, dlog_decay [B, T, H, 128], dbeta [B, T, H]), for
    Dk = Dv = 128; beta may not be 0."""
    q, k, _, log_decay, beta = heads
    pairs, diagonal, asked, seen, keys, through, written = chunk_products(heads.v, around, scale)
    decays = around.prepared.decays
    through = decays * jnp.sum(through, axis=4).reshape(decays.shape)
    b, t, h, dk = log_decay.shape
    written = jnp.sum(written, axis=3).reshape(b, h, -1)[:, :, :t]
    d_beta = jnp.swapaxes(written, 1, 2) / (beta * beta)
    n_slices, nc = dk // SLICE, -(-t // CHUNK)
    sizes = n_slices, nc, h, b
    half, n = jnp.bfloat16, WARPGROUPS
    per_head = jax.ShapeDtypeStruct(log_decay.shape, half)

    def rows(*shape, dtype=half):
        return plgpu.SMEM((n, *shape), dtype, transforms=ROWS)

    gradients = launch(
        functools.partial(_Worker, group=h // q.shape[2], sizes=sizes),
        {
            "q": q,
            "k": k,
            "g": log_decay,
            "pairs": pairs,
            "diagonal": diagonal,
            "asked": asked,
            "seen": seen,
            "keys": keys,
            "through": through,
        },
        {
            "d_q": per_head,
            "d_k": per_head,
            "d_g": jax.ShapeDtypeStruct(log_decay.shape, jnp.float32),
        },
        name="gated_delta_gradients",
        grid=blocks_for(n_slices * nc * h * b, n),
        warpgroups=n,
        scratch={
            "words": Views(
                words=rows(registers.TILES, CHUNK, SLICE),
                gates=rows(registers.TILES, CHUNK, 32, dtype=jnp.float32),
            ),
            "pairs": rows(4, CHUNK, CHUNK),
            "states": rows(3, CHUNK, SLICE),
            "gates_out": rows(2, CHUNK, 32, dtype=jnp.float32),
            "diagonal": plgpu.SMEM((n, CHUNK), jnp.float32),
            "through": plgpu.SMEM((n, SLICE), jnp.float32),
            "words_ready": plgpu.Barrier(num_arrivals=2, num_barriers=n),
            "pairs_ready": plgpu.Barrier(num_arrivals=6, num_barriers=n),
            "states_ready": plgpu.Barrier(num_arrivals=5, num_barriers=n),
        },
    )
    return *gradients, d_beta

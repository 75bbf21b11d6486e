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
are products of numbers in [0, 1].  Gating multiplies in float32 and rounds once.  Every pair enters
and leaves dlog_decay's sum as the same number.

Two workers (warpgroups) of a block, one block to an SM, each walk their own list of slices of 64
key channels:

    TMA a s e | six levels    | terms through the states       | sums from the end | TMA out
                       dP dN g of the next <- TMA                  q k of the next <- TMA

Copies: each worker copies its own slices by TMA: ``load_pairs`` (g, dP, dN), ``load_words`` (q, k),
``load_states`` (a, s, e, dP's diagonal, <S, E>).  Workers share nothing.
Waits: on ``pairs_ready`` and ``words_ready`` before the levels, on ``states_ready`` before the
end.  A place is refilled behind the warpgroup's barrier after its last reading.  ``load_states``
waits until the last results have left.
Inside a worker a warp has its own channels, and all warps read dP and dN.
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
from pallas_kernels.gated_delta.gradients_channels_products import chunk_products
from pallas_kernels.gated_delta.kernel_chunks import AroundChunks
from pallas_kernels.launch import REF, Views, inline, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    SLICE,
    TILE,
    ChannelLane,
    blocks_for,
    bundle,
    bundle_layout,
    bundle_type,
    digits,
    unbundle,
    worker_items,
)
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.recurrence.slices import K, Levels, Q, flat, load_block, nested, store_gradients
from pallas_kernels.rows.fused_parts import floats

TILES = 4  # of the tokens: q, k, two of gates
ASKED, SEEN, KEYS = range(3)  # tiles of what came through the states
N_STATE = 5 * 32 + 1


def _gated(word, factors):
    return p.pack(*[x * f for x, f in zip(floats([word]), factors, strict=True)])


class _Levels(Levels):
    """ys: y = q p and y' = k p on rows of second halves, both k t on rows of first halves.

    Z is (dP + dP^T) y and (dN + dN^T) y' on a level's pairs.  The share of y Z in log_decay enters
    at a pair's second row and leaves at its first, from the same y.
    """

    def run(self) -> None:
        self.ys = [[[None] * 8, [None] * 8] for _ in range(2)]
        super().run()

    def state(self) -> list:
        """``N_STATE`` registers."""
        parts = self.d_q, self.d_k, self.flux, self.up, self.down
        return [*(x for part in parts for x in flat(part)), p.from_bits(self.gone)]

    def build(self, b: int) -> None:
        """y, y' and factors of tokens 16b .. 16b + 15."""
        asks = [self.level < 8 or self.is_second(m) for m in (2 * b, 2 * b + 1)]
        q = load_block(self.columns, Q, b) if any(asks) else None
        k = load_block(self.columns, K, b)
        for half in range(2):
            for h in range(2):
                query = q[h][half] if asks[half] else None
                self.build_pair(h, 2 * b + half, query, k[h][half])

    def build_pair(self, h: int, m: int, query, key) -> None:
        """Two tokens of a channel; query: None on rows of a first half."""
        up, down, bit = self.up[h][m], self.down[h][m], self.bit
        if self.level == 1:
            f = [p.cf(1.0), up[1]]
        elif bit is not None:
            f = [p.where(bit, x, y) for x, y in zip(up, down, strict=True)]
        else:
            f = down if query is None else up
        self.factor[h][m] = f
        self.ys[1][h][m] = _gated(key, f)
        if query is None:
            self.ys[0][h][m] = self.ys[1][h][m]
        elif self.level == 1:  # a pair of tokens: k, q
            mixed = (key & 0xFFFF) | (query & -65536)
            self.ys[0][h][m] = _gated(mixed, f)
        elif bit is not None:
            self.ys[0][h][m] = _gated(p.where(bit, query, key), f)
        else:
            self.ys[0][h][m] = _gated(query, f)

    def apply(self, b: int) -> None:
        z = [self.products(y, b, 2 * n * TILE) for n, y in enumerate(self.ys)]
        for half in range(2):
            for h in range(2):
                self.apply_pair(h, 2 * b + half, *(z[n][h][half] for n in range(2)))

    def apply_pair(self, h: int, m: int, asked, seen) -> None:
        y = [floats([self.ys[n][h][m]]) for n in range(2)]
        for e in range(2):
            values = self.factor[h][m][e], asked[e], seen[e], y[0][e], y[1][e]
            if self.bit is not None:
                self.add_either(h, m, e, *values)
            elif e if self.level == 1 else self.is_second(m):
                self.add_second(h, m, e, *values)
            else:
                self.add_first(h, m, e, *values)

    def add_either(self, h: int, m: int, e: int, f, asked, seen, y_q, y_k) -> None:
        """Add the terms of a query or a key row; the lane's bit selects the half."""
        d_q, d_k, flux, bit = self.d_q[h][m], self.d_k[h][m], self.flux[h][m], self.bit
        both = asked + seen
        d_q[e] = d_q[e] + p.where(bit, f * asked, 0.0)
        d_k[e] = d_k[e] + f * p.where(bit, seen, both)
        signed = p.where(bit, asked, -both)
        flux[e] = p.fma(y_q, signed, flux[e])
        signed = p.where(bit, seen, 0.0)
        flux[e] = p.fma(y_k, signed, flux[e])

    def add_second(self, h: int, m: int, e: int, f, asked, seen, y_q, y_k) -> None:
        d_q, d_k, flux = self.d_q[h][m], self.d_k[h][m], self.flux[h][m]
        d_q[e] = p.fma(f, asked, d_q[e])
        d_k[e] = p.fma(f, seen, d_k[e])
        flux[e] = p.fma(y_q, asked, flux[e])
        flux[e] = p.fma(y_k, seen, flux[e])

    def add_first(self, h: int, m: int, e: int, f, asked, seen, y, _) -> None:
        d_k, flux = self.d_k[h][m], self.flux[h][m]
        both = asked + seen
        d_k[e] = p.fma(f, both, d_k[e])
        flux[e] = p.fma(-y, both, flux[e])


def levels(words, pairs) -> list:
    """Return ``N_STATE`` registers: the tree's part of dq and dk, its share in log_decay, and the
    decays from the chunk's start and to its end.

    words: address of the tiles q, k, log_decay (two).  pairs: of the four tiles of dP and dN, as
    ``gradients_channels_products`` leaves them.
    """
    found = _Levels(ChannelLane(), words, pairs)
    found.run()
    return found.state()


def finish(words, states, gates_out, diagonal, through, state) -> None:
    """Write dq and dk to the tiles ``ASKED`` and ``SEEN``, and dlog_decay to two other tiles.

    states: address of the tiles ``ASKED``, ``SEEN``, ``KEYS``.  diagonal: address of dP's diagonal,
    64 floats.  through: address of exp(G_64) <S, E>, 64 floats.  state: the result of ``levels``.
    """
    lane = ChannelLane()
    columns, moved = lane.column_matrices(words), lane.column_matrices(states)
    d_q, d_k, flux, up, down = (nested(state[32 * n : 32 * n + 32]) for n in range(5))
    sums = _add_rest(lane, columns, moved, diagonal, up, down, flux, d_q, d_k)
    channel = through + (((lane.warp << 4) + lane.g) << 2)

    def start(h):
        return p.over_lanes(sums[h], (1, 2)) + p.load_float(channel, 32 * h)

    gates, gone = lane.gate_words(gates_out), p.bits(state[-1])
    store_gradients(lane, moved, gates, 0, gone, start, flux, d_q, d_k)


def _add_rest(lane, columns, moved, diagonal, from_start, to_end, flux, d_q, d_k):
    """Add the terms through the states, and the diagonal.

    Returns the sums over the thread's tokens of k e, decayed to the chunk's end, by h.
    """
    sums = [p.cf(0.0)] * 2
    start = diagonal + (lane.c << 3)
    for b in range(4):
        q, k = (load_block(columns, tile, b) for tile in (Q, K))
        parts = [load_block(moved, TILE * tile, b) for tile in (ASKED, SEEN, KEYS)]
        for half in range(2):
            m = 2 * b + half
            weight = p.load_shared(start, 2, 32 * m, "f32")
            for h in range(2):
                qs, ks = floats([q[h][half]]), floats([k[h][half]])
                asked, seen, keys = (floats([x[h][half]]) for x in parts)
                for e in range(2):
                    up, down = from_start[h][m][e], to_end[h][m][e]
                    asked_e, seen_e = up * asked[e], up * seen[e]
                    keys_e = down * keys[e]
                    x = d_q[h][m][e] + asked_e
                    d_q[h][m][e] = p.fma(weight[e], ks[e], x)
                    x = d_k[h][m][e] + (seen_e + keys_e)
                    d_k[h][m][e] = p.fma(weight[e], qs[e], x)
                    x = p.fma(qs[e], asked_e, flux[h][m][e])
                    flux[h][m][e] = p.fma(ks[e], seen_e - keys_e, x)
                    sums[h] = p.fma(ks[e], keys_e, sums[h])
    return sums


# --- the kernel -----------------------------------------------------------------------------------


WARPGROUPS = 2  # workers of a block


@inline(*(plgpu.RefType(ROWS),) * 2, out=bundle_type(N_STATE))
def _levels_call(words, pairs):
    return bundle(levels(p.shared_address(words), p.shared_address(pairs)))


@inline(*[plgpu.RefType(ROWS)] * 3, *[REF] * 2, bundle_layout(N_STATE))
def _finish_call(words, states, gates_out, diagonal, through, state) -> None:
    (state,) = unbundle(state, N_STATE)
    refs = words, states, gates_out, diagonal, through
    finish(*map(p.shared_address, refs), state)


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
                words=rows(TILES, CHUNK, SLICE),
                gates=rows(TILES, CHUNK, 32, dtype=jnp.float32),
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

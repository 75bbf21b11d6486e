"""The gated delta rule's work inside a chunk on Hopper: ``kernel_scan``'s operands, all chunks at
once.

With G the sums of log_decay from a chunk's start and D_ij = exp(G_i - G_j) for j <= i:

    A  = beta_i (k_i . k_j) D_ij below the diagonal         X = (I + A)^-1 diag(beta)
    M  = (scale q_i . k_j D_ij, j <= i) X                   [64, 64]
    K' = X^T diag(exp(G_64 - G)) K                          [64, Dk]

From a chunk's first state S and R = V - diag(exp(G)) K S they give

    o = scale diag(exp(G)) Q S + M R                        S <- exp(G_64) S + K'^T R

This is the WY form with its inverse taken to the left.  fla multiplies X into V and K.  That leaves
two products with the tokens between a state and the next. It also rounds u = X R, whose errors add
up where keys are parallel.  Here M and K' are formed once, from operands of 16 bits and more, and
their entries are small where keys are parallel.

One block of one warpgroup per chunk and value head, several to an SM, one after the other:

    load: TMA q k, sums of log_decay | products: k k^T, q k^T | A, P | X (``kernel_inverse``)
    | scores, sums: M, K' | store: TMA out

Copies: the warpgroup copies q and k of its chunk by TMA (``load``).  Meanwhile its first warp loads
log_decay and beta, and sums log_decay (``chunk_vectors``).  The vectors lie in shared memory.
Waits: on ``ready`` for the copies, once; the warpgroup's barriers order the steps between.  Saved
inverses must have left A's place before M^T takes it.  Blocks wait for no other block.
Writes: TMA takes M^T from A's place, K' from q's, and the inverses if they are saved.  Warp 0
stores the decays from registers.

Floor: 7 bytes per element of q at Dk = 128 and as many key as value heads (4 in, 3 out), 0.109 ms
at (8, 4096, 16, 16, 128, 128).  Result: 0.144 on one H200.  Attempts: docs/lab/gated-delta.md.
Command: ``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.jax_internals import ir, llvm
from pallas_kernels.launch import REF, inline, launch
from pallas_kernels.recurrence.channels import (
    CHUNK,
    ROWS,
    TILE,
    float_pairs,
    half_pairs,
    tokens,
    wgmma_array,
)
from pallas_kernels.recurrence.op import Heads

PART = 64  # key channels of a tile
_WGMMA = plgpu.Layout.WGMMA
PARTS = (plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16, layout=_WGMMA),) * 2


def vectors_call(scale: float, pitch: int, want_out: bool = True):
    @inline(*[REF] * 4, plgpu.Layout.WG_SPLAT((128,)))
    def call(scratch, decays, betas, out, limit):
        inverse.chunk_vectors(
            p.shared_address(scratch),
            p.address(decays),
            p.address(betas),
            limit.registers.flat[0],
            pitch,
            p.address(out) if want_out else None,
            scale,
        )
        p.warpgroup_barrier()

    return call


def pairs(array):
    """The registers of an array of 64 rows as ``x[tile][half]``, pairs."""
    flat = list(array.registers.reshape(-1))
    return [
        [
            [llvm.extractelement(flat[2 * tile + half], p.ci(e)) for e in range(2)]
            for half in range(2)
        ]
        for tile in range(len(flat) // 2)
    ]


def array(parts):
    """``x[tile][half]``, pairs of floats, as a [64, 64] array."""
    pairs = [pair for tile in parts for pair in tile]
    return wgmma_array((CHUNK, CHUNK), p.f32(), float_pairs(pairs))


def _inverse_call(scale: float, save: bool):
    """(k k^T, q k^T) -> ((I + A)^-1)^T; overwrites q by P's high and low parts, and leaves what it
    returns in the tiles if it is to be saved."""

    @inline(REF, plgpu.RefType(ROWS), plgpu.RefType(ROWS), _WGMMA, _WGMMA, out=PARTS)
    def call(scratch_ref, q_ref, tiles_ref, kk, qk):
        scratch, tiles = p.shared_address(scratch_ref), p.shared_address(tiles_ref)
        rows = inverse.InverseRows()
        a, scores = inverse.coefficients(rows, scratch, pairs(kk), pairs(qk), scale)
        p.warpgroup_barrier()  # all warps' products have read q
        inverse.store_split(rows, p.shared_address(q_ref), scores)
        x = inverse.inverse_parts(rows, tiles, scratch, a)
        if save:
            p.warpgroup_barrier()  # all warps have read A
            for n in range(2):
                words = [[both[n] for both in tile] for tile in x]
                rows.store_tile(tiles + n * TILE, words)
        return parts_array(x)

    return call


def bf16_array(words):
    """Words of two bf16 in the order of ``pairs`` as a [64, 8 * tiles] array."""
    return wgmma_array((CHUNK, 4 * len(words)), ir.BF16Type.get(), half_pairs(words))


def parts_array(x):
    """``x[tile][half]``, words of high and of low parts, as two arrays."""
    words = [both for tile in x for both in tile]
    return tuple(bf16_array(list(part)) for part in zip(*words, strict=True))


@inline(_WGMMA, out=PARTS)
def high_low(x):
    """A [64, 64] array as two bf16 parts.  By instructions that convert two floats: what the
    compiler makes of ``astype`` converts the low part float by float, at an eighth of the rate."""
    return parts_array([[inverse.split(pair) for pair in tile] for tile in pairs(x)])


class _Chunk:
    """The program of a block, one warpgroup: a chunk of a value head."""

    def __init__(self, gmem, smem, barrier, *, length: int, scale: float, group: int, parts: int):
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.scale, self.group = scale, group
        self.parts = [pl.ds(part * PART, PART) for part in range(parts)]  # of the key channels
        self.head, self.chunk, self.row = (lax.axis_index(x) for x in ("head", "chunk", "row"))
        self.rows = pl.ds(self.chunk * CHUNK, CHUNK)
        if gmem.lengths is not None:
            length = jnp.minimum(gmem.lengths[self.row], length)
        self.limit = length - self.chunk * CHUNK  # tokens of the row from here on

    def run(self) -> None:
        if self.gmem.lengths is not None:
            pl.when(self.limit > 0)(self.compute)
        else:
            self.compute()

    def compute(self) -> None:
        """k k^T, q k^T | X | M, K' | TMA out"""
        gmem, smem = self.gmem, self.smem
        self.load()
        if gmem.lengths is not None:
            pl.when(self.limit < CHUNK)(self.clear_keys)
        square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
        kk, qk = pl.run_scoped(self.products, square, square)
        save = gmem.inverses is not None
        invert = _inverse_call(self.scale, save)
        high, low = invert(smem.scratch, smem.q.rows, smem.a.rows, kk, qk)
        plgpu.commit_smem()
        if save:
            for n in range(2):
                to = gmem.inverses.at[self.row, self.head, n, self.rows]
                plgpu.copy_smem_to_gmem(smem.a.rows.at[n], to)
        scored, *moved = pl.run_scoped(functools.partial(self.scores, high, low), square)
        betas = self.vector(inverse.BETA, 0)
        if save:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.a.tiles[0] = (scored * betas).astype(gmem.q.dtype)
        plgpu.commit_smem()  # and now P
        for part in range(len(self.parts)):
            x = pl.run_scoped(functools.partial(self.sums, moved, part), square)
            smem.q.tiles[part] = (x * betas).astype(gmem.q.dtype)
        plgpu.commit_smem()
        self.store()

    def load(self) -> None:
        """q and k, and the sums of log_decay."""
        gmem, smem, ready = self.gmem, self.smem, self.barrier.ready
        b, head = self.row, self.head
        for part, at in enumerate(self.parts):
            for x, to in ((gmem.q, smem.q), (gmem.k, smem.k)):
                source = x.at[b, self.rows, head // self.group, at]
                plgpu.copy_gmem_to_smem(source, to.rows.at[part], ready)
        vectors_call(self.scale, 4 * gmem.g.shape[-1])(
            smem.scratch,
            gmem.g.at[b, self.rows, head],
            gmem.beta.at[b, self.rows, head],
            gmem.decays.at[b, head, self.chunk],
            jnp.full((128,), self.limit, jnp.int32),
        )
        plgpu.barrier_wait(ready)

    def clear_keys(self) -> None:
        """Zeros for the keys past the row's end."""
        keys = self.smem.k.tiles
        for part in range(len(self.parts)):
            tile = plgpu.load(keys.at[part], layout=_WGMMA)
            token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, PART), 0, layout=_WGMMA)
            keys[part] = jnp.where(token < self.limit, tile, jnp.zeros_like(tile))
        plgpu.commit_smem()

    def products(self, kk, qk):
        """k k^T, q k^T"""
        keys = self.smem.k.tiles
        for acc, left in ((kk, keys), (qk, self.smem.q.tiles)):
            for part in range(len(self.parts)):
                plgpu.wgmma(acc, left.at[part], keys.at[part].transpose((1, 0)))
        return kk[...], qk[...]

    def vector(self, at: int, axis: int):
        """A chunk's vector over rows (axis 0) or columns (1) of [64, 64]."""
        place = self.smem.scratch.at[pl.ds(at // 4, CHUNK)]
        x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(x, (CHUNK, CHUNK), [axis])

    def scores(self, high, low, acc):
        """M^T, and the two parts of X^T diag(exp(G_64 - G)), before beta."""
        for left, n in ((high, 0), (high, 1), (low, 0)):
            plgpu.wgmma(acc, left, self.smem.q.tiles.at[n].transpose((1, 0)))
        x = high.astype(jnp.float32) + low.astype(jnp.float32)
        return acc[...], *high_low(x * self.vector(inverse.TO_END, 1))

    def sums(self, moved, part: int, acc):
        """K' of some key channels, before beta."""
        for left in moved:
            plgpu.wgmma(acc, left, self.smem.k.tiles.at[part])
        return acc[...]

    def store(self) -> None:
        gmem, smem, at = self.gmem, self.smem, (self.row, self.head)
        plgpu.copy_smem_to_gmem(smem.a.rows.at[0], gmem.mixing.at[*at, self.rows])
        for part, columns in enumerate(self.parts):
            to = gmem.keys.at[*at, self.rows, columns]
            plgpu.copy_smem_to_gmem(smem.q.rows.at[part], to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class Prepared(NamedTuple):
    """The operands of ``kernel_scan.scan``, and of the reverse scan.

    q, k: those of the call, ``[B, T, Hk, Dk]``; by channel Q and K from the chunk's start,
    ``[B, T, H, Dk]``.  keys: K' ``[B, H, NC*64, Dk]``.  mixing: M^T ``[B, H, NC*64, 64]``.  All
    are bfloat16.  decays: float32 ``[B, H, NC, 2, 64]``, exp(G) and scale * exp(G); by channel
    exp(G_64), ``[B, H, NC, Dk]``.
    """

    q: jax.Array
    k: jax.Array
    keys: jax.Array
    mixing: jax.Array
    decays: jax.Array

    @property
    def by_channel(self) -> bool:
        return self.decays.ndim == 4


class AroundChunks(NamedTuple):
    """What the gradients inside the chunks take from the passes over them.

    inverses: of ``chunks``.  d_out: of o.  d_v, ends: of ``gradients_kernel_scan.reverse_scan``.
    states, remainders: the borders of ``kernel_scan.scan``.
    """

    prepared: Prepared
    inverses: jax.Array
    d_out: jax.Array
    d_v: jax.Array
    states: jax.Array
    remainders: jax.Array
    ends: jax.Array


def chunks(
    heads: Heads, lengths: jax.Array | None, scale: float, save: bool = False
) -> tuple[Prepared, jax.Array | None]:
    """Compute the scans' operands for a decay a head.

    lengths: int32 [B]; chunks that start at or after a row's length are not written.

    Returns them and, with ``save``, (I + A)^-1, transposed, in two bfloat16 parts, [B, H, 2, NC*64,
    64].
    """
    q, k, _, log_decay, beta = heads
    b, t, hk, dk = q.shape
    h = beta.shape[-1]
    nc, parts = -(-t // CHUNK), dk // PART
    options = {"length": t, "scale": scale, "group": h // hk, "parts": parts}

    spec, half = jax.ShapeDtypeStruct, jnp.bfloat16
    *prepared, inverses = launch(
        functools.partial(_Chunk, **options),
        {"q": q, "k": k, "g": log_decay, "beta": beta, "lengths": lengths},
        {
            "keys": spec((b, h, nc * CHUNK, dk), half),
            "mixing": spec((b, h, nc * CHUNK, CHUNK), half),
            "decays": spec((b, h, nc, 2, CHUNK), jnp.float32),
            "inverses": spec((b, h, 2, nc * CHUNK, CHUNK), half) if save else None,
        },
        name="gated_delta_chunks",
        grid={"head": h, "chunk": nc, "row": b},
        scratch={
            "q": tokens(max(parts, 2), CHUNK, PART),
            "k": tokens(parts, CHUNK, PART),
            "a": tokens(2, CHUNK, PART),
            "scratch": inverse.WORDS,
            "ready": plgpu.Barrier(num_arrivals=2 * parts),
        },
    )
    return Prepared(q, k, *prepared), inverses

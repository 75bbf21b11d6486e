"""Products for the gated delta rule's gradients inside a chunk on Hopper, a decay every key
channel.

These are products of whole matrices, before ``gradients_channels`` multiplies decays in.  Tokens
write U = X R with R = V - K S.  With U, the delta rule is two of GLA's readings of the same decayed
sum of k_j u_j^T.  One reading is by q, and its output has the gradient do.  The other is by k,
strictly before the token; its output is taken off the value and has -dv.  So no gradient of X is
needed:

    dP = scale do U^T, with the diagonal    dN = -dv U^T, below it    dbeta_i = u_i dv_i / beta_i^2
    scale do S^T, -dv S^T of rows i         U E^T of rows j           <S, E> of a key channel

u_i and dv_i both have beta_i as a factor, and dbeta divides both by it before they meet (``kernel``
keeps beta off zero).  X, and R before X, have two bf16 parts.

Two workers of a block, one block to an SM, each walk their own list of chunks and value heads.  A
worker is two warpgroups (four in all keep the compiler to 128 registers).  A warpgroup has half of
the value channels up to U, then half of the key channels, and dP or dN:

    TMA V K S X do dv | form_writes: R | U, dbeta | TMA E | through_states: do S^T, dv S^T
    | S E, U E^T -> TMA | form_pairs: dP, dN -> TMA

Copies: of a worker's two warpgroups the first copies for both by TMA: ``load`` (V, K, do, dv, X, S)
at the item's start, ``load_ends`` (E) when X and K are free.
Waits: both wait on ``ready`` and on ``ended``.  They join at ``met``: before R replaces V, when U
is there, when S and E are read, and when all results have left.
Writes: each warpgroup stores by TMA what it computed; the first stores dP's diagonal.  Sums of S E
leave from registers.

Floor: 224 KB per chunk and head, 0.43 ms at (1, 8192, 64, 128, 128).  Result: 0.632 on one H200.
Attempts: docs/lab/gated-delta.md.  Command: ``python -m benchmarks.kernels.gated_delta``.
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
from pallas_kernels.gated_delta import gradients_kernel_sums as sums
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta.kernel_chunks import PART, AroundChunks, high_low, pairs
from pallas_kernels.launch import REF, Views, inline, launch
from pallas_kernels.recurrence.channels import (
    BF16_TILE,
    CHUNK,
    ROWS,
    TILE,
    ThreadPlace,
    blocks_for,
    digits,
)

CHANNELS = 128  # value channels of a head, and key channels
_WGMMA = plgpu.Layout.WGMMA
# Tiles, by halves of the channels; those of S^T and E^T by value and key channels.  On one line,
# the names on the right reuse the place of the names before them.
_V = _R = _U = 0
_K = _R_LOW = 2
_X = 4
_S = 6
_O, _DV = 10, 12
_E = _K  # and those of X
_TILES = 14
_HALVES = 0xFFFF, 0xFFFF0000  # of a word of two columns


def _product(*steps):
    """[64, 64]: the sum of products (left, right)."""

    def run(acc):
        for left, right in steps:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((CHUNK, CHUNK), jnp.float32))


def _words(array):
    """A bf16 [64, 64] array's pairs as ``x[tile][half]``."""
    flat = [mgpu.utils.bitcast(x, p.i32()) for x in array.registers.reshape(-1)]
    return [flat[2 * tile : 2 * tile + 2] for tile in range(8)]


def _diagonal(out, x) -> None:
    """The diagonal of ``x[tile][half]``, pairs of floats, as 64 floats in shared memory."""
    rows = inverse.InverseRows()
    at = out + (rows.first << 2)
    for half in range(2):
        for e in range(2):
            value = inverse._of_warp(rows, [x[2 * w + half][half][e] for w in range(4)])
            p.when(
                p.equal(rows.g, (rows.c << 1) + e),
                lambda value=value, half=half: p.store_shared(at, [value], 32 * half),
            )


@inline(REF, _WGMMA)
def _diagonal_call(out, x) -> None:
    _diagonal(p.shared_address(out), pairs(x))


def _symmetric(tiles, lower, upper) -> None:
    """Store G + G^T without a diagonal, from the words of G and of G^T below the diagonal.

    The layout is that of ``gla.products``: a second tile has the pairs of the levels 1 to 8 of the
    16 x 16 blocks on the diagonal.
    """
    symmetric = _Symmetric(lower, upper)
    symmetric.rows.store_tile(tiles, symmetric.whole())
    levels = symmetric.levels()
    symmetric.rows.store_tile(tiles + TILE, levels)


class _Symmetric:
    """Words of two columns each, [tile of 8 columns][half of 16 rows]."""

    def __init__(self, lower, upper):
        self.rows, self.zero = inverse.InverseRows(), p.ci(0)
        self.lower, self.upper = lower, upper

    def whole(self) -> list:
        """G + G^T."""
        return [
            [
                self.merged(
                    self.rows.first + 8 * half, tile, self.lower[tile][half], self.upper[tile][half]
                )
                for half in range(2)
            ]
            for tile in range(8)
        ]

    def levels(self) -> list:
        """The pairs of the levels 1 to 8, side by side, of the 16 x 16 block on the diagonal."""
        levels = [[None, None] for _ in range(8)]
        for tile in range(2):
            for half in range(2):
                row = self.rows.g + 8 * half
                x, y = (
                    inverse._of_warp(self.rows, [part[2 * w + tile][half] for w in range(4)])
                    for part in (self.lower, self.upper)
                )
                both = self.merged(row, tile, x, y)
                for n in range(4):
                    levels[2 * n + tile][half] = self.met(row, tile, n, both)
        return levels

    def column(self, tile: int, e: int):
        return (self.rows.c << 1) + (8 * tile + e)

    def merged(self, row, tile: int, x, y):
        """x below the diagonal, y above it, and zero on it."""
        words = []
        for e in range(2):
            j = self.column(tile, e)
            above = p.where(p.equal(j, row), self.zero, y)
            words.append(p.where(j < row, x, above) & _HALVES[e])
        return words[0] | words[1]

    def met(self, row, tile: int, n: int, both):
        """``both`` where a row and a column meet on level 2^n, else zero."""
        words = []
        for e in range(2):
            differ = row ^ self.column(tile, e)
            word = p.where(p.equal(differ >> n, 1), both, self.zero)
            words.append(word & _HALVES[e])
        return words[0] | words[1]


@inline(plgpu.RefType(ROWS), _WGMMA, _WGMMA)
def _symmetric_call(tiles, lower, upper) -> None:
    _symmetric(p.shared_address(tiles), _words(lower), _words(upper))


def _sum_states(tiles, out) -> None:
    """Sums over the value channels, a quarter of these a warp, of S E of 64 key channels.  tiles:
    address of the first of the warpgroup's."""
    place, total = ThreadPlace(), [p.cf(0.0)] * 8
    row, chunk = place.lane >> 3, place.lane & 7  # of four, of eight
    start = tiles + (place.warp << 11) + (row << 7)
    both = [start + ((chunk ^ (row + 4 * odd)) << 4) for odd in range(2)]
    for tile in (0, 2):
        for r in range(4):
            words = [p.load_shared(both[r % 2], 4, TILE * (at + tile) + 512 * r) for at in (_S, _E)]
            state, end = ([f(x) for x in four for f in (p.widen, p.widen_high)] for four in words)
            total = [p.fma(x, y, z) for x, y, z in zip(state, end, total, strict=True)]
    for distance in (8, 16):
        total = [x + p.shuffle_xor(x, distance) for x in total]
    to = p.offset(out, (place.warp << 3) + chunk, 32)

    p.when(row < 1, lambda: p.store_global(to, total))


@inline(plgpu.RefType(ROWS), REF)
def _sum_states_call(tiles, out) -> None:
    _sum_states(p.shared_address(tiles), p.address(out))


class _Worker:
    """The program of a warpgroup, one of the two that share chunks and value heads.

    half: which of the two.  It has half of the value channels up to U, then half of the key
    channels, and dP (0) or dN (1).
    """

    def __init__(self, gmem, smem, barrier, *, scale: float, sizes: tuple[int, int, int]):
        self.gmem, self.smem, self.scale = gmem, smem, scale
        self.n_heads, self.n_chunks, n_rows = sizes
        worker, self.half = lax.axis_index("warpgroup") // 2, lax.axis_index("warpgroup") % 2
        n_work = self.n_heads * self.n_chunks * n_rows
        self.stride, self.worker = 2 * blocks_for(n_work, 2), worker
        self.first = 2 * lax.axis_index("block") + worker
        self.diagonal, self.table = smem.diagonals.at[worker], smem.tables.at[worker]
        self.ready, self.ended, self.met = (
            x.at[worker] for x in (barrier.ready, barrier.ended, barrier.met)
        )
        self.channels = [pl.ds(PART * n, PART) for n in range(2)]
        self.n_work = n_work

    def run(self) -> None:
        n_items = (self.n_work - self.first + self.stride - 1) // self.stride
        lax.fori_loop(0, n_items, self.item, None)
        plgpu.wait_smem_to_gmem(0)

    def meet(self) -> None:
        """A barrier of the worker's two warpgroups."""
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def place(self, i):
        """(head, chunk, row, tokens) of item i."""
        head, c, b = digits(self.first + i * self.stride, self.n_heads, self.n_chunks)
        return head, c, b, pl.ds(c * CHUNK, CHUNK)

    # --- copies ---

    def load(self, i, rows_of) -> None:
        """V, K, do, dv, X and S."""
        gmem, (head, c, b, rows) = self.gmem, self.place(i)
        for n, at in enumerate(self.channels):
            for x, to in ((gmem.v, _V), (gmem.k, _K), (gmem.d_out, _O), (gmem.d_v, _DV)):
                plgpu.copy_gmem_to_smem(x.at[b, rows, head, at], rows_of.at[to + n], self.ready)
            source = gmem.writers.at[b, head, n, rows]
            plgpu.copy_gmem_to_smem(source, rows_of.at[_X + n], self.ready)
            for m, columns in enumerate(self.channels):
                source = gmem.states.at[b, head, c, at, columns]
                plgpu.copy_gmem_to_smem(source, rows_of.at[_S + 2 * n + m], self.ready)

    def load_ends(self, i, rows_of) -> None:
        """E."""
        head, c, b, _ = self.place(i)
        for n, at in enumerate(self.channels):
            for m, columns in enumerate(self.channels):
                source = self.gmem.ends.at[b, head, c, at, columns]
                plgpu.copy_gmem_to_smem(source, rows_of.at[_E + 2 * n + m], self.ended)

    # --- computing ---

    def item(self, i, _) -> None:
        at = self.place(i)
        # Zero, which the compiler does not know: it would carry every address through the loop.
        slot = self.worker + lax.shift_right_logical(i, 30)
        rows_of, tiles_of = (x.at[slot] for x in (self.smem.tiles.rows, self.smem.tiles.tiles))
        pl.when(self.half == 0)(lambda: self.load(i, rows_of))
        plgpu.barrier_wait(self.ready)
        self.form_writes(tiles_of)
        pl.when(self.half == 0)(lambda: self.load_ends(i, rows_of))
        self.through_states(at, rows_of, tiles_of)
        self.form_pairs(at, rows_of, tiles_of)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.meet()  # all results have left

    def form_writes(self, tiles_of) -> None:
        """R, then U and dbeta's sums, of half of the value channels."""
        half, tile, flipped = self.half, *_readers(tiles_of)
        seen = _product(*[(tile(_K + n), flipped(_S + 2 * half + n)) for n in range(2)])
        rest = plgpu.load(tile(_V + half), layout=_WGMMA).astype(jnp.float32) - seen
        self.meet()  # K is read
        tiles_of[_R + half], tiles_of[_R_LOW + half] = high_low(rest)
        plgpu.commit_smem()
        factors = ((_X, _R), (_X, _R_LOW), (_X + 1, _R))
        writes = _product(*[(flipped(x), tile(r + half)) for x, r in factors])
        given = plgpu.load(tile(_DV + half), layout=_WGMMA).astype(jnp.float32)
        sums.sum_rows(self.table.at[half], writes * given)
        plgpu.commit_smem()  # R is read
        tiles_of[_U + half] = writes.astype(jnp.bfloat16)
        plgpu.commit_smem()
        self.meet()  # U is there; X and R's low part are free

    def through_states(self, at, rows_of, tiles_of) -> None:
        """do S^T, dv S^T, U E^T and <S, E> of half of the key channels."""
        gmem, half, (tile, _), (head, c, b, rows) = self.gmem, self.half, _readers(tiles_of), at
        asked = _product(*[(tile(_O + n), tile(_S + 2 * n + half)) for n in range(2)])
        asked = (asked * self.scale).astype(jnp.bfloat16)
        seen = _product(*[(tile(_DV + n), tile(_S + 2 * n + half)) for n in range(2)])
        seen = (-seen).astype(jnp.bfloat16)
        plgpu.barrier_wait(self.ended)
        keys = _product(*[(tile(_U + n), tile(_E + 2 * n + half)) for n in range(2)])
        keys = keys.astype(jnp.bfloat16)
        _sum_states_call(rows_of.at[half], gmem.state_sums.at[b, head, c, half])
        self.meet()  # S and E are read
        places = _S, _S + 2, _E
        for x, to in zip((asked, seen, keys), places, strict=True):
            tiles_of[to + half] = x
        plgpu.commit_smem()
        channels = pl.ds(PART * half, PART)
        for out, to in zip((gmem.asked, gmem.seen, gmem.keys), places, strict=True):
            plgpu.copy_smem_to_gmem(rows_of.at[to + half], out.at[b, head, rows, channels])
        plgpu.copy_smem_to_gmem(self.table.at[half], gmem.beta_sums.at[b, head, c, half])

    def form_pairs(self, at, rows_of, tiles_of) -> None:
        """dP or dN, as ``_symmetric`` has them, and dP's diagonal."""
        gmem, half, (tile, flipped) = self.gmem, self.half, _readers(tiles_of)
        head, c, b, _ = at
        given, factor = _O + 2 * half, jnp.where(half == 0, self.scale, -1.0)
        lower = _product(*[(tile(given + m), flipped(_U + m)) for m in range(2)])
        lower = lower * factor
        _diagonal_call(self.diagonal.at[half], lower)
        lower = lower.astype(jnp.bfloat16)
        upper = _product(*[(tile(_U + m), flipped(given + m)) for m in range(2)])
        upper = (upper * factor).astype(jnp.bfloat16)
        plgpu.commit_smem()  # all warps have read what is there
        _symmetric_call(rows_of.at[given], lower, upper)
        plgpu.commit_smem()
        for m in range(2):
            source = rows_of.at[given + m]
            plgpu.copy_smem_to_gmem(source, gmem.pairs.at[b, head, c, 2 * half + m])

        @pl.when(half == 0)
        def _():
            plgpu.copy_smem_to_gmem(self.diagonal.at[0], gmem.diagonals.at[b, head, c])


def _readers(tiles_of):
    """(n -> tile n, n -> tile n transposed)."""
    return (lambda n: tiles_of.at[n]), (lambda n: tiles_of.at[n].transpose((1, 0)))


def chunk_products(v: jax.Array, around: AroundChunks, scale: float):
    """Compute the operands of ``gradients_channels``, for Dk = Dv = 128.

    Returns
    -------
    list
        dP and dN, for each the two tiles of ``_symmetric``, bfloat16 [B, H, NC, 4, 64, 64]; dP's
        diagonal, float32 [B, H, NC, 64]; scale do S^T, -dv S^T and U E^T, bfloat16
        [B, H, NC*64, 128]; and, in parts that have to be summed, <S, E>, float32
        [B, H, NC, 2 halves of Dk, 4, 64], and u dv, [B, H, NC, 2, 64].
    """
    k = around.prepared.k
    b, t, h, dk = k.shape
    assert dk == v.shape[-1] == CHANNELS
    nc, half = -(-t // CHUNK), jnp.bfloat16
    per_channel = jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), half)

    spec = jax.ShapeDtypeStruct
    return launch(
        functools.partial(_Worker, scale=scale, sizes=(h, nc, b)),
        {
            "k": k,
            "v": v,
            "writers": around.inverses,
            "d_out": around.d_out,
            "d_v": around.d_v,
            "states": around.states,
            "ends": around.ends,
        },
        {
            "pairs": spec((b, h, nc, 4, CHUNK, CHUNK), half),
            "diagonals": spec((b, h, nc, CHUNK), jnp.float32),
            "asked": per_channel,
            "seen": per_channel,
            "keys": per_channel,
            "state_sums": spec((b, h, nc, 2, 4, 64), jnp.float32),
            "beta_sums": spec((b, h, nc, 2, CHUNK), jnp.float32),
        },
        name="gated_delta_products",
        grid=blocks_for(h * nc * b, 2),
        warpgroups=4,
        scratch={
            "tiles": Views(
                rows=plgpu.SMEM((2, _TILES, CHUNK, PART), half, transforms=ROWS),
                tiles=plgpu.SMEM((2, _TILES, CHUNK, PART), half, transforms=BF16_TILE),
            ),
            "diagonals": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            "tables": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=14, num_barriers=2),
            "ended": plgpu.Barrier(num_arrivals=4, num_barriers=2),
            "met": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
    )

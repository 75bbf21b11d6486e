"""The gated delta rule's work inside a chunk on Hopper, for a decay of every key channel.

That is Kimi Delta Attention; the results are the operands of ``kernel_scan``, for all chunks at
once.  It is ``kernel_chunks`` with vectors G_i, and the decay goes into the products' operands:

    A  = beta_i sum_d k_i k_j exp(G_i - G_j) below the diagonal     X = (I + A)^-1 diag(beta)
    P  = scale sum_d q_i k_j exp(G_i - G_j) with the diagonal       M = P X
    K' = X^T (K exp(G_64 - G))       Q <- scale Q exp(G)       K <- K exp(G)

These give o = Q S + M R, R = V - K S, S <- diag(exp(G_64)) S + K'^T R.  The only exponential is
that of log_decay, once an element: ``kernel_tree`` multiplies up from there.

Two workers (warpgroups) of a block, one block to an SM, each walk their own list of chunks and
value heads:

    TMA q k g | gate_slices, per 64 channels: levels 1 .. 32, gated q, k -> TMA | A, P | X
    | mix: M, K' -> TMA              first 64 channels of the next chunk (``begin``) | TMA ...

Copies: each worker copies q, k and g of its own items by TMA: slice 0 of the next item early
(``begin``), slice 1 at the item's start.  Its threads load beta.
Waits: on ``ready[part]`` for a slice's four copies.  Before tiles get new contents the worker
waits until stores from them have left.  Workers share nothing; the warps of one meet at warpgroup
barriers.
Writes: TMA takes the gated q and k after each slice, then X^T if it is saved, M and K'.  Warp 0
stores decay from registers.

Floor: 15 bytes per element of q at Dk = 128 (8 in, 7 out), 0.234 ms at (1, 8192, 64, 128, 128).
Result: 0.438 on one H200.  Attempts: docs/lab/gated-delta.md.  Command:
``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta import kernel_tree as tree
from pallas_kernels.gated_delta.kernel_chunks import PART, Prepared, array, high_low
from pallas_kernels.launch import REF, Views, inline, launch
from pallas_kernels.recurrence.channels import (
    BF16_TILE,
    CHUNK,
    ROWS,
    TILE,
    blocks_for,
    bundle,
    bundle_layout,
    bundle_type,
    digits,
    unbundle,
    worker_items,
)
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.recurrence.tree import Lane

_WGMMA = plgpu.Layout.WGMMA
_N_SUMS = 4 * tree.ACCUMULATORS
WARPGROUPS = 2  # workers of a block
_LIMIT = plgpu.Layout.WG_SPLAT((128,))


def _sums_of(array):
    return unbundle(array, *[4] * tree.ACCUMULATORS)


def _betas_call(pitch: int):
    @inline(REF, REF, _LIMIT)
    def call(betas, scratch, limit):
        tree.load_betas(p.address(betas), p.shared_address(scratch), limit.registers.flat[0], pitch)

    return call


def _slice_call(slot: tree.Slot, scale: float, first: bool, ragged: bool):
    """(tiles, scratch, decay, limit[, sums]) -> sums of ``tree.add_slice``."""

    @inline(
        plgpu.RefType(ROWS),
        REF,
        REF,
        _LIMIT,
        *([] if first else [bundle_layout(_N_SUMS)]),
        out=bundle_type(_N_SUMS),
    )
    def call(tiles, scratch, decay, limit, *sums):
        acc = _sums_of(*sums) if sums else tree.empty_sums()
        tree.add_slice(
            p.shared_address(tiles),
            acc,
            slot,
            p.shared_address(scratch),
            p.address(decay),
            limit.registers.flat[0] if ragged else None,
            scale,
        )
        return bundle([x for four in acc for x in four])

    return call


@inline(plgpu.RefType(ROWS), bundle_layout(_N_SUMS))
def _spread_call(tiles, sums):
    base = p.shared_address(tiles)
    tree.spread(Lane(base), _sums_of(sums), base)


def _inverse_call(scale: float):
    """X^T; leaves P's high and low parts in the place of the sums."""

    @inline(
        plgpu.RefType(ROWS),
        REF,
        out=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=_WGMMA),
    )
    def call(tiles, scratch):
        base, scratch = p.shared_address(tiles), p.shared_address(scratch)
        rows = inverse.InverseRows()
        a, scores = tree.coefficients(rows, base, scratch, scale)
        p.warpgroup_barrier()  # all warps have read the sums
        inverse.store_split(rows, base + TILE * tree.SCORES, scores)
        places = (base + TILE * n for n in (tree.KEYS, tree.BLOCKS))
        x = inverse.inverse_transposed(rows, *places, a)
        return array(inverse.scaled_rows(x, rows.by_row(scratch, tree.BETA)))

    return call


class _Worker:
    """The program of a warpgroup: its chunks and value heads."""

    def __init__(
        self, gmem, smem, barrier, *, length: int, scale: float, group: int, sizes: tuple[int, ...]
    ):
        self.gmem, self.length, self.scale, self.group = gmem, length, scale, group
        self.parts, self.ragged = gmem.q.shape[-1] // PART, gmem.lengths is not None
        self.n_heads, self.n_chunks, n_rows = sizes
        n_work = self.n_heads * self.n_chunks * n_rows
        own, self.n_items, self.item_of = worker_items(n_work, WARPGROUPS)
        views = smem.tiles.rows, smem.tiles.floats, smem.tiles.tiles
        self.rows_of, self.floats_of, self.tiles_of = (x.at[own] for x in views)
        self.scratch, self.ready = smem.scratch.at[own], barrier.ready.at[own]

    def run(self) -> None:
        self.begin(0)
        lax.fori_loop(0, self.n_items, self.item, None)
        plgpu.wait_smem_to_gmem(0)

    def place(self, i):
        """(head, chunk, row) of item i."""
        return digits(self.item_of(i), self.n_heads, self.n_chunks)

    def limit_of(self, i):
        """Tokens of the row from the item's chunk on."""
        _, c, b = self.place(i)
        length = self.length
        if self.ragged:
            length = jnp.minimum(self.gmem.lengths[b], length)
        return length - c * CHUNK

    # --- copies ---

    def begin(self, i) -> None:
        """Load the first slice of an item: its tiles are free before those of the results are."""
        pl.when(i < self.n_items)(lambda: self.load_alive(i))

    def load_alive(self, i) -> None:
        if self.ragged:
            pl.when(self.limit_of(i) > 0)(lambda: self.load(i, 0))
        else:
            self.load(i, 0)

    def load(self, i, part: int) -> None:
        gmem, (head, c, b) = self.gmem, self.place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), pl.ds(part * PART, PART)
        slot, bar = tree.SLOTS[part], self.ready.at[part]
        for half in range(2):
            columns = pl.ds(part * PART + 32 * half, 32)
            to = self.floats_of.at[slot.gates + half]
            plgpu.copy_gmem_to_smem(gmem.g.at[b, rows, head, columns], to, bar)
        for x, tile in ((gmem.q, slot.q), (gmem.k, slot.k)):
            source = x.at[b, rows, head // self.group, at]
            plgpu.copy_gmem_to_smem(source, self.rows_of.at[tile], bar)

    # --- computing ---

    def item(self, i, _) -> None:
        if not self.ragged:
            self.compute(i)
            return
        alive = self.limit_of(i) > 0
        pl.when(alive)(lambda: self.compute(i))
        pl.when(jnp.logical_not(alive))(lambda: self.begin(i + 1))

    def compute(self, i) -> None:
        """levels, gated q, k -> TMA | A, P | X | M, K' -> TMA"""
        head, c, b = self.place(i)
        rows, limit = pl.ds(c * CHUNK, CHUNK), self.limit_of(i)
        at = b, head, c, rows
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.parts > 1:
            self.load(i, 1)
        left = jnp.full((128,), limit, jnp.int32)
        beta = self.gmem.beta
        _betas_call(4 * beta.shape[-1])(beta.at[b, rows, head], self.scratch, left)
        sums = self.gate_slices(at, left)
        # The first slice's results have left.
        plgpu.wait_smem_to_gmem(2 if self.parts > 1 else 0, wait_read_only=True)
        _spread_call(self.rows_of, *sums)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x = _inverse_call(self.scale)(self.rows_of, self.scratch)
        plgpu.commit_smem()
        high, low = high_low(x)
        if self.gmem.writers is not None:
            self.store_writers(at, high, low)
        self.mix(at, high, low)
        if self.gmem.writers is not None:
            plgpu.wait_smem_to_gmem(1 + self.parts, wait_read_only=True)
        self.begin(i + 1)

    def gate_slices(self, at, left):
        """The levels' sums over all slices of 64 channels; q and k with their decay go out."""
        gmem, rows_of, (b, head, c, rows) = self.gmem, self.rows_of, at
        sums = ()
        for part in range(self.parts):
            slot, columns = tree.SLOTS[part], pl.ds(part * PART, PART)
            plgpu.barrier_wait(self.ready.at[part])
            call = _slice_call(slot, self.scale, not part, self.ragged)
            decay = gmem.decay.at[b, head, c, columns]
            sums = (call(rows_of, self.scratch, decay, left, *sums),)
            plgpu.commit_smem()
            to = gmem.queries.at[b, rows, head, columns]
            plgpu.copy_smem_to_gmem(rows_of.at[slot.q], to)
            to = gmem.from_start.at[b, rows, head, columns]
            plgpu.copy_smem_to_gmem(rows_of.at[slot.near], to)
        return sums

    def store_writers(self, at, high, low) -> None:
        """X^T, through the place of A, which all warps have read."""
        b, head, _, rows = at
        for n, part in enumerate((high, low)):
            self.tiles_of[tree.KEYS + n] = part
        plgpu.commit_smem()
        for n in range(2):
            to = self.gmem.writers.at[b, head, n, rows]
            plgpu.copy_smem_to_gmem(self.rows_of.at[tree.KEYS + n], to)

    def mix(self, at, high, low) -> None:
        """M and K'."""
        gmem, tiles_of, (b, head, _, rows) = self.gmem, self.tiles_of, at
        square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)

        def scores(acc):
            for left, n in ((high, 0), (high, 1), (low, 0)):
                plgpu.wgmma(acc, left, tiles_of.at[tree.SCORES + n].transpose((1, 0)))
            return acc[...]

        def ends(acc, part):
            for left in (high, low):
                plgpu.wgmma(acc, left, tiles_of.at[tree.SLOTS[part].k])
            return acc[...]

        tiles_of[tree.MIXED] = pl.run_scoped(scores, square).astype(gmem.q.dtype)
        for part in range(self.parts):
            summed = pl.run_scoped(functools.partial(ends, part=part), square)
            tiles_of[tree.BLOCKS + part] = summed.astype(gmem.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.rows_of.at[tree.MIXED], gmem.mixing.at[b, head, rows])
        for part in range(self.parts):
            to = gmem.keys.at[b, head, rows, pl.ds(part * PART, PART)]
            plgpu.copy_smem_to_gmem(self.rows_of.at[tree.BLOCKS + part], to)


def chunks_by_channel(
    heads: Heads, lengths: jax.Array | None, scale: float, save: bool = False
) -> tuple[Prepared, jax.Array | None]:
    """Compute the scans' operands for a decay of every key channel.

    lengths: int32 [B]; chunks that start at or after a row's length are not written.

    Returns them and, with ``save``, X^T in two bfloat16 parts, [B, H, 2, NC*64, 64].
    """
    q, k, _, log_decay, beta = heads
    b, t, hk, dk = q.shape
    h = beta.shape[-1]
    nc, parts = -(-t // CHUNK), dk // PART
    options = {"length": t, "scale": scale, "group": h // hk, "sizes": (h, nc, b)}

    tiles, half, spec = (WARPGROUPS, tree.TILES, CHUNK, PART), jnp.bfloat16, jax.ShapeDtypeStruct
    *prepared, writers = launch(
        functools.partial(_Worker, **options),
        {"q": q, "k": k, "g": log_decay, "beta": beta, "lengths": lengths},
        {
            "queries": spec((b, t, h, dk), half),
            "from_start": spec((b, t, h, dk), half),
            "keys": spec((b, h, nc * CHUNK, dk), half),
            "mixing": spec((b, h, nc * CHUNK, CHUNK), half),
            "decay": spec((b, h, nc, dk), jnp.float32),
            "writers": spec((b, h, 2, nc * CHUNK, CHUNK), half) if save else None,
        },
        name="gated_delta_channels",
        grid=blocks_for(h * nc * b, WARPGROUPS),
        warpgroups=WARPGROUPS,
        scratch={
            "tiles": Views(
                rows=plgpu.SMEM(tiles, half, transforms=ROWS),
                floats=plgpu.SMEM((*tiles[:3], 32), jnp.float32, transforms=ROWS),
                tiles=plgpu.SMEM(tiles, half, transforms=BF16_TILE),
            ),
            "scratch": plgpu.SMEM((WARPGROUPS, tree.WORDS), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=4, num_barriers=(WARPGROUPS, parts)),
        },
    )
    return Prepared(*prepared), writers

"""The gated delta rule's work inside a chunk on Hopper, for a decay of every key channel (Kimi
Delta Attention): what ``kernel_scan`` needs of every chunk, all chunks at once.

``kernel_chunks`` with G_i a vector: the decay goes into the products' operands,

    A  = beta_i sum_d k_i k_j exp(G_i - G_j) below the diagonal     X = (I + A)^-1 diag(beta)
    P  = scale sum_d q_i k_j exp(G_i - G_j) with the diagonal       M = P X
    K' = X^T (K exp(G_64 - G))       Q <- scale Q exp(G)       K <- K exp(G)

so that o = Q S + M R, R = V - K S, S <- diag(exp(G_64)) S + K'^T R.  No exponential is taken but
that of log_decay, once an element: ``kernel_tree`` multiplies up from there.

Two workers (warpgroups) of a block, one block to an SM, each walk their own list of chunks and
value heads:

    TMA q k g | per 64 channels: levels 1 .. 32, gated q, k -> TMA | A, P | X | M, K' | TMA out
                                                  first 64 channels of the next chunk | TMA ...

Floor: 15 bytes per element of q at Dk = 128 (8 in, 7 out), 0.234 ms at (1, 8192, 64, 128, 128).
Result: 0.438 on one H200.  What was tried: NOTES.md.
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
from pallas_kernels.gated_delta.kernel_chunks import PART, array, high_low
from pallas_kernels.launch import launch
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
from pallas_kernels.recurrence.tree import Lane

_WGMMA = plgpu.Layout.WGMMA
_N_SUMS = 4 * tree.ACCUMULATORS
WARPGROUPS = 2  # workers of a block
_LIMIT = plgpu.Layout.WG_SPLAT((128,))


def _sums_of(array):
    return unbundle(array, *[4] * tree.ACCUMULATORS)


def _betas_call(pitch: int):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _LIMIT))
    def call(ctx, betas, scratch, limit):
        del ctx
        tree.load_betas(p.address(betas), p.shared_address(scratch), limit.registers.flat[0], pitch)

    return call


def _slice_call(slot: tree.Slot, scale: float, first: bool, ragged: bool):
    """(tiles, scratch, decay, limit[, sums]) -> sums of ``tree.add_slice``."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(ROWS),
            plgpu.RefType(),
            plgpu.RefType(),
            _LIMIT,
            *([] if first else [bundle_layout(_N_SUMS)]),
        ),
        return_type=bundle_type(_N_SUMS),
    )
    def call(ctx, tiles, scratch, decay, limit, *sums):
        del ctx
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


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(ROWS), bundle_layout(_N_SUMS)))
def _spread_call(ctx, tiles, sums):
    del ctx
    base = p.shared_address(tiles)
    tree.spread(Lane(base), _sums_of(sums), base)


def _inverse_call(scale: float):
    """X^T; leaves P's high and low parts in the place of the sums."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(ROWS), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=_WGMMA),
    )
    def call(ctx, tiles, scratch):
        del ctx
        base, scratch = p.shared_address(tiles), p.shared_address(scratch)
        rows = inverse.InverseRows()
        a, weights = tree.coefficients(rows, base, scratch, scale)
        p.warpgroup_barrier()  # all warps have read the sums
        inverse.store_split(rows, p.add(base, TILE * tree.SCORES), weights)
        places = (p.add(base, TILE * n) for n in (tree.KEYS, tree.BLOCKS))
        x = inverse.inverse_transposed(rows, *places, a)
        return array(inverse.scaled_rows(x, rows.by_row(scratch, tree.BETA)))

    return call


def _channels_body(
    q,
    k,
    g,
    beta,
    *rest,
    length: int,
    scale: float,
    group: int,
    parts: int,
    sizes: tuple[int, int, int],
    ragged: bool,
    save: bool,
):
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    writers = rest.pop(5) if save else None
    queries, from_start, keys, weights, decay, unions, scratch_all, bars = rest
    n_heads, n_chunks, n_rows = sizes
    wg, n_items, item_of = worker_items(n_heads * n_chunks * n_rows, WARPGROUPS)
    rows_of, floats_of, tiles_of = (x.at[wg] for x in unions)
    scratch, ready = scratch_all.at[wg], bars.at[wg]

    def place(i):
        return digits(item_of(i), n_heads, n_chunks)

    def limit_of(i):
        _, c, b = place(i)
        return (jnp.minimum(lengths[b], length) if ragged else length) - c * CHUNK

    def load(i, part):
        head, c, b = place(i)
        rows, at = pl.ds(c * CHUNK, CHUNK), pl.ds(part * PART, PART)
        slot, bar = tree.SLOTS[part], ready.at[part]
        for half in range(2):
            columns = pl.ds(part * PART + 32 * half, 32)
            place_of = floats_of.at[slot.gates + half]
            plgpu.copy_gmem_to_smem(g.at[b, rows, head, columns], place_of, bar)
        for x, tile in ((q, slot.q), (k, slot.k)):
            plgpu.copy_gmem_to_smem(x.at[b, rows, head // group, at], rows_of.at[tile], bar)

    def begin(i):
        """The first slice of an item, whose tiles are free before those of the results are."""

        @pl.when(i < n_items)
        def _():
            pl.when(limit_of(i) > 0)(lambda: load(i, 0)) if ragged else load(i, 0)

    begin(0)

    def item(i, _):
        def work():
            head, c, b = place(i)
            rows, limit = pl.ds(c * CHUNK, CHUNK), limit_of(i)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if parts > 1:
                load(i, 1)
            left = jnp.full((128,), limit, jnp.int32)
            _betas_call(4 * beta.shape[-1])(beta.at[b, rows, head], scratch, left)
            sums = ()
            for part in range(parts):
                slot, at = tree.SLOTS[part], pl.ds(part * PART, PART)
                plgpu.barrier_wait(ready.at[part])
                call = _slice_call(slot, scale, not part, ragged)
                sums = (call(rows_of, scratch, decay.at[b, head, c, at], left, *sums),)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(rows_of.at[slot.q], queries.at[b, rows, head, at])
                plgpu.copy_smem_to_gmem(rows_of.at[slot.near], from_start.at[b, rows, head, at])
            plgpu.wait_smem_to_gmem(2 if parts > 1 else 0, wait_read_only=True)  # the first's
            _spread_call(rows_of, *sums)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            x = _inverse_call(scale)(rows_of, scratch)
            plgpu.commit_smem()
            high, low = high_low(x)
            if save:  # in the place of A, which all warps have read
                for n, part in enumerate((high, low)):
                    tiles_of[tree.KEYS + n] = part
                plgpu.commit_smem()
                for n in range(2):
                    place_of = writers.at[b, head, n, rows]
                    plgpu.copy_smem_to_gmem(rows_of.at[tree.KEYS + n], place_of)
            square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)

            def scores(acc):
                for left, n in ((high, 0), (high, 1), (low, 0)):
                    plgpu.wgmma(acc, left, tiles_of.at[tree.SCORES + n].transpose((1, 0)))
                return acc[...]

            def ends(acc, part):
                for left in (high, low):
                    plgpu.wgmma(acc, left, tiles_of.at[tree.SLOTS[part].k])
                return acc[...]

            tiles_of[tree.MIXED] = pl.run_scoped(scores, square).astype(q.dtype)
            for part in range(parts):
                summed = pl.run_scoped(functools.partial(ends, part=part), square)
                tiles_of[tree.BLOCKS + part] = summed.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows_of.at[tree.MIXED], weights.at[b, head, rows])
            for part in range(parts):
                at = pl.ds(part * PART, PART)
                plgpu.copy_smem_to_gmem(rows_of.at[tree.BLOCKS + part], keys.at[b, head, rows, at])
            if save:
                plgpu.wait_smem_to_gmem(1 + parts, wait_read_only=True)
            begin(i + 1)

        if not ragged:
            work()
            return
        alive = limit_of(i) > 0
        pl.when(alive)(work)
        pl.when(jnp.logical_not(alive))(lambda: begin(i + 1))

    lax.fori_loop(0, n_items, item, None)
    plgpu.wait_smem_to_gmem(0)


def chunks_by_channel(q, k, log_decay, beta, lengths, scale: float, save: bool = False):
    """q, k [B, T, Hk, Dk] bf16, log_decay [B, T, H, Dk] and beta [B, T, H] f32 -> Q and K from the
    chunk's start [B, T, H, Dk], K' [B, H, NC*64, Dk] and M^T [B, H, NC*64, 64], bf16, and
    exp(G_64) [B, H, NC, Dk] f32: what ``kernel_scan.scan`` takes.

    lengths: int32[B] or None.  Chunks that start at or after a row's length are not written.
    save: also X^T, as two bf16 parts [B, H, 2, NC*64, 64].
    """
    b, t, hk, dk = q.shape
    h = beta.shape[-1]
    nc, parts = -(-t // CHUNK), dk // PART
    body = functools.partial(
        _channels_body,
        length=t,
        scale=scale,
        group=h // hk,
        parts=parts,
        sizes=(h, nc, b),
        ragged=lengths is not None,
        save=save,
    )
    tiles, half = (WARPGROUPS, tree.TILES, CHUNK, PART), jnp.bfloat16
    return launch(
        body,
        (q, k, log_decay, beta, lengths),
        (
            jax.ShapeDtypeStruct((b, t, h, dk), half),
            jax.ShapeDtypeStruct((b, t, h, dk), half),
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), half),
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, CHUNK), half),
            jax.ShapeDtypeStruct((b, h, nc, dk), jnp.float32),
            *([jax.ShapeDtypeStruct((b, h, 2, nc * CHUNK, CHUNK), half)] if save else []),
        ),
        name="gated_delta_channels",
        grid=blocks_for(h * nc * b, WARPGROUPS),
        warpgroups=WARPGROUPS,
        scratch=[
            plgpu.RefUnion(
                plgpu.SMEM(tiles, half, transforms=ROWS),
                plgpu.SMEM((*tiles[:3], 32), jnp.float32, transforms=ROWS),
                plgpu.SMEM(tiles, half, transforms=BF16_TILE),
            ),
            plgpu.SMEM((WARPGROUPS, tree.WORDS), jnp.float32),
            plgpu.Barrier(num_arrivals=4, num_barriers=(WARPGROUPS, parts)),
        ],
    )

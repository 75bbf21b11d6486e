"""The gated delta rule's gradients inside a chunk on Hopper, for a decay of every key channel: all
that takes whole matrices, before ``gradients_channels`` multiplies decays in.

What tokens write, U = X R with R = V - K S, makes the delta rule two of GLA's readings of the same
decayed sum of k_j u_j^T: one by q, whose output has the gradient do, and one by k, strictly before
the token, whose output is taken off the value and has -dv.  So no gradient of X is needed:

    dP = scale do U^T, with the diagonal    dN = -dv U^T, below it    dbeta_i = u_i dv_i / beta_i^2
    scale do S^T, -dv S^T of rows i         U E^T of rows j           <S, E> of a key channel

and dbeta divides u_i and dv_i, which both have beta_i as a factor, before they meet (``kernel``
keeps it off zero).  X, and R before X, have two bf16 parts.

Two chunks of a value head a block, two warpgroups each (four, so that the compiler keeps to 128
registers); one has half of the value channels up to U, then half of the key channels, and one of dP
and dN:

    TMA V K S X do dv | R | U, dbeta | TMA E | do S^T, dv S^T | S E, U E^T -> TMA | dP, dN -> TMA

Floor: 224 KB a chunk and head, 0.43 ms at (1, 8192, 64, 128, 128).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import gradients_kernel_sums as sums
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta.kernel_chunks import PART, high_low, pairs
from pallas_kernels.gla.channels import CHUNK, ROWS, TILE
from pallas_kernels.gla.gates import BF16_TILE
from pallas_kernels.launch import launch

CHANNELS = 128  # value channels of a head, and key channels
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
# Tiles, by halves of the channels; those of S^T and E^T by value and key channels.  The right names
# are what takes their places.
_V = _R = _U = 0
_K = _R_LOW = 2
_X = 4
_S = 6
_O, _DV = 10, 12
_E = _K  # and those of X
_TILES = 14


def _products(n: int, *steps):
    """n results [64, 64] of products begun at zero: steps are (which, left, right)."""

    def run(*accs):
        for which, left, right in steps:
            plgpu.wgmma(accs[which], left, right)
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[_SQUARE] * n)


def _symmetric(tiles, diagonal, lower, upper, factor) -> None:
    """G + G^T for G = factor ``lower`` below the diagonal, given the transposed product ``upper``
    too, as ``gla.products`` has it: bf16, and in a second tile the pairs of the levels 1 to 8 of
    the 16 x 16 blocks on the diagonal; G's diagonal in float32 to ``diagonal``."""
    rows = inverse.Rows()
    scaled = [
        [[[arith.mulf(x, factor) for x in pair] for pair in tile] for tile in pairs(array)]
        for array in (lower, upper)
    ]

    def column(tile: int, e: int):
        return p.add(p.shift_left(rows.c, 1), 8 * tile + e)

    def picked(i, j, x, y):
        return arith.select(p.less(j, i), x, arith.select(p.equal(i, j), p.cf(0.0), y))

    whole, levels = [], [[None, None] for _ in range(8)]
    for tile in range(8):
        whole.append([])
        for half in range(2):
            row = p.add(rows.first, 8 * half)
            x, y = (part[tile][half] for part in scaled)
            whole[tile].append(
                p.pack(*[picked(row, column(tile, e), x[e], y[e]) for e in range(2)])
            )
    rows.store_tile(tiles, whole)
    for tile in range(2):
        for half in range(2):
            row = p.add(rows.g, 8 * half)
            met = []
            for e in range(2):
                x, y = (
                    inverse._of_warp(rows, [part[2 * w + tile][half][e] for w in range(4)])
                    for part in scaled
                )
                met.append((arith.xori(row, column(tile, e)), picked(row, column(tile, e), x, y)))
                if tile == half:
                    at = p.add(diagonal, p.shift_left(rows.first, 2))
                    same = p.equal(row, column(tile, e))
                    p.when(same, lambda at=at, x=x, half=half: p.store_shared(at, [x], 32 * half))
            for n in range(4):
                values = [
                    arith.select(p.equal(p.shift_right(differ, n), 1), x, p.cf(0.0))
                    for differ, x in met
                ]
                levels[2 * n + tile][half] = p.pack(*values)
    rows.store_tile(p.add(tiles, TILE), levels)


def _symmetric_call(scale: float):
    """``_symmetric`` for dP on even warpgroups, for dN on odd ones."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(ROWS), plgpu.RefType(), _WGMMA, _WGMMA))
    def call(ctx, tiles, diagonal, lower, upper):
        del ctx
        odd = p.bit(p.register("tid.x"), 7)
        factor = arith.select(odd, p.cf(-1.0), p.cf(scale))
        _symmetric(p.shared_address(tiles), p.shared_address(diagonal), lower, upper, factor)

    return call


def _body(k, v, writers, d_out, d_v, states, ends, pairs_out, diagonals, asked_out, seen_out,
          keys_out, state_sums, beta_sums, unions, diagonals_all, tables, bars_ready, bars_ended,
          bars_met, *, scale: float, n_chunks: int):  # fmt: skip
    place, wg = lax.axis_index("warpgroup") // 2, lax.axis_index("warpgroup") % 2
    rows_of, tiles_of, floats_of = (x.at[place] for x in unions)
    diagonal, table = diagonals_all.at[place], tables.at[place]
    ready, ended, met = (x.at[place] for x in (bars_ready, bars_ended, bars_met))
    head, b = lax.axis_index("head"), lax.axis_index("row")
    c = 2 * lax.axis_index("chunks") + place
    rows = pl.ds(c * CHUNK, CHUNK)
    halves = [pl.ds(PART * n, PART) for n in range(2)]

    def tile(n):
        return tiles_of.at[n]

    def flipped(n):
        return tiles_of.at[n].transpose((1, 0))

    def meet():
        """Of the two warpgroups of a chunk."""
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    def load():
        for n, at in enumerate(halves):
            for x, to in ((v, _V), (k, _K), (d_out, _O), (d_v, _DV)):
                plgpu.copy_gmem_to_smem(x.at[b, rows, head, at], rows_of.at[to + n], ready)
            plgpu.copy_gmem_to_smem(writers.at[b, head, n, rows], rows_of.at[_X + n], ready)
            for m in range(2):
                source = states.at[b, head, c, at, halves[m]]
                plgpu.copy_gmem_to_smem(source, rows_of.at[_S + 2 * n + m], ready)

    def load_ends():
        for n, at in enumerate(halves):
            for m in range(2):
                source = ends.at[b, head, c, at, halves[m]]
                plgpu.copy_gmem_to_smem(source, rows_of.at[_E + 2 * n + m], ended)

    def work():
        pl.when(wg == 0)(load)
        plgpu.barrier_wait(ready)
        (seen,) = _products(1, *[(0, tile(_K + n), flipped(_S + 2 * wg + n)) for n in range(2)])
        rest = plgpu.load(tile(_V + wg), layout=_WGMMA).astype(jnp.float32) - seen
        meet()  # K is read
        tiles_of[_R + wg], tiles_of[_R_LOW + wg] = high_low(rest)
        plgpu.commit_smem()
        factors = ((_X, _R), (_X, _R_LOW), (_X + 1, _R))
        (writes,) = _products(1, *[(0, flipped(x), tile(r + wg)) for x, r in factors])
        given = plgpu.load(tile(_DV + wg), layout=_WGMMA).astype(jnp.float32)
        sums.sum_rows(table.at[wg], writes * given)
        plgpu.commit_smem()  # R is read
        tiles_of[_U + wg] = writes.astype(jnp.bfloat16)
        plgpu.commit_smem()
        meet()  # U is there; X and R's low part are free
        pl.when(wg == 0)(load_ends)
        asked, seen = _products(
            2,
            *[(0, tile(_O + n), tile(_S + 2 * n + wg)) for n in range(2)],
            *[(1, tile(_DV + n), tile(_S + 2 * n + wg)) for n in range(2)],
        )
        asked, seen = (asked * scale).astype(jnp.bfloat16), (-seen).astype(jnp.bfloat16)
        plgpu.barrier_wait(ended)
        (keys,) = _products(1, *[(0, tile(_U + n), tile(_E + 2 * n + wg)) for n in range(2)])
        keys, through = keys.astype(jnp.bfloat16), []
        for n in range(2):
            state, end = (
                plgpu.load(tile(to + 2 * n + wg), layout=_WGMMA).astype(jnp.float32)
                for to in (_S, _E)
            )
            through.append(state * end)
        meet()  # S and E are read
        results = ((asked, _S), (seen, _S + 2), (keys, _E))
        for x, to in results:
            tiles_of[to + wg] = x
        summed = floats_of.at[_E + 2 + wg]
        sums.sum_columns(summed, sum(through))
        plgpu.commit_smem()
        at = pl.ds(PART * wg, PART)
        for out, (_, to) in zip((asked_out, seen_out, keys_out), results, strict=True):
            plgpu.copy_smem_to_gmem(rows_of.at[to + wg], out.at[b, head, rows, at])
        plgpu.copy_smem_to_gmem(summed.at[pl.ds(0, 4)], state_sums.at[b, head, c, wg])
        plgpu.copy_smem_to_gmem(table.at[wg], beta_sums.at[b, head, c, wg])

        given = _O + 2 * wg
        lower, upper = _products(
            2,
            *[(0, tile(given + m), flipped(_U + m)) for m in range(2)],
            *[(1, tile(_U + m), flipped(given + m)) for m in range(2)],
        )
        plgpu.commit_smem()  # all warps have read what is there
        _symmetric_call(scale)(rows_of.at[given], diagonal.at[wg], lower, upper)
        plgpu.commit_smem()
        for m in range(2):
            plgpu.copy_smem_to_gmem(rows_of.at[given + m], pairs_out.at[b, head, c, 2 * wg + m])

        @pl.when(wg == 0)
        def _():
            plgpu.copy_smem_to_gmem(diagonal.at[0], diagonals.at[b, head, c])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.when(c < n_chunks)(work)


def chunk_products(k, v, writers, d_out, d_v, states, ends, scale: float):
    """What ``gradients_channels`` takes, for Dk = Dv = 128:

    dP and dN, for each the two tiles of ``_symmetric``, bf16 [B, H, NC, 4, 64, 64]; dP's diagonal,
    f32 [B, H, NC, 64]; scale do S^T, -dv S^T and U E^T, bf16 [B, H, NC*64, 128]; and in parts that
    have to be summed <S, E>, f32 [B, H, NC, 2 halves of Dk, 4, 64], and u dv, [B, H, NC, 2, 64].

    k [B, T, H, 128], from the chunk's start, writers: ``chunks_by_channel``'s.  states:
    ``kernel_scan.scan``'s borders.  d_v, ends: ``gradients_channels_scan.reverse_scan``'s.
    """
    b, t, h, dk = k.shape
    assert dk == v.shape[-1] == CHANNELS
    nc, half = -(-t // CHUNK), jnp.bfloat16
    per_channel = jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), half)
    return launch(
        functools.partial(_body, scale=scale, n_chunks=nc),
        (k, v, writers, d_out, d_v, states, ends),
        (
            jax.ShapeDtypeStruct((b, h, nc, 4, CHUNK, CHUNK), half),
            jax.ShapeDtypeStruct((b, h, nc, CHUNK), jnp.float32),
            *[per_channel] * 3,
            jax.ShapeDtypeStruct((b, h, nc, 2, 4, 64), jnp.float32),
            jax.ShapeDtypeStruct((b, h, nc, 2, CHUNK), jnp.float32),
        ),
        name="gated_delta_products",
        grid={"head": h, "chunks": -(-nc // 2), "row": b},
        warpgroups=4,
        scratch=[
            plgpu.RefUnion(
                plgpu.SMEM((2, _TILES, CHUNK, PART), half, transforms=ROWS),
                plgpu.SMEM((2, _TILES, CHUNK, PART), half, transforms=BF16_TILE),
                plgpu.SMEM((2, _TILES, 32, 64), jnp.float32),
            ),
            plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            plgpu.SMEM((2, 2, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=14, num_barriers=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ],
    )

"""Register work of ``gradients_kernel``: decays between tokens, sums, and a chunk's last step.

Everything here is called from Pallas, through ``launch.inline``, by a whole warpgroup.

Copies: none; vectors are in shared memory.  Waits: ``block_barrier`` is that of all warpgroups, the
others none.  Writes: ``sum_rows`` and ``sum_columns`` store sums in shared memory.  ``finish_call``
has the first warp store dlog_decay and dbeta in device memory.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta.kernel_chunks import array, pairs
from pallas_kernels.launch import REF, inline
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import CHUNK

_WGMMA = plgpu.Layout.WGMMA

# Rows of the table of sums, 64 floats each: of each warpgroup, or of each warp, or one.
FROM, STATES, TO_END, BY_SCORES, BY_KEYS, BETAS, INSIDE = 0, 2, 4, 6, 10, 14, 15
TABLE_ROWS = 17


@inline()
def block_barrier() -> None:
    p.barrier()


def decays_call(transposed: bool):
    """D_ij for j <= i, else 0; transposed: D_ji for i < j, else 0."""

    @inline(REF, out=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=_WGMMA))
    def call(scratch_ref):
        rows, scratch = inverse.InverseRows(), p.shared_address(scratch_ref)
        return array(inverse.decays(rows, scratch, transposed))

    return call


@inline(REF, _WGMMA)
def sum_rows(to, x) -> None:
    """A [64, 64] array's sums over columns: 64 floats."""
    inverse.sum_rows(inverse.InverseRows(), p.shared_address(to), pairs(x))


@inline(REF, _WGMMA)
def sum_columns(to, x) -> None:
    """A [64, 64] array's sums over every warp's 16 rows: 4 x 64 floats."""
    inverse.sum_columns(inverse.InverseRows(), p.shared_address(to), pairs(x))


def finish_call(pitch: int):
    """The gradients of log_decay and beta from the table."""

    @inline(*[REF] * 4, plgpu.Layout.WG_SPLAT((128,)))
    def call(scratch, table, d_decays, d_betas, limit):
        finish(
            p.shared_address(scratch),
            p.shared_address(table),
            p.address(d_decays),
            p.address(d_betas),
            limit.registers.flat[0],
            pitch,
        )

    return call


def finish(scratch, table, d_decays, d_betas, limit, pitch: int) -> None:
    """By the first warp of the warpgroup: a lane has two tokens, the last lane the first ones."""
    thread = p.register("tid.x") & 127
    outs = d_decays, d_betas, pitch
    p.when(thread < 32, lambda: _finish_tokens(scratch, table, thread, limit, outs))


def _finish_tokens(scratch, table, thread, limit, outs) -> None:
    lane = thread & 31
    first = lane * -2 + 62
    at = first << 2

    def entries(row: int):
        return p.load_shared(table + at, 2, 256 * row, "f32")

    def by_warp(row: int):
        x = entries(row)
        for w in range(1, 4):
            x = [a + b for a, b in zip(x, entries(row + w), strict=True)]
        return x

    beta, log = (p.load_shared(scratch + at, 2, x, "f32") for x in (inverse.BETA, inverse.DECAY))
    keys, scores = by_warp(BY_KEYS), by_warp(BY_SCORES)
    rows = [entries(row) for row in (FROM, FROM + 1, INSIDE, INSIDE + 1)]
    rows = [a + b + (c + d) for a, b, c, d in zip(*rows, strict=True)]
    moved = [a - b + c * k for a, b, c, k in zip(rows, scores, beta, keys, strict=True)]
    parts = [entries(row) for row in (STATES, STATES + 1, TO_END, TO_END + 1)]
    parts = [a + b for a, b in parts]
    later = _from_end(lane, parts, moved)
    d_decay = [later + moved[0], later]
    d_beta = [a + b for a, b in zip(entries(BETAS), keys, strict=True)]
    for e in range(2):
        token = first + e
        values = log[e], d_decay[e], d_beta[e]
        p.when(p.below(token, limit), functools.partial(_store_token, token, outs, *values))


def _from_end(lane, parts, moved):
    """The sum of what moved from the lane's second token on, with the whole chunk's parts."""
    whole = parts[0] + parts[1] + (parts[2] + parts[3])
    whole = p.over_lanes(whole, (1, 2, 4, 8, 16))
    return inverse.lanes_before(lane, moved[0] + moved[1]) + whole + moved[1]


def _store_token(token, outs, log, d_decay, d_beta) -> None:
    d_decays, d_betas, pitch = outs
    decay = p.exp2(log * LOG2E)
    alive = decay > 0.0
    value = p.where(alive, d_decay, 0.0)
    p.store_global(p.offset(d_decays, token, pitch), [value])
    p.store_global(p.offset(d_betas, token, pitch), [d_beta])

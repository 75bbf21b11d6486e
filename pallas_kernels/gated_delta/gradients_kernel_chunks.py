"""The gated delta rule's gradients inside a chunk on Hopper, all chunks at once.

Of ``kernel_chunks``'s X = T diag(beta), M = P X, K' = X^T diag(to end) K, given the states S at a
chunk's start and the gradients E of those at its end, do of the outputs, dR of R = V - diag(e) K S:

    dM = do R^T      dK' = R E^T      dX = P^T dM + diag(to end) K dK'^T      dP = dM X^T
    dA = -T^T (dX diag(beta)) T^T     dbeta_j = sum_i T_ij dX_ij + sum_i dA_ji A_ji / beta_j
    dQ = scale (diag(e) do S^T + (dP D) K)
    dK = -diag(e) dR S^T + scale (dP D)^T Q + (dKK + dKK^T) K + diag(to end) X dK'
    dKK = beta_i dA_ij D_ij

and log_decay's from the sums of dA A + dP P over rows and columns, of q dQ and k dK where those
came through the state, and of S E.

Where keys are parallel and nothing decays, dX's entries cancel in dbeta, and S E is a sum of terms
of both signs.  So R (computed here, from the states that the scan used), E, dK', T and products
with them have two bf16 parts each, and S E takes twelve bits of S (``remainder``).

One block a chunk and value head.  Its two warpgroups have half of the value channels each for R,
and half of the key channels each for all that has them; of what is left the first has what comes
from the outputs, the second what comes from the state:

    both : TMA | R | do S^T, dR S^T, R E^T, S E | K dK'^T      |         | X dK' | dQ, dK ->
    1    :     |   |                            | q k^T, dM -> | dP D -> |       | dg, dbeta ->
    2    :     |   |                            | k k^T        | dX  dA  -> dKK  |

Floor: 29 bytes per element of q at as many key as value heads, 0.453 ms at (8, 4096, 16, 16, 128,
128).  Result: 0.886 on one H200.  What was tried: NOTES.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta import gradients_kernel_sums as sums
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta import remainder
from pallas_kernels.gated_delta.kernel_chunks import PART, high_low, vectors_call
from pallas_kernels.gated_delta.kernel_scan import tiles, tokens
from pallas_kernels.launch import in_place, launch
from pallas_kernels.recurrence.channels import CHUNK

CHANNELS = 128  # value channels of a head, and key channels
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (CHUNK, CHUNK)
_FLOATS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def _transposed(ref):
    return ref.transpose((1, 0))


def _products(n: int, *steps, meanwhile=None):
    """n results [64, 64] of products begun at zero: steps are (which, left, right); and what
    ``meanwhile`` computes while these run."""

    def run(*accs):
        for which, left, right in steps:
            plgpu.wgmma(accs[which], left, right)
        other = () if meanwhile is None else (meanwhile(),)
        return *(acc[...] for acc in accs), *other

    return pl.run_scoped(run, *[plgpu.ACC(_SQUARE, jnp.float32)] * n)


def _added(start, *steps):
    """``start`` plus products (left, right)."""

    def run(acc):
        for left, right in steps:
            plgpu.wgmma(acc, left, right)

    return pl.run_state(run)(plgpu.ACC.init(start))


def _read(ref):
    return plgpu.load(ref, layout=_WGMMA).astype(jnp.float32)


def _body(
    q,
    k,
    v,
    g,
    beta,
    inverses,
    d_rest,
    d_out,
    states,
    remainders,
    ends,
    decays,
    d_q,
    d_k,
    d_g,
    d_beta,
    q_union,
    k_union,
    o_union,
    dr_union,
    r_union,
    low_union,
    end_union,
    ends_sm,
    s_union,
    t_sm,
    decay_sm,
    scratch,
    table,
    *ready,
    length: int,
    scale: float,
    group: int,
    added: bool,
):
    (q_rows, q_sm), (k_rows, k_sm), (o_rows, o_sm) = q_union, k_union, o_union
    (dr_rows, dr_sm), (r_rows, r_sm), (low_rows, r_low) = dr_union, r_union, low_union
    (end_rows, end_sm), (s_sm, partial_sm) = end_union, s_union
    e_sm = [[end_sm, ends_sm.at[0]], [ends_sm.at[1], ends_sm.at[2]]]  # [part][half of the values]
    head, c, b = (lax.axis_index(name) for name in ("head", "chunk", "row"))
    wg = lax.axis_index("warpgroup")
    rows = pl.ds(c * CHUNK, CHUNK)
    limit = jnp.full((128,), length - c * CHUNK, jnp.int32)
    halves = [pl.ds(PART * n, PART) for n in range(2)]

    own = pl.ds(PART * wg, PART)
    # Each warpgroup copies a half of everything, and first what is first used.
    for n, x, to in ((0, k, k_rows), (0, v, r_rows), (1, d_out, o_rows), (1, d_rest, dr_rows)):
        at = head // group if x is k else head
        plgpu.copy_gmem_to_smem(x.at[b, rows, at, own], to.at[wg], ready[n])
        if x is v:
            for m in range(2):
                plgpu.copy_gmem_to_smem(
                    states.at[b, head, c, halves[m], own], s_sm.at[m, wg], ready[0]
                )
    for part in range(2):
        for m in range(2):
            plgpu.copy_gmem_to_smem(
                ends.at[b, head, c, part, halves[m], own], e_sm[part][m].at[wg], ready[1]
            )
    plgpu.copy_gmem_to_smem(q.at[b, rows, head // group, own], q_rows.at[wg], ready[2])
    plgpu.copy_gmem_to_smem(inverses.at[b, head, wg, rows], t_sm.at[wg], ready[2])

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(decays.at[b, head, c], decay_sm, ready[0])

    codes = [
        plgpu.load(remainders.at[b, head, c, n, wg], layout=remainder.LAYOUT) for n in range(2)
    ]
    vectors_call(scale, 4 * g.shape[-1], False)(
        scratch, g.at[b, rows, head], beta.at[b, rows, head], g.at[b, rows, head], limit
    )
    plgpu.barrier_wait(ready[0])

    def vector(at, axis):
        """Over rows (axis 0) or columns (1)."""
        place = scratch.at[pl.ds(at // 4, CHUNK)]
        x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(x, _SQUARE, [axis])

    def from_start(n):
        x = plgpu.load(decay_sm.at[n], layout=_WGMMA.reduce(1))
        return lax.broadcast_in_dim(x, _SQUARE, [0])

    (seen,) = _products(1, *[(0, k_sm.at[n], _transposed(s_sm.at[wg, n])) for n in range(2)])
    r_sm[wg], r_low[wg] = high_low(_read(r_sm.at[wg]) - seen * from_start(0))
    plgpu.commit_smem()
    plgpu.barrier_wait(ready[1])
    sums.block_barrier()

    # What both warpgroups do stands once, for the one that runs it: written out for each, the
    # instructions are more than their cache holds.
    def through_states():
        through = []
        for n in range(2):
            state = plgpu.load(s_sm.at[n, wg], layout=_WGMMA)
            state = remainder.joined(codes[n], state)
            through.append(state * (_read(e_sm[0][n].at[wg]) + _read(e_sm[1][n].at[wg])))
        return sum(through) * decay_sm[0, CHUNK - 1]

    asked, seen, d_keys, through = _products(
        3,
        *[(0, o_sm.at[n], s_sm.at[n, wg]) for n in range(2)],
        *[(1, dr_sm.at[n], s_sm.at[n, wg]) for n in range(2)],
        *[
            (2, r.at[n], e_sm[part][n].at[wg])
            for n in range(2)
            for r, part in ((r_sm, 0), (r_sm, 1), (r_low, 0))
        ],
        meanwhile=through_states,
    )
    sums.sum_rows(table.at[sums.STATES + wg], through)
    sums.block_barrier()  # 1: states, ends and dR are read
    end_sm[wg] = (d_keys * vector(inverse.BETA, 0)).astype(jnp.bfloat16)
    (d_x,) = _products(1, *[(0, x, _transposed(k_sm.at[wg])) for x in high_low(d_keys)])

    plgpu.barrier_wait(ready[2])

    @pl.when(wg == 0)
    def from_outputs():
        partial_sm[...] = d_x
        d_m, qk, weight = _products(
            2,
            *[(0, o_sm.at[n], _transposed(r.at[n])) for n in range(2) for r in (r_sm, r_low)],
            *[(1, q_sm.at[n], _transposed(k_sm.at[n])) for n in range(2)],
            meanwhile=lambda: sums.decays_call(False)(scratch) * scale,
        )
        scores = qk * weight
        plgpu.commit_smem()  # all warps have read do
        o_sm[0], o_sm[1] = d_m.astype(jnp.bfloat16), scores.astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        high, low = high_low(d_m * vector(inverse.BETA, 1))
        (d_scores,) = _products(
            1, (0, high, t_sm.at[0]), (0, high, t_sm.at[1]), (0, low, t_sm.at[0])
        )
        r_sm[0] = (d_scores * weight).astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 3
        moved = d_scores * scores
        sums.sum_rows(table.at[sums.INSIDE], moved)
        sums.sum_columns(table.at[pl.ds(sums.BY_SCORES, 4)], moved)

    @pl.when(wg == 1)
    def from_state():
        kk, decay = _products(
            1,
            *[(0, k_sm.at[n], _transposed(k_sm.at[n])) for n in range(2)],
            meanwhile=lambda: sums.decays_call(True)(scratch),
        )
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        d_all = (d_x + plgpu.load(partial_sm, layout=_WGMMA)) * vector(inverse.TO_END, 1)
        d_all = _added(d_all, (_transposed(o_sm.at[0]), o_sm.at[1]))
        sums.sum_rows(table.at[sums.BETAS], d_all * (_read(t_sm.at[0]) + _read(t_sm.at[1])))
        high, low = high_low(d_all * vector(inverse.BETA, 0))
        right = [_transposed(t_sm.at[n]) for n in range(2)]
        (y,) = _products(1, (0, high, right[0]), (0, high, right[1]), (0, low, right[0]))
        dr_sm[0], dr_sm[1] = high_low(y)
        plgpu.commit_smem()
        (d_a,) = _products(1, *[(0, right[m], dr_sm.at[n]) for m, n in ((0, 0), (0, 1), (1, 0))])
        d_a = -d_a * decay
        r_sm[1] = (d_a * vector(inverse.BETA, 1)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 3
        moved = d_a * kk
        sums.sum_rows(table.at[sums.INSIDE + 1], -moved * vector(inverse.BETA, 1))
        sums.sum_columns(table.at[pl.ds(sums.BY_KEYS, 4)], moved)

    (d_end,) = _products(1, *[(0, _transposed(t_sm.at[n]), end_sm.at[wg]) for n in range(2)])
    keys = _read(k_sm.at[wg])
    asked, seen = asked * from_start(1), seen * from_start(0)
    d_end = d_end * vector(inverse.TO_END, 0)
    sums.sum_rows(table.at[sums.TO_END + wg], d_end * keys)
    moved = asked * _read(q_sm.at[wg]) - (d_end + seen) * keys
    sums.sum_rows(table.at[sums.FROM + wg], moved)
    from_scores, from_keys = r_sm.at[0], r_sm.at[1]
    x = _added(asked, (from_scores, k_sm.at[wg]))
    r_low[wg] = x.astype(jnp.bfloat16)
    x = _added(
        d_end - seen,
        (from_keys, k_sm.at[wg]),
        (_transposed(from_keys), k_sm.at[wg]),
        (_transposed(from_scores), q_sm.at[wg]),
    )
    plgpu.commit_smem()  # all warps have read what is there
    end_sm[wg] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for x, to in ((low_rows, d_q), (end_rows, d_k)):
        if added:
            to = to.at[b, rows, head // group, own]
            plgpu.copy_smem_to_gmem(x.at[wg], to, reduction_op="add")
        else:
            plgpu.copy_smem_to_gmem(x.at[wg], to.at[b, rows, head, own])
    sums.block_barrier()

    @pl.when(wg == 0)
    def _():
        sums.finish_call(4 * g.shape[-1])(
            scratch, table, d_g.at[b, rows, head], d_beta.at[b, rows, head], limit
        )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def chunk_gradients(
    q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays, scale: float
):
    """(dq, dk, dlog_decay, dbeta [B, T, H]), for Dk = Dv = 128.  dq and dk of every value head, [B,
    T, H, 128]; where two share a key head, whose sum depends on no order, [B, T, Hk, 128].

    inverses, decays: ``kernel_chunks.chunks``'s.  states, remainders: ``kernel_scan.scan``'s
    borders.  d_rest, ends: ``gradients_kernel_scan.reverse_scan``'s.
    """
    b, t, h, dv = d_out.shape
    hk, dk = q.shape[2:]
    assert dk == dv == CHANNELS
    group = h // hk
    added = group == 2
    body = functools.partial(_body, length=t, scale=scale, group=group, added=added)
    of_keys = jax.ShapeDtypeStruct((b, t, hk if added else h, dk), q.dtype)
    of_tokens = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    operands = q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays
    run = functools.partial(
        launch,
        body,
        name="gated_delta_gradients",
        grid={"head": h, "chunk": -(-t // CHUNK), "row": b},
        warpgroups=2,
        scratch=[
            *[tokens(2, CHUNK, PART)] * 7,
            tiles(3, 2, 64, PART),
            plgpu.RefUnion(
                tiles(2, 2, 64, PART), plgpu.SMEM(_SQUARE, jnp.float32, transforms=_FLOATS)
            ),
            tiles(2, CHUNK, CHUNK),
            plgpu.SMEM((2, CHUNK), jnp.float32),
            4 * CHUNK,
            plgpu.SMEM((sums.TABLE_ROWS, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=9),
            plgpu.Barrier(num_arrivals=12),
            plgpu.Barrier(num_arrivals=4),
        ],
    )
    if not added:
        return run(operands, (of_keys, of_keys, of_tokens, of_tokens))
    zeros = (jnp.zeros(of_keys.shape, of_keys.dtype),) * 2
    decayed, summed = in_place(lambda refs: run((*operands, *refs), (of_tokens,) * 2), zeros)
    return *summed, *decayed

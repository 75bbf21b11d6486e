"""The gated delta rule's gradients inside a chunk on Hopper, all chunks at once.

Of ``kernel_chunks``'s X = T diag(beta), M = P X, K' = X^T diag(to end) K and of R, given the
states S at a chunk's start and the gradients E of those at its end, do of the outputs, dR of R:

    dM = do R^T      dK' = R E^T      dX = P^T dM + diag(to end) K dK'^T      dP = dM X^T
    dA = -T^T (dX diag(beta)) T^T     dbeta_j = sum_i T_ij dX_ij + sum_i dA_ji A_ji / beta_j
    dQ = scale (diag(e) do S^T + (dP D) K)
    dK = -diag(e) dR S^T + scale (dP D)^T Q + (dKK + dKK^T) K + diag(to end) X dK'
    dKK = beta_i dA_ij D_ij

and log_decay's from the sums of dA A + dP P over rows and columns, of q dQ and k dK where those
came through the state, and of S E.  One block a chunk and value head; of its two warpgroups the
first has what comes from the outputs, the second what comes from the state:

    1 : TMA | do S^T, do R^T, q k^T | dM, P -> | dP | dP D ->          | dQ
    2 : TMA | R E^T, dR S^T, S E    | dX, dT, dA       | dKK | X dK'   | dK           | dg, dbeta

T comes from the forward pass in two bf16 parts, and every product with it takes both.
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
from pallas_kernels.gla.channels import CHUNK, ROWS
from pallas_kernels.gla.gates import BF16_TILE
from pallas_kernels.launch import launch

VALUES = 128  # value channels of a head
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (CHUNK, CHUNK)


def _transposed(ref):
    return ref.transpose((1, 0))


def _products(shapes, *steps):
    """Results [64, n] of products begun at zero: steps are (which, left, right)."""

    def run(*accs):
        for which, left, right in steps:
            plgpu.wgmma(accs[which], left, right)
        return tuple(acc[...] for acc in accs)

    accs = [plgpu.ACC((CHUNK, n), jnp.float32) for n in shapes]
    return pl.run_scoped(run, *accs)


def _added(start, *steps):
    """``start`` plus products (left, right)."""

    def run(acc):
        for left, right in steps:
            plgpu.wgmma(acc, left, right)

    return pl.run_state(run)(plgpu.ACC.init(start))


def _read(ref):
    return plgpu.load(ref, layout=_WGMMA).astype(jnp.float32)


def _body(q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays, d_q, d_k,
          d_g, d_beta, q_union, k_union, o_union, dr_union, r_union, s_union, r_low, e_sm, t_sm,
          decay_sm, scratch, table, ready, *, length: int, scale: float, group: int,
          parts: int):  # fmt: skip
    (q_rows, q_sm), (k_rows, k_sm), (o_rows, o_sm) = q_union, k_union, o_union
    (dr_rows, dr_sm), (r_rows, r_sm), (s_sm, out_rows, out_sm) = dr_union, r_union, s_union
    head, c, b = (lax.axis_index(name) for name in ("head", "chunk", "row"))
    wg = lax.axis_index("warpgroup")
    rows = pl.ds(c * CHUNK, CHUNK)
    limit = jnp.full((128,), length - c * CHUNK, jnp.int32)
    dk = parts * PART
    channels = [slice(PART * part, PART * (part + 1)) for part in range(parts)]
    wide = [pl.ds(PART * part, PART) for part in range(parts)]

    @pl.when(wg == 0)
    def _():
        def copy(source, to):
            plgpu.copy_gmem_to_smem(source, to, ready)

        for part in range(parts):
            at = pl.ds(part * PART, PART)
            copy(q.at[b, rows, head // group, at], q_rows.at[part])
            copy(k.at[b, rows, head // group, at], k_rows.at[part])
        for half in range(2):
            at = pl.ds(half * 64, 64)
            for x, to in ((d_out, o_rows), (d_rest, dr_rows), (v, r_rows)):
                copy(x.at[b, rows, head, at], to.at[half])
            copy(states.at[b, head, c, at], s_sm.at[half])
            for n in range(2):
                copy(ends.at[b, head, c, n, at], e_sm.at[n, half])
            copy(inverses.at[b, head, half, rows], t_sm.at[half])
        copy(decays.at[b, head, c], decay_sm)

    vectors_call(scale, 4 * g.shape[-1], False)(
        scratch, g.at[b, rows, head], beta.at[b, rows, head], g.at[b, rows, head], limit
    )
    plgpu.barrier_wait(ready)

    def vector(at, axis):
        """Over rows (axis 0) or columns (1)."""
        place = scratch.at[pl.ds(at // 4, CHUNK)]
        x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(x, _SQUARE, [axis])

    def from_start(n):
        x = plgpu.load(decay_sm.at[n], layout=_WGMMA.reduce(1))
        return lax.broadcast_in_dim(x, _SQUARE, [0])

    # R of 64 value channels, of which the scan used the high part, in the place of V.
    (seen,) = _products(
        (CHUNK,), *[(0, k_sm.at[n], _transposed(s_sm.at[wg, :, at])) for n, at in enumerate(wide)]
    )
    r_sm[wg], r_low[wg] = high_low(_read(r_sm.at[wg]) - seen * from_start(0))
    plgpu.commit_smem()
    sums.block_barrier()

    def leave(x, first):
        """Results to the device by way of the states' place."""
        for part in range(parts):
            out_sm[first + part] = x[part].astype(jnp.bfloat16)
        plgpu.commit_smem()

    def from_outputs():
        asked, d_m, qk = _products(
            (dk, CHUNK, CHUNK),
            *[(0, o_sm.at[n], s_sm.at[n]) for n in range(2)],
            *[(1, o_sm.at[n], _transposed(x.at[n])) for n in range(2) for x in (r_sm, r_low)],
            *[(2, q_sm.at[n], _transposed(k_sm.at[n])) for n in range(parts)],
        )
        weight = sums.decays_call(False)(scratch) * scale
        scores = qk * weight
        plgpu.commit_smem()  # all warps have read do
        o_sm[0], o_sm[1] = d_m.astype(jnp.bfloat16), scores.astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 1
        high, low = high_low(d_m * vector(inverse.BETA, 1))
        (d_scores,) = _products(
            (CHUNK,), (0, high, t_sm.at[0]), (0, high, t_sm.at[1]), (0, low, t_sm.at[0])
        )
        d_qk = (d_scores * weight).astype(jnp.bfloat16)
        moved = d_scores * scores
        r_sm[0] = d_qk
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        sums.sum_columns(table.at[pl.ds(sums.BY_SCORES, 4)], moved)
        result = []
        for part, at in enumerate(channels):
            x = asked[:, at] * from_start(1)
            moved = moved + x * _read(q_sm.at[part])
            result.append(_added(x, (d_qk, k_sm.at[part])))
        sums.sum_rows(table.at[sums.FROM_SCORES], moved)
        leave(result, 0)
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            plgpu.copy_smem_to_gmem(out_rows.at[part], d_q.at[b, rows, head, at])

    def from_state():
        zero = plgpu.layout_cast(jnp.zeros(_SQUARE, jnp.float32), _WGMMA)
        through = zero
        for half in range(2):
            for part, at in enumerate(wide):
                state = plgpu.load(s_sm.at[half, :, at], layout=_WGMMA)
                state = remainder.load(remainders.at[b, head, c, half, part], state)
                end = _read(e_sm.at[0, half, :, at]) + _read(e_sm.at[1, half, :, at])
                through = through + state * end
        sums.sum_rows(table.at[sums.STATES], through * decay_sm[0, CHUNK - 1])
        d_keys, seen = _products(
            (dk, dk),
            *[(0, r, e_sm.at[m, n]) for n in range(2)
              for r, m in ((r_sm.at[n], 0), (r_sm.at[n], 1), (r_low.at[n], 0))],
            *[(1, dr_sm.at[n], s_sm.at[n]) for n in range(2)],
        )
        rounded = high_low(d_keys)
        plgpu.commit_smem()  # all warps have read the states
        beta_wide = plgpu.load(scratch.at[pl.ds(inverse.BETA // 4, CHUNK)], layout=_WGMMA.reduce(1))
        e_sm[0, 0] = (d_keys * lax.broadcast_in_dim(beta_wide, (CHUNK, dk), [0])).astype(jnp.bfloat16)
        (d_x,) = _products(
            (CHUNK,),
            *[(0, x[:, at], _transposed(k_sm.at[n]))
              for n, at in enumerate(channels) for x in rounded],
        )
        plgpu.commit_smem()
        sums.block_barrier()  # 1
        d_x = _added(d_x * vector(inverse.TO_END, 1), (_transposed(o_sm.at[0]), o_sm.at[1]))
        sums.sum_rows(table.at[sums.BETAS], d_x * (_read(t_sm.at[0]) + _read(t_sm.at[1])))
        high, low = high_low(d_x * vector(inverse.BETA, 0))
        (y,) = _products(
            (CHUNK,),
            (0, high, _transposed(t_sm.at[0])),
            (0, high, _transposed(t_sm.at[1])),
            (0, low, _transposed(t_sm.at[0])),
        )
        dr_sm[0], dr_sm[1] = high_low(y)
        plgpu.commit_smem()
        d_a, kk = _products(
            (CHUNK, CHUNK),
            *[(0, _transposed(t_sm.at[m]), dr_sm.at[n]) for m, n in ((0, 0), (0, 1), (1, 0))],
            *[(1, k_sm.at[n], _transposed(k_sm.at[n])) for n in range(parts)],
        )
        d_a = -d_a * sums.decays_call(True)(scratch)
        moved = d_a * kk
        d_kk = (d_a * vector(inverse.BETA, 1)).astype(jnp.bfloat16)
        sums.sum_columns(table.at[pl.ds(sums.BY_KEYS, 4)], moved)
        moved = -moved * vector(inverse.BETA, 1)
        r_sm[1] = d_kk
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        (d_end,) = _products((dk,), *[(0, _transposed(t_sm.at[n]), e_sm.at[0, 0]) for n in range(2)])
        result, to_end = [], zero
        for part, at in enumerate(channels):
            keys = _read(k_sm.at[part])
            x = d_end[:, at] * vector(inverse.TO_END, 0)
            to_end = to_end + x * keys
            y = seen[:, at] * from_start(0)
            moved = moved - (x + y) * keys
            result.append(
                _added(
                    x - y,
                    (d_kk, k_sm.at[part]),
                    (_transposed(r_sm.at[1]), k_sm.at[part]),
                    (_transposed(r_sm.at[0]), q_sm.at[part]),
                )
            )
        sums.sum_rows(table.at[sums.TO_END], to_end)
        sums.sum_rows(table.at[sums.FROM_KEYS], moved)
        leave(result, parts)
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            plgpu.copy_smem_to_gmem(out_rows.at[parts + part], d_k.at[b, rows, head, at])

    pl.when(wg == 0)(from_outputs)
    pl.when(wg == 1)(from_state)
    sums.block_barrier()

    @pl.when(wg == 0)
    def _():
        sums.finish_call(4 * g.shape[-1])(
            scratch, table, g.at[b, rows, head], d_g.at[b, rows, head], d_beta.at[b, rows, head],
            limit,
        )  # fmt: skip

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def chunk_gradients(
    q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays, scale
):
    """(dq, dk [B, T, H, Dk] of every value head, dlog_decay, dbeta [B, T, H]).

    inverses, decays: ``kernel_chunks.chunks``'s.  states, remainders: ``kernel_scan.scan``'s "borders".
    d_rest, ends: ``gradients_kernel_scan.reverse_scan``'s.
    """
    b, t, h, dv = d_out.shape
    hk, dk = q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    assert dv == VALUES
    body = functools.partial(_body, length=t, scale=scale, group=h // hk, parts=parts)
    sizes = (2 * parts, CHUNK, PART)
    per_head, per_token = (b, t, h, dk), jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    return launch(
        body,
        (q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays),
        (*[jax.ShapeDtypeStruct(per_head, q.dtype)] * 2, per_token, per_token),
        name="gated_delta_gradients",
        grid={"head": h, "chunk": nc, "row": b},
        warpgroups=2,
        scratch=[
            tokens(parts, CHUNK, PART),
            tokens(parts, CHUNK, PART),
            *[tokens(2, CHUNK, 64)] * 3,
            plgpu.RefUnion(
                tiles(2, 64, dk),
                plgpu.SMEM(sizes, jnp.bfloat16, transforms=ROWS),
                plgpu.SMEM(sizes, jnp.bfloat16, transforms=BF16_TILE),
            ),
            tiles(2, CHUNK, 64),
            tiles(2, 2, 64, dk),
            tiles(2, CHUNK, CHUNK),
            plgpu.SMEM((2, CHUNK), jnp.float32),
            3 * CHUNK,
            plgpu.SMEM((sums.TABLE_ROWS, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * parts + 14 + 1),
        ],
    )

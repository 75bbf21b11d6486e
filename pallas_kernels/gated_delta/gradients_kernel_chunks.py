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

Two warpgroups, each with half of the value channels for R and half of the key channels for all
that has them; between these the first has what comes from the outputs, the second what comes from
the state.  A block goes from chunk to chunk; what the next one needs is copied to where its place
becomes free:

    both : R | do S^T, dR S^T, R E^T, S E     | K dK'^T   ... |              | X dK' | dQ, dK ->
    1    :     do R^T, q k^T                  | dM, P ->      | dP   dP D -> |
    2    :     k k^T                          |               | dX  dT  dA -> |         dg, dbeta
    next :                                                 E ^          S, do, dR ^  the others ^
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import gpu
from pallas_kernels.gated_delta import gradients_kernel_sums as sums
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta import remainder
from pallas_kernels.gated_delta.kernel_chunks import PART, high_low, vectors_call
from pallas_kernels.gated_delta.kernel_scan import tiles, tokens
from pallas_kernels.gla.channels import CHUNK
from pallas_kernels.launch import launch

CHANNELS = 128  # value channels of a head, and key channels
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (CHUNK, CHUNK)
_FLOATS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def _transposed(ref):
    return ref.transpose((1, 0))


def _products(n: int, *steps):
    """n results [64, 64] of products begun at zero: steps are (which, left, right)."""

    def run(*accs):
        for which, left, right in steps:
            plgpu.wgmma(accs[which], left, right)
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[plgpu.ACC(_SQUARE, jnp.float32)] * n)


def _added(start, *steps):
    """``start`` plus products (left, right)."""

    def run(acc):
        for left, right in steps:
            plgpu.wgmma(acc, left, right)

    return pl.run_state(run)(plgpu.ACC.init(start))


def _read(ref):
    return plgpu.load(ref, layout=_WGMMA).astype(jnp.float32)


def _body(q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays, d_q, d_k,
          d_g, d_beta, q_union, k_union, o_union, dr_union, r_union, low_union, end_union,
          ends_one, s_union, t_one, decay_sm, scratches, tables, ready, *, length: int,
          scale: float, group: int, blocks: int):  # fmt: skip
    heads, n_chunks = d_out.shape[2], states.shape[2]
    n_items = d_out.shape[0] * heads * n_chunks
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    halves = [pl.ds(PART * n, PART) for n in range(2)]

    def place(item):
        """(row, head, chunk)"""
        return item // (heads * n_chunks), item % heads, item // heads % n_chunks

    def places(item):
        """Shared memory.  That there is one slot is hidden from the compiler, which would carry
        all addresses through the loop, and spill them."""
        slot = item // n_items
        pairs = q_union, k_union, o_union, dr_union, r_union, low_union, end_union, s_union
        pairs = [[x.at[slot] for x in pair] for pair in pairs]
        first, others = pairs[-2][1], ends_one.at[slot]
        ends_sm = [[first, others.at[0]], [others.at[1], others.at[2]]]  # [part][half]
        return pairs, ends_sm, t_one.at[slot]

    def load(item, when: int):
        """Starts the copies whose places become free first (0), second (1) or last (2)."""
        pairs, e_sm, t_sm = places(item)
        (q_rows, _), (k_rows, _), (o_rows, _), (dr_rows, _), (r_rows, _), *_, (s_sm, _) = pairs
        b, head, c = place(item)
        rows = pl.ds(c * CHUNK, CHUNK)

        def copy(source, to):
            plgpu.copy_gmem_to_smem(source, to, ready)

        def copy_end(part, half):
            for n, at in enumerate(halves):
                copy(ends.at[b, head, c, part, halves[half], at], e_sm[part][half].at[n])

        if when == 0:
            for part, half in ((0, 1), (1, 0), (1, 1)):
                copy_end(part, half)
        for n, at in enumerate(halves):
            if when == 1:
                copy(d_out.at[b, rows, head, at], o_rows.at[n])
                copy(d_rest.at[b, rows, head, at], dr_rows.at[n])
                for m in range(2):
                    copy(states.at[b, head, c, at, halves[m]], s_sm.at[n, m])
            if when == 2:
                copy(q.at[b, rows, head // group, at], q_rows.at[n])
                copy(k.at[b, rows, head // group, at], k_rows.at[n])
                copy(v.at[b, rows, head, at], r_rows.at[n])
                copy(inverses.at[b, head, n, rows], t_sm.at[n])
        if when == 2:
            copy(decays.at[b, head, c], decay_sm)

    def load_first_end(item, half):
        """Of the first value channels, where a warpgroup's dk leaves from."""
        b, head, c = place(item)
        source = ends.at[b, head, c, 0, halves[0], pl.ds(PART * half, PART)]
        plgpu.copy_gmem_to_smem(source, places(item)[1][0][0].at[half], ready)

    def load_next(item, when: int):
        pl.when((wg == 0) & (item + blocks < n_items))(lambda: load(item + blocks, when))

    def limit(c):
        return jnp.full((128,), length - c * CHUNK, jnp.int32)

    def vectors(item, turn):
        b, head, c = place(item)
        at = b, pl.ds(c * CHUNK, CHUNK), head
        vectors_call(scale, 4 * g.shape[-1], False)(
            scratches.at[turn], g.at[at], beta.at[at], g.at[at], limit(c)
        )

    def one_chunk(item, turn):
        pairs, e_sm, t_sm = places(item)
        (_, q_sm), (_, k_sm), (_, o_sm), (_, dr_sm), (_, r_sm), *pairs = pairs
        (low_rows, r_low), (end_rows, end_sm), (s_sm, partial_sm) = pairs
        b, head, c = place(item)
        rows = pl.ds(c * CHUNK, CHUNK)
        scratch, table = scratches.at[turn], tables.at[turn]
        codes = [
            plgpu.load(remainders.at[b, head, c, wg, n], layout=remainder.LAYOUT) for n in range(2)
        ]
        plgpu.barrier_wait(ready)

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
        sums.block_barrier()

        def begin(w: int, more=()):
            """(do S^T, dR S^T, K dK'^T of the w-th half of the key channels, and the product of the
            steps ``more`` if there are any)"""
            through = []
            for n in range(2):
                state = plgpu.load(s_sm.at[w, n], layout=_WGMMA)
                state = remainder.joined(codes[n], state)
                through.append(state * (_read(e_sm[0][w].at[n]) + _read(e_sm[1][w].at[n])))
            sums.sum_rows(table.at[sums.STATES + w], sum(through) * decay_sm[0, CHUNK - 1])
            asked, seen, d_keys, *rest = _products(
                3 + bool(more),
                *[(0, o_sm.at[n], s_sm.at[n, w]) for n in range(2)],
                *[(1, dr_sm.at[n], s_sm.at[n, w]) for n in range(2)],
                *[(2, r.at[n], e_sm[part][n].at[w]) for n in range(2)
                  for r, part in ((r_sm, 0), (r_sm, 1), (r_low, 0))],
                *[(3, *step) for step in more],
            )  # fmt: skip
            sums.block_barrier()  # 1: states, ends, do, dR and R are read
            end_sm[w] = (d_keys * vector(inverse.BETA, 0)).astype(jnp.bfloat16)
            (d_x,) = _products(1, *[(0, x, _transposed(k_sm.at[w])) for x in high_low(d_keys)])
            return asked, seen, d_x, *rest

        def finish(w: int, asked, seen, moved):
            """dq and dk of the w-th half of the key channels, and log_decay's share."""
            (d_end,) = _products(1, *[(0, _transposed(t_sm.at[n]), end_sm.at[w]) for n in range(2)])
            keys = _read(k_sm.at[w])
            asked, seen = asked * from_start(1), seen * from_start(0)
            d_end = d_end * vector(inverse.TO_END, 0)
            sums.sum_rows(table.at[sums.TO_END + w], d_end * keys)
            moved = moved + asked * _read(q_sm.at[w]) - (d_end + seen) * keys
            sums.sum_rows(table.at[sums.FROM + w], moved)
            from_scores, from_keys = r_sm.at[0], r_sm.at[1]
            x = _added(asked, (from_scores, k_sm.at[w]))
            r_low[w] = x.astype(jnp.bfloat16)
            x = _added(
                d_end - seen,
                (from_keys, k_sm.at[w]),
                (_transposed(from_keys), k_sm.at[w]),
                (_transposed(from_scores), q_sm.at[w]),
            )
            plgpu.commit_smem()  # all warps have read what is there
            end_sm[w] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(low_rows.at[w], d_q.at[b, rows, head, halves[w]])
            plgpu.copy_smem_to_gmem(end_rows.at[w], d_k.at[b, rows, head, halves[w]])

        def from_outputs():
            steps = [(o_sm.at[n], _transposed(r.at[n])) for n in range(2) for r in (r_sm, r_low)]
            asked, seen, d_x, d_m = begin(0, steps)
            partial_sm[...] = d_x
            (qk,) = _products(1, *[(0, q_sm.at[n], _transposed(k_sm.at[n])) for n in range(2)])
            weight = sums.decays_call(False)(scratch) * scale
            scores = qk * weight
            o_sm[0], o_sm[1] = d_m.astype(jnp.bfloat16), scores.astype(jnp.bfloat16)
            plgpu.commit_smem()
            sums.block_barrier()  # 2
            load_next(item, 0)
            high, low = high_low(d_m * vector(inverse.BETA, 1))
            (d_scores,) = _products(
                1, (0, high, t_sm.at[0]), (0, high, t_sm.at[1]), (0, low, t_sm.at[0])
            )
            r_sm[0] = (d_scores * weight).astype(jnp.bfloat16)
            pl.when(item + blocks < n_items)(lambda: vectors(item + blocks, 1 - turn))
            plgpu.commit_smem()
            sums.block_barrier()  # 3
            load_next(item, 1)
            moved = d_scores * scores
            sums.sum_columns(table.at[pl.ds(sums.BY_SCORES, 4)], moved)
            finish(0, asked, seen, moved)

        def from_state():
            asked, seen, d_x = begin(1)
            plgpu.commit_smem()
            sums.block_barrier()  # 2
            d_x = (d_x + plgpu.load(partial_sm, layout=_WGMMA)) * vector(inverse.TO_END, 1)
            d_x = _added(d_x, (_transposed(o_sm.at[0]), o_sm.at[1]))
            sums.sum_rows(table.at[sums.BETAS], d_x * (_read(t_sm.at[0]) + _read(t_sm.at[1])))
            high, low = high_low(d_x * vector(inverse.BETA, 0))
            right = [_transposed(t_sm.at[n]) for n in range(2)]
            (y,) = _products(1, (0, high, right[0]), (0, high, right[1]), (0, low, right[0]))
            dr_sm[0], dr_sm[1] = high_low(y)
            plgpu.commit_smem()
            steps = [(0, right[m], dr_sm.at[n]) for m, n in ((0, 0), (0, 1), (1, 0))]
            steps += [(1, k_sm.at[n], _transposed(k_sm.at[n])) for n in range(2)]
            d_a, kk = _products(2, *steps)
            d_a = -d_a * sums.decays_call(True)(scratch)
            r_sm[1] = (d_a * vector(inverse.BETA, 1)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            sums.block_barrier()  # 3
            moved = d_a * kk
            sums.sum_columns(table.at[pl.ds(sums.BY_KEYS, 4)], moved)
            finish(1, asked, seen, -moved * vector(inverse.BETA, 1))

        pl.when(wg == 0)(from_outputs)
        pl.when(wg == 1)(from_state)
        sums.block_barrier()
        load_next(item, 2)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(item + blocks < n_items)(lambda: load_first_end(item + blocks, wg))

        @pl.when(wg == 0)
        def _():
            sums.finish_call(4 * g.shape[-1])(
                scratch, table, g.at[b, rows, head], d_g.at[b, rows, head],
                d_beta.at[b, rows, head], limit(c),
            )  # fmt: skip

    @pl.when(wg == 0)
    def _():
        for when in range(3):
            load(block, when)
        load_first_end(block, 0)
        load_first_end(block, 1)
        vectors(block, 0)

    sums.block_barrier()

    steps = (n_items - block + blocks - 1) // blocks
    lax.fori_loop(0, steps, lambda i, _: one_chunk(block + i * blocks, i % 2), None)
    plgpu.wait_smem_to_gmem(0)


def chunk_gradients(
    q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays, scale: float
):
    """(dq, dk [B, T, H, 128] of every value head, dlog_decay, dbeta [B, T, H]), for Dk = Dv = 128.

    inverses, decays: ``kernel_chunks.chunks``'s.  states, remainders: ``kernel_scan.scan``'s
    borders.  d_rest, ends: ``gradients_kernel_scan.reverse_scan``'s.
    """
    b, t, h, dv = d_out.shape
    hk, dk = q.shape[2:]
    assert dk == dv == CHANNELS
    blocks = min(gpu().sms, b * h * -(-t // CHUNK))
    body = functools.partial(_body, length=t, scale=scale, group=h // hk, blocks=blocks)
    per_head, per_token = (b, t, h, dk), jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    return launch(
        body,
        (q, k, v, g, beta, inverses, d_rest, d_out, states, remainders, ends, decays),
        (*[jax.ShapeDtypeStruct(per_head, q.dtype)] * 2, per_token, per_token),
        name="gated_delta_gradients",
        grid=blocks,
        warpgroups=2,
        scratch=[
            *[tokens(1, 2, CHUNK, PART)] * 7,
            tiles(1, 3, 2, 64, PART),
            plgpu.RefUnion(
                tiles(1, 2, 2, 64, PART),
                plgpu.SMEM((1, *_SQUARE), jnp.float32, transforms=_FLOATS),
            ),
            tiles(1, 2, CHUNK, CHUNK),
            plgpu.SMEM((2, CHUNK), jnp.float32),
            plgpu.SMEM((2, 3 * CHUNK), jnp.float32),
            plgpu.SMEM((2, sums.TABLE_ROWS, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=6 + 8 + 11),
        ],
    )

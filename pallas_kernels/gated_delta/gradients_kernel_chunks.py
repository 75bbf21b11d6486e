"""The gated delta rule's gradients inside a chunk on Hopper, all chunks at once.

X = T diag(beta), M = P X and K' = X^T diag(to end) K are those of ``kernel_chunks``. Given are the
states S at a chunk's start and the gradients E of those at its end. Given too are do of the
outputs, and dR of R = V - diag(e) K S:

    dM = do R^T      dK' = R E^T      dX = P^T dM + diag(to end) K dK'^T      dP = dM X^T
    dA = -T^T (dX diag(beta)) T^T     dbeta_j = sum_i T_ij dX_ij + sum_i dA_ji A_ji / beta_j
    dQ = scale (diag(e) do S^T + (dP D) K)
    dK = -diag(e) dR S^T + scale (dP D)^T Q + (dKK + dKK^T) K + diag(to end) X dK'
    dKK = beta_i dA_ij D_ij

dlog_decay has three parts: sums of dA A + dP P over rows and columns, q dQ and k dK of the terms
with the state, and S E.

Where keys are parallel and nothing decays, dX's entries cancel in dbeta, and S E is a sum of terms
of both signs.  So R (computed here, from the states that the scan used), E, dK', T and products
with them have two bf16 parts each.  S E takes twelve bits more of S (``remainder``).

One block per chunk and value head.  Its two warpgroups have half of the value channels each for R,
and half of the key channels each for the products over these.  The rest is divided: the first
warpgroup has the terms from the outputs, the second those from the state:

    both : TMA | R | do S^T, dR S^T, R E^T, S E | K dK'^T      |         | X dK' | dQ, dK ->
    1    :     |   |                            | q k^T, dM -> | dP D -> |       | dg, dbeta ->
    2    :     |   |                            | k k^T        | dX  dA  -> dKK  |

Copies: each warpgroup copies a half of everything by TMA (``load``).  Warpgroup 0 copies e, too.
Both load the states' remainders into registers, and the chunk's vectors into shared memory
(``load_small``).
Waits: both wait for all copies of a group: on ``early`` (k, v, S, e), ``middle`` (do, dR, E),
``late`` (q, T).  ``block_barrier`` joins the two: after R; (1) after the products with states;
(2) after dM and q k^T D; (3) after dP D and dKK; and before ``finish_vectors``.
Writes: a warpgroup stores dQ and dK of its key channels by TMA.  Warpgroup 0 stores dlog_decay and
dbeta from the table of sums.

Floor: 29 bytes per element of q at as many key as value heads, 0.453 ms at (8, 4096, 16, 16, 128,
128).  Result: 0.886 on one H200.  Attempts: docs/lab/gated-delta.md.  Command:
``python -m benchmarks.kernels.gated_delta``.
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
from pallas_kernels.gated_delta.kernel_chunks import PART, AroundChunks, high_low, vectors_call
from pallas_kernels.launch import Views, in_place, launch
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.op import Heads

CHANNELS = 128  # value channels of a head, and key channels
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (CHUNK, CHUNK)
# Tiles by tokens and halves of the channels.  Later tenants: of d_out dM and q k^T D; of d_rest the
# parts of T^T dX; of r (first V, then R) dP D and dKK^T; of r_low dQ; of end dK', then dK.
# ``inverse`` holds T^T, and names that end in ``_t`` hold transposes.
_TOKENS = "q", "k", "d_out", "d_rest", "r", "r_low", "end"
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


class _Chunk:
    """The program of a warpgroup: half of the channels of a chunk of a value head.

    added: the gradients of q and k are added to those of the other value head that shares them.
    """

    def __init__(self, gmem, smem, barrier, *, length: int, scale: float, group: int, added: bool):
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.scale, self.group, self.added = scale, group, added
        # [part][half of the values]
        self.ends = [[smem.end.tiles, smem.ends.at[0]], [smem.ends.at[1], smem.ends.at[2]]]
        self.head, self.chunk, self.row = (lax.axis_index(x) for x in ("head", "chunk", "row"))
        self.warpgroup = lax.axis_index("warpgroup")
        self.rows = pl.ds(self.chunk * CHUNK, CHUNK)
        self.limit = jnp.full((128,), length - self.chunk * CHUNK, jnp.int32)
        self.halves = [pl.ds(PART * n, PART) for n in range(2)]
        self.own = pl.ds(PART * self.warpgroup, PART)  # channels

    def run(self) -> None:
        smem, wg = self.smem, self.warpgroup
        self.load()
        self.load_small()
        plgpu.barrier_wait(self.barrier.early)
        self.form_rests()
        asked, seen, d_keys, through = self.through_states()
        sums.sum_rows(smem.table.at[sums.STATES + wg], through)
        sums.block_barrier()  # 1: states, ends and dR are read
        weighted = d_keys * self.vector(inverse.BETA, 0)
        smem.end.tiles[wg] = weighted.astype(jnp.bfloat16)
        keys = _transposed(smem.k.tiles.at[wg])
        (d_x_t,) = _products(1, *[(0, x, keys) for x in high_low(d_keys)])
        plgpu.barrier_wait(self.barrier.late)
        pl.when(wg == 0)(lambda: self.from_outputs(d_x_t))
        pl.when(wg == 1)(lambda: self.from_state(d_x_t))
        self.form_results(asked, seen)
        self.store()
        sums.block_barrier()
        pl.when(wg == 0)(self.finish_vectors)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # --- TMA ---

    def load(self) -> None:
        """Each warpgroup copies a half of everything, and first what is first used."""
        gmem, smem, barrier = self.gmem, self.smem, self.barrier
        b, head, wg = self.row, self.head, self.warpgroup
        early, middle, late = barrier.early, barrier.middle, barrier.late
        at = b, self.rows, head // self.group, self.own
        plgpu.copy_gmem_to_smem(gmem.k.at[at], smem.k.rows.at[wg], early)
        at = b, self.rows, head, self.own
        plgpu.copy_gmem_to_smem(gmem.v.at[at], smem.r.rows.at[wg], early)
        for m, half in enumerate(self.halves):
            source = gmem.states.at[b, head, self.chunk, half, self.own]
            plgpu.copy_gmem_to_smem(source, smem.states.tiles.at[m, wg], early)
        plgpu.copy_gmem_to_smem(gmem.d_out.at[at], smem.d_out.rows.at[wg], middle)
        plgpu.copy_gmem_to_smem(gmem.d_rest.at[at], smem.d_rest.rows.at[wg], middle)
        for part in range(2):
            for m, half in enumerate(self.halves):
                source = gmem.ends.at[b, head, self.chunk, part, half, self.own]
                plgpu.copy_gmem_to_smem(source, self.ends[part][m].at[wg], middle)
        at = b, self.rows, head // self.group, self.own
        plgpu.copy_gmem_to_smem(gmem.q.at[at], smem.q.rows.at[wg], late)
        source = gmem.inverses.at[b, head, wg, self.rows]
        plgpu.copy_gmem_to_smem(source, smem.inverse.at[wg], late)

    def load_small(self) -> None:
        """The states' bits below bf16, and the chunk's vectors."""
        gmem, smem, b, head = self.gmem, self.smem, self.row, self.head

        @pl.when(self.warpgroup == 0)
        def _():
            source = gmem.decays.at[b, head, self.chunk]
            plgpu.copy_gmem_to_smem(source, smem.decays, self.barrier.early)

        self.codes = [
            plgpu.load(
                gmem.remainders.at[b, head, self.chunk, n, self.warpgroup], layout=remainder.LAYOUT
            )
            for n in range(2)
        ]
        g, beta = gmem.g.at[b, self.rows, head], gmem.beta.at[b, self.rows, head]
        vectors = vectors_call(self.scale, 4 * gmem.g.shape[-1], False)
        vectors(smem.scratch, g, beta, g, self.limit)  # the second g only fills a place

    def vector(self, at: int, axis: int):
        """A chunk's vector over rows (axis 0) or columns (1) of [64, 64]."""
        place = self.smem.scratch.at[pl.ds(at // 4, CHUNK)]
        x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(x, _SQUARE, [axis])

    def from_start(self, n: int):
        """e, or with n = 1 scale e, over rows of [64, 64]."""
        x = plgpu.load(self.smem.decays.at[n], layout=_WGMMA.reduce(1))
        return lax.broadcast_in_dim(x, _SQUARE, [0])

    # --- both: R | do S^T, dR S^T, R E^T, S E ---

    def form_rests(self) -> None:
        """R, in two bf16 parts, in the place of V."""
        smem, wg = self.smem, self.warpgroup
        keys, states = smem.k.tiles, smem.states.tiles
        (seen,) = _products(1, *[(0, keys.at[n], _transposed(states.at[wg, n])) for n in range(2)])
        r, low = smem.r.tiles, smem.r_low.tiles
        r[wg], low[wg] = high_low(_read(r.at[wg]) - seen * self.from_start(0))
        plgpu.commit_smem()
        plgpu.barrier_wait(self.barrier.middle)
        sums.block_barrier()

    def through_states(self):
        """(do S^T, dR S^T, R E^T, S E) of half of the key channels."""
        # Both warpgroups run the same code.  A copy for each would exceed the instruction cache.
        smem, wg, ends = self.smem, self.warpgroup, self.ends
        states, r, low = smem.states.tiles, smem.r.tiles, smem.r_low.tiles
        return _products(
            3,
            *[(0, smem.d_out.tiles.at[n], states.at[n, wg]) for n in range(2)],
            *[(1, smem.d_rest.tiles.at[n], states.at[n, wg]) for n in range(2)],
            *[
                (2, left.at[n], ends[part][n].at[wg])
                for n in range(2)
                for left, part in ((r, 0), (r, 1), (low, 0))
            ],
            meanwhile=self.states_by_ends,
        )

    def states_by_ends(self):
        """exp(G_64) S E, where S has twelve bits more than bf16."""
        smem, wg, through = self.smem, self.warpgroup, []
        for n in range(2):
            state = plgpu.load(smem.states.tiles.at[n, wg], layout=_WGMMA)
            state = remainder.joined(self.codes[n], state)
            end = _read(self.ends[0][n].at[wg]) + _read(self.ends[1][n].at[wg])
            through.append(state * end)
        return sum(through) * smem.decays[0, CHUNK - 1]

    # --- 1: q k^T, dM -> | dP D -> ---

    def from_outputs(self, d_x_t) -> None:
        smem, r, low = self.smem, self.smem.r.tiles, self.smem.r_low.tiles
        d_out, q, k = smem.d_out.tiles, smem.q.tiles, smem.k.tiles
        smem.states.partial[...] = d_x_t
        d_m, qk, weight = _products(
            2,
            *[(0, d_out.at[n], _transposed(x.at[n])) for n in range(2) for x in (r, low)],
            *[(1, q.at[n], _transposed(k.at[n])) for n in range(2)],
            meanwhile=lambda: sums.decays_call(False)(smem.scratch) * self.scale,
        )
        scores = qk * weight
        plgpu.commit_smem()  # all warps have read do
        d_out[0], d_out[1] = d_m.astype(jnp.bfloat16), scores.astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        high, low = high_low(d_m * self.vector(inverse.BETA, 1))
        t = smem.inverse
        (d_scores,) = _products(1, (0, high, t.at[0]), (0, high, t.at[1]), (0, low, t.at[0]))
        r[0] = (d_scores * weight).astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 3
        moved = d_scores * scores
        sums.sum_rows(smem.table.at[sums.INSIDE], moved)
        sums.sum_columns(smem.table.at[pl.ds(sums.BY_SCORES, 4)], moved)

    # --- 2: k k^T | dX, dA -> dKK ---

    def from_state(self, d_x_t) -> None:
        smem, k, t = self.smem, self.smem.k.tiles, self.smem.inverse
        kk, decay = _products(
            1,
            *[(0, k.at[n], _transposed(k.at[n])) for n in range(2)],
            meanwhile=lambda: sums.decays_call(True)(smem.scratch),
        )
        plgpu.commit_smem()
        sums.block_barrier()  # 2
        partial = plgpu.load(smem.states.partial, layout=_WGMMA)
        d_all_t = (d_x_t + partial) * self.vector(inverse.TO_END, 1)
        d_all_t = _added(d_all_t, (_transposed(smem.d_out.tiles.at[0]), smem.d_out.tiles.at[1]))
        sums.sum_rows(smem.table.at[sums.BETAS], d_all_t * (_read(t.at[0]) + _read(t.at[1])))
        high, low = high_low(d_all_t * self.vector(inverse.BETA, 0))
        right = [_transposed(t.at[n]) for n in range(2)]
        (y,) = _products(1, (0, high, right[0]), (0, high, right[1]), (0, low, right[0]))
        d_rest = smem.d_rest.tiles
        d_rest[0], d_rest[1] = high_low(y)
        plgpu.commit_smem()
        (d_a_t,) = _products(1, *[(0, right[m], d_rest.at[n]) for m, n in ((0, 0), (0, 1), (1, 0))])
        d_a_t = -d_a_t * decay
        smem.r.tiles[1] = (d_a_t * self.vector(inverse.BETA, 1)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        sums.block_barrier()  # 3
        moved = d_a_t * kk
        inside = -moved * self.vector(inverse.BETA, 1)
        sums.sum_rows(smem.table.at[sums.INSIDE + 1], inside)
        sums.sum_columns(smem.table.at[pl.ds(sums.BY_KEYS, 4)], moved)

    # --- both: X dK' | dQ, dK -> ---

    def form_results(self, asked, seen) -> None:
        """dQ and dK of half of the key channels, in shared memory; sums for dlog_decay."""
        smem, wg, t = self.smem, self.warpgroup, self.smem.inverse
        table, own_end = smem.table, smem.end.tiles.at[wg]
        (d_end,) = _products(1, *[(0, _transposed(t.at[n]), own_end) for n in range(2)])
        k, q = smem.k.tiles.at[wg], smem.q.tiles.at[wg]
        keys = _read(k)
        asked, seen = asked * self.from_start(1), seen * self.from_start(0)
        d_end = d_end * self.vector(inverse.TO_END, 0)
        sums.sum_rows(table.at[sums.TO_END + wg], d_end * keys)
        moved = asked * _read(q) - (d_end + seen) * keys
        sums.sum_rows(table.at[sums.FROM + wg], moved)
        from_scores, from_keys = smem.r.tiles.at[0], smem.r.tiles.at[1]
        x = _added(asked, (from_scores, k))
        smem.r_low.tiles[wg] = x.astype(jnp.bfloat16)
        x = _added(
            d_end - seen, (from_keys, k), (_transposed(from_keys), k), (_transposed(from_scores), q)
        )
        plgpu.commit_smem()  # all warps have read what is there
        smem.end.tiles[wg] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()

    def store(self) -> None:
        gmem, smem, wg = self.gmem, self.smem, self.warpgroup
        for x, to in ((smem.r_low.rows, gmem.d_q), (smem.end.rows, gmem.d_k)):
            if self.added:
                to = to.at[self.row, self.rows, self.head // self.group, self.own]
                plgpu.copy_smem_to_gmem(x.at[wg], to, reduction_op="add")
            else:
                to = to.at[self.row, self.rows, self.head, self.own]
                plgpu.copy_smem_to_gmem(x.at[wg], to)

    def finish_vectors(self) -> None:
        """dlog_decay and dbeta from the table of sums."""
        gmem, at = self.gmem, (self.row, self.rows, self.head)
        finish = sums.finish_call(4 * gmem.g.shape[-1])
        outs = gmem.d_g.at[at], gmem.d_beta.at[at]
        finish(self.smem.scratch, self.smem.table, *outs, self.limit)


def chunk_gradients(heads: Heads, around: AroundChunks, scale: float):
    """Compute the gradients inside the chunks, for Dk = Dv = 128.

    Returns dq, dk, dlog_decay and dbeta.  dq and dk are those of every value head, [B, T, H, 128].
    If two value heads share a key head they are the sums, [B, T, Hk, 128], which depend on no
    order.  The others are [B, T, H].
    """
    b, t, h, dv = heads.v.shape
    hk, dk = heads.q.shape[2:]
    assert dk == dv == CHANNELS
    group = h // hk
    added = group == 2
    options = {"length": t, "scale": scale, "group": group, "added": added}
    of_keys = jax.ShapeDtypeStruct((b, t, hk if added else h, dk), heads.q.dtype)
    of_tokens = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    per_token = {"d_g": of_tokens, "d_beta": of_tokens}
    operands = {
        **dict(zip(("q", "k", "v", "g", "beta"), heads, strict=True)),
        "inverses": around.inverses,
        "d_rest": around.d_v,
        "d_out": around.d_out,
        "states": around.states,
        "remainders": around.remainders,
        "ends": around.ends,
        "decays": around.prepared.decays,
    }

    run = functools.partial(
        launch,
        functools.partial(_Chunk, **options),
        name="gated_delta_gradients",
        grid={"head": h, "chunk": -(-t // CHUNK), "row": b},
        warpgroups=2,
        scratch=_scratch(),
    )
    if not added:
        return run(operands, {"d_q": of_keys, "d_k": of_keys, **per_token})
    zeros = (jnp.zeros(of_keys.shape, of_keys.dtype),) * 2

    def add(refs):
        d_q, d_k = refs
        return run({**operands, "d_q": d_q, "d_k": d_k}, per_token)

    decayed, summed = in_place(add, zeros)
    return *summed, *decayed


def _scratch() -> dict:
    """Shared memory of a block, and its barriers."""
    partial = plgpu.SMEM(_SQUARE, jnp.float32, transforms=_FLOATS)
    return {
        **{name: tokens(2, CHUNK, PART) for name in _TOKENS},
        "ends": tiles(3, 2, 64, PART),
        "states": Views(tiles=tiles(2, 2, 64, PART), partial=partial),
        "inverse": tiles(2, CHUNK, CHUNK),
        "decays": plgpu.SMEM((2, CHUNK), jnp.float32),
        "scratch": 4 * CHUNK,
        "table": plgpu.SMEM((sums.TABLE_ROWS, CHUNK), jnp.float32),
        "early": plgpu.Barrier(num_arrivals=9),
        "middle": plgpu.Barrier(num_arrivals=12),
        "late": plgpu.Barrier(num_arrivals=4),
    }

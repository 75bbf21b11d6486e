"""GLA's pass over the chunks on Hopper: the recurrent state and the outputs, from gated operands.

    out_c = qg_c S_c + A_c v_c        S_{c+1} = diag(decay_c) S_c + kg_c^T v_c

for the operands of ``gla_gates.gates``.  Run backwards with the roles of the operands exchanged the
same kernel is the reverse scan of the backward pass (``reverse=True``: qg <- kg, kg <- qg,
v <- d_out, A <- A^T), whose state is the gradient of the state and whose output is dv.

One block per (128 value channels, head, batch row, segment of chunks): two warpgroups of 64 value
channels each, the first of which also starts the copies.  S^T [64 dv, Dk] stays in registers for
the whole loop; it is the register operand of out^T = S^T qg^T + v^T A^T, so it never visits memory.

    wait | S -> bf16 | wgmma out | out -> smem -> TMA | S *= decay, wgmma S | ...
           kg, v of chunk c - 1's slot <- TMA           qg, A of chunk c's slot <- TMA

A slot's operands are fetched again while products run, as soon as both warpgroups have read them.
jax >= 0.12 ignores ``setmaxnreg``: beside a third warpgroup that only copied, a thread had 168
registers, spilled, and waited for each wgmma.

Dk = 256 and more blocks than the GPU has SMs: pairs of blocks are clusters, and copy qg, kg and A
for one another, since what limits there is the L2's rate.

Floor: 9 bytes per element of q at Dk = Dv = 128, 0.140 ms at (8, 4096, 16, 128, 128).  Result:
0.156 on one H200, memory-bound.  (32, 2048, 4, 256, 512): 0.354.  More, and what was tried:
NOTES.md.  Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import gpu
from pallas_kernels.gla.gates import piece_width
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import BF16_TILE, CHUNK, ROWS
from pallas_kernels.recurrence.states import VALUE_BLOCK, read_state, write_rows, write_state

PART = 64  # key channels of a product of the state
_WGMMA = plgpu.Layout.WGMMA


def stages_of(dk: int) -> int:
    """Slots of a block's ring: what shared memory holds."""
    return 2 if dk > 128 else 3


def _scan_body(
    qg,
    kg,
    attention,
    decay,
    v,
    *rest,
    dk: int,
    dv: int,
    n_chunks: int,
    segments: int,
    pieces: int,
    want_out: bool,
    want_borders: bool,
    stage_borders: bool,
    reverse: bool,
    ragged: bool,
    initial: bool,
    pair: bool,
):
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    start_state = rest.pop(0) if initial else None
    out = rest.pop(0) if want_out else None
    borders = rest.pop(0) if want_borders else None
    final, q_sm, k_sm, a_sm, v_union, d_sm, o_union, s_sm, q_full, k_full, q_read, k_read = rest
    (v_rows, v_sm), (o_rows, o_sm) = v_union, (o_union if want_out else (None, None))
    stages = stages_of(dk)
    parts = [pl.ds(at, PART) for at in range(0, dk, PART)]
    j, b = lax.axis_index("values"), lax.axis_index("row")
    both = {}
    if pair:
        j, both = 2 * j + lax.axis_index("rank"), {"collective_axes": "rank"}
    head = lax.axis_index("head") // segments
    segment = lax.axis_index("head") % segments
    wg = lax.axis_index("warpgroup")
    per = -(-n_chunks // segments)
    first, last = segment * per, jnp.minimum((segment + 1) * per, n_chunks)
    stop = last
    if ragged:
        stop = jnp.minimum(last, (lengths[b] + (CHUNK - 1)) // CHUNK)
    steps = jnp.maximum(stop - first, 0)

    def chunk_of(i):
        return stop - 1 - i if reverse else first + i

    def load_queries(i):
        c, slot = chunk_of(i), i % stages
        rows, bar = pl.ds(c * CHUNK, CHUNK), q_full.at[slot]
        plgpu.copy_gmem_to_smem(qg.at[b, head, rows], q_sm.at[slot], bar, **both)
        for piece in range(pieces):
            plgpu.copy_gmem_to_smem(
                attention.at[b, head, piece, rows], a_sm.at[slot, piece], bar, **both
            )

    def load_keys(i):
        c, slot = chunk_of(i), i % stages
        rows, bar = pl.ds(c * CHUNK, CHUNK), k_full.at[slot]
        for w in range(2):
            at = pl.ds(j * VALUE_BLOCK + w * 64, 64)
            plgpu.copy_gmem_to_smem(v.at[b, rows, head, at], v_rows.at[slot, w], bar)
        plgpu.copy_gmem_to_smem(kg.at[b, head, rows], k_sm.at[slot], bar, **both)
        plgpu.copy_gmem_to_smem(decay.at[b, head, c], d_sm.at[slot], bar)

    def refill(load, read, i):
        """The place of the i-th chunk, which both warpgroups have read, for one ``stages`` on."""

        @pl.when((wg == 0) & (i >= 0) & (i + stages < steps))
        def _():
            plgpu.barrier_wait(read.at[i % stages])
            load(i + stages)

    @pl.when(wg == 0)
    def _():
        def begin(i, _):
            if want_out:
                load_queries(i)
            load_keys(i)

        lax.fori_loop(0, jnp.minimum(stages, steps), begin, None)

    columns = pl.ds(j * VALUE_BLOCK + wg * 64, 64)
    if initial:
        state = read_state(dk, dv)(start_state.at[b, head, segment, :, columns])
    else:
        state = plgpu.layout_cast(jnp.zeros((64, dk), jnp.float32), _WGMMA)

    def body(i, state):
        c, slot = chunk_of(i), i % stages
        rows = pl.ds(c * CHUNK, CHUNK)
        values = v_sm.at[slot, wg]
        if want_borders and stage_borders:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s_sm[wg] = state.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s_sm.at[wg], borders.at[b, head, c, columns])
        if want_out:
            plgpu.barrier_wait(q_full.at[slot])
        plgpu.barrier_wait(k_full.at[slot])
        if ragged:
            left = lengths[b] - c * CHUNK

            @pl.when(left < CHUNK)
            def _():
                tile = plgpu.load(values, layout=_WGMMA)
                token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, 64), 0, layout=_WGMMA)
                values[...] = jnp.where(token < left, tile, jnp.zeros_like(tile))
                plgpu.commit_smem()

        if want_out:

            def outputs(acc):
                for part, at in enumerate(parts):
                    rounded = state[:, part * PART : (part + 1) * PART].astype(jnp.bfloat16)
                    plgpu.wgmma(acc, rounded, q_sm.at[slot, :, at].transpose((1, 0)))
                    if want_borders and not stage_borders:
                        write_rows(PART, dk)(borders.at[b, head, c, columns, at], rounded)
                    plgpu.wgmma_wait(1)  # so that two parts' copies are alive
                for piece in range(pieces):
                    a = a_sm.at[slot, piece]
                    a = a if reverse else a.transpose((1, 0))
                    plgpu.wgmma(acc, values.transpose((1, 0)), a)
                refill(load_keys, k_read, i - 1)
                return acc[...]

            o = pl.run_scoped(outputs, plgpu.ACC((64, CHUNK), jnp.float32))
            if not pair:
                plgpu.barrier_arrive(q_read.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_sm.at[wg].transpose((1, 0))[...] = plgpu.layout_cast(
                o.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
            )
            plgpu.commit_smem()
            if pair:  # one thread arrives for its whole warpgroup, hence behind its barrier
                plgpu.barrier_arrive(q_read.at[slot])
            plgpu.copy_smem_to_gmem(o_rows.at[wg], out.at[b, rows, head, columns])

        def update(acc):
            plgpu.wgmma(acc, values.transpose((1, 0)), k_sm.at[slot])
            if want_out:
                refill(load_queries, q_read, i)
            else:
                refill(load_keys, k_read, i - 1)

        decays = plgpu.load(d_sm.at[slot], layout=_WGMMA.reduce(0))
        decayed = state * lax.broadcast_in_dim(decays, (64, dk), [1])
        state = pl.run_state(update)(plgpu.ACC.init(decayed))
        if pair:
            plgpu.commit_smem()
        plgpu.barrier_arrive(k_read.at[slot])
        return state

    state = lax.fori_loop(0, steps, body, state)
    write_state(dv)(final.at[b, head, segment, :, columns], state)
    if want_out and ragged:
        # Rows that end early: the outputs of the chunks beyond are zeros.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_sm[wg] = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.bfloat16), _WGMMA)
        plgpu.commit_smem()

        def clear(c, _):
            rows = pl.ds(c * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(o_rows.at[wg], out.at[b, rows, head, columns])

        lax.fori_loop(jnp.maximum(stop, first), last, clear, None)
    plgpu.wait_smem_to_gmem(0)
    if pair:  # a block stays until the other one has arrived at its barriers

        @pl.when(wg == 0)
        def _():
            def leave(i, _):
                if want_out:
                    plgpu.barrier_wait(q_read.at[i % stages])
                plgpu.barrier_wait(k_read.at[i % stages])

            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, leave, None)


def scan(
    qg,
    kg,
    attention,
    decay,
    v,
    *,
    start=None,
    lengths=None,
    segments: int = 1,
    want_out: bool = True,
    want_borders: bool = False,
    reverse: bool = False,
):
    """Returns (out [B, T, H, Dv] or None, borders [B, H, NC, Dv, Dk] bf16 or None, final states).

    start: float32[B, H, segments, Dk, Dv] or None (zeros); final states have the same shape.
    borders: the transposed state at the start of every chunk (reverse: at its end).
    """
    b, t, h, dv = v.shape
    dk = qg.shape[-1]
    nc = -(-t // CHUNK)
    pieces = dk // piece_width(dk)
    blocks = dv // VALUE_BLOCK
    # The borders' staging tiles do not fit beside two slots of Dk = 256 operands.
    stage_borders = want_borders and (dk <= 128 or not want_out)
    pair = dk > 128 and blocks % 2 == 0 and b * h * segments * blocks > gpu().sms
    body = functools.partial(
        _scan_body,
        dk=dk,
        dv=dv,
        n_chunks=nc,
        segments=segments,
        pieces=pieces,
        stage_borders=stage_borders,
        want_out=want_out,
        want_borders=want_borders,
        reverse=reverse,
        ragged=lengths is not None,
        initial=start is not None,
        pair=pair,
    )
    out_type = []
    if want_out:
        out_type.append(jax.ShapeDtypeStruct((b, t, h, dv), v.dtype))
    if want_borders:
        out_type.append(jax.ShapeDtypeStruct((b, h, nc, dv, dk), jnp.bfloat16))
    out_type.append(jax.ShapeDtypeStruct((b, h, segments, dk, dv), jnp.float32))

    def tiles(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=BF16_TILE)

    def tokens(*shape):  # one memory: rows of 128 bytes for the copies, tiles for wgmma
        return plgpu.RefUnion(plgpu.SMEM(shape, jnp.bfloat16, transforms=ROWS), tiles(*shape))

    unused = plgpu.SMEM((8,), jnp.float32)
    stages = stages_of(dk)
    # The places where a slot's operands are read for the last time.
    read = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    if pair:
        read = plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=2, num_barriers=stages)
    results = launch(
        body,
        (qg, kg, attention, decay, v, lengths, start),
        tuple(out_type),
        name="gla_scan" + ("_reverse" if reverse else ""),
        cluster=1 + pair,
        grid={"values": blocks // (1 + pair), "head": h * segments, "row": b},
        warpgroups=2,
        scratch=[
            tiles(stages, CHUNK, dk) if want_out else unused,
            tiles(stages, CHUNK, dk),
            tiles(stages, pieces, CHUNK, CHUNK) if want_out else unused,
            tokens(stages, 2, CHUNK, 64),
            plgpu.SMEM((stages, dk), jnp.float32),
            tokens(2, CHUNK, 64) if want_out else unused,
            tiles(2, 64, dk) if stage_borders else unused,
            plgpu.Barrier(num_arrivals=1 + pieces, num_barriers=stages),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            read,
            read,
        ],
    )
    results = list(results)
    out = results.pop(0) if want_out else None
    borders = results.pop(0) if want_borders else None
    return out, borders, results.pop(0)

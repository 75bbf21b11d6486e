"""The gated delta rule's backward pass over the chunks on Hopper.

    dR = M^T do + K' E        E <- e_64 E + scale Q^T diag(e) do - K^T diag(e) dR

with E the gradient of the state at a chunk's end, ``kernel_chunks``'s M, K' and e = exp(G); dR is
the gradient of V.  Mirrored, it is ``kernel_scan``: the same blocks, slots and registers.  What E
is multiplied by cancels where keys are parallel, so products take E and dR in two bf16 parts.

With ``kernel_channels``'s operands, a decay a key channel, Q and K are from the chunk's start on
and E <- diag(exp(G_64)) E + Q^T do - K^T dR; what is local to a chunk needs one part of E then.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.kernel_chunks import PART, high_low
from pallas_kernels.gated_delta.kernel_scan import (
    STAGES,
    by_token,
    read_transposed,
    store_transposed,
    tiles,
    tokens,
)
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import CHUNK
from pallas_kernels.recurrence.states import VALUE_BLOCK, read_state, write_rows, write_state

_WGMMA = plgpu.Layout.WGMMA


def _reverse_body(
    q,
    k,
    keys,
    weights,
    decays,
    d_out,
    *rest,
    dk: int,
    dv: int,
    n_chunks: int,
    group: int,
    by_channel: bool,
    segments: int,
    want_out: bool,
    given: bool,
):
    rest = list(rest)
    d_state = rest.pop(0) if given else None
    d_v, borders = (rest.pop(0), rest.pop(0)) if want_out else (None, None)
    first, q_union, k_union, kt_sm, m_sm, d_union, e_sm, full, empty = rest
    (q_rows, q_sm), (k_rows, k_sm), (d_rows, d_sm) = q_union, k_union, d_union
    parts = dk // PART
    j, b = lax.axis_index("values"), lax.axis_index("row")
    head, segment = lax.axis_index("head") // segments, lax.axis_index("head") % segments
    wg = lax.axis_index("warpgroup")
    per = -(-n_chunks // segments)
    last = jnp.minimum((segment + 1) * per, n_chunks)
    steps = jnp.maximum(last - segment * per, 0)

    def load(i):
        c, slot = last - 1 - i, i % STAGES
        rows, bar = pl.ds(c * CHUNK, CHUNK), full.at[slot]
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            for x, to in ((k, k_rows), (q, q_rows)):
                plgpu.copy_gmem_to_smem(x.at[b, rows, head // group, at], to.at[slot, part], bar)
            plgpu.copy_gmem_to_smem(keys.at[b, head, rows, at], kt_sm.at[slot, part], bar)
        for w in range(2):
            at = pl.ds(j * VALUE_BLOCK + w * 64, 64)
            plgpu.copy_gmem_to_smem(d_out.at[b, rows, head, at], d_rows.at[slot, w], bar)
        plgpu.copy_gmem_to_smem(decays.at[b, head, c], e_sm.at[slot], bar)
        plgpu.copy_gmem_to_smem(weights.at[b, head, rows], m_sm.at[slot], bar)

    @pl.when(wg == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(2, steps), lambda i, _: load(i), None)

    columns = pl.ds(j * VALUE_BLOCK + wg * 64, 64)
    channels = [pl.ds(part * PART, PART) for part in range(parts)]
    if given:
        place = d_state.at[b, head, segment]
        state = tuple(read_state(PART, dv)(place.at[at, columns]) for at in channels)
    else:
        zero = jnp.zeros((64, PART), jnp.float32)
        state = tuple(plgpu.layout_cast(zero, _WGMMA) for _ in channels)
    mask = jnp.full((128,), -1, jnp.int32)

    def body(i, state):
        c, slot = last - 1 - i, i % STAGES
        rows = pl.ds(c * CHUNK, CHUNK)
        plgpu.barrier_wait(full.at[slot])
        ends = [high_low(x) for x in state]
        d_o = read_transposed(d_rows.at[slot, wg], mask)

        def found(acc):
            plgpu.wgmma(acc, d_o, m_sm.at[slot].transpose((1, 0)))
            for part in range(parts):
                for x in ends[part]:
                    plgpu.wgmma(acc, x, kt_sm.at[slot, part].transpose((1, 0)))
            return acc[...]

        d_rest = pl.run_scoped(found, plgpu.ACC((64, CHUNK), jnp.float32))
        if want_out:
            for part, at in enumerate(channels):
                for n, x in enumerate(ends[part][: 1 if by_channel else 2]):
                    kept = borders.at[b, head, c] if by_channel else borders.at[b, head, c, n]
                    write_rows(PART, dk)(kept.at[columns, at], x)
        if by_channel:
            asked, seen = d_o, high_low(-d_rest)
        else:
            asked = (d_o.astype(jnp.float32) * by_token(e_sm, slot, 1)).astype(jnp.bfloat16)
            seen = high_low(d_rest * -by_token(e_sm, slot, 0))

        def update(accs):
            for part, acc in enumerate(accs):
                plgpu.wgmma(acc, asked, q_sm.at[slot, part])
                for x in seen:
                    plgpu.wgmma(acc, x, k_sm.at[slot, part])

        if by_channel:
            rows_of = [plgpu.load(e_sm.at[slot, at], layout=_WGMMA.reduce(0)) for at in channels]
            decay = [lax.broadcast_in_dim(e, (64, PART), [1]) for e in rows_of]
        else:
            decay = [e_sm[slot, 0, CHUNK - 1]] * parts
        state = pl.run_state(update)(
            tuple(plgpu.ACC.init(x * e) for x, e in zip(state, decay, strict=True))
        )
        if want_out:
            store_transposed(d_sm.at[slot, wg], d_rest)  # in the place of d_out
        plgpu.commit_smem()
        if want_out:
            plgpu.copy_smem_to_gmem(d_rows.at[slot, wg], d_v.at[b, rows, head, columns])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_arrive(empty.at[(i - 1) % STAGES])

        @pl.when((wg == 0) & (i + 2 < steps))
        def _():
            pl.when(i > 0)(lambda: plgpu.barrier_wait(empty.at[(i - 1) % STAGES]))
            load(i + 2)

        return tuple(state)

    state = lax.fori_loop(0, steps, body, state)
    for part, at in enumerate(channels):
        write_state(dv)(first.at[b, head, segment, at, columns], state[part])
    plgpu.wait_smem_to_gmem(0)


def reverse_scan(
    q, k, keys, weights, decays, d_out, d_state, *, segments: int = 1, want_out: bool = True
):
    """(dv [B, T, H, Dv], E^T at the chunks' ends in two bf16 parts, [B, H, NC, 2, Dv, Dk], and E at
    the segments' starts, [B, H, segments, Dk, Dv]; that alone unless ``want_out``) for
    ``kernel_chunks.chunks``'s results; for ``kernel_channels.chunks_by_channel``'s E^T is rounded,
    [B, H, NC, Dv, Dk].  d_state: E at the segments' ends, or None (zeros).
    """
    b, t, h, dv = d_out.shape
    hk, dk = q.shape[2:]
    nc, parts, by_channel = -(-t // CHUNK), dk // PART, decays.ndim == 4
    body = functools.partial(
        _reverse_body,
        dk=dk,
        dv=dv,
        n_chunks=nc,
        group=h // hk,
        by_channel=by_channel,
        segments=segments,
        want_out=want_out,
        given=d_state is not None,
    )
    out_type = [jax.ShapeDtypeStruct((b, h, segments, dk, dv), jnp.float32)]
    if want_out:
        kept = () if by_channel else (2,)
        borders = jax.ShapeDtypeStruct((b, h, nc, *kept, dv, dk), jnp.bfloat16)
        out_type = [jax.ShapeDtypeStruct((b, t, h, dv), d_out.dtype), borders, *out_type]
    return launch(
        body,
        (q, k, keys, weights, decays, d_out, d_state),
        tuple(out_type),
        name="gated_delta_reverse",
        grid={"values": dv // VALUE_BLOCK, "head": h * segments, "row": b},
        warpgroups=2,
        scratch=[
            tokens(STAGES, parts, CHUNK, PART),
            tokens(STAGES, parts, CHUNK, PART),
            tiles(STAGES, parts, CHUNK, PART),
            tiles(STAGES, CHUNK, CHUNK),
            tokens(STAGES, 2, CHUNK, 64),
            plgpu.SMEM((STAGES, *decays.shape[3:]), jnp.float32),
            plgpu.Barrier(num_arrivals=3 * parts + 2 + 2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
    )

"""The gated delta rule's backward pass over the chunks on Hopper.

    dR = M^T do + K' E        E <- e_64 E + scale Q^T diag(e) do - K^T diag(e) dR

with E the gradient of the state at a chunk's end, ``kernel_chunks``'s M, K' and e = exp(G); dR is
the gradient of V.  Mirrored, it is ``kernel_scan``: the same blocks, slots and registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.kernel_chunks import PART
from pallas_kernels.gated_delta.kernel_scan import (
    STAGES,
    by_token,
    read_transposed,
    store_transposed,
    tiles,
    tokens,
)
from pallas_kernels.gla.channels import CHUNK
from pallas_kernels.gla.scan import VALUE_BLOCK, read_state, write_rows, write_state
from pallas_kernels.launch import launch

_WGMMA = plgpu.Layout.WGMMA


def _reverse_body(q, k, keys, weights, decays, d_out, *rest, dk: int, dv: int, n_chunks: int,
                  group: int, given: bool):  # fmt: skip
    rest = list(rest)
    d_state = rest.pop(0) if given else None
    d_v, borders, first, q_union, k_union, kt_sm, m_sm, d_union, e_sm, full, empty = rest
    (q_rows, q_sm), (k_rows, k_sm), (d_rows, d_sm) = q_union, k_union, d_union
    parts = dk // PART
    j, head, b = (lax.axis_index(name) for name in ("values", "head", "row"))
    wg = lax.axis_index("warpgroup")

    def load(i):
        c, slot = n_chunks - 1 - i, i % STAGES
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
        lax.fori_loop(0, min(2, n_chunks), lambda i, _: load(i), None)

    columns = pl.ds(j * VALUE_BLOCK + wg * 64, 64)
    channels = [pl.ds(part * PART, PART) for part in range(parts)]
    if given:
        state = tuple(read_state(PART, dv)(d_state.at[b, head, at, columns]) for at in channels)
    else:
        zero = jnp.zeros((64, PART), jnp.float32)
        state = tuple(plgpu.layout_cast(zero, _WGMMA) for _ in channels)
    mask = jnp.full((128,), -1, jnp.int32)

    def body(i, state):
        c, slot = n_chunks - 1 - i, i % STAGES
        rows = pl.ds(c * CHUNK, CHUNK)
        plgpu.barrier_wait(full.at[slot])
        rounded = [x.astype(jnp.bfloat16) for x in state]
        d_o = read_transposed(d_rows.at[slot, wg], mask)

        def found(acc):
            plgpu.wgmma(acc, d_o, m_sm.at[slot].transpose((1, 0)))
            for part in range(parts):
                plgpu.wgmma(acc, rounded[part], kt_sm.at[slot, part].transpose((1, 0)))
            return acc[...]

        d_rest = pl.run_scoped(found, plgpu.ACC((64, CHUNK), jnp.float32))
        for part, at in enumerate(channels):
            write_rows(PART, dk)(borders.at[b, head, c, columns, at], rounded[part])
        asked = (d_o.astype(jnp.float32) * by_token(e_sm, slot, 1)).astype(jnp.bfloat16)
        seen = (d_rest * -by_token(e_sm, slot, 0)).astype(jnp.bfloat16)

        def update(accs):
            for part, acc in enumerate(accs):
                plgpu.wgmma(acc, asked, q_sm.at[slot, part])
                plgpu.wgmma(acc, seen, k_sm.at[slot, part])

        decay = e_sm[slot, 0, CHUNK - 1]
        state = pl.run_state(update)(tuple(plgpu.ACC.init(x * decay) for x in state))
        store_transposed(d_sm.at[slot, wg], d_rest)  # in the place of d_out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(d_rows.at[slot, wg], d_v.at[b, rows, head, columns])
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_arrive(empty.at[(i - 1) % STAGES])

        @pl.when((wg == 0) & (i + 2 < n_chunks))
        def _():
            pl.when(i > 0)(lambda: plgpu.barrier_wait(empty.at[(i - 1) % STAGES]))
            load(i + 2)

        return tuple(state)

    state = lax.fori_loop(0, n_chunks, body, state)
    for part, at in enumerate(channels):
        write_state(dv)(first.at[b, head, at, columns], state[part])
    plgpu.wait_smem_to_gmem(0)


def reverse_scan(q, k, keys, weights, decays, d_out, d_state):
    """(dv [B, T, H, Dv], E^T at the chunks' ends, bf16 [B, H, NC, Dv, Dk], gradient of the first
    state [B, H, Dk, Dv]) for ``kernel_chunks.chunks``'s results; d_state: float32 or None."""
    b, t, h, dv = d_out.shape
    hk, dk = q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    body = functools.partial(
        _reverse_body, dk=dk, dv=dv, n_chunks=nc, group=h // hk, given=d_state is not None
    )
    return launch(
        body,
        (q, k, keys, weights, decays, d_out, d_state),
        (
            jax.ShapeDtypeStruct((b, t, h, dv), d_out.dtype),
            jax.ShapeDtypeStruct((b, h, nc, dv, dk), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, dk, dv), jnp.float32),
        ),
        name="gated_delta_reverse",
        grid={"values": dv // VALUE_BLOCK, "head": h, "row": b},
        warpgroups=2,
        scratch=[
            tokens(STAGES, parts, CHUNK, PART),
            tokens(STAGES, parts, CHUNK, PART),
            tiles(STAGES, parts, CHUNK, PART),
            tiles(STAGES, CHUNK, CHUNK),
            tokens(STAGES, 2, CHUNK, 64),
            plgpu.SMEM((STAGES, 2, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=3 * parts + 2 + 2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
    )

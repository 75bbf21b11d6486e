"""The gated delta rule's pass over the chunks on Hopper: the recurrent state and the outputs.

    R = V - diag(e) K S        o = scale diag(e) Q S + M R        S <- e_64 S + K'^T R

for ``kernel_chunks``'s M, K' and e = exp(G).  One block per (128 value channels, value head, batch
row): two warpgroups of 64 value channels each, the first of which starts the copies.  S^T [64 dv,
Dk] stays in registers for the whole loop; bf16 of it is the register operand of S^T K^T and S^T Q^T,
R^T, which never leaves the registers, that of R^T K' and R^T M^T.  Three slots: one that is
computed, one that is there, one on its way; the outputs leave from the place of the values.

    wait c | S -> bf16 | wgmma S^T K^T, S^T Q^T | R | wgmma S, o | o -> TMA | slot of c-1 <- TMA c+2

A warpgroup that only copies would leave 168 registers to the others, which spilled.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta.kernel_chunks import PART
from pallas_kernels.gla.channels import CHUNK, ROWS, ChannelLane
from pallas_kernels.gla.gates import BF16_TILE
from pallas_kernels.gla.scan import VALUE_BLOCK, read_state, write_state
from pallas_kernels.launch import launch

STAGES = 3
_WGMMA = plgpu.Layout.WGMMA


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(ROWS),),
    return_type=plgpu.ShapeDtypeStruct((64, CHUNK), jnp.bfloat16, layout=_WGMMA),
)
def _read_transposed(ctx, tile):
    """V^T [64 dv, 64 tokens] from the swizzled rows of tokens."""
    del ctx
    base = ChannelLane().column_matrices(p.shared_address(tile))
    layout = _WGMMA.to_mgpu()
    half = ir.BF16Type.get()
    zero = mgpu.utils.c(0.0, half)
    array = mgpu.FragmentedArray.splat(zero, (64, CHUNK), layout, is_signed=None)
    registers = array.registers.copy()
    kind = ir.VectorType.get((2,), half)
    words = [w for block in range(4) for w in p.load_matrices(base, 2048 * block, transposed=True)]
    registers.reshape(-1)[:] = [mgpu.utils.bitcast(w, kind) for w in words]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _scan_body(q, k, keys, weights, decays, v, *rest, dk: int, dv: int, n_chunks: int, group: int,
               ragged: bool, initial: bool):  # fmt: skip
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    start_state = rest.pop(0) if initial else None
    out, final, q_union, k_union, kt_sm, m_sm, v_union, e_sm, full, empty = rest
    (q_rows, q_sm), (k_rows, k_sm), (v_rows, v_sm) = q_union, k_union, v_union
    parts = dk // PART
    j, head, b = (lax.axis_index(name) for name in ("values", "head", "row"))
    wg = lax.axis_index("warpgroup")
    stop = n_chunks
    if ragged:
        stop = jnp.minimum(n_chunks, (lengths[b] + (CHUNK - 1)) // CHUNK)

    def load(c):
        slot = c % STAGES
        rows, bar = pl.ds(c * CHUNK, CHUNK), full.at[slot]
        for x, to in ((k, k_rows), (q, q_rows)):
            for part in range(parts):
                at = pl.ds(part * PART, PART)
                plgpu.copy_gmem_to_smem(x.at[b, rows, head // group, at], to.at[slot, part], bar)
        for w in range(2):
            at = pl.ds(j * VALUE_BLOCK + w * 64, 64)
            plgpu.copy_gmem_to_smem(v.at[b, rows, head, at], v_rows.at[slot, w], bar)
        plgpu.copy_gmem_to_smem(decays.at[b, head, c], e_sm.at[slot], bar)
        plgpu.copy_gmem_to_smem(keys.at[b, head, rows], kt_sm.at[slot], bar)
        plgpu.copy_gmem_to_smem(weights.at[b, head, rows], m_sm.at[slot], bar)

    for c in range(min(2, n_chunks)):
        pl.when((wg == 0) & (c < stop))(functools.partial(load, c))

    columns = pl.ds(j * VALUE_BLOCK + wg * 64, 64)
    if initial:
        state = read_state(dk, dv)(start_state.at[b, head, :, columns])
    else:
        state = plgpu.layout_cast(jnp.zeros((64, dk), jnp.float32), _WGMMA)

    def body(c, state):
        slot = c % STAGES
        rows = pl.ds(c * CHUNK, CHUNK)
        plgpu.barrier_wait(full.at[slot])

        def by_token(n):
            e = plgpu.load(e_sm.at[slot, n], layout=_WGMMA.reduce(0))
            return lax.broadcast_in_dim(e, (64, CHUNK), [1])

        def inside(x):
            if not ragged:
                return x
            token = plgpu.broadcasted_iota(jnp.int32, (64, CHUNK), 1, layout=_WGMMA)
            return jnp.where(token < lengths[b] - c * CHUNK, x, jnp.zeros_like(x))

        rounded = state.astype(jnp.bfloat16)
        halves = [rounded[:, PART * part : PART * (part + 1)] for part in range(parts)]

        def read(seen, asked):
            for acc, tokens in ((seen, k_sm), (asked, q_sm)):
                for part in range(parts):
                    plgpu.wgmma(acc, halves[part], tokens.at[slot, part].transpose((1, 0)))
            return seen[...], asked[...]

        square = plgpu.ACC((64, CHUNK), jnp.float32)
        seen, asked = pl.run_scoped(read, square, square)
        values = _read_transposed(v_rows.at[slot, wg]).astype(jnp.float32)
        rest = inside(values - by_token(0) * seen).astype(jnp.bfloat16)

        def update(accs):
            state, o = accs
            plgpu.wgmma(state, rest, kt_sm.at[slot])
            plgpu.wgmma(o, rest, m_sm.at[slot])

        state, o = pl.run_state(update)(
            (
                plgpu.ACC.init(state * e_sm[slot, 0, CHUNK - 1]),
                plgpu.ACC.init(by_token(1) * asked),
            )
        )
        # The outputs take the values' place.
        v_sm.at[slot, wg].transpose((1, 0))[...] = plgpu.layout_cast(
            inside(o).astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(v_rows.at[slot, wg], out.at[b, rows, head, columns])
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(c > 0)
        def _():
            plgpu.barrier_arrive(empty.at[(c - 1) % STAGES])

        @pl.when((wg == 0) & (c + 2 < stop))
        def _():
            pl.when(c > 0)(lambda: plgpu.barrier_wait(empty.at[(c - 1) % STAGES]))
            load(c + 2)

        return state

    state = lax.fori_loop(0, stop, body, state)
    write_state(dv)(final.at[b, head, :, columns], state)
    plgpu.wait_smem_to_gmem(0)
    if ragged:
        # Rows that end early: the outputs of the chunks beyond are zeros.
        v_sm[0, wg] = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.bfloat16), _WGMMA)
        plgpu.commit_smem()

        def clear(c, _):
            rows = pl.ds(c * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(v_rows.at[0, wg], out.at[b, rows, head, columns])

        lax.fori_loop(stop, n_chunks, clear, None)
        plgpu.wait_smem_to_gmem(0)


def scan(q, k, keys, weights, decays, v, *, start=None, lengths=None):
    """(o [B, T, H, Dv], final state [B, H, Dk, Dv]) for ``kernel_chunks.chunks``'s results; start:
    float32 [B, H, Dk, Dv] or None (zeros)."""
    b, t, h, dv = v.shape
    hk, dk = q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    body = functools.partial(
        _scan_body, dk=dk, dv=dv, n_chunks=nc, group=h // hk, ragged=lengths is not None,
        initial=start is not None,
    )  # fmt: skip

    def tiles(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=BF16_TILE)

    def tokens(*shape):  # one memory: rows of 128 bytes for the copies, tiles for wgmma
        return plgpu.RefUnion(plgpu.SMEM(shape, jnp.bfloat16, transforms=ROWS), tiles(*shape))

    return launch(
        body,
        (q, k, keys, weights, decays, v, lengths, start),
        (
            jax.ShapeDtypeStruct((b, t, h, dv), v.dtype),
            jax.ShapeDtypeStruct((b, h, dk, dv), jnp.float32),
        ),
        name="gated_delta_scan",
        grid={"values": dv // VALUE_BLOCK, "head": h, "row": b},
        warpgroups=2,
        scratch=[
            tokens(STAGES, parts, CHUNK, PART),
            tokens(STAGES, parts, CHUNK, PART),
            tiles(STAGES, CHUNK, dk),
            tiles(STAGES, CHUNK, CHUNK),
            tokens(STAGES, 2, CHUNK, 64),
            plgpu.SMEM((STAGES, 2, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * parts + 2 + 3, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
    )

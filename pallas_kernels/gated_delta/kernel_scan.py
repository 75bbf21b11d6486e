"""The gated delta rule's pass over the chunks on Hopper: the recurrent state and the outputs.

    R = V - diag(e) K S        o = scale diag(e) Q S + M R        S <- e_64 S + K'^T R

for ``kernel_chunks``'s M, K' and e = exp(G); ``kernel_channels``'s Q and K have their decay, and S
is decayed channel by channel.  One block per (128 value channels, value head, batch row, segment of
chunks): two warpgroups of 64 value channels each, the first of which starts the copies; one block
per 64 where that leaves no SM with two.  S^T [64 dv, Dk] stays in registers for the whole loop;
bf16 of it is the register operand of S^T K^T and S^T Q^T, R^T, which never leaves the registers,
that of R^T K' and R^T M^T.  Three slots: one that is computed, one that is there, one on its way;
the outputs leave from the place of the values.

    wait c | S -> bf16 | wgmma S^T K^T, S^T Q^T | R | wgmma S, o | o -> TMA | slot of c-1 <- TMA c+2

A warpgroup that only copies would leave 168 registers to the others, which spilled.

Dk = 256, a state of 128 registers: a block of one warpgroup and 64 value channels; bf16 of the
state a part of 64 columns at a time; two slots.  Two blocks of a head are a cluster and copy all
but the values and e for one another: k and q of c + 2 when both have read c's, K' and M when both
are done with c, the values once c + 1 is being computed and c's outputs have left.

Floor: 11 bytes per element of q at Dk = Dv = 128 and as many key as value heads, 0.172 ms at
(8, 4096, 16, 16, 128, 128).  Result: 0.183 on one H200, memory-bound; 0.139 with 4 key heads.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.gated_delta import remainder
from pallas_kernels.gated_delta.kernel_chunks import PART
from pallas_kernels.jax_internals import arith, ir
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import BF16_TILE, CHUNK, ROWS, ChannelLane
from pallas_kernels.recurrence.states import VALUE_BLOCK, read_state, write_rows, write_state

STAGES = 3
Want = Literal["out", "borders", "transitions"]
_WGMMA = plgpu.Layout.WGMMA


def is_narrow(dk: int) -> bool:
    """Whether a block has 64 value channels, and a cluster two blocks."""
    return dk > 128


def stages_of(dk: int) -> int:
    """Slots of a block's ring."""
    return 2 if is_narrow(dk) else STAGES


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(ROWS), plgpu.Layout.WG_SPLAT((128,))),
    return_type=plgpu.ShapeDtypeStruct((64, CHUNK), jnp.bfloat16, layout=_WGMMA),
)
def read_transposed(ctx, tile, mask):
    """V^T [64 dv, 64 tokens] from the swizzled rows of tokens, where the mask's bits are ones."""
    del ctx
    base, mask = ChannelLane().column_matrices(p.shared_address(tile)), mask.registers.flat[0]
    layout = _WGMMA.to_mgpu()
    half = ir.BF16Type.get()
    zero = mgpu.utils.c(0.0, half)
    array = mgpu.FragmentedArray.splat(zero, (64, CHUNK), layout, is_signed=None)
    registers = array.registers.copy()
    kind = ir.VectorType.get((2,), half)
    words = [w for block in range(4) for w in p.load_matrices(base, 2048 * block, transposed=True)]
    registers.reshape(-1)[:] = [mgpu.utils.bitcast(arith.andi(w, mask), kind) for w in words]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def by_token(vectors, slot, n: int):
    """A chunk's n-th vector of floats over the rows of [64 dv, 64 tokens]."""
    e = plgpu.load(vectors.at[slot, n], layout=_WGMMA.reduce(0))
    return lax.broadcast_in_dim(e, (64, CHUNK), [1])


def store_transposed(tile, x) -> None:
    tile.transpose((1, 0))[...] = plgpu.layout_cast(
        x.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
    )


def _scan_body(
    q,
    k,
    keys,
    weights,
    decays,
    v,
    *rest,
    dk: int,
    dv: int,
    n_chunks: int,
    group: int,
    segments: int,
    want: Want,
    ragged: bool,
    initial: bool,
    by_channel: bool,
    wgs: int,
):
    want_out = want == "out"
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    start_state = rest.pop(0) if initial else None
    out = rest.pop(0) if want_out else None
    borders, remainders = (rest.pop(0), rest.pop(0)) if want == "borders" else (None, None)
    final, q_union, k_union, kt_sm, m_sm, v_union, e_sm, full, empty, *shared = rest
    read_by_both, done_by_both = shared or (None, None)
    (k_rows, k_sm), (v_rows, v_sm) = k_union, v_union
    q_rows, q_sm = q_union if want_out else (None, None)
    parts, width, narrow, stages = dk // PART, 64 * wgs, is_narrow(dk), stages_of(dk)
    blocks = dv // width
    j, b = lax.axis_index("values"), lax.axis_index("row")
    if narrow:
        j = 2 * j + lax.axis_index("rank")
    head, segment = lax.axis_index("head") // segments, lax.axis_index("head") % segments
    wg = lax.axis_index("warpgroup")
    per = -(-n_chunks // segments)
    first, last = segment * per, jnp.minimum((segment + 1) * per, n_chunks)
    stop = last
    if ragged:
        stop = jnp.minimum(last, (lengths[b] + (CHUNK - 1)) // CHUNK)
    steps = jnp.maximum(stop - first, 0)

    def chunk(i):
        return first + i, i % stages, pl.ds((first + i) * CHUNK, CHUNK), full.at[i % stages]

    def load_values(i):
        _, slot, rows, bar = chunk(i)
        for w in range(wgs):
            at = pl.ds((j % blocks) * width + w * 64, 64)
            plgpu.copy_gmem_to_smem(v.at[b, rows, head, at], v_rows.at[slot, w], bar)

    both = {"collective_axes": "rank"} if narrow else {}

    def load_tokens(i):
        _, slot, rows, bar = chunk(i)
        for x, to in ((k, k_rows), (q, q_rows)) if want_out else ((k, k_rows),):
            for part in range(parts):
                at = pl.ds(part * PART, PART)
                plgpu.copy_gmem_to_smem(
                    x.at[b, rows, head // group, at], to.at[slot, part], bar, **both
                )

    def load_prepared(i):
        c, slot, rows, bar = chunk(i)
        plgpu.copy_gmem_to_smem(decays.at[b, head, c], e_sm.at[slot], bar)
        plgpu.copy_gmem_to_smem(keys.at[b, head, rows], kt_sm.at[slot], bar, **both)
        if want_out:
            plgpu.copy_gmem_to_smem(weights.at[b, head, rows], m_sm.at[slot], bar, **both)

    def load(i):
        load_tokens(i)
        if not narrow:
            load_values(i)
        load_prepared(i)

    @pl.when(wg == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(2, steps), lambda i, _: load(i), None)
        if narrow:
            pl.when(steps > 0)(lambda: load_values(0))

    columns = pl.ds(j * width + wg * 64, 64)
    if initial:
        state = read_state(dk, dv)(start_state.at[b, head, segment, :, columns])
    else:
        state = plgpu.layout_cast(jnp.zeros((64, dk), jnp.float32), _WGMMA)
        if want == "transitions":
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (64, dk), axis, layout=_WGMMA) for axis in (0, 1)
            )
            same = row + ((j - blocks) * width + wg * 64) == column
            state = jnp.where(same, jnp.ones_like(state), state)
    mask = jnp.full((128,), jnp.where(j < blocks, -1, 0), jnp.int32)

    def body(i, state):
        c, slot, rows, bar = chunk(i)
        plgpu.barrier_wait(bar)

        def inside(x):
            if not ragged:
                return x
            token = plgpu.broadcasted_iota(jnp.int32, (64, CHUNK), 1, layout=_WGMMA)
            return jnp.where(token < lengths[b] - c * CHUNK, x, jnp.zeros_like(x))

        products = (k_sm, q_sm) if want_out else (k_sm,)
        slices = [slice(PART * part, PART * (part + 1)) for part in range(parts)]
        if not narrow:
            rounded = state.astype(jnp.bfloat16)

        def read(*accs):
            for acc, tokens in zip(accs, products, strict=True):
                for part, at in enumerate(slices):
                    plgpu.wgmma(acc, rounded[:, at], tokens.at[slot, part].transpose((1, 0)))
            return [acc[...] for acc in accs]

        def read_narrow(*accs):
            for part, at in enumerate(slices):
                half = state[:, at].astype(jnp.bfloat16)
                for acc, tokens in zip(accs, products, strict=True):
                    plgpu.wgmma(acc, half, tokens.at[slot, part].transpose((1, 0)))
                plgpu.wgmma_wait(len(accs))  # so that two parts' copies are alive
            return [acc[...] for acc in accs]

        square = plgpu.ACC((64, CHUNK), jnp.float32)
        seen, *asked = pl.run_scoped(read_narrow if narrow else read, *[square for _ in products])
        if want == "borders":
            write_rows(dk, dk)(borders.at[b, head, c, columns], rounded)
            for part, at in enumerate(slices):
                place = remainders.at[b, head, c, wgs * j + wg, part]
                remainder.store(place, state[:, at], rounded[:, at])
        if narrow:  # the outputs of the chunk before have left the place of the next one's values
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(read_by_both)
            pl.when(i + 1 < steps)(lambda: load_values(i + 1))

            @pl.when(i > 0)
            def _():
                plgpu.barrier_wait(done_by_both)
                pl.when(i + 1 < steps)(lambda: load_prepared(i + 1))

        values = read_transposed(v_rows.at[slot, wg], mask).astype(jnp.float32)
        if not by_channel:
            seen = by_token(e_sm, slot, 0) * seen
        rest = inside(values - seen).astype(jnp.bfloat16)

        def update(accs):
            for acc, right in zip(accs, (kt_sm, m_sm), strict=False):
                plgpu.wgmma(acc, rest, right.at[slot])

        if by_channel:
            e = plgpu.load(e_sm.at[slot], layout=_WGMMA.reduce(0))
            starts = [state * lax.broadcast_in_dim(e, (64, dk), [1]), *asked]
        else:
            whole = e_sm[slot, 0, CHUNK - 1]
            starts = [state * whole, *[by_token(e_sm, slot, 1) * x for x in asked]]
        state, *outputs = pl.run_state(update)([plgpu.ACC.init(x) for x in starts])
        if want_out:  # in the place of the values
            store_transposed(v_sm.at[slot, wg], inside(outputs[0]))
        plgpu.commit_smem()
        if want_out:
            plgpu.copy_smem_to_gmem(v_rows.at[slot, wg], out.at[b, rows, head, columns])
        if narrow:
            plgpu.barrier_arrive(done_by_both)
            plgpu.barrier_wait(read_by_both)
            pl.when(i + 2 < steps)(lambda: load_tokens(i + 2))
            return state
        if want_out:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_arrive(empty.at[(i - 1) % stages])

        @pl.when((wg == 0) & (i + 2 < steps))
        def _():
            pl.when(i > 0)(lambda: plgpu.barrier_wait(empty.at[(i - 1) % stages]))
            load(i + 2)

        return state

    state = lax.fori_loop(0, steps, body, state)
    if narrow:
        pl.when(steps > 0)(lambda: plgpu.barrier_wait(done_by_both))
    write_state(final.shape[-1])(final.at[b, head, segment, :, columns], state)
    plgpu.wait_smem_to_gmem(0)
    if ragged and want_out:
        # Rows that end early: the outputs of the chunks beyond are zeros.
        v_sm[0, wg] = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.bfloat16), _WGMMA)
        plgpu.commit_smem()

        def clear(c, _):
            rows = pl.ds(c * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(v_rows.at[0, wg], out.at[b, rows, head, columns])

        lax.fori_loop(jnp.maximum(stop, first), last, clear, None)
        plgpu.wait_smem_to_gmem(0)


def tiles(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=BF16_TILE)


def tokens(*shape):
    """One memory: rows of 128 bytes for the copies, tiles for wgmma."""
    return plgpu.RefUnion(plgpu.SMEM(shape, jnp.bfloat16, transforms=ROWS), tiles(*shape))


def scan(
    q,
    k,
    keys,
    weights,
    decays,
    v,
    *,
    start=None,
    lengths=None,
    segments: int = 1,
    want: Want = "out",
):
    """For q, k and ``kernel_chunks.chunks``'s results, or ``chunks_by_channel``'s, the last of
    these being states at the segments' ends, [B, H, segments, Dk, Dv]:

    "out": o [B, T, H, Dv].
    "borders": the transposed states at the chunks' starts, bf16 [B, H, NC, Dv, Dk], and what bf16
        leaves of them, int32 [B, H, NC, Dv/64, Dk/64, ``remainder.WORDS``].
    "transitions": nothing; the final states start from zero, and 128 columns more from the
        identity, without values: in the first Dk of them the matrix by which a segment multiplies
        its first state.

    start: float32 [B, H, segments, Dk, Dv] or None (zeros).
    """
    b, t, h, dv = v.shape
    hk, dk = q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    by_channel = decays.ndim == 4
    want_out = want == "out"
    width = dv + (max(VALUE_BLOCK, dk) if want == "transitions" else 0)
    # A block of 64 value channels for each SM, where there are no more of them.
    few = b * h * segments * width // VALUE_BLOCK <= gpu().sms // 2
    narrow, stages = is_narrow(dk), stages_of(dk)
    wgs, pair = 1 if few or narrow else 2, 2 if narrow else 1
    body = functools.partial(
        _scan_body,
        dk=dk,
        dv=dv,
        n_chunks=nc,
        group=h // hk,
        segments=segments,
        want=want,
        ragged=lengths is not None,
        initial=start is not None,
        by_channel=by_channel,
        wgs=wgs,
    )
    out_type = [jax.ShapeDtypeStruct((b, h, segments, dk, width), jnp.float32)]
    if want_out:
        out_type.insert(0, jax.ShapeDtypeStruct((b, t, h, dv), v.dtype))
    if want == "borders":
        codes = (b, h, nc, dv // 64, parts, remainder.WORDS)
        out_type.insert(0, jax.ShapeDtypeStruct(codes, jnp.int32))
        out_type.insert(0, jax.ShapeDtypeStruct((b, h, nc, dv, dk), jnp.bfloat16))
    unused = plgpu.SMEM((8,), jnp.float32)
    copies = (2 * parts + 1 if want_out else parts) + 2 + wgs
    return launch(
        body,
        (q, k, keys, weights, decays, v, lengths, start),
        tuple(out_type),
        name="gated_delta_scan",
        cluster=pair,
        grid={"values": width // (64 * wgs * pair), "head": h * segments, "row": b},
        warpgroups=wgs,
        scratch=[
            tokens(stages, parts, CHUNK, PART) if want_out else unused,
            tokens(stages, parts, CHUNK, PART),
            tiles(stages, CHUNK, dk),
            tiles(stages, CHUNK, CHUNK) if want_out else unused,
            tokens(stages, wgs, CHUNK, 64),
            plgpu.SMEM((stages, *decays.shape[3:]), jnp.float32),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            *([plgpu.ClusterBarrier(collective_axes=("rank",))] * 2 if narrow else []),
        ],
    )

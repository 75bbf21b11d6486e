"""The gated delta rule's backward pass over the chunks on Hopper.

    dR = M^T do + K' E        E <- e_64 E + scale Q^T diag(e) do - K^T diag(e) dR

E is the gradient of the state at a chunk's end, and dR is the gradient of V.  M, K' and e = exp(G)
are those of ``kernel_chunks``.  This is ``kernel_scan`` mirrored: the same blocks, slots and
registers.  The factors of E cancel where keys are parallel, so the products take E and dR in two
bf16 parts.

    wait c | E -> two bf16 | wgmma dR | borders, dR -> TMA | wgmma E | slot of c+1 <- TMA c-2

A decay of every key channel has the operands of ``kernel_channels``. Q and K then hold their decay
from the chunk's start, and E <- diag(exp(G_64)) E + Q^T do - K^T dR. The kernels inside a chunk
then need only one part of E. Command: ``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.kernel_chunks import PART, Prepared, high_low
from pallas_kernels.gated_delta.kernel_scan import STAGES
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.plan import VALUE_BLOCK
from pallas_kernels.recurrence.states import (
    by_token,
    read_state,
    read_transposed,
    store_transposed,
    write_rows,
    write_state,
)

_WGMMA = plgpu.Layout.WGMMA


class _Reverse:
    """The program of a warpgroup: 64 value channels of a segment's chunks, from the last on.

    gmem.d_state, gmem.d_v and gmem.borders may be None.
    """

    def __init__(
        self, gmem, smem, barrier, *, dk, dv, n_chunks, group, by_channel: bool, segments: int
    ):
        self.gmem, self.smem, self.barrier = gmem, smem, barrier
        self.dk, self.dv, self.group, self.by_channel = dk, dv, group, by_channel
        self.channels = [pl.ds(at, PART) for at in range(0, dk, PART)]
        self.block, self.row = lax.axis_index("values"), lax.axis_index("row")
        self.head, self.segment = (
            lax.axis_index("head") // segments,
            lax.axis_index("head") % segments,
        )
        self.warpgroup = lax.axis_index("warpgroup")
        per = -(-n_chunks // segments)
        self.last = jnp.minimum((self.segment + 1) * per, n_chunks)
        self.steps = jnp.maximum(self.last - self.segment * per, 0)

    def run(self) -> None:
        pl.when(self.warpgroup == 0)(self.fill_ring)
        self.columns = pl.ds(self.block * VALUE_BLOCK + self.warpgroup * 64, 64)
        state = self.first_state()
        self.mask = jnp.full((128,), -1, jnp.int32)
        state = lax.fori_loop(0, self.steps, self.chunk, state)
        for part, at in enumerate(self.channels):
            to = self.gmem.first.at[self.row, self.head, self.segment, at, self.columns]
            write_state(self.dv)(to, state[part])
        plgpu.wait_smem_to_gmem(0)

    def first_state(self):
        """E at the segment's end, by parts of the key channels."""
        if self.gmem.d_state is not None:
            place = self.gmem.d_state.at[self.row, self.head, self.segment]
            return tuple(
                read_state(PART, self.dv)(place.at[at, self.columns]) for at in self.channels
            )
        zero = jnp.zeros((64, PART), jnp.float32)
        return tuple(plgpu.layout_cast(zero, _WGMMA) for _ in self.channels)

    # --- copies ---

    def fill_ring(self) -> None:
        lax.fori_loop(0, jnp.minimum(2, self.steps), lambda i, _: self.load(i), None)

    def load(self, i) -> None:
        gmem, smem, b, head = self.gmem, self.smem, self.row, self.head
        c, slot = self.last - 1 - i, i % STAGES
        rows, bar = pl.ds(c * CHUNK, CHUNK), self.barrier.full.at[slot]
        for part, _ in enumerate(self.channels):
            at = pl.ds(part * PART, PART)
            for x, to in ((gmem.k, smem.k), (gmem.q, smem.q)):
                source = x.at[b, rows, head // self.group, at]
                plgpu.copy_gmem_to_smem(source, to.rows.at[slot, part], bar)
            plgpu.copy_gmem_to_smem(gmem.keys.at[b, head, rows, at], smem.keys.at[slot, part], bar)
        for w in range(2):
            at = pl.ds(self.block * VALUE_BLOCK + w * 64, 64)
            source = gmem.d_out.at[b, rows, head, at]
            plgpu.copy_gmem_to_smem(source, smem.d_out.rows.at[slot, w], bar)
        plgpu.copy_gmem_to_smem(gmem.decays.at[b, head, c], smem.decays.at[slot], bar)
        plgpu.copy_gmem_to_smem(gmem.weights.at[b, head, rows], smem.weights.at[slot], bar)

    def release(self, i) -> None:
        """Give up the slot before, and start the copies into it."""
        barrier = self.barrier
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(barrier.empty.at[(i - 1) % STAGES]))
        pl.when((self.warpgroup == 0) & (i + 2 < self.steps))(lambda: self.refill(i))

    def refill(self, i) -> None:
        empty = self.barrier.empty
        pl.when(i > 0)(lambda: plgpu.barrier_wait(empty.at[(i - 1) % STAGES]))
        self.load(i + 2)

    # --- a chunk ---

    def chunk(self, i, state):
        """wait | E -> two bf16 | wgmma dR | borders, dR -> TMA | wgmma E | slot <- TMA"""
        gmem, smem, own = self.gmem, self.smem, self.warpgroup
        c, slot = self.last - 1 - i, i % STAGES
        rows = pl.ds(c * CHUNK, CHUNK)
        plgpu.barrier_wait(self.barrier.full.at[slot])
        ends = [high_low(x) for x in state]
        d_o = read_transposed(smem.d_out.rows.at[slot, own], self.mask)
        found = functools.partial(self.d_rest, slot, d_o, ends)
        d_rest = pl.run_scoped(found, plgpu.ACC((64, CHUNK), jnp.float32))
        if gmem.d_v is not None:
            self.store_borders(c, ends)
        state = self.update(slot, state, d_o, d_rest)
        if gmem.d_v is not None:
            store_transposed(smem.d_out.tiles.at[slot, own], d_rest)  # in the place of d_out
        plgpu.commit_smem()
        if gmem.d_v is not None:
            to = gmem.d_v.at[self.row, rows, self.head, self.columns]
            plgpu.copy_smem_to_gmem(smem.d_out.rows.at[slot, own], to)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        self.release(i)
        return tuple(state)

    def d_rest(self, slot, d_o, ends, acc):
        """dR^T = do^T M + E^T K'^T"""
        plgpu.wgmma(acc, d_o, self.smem.weights.at[slot].transpose((1, 0)))
        for part, both in enumerate(ends):
            for x in both:
                plgpu.wgmma(acc, x, self.smem.keys.at[slot, part].transpose((1, 0)))
        return acc[...]

    def store_borders(self, c, ends) -> None:
        """E^T at the chunk's end; with a decay a channel rounded, else in two parts."""
        borders = self.gmem.borders
        for part, at in enumerate(self.channels):
            for n, x in enumerate(ends[part][: 1 if self.by_channel else 2]):
                place = self.row, self.head, c
                kept = borders.at[place] if self.by_channel else borders.at[*place, n]
                write_rows(PART, self.dk)(kept.at[self.columns, at], x)

    def update(self, slot, state, d_o, d_rest):
        """E at the chunk's start."""
        smem = self.smem
        if self.by_channel:
            asked, seen = d_o, high_low(-d_rest)
        else:
            asked = (d_o.astype(jnp.float32) * by_token(smem.decays, slot, 1)).astype(jnp.bfloat16)
            seen = high_low(d_rest * -by_token(smem.decays, slot, 0))

        def products(accs):
            for part, acc in enumerate(accs):
                plgpu.wgmma(acc, asked, smem.q.tiles.at[slot, part])
                for x in seen:
                    plgpu.wgmma(acc, x, smem.k.tiles.at[slot, part])

        if self.by_channel:
            rows_of = [
                plgpu.load(smem.decays.at[slot, at], layout=_WGMMA.reduce(0))
                for at in self.channels
            ]
            decay = [lax.broadcast_in_dim(e, (64, PART), [1]) for e in rows_of]
        else:
            decay = [smem.decays[slot, 0, CHUNK - 1]] * len(self.channels)
        return pl.run_state(products)(
            tuple(plgpu.ACC.init(x * e) for x, e in zip(state, decay, strict=True))
        )


def reverse_scan(prepared: Prepared, d_out, d_state, *, segments: int = 1, want_out: bool = True):
    """Pass the state's gradient over the chunks, from the last one on.

    Parameters
    ----------
    d_state : [B, H, segments, Dk, Dv] or None
        E at the segments' ends; None is zeros.
    want_out : bool
        Return dv and the borders too.

    Returns
    -------
    list
        dv [B, T, H, Dv]; E^T at the chunks' ends in two bfloat16 parts, [B, H, NC, 2, Dv, Dk], for
        a decay a channel rounded, [B, H, NC, Dv, Dk]; and E at the segments' starts, [B, H,
        segments, Dk, Dv].
    """
    b, t, h, dv = d_out.shape
    hk, dk = prepared.q.shape[2:]
    nc, parts, by_channel = -(-t // CHUNK), dk // PART, prepared.by_channel
    options = {
        "dk": dk,
        "dv": dv,
        "n_chunks": nc,
        "group": h // hk,
        "by_channel": by_channel,
        "segments": segments,
    }

    def body(gmem, smem, barrier):
        _Reverse(gmem, smem, barrier, **options).run()

    spec = jax.ShapeDtypeStruct
    borders = (b, h, nc, *(() if by_channel else (2,)), dv, dk)
    results = launch(
        body,
        {**prepared._asdict(), "d_out": d_out, "d_state": d_state},
        {
            "d_v": spec((b, t, h, dv), d_out.dtype) if want_out else None,
            "borders": spec(borders, jnp.bfloat16) if want_out else None,
            "first": spec((b, h, segments, dk, dv), jnp.float32),
        },
        name="gated_delta_reverse",
        grid={"values": dv // VALUE_BLOCK, "head": h * segments, "row": b},
        warpgroups=2,
        scratch={
            "q": tokens(STAGES, parts, CHUNK, PART),
            "k": tokens(STAGES, parts, CHUNK, PART),
            "keys": tiles(STAGES, parts, CHUNK, PART),
            "weights": tiles(STAGES, CHUNK, CHUNK),
            "d_out": tokens(STAGES, 2, CHUNK, 64),
            "decays": plgpu.SMEM((STAGES, *prepared.decays.shape[3:]), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=3 * parts + 2 + 2, num_barriers=STAGES),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        },
    )
    return [result for result in results if result is not None]

"""The gated delta rule's backward pass over the chunks on Hopper.

    dR = M^T do + K' E        E <- e_64 E + scale Q^T diag(e) do - K^T diag(e) dR

of each head and chunk of 64 tokens: Q, K, K' [64, Dk], do, dR [64, Dv], M [64, 64], E [Dk, Dv].
E is the gradient of the state at a chunk's end, and dR is the gradient of V.  M, K' and e = exp(G)
are those of ``kernel_chunks``.  This is ``kernel_scan`` for 128 value channels, mirrored: its
blocks, slots and registers.  Terms of E cancel where keys are parallel, so the products take
E and dR in two bf16 parts.

    wait c | E -> two bf16 | wgmma dR | borders | wgmma E | dR -> TMA | slot of c+1 <- TMA c-2

A decay of every key channel has the operands of ``kernel_channels``. Q and K then hold their decay
from the chunk's start, Q the scale too, and E <- diag(exp(G_64)) E + Q^T do - K^T dR. The kernels
inside a chunk then need only one part of E. Command: ``python -m benchmarks.kernels.gated_delta``.

Copies: warpgroup 0 copies k, q, K', do, e and M of a chunk by TMA, for both (``load``).
Waits: both warpgroups wait for a slot on ``full``.  They arrive at ``empty`` of the slot before
once that slot's dR has left it (``wait_smem_to_gmem(1)``).  Warpgroup 0 waits there before it
refills the slot (``ChunkScan.release``).
Writes: a warpgroup stores dR by TMA from do's place.  Borders and E at the segment's start leave
from registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.kernel_chunks import Prepared, high_low
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.plan import VALUE_BLOCK
from pallas_kernels.recurrence.scan import PART, ChunkScan, ScanFacts
from pallas_kernels.recurrence.states import by_token, read_transposed, write_rows

_WGMMA = plgpu.Layout.WGMMA


class _Reverse(ChunkScan):
    """gmem.borders may be None.  The state is E^T, [64 value channels, 64 key channels], of each
    part of the key channels."""

    def __init__(self, gmem, smem, barrier, *, facts: ScanFacts, by_channel: bool):
        super().__init__(gmem, smem, barrier, facts, reverse=True)
        self.by_channel = by_channel

    def run(self) -> None:
        keys = self.facts.keys
        pl.when(self.warpgroup == 0)(self.fill_ring)
        self.columns = self.value_columns(2)
        state = tuple(self.first_state(x) for x in keys)
        self.mask = jnp.full((128,), -1, jnp.int32)  # every token counts
        state = lax.fori_loop(0, self.steps, self.chunk, state)
        for part, x in zip(keys, state, strict=True):
            self.write_state(x, part)
        plgpu.wait_smem_to_gmem(0)

    # --- copies ---

    def load(self, i) -> None:
        gmem, smem, b, head = self.gmem, self.smem, self.row, self.head
        c, slot, rows = self.place(i)
        bar = self.barrier.full.at[slot]
        for part, at in enumerate(self.facts.keys):
            for x, to in ((gmem.k, smem.k), (gmem.q, smem.q)):
                source = x.at[b, rows, head // self.facts.group, at]
                plgpu.copy_gmem_to_smem(source, to.rows.at[slot, part], bar)
            plgpu.copy_gmem_to_smem(gmem.keys.at[b, head, rows, at], smem.keys.at[slot, part], bar)
        for w in range(2):
            at = pl.ds(self.block * VALUE_BLOCK + w * 64, 64)
            source = gmem.d_out.at[b, rows, head, at]
            plgpu.copy_gmem_to_smem(source, smem.v.rows.at[slot, w], bar)
        plgpu.copy_gmem_to_smem(gmem.decays.at[b, head, c], smem.decays.at[slot], bar)
        plgpu.copy_gmem_to_smem(gmem.mixing.at[b, head, rows], smem.mixing.at[slot], bar)

    # --- a chunk ---

    def chunk(self, i, state):
        """wait | E -> two bf16 | wgmma dR | borders | wgmma E | dR -> TMA | slot <- TMA"""
        gmem, smem, own = self.gmem, self.smem, self.warpgroup
        c, slot, rows = self.place(i)
        plgpu.barrier_wait(self.barrier.full.at[slot])
        ends = [high_low(x) for x in state]
        d_o = read_transposed(smem.v.rows.at[slot, own], self.mask)
        found = functools.partial(self.d_rest, slot, d_o, ends)
        d_rest = pl.run_scoped(found, plgpu.ACC((64, CHUNK), jnp.float32))
        if gmem.out is not None:
            self.store_borders(c, ends)
        state = self.update(slot, state, d_o, d_rest)
        self.store_outputs(slot, rows, d_rest)  # in the place of d_out
        self.release(i)
        return tuple(state)

    def d_rest(self, slot, d_o, ends, acc):
        """dR^T = do^T M + E^T K'^T; ``mixing`` holds M^T."""
        plgpu.wgmma(acc, d_o, self.smem.mixing.at[slot].transpose((1, 0)))
        for part, both in enumerate(ends):
            for x in both:
                plgpu.wgmma(acc, x, self.smem.keys.at[slot, part].transpose((1, 0)))
        return acc[...]

    def store_borders(self, c, ends) -> None:
        """E^T at the chunk's end; with a decay a channel rounded, else in two parts."""
        borders = self.gmem.borders
        for part, at in enumerate(self.facts.keys):
            for n, x in enumerate(ends[part][: 1 if self.by_channel else 2]):
                place = self.row, self.head, c
                kept = borders.at[place] if self.by_channel else borders.at[*place, n]
                write_rows(PART, self.facts.dk)(kept.at[self.columns, at], x)

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
                for at in self.facts.keys
            ]
            decay = [lax.broadcast_in_dim(e, (64, PART), [1]) for e in rows_of]
        else:
            decay = [smem.decays[slot, 0, CHUNK - 1]] * len(self.facts.keys)
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
    facts, stages = ScanFacts(dk, dv, nc, segments, h // hk), ChunkScan.stages

    spec = jax.ShapeDtypeStruct
    borders = (b, h, nc, *(() if by_channel else (2,)), dv, dk)
    results = launch(
        functools.partial(_Reverse, facts=facts, by_channel=by_channel),
        {**prepared._asdict(), "d_out": d_out, "start": d_state, "lengths": None},
        {
            "out": spec((b, t, h, dv), d_out.dtype) if want_out else None,
            "borders": spec(borders, jnp.bfloat16) if want_out else None,
            "final": spec((b, h, segments, dk, dv), jnp.float32),
        },
        name="gated_delta_reverse",
        grid={"values": dv // VALUE_BLOCK, "head": h * segments, "row": b},
        warpgroups=2,
        scratch={
            "q": tokens(stages, parts, CHUNK, PART),
            "k": tokens(stages, parts, CHUNK, PART),
            "keys": tiles(stages, parts, CHUNK, PART),
            "mixing": tiles(stages, CHUNK, CHUNK),
            "v": tokens(stages, 2, CHUNK, 64),
            "decays": plgpu.SMEM((stages, *prepared.decays.shape[3:]), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=3 * parts + 2 + 2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
    )
    return [result for result in results if result is not None]

"""SSD on Hopper: one kernel, ``scan``, and two passes of it where there are few heads.

If there are too few heads to fill the GPU, a row is cut into segments.  A first pass gives each
segment's own state, from zeros.  A segment multiplies the state before it by one number a head, so
the segments' first states follow in XLA.  A second pass has the outputs.

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed) and states; T of any length.  Dk is
64, 128 or 256, Dv a multiple of 16, which channels of zeros fill up to one of 64.  Everything is
read and written in [B, T, H, D].

The kernel computes the scores of a chunk, the state and the outputs at once.  With G the sums of
log_decay from a chunk's start, D_ij = exp(G_i - G_j) for j <= i, else 0:

    o = diag(exp(G)) Q S + (Q K^T * D) V        S <- exp(G_64) S + K^T diag(exp(G_64 - G)) V

of each head and chunk of 64 tokens: Q, K [64, Dk], V, o [64, Dv], D [64, 64], S [Dk, Dv].
One decay a head needs no work ahead of the scan: a chunk's scores are one product, and D follows
from 64 floats.  So q, k, v and the outputs are all that moves, and q and k of a group are read
from the L2 by its heads.

One block per two units of 64 value channels of a group, batch row and segment of chunks; per one
where a group's units are odd, or Dk is 256 and two would not fit.  A warpgroup has a unit, and the
first one starts the copies.  S^T [64 dv, Dk] stays in registers for the whole loop, as parts of
64 key channels.  Rounded to bf16 it is the register operand of S^T Q^T.  V^T is that of V^T P^T
and, decayed, of V^T K.  P = Q K^T * D goes through shared memory.  There are three slots: one that
is computed, one that is there, one on its way.  The outputs leave from the place of the values.

Copies: warpgroup 0 copies q, k, v and the sums of a chunk by TMA, two chunks ahead (``load``).
Waits: each warpgroup waits for a chunk on ``full[slot]``.  It arrives at ``empty`` of the slot
before once that slot's outputs have left it (``wait_smem_to_gmem(1)``).  Warpgroup 0 waits there
for all of them before it refills the slot (``ChunkScan.release``).
Writes: a warpgroup stores its outputs by TMA, and the final state from registers.

    wait c | wgmma Q K^T, S^T Q^T | P -> smem | wgmma V^T P^T, S | o -> TMA | slot of c-1 <- TMA c+2

Command: ``python -m benchmarks.kernels.ssd``.  Measurements: docs/lab/ssd.md.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import by_blocks
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta.kernel_chunks import bf16_array, pairs
from pallas_kernels.gated_delta.kernel_inverse import LOWEST
from pallas_kernels.launch import REF, inline, launch
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.op import Heads, zero_padding
from pallas_kernels.recurrence.plan import (
    ScanPlan,
    operands_reason,
    padded,
    planned_batch,
    segments_for,
)
from pallas_kernels.recurrence.scan import PART, WIDTH, ChunkScan, ScanFacts, segment_states
from pallas_kernels.recurrence.states import by_token, read_transposed

_WGMMA = plgpu.Layout.WGMMA


@inline(REF, _WGMMA, out=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16, layout=_WGMMA))
def _decayed(sums, scores):
    """Q K^T * D, rounded."""
    rows = inverse.InverseRows()
    decays = inverse.decays(rows, p.shared_address(sums), transposed=False)
    words = []
    for tile, factors in zip(pairs(scores), decays, strict=True):
        for pair, factor in zip(tile, factors, strict=True):
            words.append(p.pack(*(x * y for x, y in zip(pair, factor, strict=True))))
    return bf16_array(words)


def warpgroups_of(units: int, group: int, dk: int) -> int:
    """Return the warpgroups of a block; units: those that a head needs, of ``group`` that share q.

    Two, where they fit and a group's heads fill whole blocks.
    """
    return 2 if (units * group) % 2 == 0 and dk <= 128 else 1


class _Scan(ChunkScan):
    """A block's warpgroups have a head, a part of it, or two heads, all of one key head."""

    def __init__(self, gmem, smem, barrier, *, facts: ScanFacts, warpgroups: int):
        super().__init__(gmem, smem, barrier, facts)
        self.warpgroups, self.head_block = warpgroups, self.head
        self.head, self.columns = self.columns_of(self.warpgroup)
        self.key_head = self.head // facts.group
        self.is_wide = len(facts.keys) > 2

    def columns_of(self, warpgroup):
        """(head, value channels) of a warpgroup of this block."""
        units = self.facts.dv // WIDTH  # warpgroups that a head needs
        unit = self.head_block * self.warpgroups + warpgroup
        return unit // units, pl.ds((unit % units) * WIDTH, WIDTH)

    def run(self) -> None:
        keys, values, tile = self.facts.keys, self.smem.v, (0, self.warpgroup)
        pl.when(self.warpgroup == 0)(self.fill_ring)
        self.mask = jnp.full((128,), -1, jnp.int32)
        state = lax.fori_loop(0, self.steps, self.chunk, [self.first_state(x) for x in keys])
        for part, x in zip(keys, state, strict=True):
            self.write_state(x, part)
        plgpu.wait_smem_to_gmem(0)
        self.clear_outputs(values.tiles.at[tile], values.rows.at[tile])

    def load(self, i) -> None:
        """q, k, v and the sums of log_decay of the i-th chunk."""
        gmem, smem = self.gmem, self.smem
        c, slot, rows = self.place(i)
        bar = self.barrier.full.at[slot]
        for x, to in ((gmem.q, smem.q), (gmem.k, smem.k)):
            for part, keys in enumerate(self.facts.keys):
                if x is None:
                    continue
                source = x.at[self.row, rows, self.key_head, keys]
                plgpu.copy_gmem_to_smem(source, to.rows.at[slot, part], bar)
        for w in range(self.warpgroups):
            head, columns = self.columns_of(w)
            source = gmem.v.at[self.row, rows, head, columns]
            plgpu.copy_gmem_to_smem(source, smem.v.rows.at[slot, w], bar)
            sums = gmem.sums.at[self.row, head, c]
            plgpu.copy_gmem_to_smem(sums, smem.sums.at[slot, w], bar)

    # --- a chunk ---

    def chunk(self, i, state):
        """wait | wgmma Q K^T, S^T Q^T | P -> smem | wgmma V^T P^T, S | o -> TMA | slot <- TMA"""
        gmem, smem, own = self.gmem, self.smem, self.warpgroup
        c, slot, rows = self.place(i)
        plgpu.barrier_wait(self.barrier.full.at[slot])
        sums = smem.sums.at[slot, own]
        outputs = []
        if gmem.out is not None:
            square = plgpu.ACC((WIDTH, CHUNK), jnp.float32)
            if self.is_wide:  # too few registers for both
                scores = pl.run_scoped(functools.partial(self.scores, slot), square)
                smem.scores[own] = _decayed(sums, scores)
                seen = pl.run_scoped(functools.partial(self.seen, slot, state), square)
            else:
                rounded = [x.astype(jnp.bfloat16) for x in state]
                read = functools.partial(self.read, slot, rounded)
                scores, seen = pl.run_scoped(read, square, square)
                smem.scores[own] = _decayed(sums, scores)
            outputs = [seen * jnp.exp2(by_token(smem.sums, slot, own))]
        values = self.inside(c, read_transposed(smem.v.rows.at[slot, own], self.mask))
        to_end = jnp.exp2(sums[CHUNK - 1] - by_token(smem.sums, slot, own))
        late = (values.astype(jnp.float32) * to_end).astype(jnp.bfloat16)
        whole = jnp.exp2(sums[CHUNK - 1])
        starts = [*[x * whole for x in state], *outputs]
        plgpu.commit_smem()
        update = functools.partial(self.update, slot, values, late)
        results = pl.run_state(update)([plgpu.ACC.init(x) for x in starts])
        if gmem.out is not None:  # in the place of the values
            self.store_outputs(slot, rows, self.inside(c, results.pop()))
        self.release(i)
        return results

    def read(self, slot, rounded, scores, seen):
        """Q K^T and S^T Q^T."""
        q, k = self.smem.q.tiles, self.smem.k.tiles
        for part in range(len(self.facts.keys)):
            plgpu.wgmma(scores, q.at[slot, part], k.at[slot, part].transpose((1, 0)))
        for part in range(len(self.facts.keys)):
            plgpu.wgmma(seen, rounded[part], q.at[slot, part].transpose((1, 0)))
        return scores[...], seen[...]

    def scores(self, slot, acc):
        """Q K^T"""
        q, k = self.smem.q.tiles, self.smem.k.tiles
        for part in range(len(self.facts.keys)):
            plgpu.wgmma(acc, q.at[slot, part], k.at[slot, part].transpose((1, 0)))
        return acc[...]

    def seen(self, slot, state, acc):
        """S^T Q^T, whose state is rounded part by part."""
        for part in range(len(self.facts.keys)):
            rounded = state[part].astype(jnp.bfloat16)
            plgpu.wgmma(acc, rounded, self.smem.q.tiles.at[slot, part].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # so that two parts' copies are alive
        return acc[...]

    def update(self, slot, values, late, accs) -> None:
        """S += K^T V by parts, and the outputs, where they are wanted."""
        n = len(self.facts.keys)
        for acc in accs[n:]:
            plgpu.wgmma(acc, values, self.smem.scores.at[self.warpgroup].transpose((1, 0)))
        for part, acc in enumerate(accs[:n]):
            plgpu.wgmma(acc, late, self.smem.k.tiles.at[slot, part])


def scan(q, k, v, sums, *, start=None, lengths=None, segments: int = 1, want_out: bool = True):
    """Pass the state over the chunks.

    Parameters
    ----------
    q, k : bfloat16 [B, T, G, Dk]
        The heads of a group share them.  k is 0 past a row's end.
    v : bfloat16 [B, T, H, Dv]
    sums : float32 [B, H, NC, 64]
        Sums of log_decay from a chunk's start, as exponents of 2; past a row's end they stay.
    start : float32 [B, H, segments, Dk, Dv], optional
        The states at the segments' starts; None is zeros.
    lengths : int32 [B], optional

    Returns
    -------
    list
        out [B, T, H, Dv] or None; the states at the segments' ends, as ``start``.
    """
    b, t, h, dv = v.shape
    groups, dk = k.shape[2:]
    units, group, stages = dv // WIDTH, h // groups, ChunkScan.stages
    wgs = warpgroups_of(units, group, dk)
    facts = ScanFacts(dk, dv, -(-t // CHUNK), segments, group)

    parts, spec = len(facts.keys), jax.ShapeDtypeStruct
    return launch(
        functools.partial(_Scan, facts=facts, warpgroups=wgs),
        {
            "q": q if want_out else None,
            "k": k,
            "v": v,
            "sums": sums,
            "lengths": lengths,
            "start": start,
        },
        {
            "out": spec((b, t, h, dv), v.dtype) if want_out else None,
            "final": spec((b, h, segments, dk, dv), jnp.float32),
        },
        name="ssd_scan" if want_out else "ssd_states",
        grid={"values": 1, "head": h * units // wgs * segments, "row": b},
        warpgroups=wgs,
        approx_math=True,
        scratch={
            "q": tokens(stages, parts, CHUNK, PART) if want_out else None,
            "k": tokens(stages, parts, CHUNK, PART),
            "v": tokens(stages, wgs, CHUNK, WIDTH),
            "scores": tiles(wgs, CHUNK, CHUNK) if want_out else None,
            "sums": plgpu.SMEM((stages, wgs, CHUNK), jnp.float32),
            "full": plgpu.Barrier(
                num_arrivals=(1 + want_out) * parts + 2 * wgs, num_barriers=stages
            ),
            "empty": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        },
    )


# --- the passes over a row ------------------------------------------------------------------------


WIDTHS = 64, 128, 256  # of keys


class SSDPlan(ScanPlan):
    """How a row is cut."""

    kernel: ClassVar[str] = "ssd_mosaic"


def plan(heads: Heads) -> SSDPlan | Reason:
    """How ``ssd_forward`` computes ``ssd``: by the least predicted time.

    A first pass over the chunks, without outputs, and the segments' first states are the price of
    several segments.
    """
    (batch, length, n_heads, dv), dk = heads.v.shape, heads.q.shape[-1]
    if reason := lacking("wgmma") or operands_reason(*heads[:3], 16):
        return Reason(reason)
    if dk not in WIDTHS:
        return Reason(f"q has Dk = {dk}, the kernel takes 64, 128 and 256")
    units = -(-dv // WIDTH)
    blocks = planned_batch(batch, length) * n_heads * units
    blocks //= warpgroups_of(units, n_heads // heads.q.shape[2], dk)
    n_chunks, us = -(-length // CHUNK), gpu().ssd

    def microseconds(n: int) -> float:
        waves, chunks = -(-n * blocks // gpu().sms), -(-n_chunks // n)
        return waves * chunks * (us.wave + us.state * (n > 1)) + us.segment * (n > 1)

    return SSDPlan(segments_for(blocks, n_chunks, microseconds))


def chunk_sums(log_decay: jax.Array) -> jax.Array:
    """``[B, T, H]`` -> float32 ``[B, H, NC, 64]``: sums from a chunk's start, as exponents of 2."""
    b, t, h = log_decay.shape
    nc = -(-t // CHUNK)
    x = jnp.maximum(log_decay.astype(jnp.float32) * LOG2E, LOWEST)
    x = jnp.pad(x, ((0, 0), (0, nc * CHUNK - t), (0, 0))).reshape(b, nc, CHUNK, h)
    x = jnp.moveaxis(x, 3, 1)
    upper = jnp.asarray(np.triu(np.ones((CHUNK, CHUNK), np.float32)))
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return by_blocks(product, x.reshape(-1, CHUNK), upper).reshape(x.shape)


def segment_starts(
    local: jax.Array, sums: jax.Array, start: jax.Array | None, n_segments: int
) -> jax.Array:
    """Return the state at the start of every segment, [B, H, segments, Dk, Dv].

    local: every segment's final state from a zero start.  sums: of ``chunk_sums``.
    """
    b, h, nc, _ = sums.shape
    per = -(-nc // n_segments)
    ends = jnp.pad(sums[..., -1], ((0, 0), (0, 0), (0, n_segments * per - nc)))
    whole = jnp.exp2(jnp.sum(ends.reshape(b, h, n_segments, per), axis=-1))[..., None, None]
    return segment_states(local, start, lambda s, state: whole[:, :, s] * state)


@functools.partial(jax.jit, static_argnames="segments")
def ssd_forward(
    heads: Heads,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return o [B, T, H, Dv] and the state [B, H, Dk, Dv].

    lengths: int32[B]; tokens at t >= lengths[b] are never read into a result (they may be NaN), o
        is 0 there, and whole chunks of them cost nothing.
    segments: parts of a row, of ``plan``.
    """
    q, k, v, log_decay, _ = heads
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    k, log_decay = zero_padding(lengths, (k, log_decay))
    sums, dv = chunk_sums(log_decay), v.shape[-1]
    v, initial_state = padded(v, WIDTH), padded(initial_state, WIDTH)
    start = None if initial_state is None else initial_state[:, :, None]
    given = {"lengths": lengths, "segments": segments}
    if segments > 1:
        _, local = scan(q, k, v, sums, want_out=False, **given)
        start = segment_starts(local, sums, initial_state, segments)
    o, states = scan(q, k, v, sums, start=start, **given)
    return o[..., :dv], states[:, :, -1, :, :dv]

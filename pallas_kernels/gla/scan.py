"""GLA's pass over the chunks on Hopper: the recurrent state and the outputs, from gated operands.

    out_c = qg_c S_c + A_c v_c        S_{c+1} = diag(decay_c) S_c + kg_c^T v_c

of each head and chunk of 64 tokens: qg, kg [64, Dk], v, out [64, Dv], A [64, 64], S [Dk, Dv].

Contract.  The operands are those of ``gla.gates``; ``scan`` gives the shapes.  ``reverse=True`` is
the reverse scan of the backward pass, with other operands in the same places: kg for qg, qg for kg,
d_out for v and A^T for A.  Its state is the gradient of the state, and its output is dv.

One block per (128 value channels, head, batch row, segment of chunks).  It has two warpgroups of 64
value channels each, and the first also starts the copies.  S^T [64 dv, Dk] stays in registers for
the whole loop.  It is the register operand of out^T = S^T qg^T + v^T A^T, so it never visits
memory.

    chunk    wait | S -> bf16 | wgmma out | out -> smem -> TMA | S *= decay, wgmma S | ...
    refill     kg, v of chunk c - 1's slot <- TMA      qg, A of chunk c's slot <- TMA

As soon as both warpgroups have read a slot's operands, the next ones are copied there while
products run.  A third warpgroup that only copies does not pay: jax >= 0.12 ignores ``setmaxnreg``,
so a thread had 168 registers, spilled, and waited for each wgmma.

With Dk = 256 and more blocks than the GPU has SMs, the L2's rate is the limit.  Pairs of blocks are
then clusters and copy qg, kg and A for one another.

Copies: warpgroup 0 issues every TMA copy: ``load_queries`` (qg, A), ``load_keys`` (v of both
warpgroups, kg, decay).  Each warpgroup stores its own outputs by TMA.
Waits: both warpgroups wait for a slot on ``q_full`` and ``k_full``.  Both arrive at ``q_read`` and
``k_read`` once they have read it; warpgroup 0 waits there before it refills (``refill``).  In a
pair, both blocks arrive at and wait on the same cluster barriers, and ``leave`` ends together.
Writes: a warpgroup stores out^T of its 64 channels by TMA, borders by TMA or from registers, and
the final state from registers.

Floor: 9 bytes per element of q at Dk = Dv = 128, 0.140 ms at (8, 4096, 16, 128, 128).  Result:
0.156 on one H200, memory-bound.  (32, 2048, 4, 256, 512): 0.354.  More, and attempts:
docs/lab/gla.md.  Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import gpu
from pallas_kernels.gla.gates import Gated, piece_width
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.plan import VALUE_BLOCK
from pallas_kernels.recurrence.scan import PART, ChunkScan, ScanFacts
from pallas_kernels.recurrence.states import write_rows

_WGMMA = plgpu.Layout.WGMMA


def stages_of(dk: int) -> int:
    """Slots of a block's ring: what shared memory holds."""
    return 2 if dk > 128 else 3


@dataclasses.dataclass(frozen=True)
class _Facts(ScanFacts):
    pieces: int = 1  # of A
    stage_borders: bool = False  # borders go out through shared memory
    reverse: bool = False
    paired: bool = False  # two blocks are a cluster


class _Scan(ChunkScan):
    """gmem.borders may be None."""

    def __init__(self, gmem, smem, barrier, *, facts: _Facts):
        super().__init__(gmem, smem, barrier, facts, reverse=facts.reverse, paired=facts.paired)
        self.stages = stages_of(facts.dk)

    def run(self) -> None:
        out = self.smem.out
        pl.when(self.warpgroup == 0)(self.fill_ring)
        self.columns = self.value_columns(2)
        self.write_state(lax.fori_loop(0, self.steps, self.chunk, self.first_state()))
        plgpu.wait_smem_to_gmem(0, wait_read_only=self.clears)
        if self.clears:
            self.clear_outputs(out.tiles.at[self.warpgroup], out.rows.at[self.warpgroup])
        if self.facts.paired:  # a block stays until the other one has arrived at its barriers
            pl.when(self.warpgroup == 0)(self.leave)

    # --- copies ---

    def fill_ring(self) -> None:
        def begin(i, _):
            if self.gmem.out is not None:
                self.load_queries(i)
            self.load_keys(i)

        lax.fori_loop(0, jnp.minimum(self.stages, self.steps), begin, None)

    def load_queries(self, i) -> None:
        gmem, smem, at = self.gmem, self.smem, (self.row, self.head)
        _, slot, rows = self.place(i)
        bar = self.barrier.q_full.at[slot]
        plgpu.copy_gmem_to_smem(gmem.qg.at[*at, rows], smem.q.at[slot], bar, **self.both)
        for piece in range(self.facts.pieces):
            plgpu.copy_gmem_to_smem(
                gmem.attention.at[*at, piece, rows],
                smem.attention.at[slot, piece],
                bar,
                **self.both,
            )

    def load_keys(self, i) -> None:
        gmem, smem = self.gmem, self.smem
        c, slot, rows = self.place(i)
        bar = self.barrier.k_full.at[slot]
        for w in range(2):
            at = pl.ds(self.block * VALUE_BLOCK + w * 64, 64)
            source = gmem.v.at[self.row, rows, self.head, at]
            plgpu.copy_gmem_to_smem(source, smem.v.rows.at[slot, w], bar)
        at = self.row, self.head
        plgpu.copy_gmem_to_smem(gmem.kg.at[*at, rows], smem.k.at[slot], bar, **self.both)
        plgpu.copy_gmem_to_smem(gmem.decay.at[*at, c], smem.decay.at[slot], bar)

    def refill(self, load, read, i) -> None:
        """The place of the i-th chunk, which both warpgroups have read, for one ``stages`` on."""

        @pl.when((self.warpgroup == 0) & (i >= 0) & (i + self.stages < self.steps))
        def _():
            plgpu.barrier_wait(read.at[i % self.stages])
            load(i + self.stages)

    # --- a chunk ---

    def chunk(self, i, state):
        """wait | S -> bf16 | wgmma out | out -> smem -> TMA | S *= decay, wgmma S"""
        gmem, barrier, facts = self.gmem, self.barrier, self.facts
        c, slot, rows = self.place(i)
        values = self.smem.v.tiles.at[slot, self.warpgroup]
        if gmem.borders is not None and facts.stage_borders:
            self.store_border(c, state)
        if gmem.out is not None:
            plgpu.barrier_wait(barrier.q_full.at[slot])
        plgpu.barrier_wait(barrier.k_full.at[slot])
        if gmem.lengths is not None:
            left = gmem.lengths[self.row] - c * CHUNK
            pl.when(left < CHUNK)(lambda: self.clear_values(values, left))
        if gmem.out is not None:
            outputs = functools.partial(self.outputs, i, c, slot, values, state)
            o = pl.run_scoped(outputs, plgpu.ACC((64, CHUNK), jnp.float32))
            self.store_outputs(slot, rows, o)
        update = functools.partial(self.update, i, slot, values)
        decays = plgpu.load(self.smem.decay.at[slot], layout=_WGMMA.reduce(0))
        decayed = state * lax.broadcast_in_dim(decays, (64, facts.dk), [1])
        state = pl.run_state(update)(plgpu.ACC.init(decayed))
        if facts.paired:
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier.k_read.at[slot])
        return state

    def store_border(self, c, state) -> None:
        """The state at the chunk's start, through shared memory."""
        staged = self.smem.border
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[self.warpgroup] = state.astype(jnp.bfloat16)
        plgpu.commit_smem()
        to = self.gmem.borders.at[self.row, self.head, c, self.columns]
        plgpu.copy_smem_to_gmem(staged.at[self.warpgroup], to)

    def clear_values(self, values, left) -> None:
        """Replace values past the row's end by zeros."""
        tile = plgpu.load(values, layout=_WGMMA)
        token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, 64), 0, layout=_WGMMA)
        values[...] = jnp.where(token < left, tile, jnp.zeros_like(tile))
        plgpu.commit_smem()

    def outputs(self, i, c, slot, values, state, acc):
        """out^T = S^T qg^T + v^T A^T"""
        gmem, smem, facts, dk = self.gmem, self.smem, self.facts, self.facts.dk
        for part, at in enumerate(facts.keys):
            rounded = state[:, part * PART : (part + 1) * PART].astype(jnp.bfloat16)
            plgpu.wgmma(acc, rounded, smem.q.at[slot, :, at].transpose((1, 0)))
            if gmem.borders is not None and not facts.stage_borders:
                to = gmem.borders.at[self.row, self.head, c, self.columns, at]
                write_rows(PART, dk)(to, rounded)
            plgpu.wgmma_wait(1)  # so that two parts' copies are alive
        for piece in range(facts.pieces):
            a = smem.attention.at[slot, piece]
            a = a if facts.reverse else a.transpose((1, 0))
            plgpu.wgmma(acc, values.transpose((1, 0)), a)
        self.refill(self.load_keys, self.barrier.k_read, i - 1)
        return acc[...]

    def store_outputs(self, slot, rows, o) -> None:
        out, read, own = self.smem.out, self.barrier.q_read, self.warpgroup
        if not self.facts.paired:
            plgpu.barrier_arrive(read.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out.tiles.at[own].transpose((1, 0))[...] = plgpu.layout_cast(
            o.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        # In a pair one thread arrives for its whole warpgroup, hence behind its barrier.
        if self.facts.paired:
            plgpu.barrier_arrive(read.at[slot])
        to = self.gmem.out.at[self.row, rows, self.head, self.columns]
        plgpu.copy_smem_to_gmem(out.rows.at[own], to)

    def update(self, i, slot, values, acc) -> None:
        """S += kg^T v"""
        plgpu.wgmma(acc, values.transpose((1, 0)), self.smem.k.at[slot])
        if self.gmem.out is not None:
            self.refill(self.load_queries, self.barrier.q_read, i)
        else:
            self.refill(self.load_keys, self.barrier.k_read, i - 1)

    # --- the end ---

    def leave(self) -> None:
        """Wait until the other block of the pair has read all that this one copied."""

        def read(i, _):
            if self.gmem.out is not None:
                plgpu.barrier_wait(self.barrier.q_read.at[i % self.stages])
            plgpu.barrier_wait(self.barrier.k_read.at[i % self.stages])

        lax.fori_loop(jnp.maximum(self.steps - self.stages, 0), self.steps, read, None)


def _scratch(facts: _Facts, want_out: bool) -> dict:
    """Shared memory of a block, and its barriers."""
    dk, pieces, stages = facts.dk, facts.pieces, stages_of(facts.dk)
    unused = plgpu.SMEM((8,), jnp.float32)
    # The places where a slot's operands are read for the last time.
    read = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    if facts.paired:
        read = plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=2, num_barriers=stages)
    return {
        "q": tiles(stages, CHUNK, dk) if want_out else unused,
        "k": tiles(stages, CHUNK, dk),
        "attention": tiles(stages, pieces, CHUNK, CHUNK) if want_out else unused,
        "v": tokens(stages, 2, CHUNK, 64),
        "decay": plgpu.SMEM((stages, dk), jnp.float32),
        "out": tokens(2, CHUNK, 64) if want_out else unused,
        "border": tiles(2, 64, dk) if facts.stage_borders else unused,
        "q_full": plgpu.Barrier(num_arrivals=1 + pieces, num_barriers=stages),
        "k_full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        "q_read": read,
        "k_read": read,
    }


def scan(
    gated: Gated,
    v: jax.Array,
    *,
    start: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int = 1,
    want_out: bool = True,
    want_borders: bool = False,
    reverse: bool = False,
):
    """Pass the state over the chunks.

    Parameters
    ----------
    start : float32 [B, H, segments, Dk, Dv], optional
        The states at the segments' starts; None is zeros.
    lengths : int32 [B], optional
    want_out, want_borders : bool
        Return outputs, and the states at the chunks' borders.
    reverse : bool
        Pass from the last chunk to the first.

    Returns
    -------
    list
        out [B, T, H, Dv] or None; borders, bfloat16 [B, H, NC, Dv, Dk], or None: the transposed
        state at the start of every chunk, with ``reverse`` at its end; the final states, as
        ``start``.
    """
    b, t, h, dv = v.shape
    dk = gated.qg.shape[-1]
    nc = -(-t // CHUNK)
    pieces = dk // piece_width(dk)
    blocks = dv // VALUE_BLOCK
    # The borders' staging tiles do not fit beside two slots of Dk = 256 operands.
    stage_borders = want_borders and (dk <= 128 or not want_out)
    paired = dk > 128 and blocks % 2 == 0 and b * h * segments * blocks > gpu().sms
    facts = _Facts(dk, dv, nc, segments, 1, pieces, stage_borders, reverse, paired)

    spec = jax.ShapeDtypeStruct
    return launch(
        functools.partial(_Scan, facts=facts),
        {**gated._asdict(), "v": v, "lengths": lengths, "start": start},
        {
            "out": spec((b, t, h, dv), v.dtype) if want_out else None,
            "borders": spec((b, h, nc, dv, dk), jnp.bfloat16) if want_borders else None,
            "final": spec((b, h, segments, dk, dv), jnp.float32),
        },
        name="gla_scan" + ("_reverse" if reverse else ""),
        cluster=1 + paired,
        grid={"values": blocks // (1 + paired), "head": h * segments, "row": b},
        warpgroups=2,
        scratch=_scratch(facts, want_out),
    )

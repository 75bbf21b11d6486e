"""The gated delta rule's pass over the chunks on Hopper: the recurrent state and the outputs.

    R = V - diag(e) K S        o = scale diag(e) Q S + M R        S <- e_64 S + K'^T R

of each head and chunk of 64 tokens: Q, K, K' [64, Dk], V, R, o [64, Dv], M [64, 64], S [Dk, Dv].
M, K' and e = exp(G) are those of ``kernel_chunks``.  With ``kernel_channels``'s operands Q and K
hold their decay, and S decays channel by channel.

One block per (128 value channels, value head, batch row, segment of chunks), or per 64 channels
where 128 would leave SMs idle.  A warpgroup has 64 value channels, and the first one starts the
copies.  S^T [64 dv, Dk] stays in registers for the whole loop.  Rounded to bf16 it is the register
operand of S^T K^T and S^T Q^T.  R^T never leaves the registers: it is that of R^T K' and R^T M^T.
There are three slots: one that is computed, one that is there, one on its way.  The outputs leave
from the place of the values.  A warpgroup that only copies would leave 168 registers, too few.

    wait c | S -> bf16 | wgmma S^T K^T, S^T Q^T | R | wgmma S, o | o -> TMA | slot of c-1 <- TMA c+2

Dk = 256 (``is_narrow``): the state takes 128 registers.  A block is one warpgroup of 64 value
channels with two slots, and rounds the state 64 columns at a time.  Two blocks of a head are a
cluster and copy all but the values and e for one another: k and q of c + 2 when both have read
c's, K' and M when both are done with c.  The values of c + 2 follow when c's outputs have left.

Copies: warpgroup 0 issues all TMA copies into a slot: ``load_tokens`` (k, q), ``load_values`` (v),
``load_prepared`` (e, K', M).
Waits: each warpgroup waits for a slot on ``full``.  It arrives at ``empty`` of the slot before
once that slot's outputs have left it (``wait_smem_to_gmem(1)``).  Warpgroup 0 waits there before it
refills the slot.  With ``is_narrow`` the two blocks of a cluster meet at
``read_by_both`` before k and q are replaced, at ``done_by_both`` before e, K' and M are.
Writes: a warpgroup stores outputs by TMA from the values' place.  Borders, remainders and the final
state leave from registers.

Floor: 11 bytes per element of q at Dk = Dv = 128 and as many key as value heads, 0.172 ms at
(8, 4096, 16, 16, 128, 128).  Result: 0.183 on one H200, memory-bound; 0.139 with 4 key heads.
Command: ``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import gpu
from pallas_kernels.gated_delta import remainder
from pallas_kernels.gated_delta.kernel_chunks import Prepared
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import CHUNK, tiles, tokens
from pallas_kernels.recurrence.plan import VALUE_BLOCK
from pallas_kernels.recurrence.scan import PART, ChunkScan, ScanFacts
from pallas_kernels.recurrence.states import by_token, read_transposed, write_rows

Want = Literal["out", "borders", "transitions"]
_WGMMA = plgpu.Layout.WGMMA


def is_narrow(dk: int) -> bool:
    """Whether a block has 64 value channels, and a cluster two blocks."""
    return dk > 128


def stages_of(dk: int) -> int:
    """Slots of a block's ring."""
    return 2 if is_narrow(dk) else ChunkScan.stages


@dataclasses.dataclass(frozen=True)
class _Facts(ScanFacts):
    want: Want = "out"
    by_channel: bool = False  # a decay for every key channel
    warpgroups: int = 2

    @property
    def parts(self) -> list[slice]:
        """The key channels of each product."""
        return [slice(at, at + PART) for at in range(0, self.dk, PART)]

    @property
    def width(self) -> int:
        """Value channels of a block."""
        return 64 * self.warpgroups


class _Scan(ChunkScan):
    """gmem.borders and gmem.remainders may be None."""

    def __init__(self, gmem, smem, barrier, *, facts: _Facts):
        super().__init__(gmem, smem, barrier, facts, paired=is_narrow(facts.dk))
        self.narrow, self.stages = is_narrow(facts.dk), stages_of(facts.dk)
        self.blocks = facts.dv // facts.width

    def run(self) -> None:
        facts, values, tile = self.facts, self.smem.v, (0, self.warpgroup)
        pl.when(self.warpgroup == 0)(self.fill_ring)
        self.columns = self.value_columns(facts.warpgroups)
        state = self.first_state()
        if facts.want == "transitions":
            state = self.identity(state)
        mask = jnp.where(self.block < self.blocks, -1, 0)
        self.mask = jnp.full((128,), mask, jnp.int32)  # of blocks beyond v: no values
        state = lax.fori_loop(0, self.steps, self.chunk, state)
        if self.narrow:
            pl.when(self.steps > 0)(lambda: plgpu.barrier_wait(self.barrier.done_by_both))
        self.write_state(state)
        plgpu.wait_smem_to_gmem(0)
        self.clear_outputs(values.tiles.at[tile], values.rows.at[tile])

    def identity(self, state):
        """The first state of the blocks beyond v: columns of the identity."""
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, state.shape, axis, layout=_WGMMA) for axis in (0, 1)
        )
        beyond = (self.block - self.blocks) * self.facts.width + self.warpgroup * 64
        return jnp.where(row + beyond == column, jnp.ones_like(state), state)

    # --- copies ---

    def fill_ring(self) -> None:
        super().fill_ring()
        if self.narrow:
            pl.when(self.steps > 0)(lambda: self.load_values(0))

    def load(self, i) -> None:
        self.load_tokens(i)
        if not self.narrow:
            self.load_values(i)
        self.load_prepared(i)

    def load_tokens(self, i) -> None:
        """k, and q where there are outputs."""
        gmem, smem, facts = self.gmem, self.smem, self.facts
        _, slot, rows = self.place(i)
        bar = self.barrier.full.at[slot]
        operands = [(gmem.k, smem.k)]
        if gmem.out is not None:
            operands.append((gmem.q, smem.q))
        for x, to in operands:
            for part, keys in enumerate(facts.keys):
                source = x.at[self.row, rows, self.head // facts.group, keys]
                plgpu.copy_gmem_to_smem(source, to.rows.at[slot, part], bar, **self.both)

    def load_values(self, i) -> None:
        facts = self.facts
        _, slot, rows = self.place(i)
        bar = self.barrier.full.at[slot]
        for w in range(facts.warpgroups):
            at = pl.ds((self.block % self.blocks) * facts.width + w * 64, 64)
            source = self.gmem.v.at[self.row, rows, self.head, at]
            plgpu.copy_gmem_to_smem(source, self.smem.v.rows.at[slot, w], bar)

    def load_prepared(self, i) -> None:
        """e, K' and M."""
        gmem, smem, at = self.gmem, self.smem, (self.row, self.head)
        c, slot, rows = self.place(i)
        bar = self.barrier.full.at[slot]
        plgpu.copy_gmem_to_smem(gmem.decays.at[*at, c], smem.decays.at[slot], bar)
        plgpu.copy_gmem_to_smem(gmem.keys.at[*at, rows], smem.keys.at[slot], bar, **self.both)
        if gmem.out is not None:
            plgpu.copy_gmem_to_smem(
                gmem.mixing.at[*at, rows], smem.mixing.at[slot], bar, **self.both
            )

    # --- a chunk ---

    def chunk(self, i, state):
        """wait | S -> bf16 | wgmma S^T K^T, S^T Q^T | R | wgmma S, o | o -> TMA | slot <- TMA"""
        facts, narrow, smem = self.facts, self.narrow, self.smem
        c, slot, rows = self.place(i)
        plgpu.barrier_wait(self.barrier.full.at[slot])
        rounded = None if narrow else state.astype(jnp.bfloat16)
        operands = [smem.k.tiles] if self.gmem.out is None else [smem.k.tiles, smem.q.tiles]
        read = functools.partial(self.read, slot, operands, state, rounded)
        square = plgpu.ACC((64, CHUNK), jnp.float32)
        seen, *asked = pl.run_scoped(read, *[square for _ in operands])
        if facts.want == "borders":
            self.store_border(c, state, rounded)
        if narrow:
            self.replace_values(i)
        values = read_transposed(smem.v.rows.at[slot, self.warpgroup], self.mask)
        values = values.astype(jnp.float32)
        if not facts.by_channel:
            seen = by_token(smem.decays, slot, 0) * seen
        rest = self.inside(c, values - seen).astype(jnp.bfloat16)
        state, *outputs = self.update(slot, state, asked, rest)
        self.store_outputs(slot, rows, self.inside(c, outputs[0]) if outputs else None)
        self.release(i)
        return state

    def read(self, slot, operands, state, rounded, *accs):
        """S^T K^T and S^T Q^T; in narrow blocks the state is rounded part by part."""
        parts = list(enumerate(self.facts.parts))
        if not self.narrow:
            for acc, x in zip(accs, operands, strict=True):
                for part, at in parts:
                    plgpu.wgmma(acc, rounded[:, at], x.at[slot, part].transpose((1, 0)))
            return [acc[...] for acc in accs]
        for part, at in parts:
            left = state[:, at].astype(jnp.bfloat16)
            for acc, x in zip(accs, operands, strict=True):
                plgpu.wgmma(acc, left, x.at[slot, part].transpose((1, 0)))
            plgpu.wgmma_wait(len(accs))  # so that two parts' copies are alive
        return [acc[...] for acc in accs]

    def store_border(self, c, state, rounded) -> None:
        """Store the rounded state at the chunk's start, and its remainder from rounding."""
        gmem, facts, (b, head) = self.gmem, self.facts, (self.row, self.head)
        write_rows(facts.dk, facts.dk)(gmem.borders.at[b, head, c, self.columns], rounded)
        for part, at in enumerate(facts.parts):
            tile = facts.warpgroups * self.block + self.warpgroup
            place = gmem.remainders.at[b, head, c, tile, part]
            remainder.store(place, state[:, at], rounded[:, at])

    def replace_values(self, i) -> None:
        """The outputs of the chunk before have left the place of the next one's values."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.barrier.read_by_both)
        pl.when(i + 1 < self.steps)(lambda: self.load_values(i + 1))
        pl.when(i > 0)(lambda: self.replace_prepared(i))

    def replace_prepared(self, i) -> None:
        plgpu.barrier_wait(self.barrier.done_by_both)
        pl.when(i + 1 < self.steps)(lambda: self.load_prepared(i + 1))

    def update(self, slot, state, asked, rest):
        """[the new state, the outputs], R^T being ``rest``."""
        smem, facts = self.smem, self.facts

        def products(accs):
            for acc, right in zip(accs, (smem.keys, smem.mixing), strict=False):
                plgpu.wgmma(acc, rest, right.at[slot])

        if facts.by_channel:
            e = plgpu.load(smem.decays.at[slot], layout=_WGMMA.reduce(0))
            starts = [state * lax.broadcast_in_dim(e, (64, facts.dk), [1]), *asked]
        else:
            whole = smem.decays[slot, 0, CHUNK - 1]
            starts = [state * whole, *[by_token(smem.decays, slot, 1) * x for x in asked]]
        return pl.run_state(products)([plgpu.ACC.init(x) for x in starts])

    def release(self, i) -> None:
        if not self.narrow:
            super().release(i)
            return
        plgpu.barrier_arrive(self.barrier.done_by_both)
        plgpu.barrier_wait(self.barrier.read_by_both)
        pl.when(i + 2 < self.steps)(lambda: self.load_tokens(i + 2))


def _scratch(facts: _Facts, decay_shape) -> dict:
    """Shared memory of a block, and its barriers."""
    dk, wgs, stages = facts.dk, facts.warpgroups, stages_of(facts.dk)
    parts, want_out = len(facts.parts), facts.want == "out"
    unused = plgpu.SMEM((8,), jnp.float32)
    copies = (2 * parts + 1 if want_out else parts) + 2 + wgs
    by_both = plgpu.ClusterBarrier(collective_axes=("rank",)) if is_narrow(dk) else None
    return {
        "q": tokens(stages, parts, CHUNK, PART) if want_out else unused,
        "k": tokens(stages, parts, CHUNK, PART),
        "keys": tiles(stages, CHUNK, dk),
        "mixing": tiles(stages, CHUNK, CHUNK) if want_out else unused,
        "v": tokens(stages, wgs, CHUNK, 64),
        "decays": plgpu.SMEM((stages, *decay_shape), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        "read_by_both": by_both,
        "done_by_both": by_both,
    }


def scan(prepared: Prepared, v, *, start=None, lengths=None, segments: int = 1, want: Want = "out"):
    """Pass the state over the chunks.

    Parameters
    ----------
    start : float32 [B, H, segments, Dk, Dv], optional
        The states at the segments' starts; None is zeros.
    lengths : int32 [B], optional
    want : {"out", "borders", "transitions"}
        The results beside the final states.

    Returns
    -------
    list
        The last result is the states at the segments' ends, [B, H, segments, Dk, Dv].  Before it:

        - "out": o [B, T, H, Dv].
        - "borders": the transposed states at the chunks' starts, bfloat16 [B, H, NC, Dv, Dk], and
          their bits below bfloat16, int32 [B, H, NC, Dv/64, Dk/64, ``remainder.WORDS``].
        - "transitions": nothing.  The final states start from zero.  128 columns more start from
          the identity, without values: the first Dk of them are the matrix by which a segment
          multiplies its first state.
    """
    b, t, h, dv = v.shape
    hk, dk = prepared.q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    want_out = want == "out"
    width = dv + (max(VALUE_BLOCK, dk) if want == "transitions" else 0)
    # A block of 64 value channels for each SM, where there are no more of them.
    few = b * h * segments * width // VALUE_BLOCK <= gpu().sms // 2
    narrow = is_narrow(dk)
    wgs, cluster = 1 if few or narrow else 2, 2 if narrow else 1
    facts = _Facts(dk, dv, nc, segments, h // hk, want, prepared.by_channel, wgs)

    spec, borders = jax.ShapeDtypeStruct, want == "borders"
    codes = (b, h, nc, dv // 64, parts, remainder.WORDS)
    results = launch(
        functools.partial(_Scan, facts=facts),
        {**prepared._asdict(), "v": v, "lengths": lengths, "start": start},
        {
            "out": spec((b, t, h, dv), v.dtype) if want_out else None,
            "borders": spec((b, h, nc, dv, dk), jnp.bfloat16) if borders else None,
            "remainders": spec(codes, jnp.int32) if borders else None,
            "final": spec((b, h, segments, dk, width), jnp.float32),
        },
        name="gated_delta_scan",
        cluster=cluster,
        grid={"values": width // (64 * wgs * cluster), "head": h * segments, "row": b},
        warpgroups=wgs,
        scratch=_scratch(facts, prepared.decays.shape[3:]),
    )
    return [result for result in results if result is not None]

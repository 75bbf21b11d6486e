"""The skeleton of a scan over chunks: its launch's facts, its ring, its states, joined segments.

A launch has a block for 128 value channels (or 64) of a segment of a head, and a warpgroup for 64
of them; in ssd the two warpgroups may have two heads.  The state stays in registers, transposed,
for the whole loop.  An op's scan supplies its copies (``load``) and its products (``chunk``).

``gla.scan`` has its own ring, barriers and place of outputs.  ``gated_delta.kernel_scan`` with
Dk = 256 has barriers of the cluster in place of ``release``.  Each says so itself.

Copies: ``load`` of the op; warpgroup 0 alone calls it, for all warpgroups of the block, by TMA.
Waits: a warpgroup waits on ``full[slot]`` in the op's ``chunk``.  ``release`` arrives at
``empty`` of the slot before, once that slot's outputs have left it (``wait_smem_to_gmem(1)``).
Warpgroup 0 waits there for all warpgroups, then refills that slot.
Writes: a warpgroup stores its outputs by TMA from the place of its values, and at the end its
state from registers.  An op with lengths then calls ``clear_outputs``, which stores zeros for
the chunks past a row's end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.recurrence.channels import CHUNK
from pallas_kernels.recurrence.states import read_state, store_transposed, write_state

PART = 64  # key channels of a product of the state
WIDTH = 64  # value channels of a warpgroup
_ALL = slice(None)
_WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class ScanFacts:
    """The facts of a scan's launch.  group: value heads of a key head."""

    dk: int
    dv: int
    n_chunks: int
    segments: int
    group: int = 1

    @property
    def keys(self) -> list:
        """The parts of the key channels."""
        return [pl.ds(at, PART) for at in range(0, self.dk, PART)]


class ChunkScan:
    """The program of a warpgroup: 64 value channels of a segment's chunks.

    gmem.lengths, gmem.start and gmem.out may be None.  ``columns`` are the value channels.  The
    ring's methods are those of three slots: one that is computed, one that is there, one on its
    way, whose outputs leave from the place of the values.

    reverse: from the last chunk to the first.  paired: two blocks are a cluster, and copy together
    what both read.
    """

    stages = 3

    def __init__(self, gmem, smem, barrier, facts, *, reverse: bool = False, paired: bool = False):
        self.gmem, self.smem, self.barrier, self.facts = gmem, smem, barrier, facts
        self.reverse = reverse
        self.block, self.row = lax.axis_index("values"), lax.axis_index("row")
        if paired:
            self.block = 2 * self.block + lax.axis_index("rank")
        self.both = {"collective_axes": "rank"} if paired else {}
        self.head = lax.axis_index("head") // facts.segments
        self.segment = lax.axis_index("head") % facts.segments
        self.warpgroup = lax.axis_index("warpgroup")
        per = -(-facts.n_chunks // facts.segments)
        self.first = self.segment * per
        self.last = jnp.minimum((self.segment + 1) * per, facts.n_chunks)
        self.stop = self.last  # the first chunk past the row's end, or the segment's
        if gmem.lengths is not None:
            chunks = (gmem.lengths[self.row] + (CHUNK - 1)) // CHUNK
            self.stop = jnp.minimum(self.last, chunks)
        self.steps = jnp.maximum(self.stop - self.first, 0)
        self.clears = gmem.out is not None and gmem.lengths is not None

    def value_columns(self, warpgroups: int):
        """The value channels of this warpgroup in a block of so many."""
        return pl.ds(self.block * (WIDTH * warpgroups) + self.warpgroup * WIDTH, WIDTH)

    def place(self, i):
        """(chunk, slot, tokens) of the i-th step."""
        c = self.stop - 1 - i if self.reverse else self.first + i
        return c, i % self.stages, pl.ds(c * CHUNK, CHUNK)

    # --- the state ---

    def state_of(self, states, keys=_ALL):
        """The warpgroup's part of states in device memory."""
        return states.at[self.row, self.head, self.segment, keys, self.columns]

    def first_state(self, keys=_ALL):
        """The transposed state at the segment's start, of all key channels or a part."""
        width = self.facts.dk if keys is _ALL else PART
        if self.gmem.start is not None:
            return read_state(width, self.facts.dv)(self.state_of(self.gmem.start, keys))
        return plgpu.layout_cast(jnp.zeros((WIDTH, width), jnp.float32), _WGMMA)

    def write_state(self, state, keys=_ALL) -> None:
        final = self.gmem.final
        write_state(final.shape[-1])(self.state_of(final, keys), state)

    # --- the ring ---

    def load(self, i) -> None:
        """Copy the operands of the i-th step."""
        raise NotImplementedError

    def fill_ring(self) -> None:
        lax.fori_loop(0, jnp.minimum(2, self.steps), lambda i, _: self.load(i), None)

    def release(self, i) -> None:
        """Give up the slot that has been read, and start the copies into it."""
        empty, before = self.barrier.empty, (i - 1) % self.stages
        if self.gmem.out is not None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[before]))

        @pl.when((self.warpgroup == 0) & (i + 2 < self.steps))
        def _():
            pl.when(i > 0)(lambda: plgpu.barrier_wait(empty.at[before]))
            self.load(i + 2)

    # --- tokens ---

    def inside(self, c, x):
        """Return x, [64 value channels, 64 tokens], with zeros past the row's end."""
        if self.gmem.lengths is None:
            return x
        token = plgpu.broadcasted_iota(jnp.int32, (WIDTH, CHUNK), 1, layout=_WGMMA)
        left = self.gmem.lengths[self.row] - c * CHUNK
        return jnp.where(token < left, x, jnp.zeros_like(x))

    def store_outputs(self, slot, rows, x) -> None:
        """Store outputs from the place of the values; every thread of the warpgroup takes part."""
        values, own = self.smem.v, self.warpgroup
        if self.gmem.out is not None:
            store_transposed(values.tiles.at[slot, own], x)
        plgpu.commit_smem()
        if self.gmem.out is not None:
            to = self.gmem.out.at[self.row, rows, self.head, self.columns]
            plgpu.copy_smem_to_gmem(values.rows.at[slot, own], to)

    def clear_outputs(self, tiles, rows) -> None:
        """Rows that end early: the outputs of the chunks beyond are zeros.

        tiles, rows: two views of this warpgroup's tile in shared memory, which is free.
        """
        if not self.clears:
            return
        tiles[...] = plgpu.layout_cast(jnp.zeros((CHUNK, WIDTH), jnp.bfloat16), _WGMMA)
        plgpu.commit_smem()

        def clear(c, _):
            chunk = pl.ds(c * CHUNK, CHUNK)
            to = self.gmem.out.at[self.row, chunk, self.head, self.columns]
            plgpu.copy_smem_to_gmem(rows, to)

        lax.fori_loop(jnp.maximum(self.stop, self.first), self.last, clear, None)
        plgpu.wait_smem_to_gmem(0)


def segment_states(
    local: jax.Array,
    start: jax.Array | None,
    moved: Callable[[int, jax.Array], jax.Array],
    reverse: bool = False,
) -> jax.Array:
    """Return the state before every segment, ``[B, H, segments, Dk, Dv]``.

    local: every segment's final state from a zero start.  start: the state before the row.
    moved: ``moved(segment, state)`` is what a segment makes of the state before it.
    reverse: from the last segment to the first.
    """
    order = range(local.shape[2])
    state = jnp.zeros_like(local[:, :, 0]) if start is None else start
    states = [state] * len(order)
    for s in reversed(order) if reverse else order:
        states[s] = state
        state = moved(s, state) + local[:, :, s]
    return jnp.stack(states, axis=2)

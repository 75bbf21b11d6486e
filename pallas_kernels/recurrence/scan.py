"""The frame of a scan over chunks: what a warpgroup computes, and how segments of a row are joined.

A launch has a block for 128 value channels (or 64) of a segment of a head, and a warpgroup for 64
of them. ``gla.scan`` and ``gated_delta.kernel_scan`` add their copies, products and ring.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.recurrence.channels import CHUNK
from pallas_kernels.recurrence.states import read_state


class ScanFrame:
    """The place of a warpgroup in a scan, and the chunks of its segment.

    gmem.lengths, gmem.start and gmem.out may be None.  facts: with ``dk``, ``dv``, ``n_chunks`` and
    ``segments``.  pair: two blocks are a cluster, and copy together what both read.
    """

    def __init__(self, gmem, smem, barrier, facts, *, pair: bool):
        self.gmem, self.smem, self.barrier, self.facts = gmem, smem, barrier, facts
        self.block, self.row = lax.axis_index("values"), lax.axis_index("row")
        if pair:
            self.block = 2 * self.block + lax.axis_index("rank")
        self.both = {"collective_axes": "rank"} if pair else {}
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

    def first_state(self, columns):
        """The transposed state at the segment's start, of the value channels ``columns``."""
        gmem, facts = self.gmem, self.facts
        if gmem.start is not None:
            place = gmem.start.at[self.row, self.head, self.segment, :, columns]
            return read_state(facts.dk, facts.dv)(place)
        zeros = jnp.zeros((64, facts.dk), jnp.float32)
        return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def clear_outputs(self, columns, tiles, rows) -> None:
        """Rows that end early: the outputs of the chunks beyond are zeros.

        tiles, rows: two views of this warpgroup's tile in shared memory, which is free.
        """
        tiles[...] = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        def clear(c, _):
            chunk = pl.ds(c * CHUNK, CHUNK)
            to = self.gmem.out.at[self.row, chunk, self.head, columns]
            plgpu.copy_smem_to_gmem(rows, to)

        lax.fori_loop(jnp.maximum(self.stop, self.first), self.last, clear, None)


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

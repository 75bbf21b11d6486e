"""SSD on Hopper: one kernel, ``kernel_scan``, and two passes of it where there are few heads.

If there are too few heads to fill the GPU, a row is cut into segments.  A first pass gives each
segment's own state, from zeros.  A segment multiplies the state before it by one number a head, so
the segments' first states follow in XLA.  A second pass has the outputs.

Inside the kernel, warpgroup 0 copies chunks by TMA for the whole block, and every warpgroup waits
for a chunk's copies.  ``kernel_scan`` says more.

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed) and states; T of any length.  Dk is
64, 128 or 256, Dv a multiple of 16, which channels of zeros fill up to one of 64.  Everything is
read and written in [B, T, H, D].  Command: ``python -m benchmarks.kernels.ssd``.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Reason
from pallas_kernels.gated_delta.kernel_inverse import LOWEST
from pallas_kernels.ptx import LOG2E
from pallas_kernels.recurrence.channels import CHUNK
from pallas_kernels.recurrence.op import Heads, zero_padding
from pallas_kernels.recurrence.plan import ScanPlan, operands_reason, padded, segments_for
from pallas_kernels.recurrence.scan import segment_states
from pallas_kernels.ssd.kernel_scan import WIDTH, scan, warpgroups_of

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
    blocks = batch * n_heads * units // warpgroups_of(units, n_heads // heads.q.shape[2], dk)
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
    upper = jnp.asarray(np.triu(np.ones((CHUNK, CHUNK), np.float32)))
    return jnp.einsum("bnch,ct->bhnt", x, upper, precision=lax.Precision.HIGHEST)


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

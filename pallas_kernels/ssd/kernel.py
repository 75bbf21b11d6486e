"""SSD on Hopper: one kernel, ``kernel_scan``, and two passes of it where there are few heads.

If there are too few heads to fill the GPU, a row is cut into segments.  A first pass gives each
segment's own state, from zeros.  A segment multiplies the state before it by one number a head, so
the segments' first states follow in XLA.  A second pass has the outputs.

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed) and states; T of any length.  Dk is
64, 128 or 256, Dv a multiple of 16, which channels of zeros fill up to one of 64.  Everything is
read and written in [B, T, H, D].  Command: ``python -m benchmarks.kernels.ssd``.
"""

from __future__ import annotations

import dataclasses
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
from pallas_kernels.recurrence.operands import operands_reason
from pallas_kernels.recurrence.scan import segment_states
from pallas_kernels.recurrence.sequences import zero_padding
from pallas_kernels.ssd.kernel_scan import WIDTH, scan

WIDTHS = 64, 128, 256  # of keys


@dataclasses.dataclass(frozen=True)
class SSDPlan:
    """segments: parts of a row that are scanned side by side."""

    kernel: ClassVar[str] = "ssd_mosaic"
    segments: int

    def __str__(self) -> str:
        return f"{self.segments} segments a row"


def plan(q: jax.Array, k: jax.Array, v: jax.Array) -> SSDPlan | Reason:
    """How ``ssd_forward`` computes ``ssd``."""
    if reason := lacking("wgmma") or operands_reason(q, k, v, 16):
        return Reason(reason)
    if q.shape[-1] not in WIDTHS:
        return Reason(f"q has Dk = {q.shape[-1]}, the kernel takes 64, 128 and 256")
    batch, length, heads, dv = v.shape
    blocks = batch * heads * -(-dv // WIDTH) // (1 if q.shape[-1] > 128 else 2)
    return SSDPlan(segments_for(blocks, -(-length // CHUNK)))


def segments_for(blocks: int, n_chunks: int) -> int:
    """Return the number of segments of a row with the least predicted time.

    blocks: of the grid, without segments.  Several segments take one more pass over the chunks,
    without outputs, and the time of their first states and the second launch.
    """
    blocks, us = max(1, blocks), gpu().ssd

    def microseconds(n: int) -> float:
        waves, chunks = -(-n * blocks // gpu().sms), -(-n_chunks // n)
        return waves * chunks * (us.wave + us.state * (n > 1)) + us.segment * (n > 1)

    return min(range(1, max(1, min(gpu().sms // blocks, n_chunks // 4)) + 1), key=microseconds)


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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """q, k [B, T, G, Dk], v [B, T, H, Dv], log_decay [B, T, H] -> (o [B, T, H, Dv], state
    [B, H, Dk, Dv]).

    lengths: int32[B]; tokens at t >= lengths[b] are never read into a result (they may be NaN), o
        is 0 there, and whole chunks of them cost nothing.
    segments: parts of a row, of ``plan``.
    """
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    k, log_decay = zero_padding(lengths, k, log_decay)
    sums, dv = chunk_sums(log_decay), v.shape[-1]
    v, initial_state = _padded(v), _padded(initial_state)
    start = None if initial_state is None else initial_state[:, :, None]
    given = {"lengths": lengths, "segments": segments}
    if segments > 1:
        _, local = scan(q, k, v, sums, want_out=False, **given)
        start = segment_starts(local, sums, initial_state, segments)
    o, states = scan(q, k, v, sums, start=start, **given)
    return o[..., :dv], states[:, :, -1, :, :dv]


def _padded(x: jax.Array | None) -> jax.Array | None:
    """Pad x with zero channels to whole warpgroups; their state is zeros."""
    if x is None or x.shape[-1] % WIDTH == 0:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % WIDTH)])

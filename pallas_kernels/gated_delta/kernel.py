"""The gated delta rule on Hopper: the Mosaic GPU kernels put together.

``kernel_chunks`` does what a chunk's tokens do among themselves, all chunks at once, and
``kernel_scan`` passes the state over the chunks.  Where there are too few heads to fill the GPU a
row is cut into segments, whose first states follow from a scan of each from zero, and of the
identity, which finds the matrix that the segment multiplies its first state by.

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed; one number a head), beta and states; T
of any length; Dk 64 or 128; Dv a multiple of 64, padded here with channels of zeros to one of 128
where it is none.  Everything is read and written in [B, T, H, D].  A reset inside a row (packed
sequences) is log_decay = -inf at the first token of the new segment.

Memory's floor for the two passes is 0.281 ms at (8, 4096, 16 and 16 heads, 128, 128) and 0.187 with
4 key heads.  Result on one H200: 0.345 and 0.298 ms; errors against the float64 recursion: o 3e-3,
state 2.4e-3 relative RMS.  The table, and a backward pass: NOTES.md.  Command: ``python -m
pallas_kernels.bench.gated_delta``.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Reason
from pallas_kernels.gated_delta.kernel_chunks import chunks
from pallas_kernels.gated_delta.kernel_scan import scan
from pallas_kernels.gla import kernel as gla
from pallas_kernels.gla.channels import CHUNK
from pallas_kernels.gla.kernel import padded
from pallas_kernels.gla.step_kernel import operands_reason


class Plan(gla.Plan):
    kernel: ClassVar[str] = "gated_delta_mosaic"


def plan(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> Plan | Reason:
    """How ``gated_delta_forward`` computes ``gated_delta``."""
    if reason := operands_reason(q, k, v, 64):
        return Reason(reason)
    if q.shape[-1] > 128:
        return Reason(f"q has Dk = {q.shape[-1]}, the kernel takes 64 and 128")
    if log_decay.ndim == q.ndim:
        return Reason("log_decay has a number for every key channel, the kernel takes one a head")
    batch, length, heads, dv = v.shape
    return Plan(segments_for(batch, heads, dv, -(-length // CHUNK)))


def segments_for(n_rows: int, n_heads: int, dv: int, n_chunks: int) -> int:
    """Segments per row.  Those cost a second scan, of states and transitions: fewer than four do
    not pay."""
    n = gla.segments_for(n_rows, n_heads, dv, n_chunks)
    return n if n >= 4 else 1


def segment_starts(local: jax.Array, transitions: jax.Array, start: jax.Array | None) -> jax.Array:
    """States at the segments' starts, [B, H, segments, Dk, Dv], from those at their ends that began
    at zero and the matrices [B, H, segments, Dk, Dk] by which a segment multiplies its first
    state."""
    state = jnp.zeros_like(local[:, :, 0]) if start is None else start
    states = [state]
    for s in range(local.shape[2] - 1):
        moved = jnp.einsum(
            "bhij,bhjv->bhiv", transitions[:, :, s], state, precision=lax.Precision.HIGHEST
        )
        state = moved + local[:, :, s]
        states.append(state)
    return jnp.stack(states, axis=2)


@functools.partial(jax.jit, static_argnames=("scale", "segments"))
def gated_delta_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q, k [B, T, Hk, Dk], v [B, T, H, Dv], log_decay, beta [B, T, H] -> (o [B, T, H, Dv], state
    [B, H, Dk, Dv]).

    lengths: int32[B]; tokens at t >= lengths[b] are never read into a result (they may be NaN), o
        is 0 there, and whole chunks of them cost nothing.
    segments: overrides ``segments_for``.
    """
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    dv = v.shape[-1]
    n = segments or segments_for(*v.shape[::2], dv, -(-v.shape[1] // CHUNK))
    v, start = padded(v), padded(initial_state)
    operands = q, k, *chunks(q, k, log_decay, beta, lengths, float(scale)), v
    if n > 1:
        (ends,) = scan(*operands, lengths=lengths, segments=n, want_out=False)
        local, rest = jnp.split(ends, [v.shape[-1]], axis=-1)
        start = segment_starts(local, rest[..., : q.shape[-1]], start)
    elif start is not None:
        start = start[:, :, None]
    o, states = scan(*operands, start=start, lengths=lengths, segments=n)
    return o[..., :dv], states[:, :, -1, :, :dv]

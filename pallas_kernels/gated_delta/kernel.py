"""The gated delta rule on Hopper: the Mosaic GPU kernels put together.

``kernel_chunks`` computes the products among a chunk's tokens, for all chunks at once.  With a
decay for every key channel ``kernel_channels`` does that.  ``kernel_scan`` then passes the state
over the chunks.

    S <- exp(g) S        S <- S + beta k (v - k^T S)^T        o = scale q^T S

If there are too few heads to fill the GPU, a row is cut into segments.  One launch scans each
segment from zero and, in further value columns, from the identity, which gives the matrix by which
the segment multiplies its first state.  The first states of all segments follow, and a second
launch has the outputs.

Backwards, ``gradients_kernel_scan`` passes the state's gradient back over the chunks, and
``gradients_kernel_chunks`` computes the other gradients.  With a decay for every key channel
``gradients_channels_products`` and ``gradients_channels`` do that.

Each kernel's file says who copies and who waits.  In short: warpgroup 0 copies for a block of the
scans by TMA, and all wait for its slots; with Dk = 256 two blocks copy for one another.  Inside a
chunk a warpgroup copies for itself.  In ``gradients_kernel_chunks`` two warpgroups copy half of a
chunk each; in ``gradients_channels_products`` the first copies for both.

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed), beta and states; T of any length.  Dk
is 64 or 128, or 256 in the forward pass with one decay a head.  Dv is a multiple of 64, at most 128
in the backward pass; zero channels pad it to a multiple of 128.  Everything is read and written in
[B, T, H, D].  A reset inside a row (packed sequences) is log_decay = -inf at the first token of the
new segment.

Memory's floor for the two passes is 0.281 ms at (8, 4096, 16 and 16 heads, 128, 128) and 0.187 with
4 key heads.  Result on one H200: 0.325 and 0.279 ms; errors against the float64 recursion: o 3e-3,
state 2.4e-3 relative RMS.  The table, and the backward pass: docs/lab/gated-delta.md.
Command: ``python -m benchmarks.kernels.gated_delta``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Reason
from pallas_kernels.gated_delta import gradients_channels
from pallas_kernels.gated_delta.gradients_kernel_chunks import CHANNELS, chunk_gradients
from pallas_kernels.gated_delta.gradients_kernel_scan import reverse_scan
from pallas_kernels.gated_delta.kernel_channels import chunks_by_channel
from pallas_kernels.gated_delta.kernel_chunks import AroundChunks, Prepared, chunks
from pallas_kernels.gated_delta.kernel_scan import scan
from pallas_kernels.recurrence.channels import CHUNK
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.recurrence.plan import (
    VALUE_BLOCK,
    ScanPlan,
    operands_reason,
    padded,
    planned_batch,
    segments_for,
)
from pallas_kernels.recurrence.scan import segment_states

LEAST_BETA = 1e-10  # least divisor of a token's gradients, with a decay for each key channel


@dataclasses.dataclass(frozen=True)
class DeltaPlan(ScanPlan):
    """backward: do the gradients have kernels too?"""

    kernel: ClassVar[str] = "gated_delta_mosaic"
    backward: bool

    def __str__(self) -> str:
        return f"{super().__str__()}, gradients by {'kernels' if self.backward else 'XLA'}"


def plan(heads: Heads) -> DeltaPlan | Reason:
    """How ``gated_delta_forward`` computes ``gated_delta``."""
    if reason := lacking("wgmma") or operands_reason(*heads[:3], 64):
        return Reason(reason)
    dk, dv = heads.q.shape[-1], heads.v.shape[-1]
    if dk > (128 if heads.by_channel else 256):
        return Reason(f"q has Dk = {dk}, the kernel takes 64, 128 and, with a decay a head, 256")
    return DeltaPlan(segments_of(heads), max(dk, dv) <= CHANNELS)


def segments_of(heads: Heads) -> int:
    """Return the number of segments of a row with the least predicted time.

    A chunk takes the time of its waves of blocks, or that of its memory traffic, and one more
    segment that of its first state and its ends.
    """
    us, (batch, length, n_heads, dv) = gpu().gated_delta, heads.v.shape
    n_chunks, wide = -(-length // CHUNK), heads.q.shape[-1] > 128  # blocks of 64 value channels
    batch = planned_batch(batch, length)
    blocks = batch * n_heads * (1 + wide) * -(-dv // VALUE_BLOCK)
    of_identity = batch * n_heads * (1 + wide) ** 2

    def chunk(blocks: int, at_rate: float) -> float:
        return max((us.wide if wide else us.wave) * -(-blocks // gpu().sms), at_rate * blocks)

    def microseconds(n: int) -> float:
        scans = chunk(n * blocks, us.block)
        if n > 1:
            scans += chunk(n * (blocks + of_identity), us.identity)
        return -(-n_chunks // n) * scans + us.segment * (n - 1)

    return segments_for(blocks, n_chunks, microseconds)


def segment_starts(
    local: jax.Array, transitions: jax.Array, start: jax.Array | None, reverse: bool = False
) -> jax.Array:
    """Return the states at the segments' starts, [B, H, segments, Dk, Dv].

    local: states at the segments' ends, each scanned from zero.
    transitions: matrices [B, H, segments, Dk, Dk] by which a segment multiplies its first state.
    reverse: return the states' gradients at the segments' ends, from those at their starts.
    """
    form = "bhji,bhjv->bhiv" if reverse else "bhij,bhjv->bhiv"

    def moved(s: int, state: jax.Array) -> jax.Array:
        return jnp.einsum(form, transitions[:, :, s], state, precision=lax.Precision.HIGHEST)

    return segment_states(local, start, moved, reverse)


def _starts(
    prepared: Prepared,
    v: jax.Array,
    start: jax.Array | None,
    lengths: jax.Array | None,
    segments: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return (the argument ``start`` of ``scan``, the segments' transitions)."""
    if segments == 1:
        return None if start is None else start[:, :, None], None
    (ends,) = scan(prepared, v, lengths=lengths, segments=segments, want="transitions")
    dk, dv = ends.shape[-2], v.shape[-1]
    transitions = ends[..., dv : dv + dk]
    return segment_starts(ends[..., :dv], transitions, start), transitions


@functools.partial(jax.jit, static_argnames=("scale", "segments"))
def gated_delta_forward(
    heads: Heads,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return o [B, T, H, Dv] and the state [B, H, Dk, Dv].

    lengths: int32[B]; tokens at t >= lengths[b] are never read into a result (they may be NaN), o
        is 0 there, and whole chunks of them cost nothing.
    segments: overrides ``segments_of``.
    """
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    prepare, dv = chunks_by_channel if heads.by_channel else chunks, heads.v.shape[-1]
    prepared, _ = prepare(heads, lengths, float(scale))
    n, v = segments or segments_of(heads), padded(heads.v)
    start, _ = _starts(prepared, v, padded(initial_state), lengths, n)
    o, states = scan(prepared, v, start=start, lengths=lengths, segments=n)
    return o[..., :dv], states[:, :, -1, :, :dv]


@functools.partial(jax.jit, static_argnames=("scale", "segments"))
def gated_delta_backward(
    heads: Heads,
    d_out: jax.Array,
    d_state: jax.Array | None,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    segments: int | None = None,
) -> tuple[Heads, jax.Array]:
    """Return the gradients of heads and of the initial state, from those of o and of the final
    state, for Dv up to 128.

    Four kernels, six where a row has segments: what a chunk's tokens do among themselves; the
    states at the chunks' starts; the same scan backwards for the states' gradients and dv; the
    chunks' gradients, which are two kernels for a decay a key channel.  Where exp(log_decay) is 0
    its gradient is 0.
    """
    b, t, hk, dk = heads.q.shape
    width, n = heads.v.shape[-1], segments or segments_of(heads)
    q, k, v, log_decay, beta = heads
    v, d_out, d_state, initial_state = map(padded, (v, d_out, d_state, initial_state))
    if dk < CHANNELS:
        q, k, log_decay = (padded(x) if x.ndim == q.ndim else x for x in (q, k, log_decay))
        d_state, initial_state = (
            x if x is None else padded(x.mT).mT for x in (d_state, initial_state)
        )
    prepare, gradients_of = chunks, chunk_gradients
    if heads.by_channel:
        beta = jnp.where(jnp.abs(beta) < LEAST_BETA, LEAST_BETA, beta)
        prepare, gradients_of = chunks_by_channel, gradients_channels.chunk_gradients
    wide = Heads(q, k, v, log_decay, beta)
    prepared, inverses = prepare(wide, None, float(scale), save=True)
    start, transitions = _starts(prepared, v, initial_state, None, n)
    states, remainders, _ = scan(prepared, v, start=start, segments=n, want="borders")
    if n > 1:
        (local,) = reverse_scan(prepared, d_out, None, segments=n, want_out=False)
        d_state = segment_starts(local, transitions, d_state, reverse=True)
    elif d_state is not None:
        d_state = d_state[:, :, None]
    d_v, ends, d_initial = reverse_scan(prepared, d_out, d_state, segments=n)
    around = AroundChunks(prepared, inverses, d_out, d_v, states, remainders, ends)
    d_q, d_k, d_g, d_beta = gradients_of(wide, around, float(scale))
    if heads.by_channel:
        d_g = d_g[..., :dk]
    if hk != d_q.shape[2]:
        d_q, d_k = (
            jnp.sum(x.reshape(b, t, hk, -1, CHANNELS), axis=3, dtype=jnp.float32).astype(q.dtype)
            for x in (d_q, d_k)
        )
    gradients = Heads(d_q[..., :dk], d_k[..., :dk], d_v[..., :width], d_g, d_beta)
    return gradients, d_initial[:, :, 0, :dk, :width]

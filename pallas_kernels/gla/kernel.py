"""GLA on Hopper: the Mosaic GPU kernels put together.

``gla_forward`` is two kernels, and four where there are too few heads to fill the GPU:

    gates (per chunk, parallel)                gla_gates: A, qg, kg, decay
    [scan of every segment's own state         gla_scan, want_out=False
     combine of the segments' states in XLA]
    scan with outputs                          gla_scan

The kernel joins two known designs, "store chunk states and scan" and "loop inside the kernel".  The
loop runs inside the kernel over a segment of chunks.  ``segments_of`` picks the number of segments
of a row, so that value blocks x heads x rows x segments just fits the GPU's SMs.

Each kernel's file says who copies and who waits.  In short:

    gla_gates   a warpgroup copies its own slices by TMA, two ahead, and waits for its copies alone
    gla_scan    warpgroup 0 copies for the block by TMA; both wait for a slot's copies, and
                warpgroup 0 waits until both have read a slot before it refills it
    gradients   as gla_gates: a warpgroup copies for itself

Contract: bf16 q, k, v, float32 log_decay <= 0 (-inf allowed) and states; T of any length. Dk is 64,
128 or 256, or 512 as two heads of 256 whose answers are added. Dv is a multiple of 64, which
channels of zeros fill up to one of 128.  Everything is
read and written in [B, T, H, D].  A reset inside a row (packed sequences) is log_decay = -inf at
the first token of the new segment.

Memory's floor for the two forward passes is 0.343 ms at (8, 4096, 16, 128, 128).  Result: 0.407 ms
on one H200, forward and backward 1.521; errors against the float64 recurrence: o 3.7e-3, state
2.2e-3 relative RMS.  The table: docs/lab/gla.md.  Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Reason
from pallas_kernels.gla.gates import Gated, gates
from pallas_kernels.gla.gradients import chunk_gradients
from pallas_kernels.gla.scan import scan
from pallas_kernels.gla.step_kernel import gla_step as gla_step
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

Saved = tuple[Gated | None, jax.Array | None]  # and the states at the chunks' starts


class GlaPlan(ScanPlan):
    """How a row is cut."""

    kernel: ClassVar[str] = "gla_mosaic"


def plan(heads: Heads) -> GlaPlan | Reason:
    """How ``gla_forward`` and ``gla_backward`` compute ``gla``."""
    if reason := lacking("wgmma") or operands_reason(*heads[:3], 64):
        return Reason(reason)
    return GlaPlan(segments_of(heads))


def segments_of(heads: Heads) -> int:
    """Return the segments of a row: as many as still run in one wave."""
    batch, length, n_heads, dv = heads.v.shape
    of_row = n_heads * (1 + is_halved(heads.q)) * -(-dv // VALUE_BLOCK)
    blocks = planned_batch(batch, length) * of_row
    return segments_for(blocks, -(-length // CHUNK))


def is_halved(q: jax.Array) -> bool:
    """Whether a head of q is computed as two of half its channels: o is a sum over them."""
    return q.shape[-1] == 512


def halves(x: jax.Array) -> jax.Array:
    """``[..., H, Dk]`` as ``[..., 2 H, Dk / 2]``."""
    return x.reshape(*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] // 2)


def twice(x: jax.Array) -> jax.Array:
    """``[..., H, Dv]`` for both of each head's halves."""
    return jnp.repeat(x, 2, axis=-2)


def summed(x: jax.Array) -> jax.Array:
    """``[..., 2 H, Dv]`` of halves -> ``[..., H, Dv]``."""
    pairs = x.reshape(*x.shape[:-2], x.shape[-2] // 2, 2, x.shape[-1])
    return jnp.sum(pairs.astype(jnp.float32), axis=-2).astype(x.dtype)


def _state_halves(state: jax.Array | None) -> jax.Array | None:
    """``[B, H, 512, Dv]`` of the two heads that each is."""
    if state is None:
        return None
    batch, heads, dk, dv = state.shape
    return state.reshape(batch, 2 * heads, dk // 2, dv)


def _halved(heads: Heads) -> Heads:
    """The two heads that each of ``heads`` is."""
    q, k, v, log_decay, _ = heads
    return Heads(halves(q), halves(k), twice(v), halves(log_decay))


def segment_starts(
    local: jax.Array,
    decay: jax.Array,
    start: jax.Array | None,
    lengths: jax.Array | None,
    n_segments: int,
    *,
    reverse: bool = False,
) -> jax.Array:
    """Return the state at the start of every segment, [B, H, segments, Dk, Dv].

    local: every segment's final state from a zero start.  decay: [B, H, NC, Dk].
    """
    b, h, nc, dk = decay.shape
    per = -(-nc // n_segments)
    chunk = jnp.arange(nc)[None, :]
    if lengths is not None:
        alive = chunk * CHUNK < lengths[:, None]
        decay = jnp.where(alive[:, None, :, None], decay, 1.0)
    decay = jnp.pad(decay, ((0, 0), (0, 0), (0, n_segments * per - nc), (0, 0)), constant_values=1)
    whole = jnp.prod(decay.reshape(b, h, n_segments, per, dk), axis=3)[..., None]
    return segment_states(local, start, lambda s, state: whole[:, :, s] * state, reverse)


def _scan_in_segments(
    gated: Gated,
    v: jax.Array,
    start: jax.Array | None,
    lengths: jax.Array | None,
    segments: int,
    **options: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``scan`` of a row cut into segments; final state [B, H, Dk, Dv]."""
    if segments == 1:
        first = None if start is None else start[:, :, None]
        out, borders, final = scan(gated, v, start=first, lengths=lengths, **options)
        return out, borders, final[:, :, 0]
    reverse, given = options.get("reverse", False), {"lengths": lengths, "segments": segments}
    _, _, local = scan(gated, v, want_out=False, reverse=reverse, **given)
    starts = segment_starts(local, gated.decay, start, lengths, segments, reverse=reverse)
    out, borders, final = scan(gated, v, start=starts, **given, **options)
    return out, borders, final[:, :, 0 if reverse else segments - 1]


@functools.partial(jax.jit, static_argnames=("scale", "segments", "save"))
def gla_forward(
    heads: Heads,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segments: int | None = None,
    save: Literal["nothing", "states", "all"] = "nothing",
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, Saved]:
    """Return o [B, T, H, Dv] and the state [B, H, Dk, Dv].

    lengths: int32[B]; tokens at t >= lengths[b] are never read into a result (they may be NaN), o
        is 0 there, and whole chunks of them cost nothing.
    segments: overrides ``segments_of``.
    save: what to return, as a third result, for ``gla_backward`` to take instead of computing it
        again.  "states": the states at the chunks' starts, bf16, Dk * Dv per 64 tokens and head.
        "all": also A, qg, kg and decay, about 5 bytes per element of q.  ValueError with
        lengths: chunks past a row's end are never written.
    """
    q, k, v, log_decay, _ = heads
    if lengths is not None:
        if save != "nothing":
            raise ValueError("gla_forward: save needs whole rows; zero the padding, omit lengths")
        lengths = lengths.astype(jnp.int32)
    if is_halved(q):
        given = {"scale": scale, "lengths": lengths, "segments": segments, "save": save}
        initial_state = _state_halves(initial_state)
        o, state, *kept = gla_forward(_halved(heads), initial_state=initial_state, **given)
        return summed(o), state.reshape(*q.shape[::2], q.shape[3], v.shape[3]), *kept
    dv, n = v.shape[-1], segments or segments_of(heads)
    gated, wants = gates(q, k, log_decay, lengths, float(scale)), save != "nothing"
    v, initial_state = padded(v), padded(initial_state)
    o, borders, state = _scan_in_segments(gated, v, initial_state, lengths, n, want_borders=wants)
    o, state = o[..., :dv], state[..., :dv]
    if not wants:
        return o, state
    return o, state, (gated if save == "all" else None, borders)


@functools.partial(jax.jit, static_argnames=("scale", "segments"))
def gla_backward(
    heads: Heads,
    d_out: jax.Array,
    d_state: jax.Array | None,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    saved: Saved | None = None,
    segments: int | None = None,
) -> tuple[Heads, jax.Array]:
    """Return the gradients of heads and of the initial state, from those of o and of the final
    state.

    Four or five kernels: the gates and the states at the chunks' borders, unless ``saved`` by the
    forward pass; the same scan backwards for the states' gradients and dv; the chunk-local
    gradients.  Where exp(log_decay) is 0 its gradient is 0.
    """
    q, k, v, log_decay, _ = heads
    if is_halved(q):
        states = {"d_state": _state_halves(d_state), "initial_state": _state_halves(initial_state)}
        given = {"scale": scale, "saved": saved, "segments": segments, **states}
        gradients, d_initial = gla_backward(_halved(heads), twice(d_out), **given)
        dq, dk, dv, dg, _ = gradients
        dq, dk, dg = (x.reshape(q.shape) for x in (dq, dk, dg))
        d_initial = d_initial.reshape(*q.shape[::2], q.shape[3], v.shape[3])
        return Heads(dq, dk, summed(dv), dg), d_initial
    width, n = v.shape[-1], segments or segments_of(heads)
    v, d_out, d_state, initial_state = map(padded, (v, d_out, d_state, initial_state))
    gated, before = saved if saved is not None else (None, None)
    if gated is None:
        gated = gates(q, k, log_decay, None, float(scale))
    if before is None:
        wants = {"want_out": False, "want_borders": True}
        _, before, _ = _scan_in_segments(gated, v, initial_state, None, n, **wants)
    wants = {"reverse": True, "want_borders": True}
    dv, after, d_initial = _scan_in_segments(gated.reversed(), d_out, d_state, None, n, **wants)
    dq, dk, dg = chunk_gradients(heads._replace(v=v), d_out, before, after, float(scale))
    return Heads(dq, dk, dv[..., :width], dg), d_initial[..., :width]

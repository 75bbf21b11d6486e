"""Steps of GLA on Hopper: one, alone or with the layer's work around it, or those of a draft.

    S <- exp(log_decay)[:, None] * S + k v^T        o = scale * q S

of each row and head: q, k, log_decay [Dk], v, o [Dv], S [Dk, Dv].
``gla_step`` computes these two lines.  ``gla_token`` (see ``gla.token``) begins at the layer's
projections and ends before its output product:

    log_decay = max(logsigmoid(W low + bias) / normalizer, clamp_min)
    y         = o * rsqrt(mean o^2 + eps) * weight * silu(gate)              per head

It computes one token, or several tokens of a draft that may be rejected.  For a draft the state is
only read: each of its floats takes all tokens in a register, and k, v and log_decay are written
out. ``gla_commit`` takes these and updates the states of all layers in one launch.

Everything is float32, rounded once.  A row whose length is 0 stands still: its state keeps its
bits.

The kernel is a stream over the state.  It reads every float once, updates it in a register, adds it
to its column of o and writes it back to the same place.  One block per (row, head, 128 value
channels, or 64 or 32 where there are few heads or channels).  A warp takes Dk / warps rows of S, 16
bytes per lane at a time, a batch of them in flight.  The warps' partial rows of o meet in shared
memory.  The norm is over all value channels of a head, whose blocks are a cluster.  Each block
sends its sum of squares to all (st.async, counted by a barrier), so that no block waits for the
stores of the state.  Without clusters the kernel ends with o, and ``head_norm_kernel`` is a second
kernel: the same bits.

    all: first batch of S -> L2 | the kernel before has ended
    warps: first batch of S in flight | q, k, decay -> smem | barrier
           | per row and token: a*S + k*v, o += q*S; store | next batch ... | partial o -> smem
           | barrier
    warp t: token t's o [| squares -> peers | norm, gate] | store

Copies: every lane loads its own rows of S, 16 bytes at a time, into registers; no TMA, no ring.
All threads load q, k and the decay, and fill a table in shared memory (``fill_table``).
Waits: for the kernel before; at the first block barrier for that table, at the second for the
warps' parts of o.  Blocks of a head wait until their cluster has begun, then on one mbarrier for
each other's sums of squares (``over_blocks``).
Writes: a lane stores its new rows of S at once; for a draft k, v and log_decay are stored instead.
After the second barrier warp t stores token t's o or y.

The state arrives as a mutable reference, so the kernel's input and output are one buffer.

Floor: 8 bytes per state element at 4.3 TB/s, 62 us at 64 rows x 32 heads x 128 x 128; the vectors
are 1%.  Result: 67 us (4.0 TB/s) on one H200.  ``gla.token``, and attempts: docs/lab/gla.md.
Command: ``python -m benchmarks.kernels.gla``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.gla.head_norm_kernel import gated_norm
from pallas_kernels.gla.step_registers import (
    BATCH,
    GlaStepLayout,
    GlaStepOperands,
    GlaStepShape,
    Operand,
)
from pallas_kernels.launch import in_place, launch
from pallas_kernels.operands import half_reason
from pallas_kernels.recurrence.plan import shapes_reason
from pallas_kernels.rows.fused_parts import KIND

LAYERS = 64  # of a commit: their addresses are the kernel's arguments


@dataclasses.dataclass(frozen=True)
class GlaStepPlan:
    """columns: value channels of a block.  warps: of a block."""

    kernel: ClassVar[str] = "gla_step_mosaic"
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"blocks of {self.columns} value channels and {self.warps} warps"


def plan(q: jax.Array, k: jax.Array, v: jax.Array) -> GlaStepPlan | Reason:
    """How ``gla_step`` computes a call: the state is updated in place, so it cannot be padded."""
    reason = half_reason(q=q, k=k, v=v) or shapes_reason(q, v, 32)
    return Reason(reason) if reason else divided(*q.shape, v.shape[-1])


def divided(batch: int, heads: int, dk: int, dv: int) -> GlaStepPlan:
    """With few heads blocks are narrow, as far as a cluster holds a head, and a lane has all its
    rows in flight at once."""
    few = planned_rows(batch) * heads * dv // 128 <= gpu().sms // 2
    columns = 64 if dv % 128 or (few and dv <= 512) else 128
    if dv % 64:
        columns = 32
    return GlaStepPlan(columns, max(4, dk * columns // (128 * BATCH)) if few else 4)


def _call(
    shape: GlaStepShape, operands: GlaStepOperands, rows: int, out: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[tuple[jax.Array, ...], Operand | tuple[Operand, ...] | None] | tuple[jax.Array, ...]:
    """Launch the step.  rows: of the state.

    out: types of the results, of which the last three may be what is kept.  The result is then the
    results, else (results, state).
    """
    layers = len(operands.state) if isinstance(operands.state, tuple) else 1
    normed, heads = operands.norm is not None, rows * shape.heads
    first, *kept = out or (None,)

    def body(gmem, smem):
        GlaStepLayout(shape, GlaStepOperands(**vars(gmem)), smem, heads).run()

    def run(state):
        given = operands._replace(state=state)._asdict()
        del given["out"], given["kept"]
        cluster = shape.blocks if normed else 1
        y, others = launch(
            body,
            given,
            {"out": first, "kept": tuple(kept) or None},
            name="gla_step",
            grid=layers * heads * shape.blocks // cluster,
            cluster=cluster,
            warpgroups=shape.warps // 4,
            registers=True,
            scratch=shape.scratch(normed),
        )
        return () if y is None else (y, *(others or ()))

    return in_place(run, operands.state) if len(out) <= 1 else run(operands.state)


@functools.partial(jax.jit, static_argnames=("scale", "plan"))
def gla_step(q, k, v, log_decay, state, scale: float, plan: GlaStepPlan | None = None):
    """``gla.op.gla_step`` of bfloat16 or float16: Dk is 64, 128, 256 or 512, and 32 divides Dv.

    The state is updated in place: donate it and no copy is made.
    """
    b, h, dk = q.shape
    dv = v.shape[-1]
    pitches = (h * dk, h * dk, h * dv)
    plan = plan or divided(b, h, dk, dv)
    shape = GlaStepShape(
        h,
        h,
        dk,
        dv,
        float(scale),
        pitches,
        (0, 0, 0),
        plan.columns,
        plan.warps,
        kind=KIND[v.dtype.name],
    )
    operands = GlaStepOperands(q=q, k=k, v=v, log_decay=log_decay, state=state)
    (o,), state = _call(shape, operands, b, (jax.ShapeDtypeStruct((b, h, dv), v.dtype),))
    return o, state


@functools.partial(jax.jit, static_argnames=("starts", "options", "plan"))
def gla_token(
    streams: tuple[jax.Array, ...],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    *,
    starts: tuple[int, ...],
    options: tuple[float, float, float | None],
    plan: GlaStepPlan,
):
    """See ``pallas_kernels.gla.token``.

    streams: the rows ``[B T, pitch]`` that hold q, k, v, low and, where there is one, gate, each
    from its column of ``starts`` on.  options: eps, normalizer, clamp_min.  Without lengths the
    state stays, and the result is (y, k, v, log_decay); else T is 1.
    """
    b, h, dk, dv = state.shape
    weight, bias = decay
    eps, normalizer, clamp_min = options
    tokens, dtype = streams[0].shape[0] // b, streams[0].dtype
    shape = GlaStepShape(
        h,
        weight.shape[0] // dk,
        dk,
        dv,
        dk**-0.5,
        tuple(x.shape[1] for x in streams),
        starts,
        plan.columns,
        plan.warps,
        weight.shape[1],
        eps,
        normalizer,
        clamp_min,
        tokens,
        KIND[dtype.name],
    )
    named = dict(zip(("q", "k", "v", "low", "gate"), streams, strict=False))
    operands = GlaStepOperands(
        **named, decay_weight=weight, decay_bias=bias, lengths=lengths, norm=norm, state=state
    )
    out, is_normed = (jax.ShapeDtypeStruct((b * tokens, h, dv), dtype),), True
    if shape.blocks > 1 and not gpu().clusters:
        is_normed, shape = False, dataclasses.replace(shape, raw=True)
        operands = operands._replace(norm=None, gate=None)
        out = (jax.ShapeDtypeStruct((b * tokens, h, dv), jnp.float32),)

    def finished(o: jax.Array) -> jax.Array:
        if is_normed:
            return o
        gate, start = (streams[4], starts[4]) if len(streams) > 4 else (None, 0)
        return gated_norm(o, norm, gate, start=start, eps=eps, columns=plan.columns)

    if lengths is None:
        kept = ((dk, dtype), (dv, dtype), (dk, jnp.float32))
        out += tuple(jax.ShapeDtypeStruct((b, tokens, h, n), kind) for n, kind in kept)
        o, *kept = _call(shape, operands, b, out)
        return finished(o), *kept
    (o,), state = _call(shape, operands, b, out)
    return finished(o), state


@functools.partial(jax.jit, static_argnames="plan")
def gla_commit(states, k, v, log_decay, count, *, plan: GlaStepPlan):
    """See ``pallas_kernels.gla.commit``; tuples of arrays, one a layer."""
    b, h, dk, dv = states[0].shape
    pitches = (h * dk, h * dk, h * dv)
    shape = GlaStepShape(
        h,
        h,
        dk,
        dv,
        1.0,
        pitches,
        (0, 0, 0),
        plan.columns,
        plan.warps,
        tokens=k[0].shape[1],
        kind=KIND[v[0].dtype.name],
    )
    operands = GlaStepOperands(k=k, v=v, log_decay=log_decay, lengths=count, state=states)
    return _call(shape, operands, b, ())[1]

"""Tokens of a gated delta layer on Hopper: all between its projections and its output product.

    x         = silu(sum_w conv[:, w] x_{t - W + 1 + w})                   of q, k and v
    q, k      = q / |q|, k / |k|
    beta      = beta_max sigmoid(b)        a = exp(-exp(a_log) softplus(a + dt))
    S <- a S        d = beta (v - k^T S)        S <- S + k d^T        o = Dk ** -0.5 q S
    y         = o * rsqrt(mean o^2 + eps) * weight * silu(z)

Everything is float32.  It is rounded where the separate ops round: behind the convolution, behind
q's and k's lengths, and behind o.  A row whose length is 0 stands still.

The kernel computes one token, or several tokens of a draft that may be rejected.  For a draft it
writes neither the state nor the last inputs. It writes the operands of ``gated_delta_commit``,
which writes both for all layers in one launch.

One block per (row, value head) of 128 value channels.  The state is in registers from the one read
to the one write, as in ``step_kernel``.  The value heads of a key head all read its last inputs,
and the first of them replaces these.  So they are a cluster, and none writes before all have read;
before Hopper, which has no clusters, they read a copy.

    warps: S in flight | last inputs, taps -> q, k, v, |q|^2, |k|^2 -> smem | barrier | lengths
           | k^T a S, q^T a S, q k -> smem | barrier | d | a S + k d, last inputs -> memory
    warp t: token t's o, norm, gate -> memory

Copies: a lane loads its rows of S; a thread loads one channel of q or k and one of v, with the
convolution's last inputs.  All loads go to registers, and q, k, v to shared memory.
Waits: at a block barrier for q, k and v; then at one barrier a token for the warps' sums.  Blocks
of a cluster arrive after they have read the last inputs, and wait before they store new ones.
Writes: one warp of the block, t modulo the warps, stores token t's y.  Lanes store S, threads the
last inputs; for a draft they store k, v, gates and inputs instead.

Floor: 8 bytes per state element at 4.3 TB/s.  Results: docs/lab/gated-delta.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.gated_delta.token_registers import (
    COLUMNS,
    ROWS,
    DeltaTokenOperands,
    DeltaTokenShape,
    Operand,
    Token,
)
from pallas_kernels.launch import in_place, launch
from pallas_kernels.rows.fused_parts import KIND

__all__ = ["COLUMNS", "ROWS", "DeltaTokenPlan", "gated_delta_commit", "gated_delta_token"]


@dataclasses.dataclass(frozen=True)
class DeltaTokenPlan:
    """warps: of a block."""

    kernel: ClassVar[str] = "gated_delta_token_mosaic"
    warps: int

    def __str__(self) -> str:
        return f"blocks of a value head and {self.warps} warps"


def _launched(
    shape: DeltaTokenShape,
    operands: DeltaTokenOperands,
    rows: int,
    out: tuple[jax.ShapeDtypeStruct, ...],
    refs: tuple[Operand | tuple[Operand, ...], Operand | tuple[Operand, ...]],
) -> tuple[jax.Array, ...]:
    """Launch the kernel and return results of the types ``out``.

    The last five results may be the operands for a later commit.  rows: number of rows of the
    state.  refs: (state, last).
    """
    state, last = refs
    layers = len(state) if isinstance(state, tuple) else 1
    given = operands._replace(state=state, last=last)._asdict()
    del given["out"], given["kept"]
    heads = rows * shape.heads
    joined = len(out) == 1 and operands.before is None
    cluster = shape.group if joined else 1
    first, *kept = out or (None,)

    def body(gmem, smem):
        Token(shape, DeltaTokenOperands(**vars(gmem)), smem, heads).run()

    y, others = launch(
        body,
        given,
        {"out": first, "kept": tuple(kept) or None},
        name="gated_delta_token",
        grid=layers * heads // cluster,
        cluster=cluster,
        warpgroups=shape.warps // 4,
        registers=True,
        scratch=shape.scratch,
    )
    return () if y is None else (y, *(others or ()))


@functools.partial(jax.jit, static_argnames=("starts", "options", "plan"))
def gated_delta_token(
    streams: tuple[jax.Array, jax.Array],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    last: jax.Array,
    *,
    starts: tuple[int, int],
    options: tuple[float, float, bool],
    plan: DeltaTokenPlan,
):
    """See ``pallas_kernels.gated_delta.token``.

    streams: the rows ``[B T, pitch]`` that hold qkvz and ba, each from its column of ``starts`` on.
    options: eps, beta_max, is there z.  Without lengths state and last stay, and the result is
    (y, k, v, log_decay, beta, read); else T is 1.
    """
    del plan  # one division for each Dk
    b, h, dk, dv = state.shape
    features, taps = conv.shape
    key_heads, dtype = (features - h * dv) // (2 * dk), streams[0].dtype
    tokens = streams[0].shape[0] // b
    pitches = streams[0].shape[1], streams[1].shape[1]
    shape = DeltaTokenShape(
        h, h // key_heads, dk, taps, pitches, starts, *options, tokens, KIND[dtype.name]
    )
    operands = DeltaTokenOperands(*streams, conv, *decay, norm, lengths)
    spec, lead = jax.ShapeDtypeStruct, (b, tokens)
    out = (spec((b * tokens, h, dv), dtype),)
    if lengths is None:
        out += (spec((*lead, key_heads, dk), dtype), spec((*lead, h, dv), dtype))
        out += (spec((*lead, h), jnp.float32),) * 2 + (spec((*lead, features), dtype),)
        return _launched(shape, operands, b, out, (state, last))
    if shape.group > 1 and not gpu().clusters:
        operands = operands._replace(before=last)
    run = functools.partial(_launched, shape, operands, b, out)
    (y,), (state, last) = in_place(run, (state, last))
    return y, state, last


@functools.partial(jax.jit, static_argnames="plan")
def gated_delta_commit(states, lasts, k, v, log_decay, beta, read, count, *, plan: DeltaTokenPlan):
    """See ``pallas_kernels.gated_delta.commit``; tuples of arrays, one a layer."""
    del plan
    b, h, dk, _ = states[0].shape
    tokens, key_heads = k[0].shape[1:3]
    shape = DeltaTokenShape(
        h, h // key_heads, dk, lasts[0].shape[1] + 1, tokens=tokens, kind=KIND[v[0].dtype.name]
    )
    operands = DeltaTokenOperands(
        lengths=count, k=k, v=v, log_decay=log_decay, beta=beta, read=read
    )
    return in_place(functools.partial(_launched, shape, operands, b, ()), (states, lasts))[1]

"""Tokens of a gated delta layer between its projections and its output product, as one kernel: the
short convolution, the gates, the steps, the norm and the output's gate.

``gated_delta_token`` computes one token, or several tokens of a draft, some of which may be
rejected.  Of these it writes nothing of the row; it also returns the operands with which
``gated_delta.commit`` accepts some of them.

It computes the same as ``jaxllama.model.mixers.delta.mix`` with one decay a head.  This folder has
no XLA form of it.  ``plan`` says which calls the kernel does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.operands import Columns, check, half_reason
from pallas_kernels.transform import Op, OpChoice

if TYPE_CHECKING:
    from pallas_kernels.gated_delta.token_kernel import DeltaTokenPlan

# Columns where the streams begin; eps, beta_max, is there z; the kernel's plan.
_Call = tuple[tuple[int, ...], tuple[float, float, bool], "DeltaTokenPlan"]
CLUSTER = 8  # value heads of a key head
MOST = 16  # tokens of a row
_OPERANDS = {
    "qkvz": "float [B, qkvz columns]",
    "ba": "float [B, ba columns]",
    "conv": "float [F, W]",
    "a_log": "float [H]",
    "dt_bias": "float [H]",
    "norm": "float [Dv]",
    "lengths": "int32 [B]",
    "state": "float32 [B, H, Dk, Dv]",
    "last": "float [B, W - 1, F]",
}
_OF_SEVERAL = {
    name: line.replace("[B,", "[N,") if name in ("qkvz", "ba") else line
    for name, line in _OPERANDS.items()
    if name != "lengths"
}


class DeltaLayerTokens(NamedTuple):
    """A layer's operands for one token of each row, or for several, whose lengths are None.

    streams: qkvz, ``F = 2 Hk Dk + H Dv`` columns of q, k and v and, where the layer has a gate,
        ``H Dv`` of z; ba, b and a of H heads; ``B * T`` rows for T tokens.  All but the state are
        bfloat16, or all float16.
    conv: taps ``[F, W]``.  decay: a_log, dt_bias ``[H]``.  norm: ``[Dv]``.
    lengths: int32 ``[B]``; where it is 0 the row stands still, and its y means nothing.
    state: float32 ``[B, H, Dk, Dv]``.  last: inputs of the convolution, ``[B, W - 1, F]``.
    """

    streams: Sequence[Columns]
    conv: jax.Array
    decay: tuple[jax.Array, jax.Array]
    norm: jax.Array
    lengths: jax.Array | None
    state: jax.Array
    last: jax.Array


def gated_delta_token(
    x: DeltaLayerTokens, *, eps: float, beta_max: float, planned: Plan | None = None
) -> tuple[jax.Array, ...]:
    """Return (y ``[B, H, Dv]``, new state, new last inputs) of one token: donate the latter two.

    Of T consecutive tokens of each row, from a state and last inputs that are only read, it returns
    (y ``[B * T, H, Dv]``, k ``[B, T, Hk, Dk]``, v ``[B, T, H, Dv]``, log_decay and beta ``[B, T,
    H]``, inputs ``[B, T, F]``).  k is not normalized.  log_decay and beta are float32.  The inputs
    are those of the convolution.

    planned: ``own_token``'s plan, which is then not asked for again.
    Raises ValueError naming the operand for shapes and dtypes that no layer has,
    NotImplementedError, naming the fact, where ``plan`` has none; several tokens have none of an
    empty state.
    """
    found, op = planned or plan(x), _op(x)
    if is_empty(x.state):
        if x.lengths is not None:
            batch, heads, _, dv = x.state.shape
            return jnp.zeros((batch, heads, dv), x.last.dtype), x.state, x.last
        found = Reason("an operand of size 0")
    rows = tuple(stream.rows for stream in x.streams)
    given = rows, x.conv, x.decay, x.norm, x.state, x.last
    own = choose_plan(op.name, "mosaic", lambda: found, *given, has_xla=False)
    options = float(eps), float(beta_max), x.streams[0].width > x.conv.shape[0]
    call = tuple(stream.start for stream in x.streams), options, own
    return op(OpChoice("mosaic"), call, rows, *x[1:])


def _kernel(call: _Call, *operands: Any) -> tuple[jax.Array, ...]:
    from pallas_kernels.gated_delta import token_kernel

    starts, options, plan = call
    return token_kernel.gated_delta_token(*operands, starts=starts, options=options, plan=plan)


_gated_delta_token = Op("gated_delta_token", None, _kernel)
_gated_delta_tokens = Op("gated_delta_tokens", None, _kernel)


def _op(x: DeltaLayerTokens) -> Op[tuple[jax.Array, ...]]:
    return _gated_delta_tokens if x.lengths is None else _gated_delta_token


def plan(x: DeltaLayerTokens) -> Plan | Reason:
    """How the kernel computes a call.  Raises ValueError as ``gated_delta_token`` does."""
    from pallas_kernels.gated_delta import token_kernel

    streams, conv, (a_log, dt_bias), norm, lengths, state, last = x
    qkvz, ba = (stream.rows for stream in streams)
    named = {"qkvz": qkvz, "ba": ba, "conv": conv, "a_log": a_log, "dt_bias": dt_bias}
    named |= {"norm": norm, "last": last}
    op, lines = _op(x).name, _OF_SEVERAL if lengths is None else _OPERANDS
    check(op, lines, **named, lengths=lengths, state=state)
    rows, batch = qkvz.shape[0], state.shape[0]
    if lengths is None and (batch == 0 or rows == 0 or rows % batch):
        raise ValueError(f"{op}: {rows} rows of qkvz are not as many for each of state's {batch}")
    _, heads, dk, dv = state.shape
    features, taps = conv.shape
    key_heads, more = divmod(features - heads * dv, 2 * dk) if dk else (0, 1)
    if more or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: conv {conv.shape} does not fit state {state.shape}: "
            "2 Hk Dk + H Dv rows, of Hk heads that divide H"
        )
    if last.shape[1] != taps - 1:
        raise ValueError(
            f"{op}: last {last.shape} has not one input less than conv {conv.shape} has taps"
        )
    widths = (features, features + heads * dv), (2 * heads,)
    for name, stream, allowed in zip(("qkvz", "ba"), streams, widths, strict=True):
        width, start, of = stream.width, stream.start, stream.rows.shape
        if width not in allowed or not 0 <= start <= of[1] - width:
            raise ValueError(
                f"{op}: {name} is {width} columns from {start} of {of}, not {allowed[-1]}"
            )
    if reason := half_reason(**named):
        return Reason(reason)
    if dk not in (64, 128, 256) or dv != token_kernel.COLUMNS:
        return Reason(f"state {state.shape}: not Dk = 64, 128 or 256 and Dv = 128")
    if rows > MOST * batch:
        return Reason(f"{rows} tokens of {batch} rows, over {MOST} each")
    if heads // key_heads > CLUSTER:
        return Reason(f"{heads // key_heads} value heads read a key head, over {CLUSTER}")
    if taps not in (2, 4):
        return Reason(f"conv {conv.shape}: not 2 or 4 taps")
    if streams[0].start % 4 or qkvz.shape[1] % 4 or features % 4:
        return Reason("qkvz is columns that do not begin at multiples of 8 bytes")
    return token_kernel.DeltaTokenPlan(dk // token_kernel.ROWS)


def own_token(x: DeltaLayerTokens) -> Plan | None:
    """``plan`` of these operands, or None where there is no kernel for them here."""
    return own_plan(lambda: plan(x), x.state, x.last)

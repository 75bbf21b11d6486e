"""Tokens of a gated delta layer between its projections and its output product, as one kernel: the
short convolution, the gates, the steps, the norm and the output's gate.

``gated_delta_token`` computes one token.  ``gated_delta_tokens`` computes several tokens of a
draft, some of which may be rejected.  It writes nothing of the row; it also returns the operands
with which ``gated_delta.commit`` accepts some of them.

Both compute the same as ``jaxllama.model.mixers.delta.mix`` with one decay a head.  This folder has
no XLA form of it.  ``plan`` says which calls the kernel does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.operands import Columns, check, half_reason
from pallas_kernels.transform import Op, OpChoice

if TYPE_CHECKING:
    from pallas_kernels.gated_delta.token_kernel import DeltaTokenPlan

P = TypeVar("P")
# Columns where the streams begin; eps, beta_max, is there z; the kernel's plan.
_Call = tuple[tuple[int, ...], tuple[float, float, bool], P]
_Operands = tuple[
    Sequence[Columns],
    jax.Array,
    tuple[jax.Array, jax.Array],
    jax.Array,
    jax.Array | None,
    jax.Array,
    jax.Array,
]

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


def gated_delta_token(
    streams: Sequence[Columns],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array,
    state: jax.Array,
    last: jax.Array,
    *,
    eps: float,
    beta_max: float,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """(y ``[B, H, Dv]``, new state, new last inputs): donate the latter two.

    streams: qkvz, ``F = 2 Hk Dk + H Dv`` columns of q, k and v and, where the layer has a gate,
        ``H Dv`` of z; ba, b and a of H heads.  All but the state are bfloat16, or all float16.
    conv: taps ``[F, W]``; last: ``[B, W - 1, F]``.  decay: a_log, dt_bias ``[H]``.  norm: ``[Dv]``.
    lengths: int32 ``[B]``; where it is 0 the row stands still, and its y means nothing.
    planned: ``own_token``'s plan, which is then not asked for again.
    Raises ValueError naming the operand for shapes and dtypes that no layer has,
    NotImplementedError, naming the fact, where ``plan`` has none.
    """
    operands = streams, conv, decay, norm, lengths, state, last
    found = planned or plan(*operands)
    if is_empty(state):
        batch, heads, _, dv = state.shape
        return jnp.zeros((batch, heads, dv), last.dtype), state, last
    call, rows = _call("gated_delta_token", found, operands, eps, beta_max)
    return _gated_delta_token(OpChoice("mosaic"), call, rows, *operands[1:])


def gated_delta_tokens(
    streams: Sequence[Columns],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
    last: jax.Array,
    *,
    eps: float,
    beta_max: float,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """Compute T consecutive tokens of each row from a state and last inputs that are only read.

    streams: as in ``gated_delta_token``, with ``B * T`` rows.

    Returns (y ``[B * T, H, Dv]``, k ``[B, T, Hk, Dk]``, v ``[B, T, H, Dv]``, log_decay and beta
    ``[B, T, H]``, inputs ``[B, T, F]``). k is not normalized. log_decay and beta are float32. The
    inputs are those of the convolution.

    Raises the errors of ``gated_delta_token``, and NotImplementedError for an empty state.
    """
    operands = streams, conv, decay, norm, None, state, last
    found = planned or plan(*operands)
    if is_empty(state):
        found = Reason("an operand of size 0")
    call, rows = _call("gated_delta_tokens", found, operands, eps, beta_max)
    return _gated_delta_tokens(OpChoice("mosaic"), call, rows, conv, decay, norm, state, last)


def _call(
    op: str, found: Plan | Reason, operands: _Operands, eps: float, beta_max: float
) -> tuple[_Call[Plan | None], tuple[jax.Array, ...]]:
    streams, conv, *_ = operands
    rows = tuple(x.rows for x in streams)
    plan = choose_plan(
        op, "mosaic", lambda: found, rows, *operands[1:4], *operands[5:], has_xla=False
    )
    gated = streams[0].width > conv.shape[0]
    return (tuple(x.start for x in streams), (float(eps), float(beta_max), gated), plan), rows


def _kernel(
    call: _Call[DeltaTokenPlan],
    *operands: jax.Array | tuple[jax.Array, ...] | None,
    keeps: bool = False,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.gated_delta import token_kernel

    starts, options, plan = call
    return token_kernel.gated_delta_token(
        *operands, starts=starts, options=options, plan=plan, keeps=keeps
    )


def _kernel_of_several(
    call: _Call[DeltaTokenPlan],
    rows: tuple[jax.Array, ...],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, ...]:
    return _kernel(call, rows, conv, decay, norm, None, state, last, keeps=True)


_gated_delta_token = Op("gated_delta_token", None, _kernel)
_gated_delta_tokens = Op("gated_delta_tokens", None, _kernel_of_several)


def plan(
    streams: Sequence[Columns],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    last: jax.Array,
) -> Plan | Reason:
    """How the kernel computes a call, without lengths one of ``gated_delta_tokens``.  Raises
    ValueError as ``gated_delta_token`` does."""
    from pallas_kernels.gated_delta import token_kernel

    qkvz, ba = (x.rows for x in streams)
    named = {
        "qkvz": qkvz,
        "ba": ba,
        "conv": conv,
        "a_log": decay[0],
        "dt_bias": decay[1],
        "norm": norm,
        "last": last,
    }
    op, lines = "gated_delta_token", _OPERANDS
    if lengths is None:
        op, lines = "gated_delta_tokens", _OF_SEVERAL
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
    for name, x, allowed in zip(("qkvz", "ba"), streams, widths, strict=True):
        if x.width not in allowed or not 0 <= x.start <= x.rows.shape[1] - x.width:
            raise ValueError(
                f"{op}: {name} is {x.width} columns from {x.start} of "
                f"{x.rows.shape}, not {allowed[-1]}"
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


def own_token(
    streams: Sequence[Columns],
    conv: jax.Array,
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    last: jax.Array,
) -> Plan | None:
    """``plan`` of these operands, or None where there is no kernel for them here."""
    operands = streams, conv, decay, norm, lengths, state, last
    return own_plan(lambda: plan(*operands), state, last)

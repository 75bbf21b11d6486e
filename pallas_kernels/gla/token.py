"""Tokens of a GLA layer between its projections and its output product, as one kernel.

    log_decay = max(logsigmoid(decay_weight low + decay_bias) / normalizer, clamp_min)
    S         <- exp(log_decay)[:, None] * S + k v^T
    o         = Dk ** -0.5 * q S
    y         = rms_norm(o, norm) * silu(gate)                        per head

``gla_token`` computes one token.  ``gla_tokens`` computes several tokens of a draft, some of which
may be rejected.  It does not write the state; it also returns the operands with which
``gla.commit`` accepts some of them.

Both compute the same as ``jaxllama.model.mixers.gla.mix``; this folder has no XLA form of it.
``plan`` says which calls the kernel does not take.  The projections are columns of wider arrays, as
a product with several weights writes them.  The kernel reads them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.operands import Columns, check, half_reason
from pallas_kernels.transform import Op, OpChoice

if TYPE_CHECKING:
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_Starts = tuple[int, ...]  # of the streams in their rows
_Options = tuple[float, float, float | None]  # eps, normalizer, clamp_min
COLUMNS = 128  # value channels of a block
CLUSTER = 8  # blocks whose sums of squares can be brought together
MOST = 16  # tokens of a row
NAMES = ("q", "k", "v", "low", "gate")  # of the streams
_OPERANDS = {
    "q": "float [B, q columns]",
    "k": "float [B, k columns]",
    "v": "float [B, v columns]",
    "low": "float [B, low columns]",
    "gate": "float [B, gate columns] ?",
    "state": "float32 [B, H, Dk, Dv]",
    "lengths": "int32 [B]",
    "decay weight": "float|QTensor [Hkv * Dk, rank]",
    "decay bias": "float [Hkv * Dk]",
    "norm": "float [Dv]",
}
_OF_SEVERAL = {
    name: line.replace("[B,", "[N,") if name in NAMES else line
    for name, line in _OPERANDS.items()
    if name != "lengths"
}


def gla_token(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array,
    state: jax.Array,
    *,
    eps: float,
    normalizer: float,
    clamp_min: float | None,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """(y ``[B, H, Dv]``, new state): donate the float32 state ``[B, H, Dk, Dv]``.

    streams: q ``[B, H * Dk]``, k, v of ``Hkv`` heads, low ``[B, rank]`` and, where the layer has
        one, gate ``[B, H * Dv]``; all, weights too, bfloat16 or all float16.
    decay: weight ``[Hkv * Dk, rank]`` and bias ``[Hkv * Dk]``.  norm: ``[Dv]``.
    lengths: int32 ``[B]``; where it is 0 the row's state stays, and its y means nothing.
    planned: ``own_token``'s plan, which is then not asked for again.
    Raises ValueError naming the operand for shapes and dtypes that no layer has,
    NotImplementedError, naming the fact, where ``plan`` has none.
    """
    found = planned or plan(streams, decay, norm, lengths, state)
    if is_empty(state):
        batch, heads, _, dv = state.shape
        return jnp.zeros((batch, heads, dv), streams[0].rows.dtype), state
    static = _static("gla_token", found, streams, decay, norm, state, (eps, normalizer, clamp_min))
    rows = tuple(x.rows for x in streams)
    return _gla_token(OpChoice("mosaic"), static, rows, decay, norm, lengths, state)


def gla_tokens(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
    *,
    eps: float,
    normalizer: float,
    clamp_min: float | None,
    exact: bool = False,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """Compute T consecutive tokens of each row from a state that is only read.

    Returns (y ``[B * T, H, Dv]``, k ``[B, T, H, Dk]``, v ``[B, T, H, Dv]``, float32 log_decay
    ``[B, T, H, Dk]``).

    streams, planned: as in ``gla_token``, streams with ``B * T`` rows.
    exact: gives the bits of a step of B * T rows.
    Raises as ``gla_token`` does.
    """
    found = planned or plan(streams, decay, norm, None, state, exact=exact)
    if is_empty(state):
        batch, heads, dk, dv = state.shape
        tokens, dtype = streams[0].rows.shape[0] // max(batch, 1), streams[0].rows.dtype
        kept = (jnp.zeros((batch, tokens, heads, n), dtype) for n in (dk, dv))
        return (
            jnp.zeros((batch * tokens, heads, dv), dtype),
            *kept,
            jnp.zeros((batch, tokens, heads, dk), jnp.float32),
        )
    static = _static("gla_tokens", found, streams, decay, norm, state, (eps, normalizer, clamp_min))
    rows = tuple(x.rows for x in streams)
    return _gla_tokens(OpChoice("mosaic"), static, rows, decay, norm, state)


def _static(
    op: str,
    found: Plan | Reason,
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
    options: _Options,
) -> tuple[_Starts, _Options, Plan | None]:
    rows = tuple(x.rows for x in streams)
    plan = choose_plan(op, "mosaic", lambda: found, rows, decay, norm, state, has_xla=False)
    eps, normalizer, clamp_min = options
    return tuple(x.start for x in streams), (float(eps), float(normalizer), clamp_min), plan


def _kernel(
    call: tuple[_Starts, _Options, GlaStepPlan],
    rows: tuple[jax.Array, ...],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    keeps: bool = False,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.gla import step_kernel

    starts, options, plan = call
    return step_kernel.gla_token(
        rows, decay, norm, lengths, state, starts=starts, options=options, plan=plan, keeps=keeps
    )


def _kernel_of_several(
    call: tuple[_Starts, _Options, GlaStepPlan],
    rows: tuple[jax.Array, ...],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, ...]:
    return _kernel(call, rows, decay, norm, None, state, keeps=True)


_gla_token = Op("gla_token", None, _kernel)
_gla_tokens = Op("gla_tokens", None, _kernel_of_several)


def plan(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    *,
    exact: bool = False,
) -> Plan | Reason:
    """How the kernel computes a call, without lengths one of ``gla_tokens``.  Raises ValueError as
    ``gla_token`` does."""
    from pallas_kernels.gla import step_kernel
    from pallas_kernels.recurrence.plan import WIDTHS

    _check(streams, decay, norm, lengths, state)
    named = dict(zip(NAMES, (stream.rows for stream in streams), strict=False))
    named |= {"decay weight": decay[0], "decay bias": decay[1], "norm": norm}
    if reason := half_reason(**named):
        return Reason(reason)
    dk, dv = state.shape[2:]
    if dk not in WIDTHS:
        return Reason(f"state {state.shape}: Dk = {dk} is not 64, 128, 256 or 512")
    if dv % COLUMNS or dv > CLUSTER * COLUMNS:
        most = CLUSTER * COLUMNS
        return Reason(f"state {state.shape}: Dv = {dv} is not a multiple of {COLUMNS} up to {most}")
    rank = decay[0].shape[1]
    if rank % 8 or rank == 0:
        return Reason(f"decay weight and low have a rank of {rank}, not a multiple of 8")
    for name, x in zip(NAMES, streams, strict=False):
        if x.start % 8 or x.rows.shape[1] % 8:
            return Reason(f"{name} is columns that do not begin at multiples of 16 bytes")
    rows = streams[0].rows.shape[0]
    if rows > MOST * state.shape[0]:
        return Reason(f"{rows} tokens of {state.shape[0]} rows, over {MOST} each")
    return step_kernel.divided(rows if exact else state.shape[0], *state.shape[1:])


def own_token(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
    *,
    exact: bool = False,
) -> Plan | None:
    """``plan`` of these operands, or None where there is no kernel for them here."""
    return own_plan(lambda: plan(streams, decay, norm, lengths, state, exact=exact), state)


def _check(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array | None,
    state: jax.Array,
) -> None:
    """Raise ValueError that names the operand, if the operands fit no layer."""
    op, lines = "gla_token", _OPERANDS
    if lengths is None:
        op, lines = "gla_tokens", _OF_SEVERAL
    if not 4 <= len(streams) <= 5:
        raise ValueError(f"{op}: {len(streams)} streams are not {', '.join(NAMES[:4])}, gate")
    named = dict(zip(NAMES, (stream.rows for stream in streams), strict=False))
    sizes = check(
        op,
        lines,
        **(dict.fromkeys(NAMES) | named),
        **{"decay weight": decay[0], "decay bias": decay[1]},
        norm=norm,
        lengths=lengths,
        state=state,
    )
    if lengths is None and (sizes["B"] == 0 or sizes["N"] % sizes["B"] or sizes["N"] == 0):
        raise ValueError(
            f"{op}: {sizes['N']} rows of q are not as many for each of state's {sizes['B']}"
        )
    heads, dk, dv = state.shape[1:]
    kv_heads = decay[0].shape[0] // dk if dk else 0
    if dk and (decay[0].shape[0] % dk or (heads and (kv_heads == 0 or heads % kv_heads))):
        raise ValueError(
            f"{op}: decay weight {decay[0].shape} does not fit state "
            f"{state.shape}: Hkv * Dk rows, of Hkv heads that divide H"
        )
    widths = heads * dk, kv_heads * dk, kv_heads * dv, sizes["rank"], heads * dv
    for name, x, width in zip(NAMES, streams, widths, strict=False):
        if x.width != width or not 0 <= x.start <= x.rows.shape[1] - width:
            raise ValueError(
                f"{op}: {name} is {x.width} columns from {x.start} of {x.rows.shape}, not "
                f"{width}, for state {state.shape} and decay weight {decay[0].shape}"
            )

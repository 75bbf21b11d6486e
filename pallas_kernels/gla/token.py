"""Tokens of a GLA layer between its projections and its output product, as one kernel.

    log_decay = max(logsigmoid(decay_weight low + decay_bias) / normalizer, clamp_min)
    S         <- exp(log_decay)[:, None] * S + k v^T
    o         = Dk ** -0.5 * q S
    y         = rms_norm(o, norm) * silu(gate)                        per head

``gla_token`` computes one token, or several tokens of a draft, some of which may be rejected.  Of
these it does not write the state; it also returns the operands with which ``gla.commit`` accepts
some of them.

It computes the same as ``jaxllama.model.mixers.gla.mix``; this folder has no XLA form of it.
``plan`` says which calls the kernel does not take.  The projections are columns of wider arrays, as
a product with several weights writes them.  The kernel reads them in place.
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
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_Call = tuple[tuple[int, ...], tuple[float, float, float | None], "GlaStepPlan"]
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


class GlaLayerTokens(NamedTuple):
    """A layer's operands for one token of each row, or for several, whose lengths are None.

    streams: q ``[B, H * Dk]``, k, v of ``Hkv`` heads, low ``[B, rank]`` and, where the layer has
        one, gate ``[B, H * Dv]``; ``B * T`` rows for T tokens.  All but the state, weights too, are
        bfloat16 or all float16.
    decay: weight ``[Hkv * Dk, rank]`` and bias ``[Hkv * Dk]``.  norm: ``[Dv]``.
    lengths: int32 ``[B]``; where it is 0 the row's state stays, and its y means nothing.
    state: float32 ``[B, H, Dk, Dv]``.
    """

    streams: Sequence[Columns]
    decay: tuple[jax.Array, jax.Array]
    norm: jax.Array
    lengths: jax.Array | None
    state: jax.Array

    @property
    def rows(self) -> tuple[jax.Array, ...]:
        return tuple(x.rows for x in self.streams)

    def named(self) -> dict[str, jax.Array]:
        """Return all 16-bit operands by name."""
        weights = {"decay weight": self.decay[0], "decay bias": self.decay[1], "norm": self.norm}
        return dict(zip(NAMES, self.rows, strict=False)) | weights


def gla_token(
    x: GlaLayerTokens,
    *,
    eps: float,
    normalizer: float,
    clamp_min: float | None,
    exact: bool = False,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """Return (y ``[B, H, Dv]``, new state) of one token: donate the state.

    Of T consecutive tokens of each row, from a state that is only read, it returns (y ``[B * T, H,
    Dv]``, k ``[B, T, H, Dk]``, v ``[B, T, H, Dv]``, float32 log_decay ``[B, T, H, Dk]``).

    exact: several tokens have the bits of a step of B * T rows.
    planned: ``own_token``'s plan, which is then not asked for again.
    Raises ValueError naming the operand for shapes and dtypes that no layer has,
    NotImplementedError, naming the fact, where ``plan`` has none.
    """
    found, rows = planned or plan(x, exact=exact), x.rows
    if is_empty(x.state):
        batch, heads, dk, dv = x.state.shape
        y = jnp.zeros((rows[0].shape[0], heads, dv), rows[0].dtype)
        if x.lengths is not None:
            return y, x.state
        lead = batch, rows[0].shape[0] // max(batch, 1), heads
        kept = (jnp.zeros((*lead, n), rows[0].dtype) for n in (dk, dv))
        return y, *kept, jnp.zeros((*lead, dk), jnp.float32)
    op, operands = _op(x), (rows, x.decay, x.norm, x.lengths, x.state)
    given = *operands[:3], x.state
    own = choose_plan(op.name, "mosaic", lambda: found, *given, has_xla=False)
    options = float(eps), float(normalizer), clamp_min
    call = tuple(stream.start for stream in x.streams), options, own
    return op(OpChoice("mosaic"), call, *operands)


def _kernel(call: _Call, *operands: Any) -> tuple[jax.Array, ...]:
    from pallas_kernels.gla import step_kernel

    starts, options, plan = call
    return step_kernel.gla_token(*operands, starts=starts, options=options, plan=plan)


_gla_token = Op("gla_token", None, _kernel)
_gla_tokens = Op("gla_tokens", None, _kernel)


def _op(x: GlaLayerTokens) -> Op[tuple[jax.Array, ...]]:
    return _gla_tokens if x.lengths is None else _gla_token


def plan(x: GlaLayerTokens, *, exact: bool = False) -> Plan | Reason:
    """How the kernel computes a call.  Raises ValueError as ``gla_token`` does."""
    from pallas_kernels.gla import step_kernel
    from pallas_kernels.recurrence.plan import WIDTHS

    _check(x)
    if reason := half_reason(**x.named()):
        return Reason(reason)
    state, (dk, dv) = x.state, x.state.shape[2:]
    if dk not in WIDTHS:
        return Reason(f"state {state.shape}: Dk = {dk} is not 64, 128, 256 or 512")
    if dv % COLUMNS or dv > CLUSTER * COLUMNS:
        most = CLUSTER * COLUMNS
        return Reason(f"state {state.shape}: Dv = {dv} is not a multiple of {COLUMNS} up to {most}")
    rank = x.decay[0].shape[1]
    if rank % 8 or rank == 0:
        return Reason(f"decay weight and low have a rank of {rank}, not a multiple of 8")
    for name, stream in zip(NAMES, x.streams, strict=False):
        if stream.start % 8 or stream.rows.shape[1] % 8:
            return Reason(f"{name} is columns that do not begin at multiples of 16 bytes")
    rows = x.rows[0].shape[0]
    if rows > MOST * state.shape[0]:
        return Reason(f"{rows} tokens of {state.shape[0]} rows, over {MOST} each")
    return step_kernel.divided(rows if exact else state.shape[0], *state.shape[1:])


def own_token(x: GlaLayerTokens, *, exact: bool = False) -> Plan | None:
    """``plan`` of these operands, or None where there is no kernel for them here."""
    return own_plan(lambda: plan(x, exact=exact), x.state)


def _check(x: GlaLayerTokens) -> None:
    """Raise ValueError that names the operand, if the operands fit no layer."""
    op, several, streams, state = _op(x).name, x.lengths is None, x.streams, x.state
    if not 4 <= len(streams) <= 5:
        raise ValueError(f"{op}: {len(streams)} streams are not {', '.join(NAMES[:4])}, gate")
    lines, named = _OF_SEVERAL if several else _OPERANDS, dict.fromkeys(NAMES) | x.named()
    sizes = check(op, lines, **named, lengths=x.lengths, state=state)
    if several and (sizes["B"] == 0 or sizes["N"] % sizes["B"] or sizes["N"] == 0):
        raise ValueError(
            f"{op}: {sizes['N']} rows of q are not as many for each of state's {sizes['B']}"
        )
    (_, heads, dk, dv), weight = state.shape, x.decay[0]
    kv_heads = weight.shape[0] // dk if dk else 0
    if dk and (weight.shape[0] % dk or (heads and (kv_heads == 0 or heads % kv_heads))):
        raise ValueError(
            f"{op}: decay weight {weight.shape} does not fit state "
            f"{state.shape}: Hkv * Dk rows, of Hkv heads that divide H"
        )
    widths = heads * dk, kv_heads * dk, kv_heads * dv, sizes["rank"], heads * dv
    for name, stream, width in zip(NAMES, streams, widths, strict=False):
        if stream.width != width or not 0 <= stream.start <= stream.rows.shape[1] - width:
            raise ValueError(
                f"{op}: {name} is {stream.width} columns from {stream.start} of "
                f"{stream.rows.shape}, not {width}, for state {state.shape} and decay weight "
                f"{weight.shape}"
            )

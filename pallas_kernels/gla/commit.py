"""The first of some tokens that a state may take: the other half of ``gla_token``.

    S <- exp(log_decay_t)[:, None] * S + k_t v_t^T        for t < count

for all layers of a model in one kernel, in place: each float of a state is read and written once,
however many tokens are taken.  The XLA form is a chain of updates of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.gla.token import MOST
from pallas_kernels.operands import check, half_reason
from pallas_kernels.transform import Op, chosen

if TYPE_CHECKING:
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_OPERANDS = {
    "state": "float32 [B, H, Dk, Dv]",
    "k": "float [B, T, H, Dk]",
    "v": "float [B, T, H, Dv]",
    "log_decay": "float32 [B, T, H, Dk]",
    "count": "int32 [B]",
}
_Several = Sequence[jax.Array]


def gla_commit(
    states: _Several,
    k: _Several,
    v: _Several,
    log_decay: _Several,
    count: jax.Array,
    *,
    planned: Plan | None = None,
) -> tuple[jax.Array, ...]:
    """The states after the first ``count[B]`` of T tokens.

    states: float32 ``[B, H, Dk, Dv]``, one a layer; donate them.  k, log_decay ``[B, T, H, Dk]``
        and v ``[B, T, H, Dv]``, likewise; what is beyond count may hold anything.
    planned: ``own_commit``'s plan, which is then not asked for again.

    Under jax's transformations as ``gla_step``.  Raises ValueError naming the operand for a wrong
    shape or dtype.
    """
    for layer in zip(states, k, v, log_decay, strict=True):
        check("gla_commit", _OPERANDS, **dict(zip(_OPERANDS, (*layer, count), strict=True)))
    operands = tuple(states), tuple(k), tuple(v), tuple(log_decay), count
    if not states or is_empty(*operands):
        return tuple(states)
    found = choose_plan("gla_commit", None, lambda: planned or plan(*operands), *operands)
    return _gla_commit(chosen(found, None), found, *operands)


def plan(
    states: _Several, k: _Several, v: _Several, log_decay: _Several, count: jax.Array
) -> Plan | Reason:
    """How the kernel computes a call."""
    from pallas_kernels.gla import step_kernel
    from pallas_kernels.recurrence.plan import shapes_reason

    del log_decay, count
    for layer in zip(k, v, strict=True):
        if reason := half_reason(**{"the first layer's v": v[0]}, k=layer[0], v=layer[1]):
            return Reason(reason)
    if len({x.shape for x in states}) > 1:
        return Reason("states of several shapes")
    if len(states) > step_kernel.LAYERS:
        return Reason(f"{len(states)} layers, over {step_kernel.LAYERS}")
    if k[0].shape[1] > MOST:
        return Reason(f"{k[0].shape[1]} tokens, over {MOST}")
    if reason := shapes_reason(k[0], v[0], 32):
        return Reason(reason)
    batch, heads, dk, dv = states[0].shape
    return step_kernel.divided(len(states) * batch, heads, dk, dv)


def own_commit(
    states: _Several, k: _Several, v: _Several, log_decay: _Several, count: jax.Array
) -> Plan | None:
    """``plan`` of these operands, or None where there is no kernel for them here."""
    operands = states, k, v, log_decay, count
    return own_plan(lambda: plan(*operands), *operands) if states else None


def _kernel(
    found: GlaStepPlan,
    states: _Several,
    k: _Several,
    v: _Several,
    log_decay: _Several,
    count: jax.Array,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.gla import step_kernel

    return step_kernel.gla_commit(states, k, v, log_decay, count, plan=found)


def _xla(
    found: Plan | None,
    states: _Several,
    k: _Several,
    v: _Several,
    log_decay: _Several,
    count: jax.Array,
) -> tuple[jax.Array, ...]:
    del found

    def after(state: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> jax.Array:
        for t in range(k.shape[1]):
            moves = (count > t)[:, None, None]
            k_t, v_t, g_t = (
                jnp.where(moves, x[:, t].astype(jnp.float32), jnp.float32(0))
                for x in (k, v, log_decay)
            )
            state = jnp.exp(g_t)[..., None] * state + k_t[..., None] * v_t[..., None, :]
        return state

    return tuple(map(after, states, k, v, log_decay))


_gla_commit = Op("gla_commit", _xla, _kernel)

"""The first of some tokens that a state may take: the other half of ``gla_token``.

    S <- exp(log_decay_t)[:, None] * S + k_t v_t^T        for t < count

for all layers of a model in one kernel, in place: each float of a state is read and written once,
however many tokens are taken.  The XLA form is a chain of updates of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason, is_empty
from pallas_kernels.gla.token import MOST
from pallas_kernels.operands import half_reason
from pallas_kernels.recurrence.op import Columns, Commit, Layers

if TYPE_CHECKING:
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_OPERANDS = {
    "state": "float32 [B, H, Dk, Dv]",
    "k": "float [B, T, H, Dk]",
    "v": "float [B, T, H, Dv]",
    "log_decay": "float32 [B, T, H, Dk]",
    "count": "int32 [B]",
}


def gla_commit(
    layers: Layers, count: jax.Array, *, planned: Plan | None = None
) -> tuple[jax.Array, ...]:
    """Return the states of all layers after the first ``count[B]`` of T tokens.

    layers: of each (state, k, v, log_decay), the first to be donated, the others as ``gla_token``
        gives them; what is beyond count may hold anything.
    planned: ``own_commit``'s plan, which is then not asked for again.

    Under jax's transformations as ``gla_step``.  Raises ValueError naming the operand for a wrong
    shape or dtype.
    """
    if not layers or is_empty(*layers, count):
        return tuple(layer[0] for layer in layers)
    return _commit(layers, count, planned)[0]


def plan(layers: Layers, count: jax.Array) -> Plan | Reason:
    """How the kernel computes a call."""
    from pallas_kernels.gla import step_kernel
    from pallas_kernels.recurrence.plan import shapes_reason

    del count
    states, keys, values, _ = zip(*layers, strict=True)
    for k, v in zip(keys, values, strict=True):
        if reason := half_reason(**{"the first layer's v": values[0]}, k=k, v=v):
            return Reason(reason)
    if len({x.shape for x in states}) > 1:
        return Reason("states of several shapes")
    if len(states) > step_kernel.LAYERS:
        return Reason(f"{len(states)} layers, over {step_kernel.LAYERS}")
    if keys[0].shape[1] > MOST:
        return Reason(f"{keys[0].shape[1]} tokens, over {MOST}")
    if reason := shapes_reason(keys[0], values[0], 32):
        return Reason(reason)
    batch, heads, dk, dv = states[0].shape
    return step_kernel.divided(len(states) * batch, heads, dk, dv)


def _kernel(found: GlaStepPlan, *operands: Any) -> Columns:
    from pallas_kernels.gla import step_kernel

    return (step_kernel.gla_commit(*operands, plan=found),)


def _after(
    count: jax.Array, state: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array]:
    for t in range(k.shape[1]):
        moves = (count > t)[:, None, None]
        k_t, v_t, g_t = (
            jnp.where(moves, x[:, t].astype(jnp.float32), jnp.float32(0)) for x in (k, v, log_decay)
        )
        state = jnp.exp(g_t)[..., None] * state + k_t[..., None] * v_t[..., None, :]
    return (state,)


_commit = Commit("gla_commit", _OPERANDS, plan, _kernel, _after)
own_commit = _commit.own

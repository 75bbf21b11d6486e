"""Acceptance of a draft's first ``count`` tokens, after ``gated_delta_token`` computed them all.

    d <- beta_t (v_t - a_t k_t^T S)        S <- a_t S + k_t d^T        for t < count, |k_t| = 1

One kernel updates the states and the last inputs of the convolution of all layers of a model, in
place.  The XLA form is a chain of steps for each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Plan, Reason
from pallas_kernels.gated_delta.chunked import step
from pallas_kernels.gated_delta.token import MOST
from pallas_kernels.operands import check, half_reason
from pallas_kernels.recurrence.op import Columns, Commit, Heads, Layers

if TYPE_CHECKING:
    from pallas_kernels.gated_delta.token_kernel import DeltaTokenPlan

LAYERS = 64  # their addresses are the kernel's arguments
_OPERANDS = {
    "state": "float32 [B, H, Dk, Dv]",
    "last": "float [B, W - 1, F]",
    "k": "float [B, T, Hk, Dk]",
    "v": "float [B, T, H, Dv]",
    "log_decay": "float32 [B, T, H]",
    "beta": "float32 [B, T, H]",
    "read": "float [B, T, F]",
    "count": "int32 [B]",
}


def gated_delta_commit(
    layers: Layers, count: jax.Array, *, planned: Plan | None = None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """(states, last inputs) of all layers after the first ``count[B]`` of T tokens.

    layers: of each (state, last, k, v, log_decay, beta, read), the first two to be donated, the
        others as ``gated_delta_token`` gives them; what is beyond count may hold anything.
    planned: ``own_commit``'s plan, which is then not asked for again.
    Under jax's transformations as ``gated_delta_step``.  Raises ValueError naming the operand for a
    wrong shape or dtype.
    """
    if not layers:
        return (), ()
    states, lasts = _commit(layers, count, planned)
    return states, lasts


def plan(layers: Layers, count: jax.Array) -> Plan | Reason:
    """How the kernel computes a call.  Raises ValueError as ``gated_delta_commit`` does."""
    from pallas_kernels.gated_delta import token_kernel

    if not 0 < len(layers) <= LAYERS:
        return Reason(f"{len(layers)} layers, not 1 to {LAYERS}")
    sizes: dict[str, int] = {}
    for layer in layers:
        named = _commit.named(layer, count)
        sizes = check("gated_delta_commit", _OPERANDS, **named)
        if reason := half_reason(**{name: named[name] for name in ("last", "k", "v", "read")}):
            return Reason(reason)
        if [(x.shape, x.dtype) for x in layer] != [(x.shape, x.dtype) for x in layers[0]]:
            return Reason("layers of several shapes or dtypes")
    if sizes["Dk"] not in (64, 128, 256) or sizes["Dv"] != token_kernel.COLUMNS:
        return Reason(f"state {layers[0][0].shape}: not Dk = 64, 128 or 256 and Dv = 128")
    if sizes["F"] != 2 * sizes["Hk"] * sizes["Dk"] + sizes["H"] * sizes["Dv"]:
        return Reason(f"read has {sizes['F']} columns, which are not q's, k's and v's")
    if sizes["T"] > MOST:
        return Reason(f"{sizes['T']} tokens, over {MOST}")
    return token_kernel.DeltaTokenPlan(sizes["Dk"] // token_kernel.ROWS)


def _kernel(found: DeltaTokenPlan, *operands: Any) -> Columns:
    from pallas_kernels.gated_delta import token_kernel

    return token_kernel.gated_delta_commit(*operands, plan=found)


def _after(count: jax.Array, *layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    state, last, k, v, log_decay, beta, read = layer
    for t in range(k.shape[1]):
        now = (x[:, t] for x in (k, v, log_decay, beta))
        k_t, v_t, g_t, b_t = (
            jnp.where((count > t).reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
            for x in now
        )
        state = step(Heads(k_t, k_t, v_t, g_t, b_t), state, 1.0, True)[1]
    width = jnp.arange(last.shape[1], dtype=jnp.int32)
    at = (count[:, None] + width)[:, :, None]
    return state, jnp.take_along_axis(jnp.concatenate([last, read], axis=1), at, axis=1)


_commit = Commit("gated_delta_commit", _OPERANDS, plan, _kernel, _after)
own_commit = _commit.own

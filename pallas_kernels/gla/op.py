"""Gated Linear Attention: the op, its gradient, and one step of it.

    S_t = exp(g_t)[:, None] * S_{t-1} + k_t v_t^T        o_t = scale * q_t S_t

per row and head, with g = log_decay <= 0 one number per key channel.  Contract: values and
gradients are finite and equal to the recursion, for any log_decay from 0 to -inf, mixed within a
row, at any length. The op never takes the exponential of a positive number.  State and gates are
float32.

Forms: ``gla`` is chunkwise (``gla.chunked`` in XLA, ``gla.kernel`` on Hopper). ``gla_step`` is one
step of the recursion. ``gla.reference`` holds the recursion itself and the fully parallel form.

Gradients reach q, k, v, log_decay and initial_state, from o and from the final state.  The backward
pass recomputes from the inputs and a state every 64 tokens or more. So memory is linear in T, with
no Dk * Dv factor per token.  Where exp(g) = 0 the gradient of log_decay is 0.

Source: arXiv 2312.06635.  Left out: gates on value channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import gla as cpu
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan
from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.gla.chunked import chunked_backward, chunked_forward
from pallas_kernels.recurrence.op import Heads, Recurrence, Results, check_decay, default_scale
from pallas_kernels.transform import Op, chosen

if TYPE_CHECKING:
    from pallas_kernels.gla.kernel import GlaPlan, Saved
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_Call = tuple[tuple[float, int], "GlaPlan"]  # (scale, chunk), the kernels' plan
_OPERANDS = {
    "q": "float [B, T, H, Dk]",
    "k": "q [B, T, H, Dk]",
    "v": "q [B, T, H, Dv]",
    "log_decay": "float [B, T, H, Dk]",
    "initial_state": "float32 [B, H, Dk, Dv] ?",
    "lengths": "int32 [B] ?",
    "segment_ids": "int32 [B, T] ?",
}
_STEP_OPERANDS = {
    "q": "float [B, H, Dk]",
    "k": "q [B, H, Dk]",
    "v": "q [B, H, Dv]",
    "log_decay": "float [B, H, Dk]",
    "state": "float32 [B, H, Dk, Dv]",
}


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_state: bool = True,
    chunk: int = 64,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the outputs of Gated Linear Attention for whole sequences, and the state after them.

    Parameters
    ----------
    q, k : [B, T, H, Dk]
        float32, bfloat16 or float16; q, k and v have one dtype.
    v : [B, T, H, Dv]
        The values.
    log_decay : float [B, T, H, Dk]
        Natural logarithm of the decay, from -inf to 0. float32; 16-bit floats are cast to it.
    scale : float, optional
        Factor of the output; Dk ** -0.5 by default.
    initial_state : float32 [B, H, Dk, Dv], optional
        State before the first token; zeros by default.
    lengths : int32 [B], optional
        Number of valid tokens of each row; T by default. Later tokens are padding and may hold
        anything, even NaN: their output is 0, and they do not change the state.
    segment_ids : int32 [B, T], optional
        Ids of packed sequences. The state restarts from zero where the id changes. initial_state
        belongs to a row's first segment, and the returned state to its last.
    return_state : bool
        Whether to return the state.
    chunk : int
        Tokens of a chunk in the XLA form, a power of two.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    o : [B, T, H, Dv]
        The outputs, in v's dtype.
    state : float32 [B, H, Dk, Dv] or None
        The state after the last valid token. None without ``return_state``.

    Raises
    ------
    ValueError
        Names the operand whose shape or dtype does not fit. Also for a positive log_decay, unless
        jit, grad or vmap hides its values; it is then used as it is.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | q, k, v, log_decay, initial_state: a backward of its own |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    heads = Heads(q, k, v, log_decay)
    more = {"initial_state": initial_state, "lengths": lengths, "segment_ids": segment_ids}
    heads.check("gla", _OPERANDS, **more)
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"gla: chunk {chunk} is not a power of two")
    options = default_scale(q, scale), chunk
    o, state = _gla(options, heads, initial_state, lengths, segment_ids, implementation)
    return o, state if return_state else None


def gla_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of Gated Linear Attention for one token per row, and the new state.

    Parameters
    ----------
    q, k : [B, H, Dk]
        float32, bfloat16 or float16; q, k and v have one dtype.
    v : [B, H, Dv]
        The values.
    log_decay : float [B, H, Dk]
        Natural logarithm of the decay, from -inf to 0.
    state : float32 [B, H, Dk, Dv]
        The state before the token. Donate it to have it updated in place.
    scale : float, optional
        Factor of the output; Dk ** -0.5 by default.
    implementation : "xla", "mosaic", "cpu" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    o : [B, H, Dv]
        The outputs, in v's dtype.
    state : float32 [B, H, Dk, Dv]
        The state after the token.

    Raises
    ------
    ValueError
        Names the operand whose shape or dtype does not fit. Also for a positive log_decay, unless
        jit, grad or vmap hides its values; it is then used as it is.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | q, k, v, log_decay, state: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    heads = Heads(q, k, v, log_decay)
    heads.check("gla_step", _STEP_OPERANDS, state=state)
    check_decay("gla_step", log_decay)
    heads = heads.in_float32()
    find, on_cpu = lambda: _step_plan(heads), lambda: cpu.plan(q, v)
    leaves = jax.tree.leaves((heads, state))
    found = choose_plan("gla_step", implementation, find, *leaves, cpu=on_cpu)
    call = default_scale(q, scale), found
    return _gla_step(chosen(found, implementation), call, heads, state)


def plan(heads: Heads) -> Plan | Reason:
    """How the kernels compute ``gla``."""
    from pallas_kernels.gla import kernel

    return kernel.plan(heads)


def _kernel(
    call: _Call, heads: Heads, state: jax.Array | None, lengths: jax.Array | None, **save: Any
) -> Any:
    from pallas_kernels.gla import kernel

    (scale, _), plan = call
    given = {"initial_state": state, "lengths": lengths, "segments": plan.segments}
    return kernel.gla_forward(heads, scale=scale, **given, **save)


def _keeping(call: _Call, heads: Heads, state: jax.Array | None) -> tuple[Results, Saved]:
    # The saved arrays are linear in T: a bf16 state per 64 tokens, 5 bytes per element of q.
    o, last, saved = _kernel(call, heads, state, None, save="all")
    return (o, last), saved


def _gradients(
    call: _Call,
    heads: Heads,
    state: jax.Array | None,
    saved: Saved,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[Heads, jax.Array]:
    from pallas_kernels.gla import kernel

    (scale, _), plan = call
    given = {"initial_state": state, "saved": saved, "segments": plan.segments}
    return kernel.gla_backward(heads, d_o, d_state, scale=scale, **given)


_gla = Recurrence("gla", chunked_forward, chunked_backward, plan, _kernel, _gradients, _keeping)


def _step_plan(heads: Heads) -> Plan | Reason:
    from pallas_kernels.gla import step_kernel

    return step_kernel.plan(*heads[:3])


def _step_kernel(
    call: tuple[float, GlaStepPlan | cpu.CpuPlan], heads: Heads, state: jax.Array
) -> Results:
    scale, plan = call
    if isinstance(plan, cpu.CpuPlan):
        return cpu.gla_step(*heads[:4], state, scale, plan)
    from pallas_kernels.gla import step_kernel

    return step_kernel.gla_step(*heads[:4], state, scale, plan)


def _step_xla(call: tuple[float, Plan | None], heads: Heads, state: jax.Array) -> Results:
    q, k, v = (x.astype(jnp.float32) for x in heads[:3])
    state = jnp.exp(heads.log_decay)[..., None] * state + k[..., None] * v[..., None, :]
    o = call[0] * row_sums(q[..., None] * state, axis=-2)[..., 0, :]
    return o.astype(heads.v.dtype), state


_gla_step = Op("gla_step", _step_xla, _step_kernel)

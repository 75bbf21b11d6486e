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

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import gla as cpu
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, is_empty
from pallas_kernels.gla.chunked import chunked_backward, chunked_forward
from pallas_kernels.operands import check
from pallas_kernels.recurrence.sequences import check_decay, restarted, zero_padding
from pallas_kernels.transform import Op, OpChoice, chosen

if TYPE_CHECKING:
    from pallas_kernels.gla.kernel import GlaPlan, Saved
    from pallas_kernels.gla.step_kernel import GlaStepPlan

_Pair = tuple[jax.Array, jax.Array]
_Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]
_Static = tuple[float, int, Plan | None]  # scale, chunk, the kernel's plan
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
    check(
        "gla",
        _OPERANDS,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        initial_state=initial_state,
        lengths=lengths,
        segment_ids=segment_ids,
    )
    batch, _, heads, d_k = q.shape
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"gla: chunk {chunk} is not a power of two")
    scale = max(d_k, 1) ** -0.5 if scale is None else float(scale)
    check_decay("gla", log_decay, lengths)
    log_decay = restarted(log_decay.astype(jnp.float32), segment_ids)
    operands = q, k, v, log_decay
    found = choose_plan("gla", implementation, lambda: plan(q, k, v), *operands)
    if is_empty(*operands):  # no tokens, or none that hold anything
        if initial_state is None:
            initial_state = jnp.zeros((batch, heads, d_k, v.shape[-1]), jnp.float32)
        return jnp.zeros(v.shape, v.dtype), initial_state if return_state else None
    choice, call = chosen(found, implementation), (scale, chunk, found)
    o, state = _gla(choice, call, *operands, initial_state, lengths)
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
    check("gla_step", _STEP_OPERANDS, q=q, k=k, v=v, log_decay=log_decay, state=state)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    check_decay("gla_step", log_decay)
    log_decay = log_decay.astype(jnp.float32)
    operands = q, k, v, log_decay, state
    find, on_cpu = lambda: _step_plan(q, k, v), lambda: cpu.plan(q, v)
    found = choose_plan("gla_step", implementation, find, *operands, cpu=on_cpu)
    return _gla_step(chosen(found, implementation), (scale, found), *operands)


def plan(q: jax.Array, k: jax.Array, v: jax.Array) -> Plan | Reason:
    """How the kernels compute ``gla``."""
    from pallas_kernels.gla import kernel

    return kernel.plan(q, k, v)


def _step_plan(q: jax.Array, k: jax.Array, v: jax.Array) -> Plan | Reason:
    from pallas_kernels.gla import step_kernel

    return step_kernel.plan(q, k, v)


def _kernel(
    static: tuple[float, int, GlaPlan],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
) -> _Pair:
    from pallas_kernels.gla import kernel as gla_mosaic

    scale, _, plan = static
    return gla_mosaic.gla_forward(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        lengths=lengths,
        segments=plan.segments,
    )


def _xla(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
) -> _Pair:
    return _chunked(static, *zero_padding(lengths, q, k, v, g), initial_state=initial_state)[0]


def _chunked(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
) -> tuple[_Pair, jax.Array]:
    """((o, state), the states that ``chunked_backward`` takes)."""
    scale, chunk, _ = static
    if initial_state is None:
        # It is made from q, so that inside a shard_map it varies over the same axes as q.
        zero = jnp.zeros_like(q[:, 0, :, :, None], jnp.float32)
        initial_state = jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1]))
    *out, borders = chunked_forward(q, k, v, g, initial_state, scale=scale, chunk=chunk)
    return tuple(out), borders


def _forward(
    choice: OpChoice,
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[_Pair, Saved | jax.Array]:
    inputs = zero_padding(lengths, q, k, v, g)
    if choice.implementation == "mosaic":
        return _kept_forward(choice, static, *inputs, initial_state)
    return _chunked(static, *inputs, initial_state=initial_state)


def _backward(
    choice: OpChoice,
    static: _Static,
    operands: _Operands,
    saved: Saved | jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array | None, ...]:
    *inputs, initial_state, lengths = operands
    *inputs, d_o = zero_padding(lengths, *inputs, d_o)
    if choice.implementation == "mosaic":
        gradients = _kernel_backward(choice, static, *inputs, initial_state, saved, d_o, d_state)
    else:
        scale, chunk, _ = static
        gradients = chunked_backward(*inputs, saved, d_o, d_state, scale=scale, chunk=chunk)
    *gradients, d_initial = gradients
    d_initial = None if initial_state is None else d_initial
    return (*zero_padding(lengths, *gradients), d_initial, None)


def _keeping(
    static: tuple[float, int, GlaPlan],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
) -> tuple[_Pair, Saved]:
    from pallas_kernels.gla import kernel as gla_mosaic

    scale, _, plan = static
    # The saved arrays are linear in T: a bf16 state per 64 tokens, 5 bytes per element of q.
    o, state, saved = gla_mosaic.gla_forward(
        q, k, v, g, scale=scale, initial_state=initial_state, segments=plan.segments, save="all"
    )
    return (o, state), saved


def _keeping_nothing(static: tuple[float, int, GlaPlan], *inputs: jax.Array) -> tuple[_Pair, Saved]:
    saved = jax.eval_shape(functools.partial(_keeping, static), *inputs)[1]
    return _chunked(static, *inputs)[0], jax.tree.map(jnp.zeros_like, saved)


def _gradients(
    static: tuple[float, int, GlaPlan],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    saved: Saved,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.gla import kernel as gla_mosaic

    scale, _, plan = static
    return gla_mosaic.gla_backward(
        q,
        k,
        v,
        g,
        d_o,
        d_state,
        scale=scale,
        initial_state=initial_state,
        saved=saved,
        segments=plan.segments,
    )


def _gradients_from_inputs(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    initial_state: jax.Array | None,
    saved: Saved,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array, ...]:
    scale, chunk, _ = static
    _, borders = _chunked(static, q, k, v, g, initial_state)
    return chunked_backward(q, k, v, g, borders, d_o, d_state, scale=scale, chunk=chunk)


_kept_forward = Op("gla", _keeping_nothing, _keeping)
_kernel_backward = Op("gla", _gradients_from_inputs, _gradients)
_gla = Op("gla", _xla, _kernel, forward=_forward, backward=_backward)


def _step_kernel(
    static: tuple[float, GlaStepPlan | cpu.CpuPlan],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
) -> _Pair:
    scale, plan = static
    if isinstance(plan, cpu.CpuPlan):
        return cpu.gla_step(q, k, v, g, state, scale, plan)
    from pallas_kernels.gla import step_kernel

    return step_kernel.gla_step(q, k, v, g, state, scale, plan)


def _step_xla(
    static: tuple[float, Plan | None],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
) -> _Pair:
    scale, _ = static
    q_f, k_f, v_f = (x.astype(jnp.float32) for x in (q, k, v))
    state = jnp.exp(g)[..., None] * state + k_f[..., None] * v_f[..., None, :]
    o = scale * jnp.sum(q_f[..., None] * state, axis=-2)
    return o.astype(v.dtype), state


_gla_step = Op("gla_step", _step_xla, _step_kernel)

"""The gated delta rule: the op, its gradient, and one step of it.

    S_t = (I - b_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + b_t k_t v_t^T        o_t = scale * q_t S_t

per row and head: the state decays, what the key finds in it is erased by the share b = beta, and
the value is written.  g = log_decay <= 0 is one number a head (Gated DeltaNet) or one a key channel
(Kimi Delta Attention); zeros give DeltaNet.  Value head h reads key head h // (H // Hk).

Contract: values and gradients are finite and equal to the recursion, at any length. This holds for
any log_decay from 0 to -inf, mixed within a row, and beta from 0 to 1 (to 2, for negative
eigenvalues). Keys have a length of at most one and may be alike. The op never takes the exponential
of a positive number.  State and gates are float32.  With longer keys than ``sqrt(2 / beta)`` the
recursion itself may grow.

Forms: ``gated_delta`` is chunkwise (``gated_delta.chunked`` in XLA, ``gated_delta.kernel`` on
Hopper). ``gated_delta_step`` is one step (``gated_delta.step``, ``gated_delta.step_kernel``).
``gated_delta.reference`` holds the recursion itself and the fully parallel form.

Gradients reach q, k, v, log_decay, beta and initial_state, from o and from the final state.  The
backward pass recomputes from the inputs and the state before each group of chunks.  Where
exp(g) = 0 the gradient of log_decay is 0.

Sources: arXiv 2406.06484 (delta rule), 2412.06464 (Gated DeltaNet), 2510.26692 (KDA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, is_empty
from pallas_kernels.gated_delta.chunked import chunked_backward, chunked_forward
from pallas_kernels.gated_delta.reference import normalized
from pallas_kernels.gated_delta.step import step
from pallas_kernels.operands import check
from pallas_kernels.recurrence.sequences import check_decay, restarted, zero_padding
from pallas_kernels.transform import Op, OpChoice, chosen

if TYPE_CHECKING:
    from pallas_kernels.gated_delta.kernel import DeltaPlan
    from pallas_kernels.gated_delta.step_kernel import DeltaStepPlan

_Pair = tuple[jax.Array, jax.Array]
_Operands = tuple[
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array | None,
    jax.Array | None,
]
_Static = tuple[float, bool, Plan | None]  # scale, normalize_qk, the kernel's plan
_OPERANDS = {
    "q": "float [B, T, Hk+, Dk]",
    "k": "q [B, T, Hk, Dk]",
    "v": "q [B, T, H, Dv]",
    "log_decay": "float [B, T, H]",
    "beta": "float [B, T, H]",
    "initial_state": "float32 [B, H, Dk, Dv] ?",
    "lengths": "int32 [B] ?",
    "segment_ids": "int32 [B, T] ?",
}
_STEP_OPERANDS = {
    "q": "float [B, Hk+, Dk]",
    "k": "q [B, Hk, Dk]",
    "v": "q [B, H, Dv]",
    "log_decay": "float [B, H]",
    "beta": "float [B, H]",
    "state": "float32 [B, H, Dk, Dv]",
}


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    normalize_qk: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the gated delta rule for whole sequences, and the state after them.

    Parameters
    ----------
    q, k : [B, T, Hk, Dk]
        float32, bfloat16 or float16; q, k and v have one dtype. Hk divides H.
    v : [B, T, H, Dv]
        The values.
    log_decay : float [B, T, H] or [B, T, H, Dk]
        Natural logarithm of the decay of each head, or of each key channel; from -inf to 0.
        float32; 16-bit floats are cast to it.
    beta : float [B, T, H]
        Strength of each token's write, float32 or cast to it.
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
    normalize_qk : bool
        Whether q and k are first divided by their lengths, sqrt(sum of squares + 1e-6).
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    o : [B, T, H, Dv]
        The outputs, in v's dtype.
    state : float32 [B, H, Dk, Dv]
        The state after the last valid token.

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
    | jvp, grad, at any order       | q, k, v, log_decay, beta, initial_state: its own backward |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    _check(
        "gated_delta",
        _OPERANDS,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        initial_state=initial_state,
        lengths=lengths,
        segment_ids=segment_ids,
    )
    d_k, heads, d_v = q.shape[-1], *v.shape[2:]
    scale = max(d_k, 1) ** -0.5 if scale is None else float(scale)
    check_decay("gated_delta", log_decay, lengths)
    log_decay = restarted(log_decay.astype(jnp.float32), segment_ids)
    operands = q, k, v, log_decay, beta.astype(jnp.float32)
    found = choose_plan("gated_delta", implementation, lambda: plan(*operands), *operands)
    if is_empty(*operands):  # no tokens, or none that hold anything
        if initial_state is None:
            initial_state = jnp.zeros((q.shape[0], heads, d_k, d_v), jnp.float32)
        return jnp.zeros(v.shape, v.dtype), initial_state
    choice, call = chosen(found, implementation), (scale, normalize_qk, found)
    return _gated_delta(choice, call, *operands, initial_state, lengths)


def gated_delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the gated delta rule for one token per row, and the new state.

    Parameters
    ----------
    q, k : [B, Hk, Dk]
        float32, bfloat16 or float16; q, k and v have one dtype. Hk divides H.
    v : [B, H, Dv]
        The values.
    log_decay : float [B, H] or [B, H, Dk]
        Natural logarithm of the decay of each head, or of each key channel; from -inf to 0.
    beta : float [B, H]
        Strength of the token's write.
    state : float32 [B, H, Dk, Dv]
        The state before the token. Donate it to have it updated in place.
    scale : float, optional
        Factor of the output; Dk ** -0.5 by default.
    normalize_qk : bool
        Whether q and k are first divided by their lengths, sqrt(sum of squares + 1e-6).
    implementation : "xla", "mosaic" or None
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
    | jvp, grad, at any order       | q, k, v, log_decay, beta, state: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    _check(
        "gated_delta_step",
        _STEP_OPERANDS,
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        state=state,
    )
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    check_decay("gated_delta_step", log_decay)
    log_decay, beta = log_decay.astype(jnp.float32), beta.astype(jnp.float32)
    operands = q, k, v, log_decay, beta, state
    found = choose_plan(
        "gated_delta_step", implementation, lambda: _step_plan(*operands), *operands
    )
    choice, call = chosen(found, implementation), (scale, normalize_qk, found)
    return _gated_delta_step(choice, call, *operands)


def _check(
    op: str,
    lines: dict[str, str],
    *,
    q: jax.Array,
    log_decay: jax.Array,
    **operands: jax.Array | None,
) -> None:
    if getattr(log_decay, "ndim", 0) == q.ndim:
        lines = lines | {"log_decay": lines["log_decay"].replace("]", ", Dk]")}
    sizes = check(op, lines, q=q, log_decay=log_decay, **operands)
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(f"{op}: v has {sizes['H']} heads, no multiple of the {sizes['Hk']} of q")


def plan(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> Plan | Reason:
    """How a kernel computes ``gated_delta``."""
    from pallas_kernels.gated_delta import kernel

    return kernel.plan(q, k, v, g)


def _step_plan(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> Plan | Reason:
    from pallas_kernels.gated_delta import step_kernel

    return step_kernel.plan(q, k, v)


def _kernel(
    static: tuple[float, bool, DeltaPlan], q: jax.Array, k: jax.Array, *operands: jax.Array
) -> _Pair:
    from pallas_kernels.gated_delta import kernel

    scale, normalize_qk, plan = static
    q, k = (_normalized(x) if normalize_qk else x for x in (q, k))
    v, g, beta, initial_state, lengths = operands
    return kernel.gated_delta_forward(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        lengths=lengths,
        segments=plan.segments,
    )


def _normalized(x: jax.Array) -> jax.Array:
    return normalized(x.astype(jnp.float32)).astype(x.dtype)


def _xla(static: _Static, *operands: jax.Array) -> _Pair:
    *inputs, initial_state, lengths = operands
    return _chunked(static, *zero_padding(lengths, *inputs), initial_state=initial_state)[0]


def _chunked(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None,
) -> tuple[_Pair, jax.Array]:
    """((o, state), the states that ``chunked_backward`` takes)."""
    scale, normalize_qk, _ = static
    if initial_state is None:
        # It is made from v, so that inside a shard_map it varies over the same axes as v.
        zero = jnp.zeros_like(v[:, 0, :, None], jnp.float32)
        initial_state = jnp.broadcast_to(zero, (*zero.shape[:2], q.shape[-1], zero.shape[-1]))
    *out, borders = chunked_forward(
        q, k, v, *_columns(q, g, beta), initial_state, scale=scale, normalize_qk=normalize_qk
    )
    return tuple(out), borders


def _columns(q: jax.Array, g: jax.Array, beta: jax.Array) -> _Pair:
    """log_decay and beta with a last axis."""
    return (g[..., None] if g.ndim < q.ndim else g), beta[..., None]


def _forward(
    choice: OpChoice, static: _Static, *operands: jax.Array
) -> tuple[_Pair, jax.Array | tuple[()]]:
    if choice.implementation == "mosaic":  # which keeps no states
        return _gated_delta(choice, static, *operands), ()
    *inputs, initial_state, lengths = operands
    return _chunked(static, *zero_padding(lengths, *inputs), initial_state=initial_state)


def _backward(
    choice: OpChoice,
    static: _Static,
    operands: _Operands,
    saved: jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array | None, ...]:
    *inputs, initial_state, lengths = operands
    q, k, v, g, beta, d_o = zero_padding(lengths, *inputs, d_o)
    if choice.implementation == "mosaic":
        *gradients, d_initial = _kernel_backward(
            choice, static, q, k, v, g, beta, initial_state, d_o, d_state
        )
    else:
        *gradients, d_initial = _chunked_gradients(static, q, k, v, g, beta, saved, d_o, d_state)
    d_initial = None if initial_state is None else d_initial
    return (*zero_padding(lengths, *gradients), d_initial, None)


def _chunked_gradients(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    borders: jax.Array,
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array, ...]:
    scale, normalize_qk, _ = static
    d_q, d_k, d_v, d_g, d_beta, d_initial = chunked_backward(
        q,
        k,
        v,
        *_columns(q, g, beta),
        borders,
        d_o,
        d_state,
        scale=scale,
        normalize_qk=normalize_qk,
    )
    return d_q, d_k, d_v, d_g.reshape(g.shape), d_beta.reshape(beta.shape), d_initial


def _gradients_from_inputs(static: _Static, *operands: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, g, beta, initial_state, d_o, d_state = operands
    borders = _chunked(static, q, k, v, g, beta, initial_state)[1]
    return _chunked_gradients(static, q, k, v, g, beta, borders, d_o, d_state)


def _gradients(
    static: tuple[float, bool, DeltaPlan], q: jax.Array, k: jax.Array, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    from pallas_kernels.gated_delta import kernel

    scale, normalize_qk, plan = static
    if not plan.backward:
        return _gradients_from_inputs(static, q, k, *operands)
    v, g, beta, initial_state, d_o, d_state = operands
    pull = None
    if normalize_qk:
        (q, k), pull = jax.vjp(lambda *x: tuple(map(_normalized, x)), q, k)
    d_q, d_k, *rest = kernel.gated_delta_backward(
        q,
        k,
        v,
        g,
        beta,
        d_o,
        d_state,
        scale=scale,
        initial_state=initial_state,
        segments=plan.segments,
    )
    if pull is not None:
        d_q, d_k = pull((d_q, d_k))
    return d_q, d_k, *rest


def _step_xla(static: _Static, *operands: jax.Array) -> _Pair:
    scale, normalize_qk, _ = static
    return step(*operands, scale=scale, normalize_qk=normalize_qk)


def _step_kernel(
    static: tuple[float, bool, DeltaStepPlan], q: jax.Array, k: jax.Array, *operands: jax.Array
) -> _Pair:
    from pallas_kernels.gated_delta import step_kernel

    scale, normalize_qk, plan = static
    q, k = (_normalized(x) if normalize_qk else x for x in (q, k))
    return step_kernel.gated_delta_step(q, k, *operands, scale=scale, plan=plan)


_kernel_backward = Op("gated_delta", _gradients_from_inputs, _gradients)
_gated_delta = Op("gated_delta", _xla, _kernel, forward=_forward, backward=_backward)
_gated_delta_step = Op("gated_delta_step", _step_xla, _step_kernel)

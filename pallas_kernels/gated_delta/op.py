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

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan
from pallas_kernels.gated_delta.chunked import chunked_backward, chunked_forward, step
from pallas_kernels.gated_delta.reference import normalized
from pallas_kernels.recurrence.op import Heads, Recurrence, Results, check_decay, default_scale
from pallas_kernels.transform import Op, chosen

if TYPE_CHECKING:
    from pallas_kernels.gated_delta.kernel import DeltaPlan
    from pallas_kernels.gated_delta.step_kernel import DeltaStepPlan

_Options = tuple[float, bool]  # scale, normalize_qk
_Call = tuple[_Options, "DeltaPlan"]
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
    heads = Heads(q, k, v, log_decay, beta)
    more = {"initial_state": initial_state, "lengths": lengths, "segment_ids": segment_ids}
    _check("gated_delta", _OPERANDS, heads, **more)
    options = default_scale(q, scale), normalize_qk
    return _gated_delta(options, heads, initial_state, lengths, segment_ids, implementation)


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
    heads = Heads(q, k, v, log_decay, beta)
    _check("gated_delta_step", _STEP_OPERANDS, heads, state=state)
    check_decay("gated_delta_step", log_decay)
    heads = heads.in_float32()
    find = lambda: _step_plan(heads)  # noqa: E731
    found = choose_plan("gated_delta_step", implementation, find, *heads, state)
    call = (default_scale(q, scale), normalize_qk), found
    return _gated_delta_step(chosen(found, implementation), call, heads, state)


def _check(op: str, lines: dict[str, str], heads: Heads, **more: jax.Array | None) -> None:
    if getattr(heads.log_decay, "ndim", 0) == heads.q.ndim:
        lines = lines | {"log_decay": lines["log_decay"].replace("]", ", Dk]")}
    sizes = heads.check(op, lines, **more)
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(f"{op}: v has {sizes['H']} heads, no multiple of the {sizes['Hk']} of q")


def plan(heads: Heads) -> Plan | Reason:
    """How a kernel computes ``gated_delta``."""
    from pallas_kernels.gated_delta import kernel

    return kernel.plan(heads)


def _normalized(heads: Heads) -> Heads:
    q, k = (normalized(x.astype(jnp.float32)).astype(x.dtype) for x in heads[:2])
    return heads._replace(q=q, k=k)


def _kernel(
    call: _Call, heads: Heads, state: jax.Array | None, lengths: jax.Array | None
) -> Results:
    from pallas_kernels.gated_delta import kernel

    (scale, normalize_qk), plan = call
    heads = _normalized(heads) if normalize_qk else heads
    given = {"initial_state": state, "lengths": lengths, "segments": plan.segments}
    return kernel.gated_delta_forward(heads, scale=scale, **given)


def _gradients(
    call: _Call,
    heads: Heads,
    state: jax.Array | None,
    kept: tuple[()],
    d_o: jax.Array,
    d_state: jax.Array,
) -> tuple[Heads, jax.Array] | None:
    from pallas_kernels.gated_delta import kernel

    (scale, normalize_qk), plan = call
    if not plan.backward:
        return None
    pull = None
    if normalize_qk:
        heads, pull = jax.vjp(_normalized, heads)
    given: dict[str, Any] = {"initial_state": state, "segments": plan.segments}
    gradients, d_initial = kernel.gated_delta_backward(heads, d_o, d_state, scale=scale, **given)
    return gradients if pull is None else pull(gradients)[0], d_initial


_gated_delta = Recurrence(
    "gated_delta", chunked_forward, chunked_backward, plan, _kernel, _gradients
)


def _step_plan(heads: Heads) -> Plan | Reason:
    from pallas_kernels.gated_delta import step_kernel

    return step_kernel.plan(*heads[:3])


def _step_xla(call: tuple[_Options, Plan | None], heads: Heads, state: jax.Array) -> Results:
    return step(heads, state, *call[0])


def _step_kernel(call: tuple[_Options, DeltaStepPlan], heads: Heads, state: jax.Array) -> Results:
    from pallas_kernels.gated_delta import step_kernel

    (scale, normalize_qk), plan = call
    heads = _normalized(heads) if normalize_qk else heads
    return step_kernel.gated_delta_step(*heads, state, scale=scale, plan=plan)


_gated_delta_step = Op("gated_delta_step", _step_xla, _step_kernel)

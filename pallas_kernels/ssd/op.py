"""State-space duality: the recursion of Mamba-2 for whole sequences.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = q_t S_t

per row and head, with g = log_decay <= 0 one number a token and head.  The heads of a group share q
(C of Mamba-2) and k (B); v is dt x.  It is gated linear attention whose key channels decay alike,
and ``ssd_as_gla`` says it so: the XLA form, the gradients, other shapes than the kernel's and a
step are GLA's.  Contract, state and gates as in ``gla.op``.

Source: arXiv 2405.21060.  Left out: the skip D, the norm and the convolution, which
``jaxllama.model.mixers.ssm`` has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, is_empty
from pallas_kernels.gla.op import gla
from pallas_kernels.recurrence.op import Heads, Results, check_decay
from pallas_kernels.transform import Op, chosen

if TYPE_CHECKING:
    from pallas_kernels.ssd.kernel import SSDPlan

_OPERANDS = {
    "q": "float [B, T, G, Dk]",
    "k": "q [B, T, G, Dk]",
    "v": "q [B, T, H, Dv]",
    "log_decay": "float [B, T, H]",
    "initial_state": "float32 [B, H, Dk, Dv] ?",
    "lengths": "int32 [B] ?",
}


def ssd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    return_state: bool = True,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the outputs of Mamba-2's recursion for whole sequences, and the state after them.

    Parameters
    ----------
    q, k : [B, T, G, Dk]
        float32, bfloat16 or float16; q, k and v have one dtype. Each is shared by H / G heads.
    v : [B, T, H, Dv]
        The values.
    log_decay : float [B, T, H]
        Natural logarithm of the decay, from -inf to 0.
    initial_state : float32 [B, H, Dk, Dv], optional
        State before the first token; zeros by default.
    lengths : int32 [B], optional
        Number of valid tokens of each row; T by default. Later tokens are padding and may hold
        anything, even NaN: their output is 0, and they do not change the state.
    return_state : bool
        Whether to return the state.
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
        Names the operand whose shape or dtype does not fit, or G if it does not divide H. Also for
        a positive log_decay, unless jit, grad or vmap hides its values.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | q, k, v, log_decay, initial_state: those of ``gla`` |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    heads = Heads(q, k, v, log_decay)
    heads.check("ssd", _OPERANDS, initial_state=initial_state, lengths=lengths)
    _check_groups(q, v)
    check_decay("ssd", log_decay, lengths)
    heads = heads.in_float32()
    leaves = jax.tree.leaves(heads)
    found = choose_plan("ssd", implementation, lambda: plan(heads), *leaves)
    if found is None or is_empty(heads):
        o, state = _form(implementation)(None, heads, initial_state, lengths)
    else:
        o, state = _ssd(chosen(found, implementation), found, heads, initial_state, lengths)
    return o, state if return_state else None


def ssd_as_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return GLA's operands: q and k ``[..., H, Dk]`` of every head, v, and log_decay
    ``[..., H, Dk]`` of every key channel."""
    q, k = (jnp.repeat(x, v.shape[-2] // x.shape[-2], axis=-2) for x in (q, k))
    return q, k, v, jnp.broadcast_to(log_decay[..., None], k.shape)


def _check_groups(q: jax.Array, v: jax.Array) -> None:
    groups, heads = q.shape[-2], v.shape[-2]
    if groups < 1 or heads % groups:
        raise ValueError(f"ssd: q has {groups} groups, which do not divide the {heads} heads of v")


def plan(heads: Heads) -> Plan | Reason:
    """How the kernel computes ``ssd``."""
    from pallas_kernels.ssd import kernel

    return kernel.plan(heads)


def _kernel(
    plan: SSDPlan, heads: Heads, state: jax.Array | None, lengths: jax.Array | None
) -> Results:
    from pallas_kernels.ssd import kernel

    given = {"initial_state": state, "lengths": lengths, "segments": plan.segments}
    return kernel.ssd_forward(heads, **given)


def _form(implementation: Implementation | None) -> Callable[..., Results]:
    """Return GLA's form of a call."""

    def form(
        plan: SSDPlan | None, heads: Heads, state: jax.Array | None, lengths: jax.Array | None
    ) -> Results:
        del plan
        given: Any = {"initial_state": state, "lengths": lengths, "implementation": implementation}
        o, state = gla(*ssd_as_gla(*heads[:4]), scale=1.0, **given)
        assert state is not None
        return o, state

    return form


# The gradients are GLA's, by its kernels where they can run.
_ssd = Op("ssd", _form("xla"), _kernel, derivative=_form(None))

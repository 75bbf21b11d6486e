"""Attention of a decode step, from the projection to the heads: RoPE, cache write, attention.

    q, k, v = rope_and_write(qkv, ..., slots);  out = decode_attention(q, k, v, slots + 1)

Contract: those two ops', where a row sees all keys up to its new token's own.  A row whose slot is
outside of [0, S), or on no page of the pool, writes nothing and sees nothing: zeros.  A norm of q's
and k's heads may come first (``norm_heads``).

For one or two rows of a 16-bit cache it is one kernel. On a CPU it is one handler for
float32, with any cache but int4.  For all others it is those ops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import rope_cache
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.operands import Attended, Cached, NewTokens
from pallas_kernels.attention.rope_cache import (
    Result,
    norm_heads,
    place,
    rope_and_write,
    rope_and_write_tokens,
)
from pallas_kernels.cpu import attend as cpu
from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, device_of
from pallas_kernels.qtensor import QTensor
from pallas_kernels.transform import Op, chosen

# Window, scale, eps, the kernel's plan.
_Static = tuple[int | None, float, float | None, Plan | None]
_Weights = tuple[jax.Array, jax.Array]  # of the norm of q's heads, of k's


def rope_and_attend(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    slots: jax.Array,
    *,
    norm: tuple[jax.Array, jax.Array, float] | None = None,
    window: int | None = None,
    scale: float | None = None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | QTensor, jax.Array | QTensor]:
    """Rotate new tokens, write them to the cache, and return their attention and the cache.

    This is ``rope_and_write`` and then ``decode_attention``, as one kernel where there is one. Each
    token sees the keys of its row in slots up to its own.

    Parameters
    ----------
    qkv : float [B, N + 2K, H], or [B, T, N + 2K, H] for T tokens of a row
        The heads of q, then of k, then of v.
    cos, sin : float32 [B, H / 2], or [B, T, H / 2]
        The rotary tables at each token's position.
    k, v : float or QTensor [B, S, K, H]
        The cache. Donate it to have it updated in place.
    slots : int32 [B], or [B, T]
        Each token's place in its row of the cache, all different within a row.
    norm : (float [H], float [H], float), optional
        Weights of q's heads and of k's heads, and epsilon, of an RMSNorm of each head before the
        rotation.
    window, scale, sinks : optional
        As in ``decode_attention``.
    table : int32 [B, M], optional
        As in ``rope_and_write``.
    implementation : "xla", "mosaic", "cpu" or None
        "mosaic" and "cpu" name the one kernel. None takes it where it can run, and otherwise the
        two ops with their own choices.

    Returns
    -------
    heads : [B, N, H], or [B, T, N, H]
        The attention's outputs, in qkv's dtype.
    k, v : float or QTensor
        The cache with the new tokens.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | floats, and k, v or their scales: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    x = NewTokens(qkv, cos, sin, k, v, slots, table)
    rope_cache.check_tokens("rope_and_attend", x, is_several=qkv.ndim == 4)
    if window is not None and window < 1:
        raise ValueError(f"rope_and_attend: window {window} is below 1")
    n = qkv.shape[-2] - 2 * k.shape[2]
    if sinks is not None and sinks.shape != (n,):
        raise ValueError(f"rope_and_attend: sinks {sinks.shape} is not [{n}]")
    weights, eps = (None, None) if norm is None else _checked_norm(qkv, norm)
    static = window, float(qkv.shape[-1] ** -0.5 if scale is None else scale), eps
    find = functools.partial(plan, qkv, k, weights, table)
    on_cpu = functools.partial(
        cpu.new_token_plan, qkv, k, table, norm is not None, sinks is not None
    )
    found = choose_plan("rope_and_attend", implementation, find, qkv, k, v, cpu=on_cpu)
    call = *static, found
    if found is None:
        return _composed(call, x, weights, sinks, implementation)
    return _rope_and_attend(chosen(found, implementation), call, x, weights, sinks)


def _checked_norm(
    qkv: jax.Array, norm: tuple[jax.Array, jax.Array, float]
) -> tuple[_Weights, float]:
    """Return (weights, eps). Raises ValueError for a weight that is not of a head's width."""
    weights = norm[:2]
    for name, weight in zip("qk", weights, strict=True):
        if weight.shape != qkv.shape[-1:]:
            raise ValueError(
                f"rope_and_attend: norm of {name} {weight.shape} is not [{qkv.shape[-1]}]"
            )
    return weights, float(norm[2])


def _composed(
    static: _Static,
    x: NewTokens,
    weights: _Weights | None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = "xla",
) -> Result:
    """Compute the two ops one after the other, with their own choices."""
    window, scale, eps, _ = static
    if weights is not None and eps is not None:  # both or neither
        x = x._replace(qkv=norm_heads(x.qkv, x.k.shape[2], weights, eps))
    slots, table = x.slots, x.table
    options: dict[str, Any] = {"table": table, "implementation": implementation}
    write = rope_and_write_tokens if x.qkv.ndim == 4 else rope_and_write
    q, *_, k, v = write(*x[:6], **options)
    if table is None:
        inside = (slots >= 0) & (slots < k.shape[1])
    else:
        by_row = slots.reshape(slots.shape[0], -1)
        inside = (place(k, by_row, table)[0] < k.shape[0]).reshape(slots.shape)
    seen = jnp.where(inside, slots + 1, 0)
    options |= {"window": window, "scale": scale, "sinks": sinks}
    return decode_attention(q, k, v, seen, **options), k, v


def tokens_have_a_steps_bits(qkv: jax.Array, k: Cached, table: jax.Array | None) -> bool:
    """Does each of several tokens get the same bits as in a call with that token alone?

    This holds where the CPU's handler runs.  qkv: ``[B, T, N + 2K, H]``.
    """
    token = jax.ShapeDtypeStruct((qkv.shape[0], *qkv.shape[2:]), qkv.dtype)
    on_cpu = device_of((qkv, k)).platform == "cpu"
    return on_cpu and isinstance(cpu.new_token_plan(token, k, table), cpu.CpuPlan)


def _kernel(
    static: _Static, x: NewTokens, weights: _Weights | None, sinks: jax.Array | None
) -> Result:
    window, scale, eps, plan = static
    options: dict[str, Any] = {"window": window, "scale": scale, "plan": plan}
    if isinstance(plan, cpu.CpuPlan):
        return cpu.rope_and_attend(*x[:6], weights, x.table, sinks, **options, eps=eps or 0.0)
    from pallas_kernels.attention import direct

    sinks = None if sinks is None else sinks.astype(jnp.float32)
    attended = Attended(x.qkv, x.k, x.v, x.slots, x.table, sinks)
    return direct.attend(attended, (x.cos, x.sin, *(weights or ())), **options, eps=eps)


_rope_and_attend = Op("rope_and_attend", _composed, _kernel)


def plan(
    qkv: jax.Array,
    k: jax.Array | QTensor,
    weights: Sequence[jax.Array] | None = None,
    table: jax.Array | None = None,
) -> Plan | Reason:
    """How the one kernel computes the call."""
    from pallas_kernels.attention import direct
    from pallas_kernels.attention.pages import as_rows

    if qkv.ndim == 4:
        return Reason(f"qkv has {qkv.shape[1]} tokens a row; the kernel takes one")
    if isinstance(k, QTensor):
        codes = jnp.dtype(k.dtype).name
        return Reason(f"k is a cache of {codes} codes; the kernel writes 16-bit floats")
    if isinstance(written := rope_cache.plan(qkv, k), Reason):
        return written
    if weights and (reason := lacking("clusters")):
        return Reason(f"{reason}; without them norms of heads take too many registers")
    for weight in weights or ():
        if weight.dtype != qkv.dtype:
            return Reason(f"a norm of heads with weights {weight.dtype.name}")
    if isinstance(rows := as_rows(k, table), Reason):
        return rows
    batch, capacity, n_kv, _ = rows.shape
    group = qkv.shape[1] // n_kv - 2
    found = direct.plan((qkv, rows, group * n_kv))
    if not isinstance(found, Reason):
        return found
    card = gpu().attention
    return Reason(
        f"k holds {batch} rows, {capacity} tokens, {n_kv} kv heads, {group} query heads to each; "
        f"the kernel takes {card.direct_rows} rows, {card.direct_tokens} tokens, 8 to each"
    )

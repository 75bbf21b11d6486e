"""Attention of a decode step, from the projection to the heads: RoPE, cache write, attention.

    q, k, v = rope_and_write(qkv, ..., slots);  out = decode_attention(q, k, v, slots + 1)

Contract: those two ops', where a row sees all keys up to its new token's own.  A row whose slot is
outside of [0, S) writes nothing and sees nothing: zeros.

For one or two rows of a 16-bit cache it is one kernel; for all others it is those ops.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import rope_cache
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_cache import Cached
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan
from pallas_kernels.qtensor import QTensor
from pallas_kernels.transform import Op, chosen

_Static = tuple[int | None, float, Any]  # window, scale, the kernel's plan
_Result = tuple[jax.Array, Cached, Cached]


def rope_and_attend(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    slots: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | QTensor, jax.Array | QTensor]:
    """``qkv [B, N + 2K, H]`` (heads of q, then k, then v) and a cache ``k, v [B, S, K, H]`` ->
    (heads ``[B, N, H]``, k, v with the new tokens).

    cos, sin, slots: as ``rope_and_write`` takes them.  window, scale: as ``decode_attention`` does.
    implementation: "mosaic" is the one kernel; None that, or the two ops with their own choices.

    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | qkv, cos, sin, and k, v or their scales: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |

    Raises what the two ops raise; NotImplementedError when "mosaic" is asked for and the one kernel
    does not take the call.
    """
    rope_cache.check_operands("rope_and_attend", qkv, cos, sin, k, v, slots)
    if window is not None and window < 1:
        raise ValueError(f"rope_and_attend: window {window} is below 1")
    found = choose_plan("rope_and_attend", implementation, lambda: plan(qkv, k), qkv, k, v)
    if found is not None:
        scale = qkv.shape[-1] ** -0.5 if scale is None else float(scale)
        call = window, scale, found
        return _rope_and_attend(chosen(found, implementation), call, qkv, cos, sin, k, v, slots)
    q, k, v = rope_cache.rope_and_write(qkv, cos, sin, k, v, slots, implementation=implementation)
    seen = jnp.where((slots >= 0) & (slots < k.shape[1]), slots + 1, 0)
    out = decode_attention(q, k, v, seen, window=window, scale=scale, implementation=implementation)
    return out, k, v


def _kernel(call: _Static, qkv: jax.Array, cos: jax.Array, sin: jax.Array, k: Cached, v: Cached,
            slots: jax.Array) -> _Result:  # fmt: skip
    from pallas_kernels.attention import direct

    window, scale, plan = call
    return direct.attend(qkv, (cos, sin), slots, k, v, window=window, scale=scale, plan=plan)


def _xla(call: _Static, qkv: jax.Array, cos: jax.Array, sin: jax.Array, k: Cached, v: Cached,
         slots: jax.Array) -> _Result:  # fmt: skip
    window, scale, _ = call
    return rope_and_attend(
        qkv, cos, sin, k, v, slots, window=window, scale=scale, implementation="xla"
    )


_rope_and_attend = Op("rope_and_attend", _xla, _kernel)


def plan(qkv: jax.Array, k: jax.Array | QTensor) -> Plan | Reason:
    """How the one kernel computes the call."""
    from pallas_kernels.attention import direct

    if isinstance(k, QTensor):
        codes = jnp.dtype(k.dtype).name
        return Reason(f"k is a cache of {codes} codes; the kernel writes 16-bit floats")
    if isinstance(written := rope_cache.plan(qkv, k), Reason):
        return written
    batch, capacity, n_kv, _ = k.shape
    group = qkv.shape[1] // n_kv - 2
    found = direct.plan((qkv, k, group * n_kv))
    if not isinstance(found, Reason):
        return found
    return Reason(
        f"k holds {batch} rows, {capacity} tokens, {n_kv} kv heads, {group} query heads to each; "
        f"the kernel takes {direct.ROWS} rows, {direct.TOKENS} tokens, 8 to each"
    )

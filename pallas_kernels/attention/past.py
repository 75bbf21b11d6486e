"""Attention of many new tokens over an int8 past: scores of int8 codes, values as 16-bit floats.

    attend(q, k, v, n_keys) -> (out, log)

q is rounded to int8 token by token and head by head, as the cache's keys are.  It adds the same
error to a score as their rounding: 0.7% of the result for scores of deviation 1, and 1.6% for 6.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.rope_cache import quantize_kv
from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor

_TILE = 128  # queries, and keys, of a block


@dataclasses.dataclass(frozen=True)
class PastPlan:
    """A block for each 128 queries of a head: there is nothing to choose."""

    kernel: ClassVar[str] = "past_kernel"

    def __str__(self) -> str:
        return ""


def plan(q: jax.Array, k: jax.Array | QTensor) -> PastPlan | Reason:
    """How the kernel takes ``q[B, T, N, H]`` over ``k[B, S, K, H]``."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    if not isinstance(k, QTensor) or k.dtype != jnp.int8:
        return Reason(f"k is {k.dtype.name}; the kernel multiplies int8 codes")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return Reason(f"q is {q.dtype.name}; the kernel takes bfloat16 and float16")
    if q.shape[-1] not in (64, 128):
        return Reason(f"q has heads of {q.shape[-1]} features; the kernel takes 64 and 128")
    for name, size in (("q", q.shape[1]), ("k", k.shape[1])):
        if size % _TILE:
            return Reason(f"{name} has {size} tokens; the kernel takes multiples of {_TILE}")
    return PastPlan()


def attend(
    q: jax.Array, k: QTensor, v: jax.Array, n_keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return attention of ``q`` over each row's first ``n_keys`` keys, and its log-sum-exp.

    Parameters
    ----------
    q: ``[B, T, N, H]``.
    k, v: ``[B, S, K, H]``; v is zeros past the first ``n_keys`` tokens.
    n_keys: int32 ``[B]``.  A row without keys is computed with one key of zeros.

    Returns
    -------
    ``[B, T, N, H]``, and the logarithm of each sum of exponentials, float32 ``[B, T, N]``.
    """
    from pallas_kernels.attention import past_kernel

    codes = quantize_kv(q, "int8")
    is_key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] < n_keys[:, None]
    scale = jnp.where(is_key[:, :, None], k.scale[..., 0], 0.0)
    # A q of zeros has scale 0, and 0 times -inf, the score of a masked key, would be NaN.
    factor = jnp.maximum(codes.scale[..., 0], 1e-30) * (q.shape[-1] ** -0.5 * math.log2(math.e))
    factor, scale = (jnp.swapaxes(x, 1, 2) for x in (factor, scale))
    out, log = past_kernel.attend(codes.q, factor, k.q, scale, v, jnp.maximum(n_keys, 1))
    return out, jnp.swapaxes(log, 1, 2)

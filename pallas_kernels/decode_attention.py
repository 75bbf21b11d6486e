"""Attention of one query token per row over a cache of keys and values: the op of a decode step.

    out[b, n] = softmax_s(scale * q[b, n] . k[b, s, n // G]) v[b, s, n // G],   s < lengths[b]

with G = N / K query heads to a kv head, and with a sliding window only the last ``window`` of those
keys.  Contract: what a cache holds at s >= lengths[b] reaches nobody, NaN included; a row of length
0 gives zeros; a row's result depends on no other row, and is the same bits every time.

A quantized cache is read as it is stored, words and scales, and never exists as floats in memory.

Source: FlashAttention's online softmax (arXiv 2205.14135), split over keys as in Flash-Decoding.
Left out: more than one query token (``blockwise_attention`` serves those), gradients, paging.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blockwise_attention import blockwise_attention
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rope_cache import unspread, unusual

DIRECT_ROWS, DIRECT_TOKENS = 2, 32768


def decode_attention(
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    lengths: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``q [B, N, H]`` over ``k, v [B, S, K, H]`` -> ``[B, N, H]`` in q's dtype.

    k, v: float arrays, or QTensors as ``rope_cache.quantize_kv`` makes them of int8, int4 or
        float8_e4m3fn.  q is in the cache's basis, as ``rope_and_write`` gives it, and the result
        in the model's (``rope_cache.spread``, ``unspread``).
    lengths: int32 ``[B]``, keys that each row sees, 0 to S, the newest token's own included.
    window: of those only the last ``window``.
    scale: of the scores, H ** -0.5 by default.
    implementation: "xla", "mosaic" or None; see ``pallas_kernels.dispatch``.

    Raises ValueError naming the argument for a wrong shape or dtype; NotImplementedError when
    "mosaic" is asked for and has no kernel for the call.
    """
    _check(q, k, v, lengths, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    reason = unsupported(q, k, v)
    if choose("decode_attention", implementation, reason) == "mosaic":
        if is_direct(k, q.shape[1] // k.shape[2]):
            from pallas_kernels import decode_attention_direct as kernel

            return kernel.attend(q, None, lengths, k, v, window=window, scale=scale)
        from pallas_kernels import decode_attention_mosaic as kernel

        return kernel.decode_attention(q, k, v, lengths, window=window, scale=scale)
    out = blockwise_attention(q[:, None], k, v, lengths[:, None] - 1, window=window, scale=scale)
    return unspread(v, out[:, 0])


def is_direct(k: jax.Array | QTensor, group: int) -> bool:
    """Whether the kernel for one or two rows takes a cache: it has 64 SMs at most at work, 8 to a
    kv head of a row, and no launches beside its own (``decode_attention_direct``)."""
    batch, capacity, n_kv, _ = k.shape
    longest = DIRECT_TOKENS
    if batch * n_kv < 8:
        longest //= 8
    if isinstance(k, QTensor):
        longest //= 16
    return batch <= DIRECT_ROWS and batch * capacity <= longest and group <= 8


def unsupported(q: jax.Array, k: jax.Array | QTensor, v: jax.Array | QTensor) -> str | None:
    """Why the Mosaic kernel does not take this call, or None."""
    h = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype.name}; the kernel multiplies bfloat16 and float16"
    if h not in (64, 128, 256):
        return f"heads of {h} features; the kernel takes 64, 128 and 256"
    name = jnp.dtype(k.dtype).name
    if q.shape[1] // k.shape[2] > 64:
        return f"{q.shape[1]} query heads on {k.shape[2]} kv heads; the kernel takes 64 to one"
    if not isinstance(k, QTensor):
        return None if k.dtype == q.dtype else f"a {name} cache with {q.dtype.name} queries"
    if name not in ("int8", "int4", "float8_e4m3fn"):
        return f"cache words {name}; the kernel reads int8, int4 and float8_e4m3fn"
    for part in (k, v):
        if reason := unusual(part):
            return reason
        if part.group_size % 64 or part.scale.shape[-1] not in (1, 2, 4):
            return f"one scale per {part.group_size} features; the kernel takes multiples of 64"
    if k.scale.shape != v.scale.shape:
        return "keys and values have scales of different shapes"
    return None


def decode_attention_reference(
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    lengths: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """The definition in float32, every score of every row at once; never optimised."""
    batch, n, h = q.shape
    cache = v
    k, v = (x if isinstance(x, jax.Array) else dequantize(x) for x in (k, v))
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    capacity, n_kv = k.shape[1:3]
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    visible = position < lengths[:, None]
    if window is not None:
        visible &= position >= lengths[:, None] - window
    v = jnp.where(visible[:, :, None, None], v, 0.0)
    grouped = q.astype(jnp.float32).reshape(batch, n_kv, n // n_kv, h)
    grouped = grouped * (h**-0.5 if scale is None else scale)
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1)[..., None]
    out = jnp.einsum("bkgs,bskh->bkgh", weights, v, precision=lax.Precision.HIGHEST)
    out = out / jnp.where(total > 0, total, 1.0)
    return unspread(cache, out.reshape(batch, n, h)).astype(q.dtype)


def _check(q, k, v, lengths, window) -> None:
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"decode_attention: q is {q.dtype}{list(q.shape)}, not float [B, N, H]")
    batch, n, h = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[0] != batch or x.shape[3] != h:
            raise ValueError(f"decode_attention: {name} is {x.shape}; q {q.shape} wants "
                             f"[{batch}, S, K, {h}]")  # fmt: skip
        if not isinstance(x, QTensor) and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"decode_attention: {name} is {x.dtype}, neither float nor a QTensor")
    if k.shape != v.shape or isinstance(k, QTensor) != isinstance(v, QTensor):
        raise ValueError(f"decode_attention: k {k.shape} and v {v.shape} are not alike")
    if k.dtype != v.dtype:
        raise ValueError(f"decode_attention: k is {k.dtype} and v is {v.dtype}")
    if n % k.shape[2]:
        raise ValueError(f"decode_attention: {n} query heads on {k.shape[2]} kv heads")
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"decode_attention: lengths is {lengths.dtype}{list(lengths.shape)}, "
                         f"not int32 [{batch}]")  # fmt: skip
    if window is not None and window < 1:
        raise ValueError(f"decode_attention: window {window} is below 1")

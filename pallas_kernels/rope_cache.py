"""The first step of attention while decoding: rotate q and k, and write k and v into the cache.

    q, k, v = split(qkv);  q = rope(q);  k_cache[b, slots[b]] = rope(k);  v_cache[b, slots[b]] = v

Contract: the cache is returned updated, in place where the caller donates it; a slot at or past the
capacity writes nothing, which is how idle rows are kept out.  A quantized cache gets the words and
scales that ``quantize_kv`` would give.

RoPE is the "rotate half" form: feature i of the first half of a head turns with feature i of the
second (RoFormer, arXiv 2104.09864).

An int4 cache holds k and v in another basis (``spread``), because four bits do not survive outlier
channels: q comes out in it too.  ``decode_attention`` brings its result back; what
``blockwise_attention`` gives, ``unspread`` does.

Left out: more than one token per row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.hadamard import hadamard
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import reciprocal, to_words

Cached = jax.Array | QTensor


def rope_and_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cached, Cached]:
    """``qkv [B, N + 2K, H]`` (heads of q, then k, then v) and a cache ``k, v [B, S, K, H]`` ->
    (q ``[B, N, H]`` that meets these keys, k, v).

    cos, sin: float32 ``[B, H / 2]``, the tables at each row's position.
    slots: int32 ``[B]``, where in its row of the cache each token goes, >= 0.
    implementation: "xla", "mosaic" or None; see ``pallas_kernels.dispatch``.

    Raises ValueError for shapes that do not fit together; NotImplementedError when "mosaic" is
    asked for and has no kernel for the call.
    """
    check("rope_and_write", qkv, cos, sin, k, v, slots)
    n_kv = k.shape[2]
    n = qkv.shape[1] - 2 * n_kv
    if choose("rope_and_write", implementation, unsupported(qkv, k, v)) == "mosaic":
        from pallas_kernels import rope_cache_mosaic

        return rope_cache_mosaic.rope_and_write(qkv, cos, sin, k, v, slots)
    q, new_k, new_v = jnp.split(qkv[:, None], (n, n + n_kv), axis=2)
    tables = cos[:, None], sin[:, None]
    q, new_k = rotate(q, *tables), rotate(new_k, *tables)
    q, new_k, new_v = spread(k, q, new_k, new_v)
    return q[:, 0], store(k, new_k, slots[:, None]), store(v, new_v, slots[:, None])


def check(op: str, qkv, cos, sin, k: Cached, v: Cached, slots) -> None:
    """ValueError where the shapes of ``rope_and_write`` do not fit together."""
    batch, heads, h = qkv.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != h or heads < 3 * k.shape[2]:
        raise ValueError(f"{op}: qkv {qkv.shape} does not fit k {k.shape}, v {v.shape}")
    if cos.shape != (batch, h // 2) or sin.shape != cos.shape or slots.shape != (batch,):
        raise ValueError(f"{op}: cos {cos.shape}, sin {sin.shape}, slots {slots.shape} "
                         f"do not fit qkv {qkv.shape}")  # fmt: skip


def unsupported(qkv: jax.Array, k: Cached, v: Cached) -> str | None:
    """Why the Mosaic kernel does not take this call, or None."""
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        return f"activations {qkv.dtype.name}; the kernel rotates bfloat16 and float16"
    h = qkv.shape[-1]
    if h not in (64, 128, 256):
        return f"heads of {h} features; the kernel takes 64, 128 and 256"
    if not isinstance(k, QTensor):
        both = k.dtype == v.dtype == qkv.dtype
        return None if both else f"a {k.dtype.name} cache for {qkv.dtype.name} activations"
    if jnp.dtype(k.dtype).name not in ("int8", "int4", "float8_e4m3fn"):
        return f"cache words {jnp.dtype(k.dtype).name}"
    if k.dtype != v.dtype or k.scale.shape != v.scale.shape:
        return "keys and values are quantized differently"
    if reason := unusual(k) or unusual(v):
        return reason
    if k.group_size not in (h, 64):
        return f"one scale per {k.group_size} features; the kernel takes 64 and {h}"
    return None


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate ``x[B, T, heads, H]`` by tables ``[B, T, H / 2]``; float32 inside, x's dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate((first * c - second * s, second * c + first * s), -1).astype(x.dtype)


def spread(kv: Cached, *heads: jax.Array) -> tuple[jax.Array, ...]:
    """q, k or v ``[..., H]`` in the basis of the cache ``kv``: rotated by ``hadamard`` for int4,
    as they are for any other."""
    return tuple(hadamard(x) for x in heads) if kv.dtype == jnp.int4 else heads


def unspread(kv: Cached, out: jax.Array) -> jax.Array:
    """Attention over the cache ``kv``, ``[..., H]``, back in the basis of the model."""
    return hadamard(out) if kv.dtype == jnp.int4 else out


def quantize_kv(x: jax.Array, dtype: str) -> QTensor:
    """Keys or values ``[..., H]`` as a cache QTensor.

    int8, float8_e4m3fn: one float32 scale per token and head, the largest magnitude's.
    int4: 16 levels from the smallest to the largest of each 64 features (of the head where 64 does
        not divide it), as a float16 scale and a float16 zero point: x = scale q + zero (FlexGen's
        group-wise compression, arXiv 2303.06865, section 5).  Rounding to float16 costs no more
        than an array of float16 would; magnitudes past 65504 are clipped to it.
    """
    head_dim = x.shape[-1]
    if dtype != "int4":
        return quantize(x, dtype, group_size=head_dim, scale_dtype=jnp.float32)
    group = 64 if head_dim % 64 == 0 else head_dim
    parts = jnp.clip(x.astype(jnp.float32), -65504.0, 65504.0)
    parts = parts.reshape(*x.shape[:-1], head_dim // group, group)
    low, high = jnp.min(parts, axis=-1), jnp.max(parts, axis=-1)
    scale = ((high - low) * (1 / 15)).astype(jnp.float16)
    step = scale.astype(jnp.float32)
    # Words run from -8 to 7: their middle stands for the group's.
    zero = ((low + high) * 0.5 + step * 0.5).astype(jnp.float16)
    steps = (parts - zero.astype(jnp.float32)[..., None]) * reciprocal(scale)[..., None]
    return QTensor(to_words(steps, dtype).reshape(x.shape), scale, zero)


def unusual(kv: QTensor) -> str | None:
    """How a cache differs from what ``quantize_kv`` makes of its words, or None."""
    zero = None if kv.zero is None else kv.zero.dtype
    if kv.dtype == jnp.int4:
        if kv.scale.dtype == zero == jnp.float16:
            return None
        return "an int4 cache whose scales and zero points are not float16"
    if kv.scale.dtype == jnp.float32 and zero is None:
        return None
    return "the cache's scales are not float32 without zero points"


def store(kv: Cached, new: jax.Array, slots: jax.Array) -> Any:
    """``new[B, T, K, H]`` into ``kv[B, S, K, H]`` at ``slots[B, T]``; slots past S are dropped."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    if isinstance(kv, QTensor):
        return jax.tree.map(
            lambda o, n: o.at[rows, slots].set(n, mode="drop"),
            kv, quantize_kv(new, jnp.dtype(kv.dtype).name),
        )  # fmt: skip
    return kv.at[rows, slots].set(new.astype(kv.dtype), mode="drop")

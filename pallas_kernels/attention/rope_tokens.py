"""The first step of attention of many new tokens: rotate q and k, write k and v into the cache.

    q, k, v = split(qkv);  q, k = rope(q), rope(k);  cache[b, slots[b, t]] = k, v

``rope_cache.rope_and_write`` of T tokens a row, with its contract (slots, tables of pages, the
basis of an int4 cache).  k and v also come back with the rounding of the cache.  A prompt's tokens
attend to one another through these arrays, without reading the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention import rope_cache
from pallas_kernels.attention.plain import rotate
from pallas_kernels.attention.rope_cache import PAGED, Cached, store, to_cache_basis
from pallas_kernels.dispatch import Implementation, choose_plan
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.transform import Op, chosen

_OPERANDS = {
    "qkv": "float [B, T, N + 2K, H+]",
    "k": "float|QTensor [B, S, K+, H]",
    "v": "k|QTensor [B, S, K, H]",
    "cos": "float32 [B, T, H / 2]",
    "sin": "float32 [B, T, H / 2]",
    "slots": "int32 [B, T]",
    "table": "int32 [B, M+] ?",
}
_Written = tuple[jax.Array, jax.Array, jax.Array, Cached, Cached]


def rope_and_write_tokens(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    *,
    table: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> _Written:
    """Rotate several new tokens a row and write them to the cache.

    qkv: ``[B, T, N + 2K, H]``, the heads of q, then of k, then of v.
    k, v: the cache, ``[B, S, K, H]``.
    cos, sin: float32 ``[B, T, H / 2]``.
    slots: int32 ``[B, T]``, all different within a row.

    Returns (q ``[B, T, N, H]``, the new k and v ``[B, T, K, H]`` as they are stored, k, v).
    Everything else, jax's transformations too, is as for ``rope_cache.rope_and_write``.
    """
    op = "rope_and_write_tokens"
    check_operands(op, qkv, cos, sin, k, v, slots, table)
    found = choose_plan(op, implementation, lambda: rope_cache.plan(qkv, k), qkv, k, v)
    return _op(chosen(found, implementation), None, qkv, cos, sin, k, v, slots, table)


def check_operands(
    op: str,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    table: jax.Array | None,
) -> None:
    """ValueError that names what ``rope_and_write_tokens`` cannot take."""
    lines = _OPERANDS if table is None else _OPERANDS | PAGED
    sizes = check(op, lines, qkv=qkv, k=k, v=v, cos=cos, sin=sin, slots=slots, table=table)
    rope_cache.check_heads(op, sizes, qkv, cos, sin, k, v)


def _kernel(
    _: None,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    table: jax.Array | None,
) -> _Written:
    from pallas_kernels.attention import rope_cache_kernel

    return rope_cache_kernel.rope_and_write_tokens(qkv, cos, sin, k, v, slots, table)


def _xla(
    _: None,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    table: jax.Array | None,
) -> _Written:
    n_kv = k.shape[2]
    n = qkv.shape[2] - 2 * n_kv
    q, new_k, new_v = jnp.split(qkv, (n, n + n_kv), axis=2)
    q, new_k = rotate(q, cos, sin), rotate(new_k, cos, sin)
    q, new_k, new_v = to_cache_basis(k, q, new_k, new_v)
    kept = as_stored(k, new_k), as_stored(v, new_v)
    return q, *kept, store(k, new_k, slots, table), store(v, new_v, slots, table)


_op = Op("rope_and_write_tokens", _xla, _kernel)


def as_stored(kv: Cached, new: jax.Array) -> jax.Array:
    """New keys or values as a reader of the cache ``kv`` would get them, rounding included."""
    if isinstance(kv, QTensor):
        return dequantize(rope_cache.quantize_kv(new, jnp.dtype(kv.dtype).name), new.dtype)
    return new.astype(kv.dtype).astype(new.dtype)

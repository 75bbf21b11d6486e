"""Caches of keys and values as attention reads them, made and read by numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax


def cache_of(x: np.ndarray, dtype: str) -> jax.Array | QTensor:
    """Keys or values ``[B, S, K, H]`` as a cache holds them: ``quantize_kv`` in numpy, which
    compiles nothing."""
    x = np.asarray(x)
    if dtype not in ("int8", "int4", "float8_e4m3fn"):
        return as_jax(x.astype(jnp.dtype(dtype)))
    x = x.astype(np.float64)
    if dtype != "int4":
        most = 127 if dtype == "int8" else 448
        scale = (np.abs(x).max(-1, keepdims=True) / most).astype(np.float32)
        codes = np.rint(x / scale) if dtype == "int8" else x / scale
        return QTensor(as_jax(codes.astype(jnp.dtype(dtype))), as_jax(scale))
    parts = x.reshape(*x.shape[:-1], -1, 64 if x.shape[-1] % 64 == 0 else x.shape[-1])
    low, high = parts.min(-1), parts.max(-1)
    scale = ((high - low) / 15).astype(np.float16)
    zero = ((low + high) / 2 + scale / 2).astype(np.float16)
    codes = np.rint((parts - zero[..., None]) / scale[..., None].astype(np.float32))
    codes = np.clip(codes, -8, 7).reshape(x.shape)
    return QTensor(as_jax(codes.astype(jnp.int4)), as_jax(scale), as_jax(zero))


def values_of(kv: jax.Array | QTensor) -> np.ndarray:
    """What a cache holds, in float64 and in its own basis."""
    if not isinstance(kv, QTensor):
        return np.asarray(kv).astype(np.float64)
    q = np.asarray(kv.q).astype(np.float64)
    parts = q.reshape(*kv.scale.shape, -1) * np.asarray(kv.scale, np.float64)[..., None]
    if kv.zero is not None:
        parts = parts + np.asarray(kv.zero, np.float64)[..., None]
    return parts.reshape(q.shape)


def rotation(h: int) -> np.ndarray:
    """Sylvester's matrix of width h over its square root."""
    matrix = np.ones((1, 1))
    while len(matrix) < h:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return matrix * h**-0.5


def in_own_basis(v: Any, out: np.ndarray) -> np.ndarray:
    """An attention's result, which of an int4 cache is in the cache's basis: ``rotation`` of the
    largest power of two that divides the head."""
    if v.dtype != jnp.int4:
        return out
    size = out.shape[-1] & -out.shape[-1]
    return (out.reshape(*out.shape[:-1], -1, size) @ rotation(size)).reshape(out.shape)


def attended(q, k, v, lengths, window=None, sinks=None) -> np.ndarray:
    """Attention in float64, in the cache's basis: ``q [B, N, H]``, ``lengths [B]``, or of several
    tokens of a row ``q [B, T, N, H]``, ``lengths [B, T]``."""
    q, k, v = map(values_of, (q, k, v))
    tokens = q.reshape(len(q), -1, *q.shape[-2:])
    group, out = q.shape[-2] // k.shape[2], np.zeros_like(tokens)
    for (row, t), length in np.ndenumerate(np.asarray(lengths).reshape(tokens.shape[:2])):
        seen = slice(0 if window is None else max(0, length - window), length)
        for head in range(q.shape[-2]) if length else ():
            scores = k[row, seen, head // group] @ tokens[row, t, head] * q.shape[-1] ** -0.5
            sink = -np.inf if sinks is None else np.float64(sinks[head])
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            out[row, t, head] = weights @ v[row, seen, head // group] / total
    return out.reshape(q.shape)


def softmax(q, k, v, lengths, window=None, sinks=None) -> np.ndarray:
    """``attended`` in the queries' basis."""
    return in_own_basis(v, attended(q, k, v, lengths, window, sinks))


def heads_of(batch, capacity, n, n_kv, width, cache="float32", dtype="float32", size=1.0, seed=0):
    """(q, k, v, lengths) of a step; lengths from none to all of the capacity."""
    rng = np.random.default_rng(seed)
    q = as_jax((size * rng.standard_normal((batch, n, width))).astype(jnp.dtype(dtype)))
    k, v = (cache_of(rng.standard_normal((batch, capacity, n_kv, width)), cache) for _ in range(2))
    some = [0, 1, capacity, capacity // 2 + 3, capacity - 1, 17, 130]
    lengths = [min(some[i % len(some)], capacity) for i in range(batch)]
    return q, k, v, as_jax(lengths, jnp.int32)


def poisoned(kv: Any, lengths: Any) -> Any:
    """NaN in everything past the lengths that can hold one."""

    def put(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        past = np.arange(leaf.shape[1]) >= np.asarray(lengths)[:, None]
        raw = np.array(leaf)
        raw[past] = np.nan
        return as_jax(raw)

    return jax.tree.map(put, kv)


def in_pages(rows: Any, page: int, needed: Any, seed: int = 0) -> tuple[Any, jax.Array]:
    """(pools of pages, table) of caches ``[B, S, ...]``, of whose rows b the first ``needed[b]``
    tokens are to be found: scattered over a pool half of which is garbage."""
    batch, capacity = jax.tree.leaves(rows)[0].shape[:2]
    entries = capacity // page
    owned = -(-np.minimum(np.asarray(needed), capacity) // page)
    rng = np.random.default_rng(seed)
    table = rng.choice(np.asarray([2**31 - 1, -(2**31), -1, 0, 10**6]), (batch, entries))
    own = np.arange(entries) < owned[:, None]
    table[own] = rng.permutation(2 * batch * entries)[: own.sum()]

    def pool(leaf: jax.Array) -> jax.Array:
        pages = np.asarray(leaf).reshape(batch * entries, page, *leaf.shape[2:])
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        garbage = np.nan if is_float else -8 if leaf.dtype == jnp.int4 else -128
        out = np.full((2 * batch * entries, *pages.shape[1:]), garbage).astype(leaf.dtype)
        out[table[own]] = pages[own.ravel()]
        return as_jax(out)

    return jax.tree.map(pool, rows), as_jax(table, jnp.int32)


def same(got: Any, want: Any) -> None:
    """The same arrays to the bit."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(*(np.asarray(z).astype(np.float32) for z in (x, y)))

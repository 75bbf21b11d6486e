"""A product of codes by codes in XLA.

    codes(static, x, w, bias, low_rank)       x is a QTensor, with a low-rank term or None

It is a form of a ``transform.Op``; ``static.out`` is the result's dtype.  On a CPU, W8A8 goes
through float32, in blocks of K short enough to be exact (XLA's CPU integer dot runs at under 1
GB/s).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fixed_sums import by_blocks
from pallas_kernels.matmul.call import LowRankTerm, Static
from pallas_kernels.matmul.weight_only import Dims, finish, map_tiles, weight_only
from pallas_kernels.qtensor import QTensor, take_columns
from pallas_kernels.transform import equally_varying

_LAST: Dims = (((1,), (1,)), ((), ()))
# |sum of 1024 products of int8| <= 2^24, which float32 holds exactly.
_EXACT_BLOCK = 1024


def codes(
    static: Static, x: QTensor, w: QTensor, bias: jax.Array | None, low_rank: LowRankTerm | None
) -> jax.Array:
    """The product of codes by codes, ``x[M, K]`` times ``w[N, K]`` transposed."""
    if w.columns is not None:
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None, interleaved=False)
    if w.dtype == jnp.int4:
        return finish(_int4_sums(x, w) * x.scale.astype(jnp.float32), bias, static.out)
    if x.scale.shape[1] > 1:
        sums = _sums_by_group(x, w)
    else:
        scales = x.scale.astype(jnp.float32) * w.scale.astype(jnp.float32)[:, 0]
        sums = pair_sums(x.q, w.q) * scales
    if low_rank is not None:
        sums = sums + low_rank_sums(*low_rank)
    return finish(sums, bias, static.out)


def _sums_by_group(x: QTensor, w: QTensor) -> jax.Array:
    """``x[M, K]`` times ``w[N, K]`` of codes with scales ``[M, G]`` and ``[N, G]``, in float32."""

    def by_group(t: QTensor) -> tuple[jax.Array, jax.Array]:
        rows = t.q.reshape(t.shape[0], t.scale.shape[1], -1).swapaxes(0, 1)
        return rows, t.scale.astype(jnp.float32).T

    def add(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        xq, x_scale, wq, w_scale = group
        return total + pair_sums(xq, wq) * (x_scale[:, None] * w_scale), None

    zero = jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
    zero, groups = equally_varying((zero, (*by_group(x), *by_group(w))))
    return lax.scan(add, zero, groups)[0]


def _int4_sums(x: QTensor, w: QTensor) -> jax.Array:
    """Codes of x times ``w[N, K]`` of int4, in float32, without x's scales."""
    if w.unit is not None and x.dtype == jnp.int8:
        return pair_sums(x.q, widened(w.q, w.scale, w.zero)) * w.unit[:, 0]
    alone = Static(jnp.dtype(jnp.float32))
    return weight_only(alone, x.q.astype(jnp.bfloat16), w.in_one_level, None)


def pair_sums(xq: jax.Array, wq: jax.Array) -> jax.Array:
    """``xq[M, K]`` times ``wq[N, K]`` of codes, without scales, in float32."""
    kind, tiled = (jnp.int32, _int8_tiled) if xq.dtype == jnp.int8 else (jnp.float32, _fp8_tiled)
    whole = functools.partial(lax.dot_general, dimension_numbers=_LAST, preferred_element_type=kind)
    return lax.platform_dependent(xq, wq, default=whole, cpu=tiled).astype(jnp.float32)


def widened(q: jax.Array, multiple: jax.Array, zero: jax.Array | None) -> jax.Array:
    """int4 codes times their groups' int8 scales, which is int8 (``rounding.multiples``)."""
    steps = q.astype(jnp.int8).reshape(*multiple.shape, -1)
    if zero is not None:
        steps = steps - zero[..., None]
    return (steps * multiple[..., None]).reshape(q.shape)


def _int8_tiled(xq: jax.Array, wq: jax.Array) -> jax.Array:
    k = xq.shape[1]
    starts = range(0, k, _EXACT_BLOCK)
    columns = xq.astype(jnp.float32).T

    def one(tile: jax.Array) -> jax.Array:
        codes = tile.astype(jnp.float32)
        parts = [
            jnp.dot(
                codes[:, i : i + _EXACT_BLOCK],
                columns[i : i + _EXACT_BLOCK],
                precision=lax.Precision.HIGHEST,
            ).astype(jnp.int32)
            for i in starts
        ]
        return functools.reduce(jnp.add, parts)

    return map_tiles(one, wq).T


def _fp8_tiled(xq: jax.Array, wq: jax.Array) -> jax.Array:
    columns = xq.astype(jnp.float32).T

    def one(tile: jax.Array) -> jax.Array:
        return jnp.dot(tile.astype(jnp.float32), columns, precision=lax.Precision.HIGHEST)

    return map_tiles(one, wq).T


def low_rank_sums(inner: jax.Array, second: tuple[jax.Array, ...]) -> jax.Array:
    """float32 ``[..., sum N_s]``: of each source ``[..., R]`` of inner times ``second[N_s, R]``."""
    precision = lax.Precision.HIGHEST if inner.dtype == jnp.float32 else None

    def sums(inner: jax.Array, second: tuple[jax.Array, ...]) -> jax.Array:
        parts = [
            jnp.einsum(
                "...r,nr->...n", part, b, precision=precision, preferred_element_type=jnp.float32
            )
            for part, b in zip(jnp.split(inner, len(second), axis=-1), second, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    return by_blocks(sums, inner, second, axes=inner.ndim - 1)

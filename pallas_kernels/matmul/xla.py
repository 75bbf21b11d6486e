"""The XLA forms of a product with a QTensor, and its derivative with float operands.

    weight_only(static, x, w, bias)           x[M, K] in floats
    codes(static, x, w, bias, low_rank)       x is a QTensor, with a low-rank term or None

These are forms of a ``transform.Op``; ``static.out`` is the result's dtype.

On accelerators a weight-only product is the shortest of the forms in ``weight_only``.  On a CPU it
goes by tiles of rows that stay in cache, so that the weight is never held as floats; W8A8 goes
through float32 there too, in blocks of K short enough to be exact (XLA's CPU integer dot runs at
under 1 GB/s).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.derivative import is_codes
from pallas_kernels.dispatch import device_of
from pallas_kernels.matmul.call import LowRankTerm, Static
from pallas_kernels.matmul.predict import shortest_form
from pallas_kernels.matmul.weight_only import BY_FORM, Dims, Form, dot, float4_values
from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.rounding import NIBBLES
from pallas_kernels.transform import OpChoice
from pallas_kernels.types import Device

Tree = TypeVar("Tree", bound=jax.Array | QTensor | tuple[jax.Array, ...])
_Operands = tuple[jax.Array, QTensor, jax.Array | None]
_LAST: Dims = (((1,), (1,)), ((), ()))
# |sum of 1024 products of int8| <= 2^24, which float32 holds exactly.
_EXACT_BLOCK = 1024
# Rows of a weight that are dequantized at a time on a CPU; measured best among 64..576.
_CPU_TILE = 192
# Bytes of a weight that a backward pass dequantizes at once on an accelerator.
_WHOLE_BYTES = 1 << 29


def weight_only(static: Static, x: jax.Array, w: QTensor, bias: jax.Array | None) -> jax.Array:
    """``x[M, K]`` times ``w[N, K]`` transposed.

    w's columns are in order.  ``unit`` multiplies the sums.
    """
    if w.unit is not None:
        alone = Static(jnp.dtype(jnp.float32))
        sums = weight_only(alone, x, dataclasses.replace(w, unit=None), None)
        return finish(sums * w.unit[:, 0], bias, static.out)

    def on_accelerator(x: jax.Array, w: QTensor) -> jax.Array:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), w)
        form = _form(device_of(()), x.shape, x.dtype, shapes)
        return BY_FORM[form](x, w.scale, w.zero, w.q)

    is_packed = w.dtype.name in NIBBLES and w.group_size % 2 == 0
    tiled = _packed_tiled if is_packed else _weight_only_tiled
    sums = lax.platform_dependent(x, w, default=on_accelerator, cpu=tiled)
    return finish(sums, bias, static.out)


@functools.lru_cache(maxsize=1024)
def _form(device: Device, shape: tuple[int, ...], dtype: jnp.dtype, w: QTensor) -> Form:
    """Return ``shortest_form``, which layers that are alike ask for again and again.

    device: whose costs are compared. w: the weight's shapes.
    """
    del device
    return shortest_form(jax.ShapeDtypeStruct(shape, dtype), w)


def weight_only_gradients(
    choice: OpChoice, static: Static, operands: _Operands, saved: object, dy: jax.Array
) -> tuple[jax.Array, QTensor, jax.Array | None]:
    """Return the cotangents of ``weight_only``'s operands; codes have none."""
    x, w, bias = operands
    dy = dy.astype(jnp.float32)
    dx = contract_rows(dy, w, x.dtype).astype(x.dtype)
    # dW is formed only if a caller wants a gradient of scale or zero; jit drops it otherwise.
    dw = outer_sums(dy, x).reshape(*w.scale.shape, -1)
    codes = w.q.astype(jnp.float32).reshape(dw.shape)
    dzero = dunit = None
    if w.zero is not None and jnp.issubdtype(w.zero.dtype, jnp.integer):
        codes = codes - w.zero.astype(jnp.float32)[..., None]
    elif w.zero is not None:
        dzero = jnp.sum(dw, axis=-1).astype(w.zero.dtype)
    dscale: jax.Array | None = jnp.sum(dw * codes, axis=-1)
    if w.unit is not None:
        by_scale = dscale * w.scale.astype(jnp.float32)
        dunit = jnp.sum(by_scale, axis=-1, keepdims=True).astype(w.unit.dtype)
    dscale = None if is_codes(w.scale) else dscale.astype(w.scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx, dataclasses.replace(w, q=None, scale=dscale, zero=dzero, unit=dunit), dbias


def codes(
    static: Static, x: QTensor, w: QTensor, bias: jax.Array | None, low_rank: LowRankTerm | None
) -> jax.Array:
    """The product of codes by codes, ``x[M, K]`` times ``w[N, K]`` transposed."""
    if w.dtype == jnp.int4:
        return finish(_int4_sums(x, w) * x.scale.astype(jnp.float32), bias, static.out)
    scales = x.scale.astype(jnp.float32) * w.scale.astype(jnp.float32)[:, 0]
    sums = pair_sums(x.q, w.q) * scales
    if low_rank is not None:
        sums = sums + low_rank_sums(*low_rank)
    return finish(sums, bias, static.out)


def _int4_sums(x: QTensor, w: QTensor) -> jax.Array:
    """Codes of x times ``w[N, K]`` of int4, in float32, without x's scales."""
    if w.unit is not None and x.dtype == jnp.int8:
        return pair_sums(x.q, widened(w.q, w.scale, w.zero)) * w.unit[:, 0]
    alone = Static(jnp.dtype(jnp.float32))
    return weight_only(alone, x.q.astype(jnp.bfloat16), w.in_one_level, None)


def finish(sums: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    """Add the bias in float32, then cast once."""
    return (sums if bias is None else sums + bias.astype(jnp.float32)).astype(out_dtype)


def pair_sums(xq: jax.Array, wq: jax.Array) -> jax.Array:
    """``xq[M, K]`` times ``wq[N, K]`` of codes, without scales, in float32."""
    whole, tiled = (_int8_whole, _int8_tiled) if xq.dtype == jnp.int8 else (_fp8_whole, _fp8_tiled)
    return lax.platform_dependent(xq, wq, default=whole, cpu=tiled).astype(jnp.float32)


def widened(q: jax.Array, multiple: jax.Array, zero: jax.Array | None) -> jax.Array:
    """int4 codes times their groups' int8 scales, which is int8 (``rounding.multiples``)."""
    steps = q.astype(jnp.int8).reshape(*multiple.shape, -1)
    if zero is not None:
        steps = steps - zero[..., None]
    return (steps * multiple[..., None]).reshape(q.shape)


def _weight_only_tiled(x: jax.Array, w: QTensor) -> jax.Array:
    """For CPUs: tiles of rows, each dequantized in cache and used at once."""
    columns = x.astype(jnp.float32).T

    def product(tile: QTensor) -> jax.Array:
        return jnp.dot(tile.floats(jnp.float32), columns, precision=lax.Precision.HIGHEST)

    return _map_tiles(product, w).T


def _packed_tiled(x: jax.Array, w: QTensor) -> jax.Array:
    """``_weight_only_tiled`` of 4-bit codes in groups of an even number of columns.

    Slices of 4-bit arrays make XLA's CPU backend unpack the whole array; slices of bytes do not.
    """
    columns = x.astype(jnp.float32).T
    pairs = lax.bitcast_convert_type(w.q.reshape(-1, w.shape[1] // 2, 2), jnp.int8)
    even, odd = columns[0::2], columns[1::2]
    dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)
    is_float4 = w.dtype == FLOAT4

    def product(tile: QTensor) -> jax.Array:
        if is_float4:
            codes = float4_values(tile.q), float4_values(tile.q >> 4)
        else:
            codes = (tile.q << 4) >> 4, tile.q >> 4
        low, high = (dataclasses.replace(tile, q=q) for q in codes)
        return dot(low.floats(jnp.float32), even) + dot(high.floats(jnp.float32), odd)

    return _map_tiles(product, dataclasses.replace(w, q=pairs)).T


def contract_rows(dy: jax.Array, w: QTensor, dtype: jnp.dtype) -> jax.Array:
    """``dy[M, N] @ dequantize(w)[N, K]`` in float32: on a CPU by tiles, on accelerators of operands
    in ``dtype``, in as few products as keep the dequantized rows below ``_WHOLE_BYTES``."""
    n, k = w.shape
    products = -(-n * k * jnp.dtype(dtype).itemsize // _WHOLE_BYTES)
    return lax.platform_dependent(
        dy,
        w,
        default=functools.partial(_contract, tile=-(-n // products), dtype=dtype),
        cpu=functools.partial(_contract, tile=min(n, _CPU_TILE), dtype=jnp.float32),
    )


def _contract(dy: jax.Array, w: QTensor, *, tile: int, dtype: jnp.dtype) -> jax.Array:
    n, k = w.shape
    main = n // tile * tile

    def product(dy: jax.Array, rows: QTensor) -> jax.Array:
        return dot(dy, rows.floats(dtype), (((1,), (0,)), ((), ())), dtype)

    def body(i: jax.Array, acc: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * tile, tile), w)
        return acc + product(lax.dynamic_slice_in_dim(dy, i * tile, tile, axis=1), rows)

    if tile == n:
        return product(dy, w)
    # Zeros of dy, so that inside a shard_map they vary over the axes that dy does.
    zero = jnp.zeros_like(dy[:, :1], jnp.float32)
    acc = lax.fori_loop(0, main // tile, body, jnp.broadcast_to(zero, (dy.shape[0], k)))
    if main < n:
        acc = acc + product(dy[:, main:], jax.tree.map(lambda a: a[main:], w))
    return acc


def outer_sums(dy: jax.Array, x: jax.Array) -> jax.Array:
    """``dy[M, N].T @ x[M, K]`` in float32, of operands in x's dtype; on a CPU in float32."""
    rows = (((0,), (0,)), ((), ()))
    return lax.platform_dependent(
        dy,
        x,
        default=lambda dy, x: dot(dy, x, rows, x.dtype),
        cpu=lambda dy, x: dot(dy, x, rows, jnp.float32),
    )


def _int8_whole(xq: jax.Array, wq: jax.Array) -> jax.Array:
    return lax.dot_general(xq, wq, _LAST, preferred_element_type=jnp.int32)


def _fp8_whole(xq: jax.Array, wq: jax.Array) -> jax.Array:
    return lax.dot_general(xq, wq, _LAST, preferred_element_type=jnp.float32)


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

    return _map_tiles(one, wq).T


def _fp8_tiled(xq: jax.Array, wq: jax.Array) -> jax.Array:
    columns = xq.astype(jnp.float32).T

    def one(tile: jax.Array) -> jax.Array:
        return jnp.dot(tile.astype(jnp.float32), columns, precision=lax.Precision.HIGHEST)

    return _map_tiles(one, wq).T


def _map_tiles(f: Callable[[Tree], jax.Array], w: Tree) -> jax.Array:
    """``f`` over tiles of rows of ``w`` (any pytree of ``[N, ...]``), results concatenated."""
    n = jax.tree.leaves(w)[0].shape[0]
    tile = min(n, _CPU_TILE)
    main = n // tile * tile
    tiles = jax.tree.map(lambda a: a[:main].reshape(main // tile, tile, *a.shape[1:]), w)
    out = f(jax.tree.map(lambda a: a[0], tiles)) if main == tile else lax.map(f, tiles)
    out = out.reshape(main, out.shape[-1])
    if main < n:
        out = jnp.concatenate([out, f(jax.tree.map(lambda a: a[main:], w))])
    return out


def low_rank_sums(inner: jax.Array, second: tuple[jax.Array, ...]) -> jax.Array:
    """float32 ``[..., sum N_s]``: of each source ``[..., R]`` of inner times ``second[N_s, R]``."""
    precision = lax.Precision.HIGHEST if inner.dtype == jnp.float32 else None
    parts = [
        jnp.einsum(
            "...r,nr->...n", part, b, precision=precision, preferred_element_type=jnp.float32
        )
        for part, b in zip(jnp.split(inner, len(second), axis=-1), second, strict=True)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

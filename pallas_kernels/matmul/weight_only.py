"""A weight-only product in XLA: ``x[M, K]`` times ``w[N, K]`` of codes, and its derivative.

    weight_only(static, x, w, bias)           x[M, K] in floats

It is a form of a ``transform.Op``; ``static.out`` is the result's dtype.  On a CPU it goes by tiles
of rows that stay in cache, so that the weight is never held as floats.  An accelerator has three
forms with the same float32 sums.  They differ in what they write beside the result:

    words  4-bit codes: multiply and reduce, one kernel that reads them once; for a row or two
    sums   a product with the codes themselves, then the scales; writes one float32 sum for each
           group, row of x and row of w.  With one scale a row these sums are the result
    copy   dequantize, then a product; writes a copy of the weight in x's dtype, because XLA does
           not fuse scales into the operand of its product.

Microseconds at 14336 x 4096 on an H200, int4 in groups of 128, M = 1 / 4 / 16: words 18 / 53 / -,
sums 23 / 26 / 38, copy 113 / 107 / 109; temporaries at M = 1: 16 KB, 4.6 MB, 117 MB.
``few_rows.plan`` and ``many_rows.plan`` hold the kernels; ``matmul.predict`` chooses the form.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from pallas_kernels.dispatch import device_of
from pallas_kernels.matmul.call import Static
from pallas_kernels.matmul.predict import WORD, Form, shortest_form
from pallas_kernels.operands import Device
from pallas_kernels.primitives.derivative import is_codes, late
from pallas_kernels.qtensor import FLOAT4, QTensor
from pallas_kernels.rounding import NIBBLES
from pallas_kernels.transform import OpChoice

Tree = TypeVar("Tree", bound=jax.Array | QTensor)
_Operands = tuple[jax.Array, QTensor, jax.Array | None]
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

    is_packed = w.dtype.name in NIBBLES and w.group_size % 2 == 0
    tiled = _packed_tiled if is_packed else _weight_only_tiled
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    sums = lax.platform_dependent(x, w, default=functools.partial(late, _elsewhere, out), cpu=tiled)
    return finish(sums, bias, static.out)


def _elsewhere(x: jax.Array, w: QTensor) -> jax.Array:
    """Return the sums float32 ``[M, N]`` by the form that an accelerator takes least time for."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), w)
    form = _form(device_of(()), x.shape, x.dtype, shapes)
    return BY_FORM[form](x, w.scale, w.zero, w.q)


@functools.lru_cache(maxsize=1024)
def _form(device: Device, shape: tuple[int, ...], dtype: jnp.dtype, w: QTensor) -> Form:
    """Return ``shortest_form``, which layers that are alike ask for again and again.

    device: whose costs are compared. w: the weight's shapes.
    """
    del device
    return shortest_form(jax.ShapeDtypeStruct(shape, dtype), w)


def finish(sums: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    """Add the bias in float32, then cast once."""
    return (sums if bias is None else sums + bias.astype(jnp.float32)).astype(out_dtype)


# On a CPU


def _weight_only_tiled(x: jax.Array, w: QTensor) -> jax.Array:
    """For CPUs: tiles of rows, each dequantized in cache and used at once."""
    columns = x.astype(jnp.float32).T

    def product(tile: QTensor) -> jax.Array:
        return jnp.dot(tile.floats(jnp.float32), columns, precision=lax.Precision.HIGHEST)

    return map_tiles(product, w).T


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

    return map_tiles(product, dataclasses.replace(w, q=pairs)).T


def map_tiles(f: Callable[[Tree], jax.Array], w: Tree) -> jax.Array:
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


# On an accelerator


def by_words(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    n, groups = scale.shape
    words = lax.bitcast_convert_type(q.reshape(n, groups, -1, WORD), jnp.int32)
    if q.dtype == FLOAT4:
        codes = [float4_values(words >> shift) for shift in range(0, 32, 4)]
    else:
        # A code is shifted to the upper end of its word and back, which extends its sign.
        codes = [((words << shift) >> 28).astype(jnp.float32) for shift in range(28, -1, -4)]
    # Neighbouring threads are to read neighbouring values of x, as they do of the words.
    by_code = x.astype(jnp.float32).reshape(-1, *words.shape[1:], WORD)
    by_code = lax.optimization_barrier(jnp.moveaxis(by_code, -1, 1))

    scales = scale.astype(jnp.float32)[..., None]

    def row(parts: jax.Array) -> jax.Array:
        sums = functools.reduce(jnp.add, map(operator.mul, codes, parts))
        return jnp.sum(sums * scales, axis=(1, 2))

    out = jnp.stack([row(by_code[i]) for i in range(x.shape[0])])
    if zero is None:
        return out
    # Zeros have a kernel of their own.  Beside the codes they take 0 to 6 times as long as these,
    # depending on the shape: at 17664 x 1024 54 us, where the codes take 9 and this 4.
    ones = lax.optimization_barrier(_ones(x, groups))
    return out + jnp.sum(ones[:, None] * _scaled(0.0, 1.0, scale, zero), axis=-1)


def by_sums(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    (m, k), (n, groups) = x.shape, scale.shape
    if m == 1:  # XLA makes a multiply-and-reduce of such a product, which takes longer
        x = jnp.pad(x, ((0, 1), (0, 0)))
    codes = q.astype(x.dtype)
    if groups == 1:
        sums = dot(x, codes, (((1,), (1,)), ((), ())), x.dtype)[None]
    else:
        by_group = x.reshape(-1, groups, k // groups), codes.reshape(n, groups, k // groups)
        sums = dot(*by_group, (((2,), (2,)), ((1,), (1,))), x.dtype)  # [groups, M, N]
    ones = None if zero is None else _ones(x[:m], groups).T[..., None]
    zeros = None if zero is None else zero.T[:, None]
    return jnp.sum(_scaled(sums[:, :m], ones, scale.T[:, None], zeros), axis=0)


def by_copy(x: jax.Array, scale: jax.Array, zero: jax.Array | None, q: jax.Array) -> jax.Array:
    w = QTensor(q, scale, zero).floats(x.dtype)
    return dot(x, w, (((1,), (1,)), ((), ())), x.dtype)


def float4_values(bits: jax.Array) -> jax.Array:
    """Return the float32 values of the float4_e2m1fn codes in the lowest four bits of integers.

    The code's exponent and mantissa are the same fields of a float16 of 2^-14 times the value.
    """
    bits = bits.astype(jnp.int32)
    halves = ((bits & 8) << 12) | ((bits & 7) << 9)
    return lax.bitcast_convert_type(halves.astype(jnp.int16), jnp.float16).astype(jnp.float32) * (
        2.0**14
    )


BY_FORM = {"words": by_words, "sums": by_sums, "copy": by_copy}


def _ones(x: jax.Array, groups: int) -> jax.Array:
    """Sums of x over the columns of each group, ``[M, groups]`` in float32."""
    return jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], groups, -1), axis=-1)


def _scaled(
    sums: jax.Array | float,
    ones: jax.Array | float | None,
    scale: jax.Array,
    zero: jax.Array | None,
) -> jax.Array:
    """Turn sums of x times codes into sums of x times weights; ones: sums of x alone."""
    scale = scale.astype(jnp.float32)
    if zero is None or ones is None:
        return sums * scale
    if jnp.issubdtype(zero.dtype, jnp.integer):
        return (sums - ones * zero.astype(jnp.float32)) * scale
    return sums * scale + ones * zero.astype(jnp.float32)


Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def dot(a: jax.Array, b: jax.Array, dims: Dims, dtype: DTypeLike) -> jax.Array:
    """``lax.dot_general`` of operands in ``dtype``, summed in float32."""
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        dims,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


# The derivative


def weight_only_gradients(
    choice: OpChoice, static: Static, operands: _Operands, saved: object, dy: jax.Array
) -> tuple[jax.Array, QTensor, jax.Array | None]:
    """Return the cotangents of ``weight_only``'s operands; codes have none."""
    x, w, bias = operands
    dy = dy.astype(jnp.float32)
    # In a loop over layers XLA would else transpose the codes of all layers before the loop.
    dx = contract_rows(dy, w, x.dtype).astype(x.dtype)
    # dW is formed only if a caller wants a gradient of scale or zero; jit drops it otherwise.
    dw = scale_gradients(w, outer_sums(dy, x))
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx, dw, dbias


def scale_gradients(w: QTensor, dw: jax.Array) -> QTensor:
    """The gradients of a weight's scales, floating zeros and units, of those of its floats.

    dw: float32 ``[..., K]``.  Codes have no gradient.
    """
    dw = dw.reshape(*w.scale.shape, -1)
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
    return dataclasses.replace(w, q=None, scale=dscale, zero=dzero, unit=dunit)


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
        # Else XLA would transpose the codes of all layers before a loop over layers.
        codes = with_layout_constraint(rows.q, Layout((0, 1)))
        floats = dataclasses.replace(rows, q=codes).floats(dtype)
        return dot(dy, floats, (((1,), (0,)), ((), ())), dtype)

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

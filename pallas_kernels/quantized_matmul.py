"""Matrix product with a quantized weight: ``x[..., K] @ w[N, K].T + bias``.

The scheme is read off the operands:

    x float  x  w int4 | int8 | float8_e4m3fn   weight-only: groups or rows, zeros of both kinds
    x int8   x  w int8                          W8A8: int32 accumulation, exact
    x fp8    x  w fp8                           FP8: float32 accumulation

In the last two ``x`` is a QTensor with one scale per token and ``w`` has one per output channel,
neither with zeros; both scales and the bias are applied to the accumulator, then one cast.
A ``w`` with ``columns`` (act-order) takes x's features in that order: one gather before anything
else, so that no kernel knows of it.

The XLA form dequantizes and dots.  On a CPU it does so by tiles of rows that stay in cache, so that
the weight is never held as floats; W8A8 goes through float32 there too, in blocks of K short enough
to be exact (XLA's CPU integer dot runs at under 1 GB/s).  The kernels are in
``quantized_matmul_decode_mosaic`` (up to 16 rows of x) and ``quantized_matmul_prefill_mosaic``; all
read the plain layout, so there is no re-layout at load.

Gradients: for float x, with respect to x, bias, w.scale and a floating w.zero; for QTensor x,
with respect to both scales and bias.  Words are integers and get none.

Leaves out: mixed pairs (int8 x int4, int8 x fp8), scales that vary along K for quantized x.
Sources: LLM.int8 (arXiv 2208.07339), AWQ (2306.00978), GPTQ (2210.17323), SmoothQuant (2211.10438).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose, wants_kernel
from pallas_kernels.qtensor import QTensor, dequantize, take_columns

_LAST = (((1,), (1,)), ((), ()))
# |sum of 1024 products of int8| <= 2^24, which float32 holds exactly.
_EXACT_BLOCK = 1024
# Rows of a weight that are dequantized at a time on a CPU; measured best among 64..576.
_CPU_TILE = 192


def quantized_matmul(
    x: jax.Array | QTensor,
    w: QTensor,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``x[..., K]`` times ``w[N, K]`` transposed -> ``[..., N]``.

    bias: ``[N]``, added in float32 before the only cast.
    out_dtype: x's dtype for float x; for a QTensor x the dtype of w.scale if that is 16 bits wide
        (the compute dtype of a checkpoint), else float32.
    Raises ValueError for shapes or dtypes that do not go together, NotImplementedError for
    ``implementation="mosaic"`` where no kernel covers the call.
    """
    check_operands(x, w, bias)
    if out_dtype is None:
        if not isinstance(x, QTensor):
            out_dtype = x.dtype
        else:
            out_dtype = w.scale.dtype if w.scale.dtype.itemsize == 2 else jnp.float32
    out_dtype = jnp.dtype(out_dtype)
    if w.columns is not None:
        x, w = take_columns(x, w.columns), dataclasses.replace(w, columns=None)
    lead = x.shape[:-1]
    rows = _flatten(x)
    asked = wants_kernel(implementation)
    reason = unsupported(rows, w, out_dtype=out_dtype) if asked else None
    if asked and implementation is None and reason is None:
        reason = _slower(rows, w)
    chosen = choose("quantized_matmul", implementation, reason)
    if isinstance(x, QTensor):
        out = _quantized_pair(rows.scale, w.scale, bias, rows.q, w.q, out_dtype, chosen)
    else:
        out = _weight_only(rows, w.scale, w.zero, bias, w.q, out_dtype, chosen)
    return out.reshape(*lead, w.shape[0])


def unsupported(
    x: jax.Array | QTensor, w: QTensor, *, out_dtype: DTypeLike | None = None
) -> str | None:
    """Why no Mosaic kernel takes ``x[M, K]`` and ``w[N, K]``, or None."""
    from pallas_kernels import quantized_matmul_decode_mosaic as decode
    from pallas_kernels import quantized_matmul_prefill_mosaic as prefill

    if _takes_decode(x, w, out_dtype):
        return None
    reason = prefill.unsupported(x, w, out_dtype=out_dtype)
    if reason is not None and not isinstance(x, QTensor) and x.shape[0] <= decode.MAX_TOKENS:
        reason = f"{decode.unsupported(x.shape[0], x.dtype, w)}; {reason}"
    return reason


def _slower(x: jax.Array | QTensor, w: QTensor) -> str | None:
    """Why the kernel that takes the call is not worth it, or None.  One row of int8 is a
    matrix-vector product: 14336 x 4096 18.2 us by XLA and 19.8 by the kernel, 4096 x 4096 7.5 and
    8.7; but 4096 x 14336, split along K, 21.9 and 18.8.  e4m3's is 19.5 and 17.3."""
    if not isinstance(x, QTensor) or x.dtype != jnp.int8 or x.shape[0] > 1:
        return None
    from pallas_kernels.quantized_matmul_prefill_mosaic import choose_pair_tile

    if choose_pair_tile(1, *w.shape).split > 1:
        return None
    return "XLA's matrix-vector product of one int8 row is faster"


def _takes_decode(x: jax.Array | QTensor, w: QTensor, out_dtype: DTypeLike | None) -> bool:
    """Few rows of floats are the decode kernel's; everything else the tiled kernels', at any M."""
    from pallas_kernels import quantized_matmul_decode_mosaic as decode

    if isinstance(x, QTensor):
        return False
    return decode.unsupported(x.shape[0], x.dtype, w, out_dtype) is None


def _kernel(x: jax.Array | QTensor, w: QTensor, bias, out_dtype) -> jax.Array:
    from pallas_kernels import quantized_matmul_decode_mosaic as decode
    from pallas_kernels import quantized_matmul_prefill_mosaic as prefill

    if isinstance(x, QTensor):
        return prefill.matmul_w8a8(x, w, bias, out_dtype)
    if _takes_decode(x, w, out_dtype):
        return decode.matmul(x, w, bias=bias, out_dtype=out_dtype)
    return prefill.matmul_weight_only(x, w, bias, out_dtype)


def check_operands(x: jax.Array | QTensor, w: QTensor, bias: jax.Array | None) -> None:
    """Raises ValueError, with the fact, for operands that make no product."""
    if not isinstance(w, QTensor) or w.ndim != 2:
        raise ValueError("quantized_matmul: w must be a QTensor of shape [N, K]")
    n, k = w.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"quantized_matmul: x {x.shape} does not contract with w {w.shape}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"quantized_matmul: bias {bias.shape} is not ({n},)")
    if isinstance(x, QTensor):
        pair = (jnp.dtype(x.dtype).name, jnp.dtype(w.dtype).name)
        if pair not in (("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn")):
            raise ValueError(f"quantized_matmul: no scheme multiplies {pair[0]} by {pair[1]} words")
        if x.columns is not None:
            raise ValueError("quantized_matmul: a quantized x has its columns in order")
        for name, t in (("x", x), ("w", w)):
            if t.scale.shape[-1] != 1 or t.zero is not None:
                raise ValueError(
                    f"quantized_matmul: with a quantized x, {name} needs one scale per row and no "
                    f"zeros, not {t.scale.shape[-1]} groups"
                    + (" with zeros" if t.zero is not None else "")
                )
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantized_matmul: x is {x.dtype}; floats or a QTensor are wanted")


def quantized_matmul_reference(
    x: jax.Array | QTensor, w: QTensor, *, bias: jax.Array | None = None
) -> jax.Array:
    """The same product written plainly, in float32; never optimised."""
    x32 = dequantize(x) if isinstance(x, QTensor) else x.astype(jnp.float32)
    out = jnp.einsum("...k,nk->...n", x32, dequantize(w), precision=lax.Precision.HIGHEST)
    return out if bias is None else out + bias.astype(jnp.float32)


def _flatten(x: jax.Array | QTensor) -> jax.Array | QTensor:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), x)


def _finish(acc: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)
    return acc.astype(out_dtype)


# --- weight-only ---------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _weight_only(x, scale, zero, bias, q, out_dtype, chosen):
    if chosen == "mosaic":
        return _kernel(x, QTensor(q, scale, zero), bias, out_dtype)
    acc = lax.platform_dependent(
        x, scale, zero, q, default=_weight_only_whole, cpu=_weight_only_tiled
    )
    return _finish(acc, bias, out_dtype)


def _weight_only_fwd(x, scale, zero, bias, q, out_dtype, chosen):
    out = _weight_only(x, scale, zero, bias, q, out_dtype, chosen)
    return out, (x, scale, zero, bias, q)


def _weight_only_bwd(out_dtype, chosen, saved, dy):
    x, scale, zero, bias, q = saved
    dy = dy.astype(jnp.float32)
    groups = scale.shape[-1]
    dx = _contract_rows(dy, QTensor(q, scale, zero)).astype(x.dtype)
    # dW is formed only if a caller wants a gradient of scale or zero; jit drops it otherwise.
    dw = lax.dot_general(
        dy, x.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    ).reshape(q.shape[0], groups, -1)
    words = q.astype(jnp.float32).reshape(dw.shape)
    dzero = None
    if zero is not None and jnp.issubdtype(zero.dtype, jnp.integer):
        words = words - zero.astype(jnp.float32)[..., None]
    elif zero is not None:
        dzero = jnp.sum(dw, axis=-1).astype(zero.dtype)
    dscale = jnp.sum(dw * words, axis=-1).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx, dscale, dzero, dbias, None


_weight_only.defvjp(_weight_only_fwd, _weight_only_bwd)


def _weight_only_whole(x, scale, zero, q):
    """For accelerators: XLA fuses the dequantization into one pass before the dot."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    w = dequantize(QTensor(q, scale, zero), x.dtype)
    return lax.dot_general(x, w, _LAST, precision=precision, preferred_element_type=jnp.float32)


def _weight_only_tiled(x, scale, zero, q):
    """For CPUs: tiles of rows, each dequantized in cache and used at once."""
    columns = x.astype(jnp.float32).T
    k = q.shape[1]
    if q.dtype != jnp.int4 or k // scale.shape[1] % 2:

        def one(tile: QTensor):
            return jnp.dot(dequantize(tile), columns, precision=lax.Precision.HIGHEST)

        return _map_tiles(one, QTensor(q, scale, zero)).T

    # Slices of int4 arrays make XLA's CPU backend unpack the whole array; slices of bytes do not.
    packed = lax.bitcast_convert_type(q.reshape(-1, k // 2, 2), jnp.int8)
    even, odd = columns[0::2], columns[1::2]

    def one_packed(tile: QTensor):
        low = (tile.q << 4) >> 4
        high = tile.q >> 4
        return jnp.dot(
            dequantize(dataclasses.replace(tile, q=low)), even, precision=lax.Precision.HIGHEST
        ) + jnp.dot(
            dequantize(dataclasses.replace(tile, q=high)), odd, precision=lax.Precision.HIGHEST
        )

    return _map_tiles(one_packed, QTensor(packed, scale, zero)).T


def _contract_rows(dy: jax.Array, w: QTensor) -> jax.Array:
    """``dy[M, N] @ dequantize(w)[N, K]`` in float32, by tiles of rows."""
    n, k = w.shape
    tile = _tile_rows(n)
    main = n // tile * tile

    def body(i, acc):
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * tile, tile), w)
        part = lax.dynamic_slice_in_dim(dy, i * tile, tile, axis=1)
        return acc + jnp.dot(part, dequantize(rows), precision=lax.Precision.HIGHEST)

    acc = lax.fori_loop(0, main // tile, body, jnp.zeros((dy.shape[0], k), jnp.float32))
    if main < n:
        rest = jax.tree.map(lambda a: a[main:], w)
        acc = acc + jnp.dot(dy[:, main:], dequantize(rest), precision=lax.Precision.HIGHEST)
    return acc


# --- quantized x quantized -----------------------------------------------------------------------


def _pair_sums(xq, wq):
    whole, tiled = (_int8_whole, _int8_tiled) if xq.dtype == jnp.int8 else (_fp8_whole, _fp8_tiled)
    return lax.platform_dependent(xq, wq, default=whole, cpu=tiled).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _quantized_pair(x_scale, w_scale, bias, xq, wq, out_dtype, chosen):
    if chosen == "mosaic":
        return _kernel(QTensor(xq, x_scale), QTensor(wq, w_scale), bias, out_dtype)
    scales = x_scale.astype(jnp.float32) * w_scale.astype(jnp.float32)[:, 0]
    return _finish(_pair_sums(xq, wq) * scales, bias, out_dtype)


def _quantized_pair_fwd(x_scale, w_scale, bias, xq, wq, out_dtype, chosen):
    out = _quantized_pair(x_scale, w_scale, bias, xq, wq, out_dtype, chosen)
    return out, (x_scale, w_scale, bias, xq, wq)


def _quantized_pair_bwd(out_dtype, chosen, saved, dy):
    x_scale, w_scale, bias, xq, wq = saved
    dy = dy.astype(jnp.float32)
    products = dy * _pair_sums(xq, wq)
    row, column = x_scale.astype(jnp.float32), w_scale.astype(jnp.float32)
    dx_scale = jnp.sum(products * column[:, 0], axis=1, keepdims=True).astype(x_scale.dtype)
    dw_scale = jnp.sum(products * row, axis=0)[:, None].astype(w_scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype)
    return dx_scale, dw_scale, dbias, None, None


_quantized_pair.defvjp(_quantized_pair_fwd, _quantized_pair_bwd)


def _int8_whole(xq, wq):
    return lax.dot_general(xq, wq, _LAST, preferred_element_type=jnp.int32)


def _fp8_whole(xq, wq):
    return lax.dot_general(xq, wq, _LAST, preferred_element_type=jnp.float32)


def _int8_tiled(xq, wq):
    k = xq.shape[1]
    starts = range(0, k, _EXACT_BLOCK)
    columns = xq.astype(jnp.float32).T

    def one(tile):
        words = tile.astype(jnp.float32)
        parts = [
            jnp.dot(
                words[:, i : i + _EXACT_BLOCK],
                columns[i : i + _EXACT_BLOCK],
                precision=lax.Precision.HIGHEST,
            ).astype(jnp.int32)
            for i in starts
        ]
        return functools.reduce(jnp.add, parts)

    return _map_tiles(one, wq).T


def _fp8_tiled(xq, wq):
    columns = xq.astype(jnp.float32).T

    def one(tile):
        return jnp.dot(tile.astype(jnp.float32), columns, precision=lax.Precision.HIGHEST)

    return _map_tiles(one, wq).T


def _tile_rows(n: int) -> int:
    return min(n, _CPU_TILE)


def _map_tiles(f, w):
    """``f`` over tiles of rows of ``w`` (any pytree of ``[N, ...]``), results concatenated."""
    n = jax.tree.leaves(w)[0].shape[0]
    tile = _tile_rows(n)
    main = n // tile * tile
    tiles = jax.tree.map(lambda a: a[:main].reshape(main // tile, tile, *a.shape[1:]), w)
    out = f(jax.tree.map(lambda a: a[0], tiles)) if main == tile else lax.map(f, tiles)
    out = out.reshape(main, out.shape[-1])
    if main < n:
        out = jnp.concatenate([out, f(jax.tree.map(lambda a: a[main:], w))])
    return out

"""Quantized matmul on Hopper for many rows: which tile, which operands, which kernel.

    matmul_w8a8         int8 x int8 and e4m3 x e4m3, any M      -> quantized_matmul_prefill_pair
    matmul_plain        bf16 x bf16 and f16 x f16, M <= 64      -> quantized_matmul_prefill_pair
    matmul_weight_only  bf16 or f16 x int4 or int8              -> quantized_matmul_prefill_weight

The tile comes from a small table of measured costs by ``choose_*``: the blocks are persistent, so a
product takes (rounds of tiles) x (time of a tile).  Weights stay in the plain ``[N, K]`` layout;
int4 stays packed up to the registers.

Accuracy.  int8: the int32 sum is exact.  FP8: the tensor cores add with about 14 bits, so every
256 columns the sum moves to a float32 register (``promote``): relative RMS error 2.2e-4 on normal
values, K = 4096, against 1.3e-3 for one long sum (which is what XLA's fp8 dot does).  Weight-only:
a weight is (q - zero) * scale rounded once to x's dtype where there are groups; with one scale per
row the scale multiplies the float32 accumulator instead.  f16 with groups is divided by the row's
largest scale, which the epilogue multiplies back, so that no scale over- or underflows f16.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import launching
from pallas_kernels.matmul.many_rows.pair import BLOCK_BYTES, PairTile, pair_matmul
from pallas_kernels.matmul.many_rows.pipeline import N_SM
from pallas_kernels.matmul.many_rows.plan import BLOCK_K, WeightTile
from pallas_kernels.matmul.many_rows.weight import weight_matmul
from pallas_kernels.qtensor import QTensor

# Microseconds of one round of tiles at K = 4096 on an H200 (bench_prefill prints them).
_PAIR = (
    (PairTile(128, 256, stages=4), 21.3),
    (PairTile(128, 192, stages=4), 16.3),
    (PairTile(128, 128, stages=6), 11.5),
    (PairTile(64, 128, stages=8, cluster=1), 8.5),
)
_WEIGHT = (
    (WeightTile(256, stages=4, width=16), 43.5),
    (WeightTile(128, stages=6), 31.0),
    (WeightTile(64, stages=8, parts=2), 22.5),
    (WeightTile(32, stages=12, parts=2), 18.0),
    (WeightTile(64, stages=8), 25.3),
)
# One tile of tokens: microseconds a slot of 64 columns (M = 64, int4).
_FEW_WEIGHT = (
    (WeightTile(64, 128, stages=12, store=16, parts=2), 0.285),
    (WeightTile(64, 256, stages=10, store=16, cluster=1), 0.56),
    (WeightTile(64, 128, stages=12, store=16, parts=2, cluster=1, split=2), 0.3),
    (WeightTile(64, 64, stages=12, store=16, parts=4, cluster=1, split=2, unroll=1), 0.18),
    (WeightTile(64, 128, stages=12, store=16), 0.34),
)
_RING_BYTES = 144 * 1024  # of a block with few rows; with more the first slot is full later
_PLAIN_ROWS, _PLAIN_SIZE = 17, 1 << 26
_FP8_PROMOTE = 2  # steps of 128 columns; a float32 sum beside the tensor cores' needs cols <= 192


def _rounds(m_tiles: int, n_tiles: int, cluster: int) -> int:
    return -(-m_tiles * n_tiles // (N_SM // cluster))


def choose_pair_tile(m: int, n: int, k: int, dtype=jnp.int8) -> PairTile:
    """The tile for int8 or e4m3 operands x [m, k], w [n, k]."""
    fp8 = dtype != jnp.int8
    if m <= 64:
        return _choose_stream(n, k, _FP8_PROMOTE if fp8 else 0)
    options = [(t, us) for t, us in _PAIR if not (fp8 and t.cols > 192)]

    def cost(option):
        tile, us = option
        return _rounds(-(-m // (tile.m * tile.cluster)), -(-n // tile.n), tile.cluster) * us

    tile = min(options, key=cost)[0]
    return PairTile(**{**vars(tile), "promote": _FP8_PROMOTE if fp8 else 0})


def _choose_stream(n: int, row_bytes: int, promote: int = 0, swiglu: bool = False) -> PairTile:
    """For one tile of rows, where the bytes of w [N, row_bytes] decide: what an SM copies at 80
    bytes a nanosecond, or all of w at the memory's 4200, and a microsecond to add the two halves of
    a split K.  At M = 64 it is within 10% of what was measured, less the 4 us that every launch
    takes; of equals the one that copies least.

    swiglu: K is not split, and a warpgroup has at least 16 columns of gate.
    """

    def nanoseconds(tile: PairTile) -> tuple[float, float]:
        tiles = -(-n // tile.n)
        copied = _rounds(1, tiles, tile.split) * (tile.m + tile.n) * row_bytes / tile.split
        return max(copied / 80, n * row_bytes / 4200) + 1000 * (tile.split - 1), copied

    def tile(width: int, split: int) -> PairTile:
        stages = _RING_BYTES // ((64 + width) * BLOCK_BYTES)
        return PairTile(64, width, stages, cluster=1, promote=promote, split=split)

    splits = (1,) if swiglu or row_bytes % (2 * BLOCK_BYTES) else (1, 2)
    widths = (64, 128) if swiglu else (32, 64, 96, 128)
    return min((tile(n, s) for s in splits for n in widths), key=nanoseconds)


def choose_weight_tile(m: int, n: int, k: int) -> WeightTile:
    """The tile for float activations x [m, K] and a quantized w [n, K]."""
    if m <= 64:
        return _choose_few(m, n, k)

    def cost(option):
        tile, us = option
        n_tiles = -(-n // (tile.rows * tile.cluster))
        return _rounds(-(-m // tile.tokens), n_tiles, tile.cluster) * us

    return min((option for option in _WEIGHT if option[0].divides(k)), key=cost)[0]


def _choose_few(m: int, n: int, k: int) -> WeightTile:
    """For one tile of tokens: what gives the busiest block the least to do."""

    def cost(option):
        tile, us = option
        rounds = _rounds(1, -(-n // (tile.rows * tile.cluster)), tile.cluster * tile.split)
        return rounds * (k // BLOCK_K // tile.split) * us + (tile.split - 1)

    tile = min((option for option in _FEW_WEIGHT if option[0].divides(k)), key=cost)[0]
    return dataclasses.replace(tile, tokens=32 if m <= 32 else 64)


def unsupported(
    x: jax.Array | QTensor, w: QTensor, bias: jax.Array | None = None, out_dtype=None
) -> str | None:
    """Why neither kernel takes x [M, K] and w [N, K], or None.  Any M; K and N as said here."""
    (n, k), pair = w.shape, isinstance(x, QTensor)
    if x.ndim != 2 or x.shape[0] < 1:
        return f"x {x.shape} is not [M, K] with M >= 1"
    if n % 8:
        return f"w has N = {n}, not a multiple of 8"
    out_dtype = None if out_dtype is None else jnp.dtype(out_dtype)
    if pair:
        if x.dtype != w.dtype or w.dtype not in (jnp.int8, jnp.float8_e4m3fn):
            return f"no kernel multiplies x of {x.dtype} by w of {w.dtype} words"
        if x.scale.shape[-1] != 1 or w.scale.shape[-1] != 1:
            return "a quantized x needs one scale per row, and so does w"
        if x.zero is not None or w.zero is not None:
            return "a quantized x has no zeros, and neither has its w"
        if k % 16:
            return f"w has K = {k}, not a multiple of 16"
        if out_dtype is not None and out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the output would be {out_dtype}"
        return None
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}, the kernel takes bfloat16 and float16"
    if w.dtype not in (jnp.int4, jnp.int8):
        return f"no kernel multiplies x of {x.dtype} by w of {w.dtype} words"
    if out_dtype is not None and out_dtype not in (jnp.bfloat16, jnp.float16):
        return f"the output would be {out_dtype}, the kernel writes 16-bit floats"
    if k % BLOCK_K:
        return f"w has K = {k}, not a multiple of {BLOCK_K}"
    if w.group_size != 32 and w.group_size % BLOCK_K:
        return f"w has group size {w.group_size}, neither 32 nor a multiple of {BLOCK_K}"
    return None


def matmul_w8a8(
    x: QTensor, w: QTensor, bias: jax.Array | None, out_dtype, tile: PairTile | None = None
) -> jax.Array:
    """x [M, K] with scale [M, 1], w [N, K] with scale [N, 1], both int8 or both e4m3 -> [M, N]."""
    _check(x, w, bias, out_dtype)
    tile = tile or choose_pair_tile(x.shape[0], *w.shape, x.dtype)
    launching("quantized_matmul_prefill_pair", lambda: tile)
    scales = x.scale.reshape(-1), w.scale.reshape(-1)
    return pair_matmul(x.q, w.q, *scales, bias, out_dtype, tile)


matmul_fp8 = matmul_w8a8


def unsupported_plain(m: int, dtype, w: jax.Array, out_dtype=None) -> str | None:
    """Why no kernel takes x [m, K] of ``dtype`` and plain weights w [N, K], or None."""
    (n, k), out_dtype = w.shape, None if out_dtype is None else jnp.dtype(out_dtype)
    if not 1 <= m <= 64:
        return f"x has {m} rows: 1 to 64 of plain weights' products have a kernel"
    if dtype != w.dtype or dtype not in (jnp.bfloat16, jnp.float16):
        return f"no kernel multiplies x of {dtype} by w of {w.dtype}"
    if n % 16 or k % 64:
        return f"w [{n}, {k}]: N is not a multiple of 16 or K not of 64"
    if out_dtype is not None and out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the output would be {out_dtype}"
    return None


def slower_plain(m: int, w: jax.Array, swiglu: bool = False) -> str | None:
    """Why XLA's product with plain weights is the better choice, or None."""
    n, k = w.shape
    if m < _PLAIN_ROWS:
        return f"{m} rows of plain weights' products: XLA is as fast"
    if n * k > _PLAIN_SIZE and not swiglu:
        return f"w [{n}, {k}] is so large that XLA is as fast"
    return None


def matmul_plain(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    out_dtype,
    tile: PairTile | None = None,
    *,
    swiglu: bool = False,
) -> jax.Array:
    """x [M <= 64, K], w [N, K], both bf16 or both f16 -> [M, N]; sums in float32.

    swiglu: w's rows are gate, then up; silu(gate) * up [M, N / 2] is returned.
    """
    if reason := unsupported_plain(x.shape[0], x.dtype, w, out_dtype):
        raise NotImplementedError(f"quantized_matmul: no Mosaic prefill kernel: {reason}")
    (n, k), out_dtype = w.shape, jnp.dtype(out_dtype)
    fused = swiglu and bias is None
    tile = tile or _choose_stream(n, k * w.dtype.itemsize, swiglu=fused)
    launching("quantized_matmul_prefill_pair", lambda: tile)
    kernel_dtype = jnp.dtype(jnp.float32) if swiglu and not fused else out_dtype
    y = pair_matmul(x, w, None, None, bias, kernel_dtype, tile, fused)
    if swiglu and not fused:
        y = (jax.nn.silu(y[:, : n // 2]) * y[:, n // 2 :]).astype(out_dtype)
    return y


def matmul_weight_only(
    x: jax.Array, w: QTensor, bias: jax.Array | None, out_dtype, tile: WeightTile | None = None
) -> jax.Array:
    """x [M, K] bf16 or f16, w [N, K] int4 or int8, in groups or whole rows -> [M, N]."""
    _check(x, w, bias, out_dtype)
    n, k = w.shape
    tile = tile or choose_weight_tile(x.shape[0], n, k)
    bits = 4 if w.dtype == jnp.int4 else 8
    stored = _stored_bytes(w, x.dtype, tile.split) if x.shape[0] <= 64 else 0
    if stored and tile.fitted(x.shape[0], n, bits, stored).stages < 4:
        stored = 0
    tile = tile.fitted(x.shape[0], n, bits, stored)
    launching("quantized_matmul_prefill_weight", lambda: tile)
    scale, zero, row = (w.scale, w.zero, None) if stored else _weight_vectors(w, x.dtype)
    float_zero = zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer)
    return weight_matmul(
        x,
        w.q,
        scale,
        zero,
        row,
        bias,
        out_dtype,
        group=w.group_size,
        stored=stored > 0,
        float_zero=float_zero,
        tile=tile,
    )


def _stored_bytes(w: QTensor, dtype, split: int) -> int:
    """Bytes of a row's scales and zeros if the kernel can take them in the weight's own layout, or
    0: of bfloat16 (f16 needs its rows divided by their largest), and a row is a TMA box's."""
    groups = w.scale.shape[1]
    kinds = [v.dtype for v in (w.scale, w.zero) if v is not None]
    fits = (
        dtype == w.scale.dtype == jnp.bfloat16
        and 1 < groups <= 256
        and all(kind in (jnp.bfloat16, jnp.int8) for kind in kinds)
        and all(groups * kind.itemsize % (16 * split) == 0 for kind in kinds)
    )
    return groups * sum(kind.itemsize for kind in kinds) if fits else 0


def _weight_vectors(w: QTensor, dtype):
    """(scale [K / g, N], zero [K / g, N], row scale [N]): the first two are of the loop."""
    float_zero = w.zero is not None and not jnp.issubdtype(w.zero.dtype, jnp.integer)
    zero = None if w.zero is None else w.zero.T
    if w.scale.shape[-1] == 1 and not float_zero:
        return None, None if zero is None else zero.astype(dtype), w.scale.reshape(-1)
    scale, row = w.scale.T, None
    if dtype == jnp.float16:
        scale = scale.astype(jnp.float32)
        zero = zero.astype(jnp.float32) if float_zero else zero
        row = jnp.max(jnp.abs(scale), axis=0)
        if float_zero:
            row = jnp.maximum(row, jnp.max(jnp.abs(zero), axis=0))
        inverse = jnp.where(row > 0, 1.0 / jnp.where(row > 0, row, 1.0), 0.0)
        scale = scale * inverse
        zero = zero * inverse if float_zero else zero
    return scale.astype(dtype), None if zero is None else zero.astype(dtype), row


def _check(x, w, bias, out_dtype) -> None:
    if reason := unsupported(x, w, bias, out_dtype):
        raise NotImplementedError(f"quantized_matmul: no Mosaic prefill kernel: {reason}")

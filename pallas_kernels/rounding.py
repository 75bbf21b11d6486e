"""Grids and codes: a weight's scales first, its codes second, so that a method may choose either.

    scale, zero = grid(w, dtype, group, zeros, shrink)      codes(w, scale, zero, dtype) -> q

``qtensor.quantize`` is ``grid`` with ``shrink`` 1, and ``codes``.  A shrink below 1 clips: the grid
covers that share of the group's range, and values outside go to its ends (AWQ's clipping, arXiv
2306.00978, OmniQuant's and GPTQ's "mse" search).  A grid with zero points has two ends, which may
be clipped by different shares: a pair (low, high).

Named formats have rules of their own for the scales by which ``codes`` rounds.

    format_scales(w, name, dtype) -> (scale, unit or None)

    mxfp4       scale float8_e8m0fnu [..., K / 32]
    nvfp4       scale float8_e4m3fn [..., K / 16], unit float32 [..., 1]
    fp8-block   scale of ``dtype`` [..., K / gcd(K, 128)]

MXFP4's scale is the power of two that puts the group's largest magnitude below 7.  Magnitudes
between 6 and 7 then round to 6, within half of the grid's last step.  The specification's own rule
puts it below 8, so its largest weights lose up to a whole step.

NVFP4's tensor scale puts the largest group's scale at the highest float8, 448.  Group scales round
to nearest.

FP8's blocks take 128 rows and 128 columns.  The last block of rows or columns may be short.  Every
row holds its block's scales.  If 128 does not divide K, groups have the widest width that divides
both, and a block's scale repeats.

Sources: OCP Microscaling specification v1.0, section 6.3; NVIDIA's NVFP4 and ModelOpt; DeepSeek-V3
(arXiv 2412.19437).  Left out: formats of 6 bits, MXFP8.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# A number, one per group, or a pair of such for the two ends of grids with zero points.
Shrink = jax.Array | float | tuple[jax.Array, jax.Array]

# Lowest and highest code.  A symmetric scale maps the largest magnitude to the highest, so that +w
# and -w round alike.
CODES = {
    "int8": (-128.0, 127.0),
    "int4": (-8.0, 7.0),
    "float8_e4m3fn": (-448.0, 448.0),
    "float4_e2m1fn": (-6.0, 6.0),
}
NIBBLES = ("int4", "float4_e2m1fn")  # codes that lie two to a byte


def grid(
    w: jax.Array,
    dtype: str,
    group_size: int,
    zeros: bool = False,
    shrink: Shrink = 1.0,
    scale_dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array | None]:
    """(scale, zero or None), each ``[..., K / group_size]``, of ``w[..., K]``.  scale_dtype: see
    ``kept``."""
    x = w.astype(jnp.float32).reshape(*w.shape[:-1], w.shape[-1] // group_size, group_size)
    low_code, high_code = CODES[dtype]
    below, above = shrink if isinstance(shrink, tuple) else (shrink, shrink)
    if not zeros:
        return kept(jnp.max(jnp.abs(x), axis=-1) * below / high_code, None, scale_dtype), None
    low = jnp.minimum(jnp.min(x, axis=-1), 0.0) * below
    high = jnp.maximum(jnp.max(x, axis=-1), 0.0) * above
    steps = high_code - low_code
    scale = high / steps - low / steps  # high - low may overflow
    is_float = jnp.dtype(scale_dtype) != jnp.int8
    scale = rounded_up(scale, scale_dtype) if is_float else scale
    zero = jnp.round(-low * reciprocal(scale)) + low_code
    zero = jnp.clip(zero, low_code, high_code).astype(jnp.int8)
    return scale if is_float else kept(scale, zero, scale_dtype), zero


def kept(scale: jax.Array, zero: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Scales as they will be stored: rounded up to ``dtype``, or, where that is int8, float32
    multiples of one unit a row, the nearest."""
    if jnp.dtype(dtype) != jnp.int8:
        return rounded_up(scale, dtype)
    multiple, unit = multiples(scale, zero)
    return multiple.astype(jnp.float32) * unit


def rounded_up(scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``scale`` in ``dtype``, not below what it was: so the codes reach the ends of the group.

    The rounding passes gradients on.
    """
    nearest, facts = scale.astype(dtype), jnp.finfo(dtype)
    if facts.bits != 16:
        return nearest
    still = lax.stop_gradient(scale.astype(jnp.float32))
    # A cast there and back would be dropped by XLA, this is not.
    is_below = lax.reduce_precision(still, facts.nexp, facts.nmant) < still
    bits = lax.bitcast_convert_type(still.astype(dtype), jnp.uint16)
    above = lax.bitcast_convert_type(bits + jnp.uint16(1), nearest.dtype)
    ulp = above - still.astype(dtype)
    return nearest + jnp.where(is_below, ulp, jnp.zeros_like(ulp))


def multiples(scale: jax.Array, zero: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(multiples int8 ``[..., groups]``, unit float32 ``[..., 1]``) nearest to int4 codes' scales.

    (code - zero) * multiple is int8 for every code. The group that comes closest to that bound
    keeps its scale (QServe's second level, arXiv 2405.04532).  For scales that ``kept`` has already
    rounded, the result is the multiples and unit they were rounded to.
    """
    scale = scale.astype(jnp.float32)
    below = 8.0 if zero is None else zero.astype(jnp.float32) + 8.0  # codes under the zero
    most = jnp.floor(jnp.minimum(128.0 / below, 127.0 / (15.0 - below)))
    unit = jnp.max(scale / most, axis=-1, keepdims=True)
    nearest = jnp.round(scale * reciprocal(unit))
    return jnp.clip(nearest, jnp.where(scale > 0, 1.0, 0.0), most).astype(jnp.int8), unit


def codes(w: jax.Array, scale: jax.Array, zero: jax.Array | None, dtype: str) -> jax.Array:
    """``w[..., K]`` rounded to nearest on the grid."""
    x = w.astype(jnp.float32).reshape(*scale.shape, w.shape[-1] // scale.shape[-1])
    steps = x * reciprocal(scale)[..., None]
    if zero is not None:
        steps = steps + zero.astype(jnp.float32)[..., None]
    return to_codes(steps, dtype).reshape(w.shape)


def to_codes(steps: jax.Array, dtype: str) -> jax.Array:
    """Multiples of a scale, rounded and clipped to codes of ``dtype``."""
    low, high = CODES[dtype]
    if dtype in ("int8", "int4"):
        steps = jnp.round(steps)
    elif dtype == "float4_e2m1fn":
        steps = on_float(steps, 1, 0)
    return jnp.clip(steps, low, high).astype(dtype)


def on_float(x: jax.Array, mantissa: int, least: int) -> jax.Array:
    """Return float32 x rounded to floats of so many mantissa bits, ties to even.

    least: the exponent of the smallest normal number.  There is no largest number.  A cast of the
    result is exact; XLA's own cast may round to float16 first, and ends wrong near some ties.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = jnp.maximum(((bits >> 23) & 255) - 127, least)
    step = lax.bitcast_convert_type((exponent - mantissa + 127) << 23, jnp.float32)
    return jnp.round(x / step) * step


def reciprocal(scale: jax.Array) -> jax.Array:
    """1 / scale in float32, 0 where the group is all zeros."""
    s = scale.astype(jnp.float32)
    return jnp.where(s > 0, 1.0 / jnp.where(s > 0, s, 1.0), 0.0)


# --- formats of blocks with scales of their own ---------------------------------------------------


E8M0 = "float8_e8m0fnu"
E4M3 = "float8_e4m3fn"


class Format(NamedTuple):
    """codes: their dtype.  group: columns of a scale.  rows: rows of a scale."""

    codes: str
    group: int
    rows: int = 1


FORMATS = {
    "mxfp4": Format("float4_e2m1fn", 32),
    "nvfp4": Format("float4_e2m1fn", 16),
    "fp8-block": Format("float8_e4m3fn", 128, 128),
}


def format_group(name: str, k: int) -> int:
    """Return the columns of a group in a row of ``k``; ValueError if they do not divide it."""
    found = FORMATS[name]
    group = math.gcd(k, found.group) if found.rows > 1 else found.group
    if k % group:
        raise ValueError(f"{name}: groups of {group} do not divide the last axis ({k})")
    return group


def format_blocks(name: str, shape: tuple[int, ...]) -> int | None:
    """Return ``QTensor.blocked`` of an array ``[..., N, K]`` in a format."""
    if len(shape) < 2:
        return None
    rows, of_block = shape[-2], FORMATS[name].rows
    is_one = of_block > 1 and rows > 0 and rows % of_block == 0
    return rows if is_one and shape[-1] > FORMATS[name].group else None


def format_scales(w: jax.Array, name: str, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Return the scales of ``w[..., K]`` and the unit that multiplies them, as they are stored.

    dtype: of fp8-block's scales; the other formats have their own.
    """
    group = format_group(name, w.shape[-1])
    if name == "mxfp4":
        return _e8m0_scales(w, group), None
    if name == "nvfp4":
        return _e4m3_scales(w, group)
    return _block_scales(w, FORMATS[name].group, dtype), None


def whole_scale(scale: jax.Array, unit: jax.Array | None) -> jax.Array:
    """Return the float32 factor of each group's codes."""
    found = scale.astype(jnp.float32)
    return found if unit is None else found * unit


def _e8m0_scales(w: jax.Array, group: int) -> jax.Array:
    """Return a power of two for each group, 1 for a group of zeros."""
    bits = lax.bitcast_convert_type(_group_peaks(w, group), jnp.uint32)
    # A quarter of the mantissa carries into the exponent from 1.75 = 7 / 4 on.
    exponent = ((bits + jnp.uint32(1 << 21)) >> 23).astype(jnp.int32)
    stored = jnp.clip(exponent - 2, 1, 254)
    stored = jnp.where(bits == 0, 127, stored).astype(jnp.uint8)
    return lax.bitcast_convert_type(stored, jnp.dtype(E8M0))


def _e4m3_scales(w: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Return (scales of the groups, the tensor's scale once a row)."""
    peaks, top_code, top = _group_peaks(w, group), CODES["float4_e2m1fn"][1], CODES[E4M3][1]
    axes = (-2, -1) if w.ndim > 1 else -1
    peak = jnp.max(peaks, axis=axes, keepdims=True, initial=0.0)
    # Files hold this divisor, so the unit is its inverse to the bit.  XLA would simplify it away.
    divisor = np.float32(top_code * top) / jnp.where(peak > 0, peak, 1.0)
    divisor = lax.optimization_barrier(divisor)
    unit = jnp.where(peak > 0, 1.0 / divisor, 0.0)
    scale = peaks * np.float32(1 / top_code) * divisor
    scale = jnp.clip(on_float(scale, 3, -6), 0.0, top).astype(jnp.dtype(E4M3))
    return scale, jnp.broadcast_to(unit, (*w.shape[:-1], 1))


def _block_scales(w: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """Return the scales of blocks of ``size`` rows and columns, once for each row and group."""
    *lead, rows, columns = w.shape if w.ndim > 1 else (1, *w.shape)
    x = jnp.abs(w.astype(jnp.float32)).reshape(*lead, rows, columns)
    down, across = -rows % size, -columns % size
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, down), (0, across)])
    x = x.reshape(*lead, (rows + down) // size, size, (columns + across) // size, size)
    scale = kept(jnp.max(x, axis=(-3, -1)) * np.float32(1 / CODES[E4M3][1]), None, dtype)
    group = math.gcd(columns, size)
    scale = jnp.repeat(jnp.repeat(scale, size, axis=-2), size // group, axis=-1)
    return scale[..., :rows, : columns // group].reshape(*w.shape[:-1], columns // group)


def _group_peaks(w: jax.Array, group: int) -> jax.Array:
    """Return the largest magnitude of each group, float32 ``[..., K / group]``."""
    x = jnp.abs(w.astype(jnp.float32))
    return jnp.max(x.reshape(*w.shape[:-1], w.shape[-1] // group, group), axis=-1)

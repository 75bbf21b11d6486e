"""Grids and codes: a weight's scales first, its codes second, so that a method may choose either.

    scale, zero = grid(w, dtype, group, zeros, shrink)      codes(w, scale, zero, dtype) -> q

``qtensor.quantize`` is ``grid`` with ``shrink`` 1, and ``codes``.  A shrink below 1 clips: the grid
covers that share of the group's range, and values outside go to its ends (AWQ's clipping, arXiv
2306.00978, OmniQuant's and GPTQ's "mse" search).  A grid with zero points has two ends, which may
be clipped by different shares: a pair (low, high).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
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

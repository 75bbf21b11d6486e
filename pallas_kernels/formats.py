"""Named formats of weights: their scales, by which ``rounding.codes`` rounds.

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

from pallas_kernels.rounding import CODES, kept, on_float

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
    peak = jnp.max(peaks, axis=(-2, -1) if w.ndim > 1 else -1, keepdims=True)
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

"""Codes in int32 fields, and groups of columns, which all packed formats use.

    unpack(int32[..., n], bits) -> uint8[..., n * 32 / bits], lowest bits first
    signed(uint8, bits)         -> int4 | int8         a QTensor's codes: 2^(bits-1) less
    by_group(...)               -> QTensor             consecutive groups of one width

A QTensor's groups are consecutive and equally wide. Files may differ in two ways, and both are
converted without changing a code or a scale. With act-order, ``groups`` gives each column's group;
the codes are sorted by group, and ``columns`` holds the order. A short last group (576 columns in
groups of 128) leads to narrower groups, whose scales repeat. Their width is the greatest that
divides all (64). Left out: widths other than 4 and 8 bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import ArrayOrNumpy

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

INT4 = np.dtype(ml_dtypes.int4)
INT8 = np.dtype(np.int8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_INT32 = np.dtype("<i4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the 4- or 8-bit fields of int32 ``words[..., n]``, lowest bits first, as uint8."""
    raw = np.ascontiguousarray(words, _INT32).view(np.uint8)
    return nibbles(raw) if bits == 4 else raw


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """Undo ``unpack``; the last int32 is filled up with zeros."""
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -fields.shape[-1] % (32 // bits))])
    fields = from_nibbles(fields) if bits == 4 else fields
    return np.ascontiguousarray(fields).view(_INT32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """Return the halves of bytes ``[..., n]``, low ones first, as uint8 ``[..., 2 n]``."""
    fields = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
    np.bitwise_and(raw, 15, out=fields[..., 0::2])
    np.right_shift(raw, 4, out=fields[..., 1::2])
    return fields


def from_nibbles(fields: np.ndarray) -> np.ndarray:
    """Undo ``nibbles``; an odd last half is filled up with 0."""
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, fields.shape[-1] % 2)])
    return fields[..., 0::2] | fields[..., 1::2] << 4


def packed_size(size: int, bits: int) -> int:
    """Return the number of int32s that hold ``size`` fields."""
    return -(-size * bits // 32)


def signed(fields: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes as a QTensor's int4 or int8 codes: 2^(bits-1) less."""
    return to_int4(fields.view(np.int8) - np.int8(8)) if bits == 4 else (fields ^ 128).view(np.int8)


def to_int4(codes: np.ndarray) -> np.ndarray:
    """Return int8 codes from -8 to 7 as int4 in the same bytes; the input is overwritten."""
    codes &= np.int8(15)
    return codes.view(INT4)


def unsigned(words: ArrayOrNumpy, bits: int) -> np.ndarray:
    """Undo ``signed``."""
    integers = np.asarray(words).astype(np.int8)
    return (integers + np.int8(8)).view(np.uint8) if bits == 4 else integers.view(np.uint8) ^ 128


def n_groups(width: int, group_size: int | None) -> int:
    """Return the number of groups of a row; the last may be short, None is the whole row."""
    return 1 if group_size is None else -(-width // group_size)


def consecutive(width: int, group_size: int | None) -> np.ndarray:
    """Return the group of each column without act-order."""
    return np.arange(width, dtype=np.int32) // np.int32(group_size or width)


def by_group(
    words: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, groups: np.ndarray
) -> QTensor:
    """Return the QTensor of ``words[out, in]`` in which column i has ``scale[:, groups[i]]``.

    The caller has checked ``groups[in]``: every entry is at least 0 and below ``scale.shape[1]``.
    """
    from pallas_kernels.qtensor import QTensor

    order = np.argsort(groups, kind="stable").astype(np.int32)
    columns = None if np.array_equal(order, np.arange(order.size)) else order
    counts = np.bincount(groups, minlength=scale.shape[1])
    width = math.gcd(*counts.tolist())
    group_of_column = np.repeat(np.arange(scale.shape[1]), counts // width)
    if not np.array_equal(group_of_column, np.arange(scale.shape[1])):
        scale, zero = scale[:, group_of_column], None if zero is None else zero[:, group_of_column]
    words = words if columns is None else np.take(words, order, axis=1)
    return QTensor(words, scale, zero, columns=columns)


def repeat_groups(w: QTensor, group_size: int) -> QTensor:
    """Return ``w`` in narrower groups, whose scales and zeros repeat."""
    times = w.group_size // group_size
    if times == 1:
        return w
    scale = np.repeat(w.scale, times, axis=1)
    zero = None if w.zero is None else np.repeat(w.zero, times, axis=1)
    return dataclasses.replace(w, scale=scale, zero=zero)


def block_scales(w: QTensor, size: int) -> np.ndarray | None:
    """Undo the repetition of block scales on reading.

    Returns ``[ceil(out / size), ceil(in / size)]``: a scale of each block of ``size`` rows and
    columns. Returns None if the scales of ``w[out, in]`` are no such repetition.
    """
    (out, width), scale = w.shape, np.asarray(w.scale)
    group = width // scale.shape[1]
    if group != math.gcd(width, size):
        return None
    found = scale[::size, :: size // group]
    again = np.repeat(np.repeat(found, size, axis=0), size // group, axis=1)
    return found if np.array_equal(again[:out, : scale.shape[1]], scale) else None


def check_scale(w: QTensor, name: str) -> None:
    """Raise JaxLlamaError for scales of a damaged file.

    They are NaN, infinite, negative, or 0 for nonzero codes. (A group of zeros has scale 0.)
    """
    scale = w.scale.astype(np.float32)
    if w.unit is not None:
        scale = scale * w.unit
    if not np.isfinite(scale).all():
        raise JaxLlamaError(f"{name}: scales that are NaN or infinite")
    if (scale < 0).any():
        raise JaxLlamaError(f"{name}: negative scales")
    none = scale == 0
    if not none.any():
        return
    words = w.q.reshape(*scale.shape, -1)[none].astype(np.float32)
    zero = np.float32(0) if w.zero is None else w.zero[none].astype(np.float32)[:, None]
    if (words != zero).any():
        raise JaxLlamaError(f"{name}: scales that are 0, of codes that are not")

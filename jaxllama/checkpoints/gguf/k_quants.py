"""Floats as blocks of Q4_K, Q5_K and Q6_K, for which the ``gguf`` package has only the way back.

    quantize(rows float32 [rows, columns], kind) -> bytes uint8 [rows, row_bytes]

A block has 256 columns. Q4_K and Q5_K round 8 groups of 32 to ``word * (d * s) - dmin * m``, Q6_K
rounds 16 groups of 16 to ``(word - 32) * (d * s)``. Several grids are tried for each group, each
with the scale (and minimum) of least squared error, weighted by ``|x|`` plus the group's root mean
square (Q6_K: by ``x * x``). Source: llama.cpp's ggml-quants, ``make_qkx2_quants`` and
``make_qx_quants``. Left out: an importance matrix.
"""

from __future__ import annotations

import numpy as np

from jaxllama.checkpoints.gguf.types import TensorType as Type

KINDS = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
_BLOCK = 256
# The largest word, and the widths of the grids that are tried relative to it.
_LEVELS = {Type.Q4_K: 15, Type.Q5_K: 31}
_WIDTHS = {Type.Q4_K: np.arange(21) * 0.1 - 1.0, Type.Q5_K: np.arange(16) * 0.1 - 0.5}
_TINY = 1e-15  # the largest magnitude of a group that counts as zeros


def quantize(rows: np.ndarray, kind: Type) -> np.ndarray:
    """Return float32 ``[rows, columns]`` as blocks; 256 must divide the columns."""
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, _BLOCK)
    made = _q6_k(blocks) if kind == Type.Q6_K else _q4_k(blocks, kind)
    return made.reshape(len(rows), -1)


def _q4_k(blocks: np.ndarray, kind: Type) -> np.ndarray:
    levels = _LEVELS[kind]
    groups = blocks.reshape(-1, 8, 32)
    scale, minimum = _affine(groups, levels, _WIDTHS[kind])
    d, scales = _six_bits(scale)
    d_min, minima = _six_bits(minimum)
    step = d.astype(np.float32) * scales
    low = d_min.astype(np.float32) * minima
    words = _words(groups + low[..., None], step[..., None], 0, levels)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    packed[:, 4:8] = minima[:, :4] | minima[:, 4:] >> 4 << 6
    packed[:, 8:] = scales[:, 4:] & 15 | minima[:, 4:] << 4
    four = words & 15
    halves = (four[:, 0::2] | four[:, 1::2] << 4).reshape(len(blocks), -1)
    fifth = np.bitwise_or.reduce(words >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    more = (fifth,) if kind == Type.Q5_K else ()
    head = (d.view(np.uint8), d_min.view(np.uint8), packed)
    return np.concatenate([*head, *more, halves], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale = _symmetric(groups, 32)
    at = np.abs(scale).argmax(axis=1)[:, None]
    largest = np.take_along_axis(scale, at, axis=1)
    inverse = _divided(np.float32(-128), largest)
    d = _divided(np.float32(1), inverse).astype(np.float16)
    scales = np.minimum(np.rint(inverse * scale), 127).astype(np.int8)
    step = d.astype(np.float32) * scales
    words = _words(groups, step[..., None], -32, 31).view(np.int8) + np.int8(32)
    words = words.view(np.uint8).reshape(-1, 2, 4, 32)
    low = words[:, :, :2] & 15 | (words[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(words >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    parts = (low, high, scales.view(np.uint8), d.view(np.uint8))
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


def _words(x: np.ndarray, step: np.ndarray, least: int, most: int) -> np.ndarray:
    """Return ``x / step`` rounded to integers from ``least`` to ``most``, as bytes."""
    return np.clip(np.rint(_divided(x, step)), least, most).astype(np.int8).view(np.uint8)


def _divided(x: np.ndarray | np.float32, y: np.ndarray) -> np.ndarray:
    """Return ``x / y`` in float32, and 0 where y is 0."""
    shape = np.broadcast_shapes(np.shape(x), y.shape)
    return np.divide(x, y, out=np.zeros(shape, np.float32), where=y != 0)


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a float16 for each row of 8 values, and their multiples of it, from 0 to 63."""
    most = values.max(axis=1, keepdims=True)
    multiples = np.minimum(np.rint(_divided(np.float32(63), most) * values), 63)
    return (most / np.float32(63)).astype(np.float16), multiples.astype(np.uint8)


def _affine(x: np.ndarray, levels: int, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each group's scale and minimum (the number subtracted), both at least 0."""
    weight = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(axis=-1), 0), x.max(axis=-1)
    sum_w, sum_x = weight.sum(axis=-1), (weight * x).sum(axis=-1)
    best = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), low.copy()
    for width in (None, *widths):
        span = high - minimum  # the next grid begins at the best minimum so far
        inverse = _divided(np.float32(levels if width is None else levels + width), span)
        words = np.clip(np.rint(inverse[..., None] * (x - minimum[..., None])), 0, levels)
        if width is None:
            own_scale, own_min = _divided(np.float32(1), inverse), low
            fits = span > 0
        else:
            weighted = weight * words
            sum_l = weighted.sum(axis=-1)
            sum_l2, sum_xl = (weighted * words).sum(axis=-1), (weighted * x).sum(axis=-1)
            divisor = sum_w * sum_l2 - sum_l * sum_l
            fits = divisor > 0
            own_scale = _divided(sum_w * sum_xl - sum_x * sum_l, divisor)
            own_min = _divided(sum_l2 * sum_x - sum_l * sum_xl, divisor)
            own_scale = np.where(own_min > 0, _divided(sum_xl, sum_l2), own_scale)
            own_min = np.minimum(own_min, 0)
        error = own_scale[..., None] * words + own_min[..., None] - x
        error = (weight * error * error).sum(axis=-1)
        better = fits & (error < best)
        best = np.where(better, error, best)
        scale = np.where(better, own_scale, scale)
        minimum = np.where(better, own_min, minimum)
    return scale, -minimum


def _symmetric(x: np.ndarray, levels: int) -> np.ndarray:
    """Return each group's scale for words from ``-levels`` to ``levels - 1``."""
    at = np.abs(x).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(x, at, axis=-1)
    largest = np.where(np.abs(largest) < _TINY, np.float32(0), largest)
    weighted = x * x * x
    scale = best = np.zeros(x.shape[:-1], np.float32)
    for width in (0, *range(-9, 0), *range(1, 10)):
        inverse = _divided(np.float32(-levels - 0.1 * width), largest)
        words = np.clip(np.rint(inverse * x), -levels, levels - 1)
        sum_lx, sum_l2 = (weighted * words).sum(axis=-1), (x * x * words * words).sum(axis=-1)
        own = _divided(sum_lx, sum_l2)
        better = own * sum_lx > best
        scale, best = np.where(better, own, scale), np.where(better, own * sum_lx, best)
    return scale

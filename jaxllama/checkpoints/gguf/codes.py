"""GGUF's blocks as codes in groups: ``w = q * scale (+ zero)``, exactly the file's values.

    Q8_0 Q4_0 Q5_0    groups of 32   word * d
    Q4_1 Q5_1         groups of 32   word * d + m
    Q4_K Q5_K         groups of 32   word * (d * s) - dmin * m     s, m: 6 bits each, 8 to a block
    Q6_K              groups of 16   (word - 32) * (d * s)         s: 8 bits
    Q2_K              groups of 16   word * (d * s) - dmin * m     s, m: 4 bits each
    Q3_K              groups of 16   (word - 4) * (d * (s - 32))   s: 6 bits
    TQ1_0 TQ2_0       groups of 256  (word - 1) * d
    IQ4_NL            groups of 32   table[word] * d
    MXFP4             groups of 32   e2m1(word) * d                d: a power of two
    NVFP4             groups of 16   table[word] * d               d: 8-bit float
    IQ4_XS            groups of 32   table[word] * (d * (s - 32))  s: 6 bits
    IQ3 IQ2_XXS       groups of 32   +-table[..] * d * (2 s + 1) / 4 (IQ3_S: 1, IQ2: 8)    s: 4 bits
    IQ2_XS IQ2_S      groups of 16   the same, of vectors of 8 (IQ3: 4) words
    IQ1_S IQ1_M       groups of 32, 16   (8 table[..] +- 1) * d * (2 s + 1) / 8            s: 3 bits

A word is a stored code. In the first rows d, dmin and m are float16. So ``d * s`` and ``dmin * m``
are exact in float32, and so is their product with a word. Unsigned words of 4 bits become int4 with
``zero = m + 8 d`` if that sum is exact. It is, unless the two are some 2^9 apart. Otherwise they
stay 0..15, as int8. A table's values, from -127 to 113, are int8: exact, but larger than the file's
words. MXFP4's words are float4_e2m1fn beside scales in float8_e8m0fnu; under a multiplier, and for
scales that are no number there, they are int8 too. So every quantized type can be kept. Source:
llama.cpp's ggml-quants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from jaxllama.checkpoints.gguf.types import BLOCKS
from jaxllama.checkpoints.gguf.types import TensorType as Type
from jaxllama.checkpoints.packed.codes import E8M0, FP4, to_int4

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor

_PLAIN = {
    Type.F32: np.dtype("<f4"),
    Type.F16: np.dtype("<f2"),
    Type.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Columns that share a scale, if they are not 32.
_GROUP = {
    **dict.fromkeys((Type.Q2_K, Type.Q3_K, Type.Q6_K, Type.NVFP4), 16),
    **dict.fromkeys((Type.IQ1_M, Type.IQ2_XS, Type.IQ2_S), 16),
    **dict.fromkeys((Type.TQ1_0, Type.TQ2_0), 256),
}
_MINIMUM = (Type.Q4_1, Type.Q5_1, Type.Q2_K, Type.Q4_K, Type.Q5_K)
# Types whose words fit four bits as they are, and types whose words fit after subtracting 8.
_INT4 = (Type.Q4_0, Type.Q2_K, Type.Q3_K, Type.TQ1_0, Type.TQ2_0)
_UINT4 = (Type.Q4_1, Type.Q4_K)
# Twice the values of float4_e2m1fn, whose float32 is half the exponent's power of two.
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_NAN = 255  # as float8_e8m0fnu; 0 and 1 are powers that make denormal numbers


def to_floats(raw: np.ndarray, kind: Type) -> np.ndarray:
    """Return rows of bytes as gguf dequantizes them, in float32 or the type's own floats."""
    raw = np.ascontiguousarray(raw)
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    import gguf.quants  # the package takes 70 ms, and few files need it

    # gguf.quants.dequantize works on 16 rows at a time and is 10 times slower than this method.
    quant = getattr(gguf.quants, kind.name)
    quant.init_grid()
    return quant.dequantize_rows(raw)


class Words(NamedTuple):
    """One stored tensor ``[rows, columns]``, which is filled some rows at a time."""

    kind: Type
    q: np.ndarray  # int8, in the range of the file
    scale: np.ndarray  # of MXFP4 the exponents' bytes
    minimum: np.ndarray | None

    def fill(self, rows: slice, raw: np.ndarray) -> None:
        """Store ``raw[rows, bytes]``."""
        target = self.q[rows]
        size = BLOCKS[self.kind][0]
        blocks = np.ascontiguousarray(raw).reshape(len(target), target.shape[1] // size, -1)
        if self.kind in (Type.Q4_0, Type.Q4_1):
            scale, minimum = _four_bits(self.kind, blocks, target)
        else:
            words, scale, minimum = _block(self.kind, blocks)
            target[...] = words.reshape(target.shape)
        self.scale[rows] = scale.reshape(len(target), -1)
        if minimum is not None:
            assert self.minimum is not None
            self.minimum[rows] = minimum.reshape(len(target), -1)

    def finite(self, rows: slice) -> bool:
        if self.kind == Type.MXFP4:
            return True
        both = (self.scale,) if self.minimum is None else (self.scale, self.minimum)
        return all(bool(np.isfinite(values[rows]).all()) for values in both)

    def to_qtensor(self, is_multiplied: bool = False) -> QTensor:
        """Return the words, which are consumed, with their scales.

        is_multiplied: whether the scales must be numbers that a multiplier changes.
        """
        from pallas_kernels.qtensor import QTensor

        q, scale, minimum = self.q, self.scale, self.minimum
        if self.kind == Type.MXFP4:
            if not is_multiplied and scale.max(initial=0) < _NAN and scale.min(initial=2) > 1:
                return QTensor(q.view(FP4), scale.view(E8M0))
            powers = np.ldexp(np.float32(1), scale.astype(np.int32) - 128)
            return QTensor(_E2M1_DOUBLED[q], powers)
        if minimum is None:
            return QTensor(to_int4(q) if self.kind in _INT4 else q, scale)
        if self.kind not in _UINT4:
            return QTensor(to_int4(q) if self.kind in _INT4 else q, scale, minimum)
        zero = minimum + np.float32(8.0) * scale
        exact = minimum.astype(np.float64) + 8.0 * scale.astype(np.float64)
        if not np.array_equal(zero.astype(np.float64), exact, equal_nan=True):
            return QTensor(q, scale, minimum)
        q -= np.int8(8)
        return QTensor(to_int4(q), scale, zero)


def empty(kind: Type, rows: int, columns: int) -> Words:
    dtype = np.uint8 if kind == Type.MXFP4 else np.float32
    scale = np.empty((rows, columns // _GROUP.get(kind, 32)), dtype)
    minimum = np.empty_like(scale) if kind in _MINIMUM else None
    return Words(kind, np.empty((rows, columns), np.int8), scale, minimum)


def _block(kind: Type, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return ``raw[rows, blocks, bytes]`` as words (int8), scales and minima (float32)."""
    if kind == Type.MXFP4:
        return _halves(raw[..., 1:]), raw[..., :1], None
    if kind == Type.Q8_0:
        return raw[..., 2:].view(np.int8), _half(raw, 0), None
    if kind in (Type.Q5_0, Type.Q5_1):
        head = 2 if kind == Type.Q5_0 else 4
        fifth = np.unpackbits(raw[..., head : head + 4], axis=-1, bitorder="little")
        words = (_halves(raw[..., head + 4 :]) | fifth << 4).astype(np.int8)
        if kind == Type.Q5_1:
            return words, _half(raw, 0), _half(raw, 2)
        return words - np.int8(16), _half(raw, 0), None
    if kind == Type.Q6_K:
        return _q6_k(raw)
    if kind in _SCALES:
        return _looked_up(kind, raw, _SCALES[kind](raw))
    if kind == Type.Q2_K:
        four = raw[..., 16:80].reshape(*raw.shape[:-1], 2, 1, 32)
        words = (four >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).view(np.int8)
        low, high = raw[..., :16] & 15, raw[..., :16] >> 4
        return words, _half(raw, 80) * low, -(_half(raw, 82) * high)
    scales, minima = _six_bits(raw[..., 4:16])
    words = _pairs(raw[..., -128:])
    if kind == Type.Q5_K:
        fifth = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        words = words | fifth << 4
    return words.astype(np.int8), _half(raw, 0) * scales, -(_half(raw, 2) * minima)


def _four_bits(
    kind: Type, raw: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Write Q4_0's or Q4_1's words to ``target[rows, columns]``; return scales and minima.

    Most files have these types, and a start waits for them. So words are handled eight at a time.
    For Q4_0 only the lower four bits of ``word - 8`` are written, which is all that int4 needs.
    """
    has_minimum = kind == Type.Q4_1
    low = np.ascontiguousarray(raw[..., 4 if has_minimum else 2 :]).view(np.uint64).reshape(-1, 2)
    high = low >> np.uint64(4)
    eights = target.view(np.uint64).reshape(-1, 4)
    for first, words in ((0, low), (2, high)):
        words &= np.uint64(0x0F0F0F0F0F0F0F0F)
        if not has_minimum:
            words ^= np.uint64(0x0808080808080808)
        for column in range(2):
            eights[:, first + column] = words[:, column]
    return _half(raw, 0), _half(raw, 2) if has_minimum else None


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at a byte of every block, as float32 ``[rows, blocks, 1]``."""
    return raw[..., at : at + 2].view("<f2").astype(np.float32)


def _halves(raw: np.ndarray) -> np.ndarray:
    """Return words of 4 bits: all low ones of a block, then all high ones."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1).view(np.int8)


def _pairs(raw: np.ndarray) -> np.ndarray:
    """Return 128 bytes as 8 groups of 32 words: the low ones of 32 bytes, then their high ones."""
    four = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate((four & 15, four >> 4), axis=-2).reshape(*raw.shape[:-1], 8, 32)


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 12 bytes as 8 scales and 8 minima of 6 bits.

    The upper two bits of the last four of each are in the first eight bytes.
    """
    first, second, last = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6) << 4), axis=-1)
    minima = np.concatenate((second & 63, last >> 4 | (second >> 6) << 4), axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q6_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 1, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=-3)  # [..., 2, low | high, 2, 32]
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    words = low.reshape(*high.shape) | high << 4
    scales = raw[..., 192:208].copy().view(np.int8).astype(np.float32)
    return words.view(np.int8) - np.int8(32), _half(raw, 208) * scales, None


def _looked_up(
    kind: Type, raw: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, None]:
    """Return words of a table: gguf's dequantized values, exact products, divided by the scale."""
    rows = raw.reshape(raw.shape[0], -1)
    groups = to_floats(rows, kind).reshape(*scale.shape[:2], scale.shape[2], -1)
    words = np.divide(
        groups, scale[..., None], out=np.zeros_like(groups), where=scale[..., None] != 0
    )
    return np.rint(np.nan_to_num(words, posinf=0, neginf=0)).astype(np.int8), scale, None


def _q3_k_scales(raw: np.ndarray) -> np.ndarray:
    """Return 16 scales of 6 bits: 4 low bits of each in 8 bytes, 2 high ones in 4."""
    low, high = raw[..., 96:104], raw[..., 104:108]
    low = np.concatenate((low & 15, low >> 4), axis=-1)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return _half(raw, 108) * ((low | high << 4).astype(np.float32) - 32)


def _iq4_xs_scales(raw: np.ndarray) -> np.ndarray:
    """Return 8 scales of 6 bits: 2 high bits of each in 2 bytes, 4 low ones in 4."""
    high = raw[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    low = _nibbles(raw[..., 4:8])
    return _half(raw, 0) * (low + 16 * high.reshape(low.shape).astype(np.float32) - 32)


def _iq1_m_scales(raw: np.ndarray) -> np.ndarray:
    """Return the scales of 4 words of 16 bits.

    Each word has four scales of 3 bits and, at the top, 4 bits of a float16.
    """
    four = raw[..., 48:56].copy().view("<u2")
    d = np.bitwise_or.reduce(four >> 12 << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
    scales = four[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    d = d[..., None].view("<f2").astype(np.float32)
    return d * (scales.reshape(*raw.shape[:-1], 16) * 2 + 1) / 8


def _nvfp4_scales(raw: np.ndarray) -> np.ndarray:
    """Return 4 scales of 8-bit floats."""
    from gguf.quants import NVFP4

    return NVFP4.ue4m3_to_fp32(raw[..., :4]).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Return each byte's lower and upper four bits, one after the other, as float32."""
    both = np.stack((raw & 15, raw >> 4), axis=-1)
    return both.reshape(*raw.shape[:-1], -1).astype(np.float32)


# The scales of types whose words come from a table or are ternary.
_SCALES: dict[Type, Callable[[np.ndarray], np.ndarray]] = {
    Type.Q3_K: _q3_k_scales,
    Type.TQ1_0: lambda raw: _half(raw, 52),
    Type.TQ2_0: lambda raw: _half(raw, 64),
    Type.NVFP4: _nvfp4_scales,
    Type.IQ1_S: lambda raw: _half(raw, 0) * ((raw[..., 35:50:2] >> 4 & 7) * 2 + 1) / 8,
    Type.IQ1_M: _iq1_m_scales,
    Type.IQ2_XXS: lambda raw: _half(raw, 0) * (2 * (raw[..., 9:66:8] >> 4) + 1) / 8,
    Type.IQ2_XS: lambda raw: _half(raw, 0) * (2 * _nibbles(raw[..., 66:74]) + 1) / 8,
    Type.IQ2_S: lambda raw: _half(raw, 0) * (2 * _nibbles(raw[..., 74:82]) + 1) / 8,
    Type.IQ3_XXS: lambda raw: _half(raw, 0) * (2 * (raw[..., 69:98:4] >> 4) + 1) / 4,
    Type.IQ3_S: lambda raw: _half(raw, 0) * (2 * _nibbles(raw[..., 106:110]) + 1),
    Type.IQ4_NL: lambda raw: _half(raw, 0),
    Type.IQ4_XS: _iq4_xs_scales,
}

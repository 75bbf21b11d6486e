"""How codes become the floats that the kernels of few rows multiply."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

_FACTOR_BITS = 94
# What makes float4 codes floats, and 2^-32, so that scales up to 2^33 do not overflow.
FLOAT4_FACTOR = 2.0**_FACTOR_BITS
FLOAT4_REST = 2.0 ** (126 - _FACTOR_BITS)  # what is left to multiply sums by
_HALF_OF_FLOAT8 = 7, 0x3F803F80, 0x5C005C00  # as in ``float8_pair``, of float16
_BYTE = 8388608.0 + 128.0  # the float whose low byte is 128, in units of its last place


def word_pairs(scheme: FewRowsScheme, word: Value, bias: Value) -> list[Value]:
    """The word's weights as pairs of floats: nibbles i, i + 4, or bytes i, i + 2.

    A nibble u = q + 8 below the exponent of 128 (bf16) or 1024 (f16) is the float 128 + u;
    flipping its top bit on the way in makes q unsigned.
    """
    if scheme.plain:
        return [word]
    if scheme.float8:
        return [float8_pair(half, scheme.kind) for half in (word, p.shift_right(word, 8))]
    if scheme.bits == 4 or scheme.kind == "f16":
        mask = 0x000F000F if scheme.bits == 4 else 0x00FF00FF
        low = (p.shift_right(word, scheme.bits * i) for i in range(16 // scheme.bits))
        flipped = (p.and_xor(w, mask, scheme.bias) for w in low)
        return [p.sub_pairs(w, bias, scheme.kind) for w in flipped]
    return [int8_pair(p.shift_right(word, 8 * i)) for i in range(2)]


def half_nibbles(word: Value, offset: Value) -> list[Value]:
    """The word's int4 codes less a zero as pairs of float16, exactly: nibbles i, i + 4.

    Under the exponent of 1024 a nibble u = q + 8 is 1024 + u at bits 0 to 3, and 1024 + 16 u at
    bits 4 to 7, which one multiply-add brings back.  offset: a pair of 8 + zero as integers.
    """
    low = p.add(offset, 0x64006400)
    high = p.add(p.mul(offset, 16), 0xD400D400)  # -(64 + 8 + zero)
    out = []
    for half in (word, p.shift_right(word, 8)):
        out.append(p.sub_pairs(p.and_xor(half, 0x000F000F, 0x64086408), low, "f16"))
        shifted = p.and_xor(half, 0x00F000F0, 0x64806480)
        out.append(p.fma_pairs(shifted, p.ci(0x2C002C00), high, "f16"))
    return out


def biased_nibbles(scheme: FewRowsScheme, word: Value) -> list[Value]:
    """Return 136 plus the word's int4 codes as pairs of bfloat16: nibbles i, i + 4."""
    low = (p.shift_right(word, 4 * i) for i in range(4))
    return [p.and_xor(w, 0x000F000F, scheme.bias) for w in low]


def float4_factors(scheme: FewRowsScheme, scales: Value) -> list[Value]:
    """Return the factor of each of a lane's 4 words, of its scales as they are stored."""
    if scheme.scale_kind == "e8m0":
        return [e8m0_factor(scales)] * 4
    low, high = p.masked(scales, 255), p.shift_right(scales, 8)
    return [f for half in (low, high) for f in [e4m3_factor(half)] * 2]


def float4_pairs(word: Value, factor: Value) -> list[Value]:
    """Return the word's float4_e2m1fn codes times a pair of bfloat16: nibbles i, i + 4.

    A code's exponent and mantissa are put at the lower end of bfloat16's exponent, which is 2^-126
    times its value.  So ``factor`` holds the scale times ``FLOAT4_FACTOR``.  The products are
    exact: a code has two significant bits, and a scale has at most four.
    """
    out = []
    for i in range(4):
        left = 6 - 4 * i
        magnitude = p.shift_left(word, left) if left > 0 else p.shift_right(word, -left)
        sign = p.masked(p.shift_left(word, 12 - 4 * i) if i < 3 else word, 0x80008000)
        out.append(p.mul_pairs(p.select_bits(magnitude, 0x01C001C0, sign), factor))
    return out


def float4_bits(pair: Value) -> Value:
    """Return the codes at the low ends of two half words at bfloat16's places, times 2^-126."""
    sign = p.masked(p.shift_left(pair, 12), 0x80008000)
    return p.select_bits(p.shift_left(pair, 6), 0x01C001C0, sign)


def int8_pair(word: Value) -> Value:
    """Return the int8 in bytes 0 and 2 of a word as a pair of bfloat16, exactly.

    bfloat16's 7 bits hold no byte: its sign is split off and taken from 128 or 256.
    """
    low = p.and_xor(word, 0x007F007F, 0x43004300)
    return p.sub_pairs(low, p.and_xor(word, 0x00800080, 0x43004300))


def float8_pair(word: Value, kind: str = "bf16") -> Value:
    """Return the float8_e4m3fn codes in bytes 0 and 2 of a word as a pair, exactly.

    A code's fields are put at the lower end of the wider exponent, which is 2^-120 (bfloat16) or
    2^-8 (float16) times its value.
    """
    shift, mask, factor = (4, 0x07F007F0, 0x7B807B80) if kind == "bf16" else _HALF_OF_FLOAT8
    sign = p.masked(p.shift_left(word, 8), 0x80008000)
    return p.mul_pairs(p.select_bits(p.shift_left(word, shift), mask, sign), p.ci(factor), kind)


def e8m0_factor(scale: Value) -> Value:
    """Return a pair of a float8_e8m0fnu scale times ``FLOAT4_FACTOR``; 2^34 and above are inf."""
    field = p.mul(p.minimum(p.masked(scale, 255), 255 - _FACTOR_BITS), 0x00800080)
    return p.add(field, _FACTOR_BITS * 0x00800080)


def e4m3_factor(scale: Value) -> Value:
    """Return a pair of a float8_e4m3fn scale times ``FLOAT4_FACTOR``; scale: no negative one.

    Its bits at the lower end of bfloat16's exponent are 2^-120 times its value.  Two products are
    needed for 2^214.
    """
    low = p.mul(scale, 0x00100010)
    half = p.ci(((_FACTOR_BITS + 120) // 2 + 127) * 0x00800080)
    return p.mul_pairs(p.mul_pairs(low, half), half)


def x_pairs(scheme: FewRowsScheme, xs: Sequence[Value]) -> Sequence[Value]:
    """x of a word's columns, as loaded (neighbours in a pair), in the order of word_pairs."""
    if scheme.plain:
        return xs
    half = len(xs) // 2
    return [
        p.permute(xs[i], xs[i + half], selector)
        for i in range(half)
        for selector in (0x5410, 0x7632)
    ]


def floats(bits: int, word: Value) -> list[Value]:
    """The values of a word of bfloat16 or int8, in the order of its bytes."""
    if bits == 16:
        return [p.widen(word, "bf16"), p.widen_high(word, "bf16")]
    flipped = arith.xori(word, p.ci(0x80808080))
    made = [p.permute(flipped, p.ci(0x4B000000), 0x7540 + i) for i in range(4)]
    return [arith.addf(p.from_bits(m), p.cf(-_BYTE)) for m in made]

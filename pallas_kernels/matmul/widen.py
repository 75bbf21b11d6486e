"""How codes of a weight become the 16-bit floats that a kernel multiplies.

``word_pairs`` is the table by how a weight is stored.  The other functions are its entries, and the
scales.  A code stands under a constant exponent until a bias is taken off, which also takes off an
integer zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.ptx import Value

_FACTOR_BITS = 94
# What makes float4 codes floats, and 2^-32, so that scales up to 2^33 do not overflow.
FLOAT4_FACTOR = 2.0**_FACTOR_BITS
FLOAT4_REST = 2.0 ** (126 - _FACTOR_BITS)  # what is left to multiply sums by
FLOAT4_BITS = 0x81C081C0  # where two codes lie in a pair of bfloat16
# Selectors of PRMT.  The first two bytes, each with its sign in the byte above:
NEIGHBOURS = 0x9180
FLOAT4_BYTE = 0xC480  # byte 0 of the first and of the second word, with their signs
_HALF_OF_FLOAT8 = 7, 0xBF80BF80, 0x5C005C00  # as in ``float8_pair``, of float16
_BYTE = 8388608.0 + 128.0  # the float whose low byte is 128, in units of its last place


def code_bias(weight: StoredWeight, kind: str = "bf16") -> int:
    """Return the pair of floats that integer codes of 0 become before it is taken off again."""
    if weight.bits == 4:
        return 0x43084308 if kind == "bf16" else 0x64086408
    return 0x64806480


def word_pairs(
    weight: StoredWeight, word: Value, bias: Value, kind: str = "bf16", *, neighbours: bool = False
) -> list[Value]:
    """Return the word's weights as pairs of floats: nibbles i, i + 4, or bytes i, i + 2.

    A nibble u = q + 8 below the exponent of 128 (bf16) or 1024 (f16) is the float 128 + u;
    flipping its top bit on the way in makes q unsigned.

    neighbours: nibbles 2 i, 2 i + 1, or bytes, so that x needs no other order.  Such pairs of
    float4_e2m1fn lack the factor that is in their scales'.
    """
    if weight.plain:
        return [word]
    if weight.float4:
        return [float4_neighbours(word, FLOAT4_BYTE + 0x1111 * i) for i in range(4)]
    if weight.float8:
        first, step = (NEIGHBOURS, 0x2222) if neighbours else (0xA280, 0x1111)
        return [float8_pair(word, first + step * i, kind) for i in range(2)]
    if not neighbours:
        spread = (word >> (weight.bits * i) for i in range(16 // weight.bits))
    elif weight.bits == 4:
        upper = word >> 4
        spread = (p.permute(word, upper, 0x4400 + 0x1111 * i) for i in range(4))
    else:
        spread = (p.permute(word, word, selector) for selector in (0x1100, 0x3322))
    if weight.bits == 8 and kind == "bf16":
        return [int8_pair(half) for half in spread]
    mask, under = 0x000F000F if weight.bits == 4 else 0x00FF00FF, code_bias(weight, kind)
    return [p.sub_pairs(p.and_xor(half, mask, under), bias, kind) for half in list(spread)]


def half_nibbles(word: Value, offset: Value) -> list[Value]:
    """The word's int4 codes less a zero as pairs of float16, exactly: nibbles i, i + 4.

    Under the exponent of 1024 a nibble u = q + 8 is 1024 + u at bits 0 to 3.  At bits 4 to 7 it is
    1024 + 16 u, which one multiply-add brings back.  offset: a pair of 8 + zero as integers.
    """
    low = offset + 0x64006400
    high = offset * 16 + 0xD400D400  # -(64 + 8 + zero)
    out = []
    for half in (word, word >> 8):
        out.append(p.sub_pairs(p.and_xor(half, 0x000F000F, 0x64086408), low, "f16"))
        shifted = p.and_xor(half, 0x00F000F0, 0x64806480)
        out.append(p.fma_pairs(shifted, p.ci(0x2C002C00), high, "f16"))
    return out


def biased_nibbles(word: Value) -> list[Value]:
    """Return 136 plus the word's int4 codes as pairs of bfloat16: nibbles i, i + 4."""
    low = (word >> (4 * i) for i in range(4))
    return [p.and_xor(w, 0x000F000F, 0x43084308) for w in low]


def scale_pair(weight: StoredWeight, scale: Value, kind: str) -> Value:
    """Return a scale, as it is stored, as the pair that weights of ``kind`` are multiplied by."""
    if weight.scale_kind == "e8m0":
        return e8m0_factor(scale)
    if weight.scale_kind == "e4m3":
        return e4m3_factor(scale)
    return doubled(scale, weight.scale_kind, kind)


def doubled(value: Value, kind: str, wanted: str) -> Value:
    """Return a stored float of ``kind`` as a pair of the wanted kind."""
    if kind == "f32":
        value = p.narrow(value, wanted)
    elif kind != wanted:
        value = p.narrow(p.widen(value, kind), wanted)
    return p.permute(value, value, 0x1010)


def float4_factors(weight: StoredWeight, scales: Value) -> list[Value]:
    """Return the factor of each of a lane's 4 words, of its scales as they are stored."""
    if weight.scale_kind == "e8m0":
        return [e8m0_factor(scales)] * 4
    return [factor for factor in e4m3_factors(scales) for _ in range(2)]


def float4_pairs(word: Value, factor: Value) -> list[Value]:
    """Return the word's float4_e2m1fn codes times a pair of bfloat16: nibbles i, i + 4.

    A code's exponent and mantissa are put at the lower end of bfloat16's exponent, which is 2^-126
    times its value.  So ``factor`` holds the scale times ``FLOAT4_FACTOR``.  The products are
    exact: a code has two significant bits, and a scale has at most four.

    In bfloat16 seven bits lie between a sign and the rest of a code, in a word none.  Moving the
    signs of two codes up, or the rest of two codes down, opens both gaps at once.
    """
    low = p.merge_bits(word << 6, 0x22002200, word)
    high = p.merge_bits(word >> 6, 0x01DC01DC, word)
    placed = low << 6, low << 2, high << 4, high
    return [p.mul_pairs(v & FLOAT4_BITS, factor) for v in placed]


def float4_neighbours(word: Value, selector: int | Value = FLOAT4_BYTE) -> Value:
    """Return the codes of a byte of a word at bfloat16's places, times 2^-126.

    selector: ``FLOAT4_BYTE`` and 0x1111 times the byte.  So PRMT fills the upper half of each half
    word with the sign of the code at the top of the lower.
    """
    extended = p.permute(word << 4, word, selector)
    return (extended << 2) & FLOAT4_BITS


def int8_pair(word: Value) -> Value:
    """Return the int8 in bytes 0 and 2 of a word as a pair of bfloat16, exactly.

    bfloat16's 7 bits hold no byte: its sign is split off and taken from 128 or 256.
    """
    low = p.and_xor(word, 0x007F007F, 0x43004300)
    return p.sub_pairs(low, p.and_xor(word, 0x00800080, 0x43004300))


def float8_pair(word: Value, selector: int = NEIGHBOURS, kind: str = "bf16") -> Value:
    """Return two float8_e4m3fn codes of a word as a pair, exactly.

    A code's fields are put at the lower end of the wider exponent, which is 2^-120 (bfloat16) or
    2^-8 (float16) times its value.  selector: of PRMT, which fills the byte above each code with
    its sign, so that one shift and one mask place all of it.
    """
    shift, mask, factor = (4, 0x87F087F0, 0x7B807B80) if kind == "bf16" else _HALF_OF_FLOAT8
    extended = p.permute(word, word, selector)
    return p.mul_pairs((extended << shift) & mask, p.ci(factor), kind)


def e8m0_factor(scale: Value) -> Value:
    """Return a pair of a float8_e8m0fnu scale times ``FLOAT4_FACTOR``; 2^34 and above are inf."""
    field = p.minimum(scale & 255, 255 - _FACTOR_BITS) * 0x00800080
    return field + _FACTOR_BITS * 0x00800080


def e4m3_factor(scale: Value) -> Value:
    """Return a pair of a float8_e4m3fn scale times ``FLOAT4_FACTOR``; scale: no negative one."""
    return _e4m3_floats(scale * 0x00100010)


def e4m3_factors(word: Value, first: int = 0) -> list[Value]:
    """Return ``e4m3_factor`` of the scales in bytes ``first`` and ``first`` + 1."""
    both = p.permute(word, p.ci(0), 0x4140 + 0x0101 * first)
    pair = _e4m3_floats(both << 4)
    return [p.permute(pair, pair, 0x1010), p.permute(pair, pair, 0x3232)]


def factors_of_64(kind: str, word: Value) -> list[Value]:
    """Return the factors of 64 columns, of the scales in a word: 2 of e8m0 or 4 of e4m3."""
    if kind == "e8m0":
        return [e8m0_factor(word), e8m0_factor(word >> 8)]
    return [*e4m3_factors(word), *e4m3_factors(word, 2)]


def _e4m3_floats(low: Value) -> Value:
    """Return two float8_e4m3fn codes at the lower end of bfloat16's exponent as factors.

    They are 2^-120 times their values.  Two products are needed for 2^214.
    """
    half = p.ci(((_FACTOR_BITS + 120) // 2 + 127) * 0x00800080)
    return p.mul_pairs(p.mul_pairs(low, half), half)


def x_pairs(weight: StoredWeight, xs: Sequence[Value]) -> Sequence[Value]:
    """x of a word's columns, as loaded (neighbours in a pair), in the order of word_pairs."""
    if weight.plain:
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
    flipped = word ^ 0x80808080
    made = [p.permute(flipped, p.ci(0x4B000000), 0x7540 + i) for i in range(4)]
    return [p.from_bits(m) + -_BYTE for m in made]

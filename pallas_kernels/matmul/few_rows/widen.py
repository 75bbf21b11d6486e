"""How codes become the floats that the kernels of few rows multiply."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

_BYTE = 8388608.0 + 128.0  # the float whose low byte is 128, in units of its last place


def word_pairs(scheme: FewRowsScheme, word: Value, bias: Value) -> list[Value]:
    """The word's weights as pairs of floats: nibbles i, i + 4, or bytes i, i + 2.

    A nibble u = q + 8 below the exponent of 128 (bf16) or 1024 (f16) is the float 128 + u;
    flipping its top bit on the way in makes q unsigned.  bf16's 7 bits hold no byte: its sign
    is split off and taken from 128 or 256.
    """
    if scheme.plain:
        return [word]
    if scheme.bits == 4 or scheme.kind == "f16":
        mask = 0x000F000F if scheme.bits == 4 else 0x00FF00FF
        low = (p.shift_right(word, scheme.bits * i) for i in range(16 // scheme.bits))
        flipped = (p.and_xor(w, mask, scheme.bias) for w in low)
        return [p.sub_pairs(w, bias, scheme.kind) for w in flipped]
    out = []
    for i in range(2):
        w = p.shift_right(word, 8 * i)
        low = p.and_xor(w, 0x007F007F, 0x43004300)
        sign = p.and_xor(w, 0x00800080, 0x43004300)
        out.append(p.sub_pairs(low, sign, scheme.kind))
    return out


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

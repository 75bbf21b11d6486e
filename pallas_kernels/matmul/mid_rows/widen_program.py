"""How the codes of ``mid_program`` become 16-bit floats: pairs of neighbouring columns.

As in ``few_rows.widen``, a code stands under a constant exponent until a bias is taken off, which
also takes off an integer zero.  There a word's pairs are not neighbours, and x is permuted instead;
here a block reads x too often for that.
"""

from __future__ import annotations

from pallas_kernels import ptx as p
from pallas_kernels.matmul.few_rows import widen as few_rows
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.ptx import Value

# PRMT's selectors of a word's bytes, and of its pairs of bytes.
_FLOAT4 = [few_rows.FLOAT4_BYTE + 0x1111 * i for i in range(4)]
_FLOAT8 = [few_rows.NEIGHBOURS + 0x2222 * i for i in range(2)]


def neighbours(w: FewRowsScheme, word: Value, zero: Value | None) -> list[Value]:
    """Return the word's codes less zero: pairs, the word's lowest bits first.

    float4_e2m1fn codes lack the factor that is in their scales' (``few_rows.widen``).
    """
    if w.float4:
        return [few_rows.float4_neighbours(word, selector) for selector in _FLOAT4]
    if w.float8:
        return [few_rows.float8_pair(word, selector, w.kind) for selector in _FLOAT8]
    if w.bits == 8 and w.kind == "bf16":
        spread = (p.permute(word, word, selector) for selector in (0x1100, 0x3322))
        return [few_rows.int8_pair(x) for x in spread]
    if w.bits == 8:
        spread, mask = [p.permute(word, word, selector) for selector in (0x1100, 0x3322)], 0xFF
    else:
        upper, mask = word >> 4, 0xF
        spread = [p.permute(word, upper, 0x4400 + 0x1111 * i) for i in range(4)]
    bias = p.ci(w.bias)
    if zero is not None:
        bias = bias + zero * 0x00010001
    return [p.sub_pairs(p.and_xor(x, mask * 0x00010001, w.bias), bias, w.kind) for x in spread]


def factor_of(w: FewRowsScheme, scale: Value, kind: str | None) -> Value:
    """Return a stored scale as the pair that weights are multiplied by."""
    if w.scale_kind == "e8m0":
        return few_rows.e8m0_factor(scale)
    if w.scale_kind == "e4m3":
        return few_rows.e4m3_factor(scale)
    return doubled(scale, kind or "", w.kind)


def doubled(value: Value, kind: str, wanted: str) -> Value:
    """Return a stored float of ``kind`` as a pair of the wanted kind."""
    if kind == "f32":
        value = p.narrow(value, wanted)
    elif kind != wanted:
        value = p.narrow(p.widen(value, kind), wanted)
    return p.permute(value, value, 0x1010)

"""How the decode kernel's lanes share out a cached head, and how its codes become floats.

A lane takes the features that lie side by side in memory, since sums over features may run in any
order; the query's pairs and the values' token pairs are put in the same order.

int4 codes are not converted at all.  A code u + 8, masked out of its 32 bits, is the subnormal
float16 (u + 8) 2^-24. The mma multiplies it exactly; one masked out 4 bits higher is 16 times as
much.  The code that multiplies them corrects these factors (``Codes.steps``).  The zero points
absorb the 8.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels.rows.fused_parts import KIND, floats, packed

_BITS = {"bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "float8_e4m3fn": 8}


class Codes:
    """How a token's row of one kv head (``head_dim`` features) is cut up and becomes floats."""

    def __init__(self, dtype, head_dim: int, groups: int, q_kind: str):
        name = jnp.dtype(dtype).name
        self.name, self.bits, self.groups, self.head_dim = name, _BITS[name], groups, head_dim
        self.quantized = name not in KIND
        self.zeros = name == "int4"
        # Operand dtypes of the two mmas.  Codes are exact in bf16, whose range holds any weight
        # times any scale.  int4 codes are float16 subnormals, and their scales are float16.
        self.q_kind = "f16" if self.zeros else q_kind
        self.v_kind = "f16" if self.zeros else "bf16" if self.quantized else q_kind
        # Factors for the two floats of a pair (``pairs``, and a lane's values).
        self.steps = (2.0**24, 2.0**20) if self.zeros else (1.0, 1.0)
        self.scale_size = 2 if self.zeros else 4
        self.staged = groups * (1 + self.zeros)  # numbers of a token that come with its codes
        self.row_bytes = head_dim * self.bits // 8
        self.per_word = 32 // self.bits
        self.group_bytes = self.row_bytes // groups
        # A chunk is what a lane copies and reads at once.  One mma sums over four lanes' chunks of
        # keys, and holds eight lanes' chunks of values under one scale: neither leaves a group.
        self.k_chunk = min(16, self.group_bytes // 4)
        self.v_chunk = min(16, self.group_bytes // 8)
        self.k_chunks = self.row_bytes // (4 * self.k_chunk)
        self.v_chunks = self.row_bytes // (8 * self.v_chunk)

    @classmethod
    def of(cls, q, k) -> Codes:
        """Return the Codes of a cache ``k``; q gives the dtype of a cache of floats."""
        groups = 1 if k.dtype == q.dtype else k.scale.shape[-1]
        return cls(k.dtype, k.shape[-1], groups, KIND[q.dtype.name])

    def pairs(self, word, kind: str):
        """16-bit pairs of one word: features (i, i + per_word / 2)."""
        if self.bits == 16:
            return [word]
        if self.name == "float8_e4m3fn":
            # Sign, exponent and fraction are moved into place; the exponents' biases differ.
            shift, factor = {"bf16": (4, 0x7B807B80), "f16": (1, 0x5C005C00)}[kind]
            out = []
            for high in (word << 8, word):
                sign = high & 0x80008000
                mask = (0x7F00 >> shift) * 0x00010001
                moved = p.select_bits(high >> shift, mask, sign)
                out.append(p.mul_pairs(moved, p.ci(factor), kind))
            return out
        if self.bits == 4:
            return [
                p.and_xor(word >> (8 * i), mask, mask // 15 * 8)
                for i in range(2)
                for mask in (0x000F000F, 0x00F000F0)
            ]
        out = []
        for i in range(2):
            w = word >> (8 * i)
            if kind == "f16":
                biased = p.and_xor(w, 0x00FF00FF, 0x64806480)
                out.append(p.sub_pairs(biased, p.ci(0x64806480), kind))
            else:
                low = p.and_xor(w, 0x007F007F, 0x43004300)
                sign = p.and_xor(w, 0x00800080, 0x43004300)
                out.append(p.sub_pairs(low, sign, kind))
        return out

    def query_pairs(self, words):
        """Query features (16-bit pairs in order) that meet one word's ``pairs``."""
        if self.bits == 16:
            return list(words)
        if self.bits == 8:
            x, y = words
            return [p.permute(x, y, 0x5410), p.permute(x, y, 0x7632)]
        x, y, z, w = words
        sixteenth = p.ci(0x2C002C00)
        return [
            p.permute(x, z, 0x5410),
            p.mul_pairs(p.permute(x, z, 0x7632), sixteenth, "f16"),
            p.permute(y, w, 0x5410),
            p.mul_pairs(p.permute(y, w, 0x7632), sixteenth, "f16"),
        ]

    def value_pairs(self, first, second):
        """Pairs (first token, second token) of each feature of one word, in order."""
        low, high = p.permute(first, second, 0x5410), p.permute(first, second, 0x7632)
        return self.pairs(low, self.v_kind) + self.pairs(high, self.v_kind)


def as_float16(raw, factor, kind):
    """Return query words as float16, and the factor of the scores that undoes their scale. The
    scale is the power of two that brings the warp's largest query to 2^14."""
    chunks = [floats(words, kind) for words in raw]
    best = functools.reduce(p.maximum, [p.absolute(x) for values in chunks for x in values])
    best = p.over_lanes(best, (1, 2, 4, 8, 16), p.maximum)
    exponent = p.larger(p.bits(best) >> 23, 15)

    def power(word):
        return p.from_bits(word << 23)

    up = power(127 + 127 + 14 - exponent)
    chunks = [[x * up for x in values] for values in chunks]
    return [packed(values, "f16") for values in chunks], factor * power(exponent - 14)


def query_sums_of(query, codes):
    """Return the sums of query features that multiply each group's codes.

    They are indexed [group][head 2 quad | 2 quad + 1].
    """
    sums = [[p.cf(0.0)] * 4 for _ in range(codes.groups)]
    # Those that meet codes 16 times too large are that much smaller.
    ones = [p.ci(0x3C003C00)] * 2 + [p.ci(0x4C004C00)] * 2
    for j, pairs in enumerate(query):
        of = j * 4 * codes.k_chunk // codes.group_bytes
        for s in range(0, len(pairs), 2):
            sums[of] = p.mma(sums[of], ones, pairs[s : s + 2], codes.q_kind)
    return [x[:2] for x in sums]


def hadamard_of_lanes(values, lane, lanes: int):
    """``hadamard`` of the features that each run of ``lanes`` lanes holds, ``values`` of them each:
    a bit of a feature's number has to be one of the lane's number or of the place in ``values``."""
    size = lanes * len(values)
    for bit in range(lanes.bit_length() - 1):
        upper = (lane >> bit) & 1
        sign = p.where(upper < 1, p.cf(1.0), p.cf(-1.0))
        values = [p.fma(x, sign, p.shuffle_xor(x, 1 << bit)) for x in values]
    step = 1
    while step < len(values):
        values = [
            x + values[i ^ step] if not i & step else values[i ^ step] - x
            for i, x in enumerate(values)
        ]
        step *= 2
    return [x * size ** (-0.5) for x in values]

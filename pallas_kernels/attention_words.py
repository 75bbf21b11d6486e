"""How the decode kernel's lanes share out a cached head, and how its words become floats.

A lane takes the features that lie side by side in memory, since sums over features may run in any
order; the query's pairs and the values' token pairs are put in the same order.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels import attention_ptx as a
from pallas_kernels import mosaic as p

KIND = {"bfloat16": "bf16", "float16": "f16"}
_BITS = {"bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "float8_e4m3fn": 8}


class Words:
    """How a token's row of one kv head (``head_dim`` features) is cut up and becomes floats."""

    def __init__(self, dtype, head_dim: int, groups: int, q_kind: str):
        name = jnp.dtype(dtype).name
        self.name, self.bits, self.groups = name, _BITS[name], groups
        self.quantized = name not in KIND
        self.q_kind = q_kind
        # Words are exact in bf16, whose range holds any weight times any scale.
        self.v_kind = "bf16" if self.quantized else q_kind
        self.row_bytes = head_dim * self.bits // 8
        self.per_word = 32 // self.bits
        self.group_bytes = self.row_bytes // groups
        # A chunk is what a lane copies and reads at once.  One mma sums over four lanes' chunks of
        # keys, and holds eight lanes' chunks of values under one scale: neither leaves a group.
        self.k_chunk = min(16, self.group_bytes // 4)
        self.v_chunk = min(16, self.group_bytes // 8)
        self.k_chunks = self.row_bytes // (4 * self.k_chunk)
        self.v_chunks = self.row_bytes // (8 * self.v_chunk)

    def pairs(self, word, kind: str):
        """16-bit pairs of one word: features (i, i + per_word / 2)."""
        if self.bits == 16:
            return [word]
        if self.name == "float8_e4m3fn":
            # Sign, exponent and fraction are moved into place; the exponents' biases differ.
            shift, factor = {"bf16": (4, 0x7B807B80), "f16": (1, 0x5C005C00)}[kind]
            out = []
            for high in (arith.shli(word, p.ci(8)), word):
                sign = arith.andi(high, p.ci(0x80008000))
                mask = (0x7F00 >> shift) * 0x00010001
                moved = a.select_bits(p.shift_right(high, shift), mask, sign)
                out.append(a.mul_pairs(moved, p.ci(factor), kind))
            return out
        if self.bits == 4:
            magic = 0x43084308 if kind == "bf16" else 0x64086408
            return [
                p.sub_pairs(p.and_xor(p.shift_right(word, 4 * i), 0x000F000F, magic),
                            p.ci(magic), kind)
                for i in range(4)
            ]  # fmt: skip
        out = []
        for i in range(2):
            w = p.shift_right(word, 8 * i)
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
        return [
            p.permute(x, z, 0x5410), p.permute(x, z, 0x7632),
            p.permute(y, w, 0x5410), p.permute(y, w, 0x7632),
        ]  # fmt: skip

    def value_pairs(self, first, second):
        """Pairs (first token, second token) of each feature of one word, in order."""
        low, high = p.permute(first, second, 0x5410), p.permute(first, second, 0x7632)
        return self.pairs(low, self.v_kind) + self.pairs(high, self.v_kind)

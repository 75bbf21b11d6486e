"""How the words of a weight become the 16-bit floats that the decode matmul multiplies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic as p
from pallas_kernels.qtensor import QTensor

KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class Scheme:
    """int4 or int8 words with scales, or plain 16-bit floats, beside activations of ``kind``."""

    def __init__(self, w: jax.Array | QTensor, kind: str):
        self.kind = kind
        self.zero = None
        self.plain = not isinstance(w, QTensor)
        if self.plain:
            self.bits, self.group, self.n_groups = 16, w.shape[1], 0
            self.scale_kind, self.scale_bytes, self.zero_bytes = None, 0, 0
            return
        self.bits = 4 if w.dtype == jnp.int4 else 8
        self.group = w.group_size
        self.n_groups = w.scale.shape[1]
        self.scale_kind = KIND[jnp.dtype(w.scale.dtype).name]
        self.scale_bytes = w.scale.dtype.itemsize
        self.zero_bytes = 0 if w.zero is None else w.zero.dtype.itemsize
        if w.zero is not None:
            self.zero = "int" if jnp.issubdtype(w.zero.dtype, jnp.integer) else "float"

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def columns(self) -> int:
        """Columns of a block: 4 lanes x 4 words."""
        return 16 * self.per_word

    @property
    def fold(self) -> bool:
        """Whether scales go into the 16-bit weights instead of the group's float32 sum."""
        return self.group % self.columns != 0 or self.zero == "float"

    @property
    def bias(self) -> int:
        """The pair of floats that a word of 0 becomes before it is taken off again."""
        if self.bits == 4:
            return 0x43084308 if self.kind == "bf16" else 0x64086408
        return 0x64806480

    def word_pairs(self, word, bias):
        """The word's weights as pairs of floats: nibbles i, i + 4, or bytes i, i + 2.

        A nibble u = q + 8 below the exponent of 128 (bf16) or 1024 (f16) is the float 128 + u;
        flipping its top bit on the way in makes q unsigned.  bf16's 7 bits hold no byte: its sign
        is split off and taken from 128 or 256.
        """
        if self.plain:
            return [word]
        flip = self.bias
        if self.bits == 4 or self.kind == "f16":
            mask = 0x000F000F if self.bits == 4 else 0x00FF00FF
            return [
                p.sub_pairs(
                    p.and_xor(p.shift_right(word, self.bits * i), mask, flip), bias, self.kind
                )
                for i in range(16 // self.bits)
            ]
        out = []
        for i in range(2):
            w = p.shift_right(word, 8 * i)
            low = p.and_xor(w, 0x007F007F, 0x43004300)
            sign = p.and_xor(w, 0x00800080, 0x43004300)
            out.append(p.sub_pairs(low, sign, self.kind))
        return out

    def x_pairs(self, xs):
        """x of a word's columns, as loaded (neighbours in a pair), in the order of word_pairs."""
        if self.plain:
            return xs
        half = len(xs) // 2
        return [
            p.permute(xs[i], xs[i + half], selector)
            for i in range(half)
            for selector in (0x5410, 0x7632)
        ]

"""Pieces of what kernels fuse around a product or a step, float32 in registers.

Everything runs while a kernel is traced.  ``rows.one_row`` has a SiLU of its own, whose division is
approximate.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.lib.mlir.dialects import arith

from pallas_kernels import mosaic as p
from pallas_kernels import ptx as a
from pallas_kernels.mosaic import LOG2E, Value


def floats(words: Sequence[Value]) -> list[Value]:
    """The values of words that hold two bfloat16 each."""
    return [f(word, "bf16") for word in words for f in (p.widen, p.widen_high)]


def silu(gate: Value) -> Value:
    power = a.exp2(arith.mulf(gate, p.cf(-LOG2E)))
    return a.divide(gate, arith.addf(power, p.cf(1.0)))


def rounded_sum(words: Sequence[Value], addends: Sequence[Value]) -> list[Value]:
    """bfloat16 pairs plus floats, rounded, as pairs again."""
    sums = [arith.addf(v, more) for v, more in zip(floats(words), addends, strict=True)]
    return [a.pack(*sums[i : i + 2], "bf16") for i in range(0, len(sums), 2)]

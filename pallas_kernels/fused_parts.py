"""Pieces of what kernels fuse around a product or a step, float32 in registers.

Everything runs while a kernel is traced.  ``rows.one_row`` has a SiLU of its own, whose division is
approximate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import LOG2E, Value

KIND = {"bfloat16": "bf16", "float16": "f16"}  # of 16-bit floats, by dtype


def floats(words: Sequence[Value], kind: str = "bf16") -> list[Value]:
    """The values of words that hold two 16-bit floats each."""
    return [f(word, kind) for word in words for f in (p.widen, p.widen_high)]


def packed(values: Sequence[Value], kind: str = "bf16") -> list[Value]:
    """Values rounded to 16-bit floats, two to a word."""
    return [p.pack(*values[i : i + 2], kind) for i in range(0, len(values), 2)]


def layer_address(ref: Value | tuple[Value, ...] | None, layer: Value | None) -> Value | None:
    """Return the address of an operand in device memory, or None if ``ref`` is None.

    If ``ref`` is a tuple with one operand per layer, return the address of ``layer``'s operand.
    """
    if not isinstance(ref, tuple):
        return None if ref is None else p.address(ref)
    base, *others = map(p.address, ref)
    for i, other in enumerate(others, 1):
        base = arith.select(p.equal(layer, i), other, base)
    return base


def silu(gate: Value) -> Value:
    return _times_logistic(gate, gate)


def gelu_tanh(gate: Value) -> Value:
    """GELU's approximation by tanh (arXiv 1606.08415): (1 + tanh u) / 2 is the logistic of 2 u."""
    return _times_logistic(gate, gelu_argument(gate))


def gelu_argument(gate: Value) -> Value:
    """What ``gelu_tanh`` takes the logistic of."""
    u = arith.mulf(gate, p.fma(arith.mulf(gate, gate), p.cf(0.044715), p.cf(1.0)))
    return arith.mulf(u, p.cf(math.sqrt(8 / math.pi)))


def _times_logistic(gate: Value, x: Value) -> Value:
    power = p.exp2(arith.mulf(x, p.cf(-LOG2E)))
    return p.divide(gate, arith.addf(power, p.cf(1.0)))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def rounded_sum(words: Sequence[Value], addends: Sequence[Value]) -> list[Value]:
    """bfloat16 pairs plus floats, rounded, as pairs again."""
    return packed([arith.addf(v, more) for v, more in zip(floats(words), addends, strict=True)])

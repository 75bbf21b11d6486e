"""Pieces of what kernels fuse around a product or a step, float32 in registers.

Everything runs while a kernel is traced.  ``rows.one_row`` has a SiLU of its own, whose division is
approximate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import ClampedGate
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


def gated(
    how: str | ClampedGate,
    gate: Value,
    up: Value,
    divide: Callable[[Value, Value], Value] | None = None,
) -> Value:
    """``activation(gate) * up`` of "silu", "gelu_tanh" (arXiv 1606.08415) or a ClampedGate.

    gelu_tanh: (1 + tanh u) / 2 is the logistic of 2 u.  A NaN stays one under a ClampedGate.
    divide: the division of the gate by 1 + e^-x, ``ptx.divide`` if None.
    """
    if isinstance(how, ClampedGate):
        gate, up = (_replaced("OGT", v, how.limit) for v in (gate, up))
        up = arith.addf(_replaced("OLT", up, -how.limit), p.cf(1.0))
        x = arith.mulf(gate, p.cf(how.alpha))
    elif how == "gelu_tanh":
        u = arith.mulf(gate, p.fma(arith.mulf(gate, gate), p.cf(0.044715), p.cf(1.0)))
        x = arith.mulf(u, p.cf(math.sqrt(8 / math.pi)))
    else:
        x = gate
    return arith.mulf(_times_logistic(gate, x, divide or p.divide), up)


def silu(gate: Value) -> Value:
    return _times_logistic(gate, gate, p.divide)


def _times_logistic(gate: Value, x: Value, divide: Callable[[Value, Value], Value]) -> Value:
    power = p.exp2(arith.mulf(x, p.cf(-LOG2E)))
    return divide(gate, arith.addf(power, p.cf(1.0)))


def times_reciprocal(a: Value, b: Value) -> Value:
    """a / b to two units in the last place, beside wgmma, which waits for a division."""
    return arith.mulf(a, p.reciprocal(b))


def _replaced(comparison: str, value: Value, limit: float) -> Value:
    is_beyond = arith.cmpf(getattr(arith.CmpFPredicate, comparison), value, p.cf(limit))
    return arith.select(is_beyond, p.cf(limit), value)


def rounded_sum(words: Sequence[Value], addends: Sequence[Value]) -> list[Value]:
    """bfloat16 pairs plus floats, rounded, as pairs again."""
    return packed([arith.addf(v, more) for v, more in zip(floats(words), addends, strict=True)])

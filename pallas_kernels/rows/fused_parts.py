"""Pieces of what kernels fuse around a product or a step, float32 in registers.

Everything runs while a kernel is traced.  ``rows.one_row`` has a SiLU of its own, whose division is
approximate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import ClampedGate
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
        base = p.where(p.equal(layer, i), other, base)
    return base


def gated(how: str | ClampedGate, gate: Value, up: Value) -> Value:
    """``activation(gate) * up`` of "silu", "gelu_tanh" (arXiv 1606.08415) or a ClampedGate.

    gelu_tanh: (1 + tanh u) / 2 is the logistic of 2 u.  A NaN stays one under a ClampedGate.
    """
    gate, up, x = _gate_parts(how, gate, up)
    return _times_logistic(gate, x) * up


def quickly_gated(how: str | ClampedGate, gate: Value, up: Value) -> Value:
    """``gated`` by an approximate reciprocal: wgmma waits for a division."""
    gate, up, x = _gate_parts(how, gate, up)
    power = p.exp2(p.minimum(x * -LOG2E, 60.0))
    share = p.reciprocal(power + 1.0)
    return gate * share * up


def two_gated(how: str | ClampedGate, gates: Sequence[Value], ups: Sequence[Value]) -> list[Value]:
    """``gated`` of two, by one reciprocal: of the product of both 1 + e^-x, which are up to 2^60.

    Below x = -41 a result is gate * 2^-60 * up, as it is in ``quickly_gated``.
    """
    parts = [_gate_parts(how, *both) for both in zip(gates, ups, strict=True)]
    powers = [p.exp2(p.minimum(x * -LOG2E, 60.0)) for *_, x in parts]
    below = [power + 1.0 for power in powers]
    both = p.reciprocal(below[0] * below[1])
    shares = [both * other for other in reversed(below)]
    return [gate * share * up for (gate, up, _), share in zip(parts, shares, strict=True)]


def _gate_parts(how: str | ClampedGate, gate: Value, up: Value) -> tuple[Value, Value, Value]:
    """(gate, up, x) of ``gate * logistic(x) * up``."""
    if isinstance(how, ClampedGate):
        # A NaN stays.
        gate, up = (p.where(v > how.limit, how.limit, v) for v in (gate, up))
        up = p.where(up < -how.limit, -how.limit, up) + 1.0
        return gate, up, gate * how.alpha
    if how == "gelu_tanh":
        u = gate * p.fma(gate * gate, 0.044715, 1.0)
        return gate, up, u * math.sqrt(8 / math.pi)
    return gate, up, gate


def silu(gate: Value) -> Value:
    return _times_logistic(gate, gate)


def _times_logistic(gate: Value, x: Value) -> Value:
    power = p.exp2(x * -LOG2E)
    return p.divide(gate, power + 1.0)


def rounded_sum(words: Sequence[Value], addends: Sequence[Value]) -> list[Value]:
    """bfloat16 pairs plus floats, rounded, as pairs again."""
    return packed([v + more for v, more in zip(floats(words), addends, strict=True)])

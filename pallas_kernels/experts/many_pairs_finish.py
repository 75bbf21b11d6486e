"""What is behind a sum of the kernel of many pairs: scale, bias, gate, and 16 bytes of a row.

In wgmma's layout four lanes have neighbouring results of a row, two each of every eight.  Stored
as they are, a row gets 16 bytes by four lanes of one instruction.  ``both_lanes`` exchanges words
between two lanes; two rounds of it give a lane 16 bytes of its own, which ``store_four`` stores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_kernels import ptx as p
from pallas_kernels.experts.gate import Gate
from pallas_kernels.fused_parts import gated, times_reciprocal
from pallas_kernels.jax_internals import arith
from pallas_kernels.ptx import Value


@dataclasses.dataclass(frozen=True)
class PairsFinish:
    """The steps behind a sum: the row's scale, the bias and the gate.

    scaled: whether rows have a scale.  gate: None leaves sums as they are.
    rest: a constant factor of all sums.  bytes: of a result, 4 or 2 (bfloat16).
    """

    scaled: bool
    gate: Gate | None
    rest: float
    bytes: int

    def results(
        self, sums: Sequence[Value], scales: Sequence[Value] | None, biases: Sequence[Value] | None
    ) -> Sequence[Value]:
        values = list(sums)
        if scales is not None:
            values = [arith.mulf(v, s) for v, s in zip(values, scales, strict=True)]
        if self.rest != 1.0:
            values = [arith.mulf(v, p.cf(self.rest)) for v in values]
        if biases is not None:
            values = [arith.addf(v, b) for v, b in zip(values, biases, strict=True)]
        if self.gate is None:
            return values
        gate, up = values
        return [gated(self.gate, gate, up, divide=times_reciprocal)]


def store_one(at: Value, value: Value, condition: Value) -> None:
    """Store a float32 where the condition holds."""
    code = "{ .reg .pred q; setp.ne.u32 q, $2, 0; @q st.global.f32 [$0], $1; }"
    p.ptx(code, at, value, arith.extui(p.i32(), condition))


def both_lanes(a: Sequence[Value], b: Sequence[Value], is_second: Value, apart: int) -> list[Value]:
    """Of two lanes, ``apart`` from one another, the first has both lanes' a, the second both b."""
    got = [p.shuffle_xor(arith.select(is_second, *one), apart) for one in zip(a, b, strict=True)]
    first = [arith.select(is_second, *one) for one in zip(got, a, strict=True)]
    return first + [arith.select(is_second, *one) for one in zip(b, got, strict=True)]


def store_four(base: Value, words: Sequence[Value], condition: Value, at: int) -> None:
    """Store 16 bytes at ``base + at`` where the condition holds."""
    kind = "f32" if p.type_of(words[0]) == p.f32() else "b32"
    test = "{ .reg .pred q; setp.ne.u32 q, $5, 0; "
    code = f"{test}@q st.global.v4.{kind} [$0+{at}], {{$1, $2, $3, $4}}; }}"
    p.ptx(code, base, *words, arith.extui(p.i32(), condition))

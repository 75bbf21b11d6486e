"""The handlers' ground on this machine: run once before the first is used.

Codes times codes by ``dots``, floats by ``exp``, many chunks on two threads: against numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallas_kernels.cpu import frame
from pallas_kernels.cpu.handler import Phase, Program

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.target import Target

CHUNKS = 37


@dataclasses.dataclass(frozen=True)
class SelfTest(Program):
    """w[n, 64] int8, x[n, 64] int8 -> dots[n, 16] int32 and exp(dots / 1000)[n, 16]."""

    bits: int

    @property
    def arguments(self) -> int:
        return 2

    @property
    def results(self) -> int:
        return 2

    def phases(self, target: Target) -> Sequence[Phase]:
        def count(e: Emitter, call: frame.CallFrame) -> Value:
            return call.argument_dim(0, 0)

        def chunk(e: Emitter, call: frame.CallFrame, i: Value) -> None:
            b, at = e.b, i * 64
            w, x = (e.load(call.argument(n), e.vector(e.I8, 64), at) for n in (0, 1))
            fours = e.splat(e.i32(0))
            ones = e.splat(e.i32(0x01010101))
            extra = e.code_offset(self.bits)
            acc = e.dots(fours, [(w, x)], self.bits)
            if extra:  # the sum of x by the same instruction: codes of 1
                one = b.bitcast(ones, e.vector(e.I8, 64))
                sums = e.dots(fours, [(one, x)], 4)
                acc = acc - sums * extra
            e.store(acc, call.result(0), at)
            sums: Value = b.sitofp(acc, e.vector(e.F32))
            e.store(e.exp(sums * 0.001), call.result(1), at)

        return [Phase(count, chunk)]


def fault(address_of: Callable[[Program], int]) -> str | None:
    """Return the fault of this machine's handlers, or None.

    address_of: returns the address of a program's handler.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (CHUNKS, 64), dtype=np.int8)
    x[0], x[1] = 127, -127
    for bits, low, high in ((8, -128, 128), (4, 0, 16)):
        w = rng.integers(low, high, (CHUNKS, 64)).astype(np.int8)
        w[0] = w[1] = low if bits == 8 else high - 1
        wanted = (w.astype(np.int32) * x).reshape(CHUNKS, 16, 4).sum(-1)
        found, powers = np.zeros((CHUNKS, 16), np.int32), np.zeros((CHUNKS, 16), np.float32)
        frame.call(address_of(SelfTest(bits)), [w, x], [found, powers], threads=2)
        if not np.array_equal(found, wanted):
            return f"products of {bits}-bit codes"
        exact = np.exp(np.clip(wanted / 1000.0, -87.0, 87.0))
        if not np.allclose(powers, exact, rtol=1e-5, atol=0):
            return "exponentials"
    return None

"""One step of Gated Linear Attention: the handler of ``gla_step``.

    S <- exp(g)[:, None] S + k v^T        o = scale q S

A chunk is a row, a head and about 128 columns of S.  Each row of these columns is read once and
written once, in place if the caller donates the state.  The sums of o stay in registers.
Everything is float32.

Source: arXiv 2312.06635.  Leaves out: heads whose Dv is no multiple of 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.handler import CpuPlan, Phase, Program
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target

LANES = 16
COLUMNS = 8  # vectors of them in a chunk at most
AHEAD = 4  # rows of S that are asked for before they are read
KEYS = 1 << 12  # Dk, whose decays lie on the stack
FORGOTTEN = -87.3  # below it a decay is 0: exp is no normal number


class StepPlan(CpuPlan):
    kernel = "gla_step_cpu"


def plan(q: jax.Array, v: jax.Array) -> CpuPlan | Reason:
    d_k, d_v = q.shape[-1], v.shape[-1]
    if d_v % LANES:
        return Reason(f"v has heads of {d_v} features; the handler takes multiples of {LANES}")
    if d_k > KEYS:
        return Reason(f"k has heads of {d_k} features; the handler takes {KEYS}")
    if reason := jit.unavailable():
        return reason
    return StepPlan(GlaStepProgram(d_k, d_v), jit.host().name)


def gla_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    state: jax.Array,
    scale: float,
    plan: CpuPlan,
) -> tuple[jax.Array, jax.Array]:
    """(o ``[B, H, Dv]`` in v's dtype, the state after)."""
    operands = *(x.astype(jnp.float32) for x in (q, k, v, g)), state
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (v, state)]
    name = jit.name_of(plan)
    call = jax.ffi.ffi_call(name, results, input_output_aliases={4: 1})
    o, state = call(*operands, scale=np.float32(scale))
    return o.astype(v.dtype), state


@dataclasses.dataclass(frozen=True)
class GlaStepProgram(Program):
    """Operands: q, k, v, g, state.  Results: o, state.  Attribute: scale."""

    d_k: int
    d_v: int

    n_arguments = 5
    n_results = 2

    @property
    def columns(self) -> int:
        """Vectors of a chunk."""
        return next(n for n in range(COLUMNS, 0, -1) if self.d_v // LANES % n == 0)

    def phases(self, target: Target) -> Sequence[Phase]:
        chunks = self.d_v // LANES // self.columns  # of a head

        def count(e: Emitter, call: CallFrame) -> Value:
            heads = call.argument_dim(0, 0) * call.argument_dim(0, 1)
            return heads * chunks

        def chunk(e: Emitter, call: CallFrame, i: Value) -> None:
            self.chunk(e, call, i // chunks, i % chunks)

        return [Phase(count, chunk)]

    def chunk(self, e: Emitter, call: CallFrame, head: Value, part: Value) -> None:
        b, kind, many = e.b, e.vector(e.F32), range(self.columns)
        row = 4 * self.d_v  # bytes
        q, k, g = (e.at(call.argument(i), head * (4 * self.d_k)) for i in (0, 1, 3))
        first = part * (64 * self.columns)
        v, o = (e.at(at, head * row + first) for at in (call.argument(2), call.result(0)))
        state = e.at(call.result(1), head * (row * self.d_k) + first)
        decays = e.room(4 * -(-self.d_k // LANES) * LANES)

        def decay(i: Value) -> None:
            at = i * 4
            x = e.load_part(e.at(g, at), self.d_k - i)
            kept = b.fcmp_unordered(">=", x, e.floats(FORGOTTEN))
            e.store(b.select(kept, e.exp(x), e.floats(0.0)), decays, at, align=64)

        e.loop(self.d_k, decay, step=LANES)
        values = [e.load(v, kind, 64 * i) for i in many]

        def one(d: Value, *sums: Value) -> list[Value]:
            at = e.at(state, d * row)
            of_d = (e.load(x, e.F32, d * 4) for x in (decays, k, q))
            fade, key, query = map(e.splat, of_d)
            made = []
            for i, value, total in zip(many, values, sums, strict=True):
                e.prefetch(at, AHEAD * row + 64 * i)
                new = e.fma(fade, e.load(at, kind, 64 * i), key * value)
                e.store(new, at, 64 * i)
                made.append(e.fma(query, new, total))
            return made

        scale = e.splat(call.attribute(0, e.F32))
        for i, total in enumerate(e.loop(self.d_k, one, [e.floats(0.0)] * self.columns)):
            e.store(total * scale, o, 64 * i)

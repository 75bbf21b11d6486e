"""``rms_norm(x[R, K]) w[N, K]^T`` of floats: the handler of a head beside weights in codes.

    y[r, n] = sum over lanes (sum over k = lane, lane + 16, ... of normed[r, k] w[n, k])

XLA's order of addition depends on the number of rows, so a row would have other logits in a batch
than alone.  Here a row's bits depend on the row alone.  w is read once for every four rows.

Leaves out: anything but float32, K or N that 16 does not divide, a bias.
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
from pallas_kernels.cpu.matmul import norm_factor
from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, chosen

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target

TILE = 16  # outputs in a chunk
OUTPUTS = 4  # at once


class HeadPlan(CpuPlan):
    kernel = "head_cpu"


def plan(x: jax.Array, w: jax.Array) -> CpuPlan | Reason:
    """The handler's plan for ``norm_matmul``, or why it has none."""
    if reason := jit.unavailable():
        return reason
    if (x.dtype, w.dtype) != (jnp.float32, jnp.float32):
        return Reason(f"x is {x.dtype.name} and w {w.dtype.name}; the handler takes float32")
    if w.shape[0] % TILE or w.shape[1] % TILE:
        return Reason(f"w {w.shape}; the handler takes multiples of {TILE}")
    target = jit.host()
    return HeadPlan(Head(4 if target.rows == 8 else 1), target.name)


def norm_matmul(
    x: jax.Array,
    gamma: jax.Array,
    w: jax.Array,
    eps: float,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``rms_norm(x[..., K], gamma[K]) @ w[N, K].T`` -> ``[..., N]`` float32."""
    no_kernel = lambda: Reason("a head of floats has no Mosaic kernel")  # noqa: E731
    found = choose_plan("norm_matmul", implementation, no_kernel, x, w, cpu=lambda: plan(x, w))
    return _norm_matmul(chosen(found, implementation), (eps, found), x, gamma, w)


def _xla(call: tuple[float, CpuPlan | None], x: jax.Array, gamma: jax.Array, w: jax.Array):
    normed = rms_norm(x, gamma, call[0], implementation="xla")
    return jnp.einsum("...k,nk->...n", normed, w)


def _handler(call: tuple[float, CpuPlan], x: jax.Array, gamma: jax.Array, w: jax.Array):
    eps, plan = call
    rows = x.reshape(-1, x.shape[-1])
    results = [
        jax.ShapeDtypeStruct((len(rows), len(w)), jnp.float32),
        jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    ]
    run = jax.ffi.ffi_call(jit.name_of(plan), results)
    y, _ = run(rows, w, gamma.astype(jnp.float32), eps=np.float32(eps))
    return y.reshape(*x.shape[:-1], -1)


_norm_matmul = Op("norm_matmul", _xla, _handler)


@dataclasses.dataclass(frozen=True)
class Head(Program):
    """rows: of x that share what is read of w.  Operands: x, w, gamma.  Results: y, scratch."""

    rows: int

    n_arguments = 3
    n_results = 2

    def phases(self, target: Target) -> Sequence[Phase]:
        def count_rows(e: Emitter, call: CallFrame) -> Value:
            return call.argument_dim(0, 0)

        def normed(e: Emitter, call: CallFrame, r: Value) -> None:
            k = call.argument_dim(0, 1)
            start = r * k * 4
            x, out = e.at(call.argument(0), start), e.at(call.result(1), start)
            factor = e.splat(norm_factor(e, x, k, call.attribute(0, e.F32)))

            def some(i: Value) -> None:
                at = i * 4
                value, weight = (e.load(p, e.vector(e.F32), at) for p in (x, call.argument(2)))
                e.store(value * factor * weight, out, at)

            e.loop(k, some, step=TILE)

        def count_tiles(e: Emitter, call: CallFrame) -> Value:
            return call.argument_dim(1, 0) // TILE

        def tile(e: Emitter, call: CallFrame, i: Value) -> None:
            count = call.argument_dim(0, 0)
            last = count - 1

            def some_rows(r: Value) -> None:  # the last one stands for those that there are not
                rows = [e.least(r + j, last) for j in range(self.rows)]
                self._products(e, call, i * TILE, rows)

            e.loop(count, some_rows, step=self.rows)

        return [Phase(count_rows, normed), Phase(count_tiles, tile)]

    def _products(self, e: Emitter, call: CallFrame, first: Value, rows: list[Value]) -> None:
        (n, k) = (call.argument_dim(1, axis) for axis in (0, 1))
        size = k * 4
        xs = [e.at(call.result(1), r * size) for r in rows]
        totals: list[Value] = []
        for start in range(0, TILE, OUTPUTS):
            ws = [e.at(call.argument(1), (first + (start + j)) * size) for j in range(OUTPUTS)]

            def add(i: Value, *sums: Value, ws: list[Value] = ws) -> list[Value]:
                at = i * 4
                weights = [e.load(w, e.vector(e.F32), at) for w in ws]
                for w in ws:
                    e.prefetch(w, at + 2048)
                made = []
                for j, x in enumerate(xs):
                    value = e.load(x, e.vector(e.F32), at)
                    of_row = sums[j * OUTPUTS : (j + 1) * OUTPUTS]
                    made += [e.fma(value, w, s) for w, s in zip(weights, of_row, strict=True)]
                return made

            totals += e.loop(k, add, [e.floats(0.0)] * (OUTPUTS * len(xs)), step=TILE)
            if len(totals) == TILE:
                found = e.sums(totals)
                wide = TILE // len(rows)  # outputs of each row
                begin = first + (start + OUTPUTS - wide)
                for j, r in enumerate(rows):
                    at = (r * n + begin) * 4
                    e.store(e.lanes(found, j * wide, wide), call.result(0), at)
                totals = []

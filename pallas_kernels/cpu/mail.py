"""Words between a device and the CPU in pinned memory: the handlers that await and answer them.

    x, experts = awaited(address, turn, layout)      waits until the device has posted
    turn = answered(address, turn, layout, y)        the device waits for it; the next turn

The memory holds two turns, then what the device has posted, then the answer:

    bytes    0 ..   8   the turn posted: int64, of which the device writes the lower half
            64 ..  72   the turn answered
           128 ..       experts int32 [pairs], x float32 [rows, width], y float32 [pairs, width]
                        (each from a multiple of 128 on)

Turns count up. Each side writes its data before its turn, so the other side reads them after it.
The thread that calls ``awaited`` looks at the turn without pause, and holds none of Python's locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.handler import Phase, Program, emit_wait

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target

POSTED, ANSWERED, EXPERTS = 0, 64, 128  # offsets in bytes


class MailLayout(NamedTuple):
    """The numbers of tokens and of their pairs with experts, and a token's floats."""

    rows: int
    width: int
    pairs: int

    @property
    def x(self) -> int:
        return EXPERTS + _whole(4 * self.pairs)

    @property
    def y(self) -> int:
        return self.x + _whole(4 * self.rows * self.width)

    @property
    def nbytes(self) -> int:
        return self.y + _whole(4 * self.pairs * self.width)


def _whole(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def awaited(address: jax.Array, turn: jax.Array, layout: MailLayout) -> tuple[jax.Array, jax.Array]:
    """Return what the device posts: x float32 ``[rows, width]``, experts int32 ``[pairs]``.

    address, turn: int32 ``[2]``, low word before high.
    """
    results = [
        jax.ShapeDtypeStruct((layout.rows, layout.width), jnp.float32),
        jax.ShapeDtypeStruct((layout.pairs,), jnp.int32),
    ]
    x, experts = jax.ffi.ffi_call(jit.register(Await(layout.x)), results)(address, turn)
    return x, experts


def answered(address: jax.Array, turn: jax.Array, layout: MailLayout, y: jax.Array) -> jax.Array:
    """Give y float32 ``[pairs, width]`` to the device. Returns the next turn, when it is done."""
    result = jax.ShapeDtypeStruct((2,), jnp.int32)
    return jax.ffi.ffi_call(jit.register(Answer(layout.y)), result)(address, turn, y)


def _one(e: Emitter, call: CallFrame) -> Value:
    return e.i64(1)


def _address(e: Emitter, call: CallFrame, offset: int) -> Value:
    return e.b.inttoptr(e.load(call.argument(0), e.I64, align=4) + offset, e.PTR)


def _turn(e: Emitter, call: CallFrame) -> Value:
    return e.load(call.argument(1), e.I64, align=4)


def _copy(e: Emitter, to: Value, source: Value, count: Value) -> None:
    """Copy ``count`` words."""

    def some(i: Value) -> None:
        left, at = count - i, i * 4
        e.store_part(e.load_part(e.at(source, at), left), e.at(to, at), left)

    e.loop(count, some, step=16)


@dataclasses.dataclass(frozen=True)
class Await(Program):
    """x: its offset in the mail."""

    x: int

    n_arguments = 2
    n_results = 2

    def phases(self, target: Target) -> Sequence[Phase]:
        def waited(e: Emitter, call: CallFrame, _: Value) -> None:
            emit_wait(e, _address(e, call, POSTED), _turn(e, call))
            _copy(e, call.result(1), _address(e, call, EXPERTS), call.result_dim(1, 0))

        def rows(e: Emitter, call: CallFrame) -> Value:
            return call.result_dim(0, 0)

        def row(e: Emitter, call: CallFrame, i: Value) -> None:
            width = call.result_dim(0, 1)
            at = i * width * 4
            _copy(e, e.at(call.result(0), at), e.at(_address(e, call, self.x), at), width)

        return [Phase(_one, waited), Phase(rows, row)]


@dataclasses.dataclass(frozen=True)
class Answer(Program):
    """y: its offset in the mail."""

    y: int

    n_arguments = 3
    n_results = 1

    def phases(self, target: Target) -> Sequence[Phase]:
        def rows(e: Emitter, call: CallFrame) -> Value:
            return call.argument_dim(2, 0)

        def row(e: Emitter, call: CallFrame, i: Value) -> None:
            width = call.argument_dim(2, 1)
            at = i * width * 4
            _copy(e, e.at(_address(e, call, self.y), at), e.at(call.argument(2), at), width)

        def told(e: Emitter, call: CallFrame, _: Value) -> None:
            turn, to = _turn(e, call), _address(e, call, ANSWERED)
            e.b.atomic_rmw("xchg", to, turn, "release")
            e.store(turn + 1, call.result(0), align=4)

        return [Phase(rows, row), Phase(_one, told)]

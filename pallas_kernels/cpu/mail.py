"""The CPU's part of layers whose device posts tokens in pinned memory: one handler for all of them.

    turn = served(address, turn, layout, up, down, gate)

In each layer's turn it waits until the device has posted, sorts the pairs of tokens and experts,
computes them as ``cpu.experts`` does, and answers. The memory holds two turns, then what the device
has posted, then the answer:

    bytes    0 ..   8   the turn posted: int64, of which the device writes the lower half
            64 ..  72   the turn answered
           128 ..       experts int32 [pairs], x float32 [rows, width], y float32 [pairs, width]
                        (each from a multiple of 128 on)

Turns count up. Each side writes its data before its turn, so the other side reads them after it.
The threads look at the turn and at each other's work without pause until the last turn, since to
wake them takes as long as an expert of one token. They hold none of Python's locks. One core is
left to the thread that dispatches the device's programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.experts import GroupedMatmul, TilesOfExperts, grouped_program
from pallas_kernels.cpu.frame import CallFrame
from pallas_kernels.cpu.handler import Phase, Program, emit_wait
from pallas_kernels.cpu.matmul import PREPARED_ROWS, Round, silu
from pallas_kernels.cpu.weight import CpuWeight

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.target import Target

POSTED, ANSWERED, EXPERTS = 0, 64, 128  # offsets in bytes
# Offsets in a call's own numbers: int64 layer and experts of the turn. Then int32 the pairs by
# expert [P], where each of the turn's experts begins there [P + 1], these experts [P], and where
# each expert's next pair stands [E + 1].
LAYER, LISTED, ORDER = 0, 8, 16


class Clamped(NamedTuple):
    """gpt-oss's gate, ``(up + 1) * gate * sigmoid(alpha * gate)`` of halves within ``limit``."""

    limit: float
    alpha: float


# What follows the first product: a gate, or a squared ReLU where there is none.
MailedGate = Literal["silu", "relu2"] | Clamped


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


class MailedProduct(NamedTuple):
    """One product of ``L`` layers' experts in the host's memory.

    like: any expert ``[1, N, K]``, of which only the shape is read.
    table: addresses of all experts' parts, int32 ``[L, E, parts, 2]``, low words before high.
    bias: float32 ``[L, E, N]``, or None.
    """

    like: CpuWeight
    table: jax.Array
    bias: jax.Array | None

    def program(self, pairs: int, swiglu: bool) -> GroupedMatmul:
        found = grouped_program(self.like, pairs, self.table.shape[1], swiglu, apart=True)
        return dataclasses.replace(found, bias=self.bias is not None)


def served(
    address: jax.Array,
    turn: jax.Array,
    layout: MailLayout,
    up: MailedProduct,
    down: MailedProduct,
    gate: MailedGate,
) -> jax.Array:
    """Wait for the mail of each layer in turn, compute its experts and answer.

    address, turn: int32 ``[2]``, low word before high; the turn of the first layer.
    gate: with one, the halves of the first product are whole tiles.
    Returns the turn after the last one, when all are answered.
    """
    pairs, n_experts = layout.pairs, up.table.shape[1]
    programs = up.program(pairs, gate != "relu2"), down.program(pairs, False)
    program = Serve(layout, *programs, gate)
    operands = [address, turn]
    for own, product in zip((up, down), programs, strict=True):
        parts = [v.reshape(-1, *v.shape[2:]) for v in product.parts_of(own.like)]
        operands += [*parts, *([] if own.bias is None else [own.bias]), own.table]
    inner, codes = programs[0].results_of(up.like, pairs)
    results = [
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((ORDER // 4 + 3 * pairs + n_experts + 2,), jnp.int32),
        inner,
        codes,
        programs[1].results_of(down.like, pairs)[1],
    ]
    return jax.ffi.ffi_call(jit.register(program), results)(*operands)[0]


@dataclasses.dataclass(frozen=True)
class Serve(Program):
    """Turns of mail.  up, down: the two products."""

    layout: MailLayout
    up: GroupedMatmul
    down: GroupedMatmul
    gate: MailedGate

    @property
    def name(self) -> str:
        own = self.gate if isinstance(self.gate, Clamped) else [self.gate]
        return "_".join(map(str, ("Serve", *self.layout, *own, self.up.name, self.down.name)))

    n_results = 5
    spares = 1

    @property
    def arguments(self) -> int:
        return self.first(True) + operands_of(self.down)

    def first(self, is_down: bool) -> int:
        """The first operand of a product."""
        return 2 + (operands_of(self.up) if is_down else 0)

    def table_dim(self, call: CallFrame, axis: int) -> Value:
        """The number of layers or of experts."""
        return call.argument_dim(self.first(True) - 1, axis)

    def rounds(self, e: Emitter, call: CallFrame) -> Value:
        e.store(e.i64(0), call.result(1), LAYER, align=8)
        return self.table_dim(call, 0)

    def phases(self, target: Target) -> Sequence[Phase]:
        def one(e: Emitter, call: CallFrame) -> Value:
            return e.i64(1)

        def waited(e: Emitter, call: CallFrame, _: Value) -> None:
            _Turn(self, e, call).wait_and_sort()

        def told(e: Emitter, call: CallFrame, _: Value) -> None:
            _Turn(self, e, call).answer()

        def rounded(is_down: bool) -> Phase:
            def count(e: Emitter, call: CallFrame) -> Value:
                rows = _Turn(self, e, call).valid
                return e.b.select(rows > 8, e.divide_up(rows, PREPARED_ROWS), e.i64(1))

            def chunk(e: Emitter, call: CallFrame, i: Value) -> None:
                _RoundPairs(_Turn(self, e, call), is_down).chunk(i)

            return Phase(count, chunk)

        def multiplied(is_down: bool) -> Phase:
            def count(e: Emitter, call: CallFrame) -> Value:
                body = _TilesOfPairs(_Turn(self, e, call), is_down)
                return body.experts * body.runs

            def chunk(e: Emitter, call: CallFrame, i: Value) -> None:
                _TilesOfPairs(_Turn(self, e, call), is_down).chunk(i)

            return Phase(count, chunk)

        products = [phase(own) for own in (False, True) for phase in (rounded, multiplied)]
        return [Phase(one, waited), *products, Phase(one, told)]


def operands_of(program: GroupedMatmul) -> int:
    """All but x and where the experts' pairs begin."""
    return program.arguments - 2


class _Turn:
    """What the phases of a turn read."""

    def __init__(self, program: Serve, e: Emitter, call: CallFrame) -> None:
        self.p, self.e, self.call = program, e, call
        pairs, self.state = program.layout.pairs, call.result(1)
        self.order = e.at(self.state, ORDER)
        self.starts = e.at(self.order, 4 * pairs)
        self.listed = e.at(self.starts, 4 * (pairs + 1))
        self.nexts = e.at(self.listed, 4 * pairs)
        self.layer = e.load(self.state, e.I64, LAYER, align=8)
        self.count = e.load(self.state, e.I64, LISTED, align=8)
        self.memory = e.b.inttoptr(e.load(call.argument(0), e.I64, align=4), e.PTR)
        self.turn = e.load(call.argument(1), e.I64, align=4) + self.layer
        self.n_experts = program.table_dim(call, 1)

    @property
    def valid(self) -> Value:
        """The pairs that the CPU computes."""
        return self.word(self.starts, self.count)

    def word(self, pointer: Value, index: Value) -> Value:
        return self.e.b.sext(self.e.load(pointer, self.e.I32, index * 4, align=4), self.e.I64)

    def put(self, value: Value, pointer: Value, index: Value) -> None:
        self.e.store(self.e.b.trunc(value, self.e.I32), pointer, index * 4, align=4)

    def wait_and_sort(self) -> None:
        e, end = self.e, self.n_experts
        emit_wait(e, e.at(self.memory, POSTED), self.turn)
        chosen = e.at(self.memory, EXPERTS)

        def counted(pair: Value) -> None:
            expert = e.limited(self.word(chosen, pair), end)
            self.put(self.word(self.nexts, expert) + 1, self.nexts, expert)

        def listed(expert: Value, count: Value, first: Value) -> list[Value]:
            own = self.word(self.nexts, expert)
            with e.when(own > 0):
                for value, where, at in (
                    (expert, self.listed, count),
                    (first, self.starts, count),
                    (first, self.nexts, expert),
                ):
                    self.put(value, where, at)
            return [count + e.b.zext(own > 0, e.I64), first + own]

        def placed(pair: Value) -> None:
            expert = e.limited(self.word(chosen, pair), end)
            place = self.word(self.nexts, expert)
            with e.when(expert < end):
                self.put(pair, self.order, place)
                self.put(place + 1, self.nexts, expert)

        e.loop(end + 1, lambda expert: self.put(e.i64(0), self.nexts, expert))
        e.loop(self.p.layout.pairs, counted)
        count, valid = e.loop(end, listed, [e.i64(0), e.i64(0)])
        self.put(valid, self.starts, count)
        e.store(count, self.state, LISTED, align=8)
        e.loop(self.p.layout.pairs, placed)

    def answer(self) -> None:
        e = self.e
        e.store(self.turn + 1, self.call.result(0), align=4)
        e.store(self.layer + 1, self.state, LAYER, align=8)
        e.b.atomic_rmw("xchg", e.at(self.memory, ANSWERED), self.turn, "release")


class _Product(CallFrame):
    """A turn's product as the call that ``cpu.experts`` expects."""

    def __init__(self, turn: _Turn, is_down: bool) -> None:
        super().__init__(turn.e, turn.call.pointer)
        self.turn, self.is_down, self.call = turn, is_down, turn.call
        self.program = turn.p.down if is_down else turn.p.up
        self.first = turn.p.first(is_down)

    def argument(self, i: int) -> Value:
        turn = self.turn
        if i == 0:
            return self.call.result(2) if self.is_down else turn.e.at(turn.memory, turn.p.layout.x)
        is_last = i == self.program.arguments - 1
        return turn.starts if is_last else self.call.argument(self.first + i - 1)

    def argument_dim(self, i: int, axis: int) -> Value:
        turn = self.turn
        if i == 0 and axis == 0:
            return turn.valid
        if i == 0:
            return self.call.result_dim(2, 1) if self.is_down else turn.e.i64(turn.p.layout.width)
        if i == self.program.arguments - 1:
            return turn.count + 1
        return self.call.argument_dim(self.first + i - 1, axis)

    def result(self, i: int) -> Value:
        turn = self.turn
        if self.is_down and i == 0:
            return turn.e.at(turn.memory, turn.p.layout.y)
        return self.call.result(i + (3 if self.is_down else 2))

    def result_dim(self, i: int, axis: int) -> Value:
        turn = self.turn
        return turn.e.i64(turn.p.layout.width) if self.is_down else self.call.result_dim(2, axis)


class _RoundPairs(Round):
    def __init__(self, turn: _Turn, is_down: bool) -> None:
        product = _Product(turn, is_down)
        self.turn, self.is_down = turn, is_down
        super().__init__(product.program, turn.e, product)

    def source(self, r: Value) -> Value:
        layout = self.turn.p.layout
        a_token = layout.pairs // layout.rows
        return r if self.is_down else self.turn.word(self.turn.order, r) // a_token


class _TilesOfPairs(TilesOfExperts):
    def __init__(self, turn: _Turn, is_down: bool) -> None:
        product = _Product(turn, is_down)
        self.turn, self.is_down = turn, is_down
        super().__init__(product.program, turn.e, product)

    def addresses(self, expert: Value) -> Value:
        turn, where = self.turn, self.p.arguments - 2
        self.own = turn.layer * turn.n_experts + turn.word(turn.listed, expert)
        stride = self.call.argument_dim(where, 2) * 8
        return self.e.at(self.call.argument(where), self.own * stride)

    def bias(self) -> tuple[Value, Value]:
        size = self.call.argument_dim(self.p.fused, 2)
        return self.e.at(self.call.argument(self.p.fused), self.own * size * 4), size

    def target(self, r: Value) -> Value:
        return self.turn.word(self.turn.order, r) if self.is_down else r

    def activated(self, gate: Value, up: Value | None) -> Value:
        e, b, kind = self.e, self.e.b, self.turn.p.gate
        if self.is_down:
            return gate
        if up is None:
            gate = b.select(b.fcmp_ordered("<", gate, e.floats(0.0)), e.floats(0.0), gate)
            return gate * gate
        if not isinstance(kind, Clamped):
            return super().activated(gate, up)

        def below(value: Value, limit: float) -> Value:
            return b.select(b.fcmp_ordered(">", value, e.floats(limit)), e.floats(limit), value)

        within = below(below(up, kind.limit) * -1.0, kind.limit) * -1.0
        return (within + 1.0) * silu(e, below(gate, kind.limit), kind.alpha)

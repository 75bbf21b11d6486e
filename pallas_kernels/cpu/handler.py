"""A handler: phases of chunks that XLA's own threads share.

    class MyOp(Program): ...            what it depends on, as fields; its phases
    emit(program, target, triple) -> llvmlite's module, whose function ``entry`` XLA calls

A phase is a number of chunks and what one of them does.  The calling thread and helpers from XLA's
pool take chunks from one counter; the next phase begins when all are done.  A chunk's result
depends on its number alone, so it does not matter which thread takes it.

The state of a call lies in a slot of the module's own memory.  A slot counts the threads that may
still read it.  Helpers are asked for at the first phase of several chunks, and stay until the call
ends, because waking a thread takes longer than many phases.  The caller never waits for a helper to
start, only for chunks that a helper has begun.  A helper that starts late finds no chunk and
releases the slot.  The caller does all chunks if there is no free slot or no pool, or if the pool
accepts no helper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pallas_kernels.cpu import frame as ffi

if TYPE_CHECKING:
    from llvmlite import ir

    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.target import Target

SLOTS, SLOT = 64, 256
# Offsets in a slot: the number of threads that may read it, the phase (upper half) with its next
# chunk (lower half), and the chunks done (each in its own cache line).  Then the number of chunks,
# the call frame, the function of a chunk and the number of threads that may take chunks.
REFS, NEXT, DONE, COUNT, FRAME, CHUNK, TAKERS = 0, 64, 128, 192, 200, 208, 216
NO_CHUNK, ENDED = 0xFFFFFFFF, -1  # in NEXT: of this phase, which is being written; of any phase
# Offsets in what the caller knows of its helpers: the slot, or null, and how many were asked for.
SLOT_OF_CALL, ASKED = 0, 8
# A thread takes consecutive chunks, so that its prefetches are for its own next chunk.  It takes
# the chunks left, divided by SHARES for each thread.  It takes at most SPAN, because another
# process may delay the thread.
SHARES, SPAN = 4, 16
SPINS = 4000  # looks at the counter, some 40 us, before the waiting thread yields its core


@dataclasses.dataclass(frozen=True)
class Phase:
    """count: emits the number of chunks (i64; one runs on the calling thread).  chunk: emits what
    one does, given its number (i64)."""

    count: Callable[[Emitter, ffi.CallFrame], Value]
    chunk: Callable[[Emitter, ffi.CallFrame, Value], None]


@dataclasses.dataclass(frozen=True)
class Program:
    """The input from which a handler is generated: a name and fields that the emission may read.

    arguments, results: numbers of buffers in a call, by default those of the class.
    spares: threads of the pool that get no chunks.
    """

    n_arguments: ClassVar[int]
    n_results: ClassVar[int]
    spares: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """The unique name of this program: its class and its fields."""
        fields = (str(getattr(self, f.name)) for f in dataclasses.fields(self))
        return "_".join((type(self).__name__, *fields))

    @property
    def arguments(self) -> int:
        return self.n_arguments

    @property
    def results(self) -> int:
        return self.n_results

    def phases(self, target: Target) -> Sequence[Phase]:
        raise NotImplementedError

    def rounds(self, e: Emitter, call: ffi.CallFrame) -> Value:
        """Emit what runs once, before the phases; return how often these run (i64)."""
        return e.i64(1)


@dataclasses.dataclass(frozen=True)
class CpuPlan:
    """How a handler computes an op's call (``dispatch.Plan``): the program and the target."""

    kernel: ClassVar[str] = ""  # an op's own
    implementation: ClassVar[str] = "cpu"
    program: Any
    isa: str

    def __str__(self) -> str:
        return f"{self.isa}, {self.program}"


def emit(program: Program, target: Target, triple: str) -> ir.Module:
    """llvmlite's module, for the system that LLVM calls ``triple``."""
    from llvmlite import ir

    from pallas_kernels.cpu.emit import I8, I64, PTR, Emitter

    module = ir.Module(program.name)
    module.triple = triple
    slots = ir.GlobalVariable(module, ir.ArrayType(I8, SLOTS * SLOT), "slots")
    slots.initializer = ir.Constant(slots.value_type, None)
    slots.align = 64
    chunk_type = ir.FunctionType(ir.VoidType(), [PTR, I64])

    def function(kind: ir.FunctionType, name: str) -> tuple[ir.Function, Emitter]:
        made = ir.Function(module, kind, name)
        made.linkage = "internal"
        return made, Emitter(ir.IRBuilder(made.append_basic_block("start")), target)

    slot_type = ir.FunctionType(ir.VoidType(), [PTR])
    take = _emit_take(*function(slot_type, "take"), chunk_type)
    helper = _emit_helper(*function(slot_type, "helper"), take)
    parallel_type = ir.FunctionType(ir.VoidType(), [PTR, I64, PTR, PTR])
    parallel, e = function(parallel_type, "parallel")
    _emit_parallel(parallel, e, slots, take, helper, chunk_type, program.spares)
    phases = []
    for i, phase in enumerate(program.phases(target)):
        count, e = function(ir.FunctionType(I64, [PTR]), f"count_{i}")
        e.b.ret(phase.count(e, ffi.CallFrame(e, count.args[0])))
        chunk, e = function(chunk_type, f"chunk_{i}")
        phase.chunk(e, ffi.CallFrame(e, chunk.args[0]), chunk.args[1])
        e.b.ret_void()
        phases.append((count, chunk))
    entry, e = function(ir.FunctionType(PTR, [PTR]), "entry")
    entry.linkage = ""
    _emit_entry(e, entry.args[0], program, phases, parallel)
    return module


def _emit_entry(
    e: Emitter,
    frame: Value,
    program: Program,
    phases: Sequence[tuple[ir.Function, ir.Function]],
    parallel: ir.Function,
) -> None:
    from llvmlite import ir

    from pallas_kernels.cpu.emit import I8, I32, I64, PTR

    b, null = e.b, ir.Constant(PTR, None)

    def word(pointer: Value, offset: int, kind: ir.Type = PTR) -> Value:
        return e.load(pointer, kind, offset, align=4)

    extension = word(frame, ffi.EXTENSION)
    with e.when(b.icmp_unsigned("!=", extension, null)):
        asks = b.icmp_signed("==", word(extension, 8, I32), e.i32(ffi.METADATA))
        with e.when(asks):  # the version that this XLA has itself: ``version_reason`` has read it
            metadata = word(extension, 24)
            e.store(word(word(frame, ffi.API), ffi.VERSION, I64), metadata, 24, align=4)
            e.store(e.i32(0), metadata, 32, align=4)
            b.ret(null)
    with e.when(b.icmp_signed("!=", word(frame, ffi.STAGE, I32), e.i32(ffi.EXECUTE))):
        b.ret(null)
    counts = (ffi.ARGUMENT_COUNT, program.arguments), (ffi.RESULT_COUNT, program.results)
    for offset, wanted in counts:
        with e.when(b.icmp_signed("!=", word(frame, offset, I64), e.i64(wanted)), likely=False):
            text = f"{program.name}: not {program.arguments} operands, {program.results} results"
            data = bytearray(text.encode() + b"\0")
            words = ir.GlobalVariable(b.module, ir.ArrayType(I8, len(data)), f"words_{offset}")
            words.initializer = ir.Constant(words.value_type, data)
            words.linkage = "internal"
            create = word(word(frame, ffi.API), ffi.ERROR_CREATE)
            args = _struct(e, 32, {16: e.opaque(words), 24: e.i64(ffi.INVALID_ARGUMENT)})
            b.ret(e.call_at(create, ir.FunctionType(PTR, [PTR]), args))
    helpers = e.room(16)
    e.store(null, helpers, SLOT_OF_CALL, align=8)
    e.store(e.i64(0), helpers, ASKED, align=8)

    def once(_: Value) -> None:
        for count, chunk in phases:
            b.call(parallel, [frame, b.call(count, [frame]), e.opaque(chunk), helpers])

    e.loop(program.rounds(e, ffi.CallFrame(e, frame)), once)
    slot = e.load(helpers, PTR, SLOT_OF_CALL, align=8)
    with e.when(b.icmp_unsigned("!=", slot, null)):
        b.atomic_rmw("xchg", e.at(slot, NEXT), e.i64(ENDED), "release")
        b.atomic_rmw("sub", e.at(slot, REFS), e.i64(1), "release")
    b.ret(null)


def _struct(e: Emitter, size: int, fields: dict[int, Value]) -> Value:
    """One of the API's structs on the stack: its size, no extension, fields by offset."""
    from llvmlite import ir

    from pallas_kernels.cpu.emit import I64

    with e.b.goto_entry_block():
        made = e.b.alloca(ir.ArrayType(I64, size // 8))
        made.align = 8
        made = e.opaque(made)
    for offset, value in {0: e.i64(size), 8: e.i64(0), **fields}.items():
        e.store(value, made, offset, align=8)
    return made


def _emit_take(take: ir.Function, e: Emitter, chunk_type: ir.FunctionType) -> ir.Function:
    """take(slot): the phase's chunks, several that follow each other at a time, until none is left.

    The claim succeeds only in the phase of which the number of chunks was read.
    """
    from pallas_kernels.cpu.emit import I64, PTR

    b, (slot,) = e.b, take.args
    look, some, work, end = (b.append_basic_block(name) for name in ("look", "some", "work", "end"))
    b.branch(look)
    b.position_at_end(look)
    word = b.load_atomic(e.at(slot, NEXT), "acquire", 8, typ=I64)
    count = b.load_atomic(e.at(slot, COUNT), "acquire", 8, typ=I64)
    takers = e.load(slot, I64, TAKERS, align=8)
    i = word & NO_CHUNK
    b.cbranch(i < count, some, end)
    b.position_at_end(some)
    span = e.least((count - i) // (takers * SHARES), e.i64(SPAN - 1)) + 1
    claimed = b.cmpxchg(e.at(slot, NEXT), word, word + span, "monotonic", "monotonic")
    b.cbranch(b.extract_value(claimed, 1), work, look)
    b.position_at_end(work)
    frame, chunk = e.load(slot, PTR, FRAME, align=8), e.load(slot, PTR, CHUNK, align=8)
    e.loop(i + span, lambda j: e.call_at(chunk, chunk_type, frame, j) and None, start=i)
    b.atomic_rmw("add", e.at(slot, DONE), span, "release")
    b.branch(look)
    b.position_at_end(end)
    b.ret_void()
    return take


def _emit_helper(helper: ir.Function, e: Emitter, take: ir.Function) -> ir.Function:
    from pallas_kernels.cpu.emit import I64

    b, (slot,) = e.b, helper.args

    def ended() -> Value:
        b.call(take, [slot])
        word = b.load_atomic(e.at(slot, NEXT), "acquire", 8, typ=I64)
        return b.icmp_signed("==", word, e.i64(ENDED))

    _emit_until(e, ended)
    b.atomic_rmw("sub", e.at(slot, REFS), e.i64(1), "release")
    b.ret_void()
    return helper


def _emit_parallel(
    parallel: ir.Function,
    e: Emitter,
    slots: ir.GlobalVariable,
    take: ir.Function,
    helper: ir.Function,
    chunk_type: ir.FunctionType,
    spares: int,
) -> None:
    """parallel(frame, count, chunk, helpers): a phase.  helpers: what the call has of them."""
    from llvmlite import ir

    from pallas_kernels.cpu.emit import I64, PTR

    b, (frame, count, chunk, helpers) = e.b, parallel.args
    null = ir.Constant(PTR, None)
    api, context = (e.load(frame, PTR, offset, align=8) for offset in (ffi.API, ffi.CONTEXT))

    def ask(offset: int, args: Value) -> Value:
        """Did a function of the API fail?  Its error is dropped: the caller does all chunks."""
        function = e.load(api, PTR, offset, align=8)
        error = e.call_at(function, ir.FunctionType(PTR, [PTR]), args)
        failed = b.icmp_unsigned("!=", error, null)
        with e.when(failed, likely=False):
            destroy = e.load(api, PTR, ffi.ERROR_DESTROY, align=8)
            drop = _struct(e, 24, {16: error})
            e.call_at(destroy, ir.FunctionType(ir.VoidType(), [PTR]), drop)
        return failed

    def alone() -> None:
        def one(i: Value) -> None:
            e.call_at(chunk, chunk_type, frame, i)

        e.loop(count, one)
        b.ret_void()

    with e.when(count <= 1):
        alone()
    with b.goto_entry_block():
        threads = e.opaque(b.alloca(I64))
    e.store(e.i64(1), threads, align=8)
    ask(ffi.NUM_THREADS, _struct(e, 32, {16: context, 24: threads}))
    wanted = e.least(e.load(threads, I64, align=8) - spares, count) - 1
    with e.when(wanted <= 0):
        alone()
    asked = e.load(helpers, I64, ASKED, align=8)
    missing = b.select(wanted > asked, wanted - asked, e.i64(0))
    with e.when(b.icmp_unsigned("==", e.load(helpers, PTR, SLOT_OF_CALL, align=8), null)):
        head, more, none, claim = (
            b.append_basic_block(name) for name in ("head", "more", "none", "claim")
        )
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(e.i64(0), before)
        free = e.at(e.opaque(slots), i * SLOT)
        found = b.cmpxchg(e.at(free, REFS), e.i64(0), e.i64(1), "acquire", "monotonic")
        b.cbranch(b.extract_value(found, 1), claim, more)
        b.position_at_end(more)
        i.add_incoming(i + 1, more)
        b.cbranch(i < SLOTS - 1, head, none)
        b.position_at_end(none)
        alone()
        b.position_at_end(claim)
        b.atomic_rmw("xchg", e.at(free, NEXT), e.i64(NO_CHUNK), "monotonic")
        e.store(free, helpers, SLOT_OF_CALL, align=8)
    # A helper may look at any time, so it must not take this phase's number with the last phase's
    # chunks.
    slot = e.load(helpers, PTR, SLOT_OF_CALL, align=8)
    phase = (e.load(slot, I64, NEXT, align=8) >> 32) + 1
    b.atomic_rmw("xchg", e.at(slot, NEXT), (phase << 32) | NO_CHUNK, "monotonic")
    b.atomic_rmw("xchg", e.at(slot, COUNT), count, "release")
    takers = b.select(wanted > asked, wanted, asked) + 1
    for offset, value in {DONE: e.i64(0), FRAME: frame, CHUNK: chunk, TAKERS: takers}.items():
        e.store(value, slot, offset, align=8)
    b.atomic_rmw("xchg", e.at(slot, NEXT), phase << 32, "release")
    b.atomic_rmw("add", e.at(slot, REFS), missing, "monotonic")
    e.store(asked + missing, helpers, ASKED, align=8)
    schedule = _struct(e, 40, {16: context, 24: e.opaque(helper), 32: slot})

    def send(_: Value) -> None:
        with e.when(ask(ffi.SCHEDULE, schedule), likely=False):
            b.atomic_rmw("sub", e.at(slot, REFS), e.i64(1), "release")

    e.loop(missing, send)
    b.call(take, [slot])
    emit_wait(e, e.at(slot, DONE), count)
    b.ret_void()


def emit_wait(e: Emitter, done: Value, count: Value) -> None:
    """Emit a loop that ends when the i64 at ``done`` is at least ``count``."""
    _emit_until(e, lambda: e.b.load_atomic(done, "acquire", 8, typ=e.I64) >= count)


def _emit_until(e: Emitter, ended: Callable[[], Value]) -> None:
    """Emit a loop that looks at ``ended`` without pause, and later yields its core between."""
    from llvmlite import ir

    from pallas_kernels.cpu.emit import I32, I64

    b = e.b
    before = b.block
    look, spin, give, after = (b.append_basic_block(n) for n in ("look", "spin", "give", "after"))
    b.branch(look)
    b.position_at_end(look)
    spins = b.phi(I64)
    spins.add_incoming(e.i64(0), before)
    b.cbranch(ended(), after, spin)
    b.position_at_end(spin)
    if e.target.arch == "x86_64":
        e.call("llvm.x86.sse2.pause", ir.VoidType())
    else:
        e.call("llvm.aarch64.hint", ir.VoidType(), e.i32(1))
    spun = spins + 1
    spins.add_incoming(spun, b.block)
    b.cbranch(spun < SPINS, look, give)
    b.position_at_end(give)
    if "windows" not in b.module.triple:
        e.call("sched_yield", I32)
    spins.add_incoming(e.i64(SPINS), b.block)
    b.branch(look)
    b.position_at_end(after)

"""Compilation of programs to machine code, kept on disk and registered with XLA by name.

    unavailable() -> Reason | None         says why no handler can run in this process.
    name_of(plan) -> name                  returns the name for ``jax.ffi.ffi_call``.
    register(program) -> name              does the same for a program.
    registered()                           lists all handlers known to XLA, for a process that
                                           takes over the compiled handlers of this one.
    compiled(program).address              is the handler's address, for calls by hand.

llvmlite (LLVM, no compiler on the user's machine) generates an object in tenths of a second.  The
object is kept in ``cache_folder()`` under the hash of all that it depends on: target, llvmlite,
these sources, the program.  Another process loads it from there in milliseconds.  On x86-64 Linux
it does so without llvmlite (``elf``), elsewhere with LLVM's own loader.  A damaged file would crash
the process.  So each file carries a checksum (``sealed``) and is built anew if it does not match.

Before the first handler is used, a small program runs once and is compared with numpy: codes times
codes by ``dots``, floats by ``exp``, many chunks on two threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np

from pallas_kernels.cpu import elf, frame, handler, sealed
from pallas_kernels.cpu.handler import CpuPlan, Phase, Program
from pallas_kernels.cpu.target import VARIABLE, Target, host_cpu, target
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from llvmlite.binding import TargetMachine

    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.target import Target

# Programs are traced by several threads, and XLA takes a name once.
_one_at_a_time = threading.RLock()
_known: dict[tuple[Program, Target], Compiled] = {}  # kept for good: XLA has their addresses


def unavailable() -> Reason | None:
    """Why no handler runs on this machine's CPU, or None.  Asked once for each value of
    ``JAXLLAMA_CPU_ISA``; the answer costs a test."""
    with _one_at_a_time:
        return _unavailable(os.environ.get(VARIABLE, ""))


@functools.cache
def _unavailable(isa: str) -> Reason | None:
    del isa
    if importlib.util.find_spec("llvmlite") is None:
        return Reason("llvmlite is not installed: pip install llvmlite")
    if reason := frame.version_reason():
        return Reason(reason)
    if isinstance(found := target(), Reason):
        return found
    wrong = fault(lambda program: compiled(program, found).address)
    return None if wrong is None else Reason(f"the self-test failed on {found.name}: {wrong}")


def host() -> Target:
    """The target of this process's programs.  Raises RuntimeError with ``unavailable``'s reason."""
    return _host(os.environ.get(VARIABLE, ""))


@functools.cache
def _host(isa: str) -> Target:
    del isa
    found = target()
    if isinstance(found, Reason):
        raise RuntimeError(found.text)
    return found


@dataclasses.dataclass(frozen=True)
class Compiled:
    """keep: the image, or LLVM's engine, which holds the code."""

    name: str
    address: int
    keep: object


def register(program: Program) -> str:
    """XLA's name of the program's handler on this process's target."""
    with _one_at_a_time:
        on = host()
        if (program, on) not in _known:
            entry = _compiled(program, on)
            address = jax.ffi.pycapsule(entry.address)
            jax.ffi.register_ffi_target(entry.name, address, platform="cpu")
            _known[program, on] = entry
        return _known[program, on].name


@functools.cache
def name_of(plan: CpuPlan) -> str:
    """XLA's name of the handler of a plan, which layers that are alike share."""
    return register(plan.program)


def identity() -> str:
    """Facts that machine code depends on beside its source: the target and the CPU's model."""
    return repr((host(), host_cpu().identity))


def registered() -> tuple[Program, ...]:
    with _one_at_a_time:
        return tuple(dict.fromkeys(program for program, _ in _known))


def compiled(program: Program, on: Target) -> Compiled:
    """The handler in this process's memory: loaded, or generated and kept."""
    with _one_at_a_time:
        return _compiled(program, on)


@functools.cache
def _compiled(program: Program, on: Target) -> Compiled:
    name = f"{program.name}_{on.name}_{_hash(program, on)}"
    path = cache_folder() / f"{name}.o"
    try:
        data = sealed.read(path)
    except sealed.Damaged:
        data = None
    if data is None:
        data = build(program, on)
        with contextlib.suppress(OSError):  # a folder that cannot be written is no error
            sealed.write(path, data)
    address, keep = _loaded(data, on)
    return Compiled(f"pallas_kernels.{name}", address, keep)


def _loaded(data: bytes, on: Target) -> tuple[int, object]:
    """Return (the address of an object file's ``entry``, the object that keeps its code alive)."""
    image = elf.load(data)
    if image is not None:
        return image.symbols["entry"], image
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(on))
    engine.add_object_file(binding.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine.get_function_address("entry"), engine


@overload
def build(program: Program, on: Target) -> bytes: ...
@overload
def build(program: Program, on: Target, assembly: Literal[True]) -> str: ...
def build(program: Program, on: Target, assembly: bool = False) -> bytes | str:
    """The object file's bytes, or its assembly's text, for any target that this LLVM has."""
    from llvmlite import binding

    if assembly:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    machine = _machine(on)
    parsed = binding.parse_assembly(str(handler.emit(program, on, machine.triple)))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    # LLVM must keep the emitted code as it is: no further vectorization or unrolling.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed) if assembly else machine.emit_object(parsed)


def _machine(on: Target) -> TargetMachine:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple = binding.get_default_triple()
    if not triple.startswith((on.arch, on.arch.replace("aarch64", "arm64"))):
        triple = f"{on.arch}-unknown-linux-gnu"
    machine = binding.Target.from_triple(triple)
    return machine.create_target_machine(on.cpu, on.features, opt=3, codemodel="jitdefault")


def cache_folder() -> Path:
    """Beside jaxllama's other caches: ``JAXLLAMA_CACHE``, or jaxllama/ in the XDG cache folder."""
    if ours := os.environ.get("JAXLLAMA_CACHE"):
        return Path(ours).expanduser() / "cpu"
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "jaxllama" / "cpu"


def _hash(program: Program, on: Target) -> str:
    module = sys.modules[type(program).__module__]
    parts = repr((program, on, _version())).encode() + _sources(module.__file__ or "")
    return hashlib.sha256(parts).hexdigest()[:16]


@functools.cache
def _version() -> str:
    """llvmlite's version, which its package's metadata has without an import."""
    try:
        return importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        import llvmlite

        return llvmlite.__version__


@functools.cache
def _sources(module: str) -> bytes:
    """A hash of the sources of this folder and of the program's module."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(module)):
        digest.update(path.read_bytes())
    return digest.digest()


def run(
    program: Program, arguments: list[np.ndarray], results: list[np.ndarray], **more: Any
) -> None:
    """One call by hand, ``frame.call``."""
    frame.call(compiled(program, host()).address, arguments, results, **more)


# --- a test before the first use ------------------------------------------------------------------


CHUNKS = 37


@dataclasses.dataclass(frozen=True)
class SelfTest(Program):
    """w[n, 64] int8, x[n, 64] int8 -> dots[n, 16] int32 and exp(dots / 1000)[n, 16]."""

    bits: int

    n_arguments = 2
    n_results = 2

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

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np

from pallas_kernels.cpu import elf, frame, handler, sealed
from pallas_kernels.cpu.handler import CpuPlan, Program
from pallas_kernels.cpu.self_test import fault
from pallas_kernels.cpu.target import VARIABLE, Target, host_cpu, target
from pallas_kernels.dispatch import Reason

if TYPE_CHECKING:
    from llvmlite.binding import TargetMachine

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
    """Beside jaxllama's other caches: ``JAXLLAMA_CACHE``, or ``~/.cache/jaxllama``."""
    root = os.environ.get("JAXLLAMA_CACHE") or Path.home() / ".cache" / "jaxllama"
    return Path(root) / "cpu"


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

"""Handlers for 64-bit ARM, called in an emulated process: values on a machine without ARM.

    with emulated(folder) as called: by_hand(..., on=NEON)

Inside, ``jit.compiled`` links an object with ``arm_driver.c`` by Debian's cross compiler, and
``frame.call`` runs it under qemu's user mode. ``called`` gets the programs' names.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pallas_kernels.cpu import frame, jit
from pallas_kernels.cpu.handler import Program
from pallas_kernels.cpu.target import TARGETS, Target

NEON = next(one for one in TARGETS if one.name == "neon")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
_DRIVER = Path(__file__).with_name("arm_driver.c")


@contextlib.contextmanager
def emulated(folder: Path) -> Generator[list[str]]:
    """Run NEON's handlers in ``folder``; every other target's run as before."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    programs: dict[int, Path] = {}
    called: list[str] = []
    compiled, call = jit.compiled, frame.call

    @functools.cache
    def linked(program: Program) -> int:
        number = len(programs) + 1  # in place of an address
        path = folder / f"{number}_{program.name}"
        path.with_suffix(".o").write_bytes(jit.build(program, NEON))
        words = [COMPILER, "-O1", "-static", "-pthread", _DRIVER, path.with_suffix(".o"), "-lm"]
        subprocess.run([*words, "-o", path], check=True)
        programs[number] = path
        return number

    def compiled_for(program: Program, on: Target) -> jit.Compiled:
        if on != NEON:
            return compiled(program, on)
        return jit.Compiled(program.name, linked(program), None)

    def call_of(address: int, *operands: Any, **options: Any) -> None:
        if address not in programs:
            call(address, *operands, **options)
            return
        called.append(programs[address].name)
        _run(programs[address], *operands, **options)

    with (
        mock.patch.object(jit, "compiled", compiled_for),
        mock.patch.object(frame, "call", call_of),
    ):
        yield called


def _run(
    program: Path,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    attributes: Mapping[str, np.ndarray] | None = None,
    threads: int = 1,
) -> None:
    """``frame.call`` in a process of its own; arrays at one address stay one array."""
    blocks = {x.ctypes.data: x for x in itertools.chain(arguments, results)}
    words, places = [threads, len(blocks)], {address: i for i, address in enumerate(blocks)}
    parts = [np.asarray(words, "<i8").tobytes()]
    for block in blocks.values():
        raw = np.ascontiguousarray(block).view(np.uint8).tobytes() if block.size else b""
        parts += [np.int64(len(raw)).tobytes(), raw, bytes(-len(raw) % 8)]
    words = []
    for arrays in (arguments, results):
        words.append(len(arrays))
        for x in arrays:
            words += [places[x.ctypes.data], frame.TYPES[x.dtype.name], x.ndim, *x.shape]
    values = [value for _, value in sorted((attributes or {}).items())]
    parts.append(np.asarray([*words, len(values)], "<i8").tobytes())
    for value in values:
        raw = value.tobytes()
        parts += [np.int64(frame.TYPES[value.dtype.name]).tobytes(), raw, bytes(8 - len(raw))]
    given, made = program.with_suffix(".in"), program.with_suffix(".out")
    given.write_bytes(b"".join(parts))
    done = subprocess.run([EMULATOR, "-cpu", "max", program, given, made], capture_output=True)
    if done.returncode:
        raise ValueError(done.stderr.decode() or f"exit {done.returncode}")
    raw, at = made.read_bytes(), 0
    for block in blocks.values():
        found = np.frombuffer(raw, block.dtype, block.size, at).reshape(block.shape)
        at += block.nbytes
        if block.flags.writeable:
            block[...] = found

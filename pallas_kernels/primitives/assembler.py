"""Processes that assemble kernels for this process's GPU.

    start(n)                        processes for later calls, which import jax meanwhile
    program = serialized(kernel)    of the kernel alone, by an idle process or a new one

LLVM's options are a process's: XLA's own code waits while any kernel is assembled, and kernels wait
for that code. A process of its own waits for nobody, and needs no GPU. jaxlib takes the kernel from
a program that it loads, and uses it in all programs that launch the kernel.

A process ends if a kernel takes ``LONGEST`` seconds, or none comes for as long. Beside jax's own
cache a file has each kernel, for other programs of other processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.cpu import sealed
from pallas_kernels.jax_internals import description_of

LONGEST = 120
KEPT = 1024  # files, of 20 to 200 KB
OWN = "pallas_kernels.primitives.lowered"  # whose ``serve`` a process runs; it imports this module
Serialized = tuple[bytes, Any, Any]
_idle: queue.SimpleQueue[Assembler] = queue.SimpleQueue()


def cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS has no such question.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Kernel(NamedTuple):
    """A lowered kernel: a module's bytecode, and the shapes of its operands and results."""

    name: str
    code: bytes
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]


class Assembler:
    """A process that assembles one kernel after the other."""

    def __init__(self) -> None:
        device = description_of(jax.local_devices()[0])
        begin = f"import signal; signal.alarm({LONGEST}); import {OWN} as own; own.serve()"
        own = {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | own,
            start_new_session=True,  # a terminal's signals are for this process
        )
        self._send(device)

    def program(self, kernel: Kernel) -> Serialized:
        """See ``serialized``.

        Raises OSError or EOFError if the process has ended, and RuntimeError if it cannot.
        """
        self._send(kernel)
        assert self._process.stdout is not None
        found = pickle.load(self._process.stdout)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):  # what it has not read is left
            self._process.communicate()

    def _send(self, thing: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(thing, self._process.stdin)
        self._process.stdin.flush()


def serialized(kernel: Kernel) -> Serialized:
    """Return a program of a kernel alone, as ``serialize_executable`` returns it.

    Raises what ``Assembler`` does.
    """
    path, data = _file(kernel), None
    with contextlib.suppress(sealed.Damaged):
        data = path and sealed.read(path)
    if data:
        return pickle.loads(data)
    with assembler() as process:
        found = process.program(kernel)
    if path:
        sealed.keep(path, pickle.dumps(found), "kernel-*.pickle", KEPT)
    return found


def _file(kernel: Kernel) -> Path | None:
    """Return where the kernel is kept; None if jax keeps nothing."""
    config: Any = jax.config  # its options are made at import, where no type checker sees them
    folder = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder:
        return None
    device = jax.local_devices()[0]
    facts = device.device_kind, device.client.platform_version, kernel
    known = hashlib.sha256(pickle.dumps(facts)).hexdigest()[:32]
    return Path(folder) / "kernels" / f"kernel-{known}.pickle"


@contextlib.contextmanager
def assembler() -> Generator[Assembler]:
    """Within, the caller alone has a process. It is idle again afterwards, unless it has failed."""
    try:
        while not (process := _idle.get_nowait()).is_running():
            process.end()
    except queue.Empty:
        process = Assembler()
    try:
        yield process
    except BaseException:
        process.end()
        raise
    _idle.put(process)


def start(n: int) -> None:
    """Start processes, until ``n`` are idle. Each imports jax, which takes 2 seconds."""
    with contextlib.suppress(Exception):  # an older jaxlib describes no device
        while _idle.qsize() < n:
            _idle.put(Assembler())

"""Programs that child processes trace and lower, while the engine's process compiles them.

    children = Children(programs, n)            starts n processes, which share these programs
    children.lowered(key, arguments)            a program to compile; None: none of them lowered it
    children.stop()

Tracing and lowering are Python code, which the threads of a process cannot share. For an 8B model's
engine on a GPU they take 48 s. A child is a fork of the engine's process, so it has the functions
and their arguments' shapes. Tracing and lowering touch no device, and a child does nothing else. It
sends each module as bytes. The engine's process compiles a function that calls the module, and XLA
inlines the call.

A lock that another thread holds during the fork stays locked in the child. Engines therefore fork
before they have requests. If a child fails, or is silent for ``PATIENCE`` seconds, the engine's
process lowers its programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import os
import pickle
import signal
import struct
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import jax
from jax.core import ShapedArray

from jaxllama.typing import Tree
from pallas_kernels.jax_internals import parts_of, renew_threads

if TYPE_CHECKING:
    from pallas_kernels.primitives.assembler import Kernel

PATIENCE = 20.0
LONGEST = 600  # seconds of a child
Lower = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredModule:
    """A lowered program as plain data.

    code: its MLIR. kept: indices of the leaves of the arguments that it takes. donated: indices of
    arguments. options: of the compiler. results: a tree of shapes. kernels: that it launches.
    """

    name: str
    code: bytes = dataclasses.field(repr=False)
    kept: tuple[int, ...]
    donated: tuple[int, ...]
    options: dict[str, Any]
    results: Tree
    kernels: tuple[Kernel, ...]

    @classmethod
    def of(cls, lower: Lower) -> LoweredModule:
        from pallas_kernels.primitives.lowered import noted

        kernels: list[Kernel] = []
        with noted(kernels.append):
            lowered = lower()
        file = io.BytesIO()
        module, kept, options = parts_of(lowered)
        module.operation.write_bytecode(file)
        arguments = [jax.tree.leaves(argument) for argument in lowered.args_info[0]]
        return cls(
            module.operation.attributes["sym_name"].value.removeprefix("jit_"),
            file.getvalue(),
            kept,
            tuple(i for i, leaves in enumerate(arguments) if any(leaf.donated for leaf in leaves)),
            options,
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info),
            tuple(kernels),
        )

    def lower(self, arguments: tuple[Tree, ...]) -> jax.stages.Lowered:
        """Return the program of these arguments as this process's own lowered program."""
        from pallas_kernels.primitives.lowered import module_p

        results, tree = jax.tree.flatten(self.results)
        avals = tuple(ShapedArray(x.shape, x.dtype) for x in results)

        def program(*arguments: Tree) -> Tree:
            leaves = jax.tree.leaves(arguments)
            operands = [leaves[i] for i in self.kept]
            found = module_p.bind(*operands, name=self.name, code=self.code, avals=avals)
            return tree.unflatten(found)

        program.__name__ = self.name
        jitted = jax.jit(program, donate_argnums=self.donated, compiler_options=self.options)
        return jitted.lower(*arguments)


class Children:
    """See the module docstring.

    programs: functions that lower the programs, by key. n: number of processes.
    """

    def __init__(self, programs: Mapping[Hashable, Lower], n: int) -> None:
        self._modules = {key: Future[LoweredModule | None]() for key in programs}
        # Indices of the programs that no child has taken; a read takes one.
        turns, file = os.pipe()
        os.write(file, struct.pack(f"{len(programs)}H", *range(len(programs))))
        os.close(file)
        self._sources: dict[int, BinaryIO] = {}  # of the running children, by process
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):  # no memory for another process
            for _ in range(n):
                self._start(turns, list(programs.values()))
        os.close(turns)
        for pid in list(self._sources):
            threading.Thread(target=self._receive, args=(pid,), daemon=True).start()
        self._give_up()

    def lowered(self, key: Hashable, arguments: tuple[Tree, ...]) -> jax.stages.Lowered | None:
        """Wait for a program. Return None if no child lowers it."""
        module = self._modules.get(key)
        if module is None:
            return None
        try:
            found = module.result(PATIENCE)
        except TimeoutError:
            self.stop()
            return None
        return None if found is None else found.lower(arguments)

    def kernels(self, key: Hashable) -> tuple[Kernel, ...] | None:
        """Return the kernels of a program that a child has lowered, else None."""
        module = self._modules.get(key)
        found = module.result() if module is not None and module.done() else None
        return None if found is None else found.kernels

    def stop(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            for pid in self._sources:
                os.kill(pid, signal.SIGKILL)

    def _start(self, turns: int, programs: Sequence[Lower]) -> None:
        source, sink = os.pipe()
        with warnings.catch_warnings():  # jax and Python warn of threads
            warnings.simplefilter("ignore")
            pid = os.fork()
        if not pid:
            _work(turns, sink, programs)
        os.close(sink)
        self._sources[pid] = os.fdopen(source, "rb")

    def _receive(self, pid: int) -> None:
        """Take the modules of a child until it ends, and have their kernels assembled."""
        from pallas_kernels.primitives.lowered import assemble

        modules = list(self._modules.values())
        with contextlib.suppress(EOFError, pickle.UnpicklingError), self._sources[pid] as source:
            while True:
                turn, module = pickle.load(source)
                for kernel in module.kernels if module else ():
                    assemble(kernel)
                modules[turn].set_result(module)
        with self._lock, contextlib.suppress(OSError):  # the process has it reaped already
            del self._sources[pid]
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._give_up()

    def _give_up(self) -> None:
        """Leave the other programs to this process, if no child is left."""
        with self._lock:
            if not self._sources:
                for module in self._modules.values():
                    if not module.done():
                        module.set_result(None)


def _work(turns: int, sink: int, programs: Sequence[Lower]) -> NoReturn:
    """Lower programs in a child, which ends here."""
    try:
        signal.alarm(LONGEST)  # its parent may end without a word
        renew_threads()
        gc.disable()
        logging.disable()  # the engine's process says the same
        with os.fdopen(sink, "wb") as file:
            while turn := os.read(turns, 2):
                [index] = struct.unpack("H", turn)
                try:
                    module = LoweredModule.of(programs[index])
                except Exception:  # the engine's process meets it as well
                    module = None
                pickle.dump((index, module), file)
                file.flush()
    finally:
        os._exit(0)

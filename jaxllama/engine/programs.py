"""Programs: the compiled programs of an engine, kept in a file for the next engine like it.

    programs = Programs(folder("engines"), devices)
    programs.add({key: Wanted(jitted, arguments, ...), ...}, on_made)
                                        reads, or compiles and keeps them
    programs.add_first(..., n)          compiles the first n of them
    programs.add_rest(..., n)           compiles the others, in a thread
    programs.first_made(keys)           the first key whose program exists
    programs.call(key, wanted)          runs the compiled program, or the jitted function

jax's own cache of compiled programs is keyed by a program's lowered text. Tracing and lowering the
fifty programs of an engine on a GPU takes most of a second start. Both are Python code that threads
cannot share. So this module keeps the compiled programs as a whole. The file's name is a hash of
everything that the programs depend on: this code, jax and its settings, the device, and the
arguments' shapes. On a CPU programs call handlers that must be registered first
(``pallas_kernels/cpu``), so the handlers are kept with the programs. On a GPU programs call the
runtime of Mosaic GPU.

Left out: meshes of GPUs, on which no second start has run yet, and meshes of several processes,
which compile together.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from jaxllama import compiler_options
from jaxllama.engine.lowering import Children
from jaxllama.kept import (
    Kept,
    Serialized,
    Wanted,
    backend_facts,
    digest,
    keep,
    read,
    tell_where_kernels_are,
)
from jaxllama.typing import LocalDevice, Tree
from pallas_kernels.cpu import jit
from pallas_kernels.primitives.assembler import cores

PATIENCE = 1.0  # largest number of seconds that a program waits for more urgent work
CHILDREN = 4  # processes that lower programs
LOOK = 0.01  # seconds between two checks for that work
_log = logging.getLogger("jaxllama.serving")
# number of files kept, one for each set of sizes; half a GB for an 8B model's engine on a GPU
KEPT = 4


class Programs:
    """Compiled programs of an engine, by key.

    Every key is compiled once: by ``add``, by ``add_first``, by the thread of ``add_rest``, or by
    the ``call`` that needs it first; unless a file has it.

    Parameters
    ----------
    folder
        Folder of the kept programs; None keeps none.
    devices
        The jax.Devices that the programs run on, in the order of their mesh.
    """

    def __init__(self, folder: Path | None, devices: Sequence[LocalDevice]) -> None:
        # Processes of one mesh wait for each other in every program that they compile.
        is_shared = jax.process_count() > 1
        self._workers = 1 if is_shared else cores()
        self._folder, self._devices = None if is_shared else folder, tuple(devices)
        self._is_cpu = devices[0].platform == "cpu"
        self._made: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._claimed: set[Hashable] = set()
        self._lock = threading.Lock()  # of the claims
        self._lowering = threading.Lock()  # tracing is Python: two threads would take turns
        # A CPU's programs call handlers of the process that lowered them.
        alone = self._is_cpu or is_shared or len(devices) > 1
        self._n_children = 0 if alone else min(CHILDREN, cores() // 2)
        self._children = Children({}, 0)
        self._is_stopped = False
        self._path: Path | None = None
        self._is_kept = False
        self._keys: dict[bytes, Hashable] = {}  # by the lowered program

    def __len__(self) -> int:
        """Return the number of programs that are compiled."""
        return sum(program.done() for program in self._made.values())

    def call(self, key: Hashable, wanted: Wanted) -> Tree:
        """Run a program. If it is not compiled yet, wait for this program alone."""
        program = self._made.get(key)
        if program is None:
            return wanted.run()
        if not program.done() and self._claim(key):
            self._compile(key, self._lowered(key, wanted))
        return program.result()(*wanted.arguments)

    @property
    def missing(self) -> int:
        """Number of programs that ``add_rest`` still has to compile."""
        return len(self._made) - len(self)

    def first_made(self, keys: Sequence[Hashable]) -> Hashable:
        """Return the first of the keys whose program exists; without one, the first key."""

        def is_made(key: Hashable) -> bool:
            program = self._made.get(key)
            return program is not None and program.done()

        return next(filter(is_made, keys), keys[0])

    def add(
        self,
        wanted: Mapping[Hashable, Wanted],
        on_made: Callable[[Hashable], object] = lambda key: None,
    ) -> None:
        """Read the programs from their file. If there is none, compile them in parallel and keep
        them.

        Returns when all programs are compiled.

        Parameters
        ----------
        wanted
            The programs, the longest to compile first.
        on_made
            Called with the key of each program once it exists.
        """
        self._open(wanted)
        self._compile_all(wanted, self._workers, on_made=on_made)
        self._keep(wanted)

    def add_first(self, wanted: Mapping[Hashable, Wanted], n: int) -> None:
        """Read or compile the first ``n`` programs. Threads read the others; without a file
        ``add_rest`` compiles them."""
        self._open(wanted)
        first = list(wanted)[:n]
        self._compile_all({key: wanted[key] for key in first}, self._workers)

    def add_rest(
        self,
        wanted: Mapping[Hashable, Wanted],
        n: int,
        is_busy: Callable[[], bool],
        on_made: Callable[[Hashable], object],
    ) -> None:
        """Start a thread that compiles the programs after the first ``n``, in their order.

        While ``is_busy`` it waits up to ``PATIENCE`` seconds before each program, and before each
        call of ``on_made``.

        Parameters
        ----------
        wanted, n
            As in ``add_first``, which comes before.
        is_busy
            True while the process has more urgent work.
        on_made
            Called with the key of each of these programs once it exists, for one after the other.
        """
        others = {key: wanted[key] for key in list(wanted)[n:]}
        workers = max(cores() - 2, 1)  # the others are for requests

        def wait() -> bool:
            until = time.monotonic() + PATIENCE
            while not self._is_stopped and is_busy() and time.monotonic() < until:
                time.sleep(LOOK)
            return not self._is_stopped and threading.main_thread().is_alive()

        def work() -> None:
            try:
                with ThreadPoolExecutor(1) as runs:

                    def told(key: Hashable) -> None:
                        with contextlib.suppress(RuntimeError):  # the program ends
                            runs.submit(lambda: wait() and on_made(key))

                    self._compile_all(others, workers, wait, told)
            except Exception as error:  # the call that needs the program raises it again
                _log.error("a program cannot be compiled", exc_info=error)
                return
            if not all(self._made[key].done() for key in wanted):  # stopped
                return
            _log.info("all programs are compiled", extra={"fields": {"programs": len(wanted)}})
            self._keep(wanted)

        # No daemon: a process that ends while this thread is in the compiler would crash.
        threading.Thread(target=work, name="jaxllama-warm-up").start()

    def stop(self) -> None:
        """End the thread of ``add_rest`` after the programs that it compiles now."""
        self._is_stopped = True
        self._children.stop()

    def _open(self, wanted: Mapping[Hashable, Wanted]) -> None:
        """Let threads read the programs from their file, the first ones first. If there is none,
        let children lower them."""
        with self._lock:
            is_new = not self._made
            for key in wanted:
                self._made.setdefault(key, Future())
        if not is_new:
            return
        if self._folder is not None:
            self._path = self._folder / name(wanted, self._devices)
            kept = self._kept(self._path)
            self._is_kept = kept is not None
            readers = ThreadPoolExecutor(cores(), "jaxllama-kept")
            for (key, program), entry in zip(wanted.items(), kept or (), strict=self._is_kept):
                if self._claim(key):
                    readers.submit(self._load, key, program, entry)
            readers.shutdown(wait=False)
        if not self._is_kept:
            # The first program is the longest to compile, and this process lowers it at once.
            others = {key: wanted[key].lower for key in list(wanted)[1:]}
            if self._n_children:
                tell_where_kernels_are()
            self._children = Children(others, self._n_children)
            if self._n_children:
                from pallas_kernels.primitives.lowered import start_assemblers

                start_assemblers()

    def _claim(self, key: Hashable) -> bool:
        """Return whether the caller must make the program."""
        with self._lock:
            is_free = key not in self._claimed
            self._claimed.add(key)
            return is_free

    def _lowered(self, key: Hashable, wanted: Wanted) -> jax.stages.Lowered | Exception | None:
        """Return the lowered program or the exception of lowering it.

        Returns None if another key has the same program.
        """
        try:
            if (lowered := self._children.lowered(key, wanted.arguments)) is not None:
                return lowered
            with self._lowering:
                lowered = wanted.lower_to_compile()
        except Exception as error:
            return error
        if not self._is_cpu:
            return lowered
        # A prompt's first chunk and the following ones may be one program.
        text = f"{lowered.in_tree}\n{lowered.as_text()}"
        twin = self._keys.setdefault(hashlib.sha256(text.encode()).digest(), key)
        if twin == key:
            return lowered
        self._made[twin].add_done_callback(lambda future: _copy(future, self._made[key]))
        return None

    def _compile(self, key: Hashable, lowered: jax.stages.Lowered | Exception | None) -> None:
        if lowered is None:
            return
        try:
            if isinstance(lowered, Exception):
                raise lowered
            program = compiler_options.compiled_here(lowered, self._children.kernels(key))
        except Exception as error:
            self._made[key].set_exception(error)
            return
        self._made[key].set_result(program)

    def _compile_all(
        self,
        wanted: Mapping[Hashable, Wanted],
        workers: int,
        wait: Callable[[], bool] = lambda: True,
        on_made: Callable[[Hashable], object] = lambda key: None,
    ) -> None:
        """Lower the unclaimed programs one after the other, and compile them in parallel.

        wait: called before each program; False ends the work.
        """
        turns = threading.Semaphore(workers + 1)  # one is lowered while ``workers`` are compiled
        with ThreadPoolExecutor(workers) as pool:
            for key, program in wanted.items():
                turns.acquire()
                if not wait():
                    return
                if self._claim(key):
                    lowered = self._lowered(key, program)
                    try:
                        pool.submit(self._compile, key, lowered)
                    except RuntimeError:  # the interpreter ends
                        return
                self._made[key].add_done_callback(lambda future: turns.release())
                self._made[key].add_done_callback(lambda future, key=key: on_made(key))
        for key in wanted:
            self._made[key].result()

    def _kept(self, path: Path) -> Sequence[Serialized] | None:
        """Return the kept programs.  None if there are none, or, with a warning, if they are
        unusable."""
        try:
            kept = read(path)
        except (pickle.UnpicklingError, EOFError, ValueError) as error:
            warnings.warn(f"{path}: compiling again: {error}", stacklevel=4)
            return None
        if kept is None:
            return None
        for handler in kept.handlers:
            jit.register(handler)
        if not self._is_cpu:
            tell_where_kernels_are()
        return kept.programs

    def _load(self, key: Hashable, wanted: Wanted, kept: Serialized) -> None:
        try:
            program = serialize_executable.deserialize_and_load(
                *kept, execution_devices=self._devices
            )
        except Exception as error:
            warnings.warn(f"{self._path}: compiling again: {error}", stacklevel=2)
            self._is_kept = False
            self._compile(key, self._lowered(key, wanted))
        else:
            self._made[key].set_result(program)

    def _keep(self, wanted: Mapping[Hashable, Wanted]) -> None:
        """Write the programs to their file, if they can be written and are not there."""
        if self._path is None or self._is_kept:
            return
        compiled = [self._made[key].result() for key in wanted]
        try:
            with ThreadPoolExecutor(cores()) as pool:
                programs = list(pool.map(serialize_executable.serialize, compiled))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            warnings.warn(f"the next start will lower them again: {error}", stacklevel=3)
        else:
            keep(self._path, Kept(jit.registered(), programs), KEPT)
            self._is_kept = True


def _facts(wanted: Wanted) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(wanted.arguments)
    kinds = [
        (leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", None), _placed(leaf))
        for leaf in leaves
    ]
    return wanted.jitted.__name__, str(structure), kinds, wanted.cfg, dict(wanted.static)


def _placed(leaf: Any) -> str | None:
    """Return how an array lies on its mesh; None without one."""
    sharding = getattr(leaf, "sharding", None)
    return repr(sharding) if isinstance(sharding, NamedSharding) else None


def _copy(source: Future[jax.stages.Compiled], to: Future[jax.stages.Compiled]) -> None:
    error = source.exception()
    if error is None:
        to.set_result(source.result())
    else:
        to.set_exception(error)


def name(wanted: Mapping[Hashable, Wanted], devices: Sequence[LocalDevice]) -> str:
    """Return the file name of these programs on jax.Devices: a hash of all that they depend on."""
    facts = backend_facts(), [device.device_kind for device in devices]
    programs = [(key, _facts(program)) for key, program in wanted.items()]
    return f"engine-{digest(facts, programs)}.pickle"

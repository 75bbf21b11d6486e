"""Compiled programs of a model's first calls, kept on disk for the next process.

    programs = KeptPrograms(facts)      facts of how the model is loaded; a thread reads the file
    programs.call(key, Wanted(function, arguments, cfg, static))     the result of ``function``
    programs.begin(key, wanted)         compiles for a later call, in a thread
    programs.wait()                     until the first calls' programs are ready
    folder, digest, read, keep          the files, which an engine's programs have too
    trim()                              returns the C library's free memory to the system

jax's cache finds a compiled program by its lowered text. A process must therefore trace and lower a
program before it finds it there: 0.4 s for a model of 30 layers, before its first token. A kept
program is found by its arguments' shapes instead. ``load`` begins to read the file while it reads
the weights. A program in memory takes 5 to 30 MB, so only the newest few are prepared then. A call
prepares an older program when it needs it, and that program counts as the newest afterwards.

Left out: meshes, and models of few layers, whose tracing takes little time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import os
import pickle
import warnings
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable

import pallas_kernels
from jaxllama.compiler_options import compiled_here, for_device
from jaxllama.config import ModelConfig
from jaxllama.typing import Jitted, Tree
from pallas_kernels.cards import architecture
from pallas_kernels.cpu import jit, sealed

FILES = 4  # one per model and way of loading it
Serialized = tuple[bytes, object, object]  # as ``serialize_executable`` returns it
PROGRAMS = 12  # per file: a cache, a prefill and a loop for each of four shapes
EARLY = 4  # programs prepared while the weights are read: the last process's newest
LEAST_LAYERS = 8


class Wanted(NamedTuple):
    """A jitted function and the arguments, or their shapes, that it is compiled for.

    cfg: its first argument, if it takes a ModelConfig. static: its static keyword arguments.
    """

    jitted: Jitted
    arguments: tuple[Tree, ...]
    cfg: ModelConfig | None = None
    static: Mapping[str, object] = MappingProxyType({})

    def lower(self) -> jax.stages.Lowered:
        return self.jitted.lower(*self._positional(), **self.static)

    def lower_to_compile(self) -> jax.stages.Lowered:
        """As ``lower``, in the process that compiles the program: on a GPU threads begin with its
        kernels.
        """
        early = contextlib.nullcontext()
        if jax.default_backend() == "gpu":
            # A CPU's process needs no Pallas.
            from pallas_kernels.primitives.lowered import assemble, noted

            early = noted(assemble)
        with collector_paused(), early:
            return self.lower()

    def run(self) -> Tree:
        return self.jitted(*self._positional(), **self.static)

    def _positional(self) -> tuple[Tree, ...]:
        return self.arguments if self.cfg is None else (self.cfg, *self.arguments)


class Kept(NamedTuple):
    """The contents of a file.

    handlers: the CPU handlers that the programs call.  programs: the serialized programs.
    """

    handlers: tuple[jit.Program, ...]
    programs: Any


class KeptPrograms:
    """Compiled programs of one model, as it was loaded. See the module docstring.

    facts: facts of how the model is loaded. Their repr tells the model from others.
    """

    def __init__(self, facts: object) -> None:
        self._settings = _settings()
        self._path: Path | None = None
        self._made: dict[str, Future[jax.stages.Compiled]] = {}
        self._later: dict[str, Serialized] = {}  # serialized, for a call that asks
        self._pool = ThreadPoolExecutor(1, "jaxllama-kept")
        self._compilers = ThreadPoolExecutor(thread_name_prefix="jaxllama-compile")
        self._index = self._pool.submit(self._read, facts)

    def call(self, key: object, wanted: Wanted) -> Tree:
        """Run a program, which is compiled if it is not kept.

        key: its repr tells this program from all others of the model. It names the arguments'
            shapes and every static argument.
        """
        if self._settings != _settings():  # the kept programs depend on other settings
            return wanted.run()
        self.begin(key, wanted)
        return self._made[_name(key)].result()(*wanted.arguments)

    def begin(self, key: object, wanted: Wanted) -> Tree | None:
        """Lower a program that is not there, and let a thread compile it for ``call``.

        Returns the shapes of the program's result; None if the program is there already.
        """
        name = _name(key)
        self._index.result()
        if self._settings != _settings() or self._is_ready(name):
            return None
        lowered = wanted.lower_to_compile()
        self._made[name] = self._compilers.submit(self._compile, name, lowered)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info
        )

    def wait(self) -> None:
        """Return when the programs kept for the first calls are ready, or cannot be used."""
        self._index.result()
        wait(self._made.values())

    def _is_ready(self, name: str) -> bool:
        """Return whether the program exists or is being prepared."""
        blob = self._later.pop(name, None)
        if blob is not None:
            self._made[name] = self._pool.submit(_loaded, blob)
            self._pool.submit(self._keep, name, blob)  # the next process prepares it early
        program = self._made.get(name)
        return program is not None and program.exception() is None

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        compiled = compiled_here(lowered)
        trim()
        if self._path is not None:
            self._pool.submit(self._serialize, name, compiled)
        return compiled

    def _read(self, facts: object) -> None:
        """Read the programs' names and start to prepare the newest ones."""
        self._path = _path(facts)
        if self._path is None:
            return
        handlers, programs = _stored(self._path)
        for handler in handlers:
            jit.register(handler)
        if jax.default_backend() == "gpu":
            tell_where_kernels_are()
            if not programs:
                from pallas_kernels.primitives.lowered import start_assemblers

                start_assemblers()
        newest = list(reversed(programs.items()))
        for name, blob in newest[:EARLY]:
            self._made[name] = self._pool.submit(_loaded, blob)
        self._later = dict(newest[EARLY:])

    def _serialize(self, name: str, compiled: jax.stages.Compiled) -> None:
        try:
            blob = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return  # the next process compiles it, as this one did
        self._keep(name, blob)

    def _keep(self, name: str, blob: Serialized) -> None:
        """Write the program into the file, as the newest one there."""
        assert self._path is not None
        _, programs = _stored(self._path)
        programs.pop(name, None)
        programs[name] = blob
        newest = dict(list(programs.items())[-PROGRAMS:])
        _write(self._path, Kept(jit.registered(), newest))


@contextlib.contextmanager
def collector_paused() -> Generator[None]:
    """Within, Python looks for no cycles: while a program is traced and lowered, whose objects are
    many and stay, that takes a quarter of the time.

    Other threads may pause it at the same time; it goes on when the first of them ends.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def trim() -> None:
    """Return the C library's free memory to the system; loading and compiling leave much of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _name(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def signature(tree: Tree) -> str:
    """Return a hash of the structure, shapes and dtypes of a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [
        (
            leaf.shape,
            leaf.dtype.name,
            bool(getattr(leaf, "weak_type", False)),
            isinstance(leaf, np.ndarray),
        )
        for leaf in leaves
    ]
    return hashlib.sha256(f"{structure}{kinds}".encode()).hexdigest()


def _settings() -> tuple[object, ...]:
    """Return all settings of jax, except those of its own cache."""
    return tuple(item for item in jax.config.values.items() if "_cache_" not in item[0])


def _path(facts: object) -> Path | None:
    """Return the file of a model's programs, or None if they are not kept.

    The file's name is a hash of everything that determines the programs.
    """
    known = folder("models")
    if known is None:
        return None
    devices = [device.device_kind for device in jax.devices()]
    facts = backend_facts(), devices, facts
    return known / f"model-{digest(facts)}.pickle"


def backend_facts() -> tuple[object, ...]:
    """Return what compiled programs depend on beside this code, jax, and the kinds of devices."""
    if jax.default_backend() == "cpu":
        return (jit.identity(),)
    version = jax.local_devices()[0].client.platform_version
    return version, for_device()


def tell_where_kernels_are() -> None:
    """Tell jaxlib where the runtime of Mosaic GPU is, with which programs link.

    jax does so when it imports the module below. Lowering imports that module, but a process does
    not lower kept programs. Other processes need it too: it takes 0.7 s, here while weights load.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def folder(name: str) -> Path | None:
    """Return a folder beside jax's compiled programs; None where nothing is kept."""
    config: Any = jax.config  # its options are made at import, where no type checker sees them
    known = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    # Without handlers nothing identifies the CPU.
    is_told = jax.default_backend() != "cpu" or jit.unavailable() is None
    return Path(known) / name if is_told and known and os.path.isdir(known) else None


def digest(*facts: object) -> str:
    """Return a hash of this code, jax with its settings, and the facts."""
    found = hashlib.sha256()
    for package in (Path(__file__).parent, pallas_kernels.__path__[0]):
        for line in sorted(_sources(str(package))):
            found.update(line.encode())
    told = os.environ.get("XLA_FLAGS"), os.environ.get(architecture.TARGET)
    flags = told, sorted(map(repr, jax.config.values.items()))
    found.update(repr((jax.__version__, jaxlib.version.__version__, flags, facts)).encode())
    return found.hexdigest()[:32]


def _sources(folder: str) -> Iterator[str]:
    """Yield one line per source file below ``folder``: its path, size and time."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                file = entry.stat()
                yield f"{entry.path} {file.st_size} {file.st_mtime_ns}"
            elif entry.is_dir():
                yield from _sources(entry.path)


def _stored(path: Path) -> Kept:
    """Return the file's contents; ``programs`` maps names to serialized programs, oldest first."""
    try:
        return read(path) or Kept((), {})
    except (OSError, sealed.Damaged) as error:
        warnings.warn(f"{path}: compiling again: {error}", stacklevel=2)
        return Kept((), {})


def read(path: Path) -> Kept | None:
    """Return a file's contents, or None if there is no such file.

    Raises ``sealed.Damaged``, a ValueError, if the file is damaged.
    """
    data = sealed.read(path)
    if data is None:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return Kept(*pickle.loads(data))


def keep(path: Path, contents: Kept, most: int) -> None:
    """Write a file, then remove all but the newest ``most`` of its folder's files of that kind.

    path: its name begins with the kind and a dash.
    """
    kind = path.name.partition("-")[0]
    sealed.keep(path, pickle.dumps(contents), f"{kind}-*.pickle", most)


def _loaded(blob: Serialized) -> jax.stages.Compiled:
    device = jax.local_devices()[0]
    return serialize_executable.deserialize_and_load(*blob, execution_devices=[device])


def _write(path: Path, contents: Kept) -> None:
    keep(path, contents, FILES)

"""Programs: what an engine compiles, kept in a file for the next engine like it.

    programs = Programs(folder(), device)
    programs.add({key: Wanted(jitted, arguments, ...), ...})     read, or compiled and kept
    programs.call(key, wanted)          what was made, or the jitted function

jax's cache of compiled programs is asked with a program's lowered text.  For the fifty programs of
an engine on a GPU tracing and lowering are most of a second start: Python, a kernel's operations
one by one, which no threads share.  So what was compiled is kept as a whole, under a name that says
all that it follows from: this code, jax and its settings, the device, the arguments' shapes.  On a
CPU programs call handlers that exist once they were registered (``pallas_kernels/cpu``): those are
kept with them.  On a GPU they call the runtime of Mosaic GPU.

Left out: meshes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pickle
import warnings
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

import jaxllama
import pallas_kernels
from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from pallas_kernels import sealed
from pallas_kernels.cpu import jit

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # jax's event
KEPT = 4  # files: other sizes, other models; half a GB for an 8B model's engine on a GPU


class Wanted(NamedTuple):
    """A jitted function and what it is compiled for.  cfg: its first argument, if it takes one;
    static: those that it is told by name."""

    jitted: Any
    arguments: tuple[Any, ...]
    cfg: ModelConfig | None = None
    static: Mapping[str, Any] = MappingProxyType({})

    def lower(self) -> Any:
        return self.jitted.lower(*self._positional(), **self.static)

    def run(self) -> Any:
        return self.jitted(*self._positional(), **self.static)

    def _positional(self) -> tuple[Any, ...]:
        return self.arguments if self.cfg is None else (self.cfg, *self.arguments)

    def facts(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(self.arguments)
        kinds = [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", None)) for leaf in leaves]
        return self.jitted.__name__, str(structure), kinds, self.cfg, dict(self.static)


def folder() -> Path | None:
    """Beside jax's compiled programs; None where nothing is kept."""
    config: Any = jax.config  # its options are made at import, where no type checker sees them
    known = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    # Without handlers nothing is known of a CPU by which to tell it from another.
    is_told = jax.default_backend() != "cpu" or jit.unavailable() is None
    return Path(known) / "engines" if is_told and known and os.path.isdir(known) else None


class Kept(NamedTuple):
    """handlers: of the CPU, that the programs call.  programs: what jax makes of each."""

    handlers: tuple[Any, ...]
    programs: list[tuple[bytes, Any, Any]]


class _Hits:
    """Counts the programs that jax takes from its cache."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_listener(self._told)

    def _told(self, event: str, **_: Any) -> None:
        self.count += event == CACHE_HIT


_hits = _Hits()


class Programs:
    """folder: where they are kept, None for nowhere.  device: where those run that are kept."""

    def __init__(self, folder: Path | None, device: Any) -> None:
        self._folder, self._device = folder, device
        self._made: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._made)

    def call(self, key: Hashable, wanted: Wanted) -> Any:
        made = self._made.get(key)
        return wanted.run() if made is None else made(*wanted.arguments)

    def add(self, wanted: Mapping[Hashable, Wanted]) -> None:
        """Read them all, or compile them side by side and keep them; once."""
        if wanted.keys() <= self._made.keys():
            return
        path = None if self._folder is None else self._folder / name(wanted, self._device)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = None if path is None else self._kept(path, pool)
            if made is None:
                before = _hits.count
                lowered = (one.lower() for one in wanted.values())
                made = [work.result() for work in [pool.submit(one.compile) for one in lowered]]
                # A CPU's program that jax took from its cache lacks some of its functions when it
                # is written once more, and the next start would fail as it runs.
                is_whole = self._device.platform != "cpu" or _hits.count == before
                if path is not None and is_whole:
                    _keep(path, made, pool)
        self._made.update(zip(wanted, made, strict=True))

    def _kept(self, path: Path, pool: ThreadPoolExecutor) -> list[Any] | None:
        """None where there are none, or, as jax does it, a warning, where they cannot be used."""
        load = functools.partial(
            serialize_executable.deserialize_and_load, execution_devices=[self._device]
        )
        try:
            kept = read(path)
            if kept is None:
                return None
            for handler in kept.handlers:
                jit.register(handler)
            if self._device.platform != "cpu":
                _tell_where_kernels_are()
            return list(pool.map(lambda one: load(*one), kept.programs))
        except (pickle.UnpicklingError, EOFError, ValueError, jax.errors.JaxRuntimeError) as error:
            warnings.warn(f"{path}: compiling again: {error}", stacklevel=3)
            return None


def _tell_where_kernels_are() -> None:
    """Programs link with the runtime of Mosaic GPU, whose place this module tells jaxlib when it is
    imported; what is lowered imports it, but what was kept is not lowered again."""
    with contextlib.suppress(ImportError):
        importlib.import_module("jax.experimental.mosaic.gpu.core")


def _keep(path: Path, made: list[Any], pool: ThreadPoolExecutor) -> None:
    try:
        programs = list(pool.map(serialize_executable.serialize, made))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        warnings.warn(f"the next start will lower them again: {error}", stacklevel=3)
    else:
        keep(path, Kept(jit.registered(), programs))


def name(wanted: Mapping[Hashable, Wanted], device: Any) -> str:
    """The file of these programs on a jax.Device: of all that they follow from."""
    digest = hashlib.sha256()
    for package in (jaxllama, pallas_kernels):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    flags = os.environ.get("XLA_FLAGS"), sorted(jax.config.values.items())
    where = jax.__version__, device.client.platform_version, device.device_kind
    where += (jit.identity(),) if device.platform == "cpu" else ()
    digest.update(repr((where, flags, compiler_options.for_device())).encode())
    for key, one in wanted.items():
        digest.update(repr((key, one.facts())).encode())
    return f"engine-{digest.hexdigest()[:32]}.pickle"


def read(path: Path) -> Kept | None:
    """None if there is no such file.  Raises ValueError for one that is damaged."""
    data = sealed.read(path)
    if data is None:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return pickle.loads(data)


def keep(path: Path, programs: Kept) -> None:
    sealed.keep(path, pickle.dumps(programs), "engine-*.pickle", KEPT)

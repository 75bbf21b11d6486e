"""A folder of finished layers, from which a killed calibration continues.

    work = QuantizeWork(folder);  work.save("layer_3", layer, entries, "layer_4", hidden)
    work.load("layer_3") -> (layer, entries) | None;   work.hidden("layer_4") -> [h, ...]
    work.save_step(losses, leaves);   work.load_step() -> (losses, leaves) | None

A layer counts as finished when its file exists. Files appear whole, by rename, and hidden states
before the layer that they follow. The folder's name contains the ``fingerprint`` of everything that
the result depends on, so another run's layers are never used. Bits are stored unchanged for every
dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.files import whole_file
from jaxllama.typing import ArrayOrNumpy, JsonObject, ParamsDict
from pallas_kernels.qtensor import QTensor


def fingerprint(facts: JsonObject, arrays: Iterable[ArrayOrNumpy]) -> str:
    """Return a hash of plain facts and of the bits of arrays."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12)
    for array in arrays:
        array = np.asarray(array)
        digest.update(f"{array.dtype.name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class QuantizeWork:
    folder: Path

    def save(
        self,
        name: str,
        layer: ParamsDict,
        entries: list[JsonObject],
        following: str,
        hidden: list[jax.Array],
    ) -> None:
        """Store a finished layer and the hidden states after it, and delete those before it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"hidden-{following}.npz", dict(_numbered(hidden)), None)
        _write(self.folder / f"{name}.npz", layer, entries)
        (self.folder / f"hidden-{name}.npz").unlink(missing_ok=True)

    def load(self, name: str) -> tuple[ParamsDict, list[JsonObject]] | None:
        path = self.folder / f"{name}.npz"
        return _read(path) if path.is_file() else None

    def hidden(self, name: str) -> list[jax.Array]:
        return self._list(f"hidden-{name}")[1]

    def save_step(self, losses: list[float], leaves: list[jax.Array]) -> None:
        """Store the state of tuning in place of its earlier steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "tuned.npz", dict(_numbered(leaves)), losses)

    def load_step(self) -> tuple[list[float], list[jax.Array]] | None:
        return self._list("tuned") if (self.folder / "tuned.npz").is_file() else None

    def _list(self, name: str) -> tuple[Any, list[jax.Array]]:
        tree, note = _read(self.folder / f"{name}.npz")
        return note, [tree[str(index)] for index in range(len(tree))]


def _numbered(arrays: list[jax.Array]) -> Iterable[tuple[str, jax.Array]]:
    return ((str(index), array) for index, array in enumerate(arrays))


def _write(path: Path, tree: ParamsDict, note: object) -> None:
    arrays: dict[str, np.ndarray] = {}
    leaves: dict[str, object] = {}

    def add(key: str, value: ArrayOrNumpy) -> None:
        array = np.asarray(value)
        leaves[key] = [array.dtype.name, list(array.shape)]
        arrays[key] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    for key, leaf in _flatten(tree):
        if not isinstance(leaf, QTensor):
            add(key, leaf)
            continue
        static = {}
        for field in dataclasses.fields(leaf):
            value = getattr(leaf, field.name)
            if field.metadata.get("static"):
                static[field.name] = value
            elif value is not None:
                add(f"{key}.{field.name}", value)
        leaves[key] = static
    head = json.dumps({"leaves": leaves, "note": note}).encode()
    try:
        with whole_file(path) as file:
            np.savez(file, head=np.frombuffer(head, np.uint8), **arrays)  # pyright: ignore[reportArgumentType] - names of arrays alone
    except OSError as error:
        raise JaxLlamaError(f"{path}: not written: {error.strerror or error}") from None


def _read(path: Path) -> tuple[ParamsDict, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            values = {
                key: jnp.asarray(file[key].view(jnp.dtype(spec[0])).reshape(spec[1]))
                for key, spec in head["leaves"].items()
                if isinstance(spec, list)
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise JaxLlamaError(f"{path}: not a finished layer: {error}; delete the folder") from None
    tree: ParamsDict = {}
    for key, spec in head["leaves"].items():
        if "." in key:
            continue
        leaf = values.get(key)
        if isinstance(spec, dict):
            parts = {k.partition(".")[2]: v for k, v in values.items() if k.startswith(key + ".")}
            leaf = QTensor(**parts, **spec)
        *rooms, last = key.split("/")
        room = tree
        for name in rooms:
            room = room.setdefault(name, {})
        room[last] = leaf
    return tree, head["note"]


def _flatten(tree: ParamsDict, at: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{at}{key}/")
        else:
            yield at + key, value

"""Checkpoints of a run's whole state: written whole or not at all, and checked.

    checkpoints.save(step, state, texts)      texts: text files that only grow, of the same folder
    step, sizes = checkpoints.newest_whole()  0 without checkpoints; sizes of those files then
    checkpoints.restore(step, like)

A state is one pytree of arrays (parameters, moments, the step). A checkpoint is a folder with
``state.safetensors``, whose tensors have the leaves' paths as names, and ``digests.json`` with its
SHA-256. Both are written into a temporary folder, which a rename makes the checkpoint. So a
checkpoint is whole whenever a run is killed, and the next start removes the rest. Before a run goes
on, the digests are compared. They also cover the beginnings of the files beside it. A damaged
checkpoint is left for the one before. Saving waits until the files are written. Left out: writing
in the background, several hosts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxllama.checkpoints.safetensors import DTYPES, SafetensorsFile, write
from jaxllama.errors import JaxLlamaError
from jaxllama.files import INDEX, opened, read_json
from jaxllama.typing import JsonObject, Tree

DIGESTS, STATE = "digests.json", "state.safetensors"
_PIECE = 1 << 22  # bytes that are read at once


class CheckpointWarning(UserWarning):
    """A checkpoint that is damaged, so that the run goes on from the one before."""


class Checkpoints:
    """The newest ``keep`` checkpoints in ``directory``."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory.resolve(), keep
        for part in self.directory.glob(".*.part"):  # of a killed process
            shutil.rmtree(part)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the oldest first."""
        names = [path.name for path in self.directory.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def latest_or_raise(self) -> int:
        """Return the newest step. Raises JaxLlamaError if there is none."""
        step = self.latest()
        if step is None:
            raise JaxLlamaError(f"{self.directory}: no checkpoint of an ended run")
        return step

    def newest_whole(self, before: int | None = None) -> tuple[int, dict[str, int]]:
        """Return the newest checkpoint whose digests hold, and the sizes of the files beside it.

        before: the first step that does not count. Returns step 0 if there are no checkpoints.
        Warns of each damaged one, and raises JaxLlamaError if all are.
        """
        damage = None
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if damage is None and (before is None or step < before):
                return step, {
                    name: size for name, (size, _) in self._record(step)["beside"].items()
                }
            if damage is not None:
                warnings.warn(f"{damage}: not used", CheckpointWarning, stacklevel=2)
        if not self.steps():
            return 0, {}
        why = damage or f"none is older than step {before}"
        raise JaxLlamaError(
            f"{self.directory}: no whole checkpoint to go on from: {why}; restore the files, or "
            "remove this folder to begin again; keep_checkpoints keeps more of them"
        )

    def damage(self, step: int) -> str | None:
        """Return what is wrong with a checkpoint's files, by name; None if they are whole."""
        folder = self._folder(step)
        try:
            record = self._record(step)
            if _digest(folder / STATE) != record["state"]:
                return f"{folder / STATE}: damaged"
            for name, (size, digest) in record["beside"].items():
                path = self.directory.parent / name
                if _digest(path, size) != digest:
                    return f"{path}: damaged before step {step}"
        except JaxLlamaError as error:
            return str(error)
        except (KeyError, TypeError, ValueError, AttributeError):
            return f"{folder / DIGESTS}: damaged"
        return None

    def keep_until(self, step: int) -> None:
        """Remove the checkpoints after ``step``, which will be made again."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def save(self, step: int, state: Tree, texts: Sequence[Path] = ()) -> None:
        """Write a checkpoint. Raises JaxLlamaError if the disk is full, for example."""
        part = self._part(step)
        leaves = _named(state)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            heads = [(name, leaf.shape, np.dtype(leaf.dtype)) for name, leaf in leaves.items()]
            # one at a time, so that the host needs no room for all
            values = (np.ascontiguousarray(jax.device_get(leaf)) for leaf in leaves.values())
            write(part / STATE, heads, values)
            record: JsonObject = {
                "state": _digest(part / STATE),
                "beside": {path.name: [path.stat().st_size, _digest(path)] for path in texts},
            }
            with open(part / DIGESTS, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if self._folder(step).exists():
                self._remove(step)
            os.replace(part, self._folder(step))
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise JaxLlamaError(
                f"{self._folder(step)}: cannot be written: {error.strerror or error}; the "
                "checkpoints before are whole"
            ) from None
        for old in self.steps()[: -self._keep]:
            self._remove(old)

    def restore(self, step: int, like: Tree) -> Tree:
        """Return the state of a step.

        like: a state with the same shapes, dtypes and devices, of arrays or ShapeDtypeStructs.
        Raises JaxLlamaError if the checkpoint's state differs.
        """
        with SafetensorsFile(self._folder(step) / STATE) as file:
            leaves = _named(like)
            if file.tensors.keys() != leaves.keys():
                other = next(iter(file.tensors.keys() ^ leaves.keys()))
                raise file.error(f"{other} is part of one state only: of another version?")
            values: list[jax.Array] = []
            for name, leaf in leaves.items():
                info = file.tensors[name]
                if (info.shape, DTYPES[info.dtype]) != (leaf.shape, np.dtype(leaf.dtype)):
                    raise file.error(
                        f"{name}: {info.dtype}{list(info.shape)}, but the run has "
                        f"{leaf.dtype}{list(leaf.shape)}"
                    )
                values.append(jax.device_put(file.read(name), leaf.sharding))
        return jax.tree.unflatten(jax.tree.structure(like), values)

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def _part(self, step: int) -> Path:
        return self.directory / f".{step}.part"

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; a process that is killed meanwhile leaves none that is cut."""
        os.replace(self._folder(step), self._part(step))
        shutil.rmtree(self._part(step))

    def _record(self, step: int) -> JsonObject:
        return read_json(self._folder(step) / DIGESTS, INDEX)


def _named(tree: Tree) -> dict[str, jax.Array]:
    """Return a tree's leaves by their paths, in the tree's order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _digest(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first ``size`` bytes."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while piece := file.read(_PIECE if size is None else min(_PIECE, size)):
            digest.update(piece)
            size = None if size is None else size - len(piece)
    return digest.hexdigest()

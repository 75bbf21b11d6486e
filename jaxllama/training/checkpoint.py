"""Checkpoints of a run's whole state, through orbax: written whole or not at all.

A state is one pytree of arrays (parameters, moments, the step). Orbax writes into a temporary
folder and commits it by a rename. So the newest committed step is intact whenever a run is killed,
and the next start removes the rest. Saving waits until the files are written. Left out: writing in
the background, several hosts.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Tree


class Checkpoints:
    """The newest ``keep`` checkpoints in ``directory``."""

    def __init__(self, directory: Path, keep: int) -> None:
        try:
            import orbax.checkpoint as ocp  # takes two seconds
        except ImportError:
            raise extras.missing("orbax", "training") from None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._args = ocp.args
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def latest_or_raise(self) -> int:
        """Return the newest step. Raises JaxLlamaError if there is none."""
        step = self.latest()
        if step is None:
            raise JaxLlamaError(f"{self._manager.directory}: no checkpoint of an ended run")
        return step

    def keep_until(self, step: int) -> None:
        """Remove the checkpoints after ``step``, which will be made again."""
        for later in self._manager.all_steps():
            if later > step:
                self._manager.delete(later)

    def save(self, step: int, state: Tree) -> None:
        self._manager.save(step, args=self._args.StandardSave(state))

    def restore(self, step: int, like: Tree) -> Tree:
        """Return the state of a step.

        like: a state with the same shapes, dtypes and devices, of arrays or ShapeDtypeStructs.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        return self._manager.restore(step, args=self._args.StandardRestore(shapes))

    def close(self) -> None:
        self._manager.close()

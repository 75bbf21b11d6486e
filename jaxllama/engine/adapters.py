"""LoRA adapters of a running engine: slots beside the weights that are filled and freed.

    slots = AdapterSlots(cfg, params, ("sql",), n_free=2, rank=16)
    slots.params                      the tree with a factor of zeros in each free slot
    id = slots.load("legal", path, reclaim)    the adapter's id for ``Request.adapter``
    slots.unload(id)                  no new request should name it; requests that run keep it

The shapes of the factors never change, so the engine's compiled programs stay. Every load gets an
id that no earlier load had. A cached prefix belongs to an id, so a second adapter of one name never
reads what the first one wrote. A slot is free again when no request uses it.

The trees are immutable. A call that was planned before a load keeps the tree that it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jaxllama.checkpoints import peft
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import unknown_adapter
from jaxllama.model import lora
from jaxllama.typing import Params

HEADER = 1 << 20  # bytes of an adapter's file beside its factors


class AdapterSlots:
    """The adapters of an engine, by id.

    Parameters
    ----------
    cfg : ModelConfig
        Config of the model.
    params : dict
        Its parameters, with the factors of ``names``.
    names : tuple of str
        Adapters that were loaded with the model. Each one's id is its name, and it stays.
    n_free : int
        Number of slots for adapters that are loaded later.
    rank : int
        Largest rank of a later adapter.
    """

    def __init__(
        self, cfg: ModelConfig, params: Params, names: tuple[str, ...], n_free: int, rank: int
    ) -> None:
        self._cfg, self._rank, self.n_free = cfg, rank, n_free
        self._own = frozenset(names)
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._retired: set[str] = set()
        self._empty = list(range(len(names) + n_free, len(names), -1))
        self._loads = 0
        self._loading = threading.Lock()
        self.params = params
        if n_free:
            self._sources = peft.products(cfg)
            targets = {source.name for source in self._sources.values()}
            self.params = lora.reserve(tensor_table(cfg), params, targets, n_free, rank)

    def __bool__(self) -> bool:
        return bool(self._numbers) or self.n_free > 0

    def number(self, id: str | None) -> int:
        """Return an adapter's number, as ``model.lora`` counts; None has number 0.

        Raises JaxLlamaError if there is no adapter of this id.
        """
        if id is None:
            return 0
        if id not in self._numbers:
            raise unknown_adapter(id, self._numbers, self._cfg)
        return self._numbers[id]

    def load(self, name: str, path: str | Path, reclaim: Callable[[], None]) -> str:
        """Read an adapter into a free slot and return its id.

        Parameters
        ----------
        name : str
            The adapter's name, the beginning of its id.
        path : str or Path
            A PEFT directory.
        reclaim : callable
            Called if no slot is empty; it calls ``free`` where no step runs.

        Raises
        ------
        JaxLlamaError
            If the directory is wrong, its rank or size is too large, or no slot is free.
        """
        with self._loading:
            limit = HEADER + 4 * self._rank * sum(
                sum(source.shape) for source in self._sources.values()
            )
            factors = peft.read(path, self._cfg, limit)
            if any(len(parts) > 2 for parts in factors.values()):
                raise JaxLlamaError(
                    f"{path}: a DoRA adapter cannot come later: load it with the model, or merge it"
                )
            rank = max(len(a) for a, *_ in factors.values())
            if rank > self._rank:
                raise JaxLlamaError(f"{path}: rank {rank}, and the largest here is {self._rank}")
            if not self._empty:
                reclaim()
            if not self._empty:
                raise JaxLlamaError(f"all {self.n_free} adapter slots are in use: unload one")
            number = self._empty.pop()
            self.params = lora.put(tensor_table(self._cfg), self.params, number - 1, factors)
            self._loads += 1
            id = f"{name}#{self._loads}"
            self._numbers[id] = number
            return id

    def unload(self, id: str | None) -> None:
        """Free the adapter's slot as soon as no request uses it."""
        if id is None or id in self._own:
            raise JaxLlamaError(f"adapter = {id!r}: came with the model, and stays")
        self.number(id)
        self._retired.add(id)

    @property
    def has_retired(self) -> bool:
        """Whether an unloaded adapter still has its slot."""
        return bool(self._retired)

    def free(self, in_use: Collection[str]) -> None:
        """Free the slots of unloaded adapters, but for the ids that requests in flight have.

        The engine calls it between two steps, so no request begins or ends meanwhile.
        """
        for id in self._retired.difference(in_use):
            self._empty.append(self._numbers.pop(id))
            self._retired.discard(id)

"""The two orders of a step's work: the serial loop, and the overlapped one.

A step gives every row of a block one token. Its work goes unit by unit, and in each unit batch by
batch (FlexGen's zig-zag). The weights of a unit are loaded once for all batches of the block.

    ``serial``       load, compute and store one after the other: this is the paper's Algorithm
    ``Overlapped``   while unit j computes batch k, the weights of unit j + 1 and the cache and
                     hidden states of batch k + 1 load, and the results of batch k - 1 are stored

Both call the same methods of a ``StepWork`` with the same arguments, so both give the same tokens.
At most two units' weights and two batches' caches are on the device: a load begins when the
computation that used its memory is done. At most ``AHEAD`` computations are dispatched ahead,
because each holds its inputs and outputs until it is done, or ``QUEUED`` where these are small.

Source: FlexGen (arXiv 2303.06865), section 4.1 and Algorithm 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import jax

from jaxllama.offload.units import ModelUnit
from jaxllama.typing import Tree

LANES = ("weights", "cache", "hidden", "store")
Key = int | tuple[ModelUnit, int]  # hidden states of a batch, or the cache of a unit and a batch
AHEAD, QUEUED = 2, 8  # computations that are dispatched and not known to be done


class StepWork(Protocol):
    """The parts of a step.

    ``load_weights`` returns when every transfer has begun, and ``finish_weights`` waits for them.
    ``compute`` returns at once, with arrays that are still being computed. All other methods return
    when they are done.
    """

    units: list[ModelUnit]
    moves: dict[str, bool]  # whether "weights", "cache" and "hidden" ever leave the device

    @property
    def is_small(self) -> bool: ...  # whether nothing moves, and a row has one new token
    def active_batches(self) -> list[int]: ...
    def load_weights(self, unit: ModelUnit) -> Tree: ...
    def finish_weights(self, pending: Tree) -> Tree: ...
    def load_cache(self, unit: ModelUnit, batch: int, /) -> Tree: ...
    def load_hidden(self, batch: int, /) -> Tree: ...
    def compute(
        self, unit: ModelUnit, batch: int, /, weights: Tree, cache: Tree, hidden: Tree
    ) -> Tree: ...
    def store_cache(self, unit: ModelUnit, batch: int, /, cache: Tree) -> None: ...
    def store_hidden(self, batch: int, /, hidden: Tree) -> None: ...


def serial(work: StepWork) -> None:
    """Do one step, one part after the other."""
    for unit in work.units:
        weights = work.finish_weights(work.load_weights(unit))
        for batch in work.active_batches():
            cache = work.load_cache(unit, batch)
            hidden = work.load_hidden(batch)
            cache, hidden = jax.block_until_ready(work.compute(unit, batch, weights, cache, hidden))
            work.store_cache(unit, batch, cache)
            work.store_hidden(batch, hidden)


class Overlapped:
    """Runs steps, and keeps the weights that it has loaded ahead for the next step.

    It keeps no reference to the work, so that a run's memory is free as soon as the run is. lanes:
    a thread for each of ``LANES``.
    """

    def __init__(self, lanes: dict[str, ThreadPoolExecutor]) -> None:
        self._lanes = lanes
        self._weights: Future[Tree] | _Now | None = None
        self._stored: dict[Key, Future[Tree] | _Now] = {}  # the last store of each key

    def step(self, work: StepWork, last: bool) -> None:
        """Do one step. last: no step follows, so nothing is loaded ahead."""
        units, batches = work.units, work.active_batches()
        slots = [(unit, batch) for unit in units for batch in batches]
        if self._weights is None:
            self._weights = self._load_weights(work, None, units[0])
        cache = self._load_cache(work, None, *slots[0])
        hidden = self._load_hidden(work, slots[0][1])
        previous, stores = None, []
        weights: Tree = None
        dispatched: deque[Tree] = deque()
        ahead = QUEUED if work.is_small else AHEAD
        for index, (unit, batch) in enumerate(slots):
            following = slots[index + 1] if index + 1 < len(slots) else None
            if batch == batches[0]:
                own_weights, self._weights = self._weights, None
                assert own_weights is not None  # the last batch began to load them
                # The units of the next step are known if they move.
                if unit is not units[-1] or (work.moves["weights"] and not last):
                    # Begun before its predecessor has arrived, so that the link is never idle.
                    after = units[(index // len(batches) + 1) % len(units)]
                    self._weights = self._load_weights(work, previous, after)
                weights = work.finish_weights(own_weights.result())
                del own_weights
            own_cache, own_hidden = cache.result(), hidden.result()
            if following is not None:
                cache = self._load_cache(work, previous, *following)
                if following[1] != batch:
                    hidden = self._load_hidden(work, following[1])
            if len(dispatched) == ahead:
                jax.block_until_ready(dispatched.popleft())
            new_cache, new_hidden = work.compute(unit, batch, weights, own_cache, own_hidden)
            dispatched.append(new_hidden)
            del own_cache, own_hidden
            for store in stores:
                store.result()
            stores = [
                self._store(work, "cache", (unit, batch), work.store_cache, unit, batch, new_cache),
                self._store(work, "hidden", batch, work.store_hidden, batch, new_hidden),
            ]
            if following is not None and following[1] == batch:
                hidden = self._load_hidden(work, batch)
            previous = new_hidden
            del new_cache, new_hidden
            if batch == batches[-1]:
                weights = None
        for store in stores:
            store.result()

    def _load_weights(self, work: StepWork, previous: Tree, unit: ModelUnit) -> Future[Tree] | _Now:
        if not work.moves["weights"]:
            return _Now(work.load_weights(unit))
        return self._load("weights", previous, None, work.load_weights, unit)

    def _load_cache(
        self, work: StepWork, previous: Tree, unit: ModelUnit, batch: int
    ) -> Future[Tree] | _Now:
        if not work.moves["cache"] or not unit.has_cache:
            return _Now(work.load_cache(unit, batch))
        return self._load("cache", previous, (unit, batch), work.load_cache, unit, batch)

    def _load_hidden(self, work: StepWork, batch: int) -> Future[Tree] | _Now:
        if not work.moves["hidden"]:
            return _Now(work.load_hidden(batch))
        return self._load("hidden", None, batch, work.load_hidden, batch)

    def _load(
        self,
        lane: str,
        previous: Tree,
        key: Key | None,
        load: Callable[..., Tree],
        *arguments: Tree,
    ) -> Future[Tree]:
        """Load when ``previous``, the computation that used the memory, and the last store of
        ``key`` are done.
        """
        stored = None if key is None else self._stored.get(key)

        def job() -> Tree:
            jax.block_until_ready(previous)
            if stored is not None:
                stored.result()
            return load(*arguments)

        return self._lanes[lane].submit(job)

    def _store(
        self, work: StepWork, what: str, key: Key, store: Callable[..., None], *arguments: Tree
    ) -> Future[Tree] | _Now:
        if work.moves[what]:
            done: Future[Tree] | _Now = self._lanes["store"].submit(store, *arguments)
        else:
            done = _Now(store(*arguments))
        self._stored[key] = done
        return done


class _Now:
    """A result that exists already: data that does not move needs no thread."""

    def __init__(self, value: Tree) -> None:
        self._value = value

    def result(self) -> Tree:
        return self._value

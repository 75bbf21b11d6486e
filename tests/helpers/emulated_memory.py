"""The memory of a block that ``warpgroup_emulator`` runs, and its barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import Views


class Ref:
    """A view of memory.  blocks: the same view in each block of a cluster."""

    def __init__(self, array: np.ndarray, blocks: tuple[np.ndarray, ...] = ()):
        self.array, self.blocks = array, blocks

    @property
    def at(self) -> Any:
        return _At(lambda place: Ref(self.array[place], tuple(x[place] for x in self.blocks)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def transpose(self, order: tuple[int, ...]) -> Ref:
        return Ref(self.array.transpose(order))

    def __getitem__(self, place: Any) -> Any:
        return np.copy(self.array[place])

    def __setitem__(self, place: Any, value: Any) -> None:
        self.array[place] = value


class _At:
    """``x.at[...]``."""

    def __init__(self, get: Callable[[Any], Any]):
        self.get = get

    def __getitem__(self, place: Any) -> Any:
        places = place if isinstance(place, tuple) else (place,)
        return self.get(tuple(x if isinstance(x, slice) else int(x) for x in places))


class Barriers:
    """``arrivals`` of each of ``n``; a thread counts the phases that it has waited for.

    axis: of the cluster, all of whose blocks an arrival reaches.  expected: parts of copies that
    have yet to come.  blocks: the same barriers in each block of the cluster.
    """

    def __init__(self, arrivals: int, n: int, axis: str | None = None):
        self.arrivals, self.left, self.phase = arrivals, [arrivals] * n, [0] * n
        self.expected, self.axis, self.name = [0] * n, axis, ""
        self.waited: dict[tuple[int, int], int] = {}
        self.blocks: list[Barriers] = [self]

    def add(self, i: int, arrivals: int, expected: int = 0) -> None:
        self.left[i] -= arrivals
        self.expected[i] += expected
        assert self.left[i] >= 0, "more arrivals than the barrier has"
        if self.left[i] == self.expected[i] == 0:
            self.phase[i], self.left[i] = self.phase[i] + 1, self.arrivals

    @property
    def at(self) -> Any:
        return _At(lambda place: (self, *place))


def memory_of(kind: Any, cluster: Mapping[str, int]) -> list[Any]:
    """An entry of a table of results or scratch memory, filled with NaN or 7, in each block."""
    n = int(np.prod(list(cluster.values())))
    if kind is None:
        return [None] * n
    if isinstance(kind, Views):
        views = memory_of(next(iter(kind.values())), cluster)
        return [SimpleNamespace(**dict.fromkeys(kind, x)) for x in views]
    if isinstance(kind, plgpu.Barrier | plgpu.ClusterBarrier):
        [axis] = getattr(kind, "collective_axes", (None,))
        arrivals = kind.num_arrivals * cluster.get(axis, 1)
        blocks = [Barriers(arrivals, int(np.prod(kind.num_barriers)), axis) for _ in range(n)]
        for one in blocks:
            one.blocks = blocks
        return blocks
    if isinstance(kind, int):
        kind = jax.ShapeDtypeStruct((kind,), jnp.float32)
    unset = np.nan if jnp.issubdtype(kind.dtype, jnp.floating) else 7
    arrays = tuple(np.full(kind.shape, unset).astype(kind.dtype) for _ in range(n))
    return [Ref(x, arrays) for x in arrays]

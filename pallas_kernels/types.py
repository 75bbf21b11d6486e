"""Types that the rooms of this package share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np


class HasShape(Protocol):
    """An array, a tracer, a ``jax.ShapeDtypeStruct``, numpy's array or a quantized weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


class Device(Protocol):
    """A ``jax.Device``, or the abstract device of a mesh for another machine.

    A GPU also has a ``compute_capability``.
    """

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


class TreeDef(Protocol):
    """A ``jax.tree_util.PyTreeDef``, for which jaxlib has no type."""

    @property
    def num_leaves(self) -> int: ...

    def unflatten(self, leaves: Iterable[object]) -> Any: ...

    def flatten_up_to(self, tree: object) -> list[Any]: ...

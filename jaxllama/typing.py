"""Types that several rooms share; nothing here exists at run time but names.

JAX has no static type for a pytree, and a parameter tree's values differ by name: a mapping again,
a ``Leaf``, or a ``Lora``.  Functions that know more say so in a type of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import jax
    import numpy as np

    from pallas_kernels.cpu import CpuWeight
    from pallas_kernels.qtensor import QTensor, RowBlocks

# A parameter tree, or a part of one, by name.
Params: TypeAlias = Mapping[str, Any]
ParamsDict: TypeAlias = dict[str, Any]

# An array on a device or in the host's memory.
ArrayOrNumpy: TypeAlias = "jax.Array | np.ndarray"

# One parameter's value.
Leaf: TypeAlias = "jax.Array | np.ndarray | QTensor | RowBlocks | CpuWeight"

# Any JAX pytree: the argument of a function that maps or moves its leaves.
Tree: TypeAlias = Any

# An object of a JSON or TOML file, a request's body, or one of a checkpoint's headers.
JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]

# Keyword arguments that are passed on, or a config's changed fields.
Options: TypeAlias = dict[str, Any]

# A function that ``jax.jit`` returned; jax's own type lacks ``__name__`` and ``_cache_size``.
Jitted: TypeAlias = Any


class LocalDevice(Protocol):
    """A ``jax.Device``, which type checkers see as a variable."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def client(self) -> Tree: ...
    def memory_stats(self) -> dict[str, int] | None: ...


class DictKey(Protocol):
    """A ``jax.tree_util.DictKey``, for which jaxlib has no type: a name in a leaf's path."""

    @property
    def key(self) -> str: ...

"""Arrays in a few words, for ``repr``: dtypes, shapes and bytes, and no values.

    brief(value) -> "float32[64, 128]"       size_text(tree) -> "32.8 kB"

A class of arrays sets ``__repr__ = short_repr`` and then prints as its name with its fields.  Any
leaf of a pytree prints as well: a tracer, a shape, a partition.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import jax

from pallas_kernels.operands import has_shape
from pallas_kernels.rounding import NIBBLES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def brief(value: object) -> str:
    """Return a short text of a value.

    An array is its dtype and shape, and equal neighbours of a tuple are counted.  Anything else is
    its ``repr``.
    """
    if not hasattr(value, "_fields") and isinstance(value, tuple):
        runs = [(text, len(list(run))) for text, run in itertools.groupby(map(brief, value))]
        return f"({', '.join(text if n == 1 else f'{n} x {text}' for text, n in runs)})"
    if not has_shape(value) or type(value).__repr__ is short_repr:
        return repr(value)
    return f"{value.dtype.name}[{', '.join(map(str, value.shape))}]"


def short_repr(self: DataclassInstance) -> str:
    """A dataclass of arrays: its fields but those that are None, and all their bytes."""
    fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
    parts = [f"{name}={brief(value)}" for name, value in fields if value is not None]
    return f"{type(self).__name__}({', '.join(filter(None, (*parts, size_text(self))))})"


def size_text(tree: object) -> str:
    """Bytes of a tree on an accelerator, where 4-bit codes lie two to a byte; "" where a leaf is no
    array."""
    leaves = jax.tree.leaves(tree)
    if not all(map(has_shape, leaves)):
        return ""
    size = sum(
        math.prod(leaf.shape) * (1 if leaf.dtype.name in NIBBLES else 2 * leaf.dtype.itemsize) / 2
        for leaf in leaves
    )
    unit, scale = next(
        (entry for entry in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= entry[1]),
        ("bytes", 1),
    )
    return f"{size / scale:.4g} {unit}"

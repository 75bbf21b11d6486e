"""Cases of tests with several axes: enough of them to see every value, or every two together."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest


class _OnDemand(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "_mock_name" or name.startswith("__"):  # pytest asks, as it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def on_demand(name: str) -> Any:
    """Return a module that is imported when it is first used. Without it the test file is skipped.

    Each worker of pytest collects all files, and runs a part of them.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _OnDemand(name)


def _flat(value: Any) -> tuple[Any, ...]:
    """A tuple stands for several arguments."""
    return value if isinstance(value, tuple) else (value,)


def slow(*cases: Any) -> list[Any]:
    """Return cases as parameters marked ``slow``. A tuple stands for several arguments."""
    return [pytest.param(*_flat(case), marks=pytest.mark.slow) for case in cases]


def each_once(first: Sequence[Any], second: Sequence[Any], marks: Any = ()) -> list[Any]:
    """Return the product of two axes as parameters, of which the default suite runs a diagonal.

    Every value of both axes is on the diagonal, which has the ``marks``. The other pairs are marked
    ``slow``. A tuple stands for several arguments.
    """
    size = max(len(first), len(second))
    quick = {(index % len(first), index % len(second)) for index in range(size)}
    return [
        pytest.param(
            *_flat(one), *_flat(other), marks=marks if (row, column) in quick else pytest.mark.slow
        )
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return parameters in which any two values of different axes meet at least once.

    The cases are chosen greedily, always in the same order. A tuple stands for several arguments.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(rows[best])
    return [
        pytest.param(*(x for axis, i in zip(axes, row, strict=True) for x in _flat(axis[i])))
        for row in chosen
    ]

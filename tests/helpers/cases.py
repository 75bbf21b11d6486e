"""Cases of a test with two axes: each value once by default, the whole product under ``slow``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def each_once(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return the product of two axes as parameters, of which the default suite runs a diagonal.

    Every value of both axes is on the diagonal. The other pairs are marked ``slow``. A tuple stands
    for several arguments.
    """
    size = max(len(first), len(second))
    quick = {(index % len(first), index % len(second)) for index in range(size)}
    flat = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    return [
        pytest.param(
            *flat(one), *flat(other), marks=() if (row, column) in quick else pytest.mark.slow
        )
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]

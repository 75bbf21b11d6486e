"""When ``best_kernel`` takes the choice of a row's largest: arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Reason

WARPS = 4  # of a block; each has a row
MOST = 512  # scores of a row
MOST_BEST = 32


@dataclasses.dataclass(frozen=True)
class BestPlan:
    """k of each of ``rows`` rows of n scores."""

    kernel: ClassVar[str] = "best_of_rows_mosaic"
    rows: int
    n: int
    k: int

    @property
    def per_lane(self) -> int:
        """Scores that a lane compares."""
        return -(-self.n // 32)


def best_plan(scores: jax.Array, k: int) -> BestPlan | Reason:
    """Return the plan for ``scores[T, N]``, or why there is none."""
    rows, n = scores.shape
    if scores.dtype != jnp.float32:
        return Reason(f"scores are {scores.dtype}; the kernel takes float32")
    if n > MOST or k > MOST_BEST:
        return Reason(f"{k} of {n}; the kernel takes up to {MOST_BEST} of {MOST}")
    return BestPlan(rows, n, k)

"""How the kernels that choose experts (``route_kernel``, ``best_kernel``) divide their rows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.fixed_sums import planned_rows

WARPS = 8
BLOCKS = 8  # of a token: the most that every cluster may have
SENT = 8  # bytes of a sum on its way to block 0
MOST_TOKENS = 8
MOST_EXPERTS = 512
LEAST = 1e-20  # added to a sum of sigmoids, by which the weights are divided


class RouteStatic(NamedTuple):
    """k: experts of a token.  normalize: weights are shares among the chosen experts alone.  scale:
    factor of the weights.  eps: of the norm.  sigmoid: scores are sigmoids, not a softmax."""

    k: int
    normalize: bool
    scale: float
    eps: float
    sigmoid: bool = False


@dataclasses.dataclass(frozen=True)
class RoutePlan:
    """n, d: experts and columns of the router."""

    kernel: ClassVar[str] = "route_experts_mosaic"
    tokens: int
    n: int
    d: int

    def representative(self) -> RoutePlan:
        return type(self)(1, BLOCKS * max(1, WARPS // self.parts), 1024)

    @property
    def rows(self) -> int:
        """Rows of the router that a block has."""
        return -(-self.n // BLOCKS)

    @property
    def parts(self) -> int:
        """Parts of a row; a warp has one of them."""
        return max(1, WARPS // self.rows)

    @property
    def tasks(self) -> int:
        """Parts of rows that a block has."""
        return self.rows * self.parts

    @property
    def pieces(self) -> int:
        """8 columns each."""
        return self.d // 8

    @property
    def per_part(self) -> int:
        """Pieces of a lane in a part of a row."""
        return -(-self.pieces // (32 * self.parts))

    @property
    def per_lane(self) -> int:
        """Experts that a lane compares."""
        return -(-self.n // 32)

    @property
    def scratch_sizes(self) -> list[int]:
        """Bytes of y, of the warps' squares, of all blocks' sums and of a barrier."""
        return [2 * self.d, 4 * WARPS, SENT * BLOCKS * self.tasks, 16]


class SigmoidRoutePlan(RoutePlan):
    """Scores are sigmoids; a bias of the choice may be added to them."""


@dataclasses.dataclass(frozen=True)
class BestPlan:
    """k of each of ``rows`` rows of n scores."""

    kernel: ClassVar[str] = "best_of_rows_mosaic"
    rows: int
    n: int
    k: int

    def representative(self) -> BestPlan:
        return BestPlan(1, 32 * self.per_lane, 1)

    @property
    def per_lane(self) -> int:
        """Scores that a lane compares."""
        return -(-self.n // 32)


def route_plan(x: jax.Array, router: jax.Array, static: RouteStatic) -> RoutePlan | Reason:
    """Return the plan for ``x[T, D]`` and ``router[E, D]``, or why there is none."""
    (tokens, d), n = x.shape, router.shape[0]
    if not gpu().clusters:
        return Reason("the GPU has no clusters of blocks")
    if x.dtype != jnp.bfloat16 or router.dtype != jnp.bfloat16:
        return Reason(f"x is {x.dtype} and the router {router.dtype}; the kernel takes bfloat16")
    if planned_rows(tokens) > MOST_TOKENS:
        return Reason(f"{tokens} tokens; the kernel takes up to {MOST_TOKENS}")
    if d % 8 or n > MOST_EXPERTS or static.k > 32:
        return Reason(f"{static.k} of {n} experts of {d} columns")
    return (SigmoidRoutePlan if static.sigmoid else RoutePlan)(tokens, n, d)

"""The operands of a decode step's latent attention, and how its kernels divide them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.operands import LatentCodes, capacity_of
from pallas_kernels.device import lacking
from pallas_kernels.dispatch import Reason, named_plan
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.latent.plan import (
    LATENT,
    MOST_FEW_ROWS,
    TILE,
    LatentPlan,
    microseconds,
    plan,
    plans,
    query_rows,
)

MOST_ROWS = 8  # a block's warps


class LatentStep(NamedTuple):
    """The operands of a step: one new token of each row.

    q: before RoPE, ``[B, N, d + r]``.  entry: latent and key before norm and RoPE, the columns
    ``[B, R + r]`` from ``start`` on of these rows.  gamma: the norm's weight ``[R]``.  cos, sin:
    float32 ``[B, r / 2]``.  cache: ``[B, S, 1, R + r]``, or pages with ``table``.  slots: int32
    ``[B]``, a place from S on is not written.  lengths: int32 ``[B]``, the keys that a row sees.
    up: each head's product that makes its key, then its value, ``[N, d + d_v, R]``.
    """

    q: jax.Array
    entry: jax.Array
    gamma: jax.Array
    cos: jax.Array
    sin: jax.Array
    cache: jax.Array
    slots: jax.Array
    lengths: jax.Array
    table: jax.Array | None
    up: jax.Array

    @property
    def still(self) -> int:
        """Features of a query that do not turn."""
        return self.q.shape[-1] - 2 * self.cos.shape[-1]


@dataclasses.dataclass(frozen=True)
class LatentStepPlan:
    """attention: the plan of the kernel that attends."""

    kernel: ClassVar[str] = "latent_step_mosaic"
    attention: LatentPlan

    def __str__(self) -> str:
        return str(self.attention)

    def representative(self) -> LatentStepPlan:
        return LatentStepPlan(self.attention.representative())


def step_plan(x: LatentStep) -> LatentStepPlan | Reason:
    """Return how the kernels compute a step, or why there is none."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    batch, n, _ = x.q.shape
    if isinstance(x.cache, LatentCodes):
        return Reason("the cache is in 8 bits")
    entries: Any = jax.ShapeDtypeStruct((*x.cache.shape[:2], x.cache.shape[-1]), x.cache.dtype)
    q: Any = jax.ShapeDtypeStruct((batch, 1, n, x.cache.shape[-1]), x.q.dtype)
    found = plan(q, entries, x.table)
    if named_plan(found) is None:
        assert isinstance(found, Reason)
        return found
    if planned_rows(batch) > MOST_ROWS:
        return Reason(f"{batch} rows; the kernels of a step take {MOST_ROWS}")
    if x.up.dtype != jnp.bfloat16 or x.up.shape[-1] != LATENT:
        return Reason(f"up is {x.up.dtype.name}{list(x.up.shape)}; the kernels take bfloat16")
    if x.still % 32 or (x.up.shape[1] - x.still) % 64:
        return Reason(f"{x.still} features of a key and {x.up.shape[1] - x.still} of a value")
    capacity = capacity_of(x.cache, x.table)
    # The last kernel merges chunks, so there are two at least.
    cut = [one for one in plans(1, n, capacity, most=MOST_FEW_ROWS) if one.chunk < capacity]
    if not cut:
        return Reason(f"a row holds {capacity} tokens; the kernels of a step take {TILE + 1}")
    rows = query_rows(1, n)
    return LatentStepPlan(min(cut, key=lambda one: microseconds(one, batch, rows, capacity)))

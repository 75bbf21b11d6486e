"""The largest scores of each row and their places: which experts a token goes through.

values, places = best(scores, k)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.experts.route_plan import BestPlan
from pallas_kernels.operands import check
from pallas_kernels.transform import Op, chosen

MOST = 512  # scores of a row
MOST_BEST = 32


def best(
    scores: jax.Array, k: int, *, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the k largest scores of each row, in descending order, and their places.

    Parameters
    ----------
    scores : float [T, N]
        The lowest place comes first among equal scores.
    k : int
        Up to N.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    (scores' dtype [T, k], int32 [T, k])

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.
    """
    sizes = check("best", {"scores": "float [T, N]"}, scores=scores)
    if not 1 <= k <= sizes["N"]:
        raise ValueError(f"best: k = {k} of {sizes['N']} scores")
    find = functools.partial(best_plan, scores, k)
    plan = choose_plan("best", implementation, find, scores)
    return _best(chosen(plan, implementation), (k, plan), scores)


def best_plan(scores: jax.Array, k: int) -> BestPlan | Reason:
    """Return the plan for ``scores[T, N]``, or why there is none."""
    rows, n = scores.shape
    if scores.dtype != jnp.float32:
        return Reason(f"scores are {scores.dtype}; the kernel takes float32")
    if n > MOST or k > MOST_BEST:
        return Reason(f"{k} of {n}; the kernel takes up to {MOST_BEST} of {MOST}")
    return BestPlan(rows, n, k)


_Static = tuple[int, BestPlan | None]


def _kernel(static: _Static, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.experts.best_kernel import best_of_rows

    _, plan = static
    assert plan is not None
    return best_of_rows(scores, plan=plan)


def _xla(static: _Static, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, places = lax.top_k(scores, static[0])
    return values, places.astype(jnp.int32)


_best = Op("best", _xla, _kernel)

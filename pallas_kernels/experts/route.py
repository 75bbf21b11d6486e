"""The norm of few tokens and their choice of experts, if one kernel does it.

    y, experts, weights = norm_and_route(x, norm, router, bias, k=8, normalize=True, scale=1.0)

``route_kernel`` has the equations and the program.  The XLA form here has the same results.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import choose_plan, own_plan
from pallas_kernels.experts.route_kernel import RoutePlan, route_plan, route_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, chosen

Routed = tuple[jax.Array, jax.Array, jax.Array]


def norm_and_route(
    x: jax.Array,
    norm: tuple[jax.Array, float],
    router: jax.Array,
    bias: jax.Array | None = None,
    *,
    k: int,
    normalize: bool,
    scale: float,
) -> Routed | None:
    """Return the RMSNorm of x and each token's experts by softmax, if one kernel does both here.

    Parameters
    ----------
    x : bfloat16 [T, D]
        Tokens.
    norm : (float [D], float)
        The norm's weight and epsilon.
    router : bfloat16 [E, D]
        The router, which reads the norm's result.
    bias : float [E], optional
        Added to the logits.
    k : int
        Experts of a token.
    normalize : bool
        Whether the softmax is that of the chosen experts alone.
    scale : float
        Factor of the weights.

    Returns
    -------
    (bfloat16 [T, D], int32 [T, k], float32 [T, k]) or None
        The norm, the experts by descending logit, their weights.  None: the caller computes the
        parts.
    """
    gamma, eps = norm
    find = functools.partial(
        route_plan, x, router, k, normalize=normalize, scale=float(scale), eps=float(eps)
    )
    plan = own_plan(find, x, router)
    if not isinstance(plan, RoutePlan):
        return None
    choose_plan("norm_and_route", None, lambda: plan, x, gamma, router, bias)
    return _route(chosen(plan, None), plan, x, gamma, router, bias)


def _kernel(
    plan: RoutePlan, x: jax.Array, gamma: jax.Array, router: jax.Array, bias: jax.Array | None
) -> Routed:
    return route_tokens(x, gamma, router, bias, plan=plan)


def norm_and_route_xla(
    plan: RoutePlan, x: jax.Array, gamma: jax.Array, router: jax.Array, bias: jax.Array | None
) -> Routed:
    """The same in plain jax.numpy."""
    y = rms_norm(x, gamma, plan.eps, implementation="xla")
    floats = y.astype(jnp.float32), router.astype(jnp.float32)
    logits = lax.dot_general(*floats, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    best, experts = lax.top_k(logits, plan.k)
    if plan.normalize:
        weights = jax.nn.softmax(best, axis=-1)
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), experts, axis=-1)
    return y, experts.astype(jnp.int32), weights * plan.scale


_route = Op("norm_and_route", norm_and_route_xla, _kernel)

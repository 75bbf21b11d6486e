"""The norm of few tokens and their choice of experts.

    y, experts, weights = norm_and_route(x, norm, router, bias, k=8, normalize=True, scale=1.0)

``route_kernel`` has the equations and a kernel for Hopper that does all of it for few tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Implementation, choose_plan, own_plan
from pallas_kernels.experts.route_plan import LEAST, RoutePlan, RouteStatic, route_plan
from pallas_kernels.operands import check
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import Op, chosen

Routed = tuple[jax.Array, jax.Array, jax.Array]
_OPERANDS = {
    "x": "float [T, D]",
    "gamma": "float [D]",
    "router": "float [E, D]",
    "bias": "float [E] ?",
    "choice_bias": "float [E] ?",
}


def norm_and_route(
    x: jax.Array,
    norm: tuple[jax.Array, float],
    router: jax.Array,
    bias: jax.Array | None = None,
    choice_bias: jax.Array | None = None,
    *,
    k: int,
    normalize: bool,
    scale: float = 1.0,
    sigmoid: bool = False,
    implementation: Implementation | None = None,
) -> Routed:
    """Return the RMSNorm of x and each token's experts, chosen by scores of the router's logits.

    Parameters
    ----------
    x : float [T, D]
        Tokens.
    norm : (float [D], float)
        The norm's weight and epsilon.
    router : float [E, D]
        The router, which reads the norm's result. Its product is in float32.
    bias : float [E], optional
        Added to the logits.
    choice_bias : float [E], optional
        Added to sigmoids for the choice, but not for the weights.
    k : int
        Experts of a token.
    normalize : bool
        Whether the softmax is that of the chosen experts alone, or their sigmoids are divided by
        their sum.
    scale : float
        Factor of the weights.
    sigmoid : bool
        Whether scores are sigmoids of the logits, and not their softmax.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    (x's dtype [T, D], int32 [T, k], float32 [T, k])
        The norm, the experts by descending score, and their weights. The lowest index
        comes first among equal scores.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.
    """
    gamma, eps = norm
    biases = {"bias": bias, "choice_bias": choice_bias}
    sizes = check("norm_and_route", _OPERANDS, x=x, gamma=gamma, router=router, **biases)
    if not 1 <= k <= sizes["E"]:
        raise ValueError(f"norm_and_route: k = {k} of {sizes['E']} experts")
    if choice_bias is not None and not sigmoid:
        raise ValueError("norm_and_route: choice_bias needs sigmoid=True")
    static = RouteStatic(k, bool(normalize), float(scale), float(eps), bool(sigmoid))
    find = functools.partial(route_plan, x, router, static)
    operands = x, gamma, router, bias, choice_bias
    plan = choose_plan("norm_and_route", implementation, find, *operands)
    return _route(chosen(plan, implementation), (static, plan), *operands)


def fused_norm_and_route(
    x: jax.Array,
    norm: tuple[jax.Array, float],
    router: jax.Array,
    *biases: jax.Array | None,
    **options: Any,
) -> Routed | None:
    """Return ``norm_and_route`` of these if one kernel does all of it here, else None."""
    static = RouteStatic(eps=float(norm[1]), **options)
    if own_plan(functools.partial(route_plan, x, router, static), x, router) is None:
        return None
    return norm_and_route(x, norm, router, *biases, **options)


_Static = tuple[RouteStatic, RoutePlan | None]


def _kernel(static: _Static, *operands: jax.Array | None) -> Routed:
    from pallas_kernels.experts.route_kernel import route_tokens

    options, plan = static
    assert plan is not None
    return route_tokens(*operands, static=options, plan=plan)


def _xla(
    static: _Static,
    x: jax.Array,
    gamma: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    choice_bias: jax.Array | None,
) -> Routed:
    options, _ = static
    y = rms_norm(x, gamma, options.eps, implementation="xla")
    # In a fusion XLA may leave out y's rounding, which the router reads here.
    facts = jnp.finfo(y.dtype)
    stored = lax.reduce_precision(y.astype(jnp.float32), facts.nexp, facts.nmant)
    floats = stored, router.astype(jnp.float32)
    logits = lax.dot_general(*floats, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    by = scores = jax.nn.sigmoid(logits) if options.sigmoid else jax.nn.softmax(logits, axis=-1)
    if choice_bias is not None:
        by = scores + choice_bias.astype(jnp.float32)
    best, experts = lax.top_k(by if options.sigmoid else logits, options.k)
    if options.normalize and not options.sigmoid:
        weights = jax.nn.softmax(best, axis=-1)
    else:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if options.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST)
    return y, experts.astype(jnp.int32), weights * options.scale


_route = Op("norm_and_route", _xla, _kernel)

"""AWQ: scale up the weights that meet large activations, before rounding.

    s(alpha) = m ** alpha       m = mean |x| or sqrt(mean x^2), alpha in {0, 0.1, ... 1}, with the
                                least output error
    error    = || (Q(W s) / s - W) X ||^2 = trace(D H D^T),   H = X X^T

The error needs only H of the activations, so it counts every calibration token and not a sample.
Clipping follows: for each group of each row, the share of its range from 1 down to 0.5. The chosen
share has the least error of the group's part of the output (H's diagonal block). With zero points
the share of the high end is searched again, and then the share of the low end.

Source: arXiv 2306.00978, equations 4 and 5, and its code's search for clipping. There are four
differences. H replaces stored activations. The error is each weight's output, while the code uses
the output of the attention or the feed-forward. The root mean square competes with the mean, since
a channel that is large only at an attention sink has a small mean. o is scaled under GQA too
(``sites``). Pure functions of (weights, activations' statistics).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.quantization.rounding import Grid, rounded
from pallas_kernels.rounding import Shrink

ALPHAS = tuple(round(0.1 * step, 1) for step in range(11))
SHRINKS = tuple(round(1.0 - 0.05 * step, 2) for step in range(11))


@functools.partial(jax.jit, static_argnames=("grids", "n_channels"))
def search_scales(
    weights: tuple[jax.Array, ...],
    hessian: jax.Array,
    magnitude: jax.Array,
    channel: jax.Array,
    *,
    grids: tuple[Grid, ...],
    n_channels: int,
) -> tuple[jax.Array, jax.Array]:
    """Search the scales of a site's channels for weights ``[N_i, K]`` of one input.

    hessian ``[K, K]``, magnitude ``[K]``: sums of x x^T and means of |x|. channel ``[K]``: the
    scale that an input channel shares. Returns (s ``[n_channels]``, the errors of all candidates).
    The first candidate, alpha 0, is no scaling, so the result is never worse than that.
    """

    def scales(size: jax.Array) -> jax.Array:
        shared = jax.ops.segment_max(size, channel, n_channels)
        shared = jnp.maximum(shared, 1e-6 * jnp.max(shared) + 1e-12)
        s = shared[None, :] ** jnp.asarray(ALPHAS, jnp.float32)[:, None]
        return s / jnp.sqrt(jnp.max(s, axis=1) * jnp.min(s, axis=1))[:, None]

    def error(s: jax.Array) -> jax.Array:
        s = s[channel]
        total = jnp.float32(0.0)
        for weight, (dtype, group, zeros) in zip(weights, grids, strict=True):
            w = weight.astype(jnp.float32)
            total += output_error(rounded(w * s, dtype, group, zeros) / s - w, hessian)
        return total

    candidates = jnp.concatenate((scales(magnitude), scales(jnp.sqrt(jnp.diagonal(hessian)))))
    errors = lax.map(error, candidates)
    return candidates[jnp.argmin(errors)], errors


@functools.partial(jax.jit, static_argnames=("grid",))
def search_clip(weight: jax.Array, hessian: jax.Array, *, grid: Grid) -> Shrink:
    """Return the share of each group's range that its grid should cover, ``[N, K / group]``.

    With zero points there are two shares: of the range below zero and of the range above.
    """
    dtype, group, zeros = grid
    w = weight.astype(jnp.float32)
    n, k = w.shape
    groups = jnp.arange(k // group)
    blocks = hessian.reshape(k // group, group, k // group, group)[groups, :, groups]  # [G, g, g]

    def error(shrink: Shrink) -> jax.Array:
        delta = (rounded(w, dtype, group, zeros, shrink) - w).reshape(n, -1, group)
        product = jnp.einsum("ngi,gij->ngj", delta, blocks, precision=lax.Precision.HIGHEST)
        return jnp.sum(product * delta, axis=-1)

    shrinks = jnp.asarray(SHRINKS, jnp.float32)

    def best(of: Callable[[jax.Array], Shrink]) -> jax.Array:
        return shrinks[jnp.argmin(lax.map(lambda shrink: error(of(shrink)), shrinks), axis=0)]

    both = best(lambda shrink: shrink)
    if not zeros:
        return both
    high = best(lambda shrink: (both, shrink))
    return best(lambda shrink: (shrink, high)), high


def output_error(delta: jax.Array, hessian: jax.Array) -> jax.Array:
    """Return ``|| delta X ||^2`` from ``hessian = X X^T``."""
    return jnp.sum(jnp.matmul(delta, hessian, precision=lax.Precision.HIGHEST) * delta)

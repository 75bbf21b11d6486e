"""SmoothQuant: move the difficulty of quantizing activations into the weights.

    s_j = max |x_j| ** alpha / max |w_j| ** (1 - alpha)       x_j / s_j,  w_j * s_j

A channel of outliers would determine every token's scale. Divided by s it does not, and the
weight's scale of each output channel absorbs it. alpha is searched from 0 to 1 for the least error
of the quantized product on a sample of tokens. No scaling is a candidate too.

Source: arXiv 2211.10438, equation 4. The paper fixes alpha for a model; here the search runs for
each site. Pure functions of (weights, activations).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.quantization.rounding import Grid, rounded
from pallas_kernels.qtensor import dequantize, quantize
from pallas_kernels.rounding import CODES

ALPHAS = tuple(round(0.1 * step, 1) for step in range(11))


@functools.partial(jax.jit, static_argnames=("dtype", "grids", "static", "n_channels"))
def search_scales(
    weights: tuple[jax.Array, ...],
    sample: jax.Array,
    weight: jax.Array,
    felt: jax.Array,
    peak: jax.Array,
    channel: jax.Array,
    *,
    dtype: str,
    grids: tuple[Grid, ...],
    static: bool,
    n_channels: int,
) -> tuple[jax.Array, jax.Array]:
    """Search the scales of a site's channels for weights ``[N_i, K]``.

    Parameters
    ----------
    weights : tuple of float arrays [N_i, K]
        The weights that read the site's input.
    sample : float32[S, K]
        Inputs.
    weight : float32[S, 1]
        Weight of each token's squared error.
    felt, peak : float32[K]
        Largest weighted and plain |x| over the whole calibration.
    channel : int32[K]
        The scale that an input channel shares.
    dtype : str
        Dtype of the activations' codes.
    grids : tuple of Grid
        Grids of the weights.
    static : bool
        Whether all tokens share one scale.
    n_channels : int
        Number of scales.

    Returns
    -------
    (float32[n_channels], float32[1 + alphas])
        The scales, and the errors of no scaling and of every alpha.
    """
    ws = tuple(weight.astype(jnp.float32) for weight in weights)
    heights = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(w), axis=0) for w in ws))
    # With a scale for each token, a token may have any size; with a static scale it may not.
    x_peak = _shared(peak if static else felt, channel, n_channels)
    w_peak = _shared(heights, channel, n_channels)
    products = tuple(_dot(sample, w) for w in ws)

    def scales(alpha: jax.Array) -> jax.Array:
        s = x_peak**alpha / w_peak ** (1.0 - alpha)
        return s / (jnp.sqrt(jnp.max(s)) * jnp.sqrt(jnp.min(s)))

    def error(s: jax.Array) -> jax.Array:
        s = s[channel]
        x = sample / s
        x = fixed(x, jnp.max(peak / s) / CODES[dtype][1], dtype) if static else per_token(x, dtype)
        total = jnp.float32(0.0)
        for w, grid, want in zip(ws, grids, products, strict=True):
            total += jnp.sum(weight * (_dot(x, rounded(w * s, *grid)) - want) ** 2)
        return total

    alphas = jnp.asarray(ALPHAS, jnp.float32)
    candidates = jnp.concatenate((jnp.ones((1, n_channels), jnp.float32), lax.map(scales, alphas)))
    errors = lax.map(error, candidates)
    return candidates[jnp.argmin(errors)], errors


def per_token(x: jax.Array, dtype: str) -> jax.Array:
    """Return tokens after quantization by their own scales, dequantized."""
    return dequantize(quantize(x, dtype, scale_dtype=jnp.float32))


def fixed(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """Return tokens after quantization by one given scale, dequantized."""
    _, top = CODES[dtype]
    steps = jnp.clip(x / scale, -top, top)
    steps = steps.astype(dtype) if dtype == "float8_e4m3fn" else jnp.round(steps)
    return steps.astype(jnp.float32) * scale


def _shared(x: jax.Array, channel: jax.Array, n_channels: int) -> jax.Array:
    top = jax.ops.segment_max(x, channel, n_channels)
    return jnp.maximum(top, 1e-5 * jnp.max(top) + 1e-12)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST)

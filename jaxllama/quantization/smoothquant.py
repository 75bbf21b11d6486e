"""SmoothQuant: move what is hard about quantizing activations into the weights.

    s_j = max |x_j| ** alpha / max |w_j| ** (1 - alpha)       x_j / s_j,  w_j * s_j

A channel of outliers would set every token's scale; divided by s it does not, and the weight's
scale per output channel bears it.  alpha is searched from 0 to 1 for the least error of the
quantized product on a sample of tokens; no scaling at all competes too.

Source: arXiv 2211.10438, equation 4; the search is per site where the paper fixes alpha for a
model.  Pure functions of (weights, activations).
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
    """(s ``[n_channels]``, errors: of no scaling, then of every alpha) for weights ``[N_i, K]``.

    sample ``[S, K]``: inputs, and weight ``[S, 1]`` of each token's squared error; felt, peak
    ``[K]``: largest weighted and plain |x| over the whole calibration; channel ``[K]``: which scale
    an input channel shares; dtype: of activations' codes; grids: of the weights; static: one
    scale for all tokens.
    """
    ws = tuple(weight.astype(jnp.float32) for weight in weights)
    heights = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(w), axis=0) for w in ws))
    # A token that has its own scale may be as large as it likes; under a fixed one it may not.
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
    """What tokens quantized by their own scales stand for."""
    return dequantize(quantize(x, dtype, scale_dtype=jnp.float32))


def fixed(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """What tokens quantized by one given scale stand for."""
    _, top = CODES[dtype]
    steps = jnp.clip(x / scale, -top, top)
    steps = steps.astype(dtype) if dtype == "float8_e4m3fn" else jnp.round(steps)
    return steps.astype(jnp.float32) * scale


def _shared(x: jax.Array, channel: jax.Array, n_channels: int) -> jax.Array:
    top = jax.ops.segment_max(x, channel, n_channels)
    return jnp.maximum(top, 1e-5 * jnp.max(top) + 1e-12)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST)

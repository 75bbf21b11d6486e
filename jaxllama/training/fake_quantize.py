"""fake_quantize: round a weight to its grid in float, with straight-through gradients.

    n = (w - zero) / scale         q = clip(round(n), low, high)         y = q * scale + zero

per group of consecutive columns, for quantization-aware training.  The derivative treats rounding
as the identity (the straight-through estimator, arXiv 1308.3432).  For a cotangent dy this gives:

    inside the range    dw = dy      dscale = sum dy * (q - n)     dzero = 0
    beyond it           dw = 0       dscale = sum dy * q           dzero = sum dy

(LSQ, arXiv 1902.08153; the zero is LSQ+'s offset, 2004.09576).  y is exactly what ``dequantize``
gives for ``to_qtensor``'s codes.  Left out: activations, fp8, gradients of integer zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.qtensor import QTensor

_Zero = jax.Array | None
_Saved = tuple[jax.Array, jax.Array, _Zero]
RANGES = {"int8": (-127, 127), "int4": (-7, 7)}


def fake_quantize(
    w: jax.Array, scale: jax.Array, zero: jax.Array | None, words: str = "int8"
) -> jax.Array:
    """``w[N, K]`` on the grid of ``scale[N, groups]`` and ``zero`` (its shape, or None), float32.

    All operands are float32.  A scale that is not above 0 is taken as 2^-64.
    Raises ValueError for words other than int8 and int4, or groups that do not divide K.
    """
    _check(w, scale, zero, words)
    return _fake_quantize(words, w, scale, zero)


def to_qtensor(w: jax.Array, scale: jax.Array, zero: jax.Array | None, words: str) -> QTensor:
    """The codes, scales and floating zeros that stand for ``fake_quantize``'s result."""
    _check(w, scale, zero, words)
    _, q, scale = _round(words, w, scale, zero)
    return QTensor(q.reshape(w.shape).astype(words), scale, zero)


def _check(w: jax.Array, scale: jax.Array, zero: _Zero, words: str) -> None:
    if words not in RANGES:
        raise ValueError(f"fake_quantize: words {words!r} are not one of {', '.join(RANGES)}")
    rows, width = w.shape
    if scale.shape[:-1] != (rows,) or width % scale.shape[-1]:
        raise ValueError(f"fake_quantize: scale {scale.shape} does not fit w {w.shape}")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"fake_quantize: zero {zero.shape} is not scale's {scale.shape}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize(words: str, w: jax.Array, scale: jax.Array, zero: _Zero) -> jax.Array:
    return _floats(*_round(words, w, scale, zero)[1:], zero).reshape(w.shape)


def _floats(q: jax.Array, scale: jax.Array, zero: _Zero) -> jax.Array:
    y = q * scale[..., None]
    return y if zero is None else y + zero[..., None]


def _round(
    words: str, w: jax.Array, scale: jax.Array, zero: _Zero
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(unrounded steps, codes as floats, the scale used), in groups ``[N, groups, K / groups]``."""
    scale = jnp.maximum(scale, 2.0**-64)
    steps = w.reshape(*scale.shape, -1)
    if zero is not None:
        steps = steps - zero[..., None]
    steps = steps / scale[..., None]
    return steps, jnp.clip(jnp.round(steps), *map(float, RANGES[words])), scale


def _forward(words: str, w: jax.Array, scale: jax.Array, zero: _Zero) -> tuple[jax.Array, _Saved]:
    return _fake_quantize(words, w, scale, zero), (w, scale, zero)


def _backward(words: str, saved: _Saved, dy: jax.Array) -> tuple[jax.Array, jax.Array, _Zero]:
    w, scale, zero = saved
    steps, q, _ = _round(words, w, scale, zero)
    low, high = RANGES[words]
    inside = (steps >= low) & (steps <= high)
    dy = dy.reshape(steps.shape)
    d_scale = jnp.sum(dy * (q - jnp.where(inside, steps, 0.0)), axis=-1)
    d_zero = None if zero is None else jnp.sum(jnp.where(inside, 0.0, dy), axis=-1)
    return jnp.where(inside, dy, 0.0).reshape(w.shape), d_scale, d_zero


_fake_quantize.defvjp(_forward, _backward)

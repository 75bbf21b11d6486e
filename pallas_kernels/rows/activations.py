"""Activations of floats by XLA: the table that products, gates and models share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh form (arXiv 1606.08415), as the kernels have it: x times a logistic.

    ``(1 + tanh u) / 2`` loses its digits where u is below -2.
    """
    u = x * (1.0 + 0.044715 * x * x) * math.sqrt(8 / math.pi)
    return x * jax.nn.sigmoid(u)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": gelu_tanh,
    "silu": jax.nn.silu,
}
GATES = ("silu", "gelu", "gelu_tanh")  # those of SwiGLU

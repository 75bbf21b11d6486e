"""LayerNorm and the activations without a gate: float32 inside, one cast at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllama.typing import Params
from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.rows.activations import ACTIVATIONS


def layer_norm(x: jax.Array, scale: Params | None, eps: float) -> jax.Array:
    """LayerNorm (arXiv 1607.06450) in float32, cast once; without parameters x itself."""
    if scale is None:
        return x
    y = x.astype(jnp.float32)
    y = y - row_sums(y) / y.shape[-1]
    y = y * jax.lax.rsqrt(row_sums(jnp.square(y)) / y.shape[-1] + eps)
    y = y * scale["weight"].astype(jnp.float32)
    y = y + scale["bias"].astype(jnp.float32) if "bias" in scale else y
    return y.astype(x.dtype)


_ACTIVATIONS = {**ACTIVATIONS, "relu2": lambda x: jnp.square(jax.nn.relu(x))}


def _xielu(x: jax.Array, scalars: jax.Array) -> jax.Array:
    """xIELU (arXiv 2411.13010) with the ``scalars[4]`` alpha_p, alpha_n, beta and eps, of which the
    last two are constants."""
    positive, negative = jax.nn.softplus(scalars[:2])
    beta, eps = jax.lax.stop_gradient(scalars[2:])
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + negative)
    return jnp.where(x > 0, positive * jnp.square(x), below) + beta * x


def activated(x: jax.Array, activation: str, scalars: jax.Array | None = None) -> jax.Array:
    """An activation without a gate, in float32 with one cast; scalars ``[4]``: xIELU's."""
    if scalars is not None:
        return _xielu(x.astype(jnp.float32), scalars.astype(jnp.float32)).astype(x.dtype)
    return _ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)

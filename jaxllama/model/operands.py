"""Checks of the arrays and dtypes that a caller passes.

They read no values, so they also work on traced arrays.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import ArrayOrNumpy


def check_ints(name: str, x: ArrayOrNumpy, axes: str, batch: int | None = None) -> None:
    """Raise JaxLlamaError unless ``x`` is an integer array with these axes."""
    _check_array(name, x, f"an array of integers {axes}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise JaxLlamaError(f"{name}: {x.dtype}: expected integers")
    if len(x.shape) != axes.count(",") + 1 or 0 in x.shape:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {axes}, at least one of each")
    if batch is not None and x.shape[0] != batch:
        raise JaxLlamaError(f"{name}{list(x.shape)}: expected {batch}, one for each row")


def check_features(cfg: ModelConfig, x: ArrayOrNumpy, axes: str = "[..., D]") -> None:
    """Raise JaxLlamaError unless ``x`` is a float array with these axes, and D is d_model."""
    _check_array("x", x, f"an array of floats {axes}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise JaxLlamaError(f"x: {x.dtype}: expected floats")
    n_axes = len(x.shape) if "..." in axes else axes.count(",") + 1
    if len(x.shape) != n_axes or x.shape[-1:] != (cfg.d_model,):
        raise JaxLlamaError(f"x{list(x.shape)}: expected {axes} with D = {cfg.d_model} (d_model)")


def check_key(name: str, key: ArrayOrNumpy) -> None:
    """Raise JaxLlamaError unless ``key`` is one PRNG key, typed or of raw uint32 words."""
    _check_array(name, key, "a PRNG key: jax.random.key(seed)")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and (key.dtype != jnp.uint32 or len(key.shape) != 1):
        raise JaxLlamaError(
            f"{name}: {key.dtype}{list(key.shape)}: expected a PRNG key: jax.random.key(seed)"
        )


def float_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of weights and activations.

    Raises JaxLlamaError for any dtype but float32, bfloat16, float16 and float64.
    """
    with contextlib.suppress(TypeError):
        found = jnp.dtype(dtype)
        if jnp.issubdtype(found, jnp.floating) and found.itemsize in (2, 4, 8):
            return found
        dtype = found.name
    raise JaxLlamaError(f"dtype {dtype!r} is not float32, bfloat16 or float16")


def _check_array(name: str, x: ArrayOrNumpy, what: str) -> None:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise JaxLlamaError(f"{name}: {type(x).__name__}: expected {what}")

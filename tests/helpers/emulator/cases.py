"""A small call of every Mosaic kernel: the call, and what it has to give.

A case's name is the kernel's, and what differs.  ``case(name)`` returns a function that takes
``implementation``, to be called within ``emulated()`` with "mosaic", and outside with "xla".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import kernel_cases as real

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
HEADS = 4, 2, 64


def array(shape, dtype, seed: int = 0) -> jax.Array:
    """Normal floats; negative float32, which are decays as well; small integers."""
    r = np.random.default_rng([seed, *shape])
    if jnp.issubdtype(dtype, jnp.floating):
        x = r.standard_normal(shape)
        x = -np.abs(x) * 0.2 - 0.01 if dtype == F32 else x
        return jnp.asarray(x, F32).astype(dtype)
    return jnp.asarray(r.integers(0, 4, shape), dtype)


def built(make: Callable[[], tuple[Callable, tuple]]) -> tuple[Callable, tuple]:
    """A call of ``kernel_cases`` with arrays where it has types."""
    counter = iter(range(1000))
    with (
        mock.patch.object(real, "S", lambda shape, dtype: array(shape, dtype, next(counter))),
        mock.patch.object(jax, "eval_shape", lambda f, *args: f(*args)),
    ):
        return make()

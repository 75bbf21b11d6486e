"""What the tests of latent attention share: entries in pages, and the definition in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.operands import LatentCodes
from pallas_kernels.attention.rope_cache import quantize_kv
from tests.helpers.arrays import as_jax
from tests.helpers.delta_cases import relative_rms

SCALE = 0.06
# Of the largest weight and output, bfloat16 keeps 8 bits: measured 0.0022 on the emulator.
BOUND = 4e-3


def placed(
    rng: np.random.Generator, entries: np.ndarray, page: int
) -> tuple[np.ndarray, jax.Array | None]:
    """Return entries ``[B, S, 576]`` in shuffled pages among unused ones of NaN, and their table;
    or as they are, and None, if ``page`` is 0."""
    if not page:
        return entries, None
    batch, pages = len(entries), entries.shape[0] * entries.shape[1] // page
    places = rng.permutation(pages + 3)[:pages]
    pool = np.full((pages + 3, page, 576), np.nan)
    pool[places] = entries.reshape(pages, page, 576)
    return pool, as_jax(places.reshape(batch, -1), jnp.int32)


def in_codes(cache: jax.Array, kind: str) -> jax.Array | LatentCodes:
    """Return entries ``[..., 576]`` as a cache of this dtype holds them."""
    if kind == "bfloat16":
        return cache
    low, rope = quantize_kv(cache[..., :512], kind), cache[..., 512:].astype(jnp.bfloat16)
    scale = jnp.where(jnp.isnan(rope[..., :1]), jnp.nan, low.scale)
    return LatentCodes(dataclasses.replace(low, scale=scale), rope)


def oracle(q: Any, cache: Any, table: Any, seen: Callable[[int, int], Any]) -> np.ndarray:
    """Return each token's sums in float64.  seen(row, token): the places that it attends to."""
    q, cache = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, cache))
    if table is not None:
        cache = cache[np.asarray(table)].reshape(len(table), -1, 576)
    out = np.zeros((*q.shape[:3], 512))
    for row, token in np.ndindex(*q.shape[:2]):
        entries = cache[row, seen(row, token)]
        if len(entries):
            scores = SCALE * q[row, token] @ entries.T
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[row, token] = weights @ entries[:, :512] / weights.sum(axis=-1, keepdims=True)
    return out


def compare(got: jax.Array, want: np.ndarray, q: jax.Array, empty: Any, bound: float) -> None:
    """Compare a form's sums with the oracle's; tokens that see nothing have zeros."""
    assert got.shape == want.shape and got.dtype == q.dtype
    assert not want.any() or relative_rms(np.asarray(got.astype(jnp.float32)), want) < bound
    assert np.all(np.asarray(got, np.float32)[empty] == 0)

"""The weight-only product of many rows on the CPU, in any order in which its warpgroups may run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.helpers.arrays import as_jax

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.matmul.many_rows.plan import WeightTile
    from pallas_kernels.matmul.many_rows.weight import weight_matmul
    from pallas_kernels.matmul.many_rows.weight_program import WeightOperands
    from pallas_kernels.matmul.stored import StoredWeight
    from tests.helpers.emulator.launch import emulated

    # Two clusters, each of which computes several tiles in turn.
    SMALL = WeightTile(32, stages=5, width=16, unroll=1, store=16, lag=1, sms=4)
    FED = WeightTile(32, stages=4, store=16, sms=4)

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FLOAT4 = np.arange(16).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def operands(kind, m, n, k, seed=0):
    """(x and its parts beside codes, how w is stored, the weights' values)."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((m, k)).astype(jnp.bfloat16)
    if kind == "int8":
        w = r.integers(-127, 128, (n, k)).astype(np.int8)
        row = r.uniform(0.5, 2, n).astype(np.float32)
        held = {"x": x, "w": w, "row": row}
        return (
            held,
            StoredWeight(jnp.dtype(jnp.int8), k, 1, jnp.dtype(jnp.float32)),
            w * row[:, None],
        )
    w = r.integers(-8, 8, (n, k)).astype(jnp.int4)
    if kind == "int4":
        scale = r.uniform(0.5, 2, (k // 128, n)).astype(jnp.bfloat16)
        a = (w.astype(jnp.bfloat16) * np.repeat(scale, 128, 0).T).astype(np.float32)
        held = {"x": x, "w": w, "scale": scale}
        return held, StoredWeight(w.dtype, 128, k // 128, scale.dtype), a
    scale = r.integers(124, 131, (k // 32, n)).astype(np.int8)
    factor = 2.0 ** (scale.view(np.uint8).astype(np.float32) - 127)
    a = FLOAT4[w.astype(np.int32) & 15] * np.repeat(factor, 32, 0).T
    kinds = jnp.dtype(jnp.float4_e2m1fn), 32, k // 32, jnp.dtype(jnp.float8_e8m0fnu)
    return {"x": x, "w": w, "scale": scale}, StoredWeight(*kinds), a


def product(kind, tile, m, n, k, seed):
    """The relative difference of the kernel's product from the exact one."""
    held, weight, a = operands(kind, m, n, k)
    with emulated(seed):
        given = WeightOperands(**{name: as_jax(v) for name, v in held.items()})
        out = weight_matmul(given, weight, jnp.bfloat16, tile)
    want = held["x"].astype(np.float64) @ a.T.astype(np.float64)
    return np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("kind, k", [("int8", 832), slow("int4", 640), slow("mxfp4", 320)])
def test_first_warpgroup_copies(kind, k, seed):
    """Three rings' length, two and one; a cluster has two tiles, cut off at both edges."""
    assert product(kind, SMALL, 50, 208, k, seed) < 3e-3


@pytest.mark.slow
def test_first_warpgroup_copies_whole_tiles():
    assert (
        product(
            "int8",
            WeightTile(256, stages=5, width=16, unroll=1, store=32, lag=1, sms=2),
            200,
            128,
            384,
            0,
        )
        < 3e-3
    )


@pytest.mark.parametrize("kind, k", [slow("int8", 320), slow("int4", 640), ("mxfp4", 192)])
def test_a_warpgroup_copies(kind, k):
    assert product(kind, FED, 50, 208, k, 0) < 3e-3


@pytest.mark.parametrize("facts", [slow({"parts": 2}), {"parts": 2, "split": 2, "cluster": 1}])
def test_parts_and_halves_of_k(facts):
    tile = dataclasses.replace(FED, unroll=1, **facts)
    assert product("int4", tile, 60, 208, 256, 0) < 3e-3


def test_a_block_that_finishes_no_tile_awaits_its_copies():
    tile = dataclasses.replace(FED, unroll=1, parts=2, split=2, cluster=1, rows=64)
    assert product("int8", tile, 20, 144, 512, 0) < 3e-3


def test_odd_number_of_stores():
    """Three stores of a tile leave from two places, and the next tile's first is not too early."""
    assert product("int8", dataclasses.replace(FED, tokens=48), 60, 208, 320, 0) < 3e-3


def test_fewer_steps_than_the_ring_are_refused():
    with pytest.raises(ValueError, match="does not divide K = 256"):
        product("int8", SMALL, 50, 208, 256, 0)

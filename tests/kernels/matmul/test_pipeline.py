"""The order of tiles of the persistent products of many rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.many_rows.pipeline import snake
from tests.helpers.matmul_cases import newest

# The tiles of m and n: a last part that is narrower, as wide as the others, and alone.
GRIDS = [(43, 28), (7, 300), (64, 32), (3, 5)]


def divisors(jaxpr) -> list[object]:
    """What the jaxpr of a scalar function divides by."""
    found = [step.invars[1] for step in jaxpr.eqns if step.primitive.name in ("div", "rem")]
    inner = [step.params["jaxpr"].jaxpr for step in jaxpr.eqns if "jaxpr" in step.params]
    return found + [x for one in inner for x in divisors(one)]


@newest
@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_snake_is_that_of_pallas(grid, minor) -> None:
    index = jnp.arange(grid[0] * grid[1], dtype=jnp.int32)
    for width in (8, 11):
        ours, theirs = (
            jax.jit(jax.vmap(lambda i, f=f, width=width: f(i, grid, minor, width)))(index)
            for f in (snake, plgpu.planar_snake)
        )
        np.testing.assert_array_equal(ours, theirs)


@newest
def test_a_snake_divides_by_constants() -> None:
    """Other divisions are calls, beside which wgmma's instructions wait for one another."""
    uneven = jax.make_jaxpr(lambda i: snake(i, (43, 28), 1, 16))(jnp.int32(0))
    by = divisors(uneven.jaxpr)
    assert by and all(hasattr(x, "val") for x in by)

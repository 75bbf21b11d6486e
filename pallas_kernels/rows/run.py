"""The row-wise kernel on operands of any leading axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rows.plan import RowsPlan


def run(
    plan: RowsPlan,
    x: jax.Array,
    residual: jax.Array | None = None,
    weight: jax.Array | None = None,
    first: jax.Array | None = None,
    adapter: jax.Array | None = None,
    given: jax.Array | None = None,
) -> list[jax.Array]:
    """Return the results of ``rows.kernel.run`` with the leading axes of x."""
    from pallas_kernels.rows import kernel

    lead, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual = residual.reshape(rows.shape)
    if adapter is not None:
        adapter = adapter.reshape(-1)
    out = kernel.run(plan, rows, residual, weight, first, adapter, given)
    return [jnp.reshape(a, (*lead, a.shape[-1])) for a in out]

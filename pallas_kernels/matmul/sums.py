"""Sums over devices that the products of one row post, and the next products read.

    pending = post(x, w, table)                          this device's part goes to every device
    y, total = norm_matmul(x, w, pending, norm=...)      reads the sum, adds it to x
    collect(pending)                                     reads it into an array

``few_rows.mailbox`` describes the mailboxes behind a table.  The order of the sums in a step is
fixed: a product that posts must depend on the result of the kernel that read the sum before.
There is no other implementation: ask ``can_post`` first.  Nothing here has gradients.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Reason, wants_kernel
from pallas_kernels.matmul.call import Around, MatmulCall, Weight
from pallas_kernels.matmul.few_rows.plan import WARPS, RowDivision, row_plan
from pallas_kernels.qtensor import QTensor
from pallas_kernels.types import HasShape

_FLOAT32 = jnp.dtype(jnp.float32)


class Posted(NamedTuple):
    """A sum over devices, of one row, that no kernel has read yet.

    Attributes
    ----------
    order : float32 [..., N]
        The result of the product that posts.  It has no values: it orders the kernels.
    table : int32 [1, peers + 2, 2]
        Where the sum's slots are.
    """

    order: jax.Array
    table: jax.Array


def _plan(x: HasShape, w: jax.Array | Weight, around: Around) -> RowDivision | None:
    call = MatmulCall.around(x, w, around)
    plan = row_plan(call)
    return None if isinstance(plan, Reason) else plan.divide(call)


def can_post(x: HasShape, w: Weight) -> bool:
    """Return whether ``post`` has a kernel for these shapes and dtypes."""
    return wants_kernel(None, x, w) and _plan(x, w, Around(_FLOAT32)) is not None


def post(x: jax.Array, w: jax.Array | QTensor, table: jax.Array) -> Posted:
    """Post this device's part of ``x @ w.T`` to the mailboxes of all devices.

    Parameters
    ----------
    x : bfloat16 [..., K]
        One row of this device's features.
    w : float or QTensor [N, K]
        This device's columns of the weight.
    table : int32 [1, peers + 2, 2]
        This sum's.

    Returns
    -------
    Posted
    """
    from pallas_kernels.matmul.few_rows import kernel

    around = Around(_FLOAT32, post=table)
    plan = _plan(x, w, around)
    assert plan is not None
    # A block posts rows that lie side by side, and a warp all of them.
    plan = dataclasses.replace(plan, spread=False, warps=min(plan.warps, WARPS))
    order = kernel.matmul(x.reshape(1, -1), w, around, plan)
    return Posted(order.reshape(*x.shape[:-1], -1), table)


def norm_matmul(
    x: jax.Array,
    w: jax.Array | QTensor,
    pending: Posted,
    *,
    norm: tuple[jax.Array, float],
    bias: jax.Array | None = None,
    out_dtype: DTypeLike,
    swiglu: bool = False,
    activation: str = "silu",
) -> tuple[jax.Array, jax.Array] | None:
    """Return ``quantized_matmul`` of x and the pending sum, and their total.

    The result is None where the kernel of one row does not take the product.
    """
    from pallas_kernels.matmul.few_rows import kernel

    gamma, eps = norm
    rows, sums = x.reshape(1, -1), pending.order.reshape(1, -1)
    work = bias, gamma, eps, None, sums, swiglu, activation
    around = Around(jnp.dtype(out_dtype), *work, posted=pending.table)
    plan = _plan(rows, w, around)
    if plan is None:
        return None
    y, total = kernel.matmul(rows, w, around, plan)
    return y.reshape(*x.shape[:-1], -1), total.reshape(x.shape)


def collect(pending: Posted) -> jax.Array:
    """Return the sum as an array, float32 ``[..., N]``."""
    from pallas_kernels.matmul.few_rows import posted

    row = jax.jit(posted.collect)(pending.order.reshape(1, -1), pending.table)
    return row.reshape(pending.order.shape)

"""Sums over devices that the products of one row post, and the next products read.

    pending = post(x, w, table)                          this device's part goes to every device
    y, total = norm_matmul(x, w, pending, norm=...)      reads the sum, adds it to x
    collect(pending)                                     reads it into an array

The order of the sums in a step is
fixed: a product that posts must depend on the result of the kernel that read the sum before.
There is no other implementation: ask ``can_post`` first.  Nothing here has gradients.

Mailboxes are memory of each device into which all devices store their parts of a sum of one row.
A device has a mailbox in its own memory: float32 ``[SLOTS, peers, width]``, at first full of
``EMPTY``.  The sums of a step go through the slots in turn.  A product that posts stores its row in
its own place of every device's mailbox.  The kernel behind it polls its device's mailbox until no
word is ``EMPTY``, and adds the rows in the order of the devices.  So all devices have the same
bits, in every run.

    product t         empties slot (t - 2) % SLOTS of its own mailbox, and posts to slot t % SLOTS
    kernel behind     polls slot t % SLOTS

Why no word is lost: a device posts t + 2 after it has all of t + 1.  So everywhere the readers of
slot t have ended by then, and product t + 2 may empty it.  Posts to the same slot come with t + 4,
after all of t + 3.  A device posts t + 3 when its product t + 2 has ended.

A table for each sum says where the slots are: int32 ``[1, peers + 2, 2]``, halves of addresses.
The first ``peers`` are this device's place in the mailbox of each peer.  Then come its own
mailbox's slot of this sum, and the slot to empty.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Reason, wants_kernel
from pallas_kernels.matmul.call import Around, MatmulCall, Weight
from pallas_kernels.matmul.few_rows.plan import WARPS, RowDivision, row_plan
from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import QTensor

SLOTS = 4
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


def tables(mailboxes: list[int], width: int, n_sums: int) -> np.ndarray:
    """Return the tables of the sums of a step, int32 ``[n_sums, peers, peers + 2, 2]``.

    mailboxes: the address of each device's.  n_sums: a multiple of ``SLOTS``, because the first sum
    of a step follows the last one of the step before.
    """
    if n_sums % SLOTS:
        raise ValueError(f"{n_sums} sums a step: not a multiple of {SLOTS}")
    peers = len(mailboxes)
    row, slot = 4 * width, 4 * width * peers
    found = np.zeros((n_sums, peers, peers + 2), np.int64)
    for number in range(n_sums):
        here, older = slot * (number % SLOTS), slot * ((number - 2) % SLOTS)
        for me, mine in enumerate(mailboxes):
            found[number, me, :peers] = [box + here + row * me for box in mailboxes]
            found[number, me, peers:] = mine + here, mine + older
    return found.view(np.int32).reshape(n_sums, peers, peers + 2, 2)

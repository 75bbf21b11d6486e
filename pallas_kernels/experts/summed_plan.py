"""How the kernel that sums over a token's experts divides its product: arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.matmul.few_rows.plan import FOLDED
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor

Weight = jax.Array | jax.ShapeDtypeStruct | QTensor
SLOT = 128  # columns
WARPS = 12, 16  # of a block, the best first
MOST_AHEAD = 4  # units whose codes a warp loads ahead


@dataclasses.dataclass(frozen=True)
class GroupedSumPlan(Predicted):
    """The division of a token's product with all of its experts among blocks and warps.

    k, n: columns and rows of an expert.  fan: experts of a token.  partial: w has not all experts.
    """

    kernel: ClassVar[str] = "grouped_matmul_sum_mosaic"
    k: int
    n: int
    fan: int
    tokens: int
    partial: bool
    warps: int
    most_ahead: int
    sms: int = dataclasses.field(repr=False)

    def representative(self) -> GroupedSumPlan:
        times = {"predicted_us": None, "xla_us": None}
        return dataclasses.replace(self, k=128, n=2, fan=1, **times)

    @property
    def slots(self) -> int:
        """Slots of an expert's row."""
        return -(-self.k // SLOT)

    @property
    def row_slots(self) -> int:
        """Slots of the rows of all experts of a token, side by side."""
        return self.slots * self.fan

    @property
    def chunks(self) -> int:
        return -(-self.row_slots // 8)

    @property
    def units(self) -> int:
        """Pairs of rows."""
        return self.n // 2

    @property
    def blocks(self) -> int:
        """Blocks of a token."""
        return min(self.units, max(1, self.sms // self.tokens))

    @property
    def most_units(self) -> int:
        """Units of a block, at most."""
        return -(-self.units // self.blocks)

    @property
    def least_units(self) -> int:
        """Units of a block, at least."""
        return self.units // self.blocks

    @property
    def members(self) -> int:
        """Warps that have the same chunk."""
        return self.warps // self.chunks

    @property
    def rounds(self) -> int:
        """Units of a warp."""
        return -(-self.most_units // self.members)

    @property
    def ahead(self) -> int:
        return min(self.rounds, self.most_ahead)

    @property
    def items(self) -> int:
        """Rows and experts of a block."""
        return 2 * self.fan * self.most_units

    @property
    def pitch(self) -> int:
        """Floats from one row's slots to the next's."""
        return 8 * self.chunks + 1

    @property
    def scratch_sizes(self) -> list[int]:
        """Bytes of x, of the slots' sums, and of the experts' parts of rows."""
        return [2048 * self.warps, 8 * self.most_units * self.pitch, 4 * self.items]


def summed_plan(
    x: jax.Array, w: Weight, n_pairs: int, fan: int, *, most_tokens: int | None = None
) -> GroupedSumPlan | Reason:
    """The plan for ``x[..., K]``, ``w[E, N, K]`` and ``fan`` experts of a token, or why there is
    none.

    most_tokens: overrides the card's limit.
    """
    _, n, k = w.shape
    if reason := lacking("wgmma"):  # Hopper alone was timed
        return Reason(reason)
    if x.dtype != jnp.bfloat16:
        return Reason(f"x is {x.dtype}, the kernel of sums over experts takes bfloat16")
    if not isinstance(w, QTensor) or not (w.dtype == jnp.int4 or StoredWeight.of(w).is_format):
        return Reason("the kernel of sums over experts takes int4, MXFP4 and NVFP4")
    if w.dtype == jnp.int4 and w.group_size not in (SLOT, *FOLDED):
        return Reason(f"int4 in groups of {w.group_size}, not {SLOT}, 64 or 32")
    if w.dtype == jnp.int4 and w.zero is not None and w.zero.dtype != jnp.int8:
        return Reason(f"zeros of {w.zero.dtype}")
    wanted = SLOT if w.dtype == jnp.int4 and w.group_size == SLOT else 32
    if k % wanted or n % 2:
        return Reason(f"K = {k} is not a multiple of {wanted}, or N = {n} is odd")
    tokens, most = n_pairs // fan, most_tokens or gpu().experts.summed_tokens
    if tokens > most:
        return Reason(f"{tokens} tokens; the kernel of sums over experts takes {most}")
    plans = [
        GroupedSumPlan(k, n, fan, tokens, False, warps, MOST_AHEAD, gpu().sms) for warps in WARPS
    ]
    plans = [one for one in plans if one.chunks <= one.warps]
    if not plans:
        return Reason(f"{fan} rows of {k} columns side by side are too long")
    plan = max(plans, key=lambda one: one.members * one.chunks / one.warps)
    if sum(plan.scratch_sizes) > gpu().shared_bytes - 4096:
        return Reason(f"{tokens} tokens need more than shared memory holds")
    return plan

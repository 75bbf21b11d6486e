"""How the kernel of a token's experts divides its product: arithmetic only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.many_pairs_plan import inner_gate
from pallas_kernels.matmul.few_rows.plan import is_format
from pallas_kernels.qtensor import QTensor

Weight = jax.Array | jax.ShapeDtypeStruct | QTensor
SLOT = 128  # columns
WARPS = 12, 16, 8  # of a block, the best first
MOST_AHEAD = 8  # units whose codes a warp loads ahead


@dataclasses.dataclass(frozen=True)
class TokenPlan(Predicted):
    """The division of a token's products with its experts among blocks and warps.

    k, n: columns and rows of an expert.  fan: experts of a token.  joined: the token's results are
    summed.  is_gated: a unit is a row of gate and one of up.  partial: w has not all experts.
    """

    kernel: ClassVar[str] = "grouped_matmul_token_mosaic"
    k: int
    n: int
    fan: int
    tokens: int
    joined: bool
    is_gated: bool
    partial: bool
    warps: int
    most_ahead: int
    sms: int

    @property
    def slots(self) -> int:
        """Of an expert's row."""
        return -(-self.k // SLOT)

    @property
    def row_slots(self) -> int:
        """Of a unit's rows."""
        return self.slots * (self.fan if self.joined else 1)

    @property
    def chunks(self) -> int:
        return -(-self.row_slots // 8)

    @property
    def units(self) -> int:
        """Pairs of rows of a token."""
        return self.n // 2 * (1 if self.joined else self.fan)

    @property
    def half(self) -> int:
        """Units of an expert."""
        return self.n // 2

    @property
    def unit_rows(self) -> int:
        """Rows from a unit's first to the next unit's."""
        return 1 if self.is_gated else 2

    @property
    def apart(self) -> int:
        """Rows from a unit's first to its second."""
        return self.n // 2 if self.is_gated else 1

    @property
    def results(self) -> int:
        """Of a token."""
        return self.units if self.is_gated else 2 * self.units

    @property
    def blocks(self) -> int:
        """Of a token."""
        return min(self.units, max(1, self.sms // self.tokens))

    @property
    def most_units(self) -> int:
        """Of a block."""
        return -(-self.units // self.blocks)

    @property
    def least_units(self) -> int:
        """Of a block."""
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
        """Of a block's last step: units, or rows and experts."""
        return 2 * self.fan * self.most_units if self.joined else self.most_units

    @property
    def pitch(self) -> int:
        """Floats from one row's slots to the next's."""
        return 8 * self.chunks + 1

    @property
    def scratch_sizes(self) -> list[int]:
        """Bytes of x, of the slots' sums, and of the experts' parts of rows."""
        parts = 4 * 2 * self.most_units * self.fan if self.joined else 4
        return [2048 * self.warps, 8 * self.most_units * self.pitch, parts]


def token_plan(
    x: jax.Array,
    w: Weight,
    n_pairs: int,
    gated: Gate | None,
    *,
    fan: int,
    joined: bool,
) -> TokenPlan | Reason:
    """The plan for ``x[..., K]`` and ``w[E, N, K]``, or why there is none."""
    _, n, k = w.shape
    if x.dtype != jnp.bfloat16:
        return Reason(f"x is {x.dtype}, the kernel of a token's experts takes bfloat16")
    if not isinstance(w, QTensor) or not (w.dtype == jnp.int4 or is_format(w)):
        return Reason("codes other than int4, MXFP4 and NVFP4")
    if w.dtype == jnp.int4 and w.group_size != SLOT:
        return Reason(f"int4 in groups of {w.group_size}, not {SLOT}")
    if w.zero is not None and w.zero.dtype != jnp.int8:
        return Reason(f"zeros of {w.zero.dtype}")
    if k % (SLOT if w.dtype == jnp.int4 else 32):
        return Reason(f"K = {k} is not a multiple of {SLOT if w.dtype == jnp.int4 else 32}")
    tokens = n_pairs // fan
    most = gpu().sms // fan
    if tokens > most:
        return Reason(f"{tokens} tokens; the kernel of a token's experts takes up to {most}")
    is_gated = inner_gate(gated) is not None
    if gated is not None and (joined or not is_gated):
        return Reason(f"the gate {gated} before a sum over experts, or one that no kernel has")
    if n % 2 or fan > 32:
        return Reason(f"N = {n} is odd, or {fan} experts a token are more than 32")
    plans = [
        TokenPlan(k, n, fan, tokens, joined, is_gated, False, warps, MOST_AHEAD, gpu().sms)
        for warps in WARPS
    ]
    plans = [one for one in plans if one.chunks <= one.warps]
    if not plans:
        return Reason(f"rows of {k} columns of {fan} experts are too long")
    plan = max(plans, key=lambda one: one.members * one.chunks / one.warps)
    if sum(plan.scratch_sizes) > gpu().shared_bytes - 4096:
        return Reason(f"{tokens} tokens need more than shared memory holds")
    return plan

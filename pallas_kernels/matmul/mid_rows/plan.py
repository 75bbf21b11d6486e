"""The products of 17 to 256 rows on GPUs without wgmma: which there are, and their tile.

The tile comes from instruction rates (``cards.table.MidRows``): clocks of a multiprocessor for the
tensor cores, for the integer units that widen codes, and for the copies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import jax.numpy as jnp

from pallas_kernels.cards.table import MidRows
from pallas_kernels.device import Gpu, gpu
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import TOKENS
from pallas_kernels.matmul.stored import KIND, StoredWeight

MOST_ROWS = 256
WARP_ROWS = 32  # rows of w of a warp
UNIT_BYTES = 64  # of a row of x: two steps of mma, 16 bytes of each to a lane
_KIB = 1024
# Tokens, rows, k_warps and stages of a tile.  44 combinations were predicted for 1,500 calls on
# seven cards.  The other 33 are nowhere 0.2% shorter.
SHAPES = (
    (32, 64, 2, 4),
    (32, 128, 1, 3),
    (32, 128, 2, 4),
    (32, 256, 1, 4),
    (64, 64, 2, 3),
    (64, 64, 2, 2),
    (64, 128, 1, 3),
    (64, 128, 2, 4),
    (64, 256, 1, 3),
    (128, 128, 2, 3),
    (128, 256, 1, 3),
)
PARTS = 1, 2, 3, 4, 6, 8


@dataclasses.dataclass(frozen=True)
class MidStep:
    """A step of K of x and w in shared memory.  x: the kind of its floats, or "s8" for codes."""

    w: StoredWeight
    x: str

    @classmethod
    def of(cls, call: MatmulCall) -> MidStep:
        return cls(call.weight, "s8" if call.quantized_x else KIND[call.x.name])

    @property
    def exact(self) -> bool:
        """Whether x has int8 codes."""
        return self.x == "s8"

    @property
    def family(self) -> str:
        """The family of costs in the device's table."""
        return f"mid int{self.w.bits}{' x 8 bits' if self.exact else ''}"

    @property
    def x_size(self) -> int:
        """Bytes of an element of x."""
        return 1 if self.exact else 2

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return UNIT_BYTES // self.x_size

    @property
    def units(self) -> int:
        """Units of a step, which is 64 or 128 bytes of a row of w."""
        return 4 if self.w.bits == 4 else 2

    @property
    def columns(self) -> int:
        """Columns of a step."""
        return self.units * self.unit

    @property
    def x_pitch(self) -> int:
        """Bytes of a step of a row of x."""
        return self.units * UNIT_BYTES

    @property
    def w_pitch(self) -> int:
        """Bytes of a step of a row of w."""
        return self.columns * self.w.bits // 8

    @property
    def folds(self) -> bool:
        """Whether scales multiply the weights, because they vary along K, instead of the sums."""
        return self.w.n_groups > 1 or self.w.float_zero

    @property
    def widening(self) -> float:
        """Integer operations that bring a code to where it is multiplied."""
        if self.exact:
            return 0.0
        if self.w.float4 or self.w.float8:
            return 2.2
        return 1.2 if self.w.bits == 4 else 1.5


@dataclasses.dataclass(frozen=True)
class MidTile(Predicted):
    """One block's tile of the product.

    tokens, rows: of x and of w.
    k_warps: warps that share the columns of a step; their sums meet in shared memory.
    parts: blocks that share K; each writes its sums, and XLA adds these.
    stages: steps of K that are in shared memory.
    """

    kernel: ClassVar[str] = "quantized_matmul_mid"
    tokens: int
    rows: int
    k_warps: int
    parts: int
    stages: int

    def representative(self) -> MidTile:
        return dataclasses.replace(self, parts=min(self.parts, 2))

    @property
    def warps(self) -> int:
        return self.rows // WARP_ROWS * self.k_warps

    def step_bytes(self, step: MidStep) -> int:
        return self.tokens * step.x_pitch + self.rows * step.w_pitch

    def shared_bytes(self, step: MidStep) -> int:
        """Bytes of the ring; the warps' sums take its place at the end."""
        sums = (self.k_warps - 1) * self.tokens * self.rows * 4
        return max(self.stages * self.step_bytes(step), sums)

    def blocks(self, m: int, n: int) -> int:
        return math.ceil(m / self.tokens) * math.ceil(n / self.rows) * self.parts

    def clocks(self, m: int, n: int, k: int, step: MidStep, device: Gpu) -> float:
        """Return the clocks of the busiest multiprocessor."""
        busiest = math.ceil(self.blocks(m, n) / device.sms)
        at_once = min(busiest, self._resident(step, device))
        steps = k // step.columns // self.parts
        return busiest * steps * self._step_clocks(step, at_once, device.mid_rows)

    def _resident(self, step: MidStep, device: Gpu) -> int:
        """Return the blocks that a multiprocessor holds."""
        registers = 240 if self.tokens > 64 else 168  # of a thread
        by_registers = device.registers // (32 * self.warps * registers)
        by_memory = device.shared_per_sm // (self.shared_bytes(step) + _KIB)
        return max(1, min(by_registers, by_memory))

    def _step_clocks(self, step: MidStep, at_once: int, rates: MidRows) -> float:
        weights = self.rows * step.columns
        works = (
            weights * self.tokens / (rates.products * 2 // step.x_size),
            weights * step.widening / rates.integers,
            self.step_bytes(step) / rates.copied,
        )
        hidden = rates.hidden if at_once * self.warps >= 8 else rates.hidden_by_one
        late = rates.late_clocks if self.stages == 2 else 0
        rest = (1 - hidden) * (sum(works) - max(works))
        return max(works) + rest + (rates.step_clocks + late) / at_once


def plan(call: MatmulCall) -> MidTile | Reason:
    """Return the plan of a call, or why it has none."""
    if gpu().wgmma or not TOKENS < call.m <= MOST_ROWS or not call.alone or call.plain:
        return Reason("")
    reason = _codes_reason(call) if call.quantized_x else _floats_reason(call)
    if reason is not None:
        return Reason(reason)
    step, n, k = MidStep.of(call), call.n, call.k
    if n % WARP_ROWS:
        return Reason(f"w has N = {n}, not a multiple of {WARP_ROWS}")
    if k % step.columns:
        return Reason(f"w has K = {k}, not a multiple of {step.columns}")
    if n * k * step.w.bits // 8 >= 1 << 32:
        return Reason(f"w [{n}, {k}] has 4 GB or more")
    found = _shortest(call.m, n, k, step, gpu())
    return found or Reason("two steps of a tile need more than shared memory holds")


@functools.lru_cache(maxsize=1024)
def _shortest(m: int, n: int, k: int, step: MidStep, device: Gpu) -> MidTile | None:
    """Return the tile with the shortest time, which layers that are alike ask for again."""

    cost = device.costs[step.family]
    second_launch, by_sums = cost.serial

    def us(tile: MidTile) -> float:
        launches, sums = sum_work(tile, m, n)
        computed = cost.shared[1] * tile.clocks(m, n, k, step, device) / 1e3
        return second_launch * launches + by_sums * sums + computed

    return min(tiles(m, n, k, step, device), key=us, default=None)


def mid_plans() -> list[MidTile]:
    """Return every tile that ``plan`` can return on this GPU."""
    return [
        MidTile(tokens, rows, k_warps, parts, stages)
        for tokens, rows, k_warps, stages in SHAPES
        for parts in PARTS
    ]


def tiles(m: int, n: int, k: int, step: MidStep, device: Gpu) -> Iterator[MidTile]:
    """Yield the tiles that fit a call and shared memory."""
    steps = k // step.columns
    for tile in mid_plans():
        # With 128 rows of x a thread has no registers left to widen 4-bit codes: it would spill.
        spills = step.w.bits == 4 and tile.tokens == 128
        if spills or tile.tokens >= 2 * m or tile.rows > max(n, 64):
            continue
        if steps % tile.parts or (tile.parts > 1 and steps // tile.parts < 4):
            continue
        if tile.shared_bytes(step) <= device.shared_bytes - _KIB:
            yield tile


def sum_work(tile: MidTile, m: int, n: int) -> tuple[float, float]:
    """Return whether there is a second launch, and the millions of sums that pass through it."""
    return (1.0, tile.parts * m * n / 1e6) if tile.parts > 1 else (0.0, 0.0)


def _floats_reason(call: MatmulCall) -> str | None:
    """Why the kernel does not multiply floats of x by w, or None."""
    w = call.weight
    if call.x not in (jnp.bfloat16, jnp.float16):
        return f"x is {call.x.name}, the kernel takes bfloat16 and float16"
    if not w.is_format and w.has_unit:
        return "w has scales in two levels"
    if w.zero is not None and w.codes != jnp.int4:
        return f"w has {w.codes.name} codes with zero points"
    if not w.is_format and (reason := _scales_reason(w)):
        return reason
    step = MidStep.of(call)
    if step.folds and call.x == jnp.float16:
        return "w has groups or floating zeros where x is float16"
    if step.folds and call.out == jnp.float32:
        return "the output would be float32, the kernel rounds scaled weights to bfloat16"
    return None


def _scales_reason(w: StoredWeight) -> str | None:
    if w.codes not in (jnp.int4, jnp.int8, jnp.float8_e4m3fn):
        return f"w has codes of {w.codes.name}"
    if w.scale_kind not in KIND.values():
        return f"w has scales of {w.scale}"
    if w.zero is not None and w.zero not in (jnp.int8, w.scale):
        return f"w.zero is {w.zero} where w.scale is {w.scale}"
    # The lane's 8 columns of a unit have one scale.
    return f"w has groups of {w.group}" if w.group % 8 else None


def _codes_reason(call: MatmulCall) -> str | None:
    """Why the kernel does not multiply codes of x by w, or None."""
    w = call.weight
    if call.x != jnp.int8 or w.codes != jnp.int8:
        return f"x has codes of {call.x.name} and w of {w.codes.name}, the kernel takes int8"
    if call.low_rank is not None:
        return "a low-rank term"
    return _scales_reason(w)

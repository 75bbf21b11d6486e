"""How the kernel of many pairs computes a grouped product: arithmetic only.

The tile is the one that gives the busiest block the least work, by the measured time of a slot of
64 columns.  Pairs fall on experts unevenly, so an expert's last part is counted as half full.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu, lacking, sms, timed_tiles
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.experts.gate import ClampedGate, Gate
from pallas_kernels.matmul.few_rows.plan import is_format
from pallas_kernels.matmul.many_rows.plan import BLOCK_K, SlotGroups, WeightTile
from pallas_kernels.qtensor import FLOAT4, QTensor

AnyTile = TypeVar("AnyTile", bound="Tile")
Weight = jax.Array | jax.ShapeDtypeStruct | QTensor
LEAST_STAGES = 3
_RESERVED = 4 * 1024  # of shared memory, for barriers and the ends of arrays


@dataclasses.dataclass(frozen=True)
class TokenTile:
    """One block's tile and pipeline where the weight is bfloat16: no operand is in registers.

    tokens: 64 for each of two warpgroups.  rows: of w, the N of wgmma.
    cluster: blocks that share (multicast) the weight if their tokens have one expert.
    """

    tokens: int = 128
    rows: int = 256
    stages: int = 4
    sms: int = dataclasses.field(default_factory=sms)
    cluster: ClassVar[int] = 2
    split: ClassVar[int] = 1


Tile = WeightTile | TokenTile


def has_sorted_rows(tile: Tile) -> bool:
    """Whether a kernel before sorts rows of x by expert, so that two blocks can share them."""
    return isinstance(tile, WeightTile) and tile.cluster > 1


def computing_of(tile: Tile) -> int:
    """Warpgroups of a block that multiply."""
    return tile.tokens // 64 if isinstance(tile, TokenTile) else tile.rows // 64


# Results in 16 bits pass through shared memory (``many_pairs_finish_program``).  There are 16 bytes
# more than a row has from one token to the next, for the banks.


def row_stage(gated: bool) -> tuple[int, int]:
    """(tokens, bytes from one to the next) that a warpgroup with 64 rows of w stores at once."""
    return (32, 80) if gated else (16, 144)


def token_stage(tile: TokenTile) -> tuple[int, int]:
    """The same for a warp with 16 tokens."""
    return 8, 2 * min(128, tile.rows // 2) + 16


def stage_bytes(tile: Tile, gated: bool) -> int:
    """Of a warpgroup: those of its four warps, or of two turns."""
    if isinstance(tile, TokenTile):
        return 4 * math.prod(token_stage(tile))
    return 2 * math.prod(row_stage(gated))


@dataclasses.dataclass(frozen=True)
class GroupedTilePlan(Predicted):
    """tile: of one expert's rows and up to ``tile.tokens`` of its pairs for each block of a
    cluster."""

    kernel: ClassVar[str] = "grouped_matmul_tiles_mosaic"
    tile: Tile


@dataclasses.dataclass(frozen=True)
class PairsScheme(SlotGroups):
    """How a weight's values become bfloat16.

    values: "bfloat16", "int8", "int4", "float8_e4m3fn", or float4 by its scales, "e8m0" or "e4m3".
    group: 0 where rows alone have a scale.
    gated: whether an expert's rows are gate, then up, and a result is made of one of each.
    vectors: bytes of a row's scales of groups, and of its zeros.
    """

    values: str
    gated: bool
    vectors: tuple[int, ...] = ()

    @classmethod
    def of(cls, w: Weight, gated: bool) -> PairsScheme:
        if not isinstance(w, QTensor):
            return cls(0, BLOCK_K, "bfloat16", gated)
        if w.scale.shape[-1] == 1 and w.zero is None and w.dtype not in (jnp.int4, FLOAT4):
            return cls(0, BLOCK_K, w.dtype.name, gated)
        values = w.dtype.name
        if w.dtype == FLOAT4:
            values = "e8m0" if w.scale.dtype.name == "float8_e8m0fnu" else "e4m3"
        of_groups = [v for v in (w.scale, w.zero) if v is not None]
        vectors = tuple(v.shape[-1] * v.dtype.itemsize for v in of_groups)
        return cls(w.group_size, BLOCK_K, values, gated, vectors)

    @property
    def bits(self) -> int:
        """Bits of a value of the weight."""
        return {"bfloat16": 16, "int8": 8, "float8_e4m3fn": 8}.get(self.values, 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's scales and zeros of groups."""
        return sum(self.vectors)

    def is_aligned(self, tile: Tile) -> bool:
        """Whether the scales and zeros of up begin at a multiple of 128 bytes, as copies do."""
        rows = self.rows_in_memory(tile) // 2
        return not self.gated or all(rows * size % 128 == 0 for size in self.vectors)

    def rows_in_memory(self, tile: Tile) -> int:
        """Rows of w in a slot.  Those of gate fill a multiple of 64, for ``is_aligned``."""
        if isinstance(tile, TokenTile):
            return tile.rows
        return tile.rows if not self.gated else 2 * (-(-tile.rows // 128) * 64)

    def results(self, tile: Tile) -> int:
        """Results of a pair in a tile."""
        return tile.rows // 2 if self.gated else tile.rows


def inner_gate(gated: Gate | None) -> Gate | None:
    """The gate, if the kernel has it."""
    return gated if isinstance(gated, ClampedGate) or gated in ("silu", "gelu_tanh") else None


def tile_plan(
    x: jax.Array, w: Weight, n_pairs: int, gated: Gate | None
) -> GroupedTilePlan | Reason:
    """The kernel's plan for ``x[..., K]`` and ``w[E, N, K]``, or why it has none."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    gated = inner_gate(gated)
    if reason := _refusal(x, w):
        return Reason(reason)
    scheme = PairsScheme.of(w, gated is not None)
    tile, _ = shortest_tile(w, n_pairs, scheme)
    if tile.stages < LEAST_STAGES:
        return Reason(f"{scheme.row_bytes} bytes of scales a row leave no room for {tile}")
    return GroupedTilePlan(tile)


def _refusal(x: jax.Array, w: Weight) -> str | None:
    _, n, k = w.shape
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel of many pairs takes bfloat16"
    if n % 64 or k % BLOCK_K:
        return f"w has N = {n} and K = {k}, not multiples of 64"
    if not isinstance(w, QTensor):
        return None if w.dtype == jnp.bfloat16 else f"no kernel multiplies bfloat16 by {w.dtype}"
    if w.dtype not in (jnp.int4, jnp.int8, jnp.float8_e4m3fn) and not is_format(w):
        return f"no kernel of many pairs multiplies by w of {w.dtype} codes"
    if not is_format(w) and w.group_size % BLOCK_K:
        return f"w has group size {w.group_size}, not a multiple of {BLOCK_K}"
    if w.zero is not None and w.dtype != jnp.int4:
        return f"no kernel of many pairs takes zeros beside {w.dtype} codes"
    return None


def shortest_tile(w: Weight, n_pairs: int, scheme: PairsScheme) -> tuple[Tile, float]:
    """The tile with the least work, with as many stages as fit, and the microseconds that its
    busiest block computes."""
    if scheme.values == "bfloat16":
        tiles: list[tuple[Tile, float]] = [*timed_tiles("pairs float", WeightTile)]
        tiles += timed_tiles("pairs float by tokens", TokenTile)
    else:
        tiles = [*timed_tiles("pairs codes", WeightTile)]
    if scheme.values in ("e8m0", "e4m3"):
        more = timed_tiles("pairs float4 sorted", WeightTile)
        tiles += [one for one in more if _fills(one[0], w, n_pairs, scheme)]
    found = [(fitted(tile, scheme), us) for tile, us in tiles]
    found = [one for one in found if scheme.is_aligned(one[0])]
    found = [one for one in found if one[0].stages >= LEAST_STAGES] or found[:1]
    timed = [(tile, _busiest_us(tile, us, w, n_pairs, scheme)) for tile, us in found]
    return min(timed, key=lambda one: one[1])


def _fills(tile: Tile, w: Weight, n_pairs: int, scheme: PairsScheme) -> bool:
    n_experts, n, _ = w.shape
    results, card = n // 2 if scheme.gated else n, gpu().experts
    is_long = n_pairs >= card.sorted_fill * n_experts * tile.tokens
    return is_long and results >= card.sorted_tiles * scheme.results(tile)


def chosen_experts(n_experts: int, n_pairs: int) -> float:
    """Experts that some pair has, if each is as likely."""
    return n_experts * (1 - (1 - 1 / n_experts) ** n_pairs)


def _busiest_us(tile: Tile, slot_us: float, w: Weight, n_pairs: int, scheme: PairsScheme) -> float:
    n_experts, n, k = w.shape
    hit = chosen_experts(n_experts, n_pairs)
    parts = max(hit, n_pairs / tile.tokens + hit / 2)
    results, card = n // 2 if scheme.gated else n, gpu().experts
    rows_us, end_us, across = 0.0, 0.0, scheme.results(tile)
    if isinstance(tile, TokenTile):
        is_shared = n_pairs >= tile.cluster * tile.tokens * hit
        slot_us = slot_us if is_shared else card.alone_us
        parts, end_us = parts / tile.cluster, card.end_us
    elif has_sorted_rows(tile):
        across, rows_us = across * tile.cluster, 1e6 * 2 * n_pairs * k / card.sort_rate
    rounds = math.ceil(parts * math.ceil(results / across) / (sms() // tile.cluster))
    return rounds * (k / BLOCK_K * slot_us + end_us) + rows_us


def fitted(tile: AnyTile, scheme: PairsScheme) -> AnyTile:
    """The tile with as many stages as fit."""
    rows = scheme.rows_in_memory(tile)
    slot = BLOCK_K * (2 * tile.tokens + rows * scheme.bits // 8)
    used = 2 * rows * scheme.row_bytes + computing_of(tile) * stage_bytes(tile, scheme.gated)
    stages = (gpu().shared_bytes - _RESERVED - used) // slot
    return dataclasses.replace(tile, stages=min(tile.stages, stages))

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
from pallas_kernels.matmul.many_rows.plan import BLOCK_K, WeightTile
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor

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
    sms: int = dataclasses.field(default_factory=sms, repr=False)
    cluster: ClassVar[int] = 2
    split: ClassVar[int] = 1


Tile = WeightTile | TokenTile


def has_sorted_rows(tile: Tile) -> bool:
    """Whether a kernel before sorts rows of x by expert, so that two blocks can share them."""
    return isinstance(tile, WeightTile) and tile.cluster > 1


def computing_of(tile: Tile) -> int:
    """Warpgroups of a block that multiply."""
    return tile.tokens // 64 if isinstance(tile, TokenTile) else tile.rows // 64


# Results in 16 bits pass through shared memory (``finish_program``).  There are 16 bytes
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

    def representative(self) -> GroupedTilePlan:
        return GroupedTilePlan(dataclasses.replace(self.tile, stages=0))


def in_groups(weight: StoredWeight) -> bool:
    """Whether scales multiply weights: those of groups of columns, and all of 4 bits."""
    by_rows = weight.n_groups == 1 and weight.zero is None and weight.bits > 4
    return not (weight.plain or by_rows)


def vector_bytes(weight: StoredWeight) -> tuple[int, ...]:
    """Bytes of a row's scales of groups, and of its zeros."""
    if not in_groups(weight):
        return ()
    zeros = weight.n_groups * weight.zero_bytes
    return (weight.scale_row, zeros) if zeros else (weight.scale_row,)


def is_aligned(tile: Tile, weight: StoredWeight, gated: bool) -> bool:
    """Whether scales and zeros of a tile's rows, of gate or of up, fill whole units of 128 bytes.

    A copy begins at such a multiple.  A barrier counts as many bytes for each of its 128 threads.
    """
    rows = rows_in_memory(tile, gated) // (1 + gated)
    return all(rows * size % 128 == 0 for size in vector_bytes(weight))


# Under a gate an expert's rows are gate, then up, and a result is made of one of each.


def rows_in_memory(tile: Tile, gated: bool) -> int:
    """Rows of w in a slot.  Those of gate fill a multiple of 64, for ``is_aligned``."""
    if isinstance(tile, TokenTile):
        return tile.rows
    return 2 * (-(-tile.rows // 128) * 64) if gated else tile.rows


def results(tile: Tile, gated: bool) -> int:
    """Results of a pair in a tile."""
    return tile.rows // 2 if gated else tile.rows


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
    tile, _ = shortest_tile(w, n_pairs, gated is not None)
    if tile.stages < LEAST_STAGES:
        size = sum(vector_bytes(StoredWeight.of(w)))
        return Reason(f"{size} bytes of scales a row leave no room for {tile}")
    return GroupedTilePlan(tile)


def _refusal(x: jax.Array, w: Weight) -> str | None:
    _, n, k = w.shape
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernel of many pairs takes bfloat16"
    if n % 64 or k % BLOCK_K:
        return f"w has N = {n} and K = {k}, not multiples of 64"
    if not isinstance(w, QTensor):
        return None if w.dtype == jnp.bfloat16 else f"no kernel multiplies bfloat16 by {w.dtype}"
    if w.dtype not in (jnp.int4, jnp.int8, jnp.float8_e4m3fn) and not StoredWeight.of(w).is_format:
        return f"no kernel of many pairs multiplies by w of {w.dtype} codes"
    if not StoredWeight.of(w).is_format and w.group_size % BLOCK_K:
        return f"w has group size {w.group_size}, not a multiple of {BLOCK_K}"
    if w.zero is not None and w.dtype != jnp.int4:
        return f"no kernel of many pairs takes zeros beside {w.dtype} codes"
    return None


def shortest_tile(w: Weight, n_pairs: int, gated: bool) -> tuple[Tile, float]:
    """The tile with the least work, with as many stages as fit, and the microseconds that its
    busiest block computes."""
    weight = StoredWeight.of(w)
    if weight.plain:
        tiles: list[tuple[Tile, float]] = [*timed_tiles("pairs float", WeightTile)]
        tiles += timed_tiles("pairs float by tokens", TokenTile)
    else:
        tiles = [*timed_tiles("pairs codes", WeightTile)]
    if weight.float4:
        more = timed_tiles("pairs float4 sorted", WeightTile)
        tiles += [one for one in more if _fills(one[0], w, n_pairs, gated)]
    found = [(fitted(tile, weight, gated), us) for tile, us in tiles]
    found = [one for one in found if is_aligned(one[0], weight, gated)]
    found = [one for one in found if one[0].stages >= LEAST_STAGES] or found[:1]
    timed = [(tile, _busiest_us(tile, us, w, n_pairs, gated)) for tile, us in found]
    return min(timed, key=lambda one: one[1])


def _fills(tile: Tile, w: Weight, n_pairs: int, gated: bool) -> bool:
    n_experts, n, _ = w.shape
    n_out, card = n // 2 if gated else n, gpu().experts
    is_long = n_pairs >= card.sorted_fill * n_experts * tile.tokens
    return is_long and n_out >= card.sorted_tiles * results(tile, gated)


def chosen_experts(n_experts: int, n_pairs: int) -> float:
    """Experts that some pair has, if each is as likely."""
    return n_experts * (1 - (1 - 1 / n_experts) ** n_pairs)


def _busiest_us(tile: Tile, slot_us: float, w: Weight, n_pairs: int, gated: bool) -> float:
    n_experts, n, k = w.shape
    hit = chosen_experts(n_experts, n_pairs)
    parts = max(hit, n_pairs / tile.tokens + hit / 2)
    n_out, card = n // 2 if gated else n, gpu().experts
    rows_us, end_us, across = 0.0, 0.0, results(tile, gated)
    if isinstance(tile, TokenTile):
        is_shared = n_pairs >= tile.cluster * tile.tokens * hit
        slot_us = slot_us if is_shared else card.alone_us
        parts, end_us = parts / tile.cluster, card.end_us
    elif has_sorted_rows(tile):
        across, rows_us = across * tile.cluster, 1e6 * 2 * n_pairs * k / card.sort_rate
    rounds = math.ceil(parts * math.ceil(n_out / across) / (sms() // tile.cluster))
    return rounds * (k / BLOCK_K * slot_us + end_us) + rows_us


def fitted(tile: AnyTile, weight: StoredWeight, gated: bool) -> AnyTile:
    """The tile with as many stages as fit."""
    rows = rows_in_memory(tile, gated)
    slot = BLOCK_K * (2 * tile.tokens + rows * weight.bits // 8)
    used = 2 * rows * sum(vector_bytes(weight)) + computing_of(tile) * stage_bytes(tile, gated)
    stages = (gpu().shared_bytes - _RESERVED - used) // slot
    return dataclasses.replace(tile, stages=min(tile.stages, stages))

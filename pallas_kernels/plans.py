"""The plans that dispatch can return, listed by op and card.

A planner chooses among the tiles of its tables.  The sizes M, N and K enter when a call is divided
by its plan, so that the plans of a product are few.  Plans also hold numbers that follow from
sizes: passes over a weight, parts of K, segments of a row, tokens of a chunk, rows, or an expert's
N and K.  ``stands_for`` sets these numbers to representative ones, and the lists have one plan for
each such class.  A class is one choice, and its kernel is specialized to a call: to dtypes, to what
is fused, to widths of heads, and to whether tiles divide the sizes.  Loops over one row are also
unrolled: over a token's K or columns, a head's channels, the k of a top-k, and parts that are
merged.  Random calls at sizes of real models prove these, beside the record of each class.

``tests/golden/plans`` records what proves each plan, and a test compares the record with these
lists.  Dispatch chooses no plan that no GPU of the card's architecture has run (``runs.json``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.plan import plan as attention_plan
from pallas_kernels.attention.rope_cache import RopeCachePlan
from pallas_kernels.attention.tile import TILE
from pallas_kernels.device import gpu, planned_for, timed_tiles
from pallas_kernels.dispatch import Plan, Reason, named_plan, stands_for
from pallas_kernels.experts import summed_plan
from pallas_kernels.experts.best import MOST as MOST_SCORES
from pallas_kernels.experts.many_pairs.plan import GroupedTilePlan, Tile, TokenTile
from pallas_kernels.experts.mixture import MixturePlan
from pallas_kernels.experts.plan import MOST_PAIRS, GroupedRowPlan, row_plan
from pallas_kernels.experts.route_plan import BLOCKS, WARPS, BestPlan, RoutePlan, SigmoidRoutePlan
from pallas_kernels.experts.summed_plan import GroupedSumPlan
from pallas_kernels.latent import plan as latent
from pallas_kernels.latent.chosen import ChosenPlan
from pallas_kernels.latent.step_plan import LatentStepPlan
from pallas_kernels.matmul.few_rows.plan import row_plans, tile_plans
from pallas_kernels.matmul.many_rows.plan import (
    WeightTile,
    gated_tile,
    pair_plans,
    weight_plans,
)
from pallas_kernels.matmul.mid_rows.plan import mid_plans
from pallas_kernels.qtensor import QTensor
from pallas_kernels.recurrence.plan import WIDTHS
from pallas_kernels.rows.plan import MAX_WIDTH, RowOp, divided

S: Any = jax.ShapeDtypeStruct  # stands for an array


def _classes(found: Iterable[Plan | Reason]) -> list[Plan]:
    """Return the classes of planners' answers, each once."""
    named = [plan for plan in map(named_plan, found) if plan is not None]
    return list(dict.fromkeys(map(stands_for, named)))


# --- products -------------------------------------------------------------------------------------


def _quantized_matmul() -> Sequence[Plan]:
    many = [*pair_plans(), *weight_plans()] if gpu().wgmma else mid_plans()
    return _classes([*row_plans(), *tile_plans(), *many])


def _gated_matmul() -> Sequence[Plan]:
    return [gated_tile(rows) for rows in (64, 128)] if gpu().wgmma else []


def _grouped_matmul() -> Sequence[Plan]:
    def rows() -> Iterator[Plan | Reason]:
        n_experts = 2
        codes = (jnp.int4, 128), (jnp.int4, 32), (jnp.int8, None), (jnp.float8_e4m3fn, 128)
        sizes = itertools.product((64, 1 << 17), (2048, 3072, 10240), (1, MOST_PAIRS))
        for (n, k, pairs), gate in itertools.product(sizes, (None, "silu")):
            x, shape = S((1, k), jnp.bfloat16), (n_experts, n, k)
            yield row_plan(x, S(shape, jnp.bfloat16), pairs, gate)
            for dtype, group in codes:
                scale = S((*shape[:2], k // (group or k)), jnp.bfloat16)
                yield row_plan(x, QTensor(S(shape, dtype), scale), pairs, gate)
            for scale, group, unit in (
                (jnp.float8_e8m0fnu, 32, None),
                (jnp.float8_e4m3fn, 16, S((*shape[:2], 1), jnp.float32)),
            ):
                q = S(shape, jnp.float4_e2m1fn)
                w = QTensor(q, S((*shape[:2], k // group), scale), unit=unit)
                yield row_plan(x, w, pairs, gate)

    few = _classes(rows())
    if not gpu().wgmma:
        return few
    names = "pairs codes", "pairs float", "pairs float4 sorted"
    tiles: list[Tile] = [tile for name in names for tile, _ in timed_tiles(name, WeightTile)]
    tiles += [tile for tile, _ in timed_tiles("pairs float by tokens", TokenTile)]
    many = [GroupedTilePlan(dataclasses.replace(tile, sms=gpu().sms)) for tile in tiles]
    sums = [
        GroupedSumPlan(128, 2, 1, 1, partial, warps, summed_plan.MOST_AHEAD, gpu().sms)
        for warps in summed_plan.WARPS
        for partial in (False, True)
    ]
    return [*few, *_classes(many), *sums]


def _shared_mixture() -> Sequence[Plan]:
    found = _grouped_matmul()
    rows = (p for p in found if isinstance(p, GroupedRowPlan) and p.row.bits == 4)
    sums = [p for p in found if isinstance(p, GroupedSumPlan) and not p.partial]
    return [MixturePlan(*pair) for pair in itertools.product(rows, sums)]


def _norm_and_route() -> Sequence[Plan]:
    kinds = itertools.product((RoutePlan, SigmoidRoutePlan), range(1, WARPS + 1))
    return _classes(kind(1, BLOCKS * rows, 1024) for kind, rows in kinds) if gpu().clusters else []


# --- attention ------------------------------------------------------------------------------------


def _direct() -> Iterator[Plan | Reason]:
    from pallas_kernels.attention import direct

    capacities = [TILE * n << i for n in (1, 3) for i in range(12)]
    for h, batch, kv_heads in itertools.product((64, 256), (1, 2), (1, 2, 4, 8, 16, 32, 64)):
        for capacity, group in itertools.product(capacities, (1, 5, 8)):
            cache = S((batch, capacity, kv_heads, h), jnp.bfloat16)
            q = S((batch, kv_heads * group, h), jnp.bfloat16)
            yield direct.plan((q, cache, kv_heads * group))


def _decode_attention() -> Sequence[Plan]:
    groups = 1, 8, 9, 16, 17, 24, 32, 40, 48, 64
    shapes = itertools.product((1, 8, 64, 512), (64, 1024, 4096, 65536), (1, 2, 3, 8))

    def many() -> Iterator[Plan | Reason]:
        for (batch, capacity, kv_heads), h in itertools.product(shapes, (64, 128, 256)):
            shape = batch, capacity, kv_heads, h
            scale8 = S((*shape[:3], 1), jnp.float32)
            scale4 = S((*shape[:3], h // 64), jnp.float16)
            caches = (
                S(shape, jnp.bfloat16),
                QTensor(S(shape, jnp.int8), scale8),
                QTensor(S(shape, jnp.int4), scale4, scale4),
            )
            for cache, group, tokens in itertools.product(caches, groups, ((), (2,))):
                n = kv_heads * group
                yield attention_plan((S((batch, *tokens, n, h), jnp.bfloat16), cache, n))

    return _classes(itertools.chain(_direct(), many()))


_LATENTS = [
    latent.LatentPlan(latent.TILE, few=latent.FEW_ROWS),
    latent.LatentPlan(latent.TILE),
    latent.LatentPlan(latent.TILE, paired=True),
]


def _latent_attention() -> Sequence[Plan]:
    kinds, few = ("int8", "float8_e4m3fn"), latent.MOST_FEW_ROWS
    codes = [latent.LatentPlan(latent.TILE, few, codes=kind) for kind in kinds]
    return _LATENTS + codes if gpu().wgmma else []


def _chosen_latent_attention() -> Sequence[Plan]:
    few = ChosenPlan(latent.TILE, latent.FEW_ROWS)
    return [few, ChosenPlan(latent.ROUND)] if gpu().wgmma else []


def _latent_step() -> Sequence[Plan]:
    wider = latent.LatentPlan(latent.TILE, latent.MOST_FEW_ROWS)
    return [LatentStepPlan(plan) for plan in (*_LATENTS, wider)] if gpu().wgmma else []


# --- recurrences ----------------------------------------------------------------------------------


def _gla() -> Sequence[Plan]:
    from pallas_kernels.gla.kernel import GlaPlan

    return [GlaPlan(segments) for segments in (1, 2)] if gpu().wgmma else []


def _gla_step() -> Sequence[Plan]:
    from pallas_kernels.gla.step_kernel import divided

    sizes = itertools.product((1, 1 << 16), WIDTHS, range(32, 1025, 32))
    return _classes(divided(batch, 1, dk, dv) for batch, dk, dv in sizes)


def _gated_delta() -> Sequence[Plan]:
    from pallas_kernels.gated_delta.kernel import DeltaPlan

    pairs = itertools.product((1, 2), (False, True))
    return [DeltaPlan(*pair) for pair in pairs] if gpu().wgmma else []


def _gated_delta_step() -> Sequence[Plan]:
    from pallas_kernels.gated_delta.step_kernel import DeltaStepPlan

    return [DeltaStepPlan(columns) for columns in (64, 128)]


def _ssd() -> Sequence[Plan]:
    from pallas_kernels.ssd.kernel import SSDPlan

    return [SSDPlan(segments) for segments in (1, 2)] if gpu().wgmma else []


# --- rows -----------------------------------------------------------------------------------------


def _rows(form: str, out: str, given: bool = False) -> list[Plan]:
    widths = itertools.product(range(8, MAX_WIDTH + 1, 8), (1, 65, 1024))
    ops = ((RowOp(form, width, "bf16", out, given=given), rows) for width, rows in widths)
    # Plans of one form with equal threads and parts are one class.
    found = {
        (plan.threads, plan.split, plan.ring, plan.blocks): plan
        for plan in itertools.starmap(divided, ops)
    }
    return _classes(found.values())


def _swiglu() -> Sequence[Plan]:
    return list(dict.fromkeys([*_rows("gate", "s8"), *_rows("gate", "s8", given=True)]))


OPS: dict[str, Callable[[], Sequence[Plan]]] = {
    "quantized_matmul": _quantized_matmul,
    "gated_matmul": _gated_matmul,
    "grouped_matmul": _grouped_matmul,
    "shared_mixture": _shared_mixture,
    "best": lambda: [BestPlan(1, n, 1) for n in range(32, MOST_SCORES + 1, 32)],
    "norm_and_route": _norm_and_route,
    "decode_attention": _decode_attention,
    "latent_attention": _latent_attention,
    "chosen_latent_attention": _chosen_latent_attention,
    "latent_step": _latent_step,
    "rope_and_attend": lambda: _classes(_direct()),
    "rope_and_write": lambda: [RopeCachePlan()],
    "gla": _gla,
    "gla_step": _gla_step,
    "gated_delta": _gated_delta,
    "gated_delta_step": _gated_delta_step,
    "ssd": _ssd,
    "rms_norm": lambda: _rows("norm", "s8"),
    "swiglu": _swiglu,
    "quantize_tokens": lambda: _rows("copy", "s8"),
}


@functools.cache
def plans(op: str, card: str) -> tuple[Plan, ...]:
    """Return every plan that dispatch can return for an op on a card, or one of each class.

    Parameters
    ----------
    op
        A key of ``OPS``.
    card
        The name of a card in ``cards.architecture.CARDS``.
    """
    with planned_for(card):
        return tuple(OPS[op]())

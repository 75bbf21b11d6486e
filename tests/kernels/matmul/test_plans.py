"""Properties of every plan of a product, over random shapes: a launch fits the SM's shared memory
and covers the product, no plan that is left has a shorter predicted time, and the kernel is
launched as it was planned.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels import fit
from pallas_kernels.device import gpu_named, timed_tiles
from pallas_kernels.dispatch import Reason, named_plan
from pallas_kernels.matmul import choice, predict
from pallas_kernels.matmul.call import MatmulCall, Static
from pallas_kernels.matmul.few_rows import plan as few_rows
from pallas_kernels.matmul.few_rows.plan import RowDivision, RowPlan, TileDivision, TilePlan
from pallas_kernels.matmul.many_rows import plan as many_rows
from pallas_kernels.matmul.many_rows.plan import PairTile, WeightTile

H200 = gpu_named("NVIDIA H200")
SHARED_OF_A_BLOCK = 227 * 1024  # Hopper's, with barriers
BARRIER_BYTES = 8


def random_cases(seed: int, count: int) -> list[fit.FitCase]:
    """The benchmark's, and every sixth one with as many rows as a prefill has."""
    draw = random.Random(seed)
    return [
        dataclasses.replace(case, m=draw.randint(257, 9000), fused="") if i % 6 == 5 else case
        for i, case in enumerate(fit.cases(seed, count))
    ]


CASES = random_cases(39, 240)


def plans_of(case: fit.FitCase) -> list[Any]:
    found = (named_plan(plan) for plan in choice.plans(case.call()))
    return [plan for plan in found if plan is not None]


def operands(call) -> tuple[Any, dict[str, Any]]:
    """Shapes of x, and of what is fused around the product."""
    x: Any = jax.ShapeDtypeStruct((call.m, call.k), call.x)
    if call.quantized_x:
        x = fit.QTensor(x, jax.ShapeDtypeStruct((call.m, 1), jnp.float32))
    shapes = {"gamma": (call.k,), "residual": (call.m, call.n), "pending": (call.m, call.k)}
    dtypes = {"gamma": call.norm, "residual": call.residual, "pending": call.pending}
    return x, {
        name: jax.ShapeDtypeStruct(shapes[name], dtype)
        for name, dtype in dtypes.items()
        if dtype is not None
    }


def bytes_of(scratch: Any) -> int:
    """Shared memory that one entry of a launch's scratch takes; views of one memory count once."""
    if isinstance(scratch, plgpu.RefUnion):
        return max(map(bytes_of, scratch.refs))
    if isinstance(scratch, plgpu.Barrier | plgpu.ClusterBarrier):
        return BARRIER_BYTES * int(np.prod(scratch.num_barriers))
    bits = 4 if scratch.dtype == jnp.int4 else 8 * jnp.dtype(scratch.dtype).itemsize
    return math.prod(scratch.shape) * bits // 8


@pytest.fixture
def launched(monkeypatch) -> Callable[..., dict[str, Any]]:
    """Return what the kernel of a call and its plan is launched with; nothing is lowered."""
    launches: list[dict[str, Any]] = []

    def kernel(body, *, out_type, **how):
        launches.append(how)
        return lambda *operands: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    def run(call, plan):
        launches.clear()
        x, fused = operands(call)
        static = Static(call.out, call, plan)
        with jax.disable_jit():  # else a trace without the kernel would be kept
            product = functools.partial(choice.run, static)
            jax.eval_shape(product, x, call.w, call.work(**fused))
        (launch,) = launches
        return launch

    monkeypatch.setattr(plgpu, "kernel", kernel)
    return run


def divisions_of(case: fit.FitCase) -> list[Any]:
    return [plan.divide(case.call()) for plan in plans_of(case)]


def blocks_of(plan: Any) -> int:
    if isinstance(plan, RowDivision):
        return plan.blocks
    if isinstance(plan, TileDivision):
        return plan.clusters * plan.split
    size = plan.cluster * plan.split
    return plan.sms // size * size


def w4a8(m, n, k, out, code="int8", zero=False) -> MatmulCall:
    """Of 8-bit codes by int4 in groups of 128 columns with scales of bfloat16."""
    shape, groups = jax.ShapeDtypeStruct, (n, k // 128)
    zeros = shape(groups, jnp.int8) if zero else None
    w = fit.QTensor(shape((n, k), jnp.int4), shape(groups, jnp.bfloat16), zeros)
    return MatmulCall(m, jnp.dtype(code), w, jnp.dtype(out), quantized_x=True)


# The first two asked for 232,592 of 232,448 bytes, the others for copies of 832 bytes.
W4A8 = [
    w4a8(200, 5120, 17920, "float16"),
    w4a8(200, 5120, 17920, "bfloat16", zero=True),
    w4a8(416, 5120, 34816, "bfloat16"),
    w4a8(2522, 5120, 17920, "bfloat16", "float8_e4m3fn"),
    w4a8(8192, 3200, 28160, "bfloat16", "float8_e4m3fn", zero=True),
    w4a8(8191, 27648, 5120, "bfloat16"),
]


@pytest.mark.parametrize("call", W4A8, ids=lambda call: f"{call.m}-{call.n}-{call.k}-{call.x}")
def test_codes_by_int4_fit_in_whole_copies(call, launched):
    """The plan's bytes are those of the launch, or more where a row has no scale or no bias."""
    plan = many_rows.plan(call)
    sizes = list(map(bytes_of, launched(call, plan)["scratch_types"]))
    taken = sum(size if size < 128 else -(-size // 1024) * 1024 for size in sizes)
    row_bytes = many_rows._stored_bytes(call.codes, plan.split) if plan.stored else ()
    counted = plan.shared_bytes(call, plan.stages, row_bytes)
    assert taken <= counted <= SHARED_OF_A_BLOCK and counted - taken < 3 * 1024
    assert 4 * plan.tokens % 128 == 0  # of the scales of a tile's tokens


@pytest.mark.core
def test_a_launch_fits_and_is_what_was_planned(launched):
    kinds = set()
    for case in CASES:
        call = case.call()
        for chosen in plans_of(case):
            plan, launch = chosen.divide(call), launched(call, chosen)
            sizes = list(map(bytes_of, launch["scratch_types"]))
            assert sum(sizes) <= SHARED_OF_A_BLOCK, (case, plan)
            blocks = math.prod(launch["grid"]) * math.prod(launch["cluster"])
            of_an_sm = max(1, few_rows.WARPS // plan.warps) if isinstance(plan, RowDivision) else 1
            assert blocks == blocks_of(plan) <= H200.sms * of_an_sm, (case, plan)
            if isinstance(plan, RowDivision | TileDivision):
                assert launch["kernel_name"] == plan.kernel.removesuffix("_mosaic")
                assert sizes == plan.scratch_sizes(normed=call.norm is not None)
            else:
                assert launch["cluster"] == (plan.cluster, plan.split)
                weight = isinstance(plan, WeightTile)
                rows = plan.tokens * plan.pieces if weight else plan.m
                ring = launch["scratch_types"][0].refs[0].shape
                assert math.prod(ring[:-1]) == plan.stages * rows, (case, plan)
            kinds.add(type(chosen))
    assert kinds == {RowPlan, TilePlan, PairTile, WeightTile}


def covers(plan: Any, call) -> bool:
    """Whether every product of the call is some block's, and some warp's."""
    if isinstance(plan, RowDivision):
        in_order = [chunk for group in plan.groups for chunk in group]
        return (
            in_order == list(range(plan.chunks))
            and plan.k == call.k
            and 0 <= plan.chunks * 32 * plan.per_load - call.k <= call.k // 8
            and plan.units * plan.rows == call.n
            and plan.rounds * plan.blocks * plan.warps >= plan.units
        )
    if isinstance(plan, TileDivision):
        parts = 2 if plan.pairs else 1  # a tile of gate and that of up stay together
        over = plan.split * plan.warps * plan.k_warp - call.k
        return (
            plan.per % parts == plan.batch % parts == 0
            and 1 <= plan.batch <= plan.per
            and plan.clusters * plan.per * 16 >= call.n > plan.clusters * (plan.per - parts) * 16
            and plan.clusters <= few_rows.clusters_at_once()[plan.split]
            and (0 <= over < plan.k_warp if plan.resident else over == 0)
        )
    if isinstance(plan, WeightTile):
        return plan.stages >= 2 and plan.tokens >= min(call.m, 32) and plan.divides(call.k)
    return plan.stages >= 2 and (plan.split == 1 or call.m <= 64)


def test_a_plan_covers_the_product():
    for case in CASES:
        for plan in divisions_of(case):
            assert covers(plan, case.call()), (case, plan)


def neighbours(plan: Any, call) -> list[Any]:
    """Plans that the planner left: fewer clusters, other tiles of its tables."""
    if isinstance(plan, RowPlan):
        return [dataclasses.replace(plan, sms=plan.sms // 2)]
    if isinstance(plan, TilePlan):
        fewer = plan.clusters // 2
        return [dataclasses.replace(plan, clusters=fewer)] if fewer else []
    if isinstance(plan, PairTile):
        if call.m <= 64:
            return []
        table = timed_tiles(f"pair {'int8' if call.x == jnp.int8 else 'float8'}", PairTile)
        return [dataclasses.replace(tile, promote=plan.promote) for tile, _ in table]
    if call.m <= 64 or call.quantized_x:
        return []
    tiles = [tile for tile, _ in timed_tiles("weight", WeightTile) if tile.divides(call.k)]
    return [many_rows.weight_plan(call, tile) for tile in tiles]


SLACK = 1.3  # of the tables of tiles, which are coarser than the predicted times


def test_no_neighbour_is_predicted_to_be_much_shorter():
    compared = 0
    for case in CASES:
        call = dataclasses.replace(case.call(), m=min(case.m, H200.products.fitted_rows))
        for plan in (named_plan(found) for found in choice.plans(call)):
            if plan is None:
                continue
            us = predict.kernel_us(plan, call)
            for other in neighbours(plan, call):
                compared += 1
                slack = 1.0 if isinstance(plan, RowPlan | TilePlan) else SLACK
                assert us <= slack * predict.kernel_us(other, call), (case, plan, other)
    assert compared > 200


@pytest.mark.core
def test_the_shortest_predicted_time_is_chosen():
    """Among the kernels that have a plan, and XLA's form."""
    kernels = set()
    for case in CASES:
        call = case.call()
        found = choice.plan(call)
        free = [plan for plan in choice.plans(call) if not isinstance(plan, Reason)]
        if not free:
            continue
        times = {plan: predict.kernel_us(plan, call) for plan in free}
        xla = predict.xla_us(call)
        best = named_plan(found)
        assert best is not None and best.predicted_us == min(times.values()), case
        assert best.xla_us == xla
        assert isinstance(found, Reason) == (best.predicted_us > xla), case
        if isinstance(found, Reason):
            assert f"XLA's form is predicted to take {xla:.1f} us" in found.text
        kernels.add(best.kernel if found is best else "xla")
    assert len(kernels) == 5


@pytest.mark.parametrize(
    ("rows", "width"), [(2048, 16), (8192, 16), (5632, 11), (11264, 11), (25 * 256, 16)]
)
def test_an_fp8_snake_s_parts_are_equally_wide_where_they_can_be(rows, width):
    tile = many_rows.pair_tile(rows, 2048, 8192, jnp.float8_e4m3fn).in_even_snakes(rows)
    tiles = rows // (tile.m * tile.cluster)
    assert tile.width == width
    assert tiles <= 16 or tiles % width == 0 or tiles == 25

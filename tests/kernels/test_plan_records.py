"""Every plan that dispatch can return is listed, and the record has its proofs.

On a GPU each plan runs at its smallest and at an odd shape, in parts that a short lease can hold:

    pytest -m plans -n 12 --dist=load --part 1/4 --runs FOLDER tests/kernels/test_plan_records.py
    python -m tests.golden.make_plans merge FOLDER/*.jsonl
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.architecture import CARDS, OTHER_JAX
from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason, hopper_reason, named_plan
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import Static
from pallas_kernels.plans import OPS, plans, stands_for
from tests.golden import make_plans
from tests.helpers import plan_cases, random_products
from tests.helpers.lowering import kernels_in
from tests.helpers.matmul_cases import BOUNDS, error, wide
from tests.helpers.random_calls import DRAWERS
from tests.helpers.random_products import draw_product

RECORDED = [card for card in CARDS if make_plans.path_of(card).exists()]
LISTED = (
    "NVIDIA H200",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA B200",
)
MOST_PLANS = 400  # of an op on an H200
UNPROVEN = json.loads(make_plans.UNPROVEN.read_text())


def names_of(card: str) -> set[str]:
    return {str(plan) for plan in plans("quantized_matmul", card)}


@pytest.mark.parametrize("card", LISTED)
@pytest.mark.parametrize("op", OPS)
def test_names_tell_plans_apart(op, card):
    found = plans(op, card)
    assert len({str(plan) for plan in found}) == len(set(found)) == len(found)
    assert all(stands_for(plan) == plan for plan in found)
    if card == "NVIDIA H200":
        assert 0 < len(found) <= MOST_PLANS


@pytest.mark.parametrize("card", LISTED)
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_random_calls_take_listed_plans(card, seed):
    """Of a product, whatever stands around it, at sizes of real models and odd ones."""
    draw, names = random.Random(seed), names_of(card)
    taken = set()
    with planned_for(card):
        for _ in range(200 if seed == 1 else 3000):
            call = draw_product(draw)
            found = choice.plan(call)
            plan = named_plan(found)
            if plan is not None:
                assert str(plan) in names, call
                taken.add(type(plan))
    assert len(taken) >= 3


@pytest.mark.parametrize("card", LISTED)
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_random_calls_of_other_ops_take_listed_plans(card, seed):
    """Each op has the same number of calls, at sizes of real models and odd ones."""
    draw, n_planned = random.Random(seed), 0
    with planned_for(card):
        for op, draw_call in DRAWERS.items():
            for _ in range(3 if seed == 1 else 80):
                call = draw_call(draw)
                if (plan := named_plan(call.find())) is not None:
                    n_planned += 1
                    assert stands_for(plan) in plans(op, card), call
    assert n_planned >= len(DRAWERS)


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="kernels of other GPUs need jax 0.12")
@pytest.mark.parametrize("op", DRAWERS)
@pytest.mark.parametrize("count", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_random_calls_of_other_ops_are_lowered(op, count):
    draw = random.Random(count)
    with planned_for("NVIDIA H200"):
        while count:
            call = DRAWERS[op](draw)
            if named_plan(call.find()) is None:
                continue
            count -= 1
            traced = jax.jit(call.function).trace(*call.operands)
            assert kernels_in(traced.lower(lowering_platforms=("cuda",)).as_text()), call


def drawn(draw: random.Random, count: int, most: int) -> Iterator[tuple[Any, Any]]:
    """Yield calls that have a plan, and plans; most: values of w."""
    while count:
        call = draw_product(draw)
        plan = named_plan(choice.plan(call)) if call.n * call.k <= most else None
        if plan is not None:
            count -= 1
            yield call, plan


def computed(plan: Any, call: Any, x: Any, w: Any, around: dict[str, Any]) -> Any:
    return choice.run(Static(call.out, call, plan), x, w, call.work(**around))


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="kernels of other GPUs need jax 0.12")
@pytest.mark.parametrize("count", [8, pytest.param(600, marks=pytest.mark.slow)])
def test_random_calls_are_lowered(count):
    with planned_for("NVIDIA H200"):
        for call, plan in drawn(random.Random(count), count, 1 << 31):
            f = jax.jit(functools.partial(computed, plan, call))
            text = f.trace(*random_products.shapes_of(call)).lower(lowering_platforms=("cuda",))
            assert kernels_in(text.as_text())


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="the record is of jax >= 0.12")
@pytest.mark.parametrize("card", RECORDED)
def test_every_plan_has_its_proofs(card):
    """``tests/golden/make_plans.py`` makes them."""
    record = make_plans.load(card)["plans"]
    assert set(record) == names_of(card)
    for name, proofs in record.items():
        assert proofs.keys() >= {"lowered", "assembled", "emulated"}, name
        if not isinstance(proofs["emulated"], str):
            assert proofs["emulated"]["error"] <= BOUNDS["bfloat16"][0], name
    runs = {name for name, proofs in record.items() if "run" in proofs}
    assert set(UNPROVEN.get(card, ())) == (set(record) - runs if runs else set())


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="the record is of jax >= 0.12")
@pytest.mark.parametrize("card", RECORDED)
@pytest.mark.parametrize("step", [45, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_are_lowered_as_recorded(card, step):
    record = make_plans.load(card)
    if record["jax"] != jax.__version__:
        pytest.skip(f"the record is of jax {record['jax']}")
    with planned_for(card):
        for plan in plans("quantized_matmul", card)[::step]:
            recorded = record["plans"][str(plan)]["lowered"]
            assert make_plans.hashes_of(plan) == recorded, (
                f"{plan} is lowered to other modules: python -m tests.golden.make_plans lower --all"
            )


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="older ones run no kernel")
def test_a_plan_that_no_gpu_ran_is_not_chosen(monkeypatch):
    class Card:
        platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"

    plan = plans("quantized_matmul", "NVIDIA H200")[0]
    monkeypatch.setattr(dispatch, "device_of", lambda operands: Card())
    monkeypatch.setattr(dispatch, "untested_jax", lambda: None)
    assert dispatch.own_plan(lambda: plan) is plan
    monkeypatch.setattr(dispatch, "_unproven", lambda: {"NVIDIA H200": [str(plan)]})
    assert dispatch.own_plan(lambda: plan) is None
    found = dispatch._own_answer(lambda: plan, None, ())
    assert isinstance(found, Reason) and "has not been run on NVIDIA H200" in found.text
    assert found.plan is plan


# --- on a GPU ------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "own_plan" in metafunc.fixturenames:
        part, parts = map(int, metafunc.config.getoption("--part").split("/"))
        listed = [] if hopper_reason() else plans("quantized_matmul", jax.devices()[0].device_kind)
        metafunc.parametrize("own_plan", listed[part - 1 :: parts], ids=str)


def poison(*arrays: Any) -> None:
    """Leave NaN in freed memory, from which the next arrays of these sizes are taken."""
    made = [jnp.full(x.nbytes // 4 + 1, np.nan, jnp.float32) for x in arrays for _ in range(2)]
    jax.block_until_ready(made)


@pytest.mark.plans
@pytest.mark.slow
@pytest.mark.skipif(hopper_reason() is not None, reason=str(hopper_reason()))
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_have_their_values(seed):
    """25 calls in one process, whose kernels follow one another."""
    for i, (call, plan) in enumerate(drawn(random.Random(seed), 25, 1 << 24)):
        x, w, around = random_products.values_of(call, i)
        out = jax.tree.leaves(jax.jit(functools.partial(computed, plan, call))(x, w, around))[0]
        columns, want = random_products.columns_of(call, x, w, around, 48, i)
        got = wide(out)[:, columns]
        assert np.isfinite(got).all(), (call, plan)
        size = np.sqrt(np.mean(want**2))
        # Weights of 16 bits, x beside them, and the result are rounded once each.
        assert np.sqrt(np.mean((got - want) ** 2)) <= 6e-3 * size, (call, plan)


@pytest.mark.plans
@pytest.mark.slow
def test_a_plan_runs(own_plan, request):
    """Values, poisoned results, twice the same bits."""
    worst = 0.0
    for case in plan_cases.cases(own_plan):
        f, given = plan_cases.program(own_plan, case)
        f = jax.jit(f)
        first = jax.tree.leaves(f(*given))
        poison(*first)
        again = jax.tree.leaves(f(*given))
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.int16), np.asarray(b).view(np.int16)
            )
        worst = max(
            worst, error(again[0], plan_cases.reference(own_plan, *plan_cases.operands(case)))
        )
        assert worst <= BOUNDS["bfloat16"][0], case
    if (folder := request.config.getoption("--runs")) is not None:
        line = {
            "card": jax.devices()[0].device_kind,
            "plan": str(own_plan),
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "error": float(f"{worst:.2g}"),
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"runs-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

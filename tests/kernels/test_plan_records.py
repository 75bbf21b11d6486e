"""Every plan that dispatch can return is listed, and the record has its proofs.

On a GPU each plan runs at its smallest and at an odd shape, in parts that a short lease can hold,
and so do 1,000 random calls for each seed:

    pytest -m plans -n 14 --dist=load --part 1/3 --runs FOLDER -k a_plan_runs THIS_FILE
    pytest -m plans -n 16 --dist=load --seeds 1 --runs FOLDER -k have_their_values THIS_FILE
    python -m tests.golden.make_plans merge FOLDER/runs.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.cards.architecture import CARDS, OTHER_JAX, TARGET, card_of
from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason, hopper_reason, named_plan, run_name, stands_for
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall, Static
from pallas_kernels.plans import OPS, plans
from pallas_kernels.recurrence.op import Heads
from tests.golden import make_plans
from tests.helpers import random_products
from tests.helpers.arrays import as_jax
from tests.helpers.lowering import kernels_in
from tests.helpers.matmul_cases import error, wide
from tests.helpers.op_calls import BF16, LIMIT, OpCall, near, normal, sequences
from tests.helpers.op_plans import calls
from tests.helpers.random_calls import DRAWERS
from tests.helpers.random_products import draw_product
from tests.helpers.random_runs import error_of_two_runs, fault, noted, run_calls

RECORDED = [card for card in CARDS if make_plans.path_of(card).exists()]
LISTED = (
    "NVIDIA H200",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA B200",
)
MOST_PLANS = 400  # of an op
# Calls of a test of random calls, such tests of a seed, and values of a call.
CALLS, TESTS, MOST_VALUES = 10, 100, 1 << 23


def names_of(op: str, card: str) -> set[str]:
    return {str(plan) for plan in plans(op, card)}


@pytest.mark.parametrize("card", LISTED)
@pytest.mark.parametrize("op", OPS)
def test_names_tell_plans_apart(op, card):
    found = plans(op, card)
    assert len({str(plan) for plan in found}) == len(set(found)) == len(found)
    assert all(stands_for(plan) == plan for plan in found)
    assert len(found) <= MOST_PLANS


@pytest.mark.parametrize("card", LISTED)
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_random_calls_take_listed_plans(card, seed):
    """Of a product, whatever stands around it, at sizes of real models and odd ones."""
    draw, names = random.Random(seed), names_of("quantized_matmul", card)
    taken = set()
    with planned_for(card):
        for _ in range(200 if seed == 1 else 3000):
            call = draw_product(draw)
            found = choice.plan(call)
            plan = named_plan(found)
            if plan is not None:
                assert str(stands_for(plan)) in names, call
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
            traced = jax.jit(call.kernel).trace(*call.operands)
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
    record = make_plans.load(card)["ops"]
    if card == "NVIDIA H200":
        assert dispatch.not_run()["sm_90"] == make_plans.not_run(card)
    for op in OPS:
        assert set(record[op]) == names_of(op, card), op
        for name, proofs in record[op].items():
            assert proofs.keys() >= {"lowered", "assembled"}, (op, name)
            assert "C7510" not in proofs["assembled"]["warnings"], (op, name)
            if card == "NVIDIA H200":
                assert "emulated" in proofs, (op, name)
            if isinstance(proofs.get("emulated"), dict):
                assert proofs["emulated"]["error"] <= LIMIT, (op, name)


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="the record is of jax >= 0.12")
@pytest.mark.parametrize("card", RECORDED)
@pytest.mark.parametrize("step", [90, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_are_lowered_as_recorded(card, step):
    record = make_plans.load(card)
    if record["jax"] != jax.__version__:
        pytest.skip(f"the record is of jax {record['jax']}")
    every = [(op, plan) for op in OPS for plan in plans(op, card)]
    with make_plans.planning(card):
        for op, plan in every[::step]:
            recorded = record["ops"][op][str(plan)]["lowered"]
            assert make_plans.hashes_of(op, card, plan) == recorded, (
                f"{plan} is lowered to other modules: python -m tests.golden.make_plans lower --all"
            )


@dataclasses.dataclass(frozen=True)
class Card:
    device_kind: str
    compute_capability: str
    platform: str = "gpu"


@pytest.fixture
def on_card(monkeypatch):
    """Return a function that puts new arrays on a card."""
    monkeypatch.setattr(dispatch, "untested_jax", lambda: None)
    monkeypatch.delenv(TARGET, raising=False)

    def put(name: str) -> None:
        major, minor = card_of(name)[1].capability
        card = Card(name, f"{major}.{minor}")
        monkeypatch.setattr(dispatch, "device_of", lambda operands: card)

    return put


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="older ones run no kernel")
def test_a_plan_that_no_gpu_ran_is_not_chosen(monkeypatch, on_card):
    plan = plans("quantized_matmul", "NVIDIA H200")[0]
    on_card("NVIDIA H200")
    assert dispatch.own_plan(lambda: plan) is plan
    monkeypatch.setattr(dispatch, "not_run", lambda: {"sm_90": [run_name(plan)]})
    assert dispatch.own_plan(lambda: plan) is None
    found = dispatch._own_answer(lambda: plan, None, ())
    assert isinstance(found, Reason) and "has not been run on a GPU of sm_90" in found.text
    assert found.plan is plan


@pytest.mark.skipif(jax.__version_info__ < OTHER_JAX, reason="older ones run no kernel")
@pytest.mark.parametrize("name", CARDS)
def test_only_an_architecture_that_ran_kernels_takes_them_unasked(name, monkeypatch, on_card):
    on_card(name)
    arch, plan = card_of(name)[1].name, plans("best", name)[0]
    is_run = arch == "sm_90"
    assert dispatch.wants_kernel(None) == is_run
    assert dispatch.own_plan(lambda: plan) == (plan if is_run else None)
    if is_run:
        # Cards of one architecture have the same programs.
        assert all(names_of(op, name) <= names_of(op, "NVIDIA H200") for op in OPS)
        return
    assert f"no GPU of {arch} has run its kernels" in str(hopper_reason())
    assert dispatch.choose_plan("best", "mosaic", lambda: plan) is plan
    monkeypatch.setenv(TARGET, arch)
    assert dispatch.own_plan(lambda: plan) is plan


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", DRAWERS)
@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_the_xla_form_is_float64(op, count):
    """The values that a GPU's kernels are compared with are those of the op."""
    card, rng = "NVIDIA H200", np.random.default_rng(0)
    found = [call for plan in plans(op, card) for call in calls(op, card, plan)]
    for call in sorted(found, key=lambda call: call.size)[:count]:
        operands = call.values(rng)
        out = jax.jit(functools.partial(call.function, implementation="xla"))(*operands)
        call.check(out, operands, rng)


@pytest.mark.parametrize("card", LISTED[:1])
@pytest.mark.parametrize("op", OPS)
def test_each_plan_has_calls(op, card):
    for plan in plans(op, card)[:: 20 if op == "quantized_matmul" else 1]:
        assert calls(op, card, plan), plan


def test_an_error_is_relative_to_terms_that_cancel():
    """GLA rounds each sum of 128 key channels, and then two halves of 512, to bfloat16."""
    call, scale = sequences("gla", 1, 1, (1, 1), (512, 64)), 512**-0.5
    (like, given), rng = call.operands, np.random.default_rng(0)
    k = np.zeros(like.k.shape)
    k[..., ::128] = 1.0, 0.3, -0.9, -0.41
    heads = Heads(jnp.ones(like.q.shape, BF16), as_jax(k, BF16), normal(rng, like.v), *like[3:])
    heads = heads._replace(log_decay=jnp.zeros(like.log_decay.shape))
    k, v = wide(heads.k)[0, 0, 0], wide(heads.v)[0, 0, 0]

    def rounded(x: np.ndarray) -> np.ndarray:
        return wide(as_jax(x, BF16))

    scores = rounded(scale * k.reshape(2, 2, 128).sum(-1))
    o = rounded(rounded(scores.sum(1)[:, None] * v).sum(0))
    assert error(o, scale * k.sum() * v) > LIMIT

    def checked(o: np.ndarray) -> float:
        results = o[None, None, None], np.outer(k, v)[None, None]
        return call.check(results, (heads, given), rng)

    assert checked(o) < LIMIT
    with pytest.raises(AssertionError):
        checked(o + 0.02 * scale * k[0] * v)  # a term of four is 2% larger


# --- on a GPU ------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    if "own_plan" in metafunc.fixturenames:
        part, parts = map(int, option("--part").split("/"))
        listed = [] if hopper_reason() else _listed_here()
        ids = [f"{op}-{plan}" for op, plan in listed]
        chosen = slice(part - 1, None, parts)
        metafunc.parametrize("own_plan", listed[chosen], ids=ids[chosen])


def _listed_here() -> list[tuple[str, Any]]:
    card = jax.devices()[0].device_kind
    return [(op, plan) for op in OPS for plan in plans(op, card)]


def drawn_call(draw: random.Random, most: int = MOST_VALUES) -> OpCall:
    """Return a call that a kernel computes: a third are dense products, other ops are as likely.

    most: values of its operands.
    """
    op = None if draw.random() < 1 / 3 else draw.choice(list(DRAWERS))
    while True:
        if op is None:
            [found] = drawn(draw, 1, most)
            call = product_call(*found)
        else:
            call = DRAWERS[op](draw)
        if call.size <= most and named_plan(call.find()) is not None:
            return call


def product_call(call: MatmulCall, plan: Any) -> OpCall:
    def values(rng: np.random.Generator) -> tuple[Any, ...]:
        return random_products.values_of(call, int(rng.integers(1 << 30)))

    def check(out: Any, operands: tuple[Any, ...], rng: np.random.Generator) -> float:
        seed = int(rng.integers(1 << 30))
        columns, want = random_products.columns_of(call, *operands, 48, seed)
        return near(wide(jax.tree.leaves(out)[0])[:, columns], want)

    def run(*operands: Any, implementation: Any) -> Any:
        return computed(plan, call, *operands)

    shapes = random_products.shapes_of(call)
    return OpCall("quantized_matmul", lambda: plan, run, shapes, values, check)


@pytest.mark.plans
@pytest.mark.slow
@pytest.mark.skipif(hopper_reason() is not None, reason=str(hopper_reason()))
def test_random_calls_have_their_values(seed_and_part, request):
    draw = random.Random(str(seed_and_part))
    run_calls(request, seed_and_part, (drawn_call(draw) for _ in range(CALLS)))


@pytest.mark.plans
@pytest.mark.slow
def test_a_plan_runs(own_plan, request):
    """Values, poisoned results, twice the same bits."""
    op, plan = own_plan
    worst, card = 0.0, jax.devices()[0].device_kind
    facts = {"op": op, "plan": str(plan)}
    for call in calls(op, card, plan):
        try:
            worst = max(worst, error_of_two_runs(call, np.random.default_rng(0)))
        except Exception as error:
            noted(request, "runs", **facts, call=str(call), failed=fault(error))
            raise
    noted(request, "runs", **facts, error=float(f"{worst:.2g}"))

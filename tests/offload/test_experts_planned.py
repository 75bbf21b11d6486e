"""What is predicted of experts that lie one by one: their number, their time and their memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import ExpertsConfig, ModelConfig, load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation import plan
from jaxllama.evaluation.plan import measure
from jaxllama.executors.offloaded.experts import divided
from jaxllama.offload.expert_places import ExpertUse
from jaxllama.offload.experts import ExpertBias, ExpertTensor
from jaxllama.offload.policy import Policy
from jaxllama.offload.schedule import QUEUED
from jaxllama.offload.store import RowTable, is_stored
from jaxllama.placement import Placement
from jaxllama.planner.accounting import footprint, weight_shapes
from jaxllama.planner.calibrate_experts import measure_experts, measured_use
from jaxllama.planner.cost import (
    MemoryLimits,
    PlannerSettings,
    Task,
    need_of,
    predict,
    program_bytes,
)
from jaxllama.planner.experts import (
    ExpertCosts,
    expert_counts,
    experts_step,
    layer_seconds,
    shares_of,
)
from jaxllama.planner.fitting import Calibration, Moving
from jaxllama.planner.solve import check_fits, one_by_one, solve
from jaxllama.planner.trial import random_tree
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.cpu.weight import prepare
from pallas_kernels.qtensor import QTensor
from tests.helpers.models import FAMILIES, params_of

EXPERTS = ExpertsConfig(32, 4, 64, bias=True, router_bias=True)
CFG = FAMILIES["gqa"].first_layers(1).replace(experts=EXPERTS)
COSTS = ExpertCosts(
    layer=(4e-4, 1e-5),
    load=(1e-4, 2.5e-4),
    cpu=(7e-4, 2e-4, 2e-5),
    prompt=(2e-5,),
    slots=(5e-5, 1e-4),
    both=(5e-5, 0.3),
)
SLOW_CPU = ExpertCosts(
    (1e-6, 0.0), (1e-6, 1e-5), (1e-4, 1e-3, 1e-3), (1e-3,), (0.0, 0.0), (0.0, 0.3)
)
ON_CPU = {"cpu_expert": 1e-6}  # all of them


def machine(costs: ExpertCosts) -> Calibration:
    """A machine on which a layer takes what ``costs`` say, and the link a nanosecond a byte."""
    link, free = Moving(1e-5, 1e-9, 4e-9, 0.0), Moving(0.0, 0.0, 0.0, 0.0)
    none = (0.0, 0.0)
    return Calibration(
        link, none, link, link, 0.0, free, free, (*none, 0.0), (*none, 0.0), none, none, (0.0,) * 4,
        0.0, (*none, 0.0), free, costs,
    )  # fmt: skip


def simulated(policy: Policy, shares: np.ndarray, cold: list[int], tokens: int) -> float:
    """The mean seconds of a layer, by one clock. Tokens draw distinct experts.

    The host dispatches a layer and goes on, ``QUEUED`` layers before the device at most. Where it
    waits for the router, link and CPU each work off their own queue, and the host behind both.
    """
    rng, layers = np.random.default_rng(0), 150
    host = device = 0.0
    ends: list[float] = []
    for _ in range(layers):
        noise = rng.gumbel(size=(tokens, len(shares)))
        chosen = np.argsort(-(np.log(shares) + noise), axis=1)[:, :4]
        found = {e: int(np.sum(chosen == e)) for e in cold if np.any(chosen == e)}
        to_load, on_cpu = divided(found, set(), policy)
        if policy.cpu_expert == 0:
            host = max(host, ends[-QUEUED] if len(ends) >= QUEUED else 0.0)
            host += COSTS.layer[0] + tokens * COSTS.layer[1]
            device = max(device, host) + COSTS.load[0] + COSTS.slots[0]
            device += len(to_load) * COSTS.load[1]
            ends.append(device)
            continue
        host += COSTS.cpu[0] + tokens * COSTS.layer[1] + COSTS.slots[1]
        link = cpu = host
        for _ in to_load:
            link += COSTS.load[1]
        for expert in on_cpu:
            cpu += COSTS.cpu[1] + (found[expert] - 1) * COSTS.cpu[2]
        shorter = min(link, cpu) - host
        host = max(link, cpu) + (COSTS.both[0] + COSTS.both[1] * shorter if shorter else 0.0)
    return max(host, device) / layers


@pytest.mark.parametrize(
    "options", [{}, COSTS.of_policy, pytest.param(ON_CPU, marks=pytest.mark.slow)]
)
def test_the_predicted_time_is_that_of_a_simulated_timeline(options):
    policy = Policy(experts="25/75", **options)
    skewed = 1.0 / np.arange(1, 33)
    for shares in (np.full(32, 4 / 32), 4 * skewed / skewed.sum()):
        # The shares that drawing without replacement gives.
        rng = np.random.default_rng(1)
        drawn = np.argsort(-(np.log(shares) + rng.gumbel(size=(20000, 32))), axis=1)[:, :4]
        measured = ExpertUse.of_counts({0: np.bincount(drawn.reshape(-1), minlength=32)}, 4)
        cold = list(range(8, 32))
        for tokens in (1, 5, 16):
            waits = policy.cpu_expert > 0
            how = {"waits": waits, "rows": tokens, "has_slots": True}
            step = layer_seconds(COSTS, policy, measured.layers[0][cold], tokens, **how)
            found = step.seconds + COSTS.layer[0] + tokens * COSTS.layer[1]
            want = simulated(policy, shares, cold, tokens)
            assert abs(found / want - 1) < 0.06, (tokens, found, want)


def test_a_layer_that_loads_hides_the_host_and_one_that_shares_waits_for_it():
    base = COSTS.layer[0] + COSTS.layer[1]
    assert COSTS.seconds(1, 0, 0.0, waits=False) == 0.0  # the link is done before the host
    loads = COSTS.seconds(4, 0, 0.0, waits=False)
    assert loads + base == pytest.approx(COSTS.load[0] + 4 * COSTS.load[1])
    visit = COSTS.cpu[0] + COSTS.layer[1]
    assert COSTS.seconds(0, 0, 0.0) + base == pytest.approx(visit)
    assert COSTS.seconds(4, 0, 0.0) + base == pytest.approx(visit + 4 * COSTS.load[1])
    slots = COSTS.seconds(4, 0, 0.0, has_slots=True) - COSTS.seconds(4, 0, 0.0)
    assert slots == pytest.approx(COSTS.slots[1])


def test_a_block_loads_an_expert_once():
    policy = Policy(experts="0/100")
    [one] = experts_step(CFG, COSTS, policy, (8,))
    [both] = experts_step(CFG, COSTS, policy, (4, 4))
    assert both.loads == pytest.approx(one.loads) and both.computed == 0
    assert one.loads == pytest.approx(32 * (1 - (28 / 32) ** 8))


def limited() -> tuple[ModelConfig, MemoryLimits, Task, PlannerSettings]:
    """Four layers, and a device with room for 40% of their experts."""
    task, settings = Task(1, 4, 8), PlannerSettings(jnp.float32, jnp.float32)
    cfg = CFG.replace(n_layers=4, layer_types=("attention",) * 4)
    need = need_of(cfg, Policy(experts="40/60"), task, settings, 0)
    return cfg, MemoryLimits(need.device, 10**9, 10**9), task, settings


def test_a_device_too_small_for_a_mixture_is_known_before_anything_is_measured():
    """The check allows what a policy with experts one by one needs, and whole layers exceed."""
    cfg, _, task, settings = limited()
    one = Policy.parse("0 100 100 0 100 0 gpu_batch_size=1 num_gpu_batches=1")
    programs = program_bytes(cfg, one, task, settings)
    singly, whole = (
        need_of(cfg, dataclasses.replace(one, experts=experts), task, settings, programs).device
        for experts in ("0/100", "")
    )
    assert singly < whole
    check_fits(cfg, None, task, MemoryLimits(singly), settings)
    with pytest.raises(JaxLlamaError, match="no policy fits: even one row"):
        check_fits(cfg, None, task, MemoryLimits(singly // 2), settings)


@pytest.mark.slow
def test_the_solver_divides_what_is_not_on_the_device():
    cfg, limits, task, settings = limited()
    fast = dataclasses.replace(SLOW_CPU, cpu=(1e-7, 1e-5, 1e-5), prompt=(1e-5,))
    found = solve(cfg, machine(fast), task, limits, settings)
    assert limits.allow(need_of(cfg, found, task, settings, 0))
    assert found.expert_shares is not None and found.expert_shares.device > 10
    assert found.cpu_expert == pytest.approx(1.0)


def test_the_most_used_are_on_the_device_and_a_slow_cpu_gets_nothing(tmp_path):
    path = tmp_path / "use.json"
    skewed = 1.0 / np.arange(1, 33)
    ExpertUse(dict.fromkeys(range(4), 4 * skewed / skewed.sum())).save(path)
    cfg, limits, task, settings = limited()
    costs = machine(SLOW_CPU)
    found = list(one_by_one(cfg, Policy(), str(path), costs, task, limits, settings))

    def rate(policy: Policy) -> float:
        return predict(cfg, policy, costs, task, settings).tokens_per_second

    best = max(found, key=rate)
    assert best.expert_shares is not None and best.expert_shares.device > 35
    assert best.expert_use == str(path) and rate(best) > rate(
        dataclasses.replace(best, expert_use="")
    )
    assert best.cpu_expert == 0.0 or best.cpu_expert > 50


def test_a_prompt_s_experts_are_loaded_where_the_cpu_computes_all_of_a_step():
    policy = Policy(experts="0/100", **ON_CPU)
    [step] = experts_step(CFG, COSTS, policy, (32,))  # 128 pairs of all 32 experts
    [piece] = experts_step(CFG, COSTS, policy, (33,), keeps=False)
    assert (round(step.loads), round(step.computed)) == (0, 32)
    assert (round(piece.loads), round(piece.computed)) == (32, 0)
    # A prompt's pairs cost what was measured in one, and a step's what was in steps.
    dear = dataclasses.replace(COSTS, prompt=(1e-3,))
    assert dear.on_cpu(128, 4096) == pytest.approx(4.096) and dear.of_policy["cpu_token"] == 4.0
    assert dear.on_cpu(2, 9) == COSTS.on_cpu(2, 9) == pytest.approx(2 * 2e-4 + 9 * 2e-5)


def test_a_long_prompt_passes_in_longer_pieces_where_there_is_room():
    cfg, task = load_config("gpt-oss-120b").first_layers(4), Task(1, 8192, 8)
    settings = PlannerSettings(jnp.bfloat16, jnp.bfloat16, "none,experts_*=mxfp4")
    costs = machine(dataclasses.replace(COSTS, cpu=()))

    def best(device: float) -> Policy:
        limits = MemoryLimits(int(device), 10**12, 10**12)
        found = one_by_one(cfg, Policy(), "", costs, task, limits, settings)
        return min(found, key=lambda policy: predict(cfg, policy, costs, task, settings).prefill)

    assert [best(gb * 1e9).prefill_batch_size for gb in (4, 7)] == [2048, 8192]
    # Four pieces load four times what one piece loads.
    [once] = experts_step(CFG, COSTS, Policy(experts="0/100"), (4096,), keeps=False)
    [four] = experts_step(CFG, COSTS, Policy(experts="0/100"), (1024,) * 4, keeps=False)
    assert once.loads == pytest.approx(32) and four.loads == pytest.approx(4 * 32)


@pytest.mark.parametrize("text", ["30/40", "0/100", "100/0", "30/0"])
def test_the_footprint_of_experts_is_what_the_store_holds(tmp_path, text):
    policy = Policy.parse(f"100 0 100 0 100 0 experts={text}")
    place = Placement(policy, jnp.float32, directory=tmp_path, exact=True)
    params = jax.tree.map(np.asarray, params_of(CFG))
    lm = place.model(CFG, place.tree(params), None)
    held = np.zeros(3, np.int64)

    def known(leaf: object) -> bool:
        return is_stored(leaf) or isinstance(leaf, RowTable | ExpertTensor | ExpertBias)

    for leaf in jax.tree.leaves(lm.params, is_leaf=known):
        if isinstance(leaf, ExpertBias):
            held += (leaf.device.nbytes, leaf.host.nbytes, 0)
        else:
            held += leaf.nbytes if known(leaf) else (leaf.nbytes, 0, 0)
        if isinstance(leaf, ExpertTensor):
            held[0] += sum(part.nbytes for part in jax.tree.leaves(leaf.held))
    need = footprint(
        CFG, policy, rows=1, width=4, capacity=8, dtype=jnp.float32, kv_dtype=jnp.float32,
        compile_programs=False,
    )  # fmt: skip
    assert dataclasses.astuple(need.weights) == tuple(held)


@pytest.mark.slow
def test_costs_and_use_are_measured(tmp_path):
    cfg = CFG.replace(
        n_layers=2, layer_types=("attention",) * 2, vocab_size=256, window_layers=(),
    )  # fmt: skip

    def model(policy: Policy):
        place = Placement(policy, jnp.float32, directory=tmp_path)
        return place.model(cfg, place.tree(jax.tree.map(np.asarray, params_of(cfg))), None)

    costs = measure_experts(cfg, model, jnp.float32, 64)
    assert min(*costs.layer, *costs.slots, *costs.both) >= 0 and len(costs.load) == 2
    assert len(costs.cpu) == 3 * len(costs.prompt) and all(x > 0 for x in costs.prompt)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 16))
    use = measured_use(model(Policy.parse("100 0 100 0 100 0 experts=50/50")), tokens)
    assert [round(float(own.sum()), 6) for own in use.layers.values()] == [4.0, 4.0]


def test_experts_are_counted_where_they_are_placed():
    """Without a table of use a load sees one layer at a time."""
    cfg = CFG.replace(n_layers=4) if CFG.n_layers == 1 else CFG
    policy = Policy.parse("100 0 100 0 100 0 experts=40/60")
    place = Placement(policy, jnp.float32)
    for layer, (found, _) in zip(expert_counts(cfg), shares_of(cfg, policy), strict=True):
        assert found == place._place(layer, cfg.experts.n_experts)


def test_plan_prints_slots_loads_and_what_the_cpu_computes(monkeypatch, tmp_path):
    cfg, _, _, _ = limited()
    found = {
        "prefill": 1.0,
        "step": 0.1,
        "lanes": dict.fromkeys(plan.LANES, 0.0),
        "experts_loaded": 1.5,
        "experts_computed": 0.75,
        "disk_bytes": 0,
        "device_bytes": 1,
        "sees_programs": False,
    }
    monkeypatch.setattr(plan, "read_config", lambda *_: cfg)
    monkeypatch.setattr(plan, "stored_scheme", lambda *_: None)
    monkeypatch.setattr(plan, "calibrate", lambda *_, **__: machine(COSTS))
    monkeypatch.setattr(plan, "load", lambda *_, **__: None)
    monkeypatch.setattr(plan, "measure", lambda *_: (found, []))
    monkeypatch.setattr(plan, "measured_file", lambda *_: tmp_path / "measured.json")
    policy = Policy(experts="25/75", gpu_batch_size=1)
    report = plan.run(plan.PlanRequest("tiny", Task(1, 4, 8), policy, dtype=jnp.float32))
    # 4 of 32 experts are chosen, alike, and 8 have slots.
    assert report["experts"]["loaded"] == {"predicted": pytest.approx(3.0), "measured": 1.5}
    text = plan.table(report)
    assert "experts loaded            3.00        1.50  a layer and step; 8 slots for 32" in text
    assert "experts on CPU            0.00        0.75  a layer and step" in text


def test_random_int4_experts_have_the_handlers_layout():
    """Zero points outside of the codes would be left to XLA, which takes a hundred times longer."""
    shapes = weight_shapes(CFG, jnp.bfloat16, "none,experts_*=w4a16-g32")["layer_0"]["mlp"]
    drawn = random_tree(shapes["experts_gate_up"]["weight"])
    assert isinstance(drawn, QTensor) and -8 <= int(drawn.zero.min()) < int(drawn.zero.max()) <= 7
    assert isinstance(prepare(jax.tree.map(np.asarray, drawn)), CpuWeight)


def test_a_table_s_path_has_no_spaces():
    with pytest.raises(JaxLlamaError, match="expert_use = 'a b': a path without spaces"):
        Policy(experts="0/100", expert_use="a b")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "gpu_batch_size=2 num_gpu_batches=2"])
def test_live_device_bytes_stay_within_the_prediction(tmp_path, options):
    """Live arrays of the whole process, those of other tests subtracted."""
    task, settings = Task(4, 16, 8), PlannerSettings(jnp.float32, jnp.float32)
    policy = Policy.parse(f"100 0 100 0 100 0 experts=25/75 {options}")
    before = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
    place = Placement(policy, jnp.float32, directory=tmp_path)
    lm = place.model(CFG, place.tree(jax.tree.map(np.asarray, params_of(CFG))), None)
    found, _ = measure(lm, task, settings)
    need = need_of(CFG, policy, task, settings)
    assert found["device_bytes"] - before <= need.device

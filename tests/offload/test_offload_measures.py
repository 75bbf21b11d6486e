"""What the measuring parts of offloading compute, and the order that the measurements rely on."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import offload_disk as disk_bench
from benchmarks import offload_sweep as sweep
from benchmarks.offload_sweep import grid, model_of, summary
from jaxllama.config import load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation import plan
from jaxllama.offload.disk import DiskFile
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.schedule import LANES, Overlapped
from jaxllama.offload.store import Store
from jaxllama.offload.units import ModelUnit, check_halves
from jaxllama.planner import calibrate as calibration
from jaxllama.planner.accounting import model_bytes, weight_shapes
from jaxllama.planner.cost import PlannerSettings, need_of
from jaxllama.planner.fitting import Calibration, Moving, contention, moving
from jaxllama.planner.solve import solve
from jaxllama.planner.trial import Watch, repeated_model, streamed_bytes

PLAIN = PlannerSettings(jnp.float32, jnp.float32)
FREE, MILLISECOND = Moving(0.0, 0.0, 0.0, 0.0), (1e-3,) * 3
COSTS = Calibration(
    load_weights=FREE,
    join=(0.0,) * 2,
    load_cache=FREE,
    store_cache=FREE,
    push_cache=0.0,
    load_hidden=FREE,
    store_hidden=FREE,
    decode=MILLISECOND,
    prefill=MILLISECOND,
    head=(1e-3,) * 2,
    look_up=(0.0,) * 2,
    contention=(0.0,) * 4,
    disk_cold=0.0,
    cpu=MILLISECOND,
    fetch=FREE,
)
os_preadv = os.preadv


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


class _Work:
    """Two layers; the weights of each arrive only once the next unit's have been begun."""

    units = [ModelUnit("layer", 0), ModelUnit("layer", 1), ModelUnit("head")]
    moves = {"weights": True, "cache": False, "hidden": False}
    is_small = False

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in self.units]
        self.computed: list[tuple[ModelUnit, int]] = []

    def active_batches(self) -> list[int]:
        return [0, 1]

    def load_weights(self, unit: ModelUnit) -> int:
        index = self.units.index(unit)
        self.begun[index].set()
        return index

    def finish_weights(self, pending: int) -> int:
        if pending + 1 < len(self.begun):
            assert self.begun[pending + 1].wait(timeout=60), "the next load was not begun ahead"
        return pending

    def load_cache(self, unit: ModelUnit, batch: int) -> None: ...
    def load_hidden(self, batch: int) -> None: ...
    def store_cache(self, unit: ModelUnit, batch: int, cache: Any) -> None: ...
    def store_hidden(self, batch: int, hidden: Any) -> None: ...

    def compute(self, unit: ModelUnit, batch: int, weights: int, cache: Any, hidden: Any) -> Any:
        assert self.units[weights] is unit
        self.computed.append((unit, batch))
        return None, jnp.zeros(())


def test_the_next_weights_are_begun_before_these_have_come():
    work = _Work()
    Overlapped({name: ThreadPoolExecutor(1) for name in LANES}).step(work, last=True)
    assert work.computed == [(unit, batch) for unit in work.units for batch in (0, 1)]


def test_begun_and_finished_is_what_was_put(tmp_path):
    store = Store(tmp_path)
    tree = {"a": jnp.arange(60.0).reshape(10, 6), "b": jnp.arange(3.0)}
    stored = store.put(tree, Shares(30, 30))
    pending = store.begin(stored)
    again = store.begin(stored, {id(stored["a"]): pending["a"]})
    assert again["a"] is pending["a"]
    got, other = store.finish(pending), store.finish(again)
    assert got["a"] is other["a"], "a tensor was joined twice"
    assert all((got[name] == tree[name]).all() for name in tree)


def test_a_read_begun_ahead_is_the_read(tmp_path):
    disk = DiskFile(tmp_path)
    arrays = [np.arange(n, dtype=np.int32) for n in (3, 1 << 21)]
    reads = [disk.begin(extent) for extent in [disk.write(array) for array in arrays]]
    assert all((read() == array).all() for read, array in zip(reads, arrays, strict=True))


def test_contention_is_what_made_the_steps():
    steps = [
        (longest, (large, small), longest + 0.3 * large + 0.8 * small)
        for longest, large, small in ((1, 2, 0), (3, 1, 1), (2, 1, 4))
    ]
    assert contention(steps) == pytest.approx((0.3, 0.8))
    for seconds, share in ((1.5, 0.0), (9.0, 1.0)):  # no overlap is worse than none
        assert contention([(2.0, (1.0, 1e-3), seconds)])[0] == pytest.approx(share, abs=1e-6)


def test_pieces_and_packed_words_are_joined_whole_tensors_are_not():
    tree = {
        "w": jax.ShapeDtypeStruct((8, 64), jnp.int4),
        "v": jax.ShapeDtypeStruct((4, 8), "int8"),
        "n": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    assert moving(tree, Shares(100, 0)) == (0, 0, 0)
    assert moving(tree, Shares(0, 100)) == (256 + 32, 0, 256)
    assert moving(tree, Shares(50, 25)) == (64 + 8, 64 + 8, 256 + 32)


def test_repeated_weights_have_the_model_s_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    cfg = model_of(128)
    policy = Policy.parse("25 75 100 0 100 0")
    lm = repeated_model(cfg, jnp.float32, policy)
    layers = [lm.params[f"layer_{i}"]["mlp"]["down"]["weight"] for i in (0, 7)]
    assert all(layer.shape == (128, 384) for layer in layers) and layers[0] is not layers[1]
    first, last = (np.asarray(lm.executor.store.get(layer)) for layer in layers)
    assert (first == last).all() and 0.01 < first.std() < 0.03
    held = sum(
        layer.host.nbytes
        for layer in jax.tree.leaves(
            {k: v for k, v in lm.params.items() if k != "embed"},
            is_leaf=lambda x: hasattr(x, "host"),
        )
        if hasattr(layer, "host")
    )
    assert streamed_bytes(cfg, policy, PLAIN) == held


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct reads are Linux's")
def test_the_disk_s_own_rate_reads_every_byte(tmp_path, monkeypatch):
    disk = DiskFile(tmp_path)
    disk.write(np.zeros(disk_bench.CHUNK + 5000, np.uint8))
    read = []
    monkeypatch.setattr(disk_bench.os, "preadv", lambda *words: read.append(os_preadv(*words)))
    disk_bench._read_file(disk, direct=False, threads=2)
    assert sum(read) == disk.nbytes


def test_a_watch_keeps_the_most_that_it_has_seen():
    looks = []

    def look() -> int:
        looks.append(None)
        return {2: 9}.get(len(looks), 3)

    with Watch(look) as watch:
        assert wait_until(lambda: len(looks) > 3)
    assert watch.most == 9
    pages = np.ones(1 << 26, np.uint8)  # the kernel may free other pages meanwhile
    assert disk_bench.resident() > pages.nbytes


def test_a_sweep_makes_a_model_once_for_the_same_shares_of_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    texts = ("0 100 0 100 100 0", "20 80 100 0 100 0", "0 100 100 0 100 0", "20 80 0 100 100 0")
    policies = [Policy.parse(text) for text in texts]
    needs = dict(zip(policies, (30, 20, 10, 25), strict=True))
    order = sweep._order(policies, needs)
    assert [policies.index(policy) for policy in order] == [2, 0, 1, 3]
    models = sweep._Models(model_of(128, 1), PLAIN)
    made = [models(policy) for policy in order]
    assert [lm.executor.policy for lm in made] == order
    assert made[0].params is made[1].params and made[2].params is made[3].params


def test_a_device_without_a_limit_of_its_own_has_the_hosts():
    """On a CPU: a model that does not fit it goes to the disk in part."""
    cfg, task = model_of(128, 1).replace(n_layers=48), plan.Task(2, 8, 4)
    settings = PlannerSettings(jnp.dtype("float32"), "float32", None)
    room = model_bytes(cfg, jnp.float32) // 2
    limits = plan.MemoryLimits(host=room, disk=10**12)
    policy = solve(cfg, COSTS, task, limits, settings)
    need = need_of(cfg, policy, task, settings)
    assert need.device + need.host <= room and need.disk > 0


def test_policies_with_late_norms_of_keys_are_refused():
    cfg = model_of(128, 1).replace(qk_norm="head", qk_norm_last=True)
    for own, text in ((cfg, "cpu_attention=true"), (cfg.replace(attn_sparsity=0.5), "")):
        with pytest.raises(JaxLlamaError, match="norms q and k behind RoPE"):
            check_halves(own, Policy.parse(f"0 100 0 100 0 100 {text}".strip()))


@pytest.mark.slow
def test_plan_solves_measures_and_draws(tmp_path, monkeypatch):
    """Half of the model's bytes on the device: every term has both figures, and the limit holds."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    extent = calibration.LITTLE._replace(other=(1, 32))
    monkeypatch.setattr(calibration, "LITTLE", extent)
    file = tmp_path / "tiny.toml"
    file.write_text(
        "vocab_size = 512\nd_model = 128\nn_layers = 6\nn_heads = 4\nn_kv_heads = 2\n"
        "head_dim = 32\nd_ff = 384\nnorm_eps = 1e-5\nmax_position = 256\n"
        "tie_embeddings = false\n[rope]\ntheta = 1e4\n"
    )
    weights = model_bytes(load_config(file), jnp.float32)
    found = plan.run(
        plan.PlanRequest(
            file,
            plan.Task(4, 16, 6),
            limits=plan.MemoryLimits(device=weights),
            random=True,
            dtype=jnp.float32,
            timeline=tmp_path / "step.png",
        )
    )
    assert found["bytes"]["device"]["predicted"] <= weights
    assert found["bytes"]["device"]["measured"] <= found["bytes"]["device"]["predicted"]
    assert all(
        found[name]["predicted"] > 0 and found[name]["measured"] > 0
        for name in ("prefill_seconds", "step_seconds", "tokens_per_second")
    )
    assert (tmp_path / "step.png").stat().st_size > 5000
    assert "tokens/s" in plan.table(found)
    [kept] = tmp_path.glob("offload/calibration-*.json")
    costs = calibration._read(kept)
    assert len(costs.contention) == 4 and all(0 <= share <= 1 for share in costs.contention)


def test_what_fits_is_calibrated_for_computation_alone_and_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    cfg, costs = model_of(128, 1), COSTS
    lm = object()
    found = {
        "prefill": 1.0,
        "step": 0.1,
        "lanes": dict.fromkeys(plan.LANES, 0.0),
        "prompt_tokens": 4,
        "disk_bytes": 0,
        "device_bytes": 1,
        "sees_programs": False,
    }
    moved, loaded, said = [], [], []

    def calibrate(cfg, settings, *, moves, **_):
        assert settings.scheme == "none,down=w8a16"
        moved.append(moves)
        return costs

    def load(source, dtype, quantize, *, policy, **_):
        assert quantize is None  # the file has its codes
        loaded.append(policy)
        return lm

    monkeypatch.setattr(plan, "read_config", lambda *_: cfg)
    monkeypatch.setattr(plan, "stored_scheme", lambda *_: "none,down=w8a16")
    monkeypatch.setattr(plan, "calibrate", calibrate)
    monkeypatch.setattr(plan, "load", load)
    monkeypatch.setattr(plan, "measure", lambda *_: (found, []))

    def run(**options):
        asked = plan.PlanRequest("tiny", plan.Task(2, 4, 3), dtype=jnp.float32, **options)
        return plan.run(asked, said.append)

    assert run() == run()
    assert moved == [False, False] and len(loaded) == 1 and not loaded[0].moves
    assert [line.split(":")[0] for line in said] == ["measuring", "measured before"]
    run(recalibrate=True)
    run(policy=Policy.parse("0 100 100 0 100 0"))
    assert moved[2:] == [False, True] and len(loaded) == 3
    task, settings = plan.Task(2, 4, 3), plan.PlannerSettings(jnp.dtype("float32"), "float32", None)
    assert plan.resident(cfg, task, plan.MemoryLimits(device=1000), settings, Policy()) is None


@pytest.mark.parametrize(
    "seconds, text, prompt",  # predicted for 8 rows of 512 tokens
    [
        (1.0, "100 0 100 0 100 0", 512),
        (5.0, "100 0 100 0 100 0", 128),
        (1e3, "100 0 100 0 100 0", 64),
        (1e3, "0 100 100 0 100 0", 512),
    ],
)
def test_a_long_prefill_is_measured_on_shorter_prompts(seconds, text, prompt, monkeypatch):
    """The report scales it by its operations, and says so."""
    cfg, task = model_of(128, 1), plan.Task(8, 512, 32)
    costs = dataclasses.replace(
        COSTS, prefill=(0.0, seconds / (8 * 512 * cfg.n_layers), 0.0), head=(0.0,) * 2
    )
    policy = Policy.parse(text + " gpu_batch_size=8")
    expected = plan.predict(cfg, policy, costs, task, PLAIN)
    trial, prefill = plan.shortened(cfg, policy, task, expected)
    assert trial.prompt == prompt and trial.capacity == task.capacity
    measured = []
    monkeypatch.setattr(plan, "read_config", lambda *_: cfg)
    monkeypatch.setattr(plan, "stored_scheme", lambda *_: None)
    monkeypatch.setattr(plan, "calibrate", lambda *_, **__: costs)
    monkeypatch.setattr(plan, "load", lambda *_, **__: object())

    def measure(_, task, *__):
        measured.append(task)
        return {
            "prefill": 2.0,
            "step": 0.1,
            "lanes": dict.fromkeys(plan.LANES, 0.0),
            "disk_bytes": 0,
            "device_bytes": 1,
            "sees_programs": False,
        }, []

    monkeypatch.setattr(plan, "measure", measure)
    asked = plan.PlanRequest("tiny", policy=policy, dtype=jnp.float32, recalibrate=True)
    found = plan.run(asked)
    assert measured == [trial]
    assert found["prefill_seconds"]["measured"] == 2.0 * found["prefill_scale"]
    assert prefill * found["prefill_scale"] == pytest.approx(expected.prefill)
    assert 1.0 <= found["prefill_scale"] / (512 / prompt) < 2.0  # attention grows faster
    said = f"measured with prompts of {prompt} tokens; the prefill of 512 is"
    assert (said in plan.table(found)) == (prompt != 512)


def test_a_measurement_of_minutes_is_left_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    costs = dataclasses.replace(COSTS, decode=(60.0, 0.0, 0.0))
    monkeypatch.setattr(plan, "read_config", lambda *_: model_of(128, 1))
    monkeypatch.setattr(plan, "stored_scheme", lambda *_: None)
    monkeypatch.setattr(plan, "calibrate", lambda *_, **__: costs)
    said = []
    task = plan.Task(2, 4, 3)
    found = plan.run(plan.PlanRequest("tiny", task, dtype=jnp.float32), said.append)
    assert said == [f"not measured, which takes 11 minutes: --policy '{found['policy']}' does"]
    assert found["step_seconds"] == {"predicted": pytest.approx(60, rel=1e-3), "measured": None}
    assert found["tokens_per_second"]["measured"] is None and "60003.00" in plan.table(found)


@pytest.mark.parametrize(
    "seconds, until, in_a_row, rounds",
    [(0.1, 60, 5, 3), (1.0, 60, 5, 3), (3.0, 60, 5, 1), (0.1, -1, 3, 2), (1.0, -1, 3, 1)],
)
def test_slow_steps_are_not_repeated(monkeypatch, seconds, until, in_a_row, rounds):
    """Two runs take turns. A calibration that is late repeats steps of moments only."""
    steps = []

    def step(run):
        steps.append(run)
        return seconds

    monkeypatch.setattr(calibration, "timed_step", step)
    clock = SimpleNamespace(perf_counter=lambda: seconds * len(steps))
    monkeypatch.setattr(calibration, "time", clock)
    extent = calibration.FULL._replace(patience=until)
    measure = calibration._Measure(model_of(128, 1), PLAIN, 8, print, extent=extent)
    assert measure._steps(["a", "b"]) == [seconds, seconds]
    assert steps == (in_a_row * ["a"] + in_a_row * ["b"]) * rounds


@pytest.mark.parametrize(
    "name, cache, feed, heads, vocabulary",
    [
        ("llama-3.1-8b", 1 << 25, 4, 2, 16),
        ("llama-3.2-1b", 1 << 25, 2, 8, 16),
        ("gla-340m", 1, 2, 1, 2),
    ],
)
def test_a_model_is_measured_narrower_and_larger_than_the_last_cache(
    name, cache, feed, heads, vocabulary, tmp_path, monkeypatch
):
    """Weights of 32 MB keep as many. A mixer other than attention stays whole. The result is
    kept."""
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    measured = []

    def measure(cfg, *settings):
        measured.append((cfg, *settings[-2:]))
        return SimpleNamespace(run=lambda: COSTS)

    monkeypatch.setattr(calibration, "_Measure", measure)
    monkeypatch.setattr(calibration, "_last_cache", lambda: cache)
    cfg = load_config(name)
    costs = calibration.calibrate(cfg, PLAIN)
    [(small, extent, widths)] = measured
    assert extent == calibration.LITTLE and small.n_layers == 2 and small.d_model == cfg.d_model
    assert (small.d_ff * feed, small.n_heads * heads) == (cfg.d_ff, cfg.n_heads)
    assert small.vocab_size == -(-cfg.vocab_size // vocabulary)
    assert (widths.head, widths.heads) == (cfg.vocab_size / small.vocab_size, heads)
    wide, narrow = (
        model_bytes(x.first_layers(2), jnp.float32) - model_bytes(x.first_layers(1), jnp.float32)
        for x in (cfg, small)
    )
    assert widths.layer == pytest.approx(wide / narrow) and narrow > cache
    sizes = (
        [leaf.size * 4 for leaf in jax.tree.leaves(weight_shapes(x.first_layers(1), jnp.float32))]
        for x in (cfg, small)
    )
    assert all(y >= min(x, 1 << 25) for x, y in zip(*sizes, strict=True) if x >= 1 << 25)
    assert calibration.calibrate(cfg, PLAIN) == costs and len(measured) == 1


def test_costs_are_those_of_a_wider_model():
    """A layer's grow with its weights, those of pairs with heads, the head's with the program's."""
    widths = calibration.Widths(layer=4.0, head=3.0, heads=2.0)
    found = calibration.widened(COSTS, widths, [0.5 + 0.25 * rows for rows in calibration.ROWS])
    assert found.decode == found.prefill == found.cpu == (4e-3, 4e-3, 2e-3)
    assert found.head == pytest.approx((1.001, 0.501)) and found.load_weights == FREE


@pytest.mark.slow
def test_computation_alone_is_calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path))
    extent = calibration.LITTLE._replace(other=(1, 32))
    monkeypatch.setattr(calibration, "LITTLE", extent)
    said: list[str] = []
    options = {"moves": False, "progress": said.append}
    costs = calibration.calibrate(model_of(128, 1), PLAIN, **options)
    assert calibration.calibrate(model_of(128, 1), PLAIN, **options) == costs
    assert said[0] == "calibrating: resident (1 of 3)"
    assert said[2].startswith("calibrating: resident (3 of 3), about ") and len(said) == 3
    assert sum(costs.decode) > 0 and sum(costs.prefill) > 0
    assert costs.load_weights == Moving(0.0, 0.0, 0.0, 0.0)


def test_the_summary_of_a_sweep():
    def point(policy, rate, step, predicted, peak, solver=False):
        return {
            "policy": policy,
            "solver": solver,
            "need": 100,
            "peak": peak,
            "rate": rate,
            "step": step,
            "prefill": 2.0,
            "predicted_rate": 100,
            "predicted_step": predicted,
            "predicted_prefill": 1.0,
        }

    points = [point("a", 100, 1.0, 1.1, 90), point("b", 300, 1.0, 2.0, None)]  # b was lucky
    finals = [
        point("a", 100, 1.0, 1.1, None),
        point("b", 80, 1.0, 2.0, None),
        point("c", 95, 2.0, 2.2, 101, True),
    ]
    found = summary(points, finals)
    assert found["best"] == {"policy": "a", "rate": 100}
    assert found["solver"]["share_of_best"] == pytest.approx(0.95)
    assert found["solver"]["step_error"] == pytest.approx(0.1)
    assert found["solver"]["prefill_error"] == pytest.approx(-0.5)
    assert found["peaks"] == 2 and found["over_prediction"] == 1
    errors = found["errors"]["step"]
    assert errors["within_20_percent"] == pytest.approx(1 / 2)
    assert (errors["median_size"], errors["worst_size"]) == pytest.approx((0.55, 1.0))
    assert found["errors"]["rate"]["worst_size"] == pytest.approx(2 / 3)
    assert len(set(grid())) >= 300

"""What the measuring parts of offloading compute, and the order that the measurements rely on."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.offload.bench import random_tree, repeated_model, streamed_bytes
from jaxllama.offload.calibration import Calibration
from jaxllama.offload.cost_model import Settings
from jaxllama.offload.disk import DiskFile
from jaxllama.offload.fitting import Moving, contention
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.schedule import LANES, Overlapped
from jaxllama.offload.store import Store
from jaxllama.offload.sweep import grid, model_of, summary
from jaxllama.offload.units import Unit

PLAIN = Settings(jnp.float32, jnp.float32)


class _Work:
    """Two layers; the weights of each arrive only once the next unit's have been begun."""

    units = [Unit("layer", 0), Unit("layer", 1), Unit("head")]
    moves = {"cache": False, "hidden": False}

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in self.units]
        self.computed: list[tuple[Unit, int]] = []

    def active_batches(self) -> list[int]:
        return [0, 1]

    def load_weights(self, unit: Unit) -> int:
        index = self.units.index(unit)
        self.begun[index].set()
        return index

    def finish_weights(self, pending: int) -> int:
        if pending + 1 < len(self.begun):
            assert self.begun[pending + 1].wait(timeout=60), "the next load was not begun ahead"
        return pending

    def load_cache(self, unit: Unit, batch: int) -> None: ...
    def load_hidden(self, batch: int) -> None: ...
    def store_cache(self, unit: Unit, batch: int, cache: Any) -> None: ...
    def store_hidden(self, batch: int, hidden: Any) -> None: ...

    def compute(self, unit: Unit, batch: int, weights: int, cache: Any, hidden: Any) -> Any:
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
    steps = [(longest, beside, longest + 0.3 * beside) for longest, beside in ((1, 2), (3, 1))]
    assert contention(steps) == pytest.approx(0.3)
    assert contention([(2.0, 1.0, 1.5)]) == 0.0 and contention([(1.0, 0.0, 1.0)]) == 0.0


def test_cold_disks_change_loads_from_disk_only():
    moving = Moving(1e-5, 2e-11, 1e-10, 1e-12)
    costs = Calibration(
        moving, moving, moving, 0.0, moving, moving, (0.0,) * 3, (0.0,) * 3, (0.0, 0.0), 0.0, 7e-10
    )
    cold = costs.cold()
    assert cold.load_weights == dataclasses.replace(moving, disk=7e-10)
    assert cold.store_cache == moving and cold.decode == costs.decode


def test_repeated_weights_have_the_model_s_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    cfg = model_of(128)
    policy = Policy.parse("25 75 100 0 100 0")
    lm = repeated_model(cfg, jnp.float32, policy)
    layers = [lm.params[f"layer_{i}"]["mlp"]["down"]["weight"] for i in (0, 7)]
    assert all(layer.shape == (128, 384) for layer in layers) and layers[0] is not layers[1]
    first, last = (np.asarray(lm.store.get(layer)) for layer in layers)
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


def test_random_words_are_of_their_dtype():
    tree = random_tree({"w": jax.ShapeDtypeStruct((8, 64), jnp.int4),
                        "n": jax.ShapeDtypeStruct((8,), jnp.float32)})  # fmt: skip
    assert tree["w"].dtype == jnp.int4 and len(np.unique(np.asarray(tree["w"], np.int8))) > 8
    assert (tree["n"] == 1).all()


def test_the_summary_of_a_sweep():
    def point(policy, rate, step, predicted, peak, solver=False):
        return {"policy": policy, "solver": solver, "rate": rate, "step": step, "need": 100,
                "predicted_step": predicted, "predicted_rate": 1.0, "peak": peak}  # fmt: skip

    points = [point("a", 100, 1.0, 1.1, 90), point("b", 300, 1.0, 2.0, None)]  # b was lucky
    finals = [point("a", 100, 1.0, 1.1, None), point("b", 80, 1.0, 2.0, None),
              point("c", 95, 2.0, 2.2, 101, True)]  # fmt: skip
    found = summary(points, finals)
    assert found["best"] == {"policy": "a", "rate": 100}
    assert found["solver"]["share_of_best"] == pytest.approx(0.95)
    assert found["solver"]["step_error"] == pytest.approx(0.1)
    assert found["peaks"] == 2 and found["over_prediction"] == 1
    assert found["within_20_percent"] == pytest.approx(1 / 2)
    assert len(set(grid())) >= 300

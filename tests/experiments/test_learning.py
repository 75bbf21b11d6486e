"""The workload "learn": planted facts, several learning rates at once, and one whole experiment."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import configs_dir
from jaxllama.errors import JaxLlamaError
from jaxllama.experiments import learning
from jaxllama.experiments.config import load_experiment
from jaxllama.experiments.run import run
from jaxllama.experiments.settings import LearnSettings
from jaxllama.quantization.random_params import random_params
from jaxllama.training.config import DataConfig, OptimizerConfig, TrainConfig
from jaxllama.training.flops import parameters
from jaxllama.training.start import Setup
from jaxllama.training.step import init_state, update
from tests.helpers.models import FAMILIES

SETTINGS = LearnSettings(
    model="tiny", text="", learning_rates=(1e-3, 3e-3), steps=20, batch_size=2, sequence_length=32,
    distances=(3, 20, 40), held_tokens=128, facts=4, trials=5,
)  # fmt: skip
TEXT = bytes(np.random.default_rng(0).integers(32, 127, 2000).astype(np.uint8))
FIRST = learning.VOCABULARY - 2 * learning.SYMBOLS


def test_every_fact_is_in_its_row_twice():
    train, *held = learning.split(TEXT, SETTINGS)
    assert [len(part) for part in (train, *held)] == [2000 - 256, 128, 128]
    plain = train.batch(0, 64, 32, 0)
    rows = learning.planted(plain, 4, np.random.default_rng(1))
    distances = []
    for row, before in zip(rows, plain, strict=True):
        places = np.flatnonzero((row >= FIRST) & (row < FIRST + learning.SYMBOLS))
        keys, values = row[places], row[places + 1]
        assert (values >= FIRST + learning.SYMBOLS).all()
        for key in np.unique(keys):
            first, second = np.flatnonzero(keys == key)
            assert values[first] == values[second]
            distances.append(places[second] - places[first])
        others = np.setdiff1d(np.arange(len(row)), [*places, *(places + 1)])
        np.testing.assert_array_equal(row[others], before[others])
    assert len(distances) > 0.9 * 4 * 64 and min(distances) == 2 and max(distances) > 20


def test_a_rate_among_others_is_that_rate_alone():
    cfg = FAMILIES["gla"].replace(vocab_size=256, n_layers=1)
    begin = random_params(cfg, jax.random.key(0))
    rows = np.random.default_rng(0).integers(0, 256, (20, 2, 33)).astype(np.uint8)
    _, losses = learning.steps(
        cfg, learning.first_state(begin, 2), learning.schedule(SETTINGS), jnp.asarray(rows)
    )
    config = TrainConfig(
        data=DataConfig(""), steps=20, batch_size=2, sequence_length=32, learning_rate=3e-3,
        model=cfg, optimizer=OptimizerConfig(warmup_steps=2),
    )  # fmt: skip
    setup = Setup(config, cfg)
    state = init_state(setup, begin)
    for step, batch in enumerate(rows):
        state, metrics = update(setup, state, None, jnp.asarray(batch[None], jnp.int32))
        np.testing.assert_allclose(losses[step, 1], metrics["loss"], rtol=2e-5)
    assert abs(losses[-1, 0] - losses[-1, 1]) > 1e-3


def test_who_looks_up_the_key_recalls_everything(monkeypatch):
    seen = []

    def said(cfg, params, rows, at):
        rows = np.asarray(rows)
        key = rows[:, at]
        places = np.argmax(rows[:, : int(at)] == key[:, None], axis=1)
        seen.extend(int(at) - places)
        return rows[np.arange(len(rows)), places + 1]

    monkeypatch.setattr(learning, "_said", said)
    text = np.frombuffer(TEXT, np.uint8)
    assert learning.recalled(FAMILIES["gla"], {}, text, SETTINGS) == [1.0, 1.0, 1.0]
    assert seen == [3] * 5 + [20] * 5 + [40] * 5
    monkeypatch.setattr(learning, "_said", lambda cfg, params, rows, at: np.zeros(len(rows)))
    assert learning.recalled(FAMILIES["gla"], {}, text, SETTINGS) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 30}, "steps = 30: must be a multiple of 20"),
        ({"facts": 9}, "facts = 9: must be at most 8"),
        ({"learning_rates": ()}, r"learning_rates = \[\]: one or more above"),
        ({"distances": (1,)}, r"distances = \[1\]: one or more above 1"),
    ],
)
def test_settings_that_cannot_be_are_named(change, message):
    with pytest.raises(JaxLlamaError, match=message):
        dataclasses.replace(SETTINGS, **change)


@pytest.mark.parametrize("held", [49, 1000])
def test_a_text_too_short_is_named(held):
    settings = dataclasses.replace(SETTINGS, held_tokens=held)
    with pytest.raises(JaxLlamaError, match=f"held_tokens = {held}: must be at least 50, .* 2000"):
        learning.split(TEXT, settings)


def test_the_shipped_experiment_made_small(tmp_path):
    """Attention in one layer, for some steps of a text of two letters."""
    shipped = (configs_dir() / "experiments" / "linear-family.toml").read_text()
    lines = {
        "model = ": 'model = ["attention"]', "text = ": 'text = "ab.txt"',
        "seeds": "seeds = [0]", "learning_rates": "learning_rates = [1e-4, 1e-2]",
        "distances": "distances = [4, 40]\ntrials = 4", "facts": "facts = 2",
        "held_tokens": "held_tokens = 1281",
        "steps": "steps = 40", "batch_size": "batch_size = 2", "sequence_length":
        "sequence_length = 32", "where": "", "n_layers": "n_layers = 1", "by =": "",
    }  # fmt: skip
    text = []
    for line in re.sub(
        r'layer_types = \["(\w+)".*\]', r'layer_types = ["\1"]', shipped
    ).splitlines():
        text.append(next((new for old, new in lines.items() if line.startswith(old)), line))
    (tmp_path / "small.toml").write_text("\n".join(text))
    (tmp_path / "ab.txt").write_text("ab" * 2000)
    experiment = load_experiment(tmp_path / "small.toml")
    out = run(experiment, tmp_path / "out", lambda _: None)
    rows = json.loads((out / "results.json").read_text())["rows"]
    (row,) = rows
    results = row["results"]
    assert results["parameters"] == parameters(experiment.models["attention"])
    assert results["learning_rate"] == 1e-2
    assert results["held_loss"] == results["held_losses"][1] < results["held_losses"][0]
    assert results["held_loss"] < 1.0 < results["loss"][0]  # the text's own is 0
    assert results["distance"] == [4, 40] and len(results["recall"]) == 2
    assert results["state_kilobytes"] == 2 * 40 * 128 * 4 / 1e3 + 0.004
    assert "| 0.01 |" in (out / "table.md").read_text()


def test_the_family_s_models_have_equal_parameters():
    experiment = load_experiment("linear-family")
    sizes = {name: parameters(cfg) for name, cfg in experiment.models.items()}
    assert len(sizes) == 6 and max(sizes.values()) < 1.015 * min(sizes.values())
    for point in experiment.points:
        assert len(point.settings.learning_rates) == 3


def test_a_picture_of_what_is_not_there_is_named(tmp_path):
    text = (configs_dir() / "experiments" / "linear-family.toml").read_text()
    path = tmp_path / "x.toml"
    path.write_text(text.replace('where = { text = "bible" }', 'where = { text = "book" }'))
    with pytest.raises(JaxLlamaError, match="picture.where: no point has text = 'book'"):
        load_experiment(path)

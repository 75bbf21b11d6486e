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
from jaxllama.experiments.workloads import RESULTS
from jaxllama.model.flops import parameters
from jaxllama.training.config import DataConfig, OptimizerConfig, TrainConfig
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update
from tests.helpers.arrays import as_jax
from tests.helpers.models import FAMILIES
from tests.helpers.training_cases import first_params

SETTINGS = LearnSettings(
    model="tiny",
    text="",
    learning_rates=(1e-3, 3e-3),
    steps=20,
    batch_size=2,
    sequence_length=32,
    distances=(3, 20, 40),
    held_tokens=128,
    facts=(4, 8),
    trials=5,
)
TEXT = bytes(np.random.default_rng(0).integers(32, 127, 2000).astype(np.uint8))


@pytest.mark.core
def test_every_fact_stands_first_and_is_asked_for_once():
    counts = np.repeat([4, 7, 8], 40)
    rows, counted = learning.fact_rows(counts, 32, np.random.default_rng(1))
    assert rows.shape == (120, 33) and counted.shape == (120, 32)
    distances = []
    for row, asked, count in zip(rows, counted, counts, strict=True):
        assert asked.sum() == count and not asked[: 2 * count].any()
        is_key = (row >= learning.KEYS) & (row < learning.VALUES)
        assert (np.flatnonzero(is_key)[:count] == 2 * np.arange(count)).all()
        facts = dict(row[: 2 * count].reshape(-1, 2).tolist())
        assert len(facts) == count and is_key.sum() == 2 * count
        for place in np.flatnonzero(asked):
            assert facts.pop(row[place]) == row[place + 1] >= learning.VALUES
            distances.append(place - 2 * list(row[: 2 * count : 2]).index(row[place]))
        assert not facts and (row < learning.KEYS).sum() == 33 - 4 * count
    assert min(distances) == 2 and max(distances) == 30


def test_a_rate_and_a_seed_among_others_are_as_alone():
    cfg = FAMILIES["gqa"].replace(vocab_size=256, n_layers=1, layer_types=())
    begins = [first_params(cfg, seed) for seed in range(2)]
    rows = np.random.default_rng(0).integers(0, 256, (20, 2, 2, 33)).astype(np.uint8)
    state = learning.first_state(jax.tree.map(lambda *x: np.stack(x), *begins), 2)
    batches = as_jax(rows), jnp.ones((20, 2, 2, 32), bool)
    _, losses = learning.steps(cfg, state, learning.schedule(SETTINGS), batches)
    config = TrainConfig(
        data=DataConfig(""),
        steps=20,
        batch_size=2,
        sequence_length=32,
        learning_rate=3e-3,
        model=cfg,
        optimizer=OptimizerConfig(warmup_steps=2),
    )
    setup = TrainingSetup(config, cfg)
    state = init_state(setup, jax.device_put(begins[1]))
    for step, batch in enumerate(rows[:, 1]):
        state, metrics = update(setup, state, None, batch[None].astype(np.int32))
        np.testing.assert_allclose(losses[step, 1, 1], metrics["loss"], rtol=2e-5)
    assert abs(losses[-1, 1, 0] - losses[-1, 1, 1]) > 1e-3


def test_only_what_counts_is_lost():
    rows, counted = learning.fact_rows(np.full(40, 4), 32, np.random.default_rng(1))
    wanted, other = rows[:, 1:], rows[:, 1:] ^ 1
    logits = np.random.default_rng(0).normal(size=(40, 32, 256)).astype(np.float32)
    mean_loss = jax.jit(learning.mean_loss)
    loss = mean_loss(logits, wanted, counted)
    assert loss == mean_loss(logits, np.where(counted, wanted, other), counted)
    each = logits[(*np.nonzero(counted), wanted[counted])].astype(np.float64)
    each -= np.log(np.sum(np.exp(logits[counted].astype(np.float64)), axis=-1))
    np.testing.assert_allclose(loss, -each.mean(), rtol=1e-6)
    assert each.shape == (160,)


def test_who_looks_up_the_key_recalls_everything(monkeypatch):
    seen = []

    def said(cfg, params, rows):
        rows = np.asarray(rows)
        answers = np.zeros_like(rows)
        for row, answer in zip(rows, answers, strict=True):
            keys = [i for i in range(len(row)) if learning.KEYS <= row[i] < learning.VALUES]
            for place in keys:
                first = list(row).index(row[place])
                answer[place] = row[first + 1]
                if place > first:
                    seen.append(place - first)
        return answers

    monkeypatch.setattr(learning, "said_after", said)
    cfg = FAMILIES["gla"]
    assert learning.recalled_of(cfg, {}, SETTINGS) == [1.0, 1.0]
    assert len(seen) == 5 * (4 + 8)
    seen.clear()
    assert learning.recalled_over(cfg, {}, SETTINGS) == [1.0, 1.0, 1.0]
    assert seen == [3] * 5 + [20] * 5 + [40] * 5
    monkeypatch.setattr(learning, "said_after", lambda cfg, params, rows: np.zeros_like(rows))
    assert learning.recalled_of(cfg, {}, SETTINGS) == [0.0, 0.0]
    assert learning.recalled_over(cfg, {}, SETTINGS) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 30}, "steps = 30: must be a multiple of 20"),
        ({"facts": (4, 9)}, r"facts = \[4, 9\]: must be at most 8"),
        ({"learning_rates": ()}, r"learning_rates = \[\]: one or more above"),
        ({"distances": (1,)}, r"distances = \[1\]: one or more above 1"),
    ],
)
def test_settings_that_cannot_be_are_named(change, message):
    with pytest.raises(JaxLlamaError, match=message):
        dataclasses.replace(SETTINGS, **change)


@pytest.mark.parametrize("held", [32, 1000])
def test_a_text_too_short_is_named(held):
    settings = dataclasses.replace(SETTINGS, held_tokens=held)
    with pytest.raises(JaxLlamaError, match=f"held_tokens = {held}: must be at least 33, .* 2000"):
        learning.split(TEXT, settings)


@pytest.mark.slow
def test_the_shipped_experiment_made_small(tmp_path):
    """Attention in one layer, for some steps of a text of two letters."""
    shipped = (configs_dir() / "experiments" / "linear-family.toml").read_text()
    lines = {
        "model = ": 'model = ["attention"]',
        'text = "../': 'text = "ab.txt"',
        "seeds": "seeds = [0, 1]",
        "learning_rates": "learning_rates = [1e-4, 1e-2]",
        "distances": "distances = [4, 40]\ntrials = 4",
        "facts": "facts = [2, 4]",
        "held_tokens": "held_tokens = 1281",
        "steps": "steps = 40",
        "batch_size": "batch_size = 2",
        "sequence_length": "sequence_length = 32",
        'where = { text = "../': "",
        "n_layers": "n_layers = 1",
        "by =": "",
    }
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
    assert [row["seed"] for row in rows] == [0, 0, 1, 1]
    first = {row["settings"]["text"]: row["results"] for row in rows[:2]}
    of_text, of_facts = first["ab.txt"], first["facts"]
    for results in (of_text, of_facts):
        assert set(results) == set(RESULTS["learn"])
        assert results["parameters"] == parameters(experiment.models["attention"])
        assert results["held_loss"] in results["held_losses"]
        assert results["state_kilobytes"] == 2 * 40 * 128 * 4 / 1e3 + 0.004
    assert of_text["learning_rate"] == 1e-2
    assert of_text["held_loss"] == of_text["held_losses"][1] < of_text["held_losses"][0]
    assert of_text["held_loss"] < 1.0 < of_text["loss"][0]  # the text's own is 0
    assert of_text["recall"] is of_text["mean_recall"] is None
    assert len(of_facts["recall"]) == len(of_facts["recall_of_facts"]) == 2
    assert "| 0.01 |" in (out / "table.md").read_text()


def test_the_family_s_models_have_equal_parameters():
    experiment = load_experiment("linear-family")
    sizes = {name: parameters(cfg) for name, cfg in experiment.models.items()}
    assert len(sizes) == 6 and max(sizes.values()) < 1.015 * min(sizes.values())
    for point in experiment.points:
        assert len(point.settings.learning_rates) == 3


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ('{ text = "book" }', "text = 'book'"),
        ('{ text = "facts", batch_size = 16 }', "all of {'text': 'facts', 'batch_size': 16}"),
    ],
)
def test_a_picture_of_what_is_not_there_is_named(tmp_path, where, says):
    text = (configs_dir() / "experiments" / "linear-family.toml").read_text()
    path = tmp_path / "x.toml"
    path.write_text(text.replace('where = { text = "../texts/written.txt" }', f"where = {where}"))
    with pytest.raises(JaxLlamaError, match=re.escape(f"picture.where: no point has {says}")):
        load_experiment(path)

"""Kinds of text side by side: standard errors, the worst predictions, layers through the lens."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxllama.bench import damage as reports
from jaxllama.bench.evaluate import BATCH, perplexity, summary
from jaxllama.language_model import LanguageModel
from jaxllama.quantization.quantize import quantize_params
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import LLAMA, params_of

CFG = LLAMA.replace(vocab_size=256, d_model=64, head_dim=16, d_ff=96, max_position=256)
TEXTS = {"prose": "It was the best of times, it was the worst. " * 5, "lists": "1, 2, 3; " * 30}


@pytest.fixture(scope="module")
def models() -> tuple[LanguageModel, LanguageModel]:
    exact = LanguageModel(CFG, params_of(CFG), Tokenizer.byte_level())
    return dataclasses.replace(exact, params=quantize_params(exact.params, "w4a16-g32")), exact


def test_standard_errors_are_of_batch_means(models):
    rng = np.random.default_rng(0)
    rows = np.zeros((40 * BATCH + 7, 5), np.float32)
    # Neighbours share what their batch has: naive errors would be too small by about sqrt(BATCH).
    rows[: 40 * BATCH, 0] = np.repeat(rng.standard_normal(40), BATCH) + 3
    rows[40 * BATCH :, 0] = 3
    report = summary(rows, has_reference=True)
    means = rows[: 40 * BATCH, 0].reshape(40, BATCH).mean(1)
    assert report["nll_se"] == pytest.approx(means.std(ddof=1) / math.sqrt(40), rel=1e-4)
    assert report["rise"] == pytest.approx(math.expm1(rows[:, 0].astype(float).mean()), rel=1e-5)
    assert report["top1"] == 1 and report["top1_se"] == 0
    assert math.isnan(summary(rows[:BATCH], has_reference=False)["nll_se"])


def test_the_report_has_every_kind_as_perplexity_has_it(models):
    lm, exact = models
    report = reports.damage(lm, TEXTS, 64, reference=exact)
    for kind, text in TEXTS.items():
        alone = perplexity(lm, text, 64, reference=exact)
        assert report["kinds"][kind] == {
            key: value for key, value in alone.items() if key not in ("window", "stride")
        }
        own = perplexity(exact, text, 64)["perplexity"]
        assert alone["rise"] == pytest.approx(alone["perplexity"] / own - 1, abs=1e-5)
    assert set(reports.damage(lm, TEXTS, 64)) == {"window", "stride", "kinds"}


def test_the_worst_predictions_stand_in_their_text(models):
    lm, exact = models
    worst = reports.damage(lm, TEXTS, 64, reference=exact)["worst"]["prose"]
    kls = [entry["kl"] for entry in worst]
    assert len(worst) == reports.WORST and kls == sorted(kls, reverse=True) and kls[-1] > 0
    for entry in worst:
        assert entry["before"] + entry["token"] in TEXTS["prose"]
        assert TEXTS["prose"][entry["position"]] == entry["token"]


def test_behind_the_last_layer_the_lens_is_the_model(models):
    lm, exact = models
    text = TEXTS["prose"][:64]
    report = reports.damage(lm, {"prose": text + "?"}, 65, reference=exact)
    layers = report["layers"]["prose"]
    assert len(layers["kl"]) == CFG.n_layers
    whole = report["kinds"]["prose"]
    # The lens reads the last token too, whose successor nobody scores.
    assert layers["kl"][-1] == pytest.approx(whole["kl"], rel=0.1)
    itself = reports.damage(exact, {"prose": text}, 64, reference=exact)["layers"]["prose"]
    np.testing.assert_allclose(itself["kl"], 0, atol=1e-6)
    assert itself["top1"] == [1.0] * CFG.n_layers


def test_table_json_and_picture(models, tmp_path):
    lm, exact = models
    report = reports.damage(lm, TEXTS, 64, reference=exact)
    text = reports.table(report)
    assert "prose" in text and "±" in text and "worst predictions" in text
    reports.write(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["kinds"] == report["kinds"]
    reports.write(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")

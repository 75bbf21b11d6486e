"""Minutes of evidence on the Bible's bytes: curves beside torch's, SIGKILL.

pytest -m slow tests/training/test_training_slow.py -s          needs Debian's bible-kjv
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxllama.config import configs_dir
from jaxllama.quantization.random_params import random_params
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import load_train_config, train
from jaxllama.training.corpus import bible
from jaxllama.training.data import TokenFile, tokenize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    if shutil.which("bible") is None:
        pytest.skip("the command `bible` is missing: apt-get install bible-kjv")
    folder = tmp_path_factory.mktemp("bible")
    (folder / "bible.txt").write_text(bible(), encoding="utf-8")
    return tokenize([folder / "bible.txt"], folder / "tokens", Tokenizer.byte_level()).directory


def shipped(name: str, tokens, **changes):
    """A shipped file, shortened."""
    config = load_train_config(configs_dir() / "training" / f"{name}.toml")
    data = dataclasses.replace(config.data, tokens=str(tokens), validation_tokens=8192)
    changes = {
        "batch_size": 8,
        "sequence_length": 64,
        "validate_every": 0,
        "checkpoint_every": 0,
        **changes,
    }
    return dataclasses.replace(config, data=data, **changes)


@pytest.mark.parametrize("family", ["llama", "gla"])
def test_loss_falls_to_what_torch_reaches(family, tokens, tmp_path):
    """The same weights, batches and settings for 200 steps; the bar is 2%."""
    torch = pytest.importorskip("torch")
    from tests.helpers.training_torch import gla_model, losses, transformers_model

    config = shipped(f"tiny-{family}", tokens, steps=200)
    config = dataclasses.replace(config, model=config.model.replace(eos_token_ids=()))
    got = [row["loss"] for row in train(config, tmp_path / "run").metrics]
    params = random_params(config.model, jax.random.key(config.seed))
    if family == "gla":
        model, leaves = gla_model(config.model, params, torch.float32)
    else:
        model, leaves = transformers_model(config.model, params, torch.float32, tmp_path / "llama")
    data, _ = TokenFile.open(tokens).split(8192)
    want = losses(config, model, leaves, [data.batch(s, 8, 64, config.seed) for s in range(200)])
    ours, theirs = np.mean(got[-20:]), np.mean(want[-20:])
    print(
        f"\n{family}: {got[0]:.4f} -> {ours:.4f}, torch {theirs:.4f}; largest difference of a "
        f"step {np.max(np.abs(np.divide(got, want) - 1)):.1e}"
    )
    assert ours < 2.8 and abs(ours / theirs - 1) < 0.02


def test_sigkill_at_any_moment_changes_nothing(tokens, tmp_path):
    """A process that is killed where it happens to be, four times, and one that is not."""
    config = shipped("tiny-gla", tokens, steps=60, checkpoint_every=3, validate_every=7)
    model = None if config.model is None else config.model.to_dict()
    table = json.loads(json.dumps({**dataclasses.asdict(config), "model": model}))
    table = {key: value for key, value in table.items() if value is not None}
    (tmp_path / "run.json").write_text(json.dumps(table))
    program = (
        "import json, sys; from jaxllama.training import train, train_config_from_dict as f;"
        "train(f(json.load(open(sys.argv[1])), 'run'), sys.argv[2])"
    )

    def start(out):
        return subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "run.json", out],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )

    assert start(tmp_path / "whole").wait() == 0
    rng, kills = random.Random(0), 0
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while kills < 4:
        process = start(tmp_path / "killed")
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        more = rng.randrange(1, 16)
        while process.poll() is None:
            now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if now < lines:  # it went back to its checkpoint
                lines = now
            if now >= lines + more:
                time.sleep(rng.random() * 0.1)
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        if process.wait() == 0:
            break
        kills += 1
    if not (tmp_path / "killed" / "model").exists():
        assert start(tmp_path / "killed").wait() == 0
    print(f"\n{kills} kills")
    assert kills >= 2
    clock = ("seconds", "tokens_per_second", "mfu")
    curves = []
    for name in ("whole", "killed"):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        curves.append([{k: v for k, v in row.items() if k not in clock} for row in rows])
    assert curves[0] == curves[1]
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]

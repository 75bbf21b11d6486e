"""Tiny runs that the training tests share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import TrainConfig, train_config_from_dict
from jaxllama.training.data import tokenize
from jaxllama.training.start import TrainingSetup
from tests.helpers.models import FAMILIES
from tests.helpers.parity_cases import CASES as PARITY
from tests.helpers.seeded import seeded_params

TEXT = (Path(__file__).parents[1] / "golden" / "english.txt").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parents[1] / "golden" / "training.npz"
# What torch has answered: of which model which part of training.
CASES = (
    "gradients/gla",
    "gradients/gqa",
    "curve/gla",
    "curve/gqa",
    "steps/gemma2",
    "steps/gemma3_text",
    "steps/granite",
    "steps/cohere",
)


def byte_model(family: str, **changes: Any) -> ModelConfig:
    """A tiny model over bytes that flash-linear-attention's files have words for."""
    cfg = FAMILIES[family].replace(vocab_size=256, eos_token_ids=(), **changes)
    if cfg.gla is not None:
        cfg = cfg.replace(gla=dataclasses.replace(cfg.gla, norm_eps=cfg.norm_eps))
    return cfg


def token_file(folder: Path) -> Path:
    """A folder of English bytes, made once for ``folder``."""
    out = folder / "tokens"
    if not out.exists():
        (folder / "english.txt").write_text(TEXT, encoding="utf-8")
        tokenize([folder / "english.txt"], out, Tokenizer.byte_level())
    return out


def run_config(folder: Path, cfg: ModelConfig | None = None, **changes: Any) -> TrainConfig:
    """A dozen steps on English bytes."""
    table = {
        "steps": 12,
        "batch_size": 4,
        "sequence_length": 24,
        "learning_rate": 3e-3,
        "optimizer": {"warmup_steps": 2},
        "data": {"tokens": str(token_file(folder))},
        **({} if cfg is None else {"model": cfg.to_dict()}),
        **changes,
    }
    return train_config_from_dict(table, "test.toml")


def rollout_setup(cfg: ModelConfig, **changes: Any) -> TrainingSetup:
    """A step on answers that the model has given. changes: of the run's settings."""
    table = {
        "steps": 1,
        "batch_size": 4,
        "sequence_length": 32,
        "learning_rate": 1e-3,
        "init_from": "x",
        "data": {"prompts": "x"},
        "rollout": {"max_new_tokens": 4, "samples": 4},
        "reward": {"kind": "exact"},
        **changes,
    }
    return TrainingSetup(train_config_from_dict(table, "x"), cfg)


def first_params(cfg: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Seeded weights as small as a run begins with: larger ones magnify rounding step by step."""
    small = lambda leaf: leaf * np.float32(0.2) if leaf.ndim > 1 else leaf  # noqa: E731
    return jax.tree.map(small, seeded_params(cfg, seed))


def rows_of(cfg: ModelConfig, batch: int, length: int, seed: int = 0) -> np.ndarray:
    """int32 ``[batch, length]`` tokens that every version of numpy draws alike."""
    raw = np.random.PCG64(seed).random_raw(batch * length)
    return (raw % np.uint64(cfg.vocab_size)).astype(np.int32).reshape(batch, length)


def family_case(name: str, folder: Path) -> tuple[ModelConfig, TrainConfig, list[np.ndarray]]:
    """A family's tiny model, the settings of twenty steps, and their batches."""
    cfg = PARITY[name]
    config = run_config(folder, byte_model("gqa"), steps=20)
    return cfg, config, [rows_of(cfg, 2, 13, seed) for seed in range(20)]


def sampled(array: np.ndarray) -> np.ndarray:
    """Every seventh value: no row or column of these models is left out."""
    return np.asarray(array).reshape(-1)[::7]

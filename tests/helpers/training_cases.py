"""Tiny runs that the training tests share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxllama.config import ModelConfig
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import TrainConfig, train_config_from_dict
from jaxllama.training.data import tokenize
from tests.helpers.models import FAMILIES

TEXT = (Path(__file__).parents[1] / "golden" / "english.txt").read_text(encoding="utf-8")


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
        "steps": 12, "batch_size": 4, "sequence_length": 24, "learning_rate": 3e-3,
        "optimizer": {"warmup_steps": 2}, "data": {"tokens": str(token_file(folder))},
        **({} if cfg is None else {"model": dataclasses.asdict(cfg)}), **changes,
    }  # fmt: skip
    return train_config_from_dict(table, "test.toml")

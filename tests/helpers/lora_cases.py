"""PEFT directories of random adapters, written by hand, and what they add to a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.checkpoints.peft import Factors
from jaxllama.config import ModelConfig
from jaxllama.model.param import piece_of

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": None}


def modules(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every product of the layers by its name in the checkpoint, with the shape of its weight."""
    return {
        source.name.removesuffix(".weight"): source.shape
        for path, param in param_table(cfg).items()
        if path[-2] in ("qkv", "qkvz", "o", "gate_up", "down", "q", "k", "v", "g")
        and path[-1] == "weight"
        for source in param.sources
        if piece_of(source.name) is None
    }


def tensors(cfg: ModelConfig, seed: int, rank: int = 4, only: str = ".") -> dict[str, np.ndarray]:
    """Factors for the modules that ``only`` finds, under the names of PEFT's files."""
    rng = np.random.default_rng(seed)
    found = {}
    for module, (out, width) in modules(cfg).items():
        if re.search(only, module):
            name = f"base_model.model.{module}.lora"
            a, b = rng.normal(size=(rank, width)) * width**-0.5, rng.normal(size=(out, rank)) * 0.3
            found[f"{name}_A.weight"] = a.astype(np.float32)
            found[f"{name}_B.weight"] = b.astype(np.float32)
    return found


def factors(cfg: ModelConfig, seed: int, rank: int = 4, only: str = ".") -> Factors:
    """What is read of such files with alpha / r = 2, of a family that folds nothing."""
    raw = tensors(cfg, seed, rank, only)
    names = [name for name in raw if name.endswith("lora_A.weight")]
    return {
        f"{name[len('base_model.model.') : -len('.lora_A.weight')]}.weight": (
            raw[name],
            2 * raw[name.replace("lora_A", "lora_B")],
        )
        for name in names
    }


def write(path: Path, factors: dict[str, np.ndarray], **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(factors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def merged(
    cfg: ModelConfig,
    checkpoint: dict[str, np.ndarray],
    factors: dict[str, np.ndarray],
    scale: float,
) -> dict[str, np.ndarray]:
    """The checkpoint's tensors with ``scale * B @ A`` added, in float64; transposed as they are
    (GPT-2's)."""
    sources = [source for param in param_table(cfg).values() for source in param.sources]
    turned = {source.name for source in sources if source.is_transposed}
    out = dict(checkpoint)
    for name in factors:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = factors[name.replace("lora_A", "lora_B")]
            added = scale * b.astype(np.float64) @ factors[name].astype(np.float64)
            added = added.T if f"{module}.weight" in turned else added
            out[f"{module}.weight"] = (out[f"{module}.weight"] + added).astype(np.float32)
    return out

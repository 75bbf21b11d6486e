"""Models as their files have them, against a reference in numpy that reads the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from tests.helpers.models import relative_error, tokens_of
from tests.helpers.seeded import seeded_params

Reference = Callable[[dict[str, Any], dict[str, np.ndarray], np.ndarray], np.ndarray]


def is_as_in_files(
    config: dict[str, Any],
    reference: Reference,
    folder: Path,
    width: int,
    bound: float,
    with_steps: bool = True,
) -> None:
    """Saving and loading changes nothing; logits are the reference's (config, tensors, tokens) to
    the bound. with_steps: so they are where the model takes half of the text and then steps."""
    cfg = config_from_hf(config, "tiny")
    assert config_from_hf(config_to_hf(cfg), "tiny") == cfg
    directory = hf.save(folder / "tiny", cfg, seeded_params(cfg, seed=5))
    loaded, params = hf.load(directory)
    assert loaded == cfg
    tokens, lengths = np.asarray(tokens_of(cfg, 1, width)), np.array([width], np.int32)
    want = reference(config, load_file(directory / "model.safetensors"), tokens[0])
    assert relative_error(jl.logits(cfg, params, tokens, lengths)[0], want) <= bound
    if not with_steps:
        return
    half = width // 2
    cache = jl.init_cache(cfg, 1, width, dtype="float32")
    found, cache = jl.prefill(cfg, params, tokens[:, :half], lengths - width + half, cache)
    for t in range(half, width):
        assert relative_error(found[0], want[t - 1]) <= bound
        found, cache = jl.decode_step(cfg, params, tokens[:, t], cache)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def convolved(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """silu of the causal convolution of ``x[T, D]`` with ``taps[D, 1, W]``, feature by feature."""
    width = taps.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return silu(sum(padded[w : w + len(x)] * taps[:, 0, w] for w in range(width)))

"""Models as their files have them, against a reference that reads the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from tests.helpers.models import relative_error, tokens_of
from tests.helpers.seeded import seeded_params

Reference = Callable[[dict[str, Any], dict[str, np.ndarray], np.ndarray], np.ndarray]


def is_as_in_files(
    config: dict[str, Any], reference: Reference, folder: Path, prompt: int, new: int, bound: float
) -> None:
    """Saving and loading changes nothing; logits are the reference's (config, tensors, tokens) to
    the bound, and so are the greedy tokens."""
    cfg = config_from_hf(config, "tiny")
    assert config_from_hf(config_to_hf(cfg), "tiny") == cfg
    directory = hf.save(folder / "tiny", cfg, seeded_params(cfg, seed=5))
    loaded, params = hf.load(directory)
    assert loaded == cfg
    row = np.asarray(tokens_of(cfg, 1, prompt))
    state = jl.generate(
        cfg, params, jnp.asarray(row), jnp.array([prompt], jnp.int32),
        jl.init_cache(cfg, 1, prompt + new, dtype=jnp.float32), jl.Sampling(), 0, new,
    )  # fmt: skip
    tokens = np.concatenate([row[0], np.asarray(state.tokens[0])])
    want = reference(config, load_file(directory / "model.safetensors"), tokens)
    got = jl.logits(cfg, params, jnp.asarray(tokens)[None], jnp.array([len(tokens)], jnp.int32))
    assert relative_error(got[0], want) <= bound
    assert want[prompt - 1 : -1].argmax(-1).tolist() == tokens[prompt:].tolist()

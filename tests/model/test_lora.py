"""LoRA adapters: merged and beside the weights, the same numbers as PEFT and as plain numpy.

Bound: 1e-5 of the largest logit in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllama as jl
from jaxllama import generation
from jaxllama.checkpoints.hf import load as hf
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import for_rows
from tests.helpers import lora_cases
from tests.helpers.models import FAMILIES, relative_error
from tests.helpers.parity_cases import CASES, params_of, tokens_of
from tests.helpers.seeded import seeded_params

BOUND = 1e-5
WEIGHTS = "model.safetensors"


def saved(path: Path, name: str) -> Path:
    """A checkpoint of a tiny model."""
    if name in CASES:
        return hf.save(path, CASES[name], params_of(name))
    return hf.save(path, FAMILIES[name], seeded_params(FAMILIES[name]))


def scores(lm: LanguageModel, rows: list[int] | None = None, n: int = 32) -> np.ndarray:
    """Logits ``[B, n, V]`` of the same tokens in every row; rows: their adapters."""
    batch = 1 if rows is None else len(rows)
    params = lm.params if rows is None else for_rows(lm.params, jnp.asarray(rows, jnp.int32))
    tokens = np.tile(tokens_of("llama-gqa")[:n], (batch, 1))
    lengths = jnp.full((batch,), n, jnp.int32)
    return np.asarray(generation.logits(lm.config, params, jnp.asarray(tokens), lengths))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


# (model, the modules of its second adapter)
@pytest.mark.parametrize(
    ("name", "only"),
    [("phi3-partial-longrope", "qkv_proj|down"), ("granite-bias", "[ko]_proj|up"),
     ("gla", "[qg]_proj$")],
)  # fmt: skip
def test_merged_and_unmerged_are_the_checkpoint_with_the_factors_product(name, only, tmp_path):
    """Where the family folds multipliers into its rows, or has them in another order, too."""
    base = saved(tmp_path / "base", name)
    cfg = hf.read_config(base)
    checkpoint = load_file(base / WEIGHTS)
    one, two = lora_cases.tensors(cfg, 1), lora_cases.tensors(cfg, 2, rank=2, only=only)
    adapters = {
        "one": lora_cases.write(tmp_path / "one", one),
        "two": lora_cases.write(tmp_path / "two", two, r=2, lora_alpha=3, use_rslora=True),
    }
    want = [scores(jl.load(base))]
    for factors, scale in ((one, 8 / 4), (two, 3 / 2**0.5)):
        save_file(lora_cases.merged(checkpoint, factors, scale), base / WEIGHTS)
        want.append(scores(jl.load(base)))
    save_file(checkpoint, base / WEIGHTS)
    for number, key in enumerate(adapters, 1):
        assert relative_error(want[number], want[0]) > 0.1
        merged = jl.load(base, adapters={key: adapters[key]}, merge=True)
        assert merged.adapters == () and relative_error(scores(merged), want[number]) <= BOUND
    lm = jl.load(base, adapters=adapters)
    got = scores(lm, [2, 0, 1, 2])
    for row, number in enumerate([2, 0, 1, 2]):
        assert relative_error(got[row], want[number][0]) <= BOUND
    assert same(got[0], got[3])
    assert same(scores(lm), want[0])  # no rows: the base model's program

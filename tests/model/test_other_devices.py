"""Programs lowered for TPUs and AMD's GPUs, in XLA's forms: lowered, not run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxllama as jl
from jaxllama.config import ModelConfig
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update
from tests.helpers.training_cases import byte_model, run_config

# jax's name of the backend where each platform runs.
BACKENDS = {"tpu": "tpu", "rocm": "gpu"}
ROWS, LENGTH = 2, 24


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _drawn(cfg: ModelConfig, dtype: Any) -> Any:
    return jl.init_params(cfg, jax.random.key(0), dtype)


def _prefill(cfg: ModelConfig, folder: Path) -> Any:
    params = jax.eval_shape(lambda: _drawn(cfg, jnp.bfloat16))
    cache = jax.eval_shape(lambda: jl.init_cache(cfg, ROWS, 64, jnp.bfloat16))
    return jl.prefill.trace(cfg, params, _int32(ROWS, LENGTH), _int32(ROWS), cache)


def _decode(cfg: ModelConfig, folder: Path) -> Any:
    params = jax.eval_shape(lambda: _drawn(cfg, jnp.bfloat16))
    cache = jax.eval_shape(lambda: jl.init_cache(cfg, ROWS, 64, jnp.bfloat16))
    return jl.decode_step.trace(cfg, params, _int32(ROWS), cache)


def _train(cfg: ModelConfig, folder: Path) -> Any:
    setup = TrainingSetup(run_config(folder, cfg), cfg)
    state = jax.eval_shape(lambda: init_state(setup, _drawn(cfg, jnp.float32)))
    return update.trace(setup, state, None, _int32(1, 4, LENGTH + 1))


@pytest.mark.parametrize("platform", BACKENDS)
@pytest.mark.parametrize("program", [_prefill, _decode, _train], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("family", ["gqa", "gla"])
def test_a_program_is_lowered(
    family: str,
    program: Callable[[ModelConfig, Path], Any],
    platform: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other device's kernel or library is in it, and its products are XLA's."""
    monkeypatch.setattr(jax, "default_backend", functools.partial(str, BACKENDS[platform]))
    cfg = byte_model(family).first_layers(1)
    jax.clear_caches()  # of functions that were traced for this machine
    text = program(cfg, tmp_path).lower(lowering_platforms=(platform,)).as_text()
    assert not any(word in text for word in ("mosaic", "pallas_kernels", "cudnn"))
    assert text.count("stablehlo.dot_general") >= 5  # q|k|v, o, gate|up, down, and the head

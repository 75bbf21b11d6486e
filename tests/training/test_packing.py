"""Several sequences in a row: each is computed as if it stood alone, gradients included."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import GLAConfig
from jaxllama.model.stacked import hidden_states
from tests.helpers.models import DELTA, LLAMA, relative_error
from tests.helpers.seeded import seeded_params
from tests.helpers.training_cases import rows_of

LENGTHS = (5, 11, 3)
GLA = GLAConfig(n_heads=4, n_kv_heads=2, expand_k=0.5, expand_v=1.0, use_short_conv=True)
MIXED = LLAMA.replace(
    n_layers=3,
    layer_types=("gla", "attention", "delta"),
    gla=GLA,
    delta=DELTA,
    sliding_window=4,
)
KDA = dataclasses.replace(DELTA, n_k_heads=4, decay="channel", gate="low_rank", gate_bias=True)
MODELS = {
    "gla, attention, delta": MIXED,
    "ssm": LLAMA.replace(
        n_layers=1, layer_types=("ssm",), mixers={"ssm": {"n_heads": 4, "head_dim": 16, "state": 8}}
    ),
    "kda, capped attention": LLAMA.replace(
        layer_types=("delta", "attention"), delta=KDA, attn_softcap=2.0
    ),
}


def laid_out(tokens: list[np.ndarray], weights: list[np.ndarray], packed: bool):
    """(tokens, segments or None, weights) with the sequences in one row, or in a row each."""
    if packed:
        ids = [np.full(len(row), number + 1, np.int32) for number, row in enumerate(tokens)]
        return tuple(np.concatenate(part)[None] for part in (tokens, ids, weights))
    width = max(map(len, tokens))
    pad = lambda row: np.pad(row, [(0, width - len(row)), *[(0, 0)] * (row.ndim - 1)])  # noqa: E731
    return np.stack([*map(pad, tokens)]), None, np.stack([*map(pad, weights)])


def both_ways(name: str, with_gradients: bool):
    """(gradients or None, states ``[1 or 3, T, D]``) of rows alone and of a packed row."""
    cfg = MODELS[name]
    params = seeded_params(cfg)
    rng = np.random.default_rng(0)
    tokens = [rows_of(cfg, 1, n, seed)[0] for seed, n in enumerate(LENGTHS)]
    weights = [rng.normal(size=(n, cfg.d_model)).astype(np.float32) for n in LENGTHS]

    @jax.jit
    def run(params, tokens, segments, weights):
        def total(params):
            x = hidden_states(cfg, params, tokens, jnp.dtype("float32"), segments)
            return jnp.sum(x * weights), x

        if with_gradients:
            return jax.grad(total, has_aux=True)(params)
        return None, total(params)[1]

    return [run(params, *laid_out(tokens, weights, packed)) for packed in (False, True)]


def check_rows(alone, packed):
    rows = np.split(np.asarray(packed[0]), np.cumsum(LENGTHS)[:-1])
    for row, want, n in zip(rows, np.asarray(alone), LENGTHS, strict=True):
        assert relative_error(row, want[:n]) < 2e-6


@pytest.mark.core
@pytest.mark.parametrize("name", ["gla, attention, delta", "ssm"])
def test_packed_rows_equal_rows_alone(name):
    (_, alone), (_, packed) = both_ways(name, with_gradients=False)
    check_rows(alone, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_packed_gradients_equal_those_of_rows_alone(name):
    (want_grads, alone), (grads, packed) = both_ways(name, with_gradients=True)
    check_rows(alone, packed)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        if np.any(want):  # not the head's, which nothing reads here
            assert relative_error(got, want) < 1e-5

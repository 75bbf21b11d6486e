"""Prompts whose tokens the devices of a mesh share, against one device.

The comparisons run in a child process with 8 CPU devices (``sequence_child``).  Values may differ
by what reordered float32 sums leave, and with a quantized cache by a code that falls the other way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllama.config import ExpertsConfig
from jaxllama.model.sharded import layer_work
from jaxllama.parallel.mesh import make_mesh
from jaxllama.parallel.sequence import (
    cut,
    is_cut,
    joined,
    least_tokens,
    piece_width,
    sequence_shards,
)
from tests.helpers.compiling import results_of
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

BOUND = {"float32": 1e-5, "prompt": 1e-5, "int8": 0.02, "int4": 0.2}
FULL = [
    "gqa:4x1",
    "gqa:8x1:prompt",
    "gqa:2x4",
    "gqa:4x1:int8",
    "gqa:2x2:int4",
    "mqa-window:4x1",
    "gqa:4x1:float32:cudnn",
    "gqa:4x1:int8:cudnn",
    "mqa-window:2x1:float32:cudnn",
    "sinks:2x2",
    "gla:4x1",
    "gla-variant:4x2",
    "gdn:4x1",
    "kda:4x1",
    "delta:2x2",
    "ssm:4x1",
    "short-conv:2x1",
    "hybrid:4x2",
    "experts:4x2",
]


def result_of(name: str) -> dict:
    [result] = results_of("sequence_child", name)
    assert result["is_cut"], "the devices did not share the prompt"
    return result


def check(name: str) -> None:
    result = result_of(name)
    bound = BOUND[(name.split(":")[2:] or ["float32"])[0]]
    assert result["logits"] < bound, result
    assert result["cache"] < bound, result


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_every_mixer_passes_its_state_from_piece_to_piece(name):
    check(name)


@pytest.mark.slow
def test_an_engine_with_pages_shares_the_chunks_of_its_prompts():
    result = result_of("engine:4x1")
    assert result["same"], result
    assert len({token for row in result["tokens"].values() for token in row}) > 3


@pytest.mark.parametrize("n_new, n", [(48, 4), (13, 2), (5000, 4)])
def test_pieces_join_to_the_rows_that_were_cut(n_new, n):
    x = jnp.arange(3 * n_new * 2, dtype=jnp.int32).reshape(3, n_new, 2)
    pieces = cut(x, n, piece_width(n_new, n))
    assert pieces.shape[0] == 2 * n * 3
    np.testing.assert_array_equal(joined(pieces, 3, n, n_new), x)


def test_a_device_has_an_early_and_a_late_piece():
    tokens = jnp.arange(16, dtype=jnp.int32)[None]
    first = cut(tokens, 4, 2)[:2]  # device 0's
    assert first.tolist() == [[0, 1], [14, 15]]


def test_one_device_and_no_mesh_share_nothing():
    assert sequence_shards(None, 1) == 1
    assert sequence_shards(make_mesh("data=1"), 1) == 1


def test_gpus_share_a_prompt_from_the_length_on_that_pays(monkeypatch):
    mesh = AbstractMesh((4, 1), ("data", "model"))
    work = 218e6  # Llama-3.1-8B's
    assert 2048 < least_tokens(work) < 4096
    assert is_cut(mesh, 1, 2048, work=work)  # CPUs have no launches to wait for
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cases = [(1, 2048, work), (1, 4096, work), (2, 2048, work), (1, 4096, 4e6), (1, 131072, 50e6)]
    assert [is_cut(mesh, rows, width, work=each) for rows, width, each in cases] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_work_counts_the_experts_that_a_token_has():
    one, all_of_them = (LLAMA.replace(experts=ExpertsConfig(8, n, 32)) for n in (1, 8))
    params = jax.eval_shape(lambda: seeded_params(one))
    experts = 8 * 3 * 32 * LLAMA.d_model
    rest = layer_work(one, params) - experts / 8
    assert layer_work(all_of_them, params) == rest + experts

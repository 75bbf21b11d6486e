"""Mixtures of published forms on meshes: one device's tokens, and no more than a share of memory.

The models run in a child process with 8 CPU devices (``mixture_mesh_child``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllama.config import ExpertsConfig
from jaxllama.engine.options import _bytes_of_device
from jaxllama.model.cache import init_pages
from jaxllama.parallel.exchange import exchange_sizes
from jaxllama.quantization.random_params import _alike
from tests.helpers.compiling import environment
from tests.helpers.models import LATENT, LLAMA

ROOT = Path(__file__).parents[2]
# Devices that divide the rows, the experts, and the heads.
MESHES = {
    "model=2": (1, 2, 2),
    "expert=2": (2, 2, 1),
    "data=2": (2, 1, 1),
    "expert=4,model=2": (4, 8, 2),
    "data=2,expert=4": (8, 4, 1),
}


def lines(*arguments: str) -> list[dict]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.mixture_mesh_child", *arguments],
        cwd=ROOT,
        env=environment(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["glm-4.7-flash", "gpt-oss", "deepseek-v3"])
def test_tokens_are_one_devices_and_memory_is_a_share(form):
    one, *places = lines(form, *MESHES)
    assert one["engine"] == one["generate"]
    assert len({token for row in one["generate"] for token in row}) > 20
    pages, experts = one["pages"]["0"], one["experts"]["0"]
    for place, (name, (rows, parts, heads)) in zip(places, MESHES.items(), strict=True):
        assert place["generate"] == one["generate"], name
        assert place["engine"] == one["generate"], name
        shares = rows * (heads if form == "gpt-oss" else 1)  # a latent is whole for all heads
        assert set(place["pages"].values()) == {pages // shares}, name
        assert set(place["experts"].values()) == {experts // parts}, name
        rest = one["weights"]["0"] - experts
        least = 0.4 * rest if heads > 1 else rest  # norms, routers and latents stay whole
        for device, nbytes in place["weights"].items():
            assert least <= nbytes - place["experts"][device] <= rest, name


@pytest.mark.slow
def test_random_weights_are_drawn_in_their_parts():
    whole, *places = lines("random", "data=2", "model=2", "expert=2", "expert=4,model=2")
    for place, parts in zip(places, (2, 2, 8), strict=True):
        assert place["same"], "not one device's weights"
        assert set(place["experts"].values()) == {whole["experts"]["0"] // parts}
        assert place["drawing"] < 1.05 * whole["drawing"] / parts


@pytest.mark.slow
def test_files_are_read_without_a_copy_of_the_model_in_host_memory():
    for place, parts in zip(lines("load", "expert=2", "expert=8"), (2, 8), strict=True):
        assert len(place["experts"]) == parts
        assert len(set(place["experts"].values())) == 1
        assert place["peak"] < place["total"] / 3


def test_layers_share_the_program_of_their_own_kind():
    """The first layer of GLM-4.7-Flash is dense, and the shared experts of the others are not."""
    experts = ExpertsConfig(8, 2, 32, shared=32)
    cfg = LLAMA.replace(n_layers=3, experts=experts, expert_layers=(1, 2))
    path = "mlp", "gate_up", "weight"
    found = [_alike(cfg, (f"layer_{index}", *path))[0] for index in range(3)]
    assert found == ["layer_0", "layer_1", "layer_1"]


@pytest.mark.parametrize(("cfg", "share"), [(LATENT, 1), (LLAMA, 2)])
def test_a_device_counts_the_bytes_of_a_token_that_it_holds(cfg, share):
    """Heads are divided over "model", but all of them read one latent."""
    shape = jax.eval_shape(lambda: init_pages(cfg, 1, 1, 4, 4, "float32")).layers[0]
    whole = sum(int(np.prod(x.shape)) * 4 for x in jax.tree.leaves(shape))
    assert _bytes_of_device(shape, 2) == whole // share


@pytest.mark.parametrize(
    ("n_tokens", "n", "k", "sizes"),
    [
        (255, 8, 2, (255,)),  # few tokens
        (256, 8, 2, (64, 128, 256)),
        (4096, 2, 4, (4096,)),  # nearly every token goes to both devices
        (4096, 8, 8, (4096,)),
        (4096, 16, 8, (1024, 2048, 4096)),
    ],
)
def test_an_exchange_has_places_for_all_tokens_where_most_go_everywhere(n_tokens, n, k, sizes):
    assert exchange_sizes(n_tokens, n, k) == sizes

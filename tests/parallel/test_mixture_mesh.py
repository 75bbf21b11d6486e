"""Mixtures of published forms on meshes: one device's tokens, and no more than a share of memory.

The models run in a child process with 8 CPU devices (``mixture_mesh_child``).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxllama.config import ExpertsConfig, LatentConfig, RopeConfig
from jaxllama.engine.options import _bytes_of_device
from jaxllama.engine.slots import empty_slots, slots_shardings
from jaxllama.model.cache import init_pages
from jaxllama.model.shardings import specs
from jaxllama.parallel.exchange import exchange_sizes
from jaxllama.parallel.mesh import AXES
from jaxllama.quantization import random_params
from jaxllama.quantization.random_params import _alike
from jaxllama.typing import Tree
from tests.helpers.compiling import results_of
from tests.helpers.models import LATENT, LLAMA

# Devices that divide the rows, the experts, and the heads.
MESHES = {
    "model=2": (1, 2, 2),
    "expert=2": (2, 2, 1),
    "data=2": (2, 1, 1),
    "expert=4,model=2": (4, 8, 2),
    "data=2,expert=4": (8, 4, 1),
}

DEEPSEEK_V3 = LATENT.replace(
    vocab_size=129280,
    d_model=7168,
    n_layers=61,
    n_heads=128,
    n_kv_heads=128,
    head_dim=192,
    d_ff=18432,
    max_position=163840,
    latent=LatentConfig(kv_rank=512, d_nope=128, d_rope=64, d_v=128, q_rank=1536),
    rope=RopeConfig(theta=10000.0, rotary_dim=64),
    layer_types=("latent",) * 61,
    expert_layers=tuple(range(3, 61)),
    experts=ExpertsConfig(256, 8, 2048, scores="sigmoid", choice_bias=True, shared=2048),
)


lines = functools.partial(results_of, "mixture_mesh_child")


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


def bytes_of_device(tree: Tree, places: Tree) -> int:
    """Return the bytes of a device, of shapes and of how they are split."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    return sum(math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize for x, at in pairs)


@pytest.mark.parametrize(
    ("sizes", "weights", "cache"),
    [((1, 8, 1), 104.2, 4.6), ((1, 4, 2), 94.7, 9.2), ((1, 1, 8), 87.5, 36.8)],
    ids=["expert=8", "expert=4,model=2", "model=8"],
)
def test_a_model_of_671_billion_parameters_on_eight_devices(sizes, weights, cache):
    """The table of ``docs/howto/mesh.md``: GB of a device, with 256 rows of 2,048 tokens."""
    mesh = AbstractMesh(sizes, AXES)
    cfg = DEEPSEEK_V3.replace(n_layers=4, layer_types=("latent",) * 4, expert_layers=(3,))
    shapes = random_params._shapes(cfg, jnp.bfloat16, "fp8-block,head=none")
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(shapes, mesh),
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )
    found = bytes_of_device(shapes, places)
    found += 57 * bytes_of_device(shapes["layer_3"], places["layer_3"])
    assert found / 1e9 == pytest.approx(weights, abs=0.05)
    args = cfg, 256, 32, 256 * 32, 64, 0, "bfloat16", 0, None, None, sizes[0] * sizes[1]
    slots = jax.eval_shape(lambda: empty_slots(*args))
    places = slots_shardings(slots, mesh)
    found = bytes_of_device(slots.cache.layers, places.cache.layers) * 61 / 4
    assert found / 1e9 == pytest.approx(cache, abs=0.05)

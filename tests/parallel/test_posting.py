"""Which sums of a decode step are posted, and in which order."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxllama import compiler_options
from jaxllama.executors import posting
from jaxllama.model.linear import POST
from jaxllama.model.shardings import specs
from jaxllama.parallel import mailboxes
from jaxllama.parallel.mesh import make_mesh
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params


class _Mesh:
    shape = {"data": 1, "model": 2}


@pytest.fixture
def params(monkeypatch):
    monkeypatch.setattr(posting, "mesh_of", lambda _: _Mesh)
    monkeypatch.setattr(compiler_options, "for_mesh", lambda _: {})
    monkeypatch.setattr(posting, "can_post", lambda x, w: True)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), seeded_params(LLAMA))
    return jax.device_put(params)


def test_the_sums_of_a_step_have_tables_in_its_order(params, monkeypatch):
    asked = []
    monkeypatch.setattr(posting, "sum_tables", lambda *sizes: asked.append(sizes) or range(4))
    cfg = LLAMA.replace(n_layers=2, layer_types=("attention",) * 2)
    got = posting.posting(cfg, params, 1)
    assert asked == [(_Mesh, cfg.d_model, 4)]
    layers = [got[f"layer_{i}"] for i in range(2)]
    assert [[p["mixer"]["o"][POST], p["mlp"]["down"][POST]] for p in layers] == [[0, 1], [2, 3]]
    assert POST not in params["layer_0"]["mixer"]["o"]
    table = jnp.zeros((2, 4, 2), jnp.int32)
    linear = {"layer_0": {"mixer": {"o": {"weight": jnp.ones((8, 8)), POST: table}}}}
    assert specs(linear)["layer_0"]["mixer"]["o"][POST] == P("model")


@pytest.mark.parametrize(
    "rows,changes", [(2, {}), (1, {"parallel_block": True}), (1, {"beside_layers": (0,)})]
)
def test_other_steps_have_none(params, monkeypatch, rows, changes):
    monkeypatch.setattr(posting, "sum_tables", lambda *_: pytest.fail("asked for tables"))
    cfg = LLAMA.replace(n_layers=2, layer_types=("attention",) * 2, **changes)
    assert posting.posting(cfg, params, rows) is params


def test_devices_without_access_have_no_tables():
    mesh = make_mesh("model=1")
    assert mailboxes.sum_tables(mesh, 64, 4) is None  # CPUs
    assert mailboxes.sum_tables(mesh, 64, 6) is None  # not all slots

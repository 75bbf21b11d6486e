"""Which sums of a decode step are posted, and in which order."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllama import compiler_options
from jaxllama.executors import posting
from jaxllama.model.linear import POST
from jaxllama.model.shardings import specs
from jaxllama.parallel import mailboxes
from jaxllama.parallel import shared_memory as sharing
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


class _Processes:
    """Two processes with two devices each, as threads; what they allocate is at 1000 * device."""

    def __init__(self, monkeypatch, hosts=(b"a" * 16, b"a" * 16), refuses=()):
        self.devices = [
            SimpleNamespace(process_index=i // 2, local_hardware_id=i) for i in range(4)
        ]
        self.refuses, self.hosts, self.told = refuses, hosts, [None, None]
        self.barrier, self.number = threading.Barrier(2, timeout=20), threading.local()
        monkeypatch.setattr(sharing, "_host", lambda: self.hosts[self.number.index])

    def allocate(self, ordinal, nbytes):
        assert nbytes == 96
        return 1000 * ordinal, bytes([ordinal]) * 64

    def open(self, ordinal, handle):
        if (ordinal, handle[0]) in self.refuses:
            raise OSError("cuIpcOpenMemHandle_v2: 101")
        return 1000 * handle[0] + ordinal + 1

    def _gather(self, array):
        self.told[self.number.index] = array
        self.barrier.wait()
        everyone = np.stack(self.told)
        self.barrier.wait()
        return everyone

    def run(self):
        def one(index):
            self.number.index = index
            made = {"driver": lambda: self, "process": index}
            return sharing.shared_memory(self.devices, 96, self._gather, **made)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


def test_processes_of_a_host_see_each_other_s_memory(monkeypatch):
    first, second = _Processes(monkeypatch).run()
    assert first == [[0, 1000, 2001, 3001], [0, 1000, 2002, 3002], None, None]
    assert second == [None, None, [3, 1003, 2000, 3000], [4, 1004, 2000, 3000]]


@pytest.mark.parametrize(
    "changes", [{"hosts": (b"a" * 16, b"b" * 16)}, {"refuses": [(3, 0)]}], ids=["hosts", "refused"]
)
def test_all_processes_do_without_where_one_cannot(monkeypatch, changes):
    assert _Processes(monkeypatch, **changes).run() == [None, None]


def test_a_process_without_a_driver_takes_part(monkeypatch):
    processes = _Processes(monkeypatch)
    processes.allocate = lambda *_: (_ for _ in ()).throw(OSError("libcuda.so.1"))
    assert processes.run() == [None, None]

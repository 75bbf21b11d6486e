"""What goes wrong with the disk and with memory is one clear line, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.cli.main import main
from jaxllama.errors import JaxLlamaError
from jaxllama.offload import store as stores
from jaxllama.offload.disk import DiskFile
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from tests.helpers.models import FAMILIES, params_of

CFG = FAMILIES["gqa"]


@pytest.fixture
def on_disk(tmp_path):
    place = Placement(Policy.parse("0 0 0 0 100 0"), jnp.float32, directory=tmp_path)
    return place.model(CFG, place.tree(jax.tree.map(np.asarray, params_of(CFG))), None)


@pytest.mark.parametrize("lacks", [(), ("posix_fallocate", "posix_fadvise")], ids=["", "macOS"])
def test_a_disk_file_has_no_name_and_gives_back_what_was_written(lacks, tmp_path, monkeypatch):
    for name in lacks:
        monkeypatch.delattr(os, name)
    disk = DiskFile(tmp_path)
    arrays = [
        np.random.default_rng(i).integers(0, 255, n, np.uint8)
        for i, n in enumerate((1, 4096, (1 << 22) + 17))
    ]
    extents = [disk.write(array) for array in arrays]
    disk.drop_cache()
    for extent, array in zip(extents, arrays, strict=True):
        assert (disk.read(extent) == array).all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_truncated_while_running(on_disk):
    os.ftruncate(on_disk.executor.store.disk._fd, on_disk.executor.store.disk.nbytes // 2)
    with pytest.raises(JaxLlamaError, match="the file was truncated"):
        on_disk.generate([[3, 4, 5]], 4)


@pytest.mark.core
@pytest.mark.parametrize("overlap", [True, False])
def test_changed_while_running(on_disk, overlap):
    lm = dataclasses.replace(on_disk, executor=on_disk.executor.with_policy(overlap=overlap))
    extent = lm.params["layer_1"]["mlp"]["down"]["weight"].disk
    old = os.pread(lm.executor.store.disk._fd, 1, extent.offset + 5)
    os.pwrite(lm.executor.store.disk._fd, bytes([old[0] ^ 1]), extent.offset + 5)
    with pytest.raises(JaxLlamaError, match="not what was written"):
        lm.generate([[3, 4, 5]], 4)
    os.pwrite(lm.executor.store.disk._fd, old, extent.offset + 5)
    assert len(lm.generate([[3, 4, 5]], 4)[0].tokens) == 4  # and it goes on when mended


def test_disk_full(tmp_path):
    disk, before = DiskFile(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(JaxLlamaError, match="no room for 131072 more bytes"):
            disk.write(np.zeros(1 << 17, np.uint8))
        assert (disk.read(disk.write(np.ones(1 << 10, np.uint8))) == 1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_no_folder_to_write_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JaxLlamaError, match="file"):
        DiskFile(tmp_path / "file")


def test_host_memory_short(on_disk, monkeypatch):
    monkeypatch.setattr(stores, "available_memory", lambda: 1000)
    with pytest.raises(JaxLlamaError, match="of host memory are needed and 0.00 GB are available"):
        stores.check_host_memory(2000)


def test_pinned_memory_short(tmp_path, monkeypatch):
    """As XLA's allocator of pinned memory says it."""
    store = stores.Store(tmp_path)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes")

    monkeypatch.setattr(stores.jax, "device_put", full)
    with pytest.raises(JaxLlamaError, match="no room for 0.00 GB more of pinned host memory"):
        store.put(np.zeros((4, 4), np.float32), stores.Shares(0, 100))


def test_the_command_names_a_bad_policy(capsys):
    assert main(["generate", "hi", "--policy", "1 2 3"]) == 2
    assert capsys.readouterr().err.startswith("error: --policy '1 2 3': expected six percentages")
    assert main(["plan", "--batch", "0"]) == 2
    assert "--batch = 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_killed_in_the_middle_leaves_nothing(tmp_path, end):
    """A process that writes and reads for ever is ended: the folder is empty during and after."""
    script = """
import signal, sys, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
from jaxllama.offload.disk import DiskFile
disk = DiskFile(sys.argv[1])
disk.write(np.zeros(1 << 25, np.uint8))  # every thread has begun: Python hangs if that is cut off
print("ready", flush=True)
while True:
    extent = disk.write(np.zeros(1 << 20, np.uint8))
    disk.read(extent)
    disk.free(extent)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        child.send_signal(end)
        assert child.wait(timeout=120) != 0
    assert list(tmp_path.iterdir()) == []

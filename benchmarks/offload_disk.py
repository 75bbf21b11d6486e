"""Weights on disk: how fast they are read, beside the disk's own rate, and in how much memory.

    from_disk(cfg, dtype, tell) -> report        ``python -m benchmarks.offload --only disk``

Every weight is on disk, and the page cache is told to forget the file before each measurement.  Of
bytes a second are told, from the disk up,

    disk      one sequential read of the file: the best of plain and direct reads, by one thread and
              by four, as many as ``DiskFile`` has
    checked   ``DiskFile``'s own reads: with checksums, into new memory, one tensor ahead
    loaded    the same, and onto the device, unit by unit
    step      overlapped decode steps

and the resident set (anonymous pages and pinned ones; the page cache is not the process's) at its
highest during the steps, beside the one before them and what was predicted to be added.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxllama.config import ModelConfig
from jaxllama.evaluation.speed.harness import timed
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.offload.disk import CHUNK, DiskFile, Extent
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import is_stored
from jaxllama.offload.units import units_of
from jaxllama.planner.cost import PlannerSettings, Task, need_of
from jaxllama.planner.trial import (
    Tell,
    Watch,
    repeated_model,
    start_run,
    streamed_bytes,
    timed_step,
)

POLICY = "0 0 100 0 100 0"
RUNS = 3
OURS = ("checked", "loaded", "step")
_TASK = Task(8, 32, 16)


def from_disk(cfg: ModelConfig, dtype: Any, tell: Tell, task: Task = _TASK) -> None:
    """See the module docstring; tells what is known after each round."""
    policy, settings = Policy.parse(POLICY), PlannerSettings(dtype, dtype)
    begin = time.perf_counter()
    lm = repeated_model(cfg, dtype, policy)
    disk = offloaded(lm.executor).store.disk
    disk.drop_cache()
    written = disk.nbytes / (time.perf_counter() - begin)
    run = start_run(lm, task.rows, task, dtype)
    for _ in range(2):
        timed_step(run)
    rates: dict[str, list[float]] = {}
    moved = streamed_bytes(cfg, policy, settings)

    def measure(name: str, nbytes: float, work: Callable[[], Any]) -> None:
        disk.drop_cache()
        rates.setdefault(name, []).append(nbytes / timed(work)[1] / 1e9)

    on_cpu = jax.default_backend() == "cpu"  # where the device's memory is the host's
    need = need_of(cfg, policy, task, settings, None if on_cpu else 0)
    added = need.host + (need.device if on_cpu else 0)
    before, peak, shares = resident(), 0, []
    for _ in range(RUNS):
        for direct, threads in ((False, 1), (False, 4), (True, 4)):
            name = f"disk {'direct' if direct else 'plain'} {threads}"
            measure(name, disk.nbytes, lambda d=direct, n=threads: _read_file(disk, d, n))
        measure("checked", moved, lambda: _read_units(lm))
        measure("loaded", moved, lambda: _load_units(lm))
        with Watch(resident) as watch:
            measure("step", moved, lambda: timed_step(run))
        peak = max(peak, watch.most)
        disks = [found[-1] for name, found in rates.items() if name.startswith("disk")]
        shares.append({name: rates[name][-1] / max(disks) for name in OURS})
        tell(
            "disk",
            {
                "file_gigabytes": disk.nbytes / 1e9,
                "written_gigabytes_per_second": written / 1e9,
                "gigabytes_per_second": rates,
                "share_of_disk": {
                    name: statistics.median(share[name] for share in shares) for name in OURS
                },
                "resident_before": before,
                "resident_peak": peak,
                "predicted_to_be_added": added,
                "share_of_budget": peak / (before + added),
            },
        )


def resident() -> int:
    """Bytes of this process's resident set (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _read_file(disk: DiskFile, direct: bool, threads: int) -> None:
    """The whole file, ``CHUNK`` by ``CHUNK``, into one buffer a thread."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    file = os.open(f"/proc/self/fd/{disk.fileno}", flags)
    own = threading.local()

    def read(at: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, CHUNK)  # at a page, as direct reads want it
        os.preadv(file, [own.buffer], at)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(read, range(0, disk.nbytes, CHUNK)):
            pass
    os.close(file)


def _extents(lm: LanguageModel) -> Iterator[Extent]:
    for unit in units_of(lm.config, False)[1:]:
        tree = unit.weights(lm.params)
        for leaf in jax.tree.leaves(tree, is_leaf=is_stored):
            if is_stored(leaf) and leaf.disk is not None:
                yield leaf.disk


def _read_units(lm: LanguageModel) -> None:
    ahead = None
    for extent in _extents(lm):
        following = offloaded(lm.executor).store.disk.begin(extent)
        if ahead is not None:
            ahead()
        ahead = following
    ahead()


def _load_units(lm: LanguageModel) -> None:
    previous = None
    for unit in units_of(lm.config, False)[1:]:
        pending = offloaded(lm.executor).store.begin(unit.weights(lm.params))
        if previous is not None:
            jax.block_until_ready(offloaded(lm.executor).store.finish(previous))
        previous = pending
    jax.block_until_ready(offloaded(lm.executor).store.finish(previous))

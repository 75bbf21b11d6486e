"""Split the steps of a decode loop on several GPUs into parts, from a profiler's trace.

    with jax.profiler.trace(folder): run(steps)
    step_parts(folder, steps) -> {"collectives": ..., "kernels": ..., "gaps": ..., ...}

The parts are seconds a step, averaged over the devices. They are the time in collectives (NCCL's
kernels, or XLA's own, which it names after the sum), in all other kernels, and between kernels.
"sums" is the number of collectives, and "longest" has the kernels that take most. Two kernels at
once on two streams both count. A gap of a millisecond or more belongs to the host, before or after
the loop, and does not count.

The time in a collective includes waiting for the last device. The profiler makes XLA launch op by
op, unless ``profiled_graphs`` is called before jax starts its devices.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from jaxllama.typing import JsonObject

_COLLECTIVE = re.compile(r"nccl|allreducekernel|^psum", re.IGNORECASE)
_HOST_GAP = 1e-3
_LONGEST = 8
_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"


class TraceEvent(NamedTuple):
    """A kernel, or on a CPU an instruction: times in seconds; module and op as XLA names them."""

    begin: float
    seconds: float
    name: str
    module: str
    op: str


def profiled_graphs() -> None:
    """Keep CUDA graphs while the profiler runs."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_GRAPHS}".strip()


def step_parts(folder: Path, steps: int) -> JsonObject | None:
    """Return the parts of a step; None if the trace has no kernel on a device."""
    devices = events_by_device(folder)
    if not devices:
        return None
    parts = {"collectives": 0.0, "kernels": 0.0, "gaps": 0.0}
    sums = 0
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernels in devices.values():
        reached = min(kernel.begin for kernel in kernels)
        for begin, seconds, name, *_ in sorted(kernels):
            is_sum = _COLLECTIVE.search(name) is not None
            parts["collectives" if is_sum else "kernels"] += seconds
            sums += is_sum
            by_name[re.sub(r"(_\d+)+(?=$|_fusion)", "", name)].append(seconds)
            gap = begin - reached
            parts["gaps"] += gap if 0 < gap < _HOST_GAP else 0.0
            reached = max(reached, begin + seconds)
    count = steps * len(devices)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    return {
        **{name: seconds / count for name, seconds in parts.items()},
        "sums": sums / count,
        "longest": {
            name: {"launches": len(times) / count, "seconds": sum(times) / count}
            for name, times in longest
        },
    }


def events_by_device(folder: Path) -> dict[tuple[Path, int], list[TraceEvent]]:
    """Return the events on the streams of each device.

    Rows of the host and a device's summaries have events of the same names, which are left out.
    """
    found: dict[tuple[Path, int], list[TraceEvent]] = defaultdict(list)
    for path in folder.rglob("*.trace.json.gz"):
        events = _read(path)
        labels = {
            (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
            for event in events
            if event.get("name") in ("process_name", "thread_name")
        }
        devices = {
            pid
            for (kind, pid, _), label in labels.items()
            if kind == "process_name" and "/device:" in label
        }
        streams = {
            (pid, tid)
            for (kind, pid, tid), label in labels.items()
            if kind == "thread_name" and pid in devices and "Stream" in label
        }
        for event in events:
            if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams:
                found[path, event["pid"]].append(_event(event))
    return found


def events_on_host(folder: Path) -> list[TraceEvent]:
    """Return the instructions that XLA's CPU client ran, on any thread."""
    return [
        _event(event)
        for path in folder.rglob("*.trace.json.gz")
        for event in _read(path)
        if event.get("ph") == "X"
        and "hlo_op" in event.get("args", {})
        and not event["name"].startswith("end: ")
    ]


def _event(event: JsonObject) -> TraceEvent:
    about = event.get("args", {})
    ids = about.get("hlo_module", ""), about.get("hlo_op", "")
    return TraceEvent(event["ts"] / 1e6, event["dur"] / 1e6, event["name"], *ids)


def _read(path: Path) -> list[JsonObject]:
    return json.loads(gzip.decompress(path.read_bytes())).get("traceEvents", [])

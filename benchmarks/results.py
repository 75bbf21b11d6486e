"""A measured figure as a file: ``benchmarks/results/NAME.json``.

    write(name, figures, unit=, peers=, source=, commands=, output=) -> path

A file holds the figures beside the machine, the versions, the date and the commands that gave them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jaxllama", "jax", "jaxlib", "flax", "numpy", "llvmlite")
# In a process of its own: the programs that are measured need the device's memory.
_DEVICES = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind)"


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the memory in bytes and the devices that jax finds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True)
    devices = found.stdout.strip() if found.returncode == 0 else None
    return {"cpu": _cpu(), "cores": cores, "memory": _memory(), "devices": devices}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, of the packages and of this commit."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    head = subprocess.run(
        ["git", "-C", str(FOLDER.parent), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    commit = head.stdout.strip() or None
    return {"python": platform.python_version(), "commit": commit} | {
        package: version(package) for package in PACKAGES
    }


def write(
    name: str,
    figures: Mapping[str, Any],
    *,
    unit: str,
    peers: Mapping[str, Any],
    source: str,
    commands: Mapping[str, str],
    output: Mapping[str, Sequence[str]],
    folder: Path = FOLDER,
) -> Path:
    """Write the file of one row and return its path.

    Parameters
    ----------
    name
        Name of the row, and of the file.
    figures
        The measured figures by label.
    unit
        Unit of the figures and of the peers' figures.
    peers
        Figures of other programs by label.
    source
        Where the peers' figures come from.
    commands, output
        Command line and the lines that it printed, by label of the figure.
    folder
        Folder of the file.
    """
    record = {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "figures": dict(figures),
        "unit": unit,
        "peers": dict(peers),
        "source": source,
        "commands": dict(commands),
        "machine": machine(),
        "versions": versions(),
        "output": {label: list(lines) for label, lines in output.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None

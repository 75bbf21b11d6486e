"""The share of a GPU's memory that a server takes, asked for before jax starts its devices.

A GPU that shows a display, or that Windows shares with WSL2, keeps some of what is free for it.
"""

from __future__ import annotations

import platform
import subprocess

GPU_SHARE = 0.95  # the rest is for CUDA's context and kernels: 0.6 GB on an H200
DISPLAY_SHARE = 0.85  # of what is free where a display is
_COMMAND = (
    "nvidia-smi",
    "--query-gpu=memory.free,memory.total,display_active,display_mode",
    "--format=csv,noheader,nounits",
)


def gpu_share() -> float:
    """Return the share of every GPU's memory that jax may take, the smallest among them."""
    try:
        run = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return GPU_SHARE
    return min(map(_share, run.stdout.splitlines()), default=GPU_SHARE)


def gpu_total() -> int | None:
    """Return the bytes of the smallest GPU, None without one."""
    try:
        run = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    totals = [line.split(",")[1].strip() for line in run.stdout.splitlines()]
    return min((int(total) * 2**20 for total in totals if total.isdigit()), default=None)


def _share(line: str) -> float:
    """line: free and total MiB, and whether a display is active or attached."""
    free, total, *display = (word.strip() for word in line.split(","))
    shown = "Enabled" in display or "microsoft" in platform.release().lower()
    if not shown or not (free.isdigit() and total.isdigit()):
        return GPU_SHARE
    return min(GPU_SHARE, round(DISPLAY_SHARE * int(free) / int(total), 3))

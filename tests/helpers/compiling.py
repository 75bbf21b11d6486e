"""How tests compile: on CPUs what compiles soonest, for they run a program a few times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# No LLVM optimization, and no threads for a module's parts.  jaxlib 0.10 may also do without the
# emitters of fusions (MLIR), which are two thirds of its compile time; newer ones have no others,
# and end at a flag they do not know.
SOON = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
    )
)


def environment(n_devices: int = 1) -> dict[str, str]:
    """The environment of a child process that has CPU devices alone, this many."""
    flags = f"{SOON} --xla_force_host_platform_device_count={n_devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def results_of(helper: str, *arguments: str, n_devices: int = 8, **variables: str) -> list[Any]:
    """Return the JSON lines of ``tests.helpers.HELPER``, which runs with so many CPU devices.

    variables: of its environment.
    """
    run = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{helper}", *arguments],
        cwd=Path(__file__).parents[2],
        env=environment(n_devices) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]

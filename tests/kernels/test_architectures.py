"""Kernels at real shapes through the assembler for GPUs that are not here, one process for each.

Nothing spills, the assembler warns of nothing, and a block's shared memory is within the table.
Each operation's rounding is in the code, so that two kernels with equal code give equal bits.
The wheels are those of the extra ``assemble``; the whole table is
``python -m benchmarks.kernels.assembled``.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import jax
import pytest

from pallas_kernels.cards.architecture import BY_NAME, OTHER_JAX
from tests.helpers.cases import slow

pytestmark = pytest.mark.newer
FIND = importlib.metadata.Distribution.discover  # which reads no other package
HERE = {name for name in ("nvidia-nvjitlink",) if any(FIND(name=name))}
if jax.__version_info__ < OTHER_JAX or "nvidia-nvjitlink" not in HERE:
    pytest.skip("the assembler is not here, or jax is older than 0.12", allow_module_level=True)

# By default one of each kernel for sm_80, whose code is the one that differs from Hopper's, and the
# rows, tiles, attention and norms of sm_100.
DEFAULT = {
    "sm_80": (
        "product 1 int4",
        "product 8 int4",
        "product 16 int8",
        "product 64 int4",
        "product 64 int8",
        "product 64 W8A8",
        "decode 64 int8",
        "direct",
        "rope and cache int8",
        "norm to int8",
        "GLA step",
        "GLA layer",
        "delta layer",
        "greedy",
    ),
    "sm_89": (
        "product 1 int8",
        "product 16 int8",
        "product 64 int4",
        "product 256 int4",
        "product 256 W8A8, wide K",
        "decode 64 bfloat16",
        "norm FP8",
    ),
    "sm_100": (
        "product 1 int4",
        "product 8 int4",
        "product 16 int8",
        "decode 64 int8",
        "direct",
        "norm to int8",
    ),
    "sm_120": (
        "product 16 int8",
        "product 64 int8",
        "product 64 W8A8",
        "product 256 int4",
        "decode 64 bfloat16",
        "direct",
        "greedy",
    ),
}


def check(arch: str, cases: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.helpers.assembling", arch, *cases]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) >= len(cases) and any(line.get("kernels") for line in found)
    for line in found:
        assert not line.get("warnings"), line
        assert "none" not in line or not cases, line
        for kernel in line.get("kernels", ()):
            assert kernel["spilled"] == 0, line
            assert kernel["registers"] <= 255, line
            assert kernel["shared"] <= BY_NAME[arch].shared_bytes, line
            assert kernel["contracted"] == 0, line


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", *slow("sm_89", "sm_120")])
def test_kernels_fit_their_registers(arch):
    check(arch, DEFAULT[arch])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in BY_NAME if arch != "sm_90"])
def test_every_kernel_fits_its_registers(arch):
    check(arch, ())

"""Every Mosaic kernel on the CPU, in random orders of its warps and copies, and planted races.

``helpers.emulator`` runs what Mosaic made of a kernel.  One run finds the races of every order that
its barriers allow; the seeds are for what depends on the order itself, such as phases.  Shared
memory and results hold NaN, or -1, at first.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.dispatch import hopper_reason
from tests.helpers.matmul_cases import newest

pytestmark = newest

# One of each family runs by default, beside the planted races and ``gated_delta/test_emulated``.
DEFAULT = {
    "few rows",
    "pair W4A8",
    "decode int4",
    "direct",
    "past",
    "many pairs bfloat16",
    "route",
    "norm",
    "greedy",
    "GLA",
    "GLA step",
    "SSD",
    "delta step",
}


def _cases():
    try:
        from tests.helpers.emulator.cases import CASES
    except ImportError:  # of an older jax
        return {}
    return CASES


CASES = _cases()
made = functools.cache(lambda name: CASES[name]())
wanted = functools.cache(lambda name: jax.tree.map(np.asarray, made(name).want()))


def launched(name: str, seed: int, change=None) -> tuple[list[str], float]:
    """(the kernels that a case launches, its error over what it may be)."""
    from tests.helpers.emulator.launch import emulated

    case = made(name)
    with emulated(seed, change, case.sms, case.target) as emulator:
        found = case.run()
    return [x.name.removesuffix("_mosaic_gpu") for x in emulator.programs], error_of(name, found)


def error_of(name: str, found) -> float:
    """The error of a case's results over what it may be."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted(name)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(worst, error / made(name).error if np.isfinite(error) else np.inf)
    return worst


@pytest.mark.parametrize(
    "name", [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_values(name):
    kernels, error = launched(name, 0)
    assert " ".join(kernels) == made(name).kernels
    assert error < 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", CASES)
def test_other_orders(name, seed):
    assert launched(name, seed)[1] < 1


@pytest.mark.plans
@pytest.mark.slow
@pytest.mark.skipif(hopper_reason() is not None, reason=str(hopper_reason()))
@pytest.mark.parametrize("name", CASES)
def test_values_on_a_gpu(name):
    """A call of each kernel that is short enough for compute-sanitizer: docs/release.md."""
    from tests.helpers.emulator.launch import planned_with

    case = made(name)
    with planned_with(case.sms, case.target):
        found = jax.block_until_ready(case.run())
    assert error_of(name, found) < 1


# Kernels whose warps share nothing: each has its own rows, and there is no barrier.
ALONE = {
    "collect_answer": "one wait, then a thread copies its own vectors",
    "collect_posted": "a thread for each piece",
    "copy_records": "each thread copies its own vectors",
    "fetch_experts": "each warp copies its own bytes",
    "post_tokens": "a thread copies its own vectors; the turn follows a barrier",
}
# Layers' steps, in any order in the kernels' own tests.
ELSEWHERE = {
    "gated_delta_token": "tests/kernels/gated_delta/test_token.py",
    "gla_head_norm": "tests/kernels/gla/test_gla_token.py",
}


def test_each_kernel_has_a_case():
    """Of the names that stand in the source; ``test_values`` sees that a case launches its own."""
    from tests.helpers.emulator import cases

    covered = set(re.findall(r"\w+", Path(cases.__file__).read_text()))
    for path in sorted(Path(pallas_kernels.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "launch":
                continue
            for keyword in call.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    named = keyword.value.value
                    assert named in covered | {*ALONE, *ELSEWHERE}, f"{path}: {named}"


# A case, the place of its kernel, a part of an operation, which of those, and the fault.
PLANTED = [
    ("direct", 0, "barrier.cluster.wait.acquire", 0, "left out"),
    ("direct", 0, "mbarrier.init", 0, "one arrival more"),
    ("decode int4", 0, "await_mbarrier", 0, "the other phase"),
    ("few rows", 0, "cp.async.wait_group", 0, "left out"),
    ("few rows", 0, "'bar.sync'", 2, "left out"),
    ("mid rows", 0, "cp.async.wait_group", 0, "left out"),
    ("weight int8", 0, "wgmma.wait_group", 0, "left out"),
    ("weight int8", 0, "t.wait(", 1, "left out"),
    ("pair W4A8", 0, "fence", 0, "left out"),
    ("many pairs bfloat16", 1, "fence.proxy", 0, "left out"),
    ("route", 0, "await_mbarrier", 0, "left out"),
    ("greedy", 0, "barrier.cluster.wait.acquire", 0, "left out"),
    ("norm", 0, "'bar.sync'", 2, "left out"),
    ("GLA step", 0, "griddepcontrol.wait", 0, "left out"),
    ("experts row", 0, "'bar.sync'", 2, "left out"),
    ("delta step", 0, "'bar.sync'", 3, "left out"),
]
PLANTED_SLOW = [
    ("experts sum", 0, "'bar.sync'", 2, "left out"),
    ("experts sum", 0, "'bar.sync'", 3, "left out"),
    ("latent", 0, "t.wait(", 0, "left out"),
    ("latent", 0, "barrier_init", 1, "one arrival more"),
    ("latent, tokens in pages", 0, "barrier_init", 1, "one arrival less"),
    ("latent, tokens in pages", 0, "mbarrier.arrive", 1, "left out"),
    ("chosen of 24 heads", 0, "fence.proxy", 1, "left out"),
    ("chosen of 24 heads", 0, "await_mbarrier", 2, "left out"),
    ("chosen of 24 heads", 0, "mbarrier.init", 0, "one arrival less"),
    ("SSD", 0, "barrier_init", 1, "one arrival more"),
    ("decode int8", 0, "mbarrier.arrive.shared", 0, "left out"),
    ("decode int8", 0, "mbarrier.init", 0, "one arrival more"),
    ("decode, several tokens", 0, "mbarrier.arrive.shared", 0, "left out"),
    ("past", 0, "t.wait(", 3, "left out"),
    ("past", 0, "mbarrier.arrive", 3, "left out"),
    ("many pairs bfloat16", 1, "mbarrier.init", 2, "one arrival less"),
    ("GLA", 1, "t.wait(", 2, "left out"),
    ("GLA", 1, "stores_wait", 0, "left out"),  # its place is stored to a step early
    ("delta", 1, "stores_wait", 0, "left out"),
    ("delta", 1, "t.wait(", 1, "the other phase"),
]


@pytest.mark.parametrize(
    "fault",
    [*PLANTED, *(pytest.param(x, marks=pytest.mark.slow) for x in PLANTED_SLOW)],
    ids=lambda x: " ".join(map(str, x)),
)
def test_a_planted_race_is_found(fault):
    from tests.helpers.emulator.clocks import Race
    from tests.helpers.emulator.machine import Deadlock
    from tests.helpers.emulator.plant import planted

    name, *where = fault
    try:
        error = launched(name, 0, planted(*where))[1]
    except (Race, Deadlock):
        return
    assert not error < 1

"""Runs of random calls on a GPU, in poisoned memory, with the same bits twice; a line for each."""

from __future__ import annotations

import datetime
import json
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import named_plan
from tests.helpers.arrays import as_jax
from tests.helpers.op_calls import OpCall

POISONED = 1 << 26  # bytes, from which the next results and temporaries are taken


def run_calls(
    request: pytest.FixtureRequest, seed_and_part: tuple[int, int], calls: Iterable[OpCall]
) -> None:
    """Run every call, and then fail if some failed; their kernels follow one another."""
    failed = []
    for i, call in enumerate(calls):
        facts = {"seed": seed_and_part[0], "call": str(call), "plan": str(named_plan(call.find()))}
        try:
            facts["error"] = error_of_two_runs(call, np.random.default_rng([*seed_and_part, i]))
        except Exception as error:  # the other calls run, too
            facts["failed"] = fault(error)
            failed.append(f"{call}: {facts['failed']}")
        noted(request, "calls", **facts)
    assert not failed, "; ".join(failed)


def error_of_two_runs(call: OpCall, rng: np.random.Generator) -> float:
    """Return the error beside float64 of a second run, whose memory is NaN first."""
    operands, f = call.values(rng), jax.jit(call.kernel)
    first = jax.tree.leaves(f(*operands))
    poison(*first)
    again = f(*operands)
    for a, b in zip(first, jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), "other bits in the second run"
    return call.check(again, operands, rng)


def poison(*arrays: Any) -> None:
    """Leave NaN in freed memory, from which the next arrays of these sizes are taken."""
    sizes = [POISONED, *(x.nbytes for x in arrays for _ in range(2))]
    jax.block_until_ready([as_jax(np.full(n // 4 + 1, np.nan, np.float32)) for n in sizes])


def noted(request: pytest.FixtureRequest, kind: str, **facts: Any) -> None:
    """Add a line to a file in the folder of ``--runs``, which all workers share."""
    if (folder := request.config.getoption("--runs")) is None:
        return
    line = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **facts,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(Path(folder) / f"{kind}.jsonl", how, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())  # lines of one write do not mix
    finally:
        os.close(file)


def fault(error: Exception) -> str:
    """Return an error's first line, and where it was raised."""
    first, at = str(error).partition("\n")[0], traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first} ({Path(at.filename).name}:{at.lineno}: {at.line})"

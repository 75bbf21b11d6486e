"""Record what proves each plan: ``tests/golden/plans/<card>.json``.

    python -m tests.golden.make_plans lower "NVIDIA H200" [--all]   a hash of each call's modules
    python -m tests.golden.make_plans assemble "NVIDIA H200"        registers, spills, warnings
    python -m tests.golden.make_plans emulate "NVIDIA H200"         values on the CPU
    python -m tests.golden.make_plans merge FILE...                 runs of ``pytest -m plans``

Each action does what the record lacks; ``lower --all`` lowers again, and drops the other proofs of
a plan whose modules changed.  The actions need jax >= 0.12, and ``assemble`` the extra of its name.
``lower`` and ``merge`` also write ``pallas_kernels/runs.json``, which dispatch reads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.device import card_of, planned_for
from pallas_kernels.dispatch import run_name
from pallas_kernels.matmul.few_rows.plan import RowPlan, TilePlan
from pallas_kernels.plans import OPS, plans
from tests.helpers import plan_cases
from tests.helpers.few_rows import few_rows
from tests.helpers.kernel_modules import modules_of
from tests.helpers.matmul_cases import error
from tests.helpers.op_calls import OpCall
from tests.helpers.op_plans import calls
from tests.helpers.same_program import normal

FOLDER = Path(__file__).parent / "plans"
RUNS = Path(__file__).parents[2] / "pallas_kernels" / "runs.json"
MOST_EMULATED, EMULATED_SECONDS = 1 << 21, 60


def path_of(card: str) -> Path:
    return FOLDER / f"{re.sub('[^A-Za-z0-9]+', '-', card.removeprefix('NVIDIA ')).lower()}.json"


def load(card: str) -> dict[str, Any]:
    path = path_of(card)
    return json.loads(path.read_text()) if path.exists() else {"card": card, "ops": {}}


def save(record: dict[str, Any]) -> None:
    """Write a line a plan."""
    head = {key: x for key, x in record.items() if key != "ops"}
    ops = []
    for op, known in record["ops"].items():
        lines = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(known.items())]
        ops.append(f'"{op}": {{\n' + ",\n".join(lines) + "\n}")
    text = f'{json.dumps(head)[:-1]}, "ops": {{\n' + ",\n".join(ops) + "}}\n"
    path_of(record["card"]).write_text(text)


@contextlib.contextmanager
def planning(card: str) -> Iterator[None]:
    """Within, kernels are planned and lowered for a card."""
    jax.clear_caches()  # a kernel with the same plan on another card may be kept
    with (
        planned_for(card),
        mock.patch.object(utils, "_infer_arch", lambda: card_of(card)[1].capability),
    ):
        yield


def hashes_of(op: str, card: str, plan: Any) -> list[str]:
    """Return a hash for each call of a plan, of the modules that it is lowered to.

    The order of pure arithmetic is not part of it.
    """
    found = []
    for call in calls(op, card, plan):
        texts = modules_of(call.kernel, call.operands)
        found.append(hashlib.sha256(normal("\n".join(texts.values())).encode()).hexdigest()[:12])
    return found


def assembled(op: str, card: str, plan: Any, where: Any) -> dict[str, Any]:
    from tests.helpers.assembling import assemble_program

    kernels, warnings = [], set()
    for call in calls(op, card, plan):
        more, said = assemble_program(call.kernel, call.operands, where)
        kernels += more
        warnings.update(w.split(")")[0].strip("(") for w in said)
    return {
        "registers": max((x.registers for x in kernels), default=0),
        "spilled": max((x.spilled for x in kernels), default=0),
        "warnings": sorted(warnings),
    }


def emulated(op: str, card: str, plan: Any) -> dict[str, Any] | str:
    """Run a plan in an emulator, where a wrong count of a barrier's arrivals is a race or a wait.

    Products of few rows run thread by thread, all their calls.  Of other plans the smallest call
    runs by warpgroups.
    """
    if isinstance(plan, RowPlan | TilePlan):
        return _emulated_product(plan)
    call = calls(op, card, plan)[0]
    if call.size > MOST_EMULATED:
        return f"{call.size} values are too many; test_races.py runs the kernel"
    return _emulated_call(call)


def _emulated_call(call: OpCall) -> dict[str, Any] | str:
    """Run a call in the emulator of lowered kernels, for a minute of the CPU's time at most."""
    from tests.helpers.emulator.launch import emulated

    rng = np.random.default_rng(0)
    operands = call.values(rng)
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, EMULATED_SECONDS)
    try:
        with emulated():
            out = call.kernel(*operands)
    except TimeoutError:
        return "not in a minute; test_races.py runs the kernel"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"error": float(f"{call.check(out, operands, rng):.2g}"), "shapes": [str(call)]}


def _late(*_: Any) -> None:
    raise TimeoutError


def _emulated_product(plan: RowPlan | TilePlan) -> dict[str, Any]:
    worst, shapes = 0.0, []
    for case in plan_cases.cases(plan, few=True):
        x, w, given = plan_cases.operands(case)
        with few_rows():
            out = plan_cases.run(plan, plan_cases.call_of(case, x, w, given), x, w, given)
        out = out[0] if isinstance(out, tuple) else out
        worst = max(worst, error(out, plan_cases.reference(plan, x, w, given)))
        shapes.append(str(case))
    return {"error": float(f"{worst:.2g}"), "shapes": shapes}


def make(action: str, card: str, ops: list[str], everything: bool) -> None:
    record = load(card)
    record |= {"jax": jax.__version__}
    key = {"lower": "lowered", "assemble": "assembled", "emulate": "emulated"}[action]
    todo = []
    for op in OPS:
        old = record["ops"].get(op, {})
        record["ops"][op] = known = {str(plan): old.get(str(plan), {}) for plan in plans(op, card)}
        if op in ops:
            todo += [
                (op, plan) for plan in plans(op, card) if everything or key not in known[str(plan)]
            ]

    def each(compute: Callable[..., Any]) -> None:
        for done, (op, plan) in enumerate(todo, 1):
            known, name = record["ops"][op], str(plan)
            value = compute(op, card, plan)
            if action == "lower" and known[name].get(key) not in (None, value):
                known[name] = {}
            known[name][key] = value
            if done % 20 == 0:
                print(f"{card}: {done} of {len(todo)}", file=sys.stderr, flush=True)
                save(record)
                jax.clear_caches()

    with planning(card):
        if action == "assemble":
            from tests.helpers.assembling import assembler

            with assembler(card_of(card)[1]) as where:
                each(functools.partial(assembled, where=where))
        else:
            each(hashes_of if action == "lower" else emulated)
    save(record)
    if action == "lower":
        list_missing(card)


def merge(files: list[str]) -> None:
    """Add runs to the records of their cards."""
    runs = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    for card in {run["card"] for run in runs}:
        record = load(card)
        for run in runs:
            known = record["ops"].get(run["op"], {})
            if run["card"] != card or run["plan"] not in known:
                continue
            if "failed" in run:
                known[run["plan"]].pop("run", None)
            else:
                known[run["plan"]]["run"] = {key: run[key] for key in ("jax", "date", "error")}
        save(record)
        list_missing(card)


def list_missing(card: str) -> None:
    """Write the plans of a card that were not run, if any of its plans was."""
    if any("run" in proofs for known in load(card)["ops"].values() for proofs in known.values()):
        missing = json.loads(RUNS.read_text()) | {card_of(card)[1].name: not_run(card)}
        RUNS.write_text(json.dumps(missing, indent=1) + "\n")


def not_run(card: str) -> list[str]:
    """Return the plans of a card without a run, as ``runs.json`` names them."""
    record = load(card)["ops"]
    return sorted(
        {
            run_name(plan)
            for op in OPS
            for plan in plans(op, card)
            if "run" not in record.get(op, {}).get(str(plan), {})
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("lower", "assemble", "emulate", "merge"))
    parser.add_argument("names", nargs="+", help="a card, or files of runs")
    parser.add_argument("--op", choices=OPS, help="of one op alone")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.action == "merge":
        merge(given.names)
        return
    for card in given.names:
        make(given.action, card, [given.op] if given.op else list(OPS), given.all)


if __name__ == "__main__":
    main()

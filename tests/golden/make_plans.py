"""Record what proves each plan: ``tests/golden/plans/<card>.json``.

    python -m tests.golden.make_plans lower "NVIDIA H200" [--all]   a hash of each case's modules
    python -m tests.golden.make_plans assemble "NVIDIA H200"        registers, spills, warnings
    python -m tests.golden.make_plans emulate "NVIDIA H200"         values on the CPU
    python -m tests.golden.make_plans merge FILE...                 runs of ``pytest -m plans``

Each action does what the record lacks; ``lower --all`` lowers again, and drops the other proofs of
a plan whose modules changed.  The actions need jax >= 0.12, and ``assemble`` the extra of its name.
``merge`` also writes ``pallas_kernels/unproven.json``, which dispatch reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

from pallas_kernels.device import card_of, planned_for
from pallas_kernels.matmul.few_rows.plan import RowPlan, TilePlan
from pallas_kernels.plans import plans

FOLDER = Path(__file__).parent / "plans"
UNPROVEN = Path(__file__).parents[2] / "pallas_kernels" / "unproven.json"
OP = "quantized_matmul"
# Plans that no emulator runs one by one: what does run, beside the plan's run on a GPU.
NO_EMULATOR = {
    "PairTile": "not by plan: test_quantized_matmul_prefill.py interprets small tiles",
    "WeightTile": "not by plan: test_many_rows_emulated.py runs small tiles",
    "MidTile": "not by plan: test_mid_rows.py runs its program",
}


def path_of(card: str) -> Path:
    return FOLDER / f"{re.sub('[^A-Za-z0-9]+', '-', card.removeprefix('NVIDIA ')).lower()}.json"


def load(card: str) -> dict[str, Any]:
    path = path_of(card)
    return json.loads(path.read_text()) if path.exists() else {"card": card, "plans": {}}


def save(record: dict[str, Any]) -> None:
    """Write a line a plan."""
    lines = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(record["plans"].items())]
    head = {key: x for key, x in record.items() if key != "plans"}
    body = ",\n".join(lines)
    path_of(record["card"]).write_text(f'{json.dumps(head)[:-1]}, "plans": {{\n{body}\n}}}}\n')


def hashes_of(plan: Any) -> list[str]:
    """Return a hash for each case of a plan, of the modules that it is lowered to.

    The order of pure arithmetic is not part of it.
    """
    from tests.helpers.kernel_modules import modules_of
    from tests.helpers.plan_cases import cases, program
    from tests.helpers.same_program import normal

    found = []
    for case in cases(plan):
        texts = modules_of(*program(plan, case))
        found.append(hashlib.sha256(normal("\n".join(texts.values())).encode()).hexdigest()[:12])
    return found


def assembled(plan: Any, where: Any) -> dict[str, Any]:
    from tests.helpers.assembling import assemble_program
    from tests.helpers.plan_cases import cases, program

    kernels, warnings = [], set()
    for case in cases(plan):
        more, said = assemble_program(*program(plan, case), where)
        kernels += more
        warnings.update(w.split(")")[0].strip("(") for w in said)
    return {
        "registers": max((x.registers for x in kernels), default=0),
        "spilled": max((x.spilled for x in kernels), default=0),
        "warnings": sorted(warnings),
    }


def emulated(plan: Any) -> dict[str, Any] | str:
    from tests.helpers import plan_cases
    from tests.helpers.few_rows import few_rows
    from tests.helpers.matmul_cases import error

    if not isinstance(plan, RowPlan | TilePlan):
        return NO_EMULATOR[type(plan).__name__]
    worst, shapes = 0.0, []
    for case in plan_cases.cases(plan, few=True):
        x, w, given = plan_cases.operands(case)
        with few_rows():
            out = plan_cases.run(plan, plan_cases.call_of(case, x, w, given), x, w, given)
        out = out[0] if isinstance(out, tuple) else out
        worst = max(worst, error(out, plan_cases.reference(plan, x, w, given)))
        shapes.append(str(case))
    return {"error": float(f"{worst:.2g}"), "shapes": shapes}


def listed(card: str) -> Iterator[tuple[str, Any]]:
    for plan in plans(OP, card):
        yield str(plan), plan


def make(action: str, card: str, everything: bool) -> None:
    record = load(card)
    known: dict[str, Any] = {name: record["plans"].get(name, {}) for name, _ in listed(card)}
    record |= {"jax": jax.__version__, "plans": known}
    key = {"lower": "lowered", "assemble": "assembled", "emulate": "emulated"}[action]
    todo = [(name, plan) for name, plan in listed(card) if everything or key not in known[name]]
    done = 0

    def each(compute: Any) -> None:
        nonlocal done
        for name, plan in todo:
            value = compute(plan)
            if action == "lower" and known[name].get(key) not in (None, value):
                known[name] = {}
            known[name][key] = value
            done += 1
            if done % 20 == 0:
                print(f"{done} of {len(todo)}", file=sys.stderr, flush=True)
                save(record)
                jax.clear_caches()

    with planned_for(card):
        if action == "assemble":
            from tests.helpers.assembling import assembler

            with assembler(card_of(card)[1]) as where:
                each(lambda plan: assembled(plan, where))
        else:
            each(hashes_of if action == "lower" else emulated)
    save(record)


def merge(files: list[str]) -> None:
    """Add runs to the records of their cards, and list the plans that were not run."""
    unproven = json.loads(UNPROVEN.read_text())
    runs = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    for card in {run["card"] for run in runs}:
        record = load(card)
        for run in runs:
            if run["card"] == card and run["plan"] in record["plans"]:
                facts = {key: run[key] for key in ("jax", "date", "error")}
                record["plans"][run["plan"]]["run"] = facts
        save(record)
        unproven[card] = [name for name, x in sorted(record["plans"].items()) if "run" not in x]
    UNPROVEN.write_text(json.dumps(unproven, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("lower", "assemble", "emulate", "merge"))
    parser.add_argument("names", nargs="+", help="a card, or files of runs")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.action == "merge":
        merge(given.names)
    else:
        make(given.action, given.names[0], given.all)


if __name__ == "__main__":
    main()

"""Assemble every kernel for each architecture without a GPU: registers, spills, shared memory.

    python -m benchmarks.kernels.assembled                   writes results/assembled.json
    python -m benchmarks.kernels.assembled --from FILE ...   from lines of tests.helpers.assembling
    python -m benchmarks.kernels.assembled --table           results/assembled.json in Markdown

The table is written into docs/assembled.md too.  A cell is registers of a thread / KB of shared
memory of a block, with the bytes that a thread spills where there are any.  It takes 15 minutes
of a CPU, jax 0.12 and the extra ``assemble``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pallas_kernels.cards.architecture import BY_NAME

ARCHITECTURES = tuple(BY_NAME)
PAGE = Path(__file__).parent.parent.parent / "docs" / "assembled.md"
TEXT = """# Kernels as they are assembled

Registers of a thread / KB of shared memory of a block, by jax 0.12's assembler; spills are named
where there are any. An empty cell has no kernel of that name there. The rows are the calls of
`tests/helpers/kernel_cases.py`. `python -m benchmarks.kernels.assembled` makes this page; no GPU is
needed.

"""
RESULT = Path(__file__).parent.parent / "results" / "assembled.json"


def lines_of(arch: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.helpers.assembling", arch]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def by_case(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return {case: {architecture: kernels, or why there are none}}.

    An equal kernel of an earlier case is assembled once, so a case without kernels is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        given = line.get("none") or line["kernels"]
        if given:
            found.setdefault(line["case"], {})[line["arch"]] = given
    return {case: archs for case, archs in found.items() if any(map(_is_made, archs.values()))}


def written(found: dict[str, dict[str, Any]]) -> str:
    """Return the result as JSON, an architecture of a case a line."""
    cases = [
        f"{json.dumps(case)}: {{\n "
        + ",\n ".join(f"{json.dumps(arch)}: {json.dumps(given)}" for arch, given in archs.items())
        + "}"
        for case, archs in found.items()
    ]
    return "{" + ",\n".join(cases) + "}\n"


def _is_made(given: Any) -> bool:
    return not isinstance(given, str)


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"| call | kernel | {' | '.join(ARCHITECTURES)} |"]
    lines.append("|---" * (2 + len(ARCHITECTURES)) + "|")
    for case, archs in found.items():
        made = {arch: given for arch, given in archs.items() if _is_made(given)}
        names = list(dict.fromkeys(x["kernel"] for given in made.values() for x in given))
        for name in names:
            cells = [_cell(made.get(arch, ()), name) for arch in ARCHITECTURES]
            lines.append(f"| {case} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(kernels: Any, name: str) -> str:
    here = next((x for x in kernels if x["kernel"] == name), None)
    if here is None:
        return ""
    spilled = f", spills {here['spilled']}" if here["spilled"] else ""
    return f"{here['registers']} / {-(-here['shared'] // 1024)}{spilled}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        if given.files:
            texts = [file.read_text() for file in given.files]
            lines = [json.loads(line) for text in texts for line in text.splitlines()]
        else:
            lines = [line for arch in ARCHITECTURES for line in lines_of(arch)]
        RESULT.write_text(written(by_case(lines)))
    text = table(json.loads(RESULT.read_text()))
    PAGE.write_text(f"{TEXT}{text}\n")
    print(text)


if __name__ == "__main__":
    main()

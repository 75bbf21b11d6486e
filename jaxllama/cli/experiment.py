"""``jaxllama experiment``: run a file, say what it would do, or compare two runs.

command(file, out, dry_run, compare) -> (text for people, value for --json)
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.compare import compare, text
from jaxllama.experiments.config import load_experiment
from jaxllama.experiments.plan import plan
from jaxllama.experiments.run import run, run_directory
from jaxllama.experiments.workloads import check


def command(
    file: str | None, out: Path | None, dry_run: bool, pair: list[str] | None
) -> tuple[str, Any]:
    """See the module docstring.  Raises JaxLlamaError for words that exclude each other, and what
    the parts raise."""
    if pair is not None:
        if file is not None or out is not None or dry_run:
            raise JaxLlamaError("--compare takes two runs, and no file, --out or --dry-run")
        differences = compare(*pair)
        return text(differences), [dataclasses.asdict(one) for one in differences]
    if file is None:
        raise JaxLlamaError("no experiment: give a file, the name of a shipped one, or --compare")
    experiment = load_experiment(file)
    if dry_run:
        check(experiment)
        directory = out or run_directory(experiment)
        described = plan(experiment, directory)
        return described, {"directory": str(directory), **experiment.identity}
    directory = run(experiment, out)
    results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    table = (directory / "table.md").read_text(encoding="utf-8")
    return table, {"directory": str(directory), **results}

"""``jaxllama experiment``: run a file, describe the run without running it, or compare two runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from jaxllama.cli import common
from jaxllama.cli.domains import Bad, Parser, out_folder
from jaxllama.errors import JaxLlamaError

HELP = "Reproduce a result from its TOML file, or compare two runs."


def run_folder(text: str) -> str:
    if not Path(text).is_dir():
        raise Bad(f"= {text}: no such folder")
    return text


def options(sub: Parser) -> None:
    sub.add_argument(
        "file", nargs="?", metavar="FILE", help="a TOML file, or the name of a shipped experiment"
    )
    sub.add_argument(
        "--out",
        type=out_folder,
        metavar="DIR",
        help="folder of the run (default runs/NAME-HASH); an earlier run continues",
    )
    sub.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text in place of the file's own; bible: the King James Bible of "
        "Debian's package bible-kjv",
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="print points, shapes, memory and time, and write nothing",
    )
    sub.add_argument(
        "--compare",
        nargs=2,
        type=run_folder,
        metavar=("DIR", "DIR"),
        help="print the differences of two runs that exceed their noise",
    )
    common.json_option(sub)


def run(args: argparse.Namespace) -> None:
    text, value = _compared(args) if args.compare is not None else _ran(args)
    common.print_json(value) if args.json else print(text, end="")


def _compared(args: argparse.Namespace) -> tuple[str, object]:
    """Return (text for people, value for --json)."""
    from jaxllama.experiments.compare import compare, text

    if args.file is not None or args.out is not None or args.dry_run or args.text:
        raise JaxLlamaError("--compare takes two runs, and no file, --out, --text or --dry-run")
    differences = compare(*args.compare)
    return text(differences), [dataclasses.asdict(difference) for difference in differences]


def _ran(args: argparse.Namespace) -> tuple[str, object]:
    from jaxllama.experiments.config import load_experiment
    from jaxllama.experiments.plan import plan
    from jaxllama.experiments.run import run, run_directory
    from jaxllama.experiments.workloads import check

    if args.file is None:
        raise JaxLlamaError("no experiment: give a file, the name of a shipped one, or --compare")
    experiment = load_experiment(args.file, args.text)
    if args.dry_run:
        check(experiment)
        directory = args.out or run_directory(experiment)
        described = plan(experiment, directory)
        return described, {"directory": str(directory), **experiment.identity}
    directory = run(experiment, args.out)
    results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    table = (directory / "table.md").read_text(encoding="utf-8")
    return table, {"directory": str(directory), **results}

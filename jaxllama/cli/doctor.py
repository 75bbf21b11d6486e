"""``jaxllama doctor``: see ``jaxllama.bench.doctor``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, filled
from jaxllama.progress import working

HELP = "Versions, devices, and which implementation each op uses."


def options(sub: Parser) -> None:
    sub.add_argument(
        "--model", type=filled, metavar="NAME", help="also load this one: dtypes and bytes"
    )
    common.json_option(sub)


def run(args: argparse.Namespace) -> None:
    from jaxllama.bench import doctor

    with working("examining"):
        report = doctor.examine(args.model)
    common.show(args, report, doctor.table)

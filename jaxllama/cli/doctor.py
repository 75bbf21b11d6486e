"""``jaxllama doctor``: see ``jaxllama.evaluation.doctor``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import Parser
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import working

HELP = "Print versions, devices, each op's implementation and a --model's bytes."


def options(sub: Parser) -> None:
    group = common.source_options(sub, default=None)
    common.dtype_option(group)
    common.quantize_option(group)
    common.exact_option(sub)
    common.json_option(sub)


def run(args: argparse.Namespace) -> None:
    from jaxllama.evaluation import doctor

    for flag in ("random", "revision", "exact", "dtype", "quantize"):
        if args.model is None and getattr(args, flag):
            raise JaxLlamaError(f"--{flag} needs --model")
    with working("examining"):
        report = doctor.examine(
            args.model,
            dtype=args.dtype,
            quantize=args.quantize,
            exact=args.exact,
            **common.source(args),
        )
    common.show(args, report, doctor.table)

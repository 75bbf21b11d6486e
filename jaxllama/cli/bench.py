"""``jaxllama bench`` and ``jaxllama bench serve``: measure a model, or a running server."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from jaxllama.cli import common
from jaxllama.cli.domains import (
    COUNT,
    SEED,
    Bad,
    Number,
    Parser,
    api_key,
    filled,
    out_folder,
    pair,
    refusing,
    text_file,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import working

if TYPE_CHECKING:
    from jaxllama.evaluation.speed.load_generator import Lengths

HELP = "Measure decode, prefill, time to first token and memory."


def options(sub: Parser) -> None:
    sub.add_argument("--batch", type=COUNT, default=1, metavar="N", help="rows at once")
    sub.add_argument(
        "--prompt-tokens",
        type=COUNT,
        default=512,
        metavar="N",
        help="length of the prefill (default %(default)s)",
    )
    sub.add_argument(
        "--new-tokens",
        type=Number(least=2),
        default=64,
        metavar="N",
        help="length of the decode (default %(default)s)",
    )
    sub.add_argument(
        "--runs",
        type=COUNT,
        default=5,
        metavar="N",
        help="runs; medians are printed (default %(default)s)",
    )
    sub.add_argument(
        "--context",
        type=Number(least=5),
        default=5,
        metavar="N",
        help="tokens that each row holds when decoding begins",
    )
    sub.add_argument(
        "--trace", type=out_folder, metavar="DIR", help="profile one step and write its trace there"
    )
    sub.add_argument(
        "--where",
        choices=("decode", "prefill"),
        metavar="PHASE",
        help="list the kernels of a step of decode or prefill instead, with "
        "launches, time, bytes and floor, and the time between them",
    )
    common.hosts_options(sub)
    common.json_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.draft_options(sub)
    common.cache_options(sub)
    sub.inner = "what"
    what = sub.add_subparsers(dest=sub.inner, metavar="[serve]", title="instead of a model")
    text = "Make load on a running server and measure what its clients see."
    serve_options(what.add_parser("serve", help=text, description=text, allow_abbrev=False))


def run(args: argparse.Namespace) -> None:
    if args.what == "serve":
        return run_serve(args)
    if args.draft is not None or args.draft_tokens is not None:
        return run_draft(args)
    if args.where is not None:
        return run_where(args)
    from jaxllama.evaluation.speed import decode as bench

    lm = common.load(args)
    with working("measuring") as sign:
        report = bench.run(
            lm,
            batch=args.batch,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            runs=args.runs,
            kv_dtype=common.kv_dtype(args),
            chunk=args.chunk,
            context=args.context,
            trace=args.trace,
            sign=sign,
        )
    report["model"] = args.model  # the name from the command line, not the checkpoint's
    common.show(args, report, bench.table)


def run_draft(args: argparse.Namespace) -> None:
    """Measure a draft on the benchmark's own prompts."""
    for flag, value in (
        ("--batch", 1),
        ("--prompt-tokens", 512),
        ("--context", 5),
        ("--trace", None),
    ):
        if getattr(args, flag[2:].replace("-", "_")) != value:
            raise JaxLlamaError(f"{flag} and --draft exclude each other: it has prompts of its own")
    from jaxllama.evaluation.speed import drafts

    lm = common.load(args)
    draft = common.draft(args, lm)
    with working("measuring") as sign:
        report = drafts.run(
            lm,
            **draft,
            new_tokens=args.new_tokens,
            runs=args.runs,
            kv_dtype=common.kv_dtype(args),
            chunk=args.chunk,
            sign=sign,
        )
    report["model"] = args.model
    common.show(args, report, drafts.table)


def run_where(args: argparse.Namespace) -> None:
    from jaxllama.evaluation.speed import trace, where

    trace.profiled_graphs()
    lm = common.load(args)
    with working("measuring") as sign:
        report = where.run(
            lm,
            args.where,
            batch=args.batch,
            prompt_tokens=args.prompt_tokens,
            runs=args.runs,
            kv_dtype=common.kv_dtype(args),
            chunk=args.chunk,
            context=args.context,
            sign=sign,
        )
    report["model"] = args.model
    common.show(args, report, where.table)


# Options for a running server


@refusing
def length(text: str) -> Lengths:
    from jaxllama.evaluation.speed.load_generator import Lengths

    return Lengths(text)


@refusing
def url(text: str) -> str:
    from jaxllama.evaluation.speed.load_generator import check_url

    check_url(text)
    return text


def goodput(text: str) -> tuple[str, float]:
    from jaxllama.evaluation.speed.load_generator import LIMITS

    name, equals, _ = text.partition("=")
    if equals and name not in LIMITS:
        raise Bad(f"{text!r}: allowed are {', '.join(LIMITS)}, in seconds")
    return pair(text, str, Number(float, 0, above=True), "KEY=SECONDS")


def serve_options(sub: Parser) -> None:
    sub.add_argument(
        "--url",
        type=url,
        default="http://127.0.0.1:8000",
        help="the server's address (default %(default)s)",
    )
    sub.add_argument(
        "--model",
        type=filled,
        metavar="NAME",
        help="one of its models (default: the first that it lists)",
    )
    sub.add_argument(
        "--api-key",
        type=api_key,
        metavar="KEY",
        help="key of the server (default $JAXLLAMA_API_KEY)",
    )
    sub.add_argument(
        "--requests", type=COUNT, default=100, metavar="N", help="how many (default %(default)s)"
    )
    sub.add_argument(
        "--rate",
        type=Number(float, 0, above=True),
        default=float("inf"),
        metavar="R",
        help="Poisson arrivals a second (default: all at once)",
    )
    sub.add_argument(
        "--concurrency",
        type=COUNT,
        default=64,
        metavar="N",
        help="connections at once (default %(default)s)",
    )
    for kind in ("prompt", "new"):
        sub.add_argument(
            f"--{kind}-tokens",
            type=length,
            default="128",
            metavar="LENGTH",
            help="N, LOW:HIGH or ~MEAN (default %(default)s)",
        )
    sub.add_argument(
        "--lengths",
        type=text_file,
        metavar="FILE",
        help="read both from a file: ShareGPT's, or JSON lines with prompt_tokens and new_tokens",
    )
    sub.add_argument(
        "--prefix-tokens",
        type=Number(least=0),
        default=0,
        metavar="N",
        help="tokens that all requests begin with (default %(default)s)",
    )
    sub.add_argument(
        "--prefixes",
        type=COUNT,
        default=1,
        metavar="N",
        help="different beginnings (default %(default)s)",
    )
    sub.add_argument(
        "--turns",
        type=COUNT,
        default=1,
        metavar="N",
        help="turns of each conversation; a turn repeats the earlier ones (default %(default)s)",
    )
    sub.add_argument(
        "--goodput",
        action="append",
        type=goodput,
        default=[],
        metavar="KEY=SECONDS",
        help="limits of ttft, tpot, e2e; may be given again",
    )
    sub.add_argument(
        "--seed",
        type=SEED,
        default=0,
        metavar="N",
        help="seed of prompts and lengths (default %(default)s)",
    )
    common.json_option(sub)


def run_serve(args: argparse.Namespace) -> None:
    from jaxllama.evaluation.speed import load_generator

    load = load_generator.Load(
        url=args.url,
        model=args.model,
        requests=args.requests,
        rate=args.rate,
        concurrency=args.concurrency,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        seed=args.seed,
        api_key=args.api_key or os.environ.get("JAXLLAMA_API_KEY"),
        limits=tuple(args.goodput),
        lengths=args.lengths,
        prefix_tokens=args.prefix_tokens,
        prefixes=args.prefixes,
        turns=args.turns,
    )
    with working("measuring"):
        report = load_generator.run(load)
    common.show(args, report, load_generator.table)

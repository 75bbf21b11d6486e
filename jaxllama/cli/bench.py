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
    add_list,
    add_value,
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
    add_value(sub, "--prompt-tokens", COUNT, "N", "length of the prefill", default=512)
    add_value(sub, "--new-tokens", Number(least=2), "N", "length of the decode", default=64)
    add_value(sub, "--runs", COUNT, "N", "runs; medians are printed", default=5)
    sub.add_argument(
        "--context",
        type=Number(least=5),
        default=5,
        metavar="N",
        help="tokens that each row holds when decoding begins",
    )
    add_value(sub, "--trace", out_folder, "DIR", "profile one step and write its trace there")
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
        ("--where", None),
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

    if args.trace is not None:
        raise JaxLlamaError("--trace and --where exclude each other")
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
    add_value(
        sub, "--model", filled, "NAME", "one of its models (default: the first that it lists)"
    )
    add_value(sub, "--api-key", api_key, "KEY", "key of the server (default $JAXLLAMA_API_KEY)")
    add_value(sub, "--requests", COUNT, "N", "how many", default=100)
    sub.add_argument(
        "--rate",
        type=Number(float, 0, above=True),
        default=float("inf"),
        metavar="R",
        help="Poisson arrivals a second (default: all at once)",
    )
    add_value(sub, "--concurrency", COUNT, "N", "connections at once", default=64)
    for kind in ("prompt", "new"):
        add_value(sub, f"--{kind}-tokens", length, "LENGTH", "N, LOW:HIGH or ~MEAN", default="128")
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
    add_value(sub, "--prefixes", COUNT, "N", "different beginnings", default=1)
    sub.add_argument(
        "--turns",
        type=COUNT,
        default=1,
        metavar="N",
        help="turns of each conversation; a turn repeats the earlier ones (default %(default)s)",
    )
    add_list(
        sub, "--goodput", goodput, "KEY=SECONDS", "limits of ttft, tpot, e2e; may be given again"
    )
    add_value(sub, "--seed", SEED, "N", "seed of prompts and lengths", default=0)
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

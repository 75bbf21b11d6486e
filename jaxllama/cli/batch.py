"""``jaxllama batch``: see ``jaxllama.serving.http.batch``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxllama.cli import common, serve
from jaxllama.cli.domains import COUNT, OutFile, Parser, add_value, text_file
from jaxllama.errors import JaxLlamaError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

HELP = "Answer the requests of a file in OpenAI's Batch format; a second run continues."


def options(sub: Parser) -> None:
    sub.add_argument("input", type=text_file, metavar="IN.jsonl", help="a request a line")
    sub.add_argument(
        "output",
        type=OutFile((".jsonl",)),
        metavar="OUT.jsonl",
        help="an answer a line, as they end; what is there already stays",
    )
    serve.engine_options(sub)
    common.json_option(sub)
    common.mesh_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.adapter_options(sub, '; requests choose it as "model:NAME"; may be repeated')
    common.cache_options(sub, "--prefill-chunk")
    serve.ray_options(sub)
    add_value(sub, "--replicas", COUNT, "N", "with --ray: engines on the cluster (default 1)")


@contextlib.contextmanager
def app_on_cluster(args: argparse.Namespace, folder: str, name: str) -> Generator[ASGIApp]:
    """Yield the application over an engine, in a process of a cluster."""
    from jaxllama.serving.http.process import local_app

    lm = serve.load_on_cluster(args, folder)
    with local_app(lm, name, serve.engine_of(args)) as (app, _):
        yield app


def _run_on_ray(args: argparse.Namespace, name: str) -> dict[str, int]:
    from jaxllama.engine.options import EngineOptions
    from jaxllama.serving.ray import batch

    options = serve.engine_of(args)
    slots = options.get("max_slots") or EngineOptions().max_slots
    at_once = min(options.get("max_queue") or EngineOptions().max_queue, 2 * slots)
    open_app = functools.partial(app_on_cluster, serve.plain(args), os.getcwd(), name)
    return batch.run(serve.cluster_of(args), name, open_app, args.input, args.output, at_once)


def run(args: argparse.Namespace) -> None:
    for option in ("replicas", "max_replicas"):
        if getattr(args, option) is not None and args.ray is None:
            named = option.replace("_", "-")
            raise JaxLlamaError(f"--{named} needs --ray: the cluster that has them")
    from jaxllama.serving.http import batch
    from jaxllama.serving.http.process import local_app, model_name

    batch.read(args.input)  # checks the file before the model is loaded
    name = model_name(args.model)
    if args.ray is not None:
        common.show(args, _run_on_ray(args, name), common.lines)
        return
    serve.take_memory()
    options = serve.engine_of(args)
    with local_app(common.load(args), name, options) as (app, engine):
        at_once = min(engine.options.max_queue, 2 * engine.options.max_slots)
        report = batch.run(app, name, args.input, args.output, at_once)
    common.show(args, report, common.lines)

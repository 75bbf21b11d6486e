"""``jaxllama batch``: see ``jaxllama.serving.http.batch``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common, serve
from jaxllama.cli.domains import OutFile, Parser, text_file

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


def run(args: argparse.Namespace) -> None:
    from jaxllama.serving.http import batch
    from jaxllama.serving.http.process import local_app, model_name

    batch.read(args.input)  # checks the file before the model is loaded
    serve.take_memory()
    name = model_name(args.model)
    with local_app(common.load(args), name, serve.engine_of(args)) as (app, engine):
        at_once = min(engine.options.max_queue, 2 * engine.options.max_slots)
        report = batch.run(app, name, args.input, args.output, at_once)
    common.show(args, report, common.lines)

"""``jaxllama serve``: see ``jaxllama.serving.http.process``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import COUNT, Number, Parser, api_key, filled, out_folder
from jaxllama.errors import JaxLlamaError

HELP = "OpenAI's API, a chat page and metrics over HTTP."


def options(sub: Parser) -> None:
    sub.add_argument("--host", type=filled, default="127.0.0.1", help="(default %(default)s)")
    sub.add_argument("--port", type=Number(int, 0, 65535), default=8000, metavar="N",
                     help="0 takes a free one (default %(default)s)")  # fmt: skip
    sub.add_argument("--api-key", action="append", type=api_key, default=[], metavar="KEY",
                     help="clients must send; may be repeated ($JAXLLAMA_API_KEY)")  # fmt: skip
    sub.add_argument("--slots", type=COUNT, default=16, metavar="N",
                     help="requests that run at once (default %(default)s)")  # fmt: skip
    sub.add_argument("--max-len", type=COUNT, metavar="N",
                     help="tokens of a request with its answer (default at most 1024)")  # fmt: skip
    sub.add_argument("--max-queue", type=COUNT, default=256, metavar="N",
                     help="requests that wait; more get 429 (default %(default)s)")  # fmt: skip
    sub.add_argument("--max-body", type=Number(int, 1, 2**31), default=4 * 2**20, metavar="BYTES",
                     help="of a request; more get 413 (default %(default)s)")  # fmt: skip
    sub.add_argument("--drain-timeout", type=Number(int, 0, 86400), default=30, metavar="SECONDS",
                     help="for what is in flight at SIGTERM (default %(default)s)")  # fmt: skip
    sub.add_argument("--state", type=out_folder, metavar="DIR",
                     help="of requests and answers; a killed server's are finished")  # fmt: skip
    # Refused in words of its own.
    sub.add_argument("--policy", type=common.parse_policy, help=argparse.SUPPRESS)
    common.mesh_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.adapter_options(sub, '; clients choose it as "model:NAME"; may be repeated')
    common.cache_options(sub)


def run(args: argparse.Namespace) -> None:
    if args.policy is not None:
        raise JaxLlamaError("--policy: the serving engine runs no offloaded models")
    from jaxllama.serving.http.process import ServeOptions, serve

    engine = {"max_slots": args.slots, "max_len": args.max_len, "max_queue": args.max_queue,
              "kv_dtype": common.kv_dtype(args), "prefill_chunk": args.chunk}  # fmt: skip
    options = ServeOptions(
        args.model, args.host, args.port, tuple(args.api_key), args.max_body, args.drain_timeout,
        args.state, engine,
    )  # fmt: skip
    serve(options, lambda: common.load(args))

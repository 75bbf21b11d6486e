"""``jaxllama generate``: prompts in, what the model writes behind them out."""

from __future__ import annotations

import argparse
import json

from jaxllama.cli import chat, common
from jaxllama.cli.domains import Parser, filled, text_input
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import working

HELP = "Continue one or many prompts."


def options(sub: Parser) -> None:
    sub.add_argument("prompts", nargs="*", metavar="PROMPT")
    sub.add_argument("--file", type=text_input, metavar="TXT",
                     help="prompts, one per line; - is the standard input")  # fmt: skip
    sub.add_argument("--stream", action="store_true", help="print text as it is decoded")
    sub.add_argument("--chat", action="store_true",
                     help="each prompt is a user's message, in the model's template")  # fmt: skip
    sub.add_argument("--stop", action="append", type=filled, default=[], metavar="TEXT",
                     help="end before this text; may be given again")  # fmt: skip
    common.hosts_options(sub)
    common.json_option(sub)
    common.model_options(sub)
    common.policy_option(sub)
    common.cache_options(sub)
    common.sampling_options(sub, max_new_tokens=64)


def run(args: argparse.Namespace) -> None:
    prompts = _prompts(args)
    if args.stream and args.json:
        raise JaxLlamaError("--stream and --json exclude each other")
    if args.stream and len(prompts) > 1:
        raise JaxLlamaError(f"--stream shows one prompt, and there are {len(prompts)}")
    sampling = common.sampling(args)
    lm = common.load(args)
    rows = [chat.ids_of(lm, [chat.user(prompt)]) for prompt in prompts] if args.chat else prompts
    with working("generating") as sign:
        outs = lm.generate(
            rows, args.max_new_tokens, sampling, stop=args.stop, kv_dtype=common.kv_dtype(args),
            on_text=chat.shown(sign) if args.stream else None, **common.chunk(args),
        )  # fmt: skip
    if args.json:
        rows = [
            {"prompt": prompt, "text": out.text, "tokens": out.tokens, "logprobs": out.logprobs,
             "finish_reason": out.finish_reason}
            for prompt, out in zip(prompts, outs, strict=True)
        ]  # fmt: skip
        common.print_json({"model": args.model, "generations": rows})
    elif args.stream:
        print()
    else:
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            if len(prompts) > 1:
                print(f"{chr(10) if index else ''}=== {json.dumps(prompt, ensure_ascii=False)}")
            print(out.text)


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.file is None:
        prompts = args.prompts
    elif args.prompts:
        raise JaxLlamaError("prompts and --file exclude each other")
    else:
        lines = common.read_text(args.file).replace("\r\n", "\n").split("\n")
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise JaxLlamaError(f"{args.file}: no prompts in it")
    if not prompts:
        raise JaxLlamaError("no prompt: give one, or --file")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise JaxLlamaError(f"prompt {index} is empty")
    return prompts

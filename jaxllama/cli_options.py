"""What the ``jaxllama`` command understands: its parser, and nothing that needs jax.

    parser(run) -> argparse.ArgumentParser

``run`` maps a command's name to the function that ``args.run`` becomes; a command that it lacks is
not offered.  Mistakes in the words are JaxLlamaErrors; what the values mean is checked in ``cli``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxllama.errors import JaxLlamaError

MODEL = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "int4", "fp8")

Run = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise JaxLlamaError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """The version, which is only looked up when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import jaxllama

        print(f"jaxllama {jaxllama.__version__}")
        parser.exit()


def parser(run: Mapping[str, Run]) -> Parser:
    """See the module docstring."""
    top = Parser(
        prog="jaxllama", allow_abbrev=False, description="Llama and Gated Linear Attention in JAX."
    )
    top.add_argument("--version", action=_Version)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, add) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run[name])
        add(sub)
    return top


def _generate(sub: Parser) -> None:
    sub.add_argument("prompts", nargs="*", metavar="PROMPT")
    sub.add_argument("--file", type=Path, metavar="TXT",
                     help="prompts, one per line; - is the standard input")  # fmt: skip
    sub.add_argument("--stream", action="store_true", help="print text as it is decoded")
    sub.add_argument("--chat", action="store_true",
                     help="each prompt is a user's message, in the model's template")  # fmt: skip
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="end before this text; may be given again")  # fmt: skip
    _json(sub)
    _model(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=64)


def _chat(sub: Parser) -> None:
    sub.add_argument("--system", metavar="TEXT", help="the system message")
    _model(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=512)


def _bench(sub: Parser) -> None:
    sub.add_argument("--random", action="store_true",
                     help="random weights of the preset's shape: nothing is fetched")  # fmt: skip
    sub.add_argument("--batch", type=int, default=1, metavar="N", help="rows at once")
    sub.add_argument("--prompt-tokens", type=int, default=512, metavar="N",
                     help="length of the prefill (default %(default)s)")  # fmt: skip
    sub.add_argument("--new-tokens", type=int, default=64, metavar="N",
                     help="length of the decode (default %(default)s)")  # fmt: skip
    sub.add_argument("--runs", type=int, default=5, metavar="N",
                     help="medians are of this many (default %(default)s)")  # fmt: skip
    _json(sub)
    _model(sub)
    _cache(sub)


def _eval(sub: Parser) -> None:
    sub.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    sub.add_argument("--window", type=int, metavar="N",
                     help="tokens scored together (default 512, or the context)")  # fmt: skip
    _json(sub)
    _model(sub)


def _doctor(sub: Parser) -> None:
    sub.add_argument("--model", metavar="NAME", help="also load this one: dtypes and bytes")
    _json(sub)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "generate": ("Continue one or many prompts.", _generate),
    "chat": ("Talk to a model: /reset begins anew, /exit ends.", _chat),
    "bench": ("Measure decode, prefill, time to first token and memory.", _bench),
    "eval": ("Perplexity of a text.", _eval),
    "doctor": ("Versions, devices, and which implementation each op uses.", _doctor),
}


def _json(sub: Parser) -> None:
    sub.add_argument("--json", action="store_true", help="print results as JSON")


def _model(sub: Parser) -> None:
    group = sub.add_argument_group("model")
    group.add_argument("--model", "--preset", default=MODEL, metavar="NAME",
                       help="preset, directory, .gguf or hub id (default %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="of weights and activations")
    group.add_argument(
        "--quantize", metavar="SCHEME", help="w8a16, w4a16, w8a8 or fp8, once loaded"
    )


def _cache(sub: Parser) -> None:
    group = sub.add_argument_group("cache")
    group.add_argument("--kv-dtype", choices=KV_DTYPES, help="of keys and values (default --dtype)")
    group.add_argument("--attn-sparsity", type=float, metavar="SHARE",
                       help="of attention weights that decode keeps, in (0, 1]")  # fmt: skip
    group.add_argument("--chunk", type=int, metavar="N",
                       help="tokens of a prompt that are prefilled at once")  # fmt: skip


def _sampling(sub: Parser, max_new_tokens: int) -> None:
    group = sub.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N",
                       help="(default %(default)s)")  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, metavar="T",
                       help="0, the default, is greedy")  # fmt: skip
    group.add_argument("--top-k", type=int, default=0, metavar="K",
                       help="draw from the K most likely tokens; 0 is off")  # fmt: skip
    group.add_argument("--top-p", type=float, default=1.0, metavar="P",
                       help="draw from the smallest set of this probability")  # fmt: skip
    group.add_argument("--min-p", type=float, default=0.0, metavar="P",
                       help="drop tokens below this share of the best one")  # fmt: skip
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X",
                       help="for tokens of prompt and output; 1 is off")  # fmt: skip
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X",
                       help="for every occurrence in the output")  # fmt: skip
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X",
                       help="for tokens of the output")  # fmt: skip
    group.add_argument("--logit-bias", action="append", default=[], metavar="ID=X",
                       help="add X to a token's logit; may be given again")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default %(default)s)")

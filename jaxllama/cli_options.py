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
METHODS = ("rtn", "awq", "gptq", "smoothquant")
FORMATS = ("native", "awq", "gptq", "compressed-tensors")

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
    _hosts(sub)
    _json(sub)
    _model(sub)
    _policy(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=64)


def _chat(sub: Parser) -> None:
    sub.add_argument("--system", metavar="TEXT", help="the system message")
    _model(sub)
    _policy(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=512)


def _random(sub: Parser) -> None:
    sub.add_argument("--random", action="store_true",
                     help="random weights of the preset's shape: nothing is fetched")  # fmt: skip


def _bench(sub: Parser) -> None:
    _random(sub)
    sub.add_argument("--batch", type=int, default=1, metavar="N", help="rows at once")
    sub.add_argument("--prompt-tokens", type=int, default=512, metavar="N",
                     help="length of the prefill (default %(default)s)")  # fmt: skip
    sub.add_argument("--new-tokens", type=int, default=64, metavar="N",
                     help="length of the decode (default %(default)s)")  # fmt: skip
    sub.add_argument("--runs", type=int, default=5, metavar="N",
                     help="medians are of this many (default %(default)s)")  # fmt: skip
    sub.add_argument("--context", type=int, default=5, metavar="N",
                     help="tokens that each row holds when decoding begins")  # fmt: skip
    sub.add_argument("--trace", type=Path, metavar="DIR",
                     help="profile one step and write its trace there")  # fmt: skip
    _hosts(sub)
    _json(sub)
    _model(sub)
    _cache(sub)
    what = sub.add_subparsers(dest="what", metavar="[serve]", title="instead of a model")
    text = "Make load on a running server and measure what its clients see."
    _bench_serve(what.add_parser("serve", help=text, description=text, allow_abbrev=False))


def _bench_serve(sub: Parser) -> None:
    sub.add_argument("--url", default="http://127.0.0.1:8000", help="(default %(default)s)")
    sub.add_argument("--api-key", metavar="KEY", help="(default $JAXLLAMA_API_KEY)")
    sub.add_argument("--requests", type=int, default=100, metavar="N", help="(default %(default)s)")
    sub.add_argument("--rate", type=float, default=float("inf"), metavar="R",
                     help="Poisson arrivals a second (default: all at once)")  # fmt: skip
    sub.add_argument("--concurrency", type=int, default=64, metavar="N",
                     help="connections at once (default %(default)s)")  # fmt: skip
    for kind in ("prompt", "new"):
        sub.add_argument(f"--{kind}-tokens", default="128", metavar="LENGTH",
                         help="N, LOW:HIGH or ~MEAN (default %(default)s)")  # fmt: skip
    sub.add_argument("--goodput", action="append", default=[], metavar="KEY=SECONDS",
                     help="limits of ttft, tpot, e2e; may be given again")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="(default %(default)s)")
    _json(sub)


def _serve(sub: Parser) -> None:
    sub.add_argument("--host", default="127.0.0.1", help="(default %(default)s)")
    sub.add_argument("--port", type=int, default=8000, metavar="N",
                     help="0 takes a free one (default %(default)s)")  # fmt: skip
    sub.add_argument("--api-key", action="append", default=[], metavar="KEY",
                     help="clients must send; may be repeated ($JAXLLAMA_API_KEY)")  # fmt: skip
    sub.add_argument("--slots", type=int, default=16, metavar="N",
                     help="requests that run at once (default %(default)s)")  # fmt: skip
    sub.add_argument("--max-len", type=int, metavar="N",
                     help="tokens of a request with its answer (default at most 1024)")  # fmt: skip
    sub.add_argument("--max-queue", type=int, default=256, metavar="N",
                     help="requests that wait; more get 429 (default %(default)s)")  # fmt: skip
    sub.add_argument("--max-body", type=int, default=4 * 2**20, metavar="BYTES",
                     help="of a request; more get 413 (default %(default)s)")  # fmt: skip
    sub.add_argument("--drain-timeout", type=int, default=30, metavar="SECONDS",
                     help="for what is in flight at SIGTERM (default %(default)s)")  # fmt: skip
    sub.add_argument("--state", type=Path, metavar="DIR",
                     help="of requests and answers; a killed server's are finished")  # fmt: skip
    _random(sub)
    _model(sub)
    _cache(sub)


def _eval(sub: Parser) -> None:
    sub.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    sub.add_argument("--window", type=int, metavar="N",
                     help="tokens scored together (default 512, or the context)")  # fmt: skip
    sub.add_argument("--stride", type=int, metavar="N",
                     help="tokens from window to window (default window - 1)")  # fmt: skip
    sub.add_argument("--reference", metavar="NAME",
                     help="a model to compare with: adds kl and top1")  # fmt: skip
    sub.add_argument("--kv-dtype", choices=KV_DTYPES,
                     help="score through a cache of this dtype")  # fmt: skip
    _hosts(sub)
    _json(sub)
    _model(sub)
    _policy(sub)


def _quantize(sub: Parser) -> None:
    sub.add_argument("--out", type=Path, required=True, metavar="DIR",
                     help="to make; an interrupted run goes on where it stopped")  # fmt: skip
    sub.add_argument("--scheme", default="w4a16", metavar="SCHEME",
                     help="as --quantize of the other commands, or fp8-static "
                          "(default %(default)s)")  # fmt: skip
    sub.add_argument("--method", choices=METHODS, default="rtn", help="(default %(default)s)")
    sub.add_argument("--format", choices=FORMATS, default="native", help="(default %(default)s)")
    sub.add_argument("--calibration", type=Path, metavar="FILE",
                     help="UTF-8 text (default: a packaged one)")  # fmt: skip
    sub.add_argument("--samples", type=int, default=32, metavar="N",
                     help="windows of it that are used (default %(default)s)")  # fmt: skip
    sub.add_argument("--window", type=int, default=512, metavar="N",
                     help="tokens of each (default %(default)s)")  # fmt: skip
    sub.add_argument("--report", type=Path, action="append", default=[], metavar="FILE",
                     help="every weight's errors, .json or .png; may be given again")  # fmt: skip
    _json(sub)
    group = sub.add_argument_group("model")
    group.add_argument("--model", default=MODEL, metavar="NAME",
                       help="preset, directory, .gguf or hub id (default %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="of weights and activations")


def _experiment(sub: Parser) -> None:
    sub.add_argument("file", nargs="?", metavar="FILE",
                     help="a TOML file, or the name of a shipped experiment")  # fmt: skip
    sub.add_argument("--out", type=Path, metavar="DIR",
                     help="of the run (default runs/NAME-HASH); a run is continued")  # fmt: skip
    sub.add_argument("--dry-run", action="store_true",
                     help="print points, shapes, memory and time, and do nothing")  # fmt: skip
    sub.add_argument("--compare", nargs=2, metavar=("DIR", "DIR"),
                     help="what differs between two runs beyond their noise")  # fmt: skip
    _json(sub)


def _tokenize(sub: Parser) -> None:
    sub.add_argument("texts", nargs="+", type=Path, metavar="TXT", help="UTF-8 text, a document")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the token file")
    sub.add_argument("--tokenizer", default=MODEL, metavar="NAME",
                     help="a model's, or bytes (default %(default)s)")  # fmt: skip
    _json(sub)


def _train(sub: Parser) -> None:
    sub.add_argument("file", type=Path, metavar="FILE", help="a TOML file, as in configs/training")
    sub.add_argument("--out", type=Path, metavar="DIR",
                     help="of the run (default runs/NAME), where it also resumes")  # fmt: skip
    sub.add_argument("--mesh", metavar="AXES",
                     help="devices that share every step's rows: data=N")  # fmt: skip
    _json(sub)


def _plan(sub: Parser) -> None:
    _random(sub)
    sub.add_argument("--batch", type=int, default=8, metavar="N", help="rows (default %(default)s)")
    sub.add_argument("--prompt-tokens", type=int, default=512, metavar="N",
                     help="a row (default %(default)s)")  # fmt: skip
    sub.add_argument("--new-tokens", type=int, default=32, metavar="N",
                     help="a row (default %(default)s)")  # fmt: skip
    for tier in ("device", "host", "disk"):
        sub.add_argument(f"--{tier}-gb", type=float, metavar="X",
                         help=f"of {tier} memory to use (default: all there is)")  # fmt: skip
    sub.add_argument("--timeline", type=Path, metavar="PNG", help="a picture of one step")
    _json(sub)
    _model(sub)
    _policy(sub)
    _cache(sub)


def _doctor(sub: Parser) -> None:
    sub.add_argument("--model", metavar="NAME", help="also load this one: dtypes and bytes")
    _json(sub)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "generate": ("Continue one or many prompts.", _generate),
    "chat": ("Talk to a model: /reset begins anew, /exit ends.", _chat),
    "serve": ("OpenAI's API, a chat page and metrics over HTTP.", _serve),
    "bench": ("Measure decode, prefill, time to first token and memory.", _bench),
    "quantize": ("Make a quantized checkpoint, calibrated on text.", _quantize),
    "eval": ("Perplexity of a text, and the distance to a reference.", _eval),
    "experiment": ("Reproduce a result from its TOML file, or compare two runs.", _experiment),
    "tokenize": ("Make a token file of texts, for train.", _tokenize),
    "train": ("Train or distill a model as a TOML file says.", _train),
    "plan": ("Solve for the offloading policy, and measure what it predicts.", _plan),
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
        "--quantize", metavar="SCHEME",
        help="w8a16, w4a16, w8a8 or fp8 once loaded, or a mix: w4a16,down=w8a16 (fp8-static needs "
             "the quantize command)",
    )  # fmt: skip
    group.add_argument("--mesh", metavar="AXES",
                       help="several devices: data=N,model=N (1 where left out)")  # fmt: skip


def _hosts(sub: Parser) -> None:
    sub.add_argument("--hosts", metavar="ADDRESS:PORT,COUNT,INDEX",
                     help="one process on each of several hosts: where the first listens, how "
                          "many there are, which this is; needs --mesh")  # fmt: skip


def _policy(sub: Parser) -> None:
    sub.add_argument("--policy", metavar="TEXT",
                     help="where weights, cache and activations live: six percentages, device and "
                          "host of each, then NAME=VALUE, as in '0 100 100 0 100 0 "
                          "gpu_batch_size=8'")  # fmt: skip


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

"""What the ``jaxllama`` command understands: its parser, and nothing that needs jax.

    parser(run) -> argparse.ArgumentParser

``run`` maps a command's name to the function that ``args.run`` becomes; a command that it lacks is
not offered.  Mistakes in the words are JaxLlamaErrors that name the option.

Contract: an option's ``type`` (or ``choices``) is its domain.  What a single word can be wrong in
is refused here, while the words are read; only what depends on other options, the model or the
machine is left to ``cli``.  (tests/cli/test_options.py walks every parser and holds it to that.)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
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

    inner: str | None = None  # where the word of a command inside this one is kept

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also refuses options before the inner command's word: they would have no effect."""
        parsed, rest = super().parse_known_args(args, namespace)
        word = None if self.inner is None else getattr(parsed, self.inner)
        if word is not None and args[0] != word:
            self.error(f"{args[0]} has no effect before {word}, which takes its own options")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        # A domain says "= 3: why", "'x' is not ..." or ": why" behind the option's name.
        message = re.sub(r"^argument (\S+):(?: (?=:)|(?= [='\"]))", r"\1", message)
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


# Domains


class _Bad(argparse.ArgumentTypeError):
    """What is said behind the option's name, as ``Parser.error`` joins them."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number from ``least`` to ``most``; ``above``: larger than ``least``.  NaN is none."""

    kind: type = int
    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError:
            what = "whole number" if self.kind is int else "number"
            raise _Bad(f"{text!r} is not a {what}") from None
        low = self.least < value if self.above else self.least <= value
        if not (low and value <= self.most):
            start = f"{'above' if self.above else 'at least'} {self.least}"
            end = "" if self.most == math.inf else f" and at most {self.most}"
            raise _Bad(f"= {value}: must be {start}{end}")
        return value


COUNT = Number(least=1)
SEED = Number(least=-(2**63), most=2**64 - 1)
SHARE = Number(float, 0, 1, above=True)


def _refusing(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """``check``, whose JaxLlamaErrors become argparse's, without the word that they begin with."""

    @functools.wraps(check)
    def read(text: str) -> Any:
        try:
            return check(text)
        except JaxLlamaError as error:
            raise _Bad(re.sub("^(scheme|mesh|hosts|policy) ?", "", str(error))) from None

    return read


@_refusing
def scheme(text: str) -> str:
    from jaxllama.quantization.scheme import parse

    parse(text)
    return text


@_refusing
def rounding(text: str) -> str:
    """A scheme that needs no calibration."""
    from jaxllama.quantization.scheme import parse

    parse(text).check_rounding()
    return text


@_refusing
def mesh(text: str) -> str:
    """Whether there are so many devices is known when all hosts have joined."""
    from jaxllama.parallel.mesh import mesh_sizes

    mesh_sizes(text)
    return text


@_refusing
def hosts(text: str) -> str:
    from jaxllama.parallel.hosts import read_hosts

    read_hosts(text)
    return text


@_refusing
def policy(text: str) -> Any:
    from jaxllama.offload.policy import Policy

    return Policy.parse(text)


@_refusing
def length(text: str) -> Any:
    from jaxllama.bench.load_generator import Lengths

    return Lengths(text)


@_refusing
def url(text: str) -> str:
    from jaxllama.bench.load_generator import check_url

    check_url(text)
    return text


def logit_bias(text: str) -> tuple[int, float]:
    return _pair(text, Number(least=0), Number(float, most=sys.float_info.max), "ID=NUMBER")


def adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and Path(folder).is_dir()):
        raise _Bad(f"= {text}: expected NAME=DIR, a folder that is there")
    return name, folder


def goodput(text: str) -> tuple[str, float]:
    from jaxllama.bench.load_generator import LIMITS

    name, equals, _ = text.partition("=")
    if equals and name not in LIMITS:
        raise _Bad(f"{text!r}: allowed are {', '.join(LIMITS)}, in seconds")
    return _pair(text, str, Number(float, 0, above=True), "KEY=SECONDS")


def _pair(text: str, key: Callable[[str], Any], value: Number, form: str) -> tuple[Any, Any]:
    name, equals, number = text.partition("=")
    try:
        if equals:
            return key(name), value(number)
    except _Bad:
        pass
    raise _Bad(f"{text!r}: expected {form}")


def filled(text: str) -> str:
    if not text:
        raise _Bad("'': must not be empty")
    return text


def api_key(text: str) -> str:
    if not (text and text.isascii() and text.isprintable() and text.strip() == text):
        raise _Bad(": must be printable ASCII without spaces around it, and not empty")
    return text


def text_file(text: str) -> Path:
    """A file that can be read; a pipe is left alone until it is read."""
    path = Path(text)
    try:
        path.stat()
        reason = "Is a directory" if path.is_dir() else "Permission denied"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if not path.is_dir() and os.access(path, os.R_OK):
            return path
    raise _Bad(f"= {text}: {reason}")


def text_input(text: str) -> Path:
    """The same, or "-", the standard input."""
    return Path(text) if text == "-" else text_file(text)


def run_folder(text: str) -> str:
    if not Path(text).is_dir():
        raise _Bad(f"= {text}: no such folder")
    return text


def out_folder(text: str) -> Path:
    """A folder that is there or can be made."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise _Bad(f"= {text}: not a folder")
    return _writable(path)


def new_folder(text: str) -> Path:
    """One that is not there yet, or empty."""
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _Bad(f"= {text}: already exists; nothing is overwritten")
    return out_folder(text)


@dataclasses.dataclass(frozen=True)
class OutFile:
    """A file to write, of one of these kinds."""

    suffixes: tuple[str, ...]

    def __call__(self, text: str) -> Path:
        path = Path(text)
        if path.suffix not in self.suffixes or path.is_dir():
            raise _Bad(f"= {text}: not a {' or '.join(self.suffixes)} file")
        if not path.absolute().parent.is_dir():
            raise _Bad(f"= {text}: no such folder")
        if path.suffix != ".json" and importlib.util.find_spec("matplotlib") is None:
            raise _Bad(f"= {text}: a picture needs matplotlib: pip install 'jaxllama[experiment]'")
        return _writable(path)


def _writable(path: Path) -> Path:
    """Raises unless ``path``, or the nearest thing above it that exists, can be written to."""
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if there != path and not there.is_dir():
        raise _Bad(f"= {path}: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise _Bad(f"= {path}: {there}: Permission denied")
    return path


# Commands


def _generate(sub: Parser) -> None:
    sub.add_argument("prompts", nargs="*", metavar="PROMPT")
    sub.add_argument("--file", type=text_input, metavar="TXT",
                     help="prompts, one per line; - is the standard input")  # fmt: skip
    sub.add_argument("--stream", action="store_true", help="print text as it is decoded")
    sub.add_argument("--chat", action="store_true",
                     help="each prompt is a user's message, in the model's template")  # fmt: skip
    sub.add_argument("--stop", action="append", type=filled, default=[], metavar="TEXT",
                     help="end before this text; may be given again")  # fmt: skip
    _hosts(sub)
    _json(sub)
    _model(sub)
    _adapter(sub, "")
    _policy(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=64)


def _chat(sub: Parser) -> None:
    sub.add_argument("--system", metavar="TEXT", help="the system message")
    _mesh(sub)
    _model(sub)
    _adapter(sub, "")
    _policy(sub)
    _cache(sub)
    _sampling(sub, max_new_tokens=512)


def _random(sub: Parser) -> None:
    sub.add_argument("--random", action="store_true",
                     help="random weights of the preset's shape: nothing is fetched")  # fmt: skip


def _bench(sub: Parser) -> None:
    _random(sub)
    sub.add_argument("--batch", type=COUNT, default=1, metavar="N", help="rows at once")
    sub.add_argument("--prompt-tokens", type=COUNT, default=512, metavar="N",
                     help="length of the prefill (default %(default)s)")  # fmt: skip
    sub.add_argument("--new-tokens", type=Number(least=2), default=64, metavar="N",
                     help="length of the decode (default %(default)s)")  # fmt: skip
    sub.add_argument("--runs", type=COUNT, default=5, metavar="N",
                     help="medians are of this many (default %(default)s)")  # fmt: skip
    sub.add_argument("--context", type=Number(least=5), default=5, metavar="N",
                     help="tokens that each row holds when decoding begins")  # fmt: skip
    sub.add_argument("--trace", type=out_folder, metavar="DIR",
                     help="profile one step and write its trace there")  # fmt: skip
    _hosts(sub)
    _json(sub)
    _model(sub)
    _cache(sub)
    sub.inner = "what"
    what = sub.add_subparsers(dest=sub.inner, metavar="[serve]", title="instead of a model")
    text = "Make load on a running server and measure what its clients see."
    _bench_serve(what.add_parser("serve", help=text, description=text, allow_abbrev=False))


def _bench_serve(sub: Parser) -> None:
    sub.add_argument(
        "--url", type=url, default="http://127.0.0.1:8000", help="(default %(default)s)"
    )
    sub.add_argument("--model", type=filled, metavar="NAME",
                     help="(default: the first that the server lists)")  # fmt: skip
    sub.add_argument("--api-key", type=api_key, metavar="KEY", help="(default $JAXLLAMA_API_KEY)")
    sub.add_argument(
        "--requests", type=COUNT, default=100, metavar="N", help="(default %(default)s)"
    )
    sub.add_argument("--rate", type=Number(float, 0, above=True), default=float("inf"), metavar="R",
                     help="Poisson arrivals a second (default: all at once)")  # fmt: skip
    sub.add_argument("--concurrency", type=COUNT, default=64, metavar="N",
                     help="connections at once (default %(default)s)")  # fmt: skip
    for kind in ("prompt", "new"):
        sub.add_argument(f"--{kind}-tokens", type=length, default="128", metavar="LENGTH",
                         help="N, LOW:HIGH or ~MEAN (default %(default)s)")  # fmt: skip
    sub.add_argument("--goodput", action="append", type=goodput, default=[], metavar="KEY=SECONDS",
                     help="limits of ttft, tpot, e2e; may be given again")  # fmt: skip
    sub.add_argument("--seed", type=SEED, default=0, metavar="N", help="(default %(default)s)")
    _json(sub)


def _serve(sub: Parser) -> None:
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
    sub.add_argument("--policy", type=policy, help=argparse.SUPPRESS)  # refused in words of its own
    _random(sub)
    _mesh(sub)
    _model(sub)
    _adapter(sub, '; clients choose it as "model:NAME"; may be repeated')
    _cache(sub)


def _eval(sub: Parser) -> None:
    sub.add_argument("--text", type=text_input, required=True, metavar="FILE", help="UTF-8 text")
    sub.add_argument("--window", type=Number(least=2), metavar="N",
                     help="tokens scored together (default 512, or the context)")  # fmt: skip
    sub.add_argument("--stride", type=COUNT, metavar="N",
                     help="tokens from window to window (default window - 1)")  # fmt: skip
    sub.add_argument("--reference", type=filled, metavar="NAME",
                     help="a model to compare with: adds kl and top1")  # fmt: skip
    sub.add_argument("--kv-dtype", choices=KV_DTYPES,
                     help="score through a cache of this dtype")  # fmt: skip
    _hosts(sub)
    _json(sub)
    _model(sub)
    _policy(sub)


def _quantize(sub: Parser) -> None:
    sub.add_argument("--out", type=new_folder, required=True, metavar="DIR",
                     help="to make; an interrupted run goes on where it stopped")  # fmt: skip
    sub.add_argument("--scheme", type=scheme, default="w4a16", metavar="SCHEME",
                     help="as --quantize of the other commands, or fp8-static "
                          "(default %(default)s)")  # fmt: skip
    sub.add_argument("--method", choices=METHODS, default="rtn", help="(default %(default)s)")
    sub.add_argument("--format", choices=FORMATS, default="native", help="(default %(default)s)")
    sub.add_argument("--calibration", type=text_input, metavar="FILE",
                     help="UTF-8 text (default: a packaged one)")  # fmt: skip
    sub.add_argument("--samples", type=Number(int, 0), metavar="N",
                     help="windows of it that are used; 0, the default of rtn without --report or "
                          "--calibration, measures no errors (default 32)")  # fmt: skip
    sub.add_argument("--window", type=Number(least=2), default=512, metavar="N",
                     help="tokens of each (default %(default)s)")  # fmt: skip
    sub.add_argument("--report", type=OutFile((".json", ".png")), action="append", default=[],
                     metavar="FILE",
                     help="every weight's errors, .json or .png; may be given again")  # fmt: skip
    _json(sub)
    group = sub.add_argument_group("model")
    group.add_argument("--model", type=filled, default=MODEL, metavar="NAME",
                       help="preset, directory, .gguf or hub id (default %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="of weights and activations")


def _experiment(sub: Parser) -> None:
    sub.add_argument("file", nargs="?", metavar="FILE",
                     help="a TOML file, or the name of a shipped experiment")  # fmt: skip
    sub.add_argument("--out", type=out_folder, metavar="DIR",
                     help="of the run (default runs/NAME-HASH); a run is continued")  # fmt: skip
    sub.add_argument("--dry-run", action="store_true",
                     help="print points, shapes, memory and time, and do nothing")  # fmt: skip
    sub.add_argument("--compare", nargs=2, type=run_folder, metavar=("DIR", "DIR"),
                     help="what differs between two runs beyond their noise")  # fmt: skip
    _json(sub)


def _tokenize(sub: Parser) -> None:
    sub.add_argument(
        "texts", nargs="+", type=text_file, metavar="TXT", help="UTF-8 text, a document"
    )
    sub.add_argument(
        "--out", type=new_folder, required=True, metavar="DIR", help="of the token file"
    )
    sub.add_argument("--tokenizer", type=filled, default=MODEL, metavar="NAME",
                     help="a model's, or bytes (default %(default)s)")  # fmt: skip
    _json(sub)


def _train(sub: Parser) -> None:
    sub.add_argument("file", metavar="FILE", help="a TOML file, or the name of a shipped one")
    sub.add_argument("--out", type=out_folder, metavar="DIR",
                     help="of the run (default runs/NAME), where it also resumes")  # fmt: skip
    sub.add_argument("--mesh", type=mesh, metavar="AXES",
                     help="devices that share every step's rows: data=N")  # fmt: skip
    _json(sub)


def _plan(sub: Parser) -> None:
    _random(sub)
    sub.add_argument(
        "--batch", type=COUNT, default=8, metavar="N", help="rows (default %(default)s)"
    )
    sub.add_argument("--prompt-tokens", type=COUNT, default=512, metavar="N",
                     help="a row (default %(default)s)")  # fmt: skip
    sub.add_argument("--new-tokens", type=Number(least=3), default=32, metavar="N",
                     help="a row (default %(default)s)")  # fmt: skip
    for tier in ("device", "host", "disk"):
        sub.add_argument(f"--{tier}-gb", type=Number(float, 0, 1e9), metavar="X",
                         help=f"of {tier} memory to use (default: all there is)")  # fmt: skip
    sub.add_argument(
        "--timeline",
        type=OutFile((".png", ".svg", ".pdf")),
        metavar="PNG",
        help="a picture of one step",
    )
    sub.add_argument("--recalibrate", action="store_true",
                     help="measure this machine anew, not as it was found before")  # fmt: skip
    _json(sub)
    _model(sub)
    _policy(sub)
    _cache(sub)


def _doctor(sub: Parser) -> None:
    sub.add_argument(
        "--model", type=filled, metavar="NAME", help="also load this one: dtypes and bytes"
    )
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


def _adapter(sub: Parser, text: str) -> None:
    sub.add_argument("--adapter", action="append", type=adapter, default=[], metavar="NAME=DIR",
                     help=f"a LoRA adapter as PEFT writes it{text}")  # fmt: skip
    sub.add_argument("--merge", action="store_true", help="put it into the weights for good")


def _json(sub: Parser) -> None:
    sub.add_argument("--json", action="store_true", help="print results as JSON")


def _model(sub: Parser) -> None:
    group = sub.add_argument_group("model")
    group.add_argument("--model", "--preset", type=filled, default=MODEL, metavar="NAME",
                       help="preset, directory, .gguf or hub id (default %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="of weights and activations")
    group.add_argument(
        "--quantize", type=rounding, metavar="SCHEME",
        help="w8a16, w4a16 (w4a16-sym: no zero points), w8a8 or fp8 once loaded, or a mix: "
             "w4a16,down=w8a16 (fp8-static needs the quantize command)",
    )  # fmt: skip


def _mesh(sub: Parser) -> None:
    sub.add_argument("--mesh", type=mesh, metavar="AXES",
                     help="several devices: data=N,model=N (1 where left out)")  # fmt: skip


def _hosts(sub: Parser) -> None:
    _mesh(sub)
    sub.add_argument("--hosts", type=hosts, metavar="ADDRESS:PORT,COUNT,INDEX",
                     help="one process on each of several hosts: where the first listens, how "
                          "many there are, which this is; needs --mesh")  # fmt: skip


def _policy(sub: Parser) -> None:
    sub.add_argument("--policy", type=policy, metavar="TEXT",
                     help="where weights, cache and activations live: six percentages, device and "
                          "host of each, then NAME=VALUE, as in '0 100 100 0 100 0 "
                          "gpu_batch_size=8'")  # fmt: skip


def _cache(sub: Parser) -> None:
    group = sub.add_argument_group("cache")
    group.add_argument("--kv-dtype", choices=KV_DTYPES, help="of keys and values (default --dtype)")
    group.add_argument("--attn-sparsity", type=SHARE, metavar="SHARE",
                       help="of attention weights that decode keeps, in (0, 1]")  # fmt: skip
    group.add_argument("--chunk", type=COUNT, metavar="N",
                       help="tokens of a prompt that are prefilled at once")  # fmt: skip


def _sampling(sub: Parser, max_new_tokens: int) -> None:
    group = sub.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=COUNT, default=max_new_tokens, metavar="N",
                       help="(default %(default)s)")  # fmt: skip
    group.add_argument("--temperature", type=Number(float, 0, 100), default=0.0, metavar="T",
                       help="0, the default, is greedy")  # fmt: skip
    group.add_argument("--top-k", type=Number(least=0), default=0, metavar="K",
                       help="draw from the K most likely tokens; 0 is off")  # fmt: skip
    group.add_argument("--top-p", type=SHARE, default=1.0, metavar="P",
                       help="draw from the smallest set of this probability")  # fmt: skip
    group.add_argument("--min-p", type=Number(float, 0, 1), default=0.0, metavar="P",
                       help="drop tokens below this share of the best one")  # fmt: skip
    group.add_argument("--repetition-penalty", type=Number(float, 0, 100, above=True), default=1.0,
                       metavar="X", help="for tokens of prompt and output; 1 is off")  # fmt: skip
    group.add_argument("--frequency-penalty", type=Number(float, -2, 2), default=0.0, metavar="X",
                       help="for every occurrence in the output")  # fmt: skip
    group.add_argument("--presence-penalty", type=Number(float, -2, 2), default=0.0, metavar="X",
                       help="for tokens of the output")  # fmt: skip
    group.add_argument("--logit-bias", action="append", type=logit_bias, default=[], metavar="ID=X",
                       help="add X to a token's logit; may be given again")  # fmt: skip
    group.add_argument("--seed", type=SEED, metavar="N", help="of the draws (default 0)")

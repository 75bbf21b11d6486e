"""Options that several commands share, and the functions that read them.

A command is a module: ``HELP``, ``options(sub)`` declares its options, ``run(args)`` does the work.
In this module each option stands beside the function that reads it. The functions import jax; the
module does not.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllama.cli.domains import (
    COUNT,
    SEED,
    SHARE,
    Number,
    OptionGroup,
    Parser,
    add_list,
    add_value,
    filled,
    pair,
    refusing,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.files import json_text
from jaxllama.typing import JsonObject, Options

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllama.decoding.sampling import Sampling
    from jaxllama.language_model import LanguageModel
    from jaxllama.model.eagle3 import Drafter
    from jaxllama.offload.policy import Policy


MODEL = "smollm2-135m"
# Thresholds of the garbage collector: during the start, and for new objects after it.
START_OBJECTS, NEW_OBJECTS = 500_000, 100_000
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "int4", "fp8")


# The model


@refusing
def rounding(text: str) -> str:
    """Return a scheme that needs no calibration."""
    from jaxllama.quantization.scheme import parse

    parse(text).check_rounding()
    return text


def source_options(sub: Parser, default: str | None = MODEL) -> OptionGroup:
    """Add the options that name the weights, and return their group."""
    group = sub.add_argument_group("model")
    shown = ", to be loaded too" if default is None else " (default %(default)s)"
    group.add_argument(
        "--model",
        "--preset",
        type=filled,
        default=default,
        metavar="NAME",
        help="preset, directory, .gguf or hub id" + shown,
    )
    group.add_argument(
        "--random",
        action="store_true",
        help="random weights of the preset's shape: nothing is fetched",
    )
    add_value(group, "--revision", filled, "NAME", "branch, tag or commit of --model, a hub id")
    return group


def source(args: argparse.Namespace) -> Options:
    """Return the options of ``source_options`` for ``loading.load``."""
    return {"random": args.random, "revision": args.revision}


def dtype_option(group: OptionGroup) -> None:
    group.add_argument("--dtype", choices=DTYPES, help="dtype of weights and activations")


def model_options(sub: Parser) -> None:
    group = source_options(sub)
    dtype_option(group)
    quantize_option(group)


def quantize_option(group: OptionGroup) -> None:
    group.add_argument(
        "--quantize",
        type=rounding,
        metavar="SCHEME",
        help="w8a16, w4a16 (w4a16-sym: no zero points), w8a8, fp8, fp8-block, fp8-block-a8, w4a8, "
        "w4a8-fp8, mxfp4, nvfp4 once loaded, or a mix: w4a16,down=w8a16 (fp8-static needs the "
        "quantize command)",
    )


def chat_option(sub: Parser) -> None:
    sub.add_argument(
        "--parse-special",
        action="store_true",
        help="special tokens that a message spells, such as <|im_end|>, become those "
        "tokens (default: they are text)",
    )


def exact_option(sub: Parser) -> None:
    sub.add_argument(
        "--exact",
        action="store_true",
        help="multiply quantized weights in float32 on a CPU, instead of their codes "
        "with activations of 8 bits; --policy always does",
    )


@refusing
def parse_adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and Path(folder).is_dir()):
        raise JaxLlamaError(f"{text}: expected NAME=DIR, a folder that is there")
    return name, folder


def adapter_options(sub: Parser, text: str = "") -> None:
    add_list(sub, "--adapter", parse_adapter, "NAME=DIR", f"a LoRA adapter as PEFT writes it{text}")
    sub.add_argument(
        "--merge", action="store_true", help="add the adapter to the weights while loading"
    )
    sub.set_defaults(many_adapters=bool(text))


def only_adapter(lm: LanguageModel) -> str | None:
    """Return the adapter that is not merged, if there is one."""
    return next(iter(lm.adapters), None)


def adapters(args: argparse.Namespace) -> Options:
    """Return --adapter and --merge, as ``loading.load`` takes them."""
    found = getattr(args, "adapter", [])
    if not found:
        if getattr(args, "merge", False):
            raise JaxLlamaError("--merge needs --adapter: what is put into the weights")
        return {}
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise JaxLlamaError(f"--adapter: a name is given twice: {', '.join(names)}")
    if len(found) > 1 and (args.merge or not args.many_adapters):
        raise JaxLlamaError(f"--adapter: one here, and {len(found)} are given: {', '.join(names)}")
    return {"adapters": dict(found), "merge": args.merge}


def load(args: argparse.Namespace) -> LanguageModel:
    import dataclasses

    from jaxllama.loading import load
    from jaxllama.model.cache import check_has_keys

    placed, sparsity = policy(args), getattr(args, "attn_sparsity", None)
    added = adapters(args)
    join(args)
    lm = load(
        args.model,
        args.dtype,
        args.quantize,
        policy=placed,
        mesh=mesh(args),
        exact=args.exact,
        progress=True,
        **source(args),
        **added,
    )
    asked = {"--kv-dtype": getattr(args, "kv_dtype", None), "--attn-sparsity": sparsity}
    check_has_keys(lm.config, **asked)
    if lm.tokenizer is not None:
        lm.tokenizer.parse_special = getattr(args, "parse_special", False)
    if sparsity is not None:
        lm = dataclasses.replace(lm, config=lm.config.replace(attn_sparsity=sparsity))
    gc.freeze()  # keep the objects of the start out of the search for garbage
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    return lm


# A draft


def draft_options(sub: Parser) -> None:
    group = sub.add_argument_group("draft", "The same tokens, several a pass.")
    group.add_argument(
        "--draft",
        type=filled,
        metavar="NAME",
        help="source of drafts: ngram (the text itself), mtp (the head of Qwen3.5, Qwen3.6 "
        "and Qwen3-Next checkpoints), the folder of an EAGLE-3 head, a smaller model with the "
        "same tokenizer, or MODEL:layers=N, the first layers of a model; it is loaded with the "
        "options of --model",
    )
    group.add_argument(
        "--draft-tokens",
        type=Number(least=0, most=15),
        metavar="K",
        help="tokens proposed at once, up to 15 (default 0: each row adapts the number)",
    )


def draft(args: argparse.Namespace, lm: LanguageModel) -> Options:
    """Return --draft and --draft-tokens, as ``LanguageModel.generate`` takes them."""
    if args.draft is None:
        if args.draft_tokens is not None:
            raise JaxLlamaError("--draft-tokens needs --draft: who proposes them")
        return {}
    return {"draft": proposer(args, lm), "draft_tokens": args.draft_tokens or 0}


def proposer(args: argparse.Namespace, lm: LanguageModel) -> str | LanguageModel | Drafter:
    """Return the source of drafts that --draft names."""
    if args.draft in ("ngram", "mtp"):
        return args.draft
    from jaxllama.loading import first_layers, is_drafter, load, load_drafter

    if is_drafter(args.draft):
        return load_drafter(args.draft, lm.dtype, args.quantize)
    name, layers = first_layers(args.draft)
    if name == args.model:  # do not load the same model twice
        return lm if layers is None else lm.first_layers(layers)
    return load(
        args.draft,
        args.dtype,
        args.quantize,
        mesh=lm.mesh,
        exact=args.exact,
        random=args.random,
        progress=True,
    )


# Devices and hosts


@refusing
def parse_mesh(text: str) -> str:
    """Check a mesh's form; the number of devices is checked after all hosts have joined."""
    from jaxllama.parallel.mesh import mesh_sizes

    mesh_sizes(text)
    return text


@refusing
def parse_hosts(text: str) -> str:
    from jaxllama.parallel.hosts import read_hosts

    read_hosts(text)
    return text


def mesh_option(sub: Parser) -> None:
    sub.add_argument(
        "--mesh",
        type=parse_mesh,
        metavar="AXES",
        help="several devices: data=N,expert=N,model=N (1 where left out)",
    )


def hosts_options(sub: Parser) -> None:
    mesh_option(sub)
    sub.add_argument(
        "--hosts",
        type=parse_hosts,
        metavar="ADDRESS:PORT,COUNT,INDEX",
        help="one process on each of several hosts: where the first listens, how "
        "many there are, which this is; needs --mesh",
    )


def mesh(args: argparse.Namespace) -> Mesh | None:
    """Return the mesh of --mesh, or None. All its devices must exist."""
    if args.mesh is None:
        return None
    from jaxllama.parallel.mesh import make_mesh, make_stages

    try:
        return make_stages(args.mesh) or make_mesh(args.mesh)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"--{error}") from None


def join(args: argparse.Namespace) -> None:
    """Join the processes of the other hosts; only the first one prints."""
    if getattr(args, "hosts", None) is None:
        return
    if args.mesh is None:
        raise JaxLlamaError("--hosts needs --mesh: how the devices of all hosts share the work")
    from jaxllama.parallel import hosts as parallel_hosts

    if parallel_hosts.join(args.hosts) > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


# Offloading


@refusing
def parse_policy(text: str) -> Policy:
    from jaxllama.offload.policy import Policy

    return Policy.parse(text)


def policy_option(sub: Parser) -> None:
    sub.add_argument(
        "--policy",
        type=parse_policy,
        metavar="TEXT",
        help="where weights, cache and activations live: six percentages, device and "
        "host of each, then NAME=VALUE, as in '0 100 100 0 100 0 "
        "gpu_batch_size=8'",
    )


def policy(args: argparse.Namespace) -> Policy | None:
    """Return --policy, with the settings of other options."""
    chosen = getattr(args, "policy", None)
    if chosen is None:
        return None
    if getattr(args, "mesh", None) is not None:
        raise JaxLlamaError("--policy and --mesh exclude each other: one device offloads")
    from jaxllama.executors.offloaded.executor import kv_dtype_of

    pin_all()
    chosen = also(chosen, args)
    kv_dtype_of(chosen, kv_dtype(args), "float32")  # it refuses a pair that does not fit
    return chosen


def pin_all() -> None:
    """Let jax pin as much host memory as there is; its own limit is 64 GB.

    Call this before jax starts its devices.
    """
    from jaxllama.offload.store import available_memory

    gigabytes = (available_memory() or 0) >> 30
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, gigabytes)))


def also(policy: Policy, args: argparse.Namespace) -> Policy:
    """Return ``policy`` with the settings of the cache's options."""
    if not hasattr(args, "chunk"):  # a command without a cache
        return policy
    return policy.also(attn_sparsity=args.attn_sparsity, prefill_batch_size=args.chunk)


# The cache


def cache_options(sub: Parser, chunk: str = "--chunk") -> None:
    """Add the options of the cache. chunk: the option's name; ``Engine`` calls it prefill_chunk."""
    group = sub.add_argument_group("cache")
    small = "" if chunk == "--chunk" else "; int8 on GPUs of up to 16 GB, int4 on those of up to 8"
    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, help=f"dtype of the cache (default --dtype{small})"
    )
    group.add_argument(
        "--attn-sparsity",
        type=SHARE,
        metavar="SHARE",
        help="share of the attention weights that decoding keeps, in (0, 1]",
    )
    group.add_argument(
        chunk,
        dest="chunk",
        type=COUNT,
        metavar="N",
        help="tokens of a prompt that are prefilled at once",
    )


def kv_dtype(args: argparse.Namespace) -> str | None:
    return "float8_e4m3fn" if args.kv_dtype == "fp8" else args.kv_dtype


def chunk(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.chunk is None else {"chunk": args.chunk}


# Sampling


def parse_logit_bias(text: str) -> tuple[int, float]:
    return pair(text, Number(least=0), Number(float, most=sys.float_info.max), "ID=NUMBER")


def sampling_options(sub: Parser, max_new_tokens: int, default: str) -> None:
    """Add the options of sampling. default: a sentence about options that are not given."""
    group = sub.add_argument_group("sampling", default)
    add_value(
        group, "--max-new-tokens", COUNT, "N", "most tokens of an answer", default=max_new_tokens
    )
    add_value(group, "--temperature", Number(float, 0, 100), "T", "0 is greedy")
    add_value(
        group, "--top-k", Number(least=0), "K", "draw from the K most likely tokens; 0 is off"
    )
    add_value(group, "--top-p", SHARE, "P", "draw from the smallest set of this probability")
    add_value(
        group, "--min-p", Number(float, 0, 1), "P", "drop tokens below this share of the best one"
    )
    group.add_argument(
        "--repetition-penalty",
        type=Number(float, 0, 100, above=True),
        metavar="X",
        help="for tokens of prompt and output; 1 is off",
    )
    group.add_argument(
        "--frequency-penalty",
        type=Number(float, -2, 2),
        metavar="X",
        help="for every occurrence in the output",
    )
    add_value(group, "--presence-penalty", Number(float, -2, 2), "X", "for tokens of the output")
    add_list(
        group,
        "--logit-bias",
        parse_logit_bias,
        "ID=X",
        "add X to a token's logit; may be given again",
    )
    add_value(group, "--seed", SEED, "N", "seed of the sampling (default 0)")


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def sampling(args: argparse.Namespace, defaults: Sampling | None = None) -> Sampling:
    """Return the sampling of the options; missing ones come from ``defaults``, or are greedy."""
    import dataclasses

    from jaxllama.decoding.sampling import Sampling

    named = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    chosen = dataclasses.replace(
        defaults or Sampling(), **named, logit_bias=dict(args.logit_bias), seed=args.seed or 0
    )
    if chosen.temperature == 0:
        for flag, used in (
            ("--top-k", named.get("top_k", 0) != 0),
            ("--top-p", named.get("top_p", 1) != 1),
            ("--min-p", named.get("min_p", 0) != 0),
            ("--seed", args.seed is not None),
        ):
            if used:
                raise JaxLlamaError(
                    f"{flag} needs --temperature above 0: 0 is greedy and draws nothing"
                )
    return chosen


# Input and output


def read_text(path: Path) -> str:
    """Return a UTF-8 file's text; "-" is the standard input. Raises JaxLlamaError naming it."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None


def json_option(sub: Parser) -> None:
    sub.add_argument("--json", action="store_true", help="print results as JSON")


def show(args: argparse.Namespace, report: JsonObject, table: Callable[[JsonObject], str]) -> None:
    """Print the report, as JSON or as a table."""
    print_json(report) if args.json else print(table(report))


def lines(report: JsonObject) -> str:
    """Return a table with one line for each figure."""

    def text(value: object) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    return "\n".join(
        f"{key:18} {text(value)}" for key, value in report.items() if value is not None
    )


def print_json(value: object) -> None:
    """Print a value as JSON (``files.json_text``)."""
    print(json_text(value))

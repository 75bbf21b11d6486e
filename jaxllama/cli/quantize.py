"""``jaxllama quantize``: see ``jaxllama.quantization.checkpoint``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import (
    Number,
    OutFile,
    Parser,
    add_list,
    add_value,
    new_folder,
    refusing,
    text_input,
)

METHODS = ("rtn", "awq", "gptq", "smoothquant")
FORMATS = ("native", "awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "gguf")

HELP = "Make a quantized checkpoint, calibrated on text."


@refusing
def scheme(text: str) -> str:
    from jaxllama.quantization.scheme import parse

    parse(text)
    return text


def options(sub: Parser) -> None:
    sub.add_argument(
        "--out",
        type=new_folder,
        required=True,
        metavar="DIR",
        help="folder, or .gguf file, to write; an interrupted run continues",
    )
    sub.add_argument(
        "--scheme",
        type=scheme,
        default="w4a16",
        metavar="SCHEME",
        help="as --quantize of the other commands, or fp8-static (default %(default)s)",
    )
    sub.add_argument(
        "--method",
        choices=METHODS,
        default="rtn",
        help="how codes are chosen; rtn rounds to nearest (default %(default)s)",
    )
    sub.add_argument(
        "--format",
        choices=FORMATS,
        help="native holds every scheme, and only jaxllama reads it; transformers, "
        "llama.cpp (gguf) and others read the rest (default native, or gguf where --out ends so)",
    )
    add_value(sub, "--calibration", text_input, "FILE", "UTF-8 text (default: a packaged one)")
    sub.add_argument(
        "--samples",
        type=Number(int, 0),
        metavar="N",
        help="windows of the text to use; 0, the default of rtn without --report or "
        "--calibration, measures no errors (default 32)",
    )
    add_value(sub, "--window", Number(least=2), "N", "tokens of a window", default=512)
    sub.add_argument(
        "--tune",
        type=Number(int, 0),
        default=0,
        metavar="N",
        help="steps of end-to-end tuning of scales and norms afterwards, one window "
        "each (default none)",
    )
    add_list(
        sub,
        "--report",
        OutFile((".json", ".png")),
        "FILE",
        "write every weight's errors to .json or .png; may be given again",
    )
    common.json_option(sub)
    common.dtype_option(common.source_options(sub))


def run(args: argparse.Namespace) -> None:
    from jaxllama.checkpoints.saving import format_of
    from jaxllama.loading import default_dtype, load, read_config
    from jaxllama.quantization import checkpoint

    text = None if args.calibration is None else common.read_text(args.calibration)
    request = checkpoint.QuantizeRequest(
        args.out,
        args.scheme,
        args.method,
        format_of(args.out, args.format) or "native",
        text,
        args.samples,
        args.window,
        tuple(args.report),
        args.tune,
    )
    cfg = read_config(args.model, **common.source(args))
    checkpoint.check(cfg, request, args.dtype or default_dtype())
    lm = load(args.model, args.dtype, exact=True, progress=True, **common.source(args))
    report = checkpoint.quantize_checkpoint(lm, request, progress=True)
    common.show(args, {"model": args.model, **report}, checkpoint.table)

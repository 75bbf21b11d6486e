"""``jaxllama convert``: write any model to a directory in a format (``LanguageModel.save``)."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, new_folder

FORMATS = ("floats", "native", "awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4")

HELP = "Write a model as a Hugging Face directory, with its tokenizer."


def options(sub: Parser) -> None:
    sub.add_argument("--out", type=new_folder, required=True, metavar="DIR", help="folder to write")
    sub.add_argument(
        "--format",
        choices=FORMATS,
        default="floats",
        help="floats: quantized weights are dequantized; native: bit for bit, and "
        "only jaxllama reads it (default %(default)s)",
    )
    common.json_option(sub)
    common.dtype_option(common.source_options(sub))


def run(args: argparse.Namespace) -> None:
    from jaxllama.loading import load

    lm = load(args.model, args.dtype, exact=True, progress=True, **common.source(args))
    files = sorted(lm.save(args.out, format=args.format, progress=True).iterdir())
    report = {
        "model": args.model,
        "out": str(args.out),
        "files": ", ".join(path.name for path in files),
        "bytes": sum(path.stat().st_size for path in files),
    }
    common.show(args, report, common.lines)

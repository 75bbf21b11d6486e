"""``jaxllama convert``: write any model in a format (``LanguageModel.save``)."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, new_folder

FORMATS = (
    *("floats", "native", "awq", "gptq", "compressed-tensors", "fp8", "modelopt", "mxfp4"),
    "gguf",
)
TYPES = (
    *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"),
    *("q4_k", "q5_k", "q6_k"),
)

HELP = "Write a model as a Hugging Face directory or a GGUF file, with its tokenizer."


def options(sub: Parser) -> None:
    sub.add_argument(
        "--out",
        type=new_folder,
        required=True,
        metavar="DIR",
        help="folder to write, or with the format gguf a file",
    )
    sub.add_argument(
        "--format",
        choices=FORMATS,
        help="floats: quantized weights are dequantized; native: bit for bit, and "
        "only jaxllama reads it; gguf: one file, quantized weights keep their codes "
        "(default floats, or gguf where --out ends so)",
    )
    sub.add_argument(
        "--type",
        choices=TYPES,
        help="with --format gguf: round all matrices to this type (default: codes stay, "
        "and floats have --dtype)",
    )
    common.json_option(sub)
    common.dtype_option(common.source_options(sub))


def run(args: argparse.Namespace) -> None:
    from jaxllama.checkpoints.saving import check_format, format_of
    from jaxllama.loading import load

    form = format_of(args.out, args.format) or "floats"
    check_format(form, args.type)
    keeps_codes = form == "gguf" and args.type is None
    lm = load(args.model, args.dtype, exact=not keeps_codes, progress=True, **common.source(args))
    out = lm.save(args.out, format=form, type=args.type, progress=True)
    files = [out] if out.is_file() else sorted(out.iterdir())
    report = {
        "model": args.model,
        "out": str(args.out),
        "files": ", ".join(path.name for path in files),
        "bytes": sum(path.stat().st_size for path in files),
    }
    common.show(args, report, common.lines)

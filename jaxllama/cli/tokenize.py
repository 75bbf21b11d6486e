"""``jaxllama tokenize``: make a token file of texts, for ``train``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, add_value, filled, new_folder, text_file

HELP = "Make a token file of texts, for train."


def options(sub: Parser) -> None:
    sub.add_argument(
        "texts", nargs="+", type=text_file, metavar="TXT", help="UTF-8 text, a document"
    )
    sub.add_argument("--out", type=new_folder, required=True, metavar="DIR", help="folder to write")
    add_value(
        sub, "--tokenizer", filled, "NAME", "a model's tokenizer, or bytes", default=common.MODEL
    )
    common.json_option(sub)


def run(args: argparse.Namespace) -> None:
    """Write the token file.

    --tokenizer is "bytes" or a model's name; only the tokenizer of that model is read.
    """
    from jaxllama.training import data

    file = data.tokenize(args.texts, args.out, data.load_tokenizer(args.tokenizer), progress=True)
    report = {"directory": str(file.directory), "tokens": len(file), "sha256": file.sha256}
    common.show(args, report, common.lines)

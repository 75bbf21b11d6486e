"""``jaxllama eval``: see ``jaxllama.evaluation.perplexity``."""

from __future__ import annotations

import argparse
import math
import sys

from jaxllama.cli import common
from jaxllama.cli.domains import (
    COUNT,
    Number,
    OutFile,
    Parser,
    add_list,
    add_value,
    filled,
    state_folder,
    text_input,
    texts_folder,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject, Options

HELP = "Perplexity of a text, and the distance to a reference."


def options(sub: Parser) -> None:
    source = sub.add_mutually_exclusive_group(required=True)
    add_value(source, "--text", text_input, "FILE", "UTF-8 text")
    add_value(
        source, "--texts", texts_folder, "DIR", "folder of .txt files; prints a line for each"
    )
    source.add_argument(
        "--replay",
        type=state_folder,
        metavar="DIR",
        help="state folder of an evaluation by lm-eval or inspect-ai: its answers, made again",
    )
    add_list(sub, "--id", filled, "ID", "with --replay: only this answer; may be given again")
    add_list(
        sub,
        "--report",
        OutFile((".json", ".png")),
        "FILE",
        "with --texts and --reference: where the damage is, .json or .png; may be given again",
    )
    sub.add_argument(
        "--window",
        type=Number(least=2),
        metavar="N",
        help="tokens scored together (default 512, or the context)",
    )
    add_value(sub, "--stride", COUNT, "N", "tokens from window to window (default window - 1)")
    sub.add_argument(
        "--reference",
        type=filled,
        metavar="NAME",
        help="model to compare with, in exact products: adds kl and top1",
    )
    sub.add_argument(
        "--kv-dtype", choices=common.KV_DTYPES, help="score through a cache of this dtype"
    )
    common.hosts_options(sub)
    common.json_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.policy_option(sub)


def run(args: argparse.Namespace) -> None:
    if None not in (args.window, args.stride) and args.stride >= args.window:
        raise JaxLlamaError(f"--stride = {args.stride}: must be below --window, {args.window}")
    if args.report and (args.texts is None or args.reference is None):
        raise JaxLlamaError("--report needs --texts and --reference")
    if args.id and args.replay is None:
        raise JaxLlamaError("--id needs --replay")
    if args.replay is not None:
        return _replay(args)
    from jaxllama.evaluation import damage
    from jaxllama.evaluation.perplexity import BATCH, perplexity, window_and_stride
    from jaxllama.evaluation.provenance import provenance
    from jaxllama.files import text_digest

    files = [args.text] if args.texts is None else sorted(args.texts.glob("*.txt"))
    texts = {path.stem: common.read_text(path) for path in files}
    lm, reference = common.load(args), None
    if args.reference is not None:
        from jaxllama.loading import load

        mesh = common.mesh(args)
        reference = load(args.reference, args.dtype, mesh=mesh, exact=True, progress=True)
    window, stride = window_and_stride(lm, args.window, args.stride, reference)
    origin = provenance(
        lm,
        common.kv_dtype(args),
        window=window,
        stride=stride,
        reference=None if reference is None else provenance(reference)["digest"],
        texts=[text_digest(text) for text in texts.values()],
    )
    how: Options = {
        "reference": reference,
        "kv_dtype": common.kv_dtype(args),
        "progress": True,
    }
    if args.texts is not None:
        scores = damage.damage(lm, texts, window, stride, **how)
        report = {"model": args.model, "provenance": origin, **scores}
        for path in args.report:
            damage.write(report, path)
        return common.show(args, report, lambda rows: f"{_said(origin)}\n{damage.table(rows)}")
    (text,) = texts.values()
    report = perplexity(lm, text, window, stride, **how)
    if args.json:
        return common.print_json({"model": args.model, "provenance": origin, **report})
    print(_said(origin))
    print(f"perplexity {report['perplexity']:.4f} over {counted(report['tokens'])}")
    if math.isnan(report["perplexity_se"]):
        print(
            f"note: too few tokens to estimate the error of this number; at least {2 * BATCH} are "
            "needed",
            file=sys.stderr,
        )
    if reference is not None:
        print(
            f"against {args.reference}: perplexity {100 * report['rise']:+.1f}%, "
            f"KL {report['kl']:.4f} nats, "
            f"top-1 {100 * report['top1']:.1f}%"
        )


def _replay(args: argparse.Namespace) -> None:
    from jaxllama.harnesses.replay import replay

    for name in ("window", "stride", "reference", "kv_dtype"):
        if getattr(args, name) is not None:
            raise JaxLlamaError(f"--{name.replace('_', '-')}: has no use beside --replay")
    report = replay(common.load(args), args.replay, args.id)
    if args.json:
        return common.print_json(report.to_json())
    origin = "the same" if report.digest == report.recorded else f"recorded {report.recorded}"
    print(f"digest {report.digest} ({origin})")
    print(f"{report.same} answers are the same, {len(report.different)} differ")
    for id in report.different:
        print(id)


def _said(origin: JsonObject) -> str:
    bits = ", ".join(f"{dtype} {size / 1e6:.1f} MB" for dtype, size in origin["bits"].items())
    weights = f"weights {origin['weights']}, {bits}" if origin["weights"] else "without the weights"
    return f"digest {origin['digest']} ({weights}; {origin['device']})"


def counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"

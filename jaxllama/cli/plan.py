"""``jaxllama plan``: see ``jaxllama.evaluation.plan``."""

from __future__ import annotations

import argparse

from jaxllama.cli import common
from jaxllama.cli.domains import COUNT, Number, OutFile, Parser, add_value, text_file
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import working

HELP = "Solve for the offloading policy, and measure what it predicts."


def options(sub: Parser) -> None:
    add_value(sub, "--batch", COUNT, "N", "rows", default=8)
    add_value(sub, "--prompt-tokens", COUNT, "N", "a row", default=512)
    add_value(sub, "--new-tokens", Number(least=3), "N", "a row", default=32)
    for tier in ("device", "host", "disk"):
        add_value(
            sub,
            f"--{tier}-gb",
            Number(float, 0, 1e9),
            "X",
            f"gigabytes of {tier} memory to use (default: all)",
        )
    add_value(sub, "--timeline", OutFile((".png", ".svg", ".pdf")), "PNG", "a picture of one step")
    use = sub.add_mutually_exclusive_group()
    use.add_argument(
        "--calibrate",
        type=text_file,
        metavar="TEXT",
        help="a text that measures how often each expert of a mixture is used",
    )
    use.add_argument(
        "--expert-use",
        type=text_file,
        metavar="JSON",
        help="a table of that use, from an earlier run or your own",
    )
    sub.add_argument(
        "--recalibrate",
        action="store_true",
        help="measure this machine again instead of reading the kept measurement",
    )
    common.json_option(sub)
    common.model_options(sub)
    common.policy_option(sub)
    common.cache_options(sub)


def run(args: argparse.Namespace) -> None:
    from jaxllama.evaluation import plan
    from jaxllama.offload.policy import Policy
    from jaxllama.planner.cost import MemoryLimits, Task

    for tier in ("device", "host", "disk"):
        if args.policy is not None and getattr(args, f"{tier}_gb") is not None:
            raise JaxLlamaError(f"--{tier}-gb bounds what is solved for, and --policy is given")
    common.pin_all()
    policy = common.policy(args)
    if policy is not None and (args.calibrate or args.expert_use):
        raise JaxLlamaError(
            "--calibrate and --expert-use are for the solver, and --policy is given"
        )
    base = common.also(Policy(), args) if policy is None else policy
    sizes = (args.device_gb, args.host_gb, args.disk_gb)
    asked = plan.PlanRequest(
        args.model,
        Task(args.batch, args.prompt_tokens, args.new_tokens),
        policy,
        base,
        MemoryLimits(*(None if size is None else int(size * 1e9) for size in sizes)),
        dtype=args.dtype,
        scheme=args.quantize,
        kv_dtype=common.kv_dtype(args),
        timeline=args.timeline,
        recalibrate=args.recalibrate,
        calibrate_on=args.calibrate,
        expert_use=args.expert_use,
        **common.source(args),
    )
    with working("planning") as bar:

        def progress(text: str) -> None:
            bar.say(text)
            bar.note(text)

        report = plan.run(asked, progress)
    common.show(args, report, plan.table)

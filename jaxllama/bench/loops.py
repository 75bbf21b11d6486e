"""Does a chat model repeat itself?  By hand:

    python -m jaxllama.bench.loops [--model NAME] [--temperature T] [--top-p P] ...

answers the 40 questions of configs/texts/prompts.txt, each as a conversation of its own, with the
model's own sampling but for what is given, and counts the answers in which no sequence of four
tokens occurs more than five times.  Seeds are fixed (``--seed``, one more for each question), so a
table can be made again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxllama.cli import common
from jaxllama.cli.domains import Parser
from jaxllama.config import configs_dir
from jaxllama.language_model import LanguageModel
from jaxllama.sampling import Sampling

WIDTH, MOST = 4, 5


def most_repeated(tokens: Sequence[int], width: int = WIDTH) -> int:
    """How often the most frequent sequence of ``width`` tokens occurs."""
    starts = range(len(tokens) - width + 1)
    return max(Counter(tuple(tokens[i : i + width]) for i in starts).values(), default=0)


def run(
    lm: LanguageModel, sampling: Sampling, prompts: Sequence[str], max_new_tokens: int = 512
) -> dict[str, Any]:
    """Answers to all prompts as one batch, and how they repeat themselves."""
    rows = [lm.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    first = sampling.seed or 0
    each = [dataclasses.replace(sampling, seed=first + i) for i in range(len(rows))]
    outs = lm.generate(rows, max_new_tokens, each)
    counts = [most_repeated(out.tokens) for out in outs]
    fine = [count <= MOST for count in counts]
    return {
        "model": lm.config.name,
        "sampling": str(sampling),
        "answers": len(outs),
        "without_loops": sum(fine) / len(fine),
        "ended_by_themselves": sum(out.finish_reason == "stop" for out in outs) / len(outs),
        "mean_tokens": sum(len(out.tokens) for out in outs) / len(outs),
        "most_repeated": counts,
        "texts": [out.text for out in outs],
    }


def read_prompts() -> list[str]:
    text = (configs_dir() / "texts" / "prompts.txt").read_text(encoding="utf-8")
    return text.splitlines()


def main() -> None:
    parser = Parser(prog="python -m jaxllama.bench.loops", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    common.json_option(parser)
    common.model_options(parser)
    common.exact_option(parser)
    common.sampling_options(parser, 512, "What is not given is the model's own, else greedy.")
    args = parser.parse_args()
    args.policy = args.mesh = None
    lm = common.load(args)
    report = run(lm, common.sampling(args, lm.sampling), read_prompts(), args.max_new_tokens)
    if not args.json:
        del report["texts"]
    common.show(args, report, common.lines)


if __name__ == "__main__":
    main()

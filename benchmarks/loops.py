"""Does a chat model repeat itself?  By hand:

    python -m benchmarks.loops [--model NAME] [--temperature T] [--top-p P] ...

answers the 40 questions of configs/texts/prompts.txt, each as a conversation of its own, with the
model's own sampling but for what is given, and counts the answers in which no sequence of four
tokens occurs more than five times.  Seeds are fixed (``--seed``, one more for each question), so a
table can be made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxllama.config import configs_dir
from jaxllama.decoding.sampling import Sampling
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load

WIDTH, MOST = 4, 5
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


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
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", action="store_true", help="print the answers, too")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    args = parser.parse_args()
    lm = load(args.model, exact=args.exact, progress=True)
    named = {name: value for name in NUMBERS if (value := getattr(args, name)) is not None}
    sampling = dataclasses.replace(lm.sampling or Sampling(), **named, seed=args.seed)
    report = run(lm, sampling, read_prompts(), args.max_new_tokens)
    texts = report.pop("texts")
    print(json.dumps(report))
    if args.texts:
        print(*texts, sep="\n\n---\n\n")


if __name__ == "__main__":
    main()

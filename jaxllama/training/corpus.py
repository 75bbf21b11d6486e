"""Text for training without downloading a data set.

    python -m jaxllama.training.corpus --out data [--generate 2000] [--documents 2000]

Writes into DIR:

    bible.txt     the King James Bible, 4.1 MB in the public domain, a verse a line, as Debian's
                  packages bible-kjv and bible-kjv-text hold it (apt-get install bible-kjv)
    written.txt   with --generate N: N conversations that a chat model writes itself, each a request
                  put together from the lists below and the answer it samples at temperature 1, in
                  its own template
    documents.txt with --documents N: N texts that the model begins and ends itself, sampled from
                  its start-of-document token alone; they resemble its training data

For a student of that model these texts are the nearest to what it must learn. A text depends on
--seed and its number, not on --batch. Existing files stay. Left out: filtering, deduplication.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllama.errors import JaxLlamaError
from jaxllama.files import whole_file

if TYPE_CHECKING:
    from jaxllama.language_model import LanguageModel

WHOLE_BIBLE = "ge1:1-rev22:21"
DOCUMENT = "<|endoftext|>"
STRIDE = 367  # shares no factor with the number of requests, so that all of them are visited
FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What is {}?",
    "Why does {} matter?",
    "Give five facts about {}.",
    "Write a letter to a friend about {}.",
    "Describe {} in one paragraph.",
    "What are the advantages and disadvantages of {}?",
    "Write a dialogue between two people who talk about {}.",
    "How has {} changed over time?",
    "Write a poem about {}.",
    "What would the world be like without {}?",
    "Write a lesson plan about {}.",
    "List common questions about {}, with answers.",
    "Summarize what is known about {}.",
    "Compare {} with something similar.",
)
SUBJECTS = (
    "the sea",
    "bread",
    "the moon",
    "railways",
    "glass",
    "honey bees",
    "the heart",
    "money",
    "clocks",
    "the alphabet",
    "rivers",
    "volcanoes",
    "gardens",
    "music",
    "chess",
    "paper",
    "electricity",
    "winter",
    "friendship",
    "bridges",
    "maps",
    "salt",
    "telescopes",
    "wool",
    "democracy",
    "earthquakes",
    "libraries",
    "dogs",
    "forests",
    "photography",
    "numbers",
    "tea",
    "the brain",
    "ships",
    "dreams",
    "farming",
    "iron",
    "languages",
    "vaccines",
    "cities",
    "rain",
    "computers",
    "painting",
    "birds",
    "gravity",
    "theatre",
    "sleep",
    "islands",
    "markets",
    "stars",
    "memory",
    "bicycles",
    "rice",
    "deserts",
    "schools",
    "magnets",
    "wind",
    "museums",
    "cheese",
    "the internet",
    "light",
    "patience",
    "pottery",
    "the ocean floor",
    "evolution",
    "football",
)


def find_bible() -> None:
    """Raise JaxLlamaError if the command of ``bible`` is missing."""
    if shutil.which("bible") is None:
        raise JaxLlamaError("the command `bible` is missing: apt-get install bible-kjv")


def bible() -> str:
    """Return the Bible, one verse a line without its number.

    Raises JaxLlamaError if the package is missing.
    """
    find_bible()
    out = subprocess.run(
        ["bible", "-f", WHOLE_BIBLE], check=True, capture_output=True, text=True, encoding="latin-1"
    ).stdout
    return "".join(line.partition(" ")[2] + "\n" for line in out.splitlines() if line.strip())


def conversations(
    lm: LanguageModel, count: int, *, batch: int, max_new_tokens: int, seed: int
) -> Iterator[str]:
    """Yield ``count`` conversations in the model's template, with special tokens as text."""
    from jaxllama.decoding.sampling import Sampling

    assert lm.tokenizer is not None
    requests = [form.format(subject) for form, subject in itertools.product(FORMS, SUBJECTS)]
    for first in range(0, count, batch):
        numbers = range(first, min(first + batch, count))
        asked = [requests[number * STRIDE % len(requests)] for number in numbers]
        messages = [[{"role": "user", "content": request}] for request in asked]
        prompts = [lm.tokenizer.apply_chat_template(message) for message in messages]
        rows = [lm.tokenizer.encode(prompt, add_special=False) for prompt in prompts]
        seeds = [seed + number for number in numbers]
        outs = lm.generate(rows, max_new_tokens, Sampling(temperature=1.0, top_p=0.95), seeds)
        for message, out in zip(messages, outs, strict=True):
            answer = {"role": "assistant", "content": out.text}
            yield lm.tokenizer.apply_chat_template([*message, answer], add_generation_prompt=False)


def documents(
    lm: LanguageModel, count: int, *, batch: int, max_new_tokens: int, seed: int
) -> Iterator[str]:
    """Yield ``count`` texts, each after the start-of-document token and with a line end.

    Raises JaxLlamaError for a model whose tokenizer has no such token.
    """
    from jaxllama.decoding.sampling import Sampling

    assert lm.tokenizer is not None
    start = lm.tokenizer.encode(DOCUMENT, add_special=False)
    if len(start) != 1:
        raise JaxLlamaError(f"--documents: the model's tokenizer has no token {DOCUMENT}")
    for first in range(0, count, batch):
        numbers = range(first, min(first + batch, count))
        seeds = [seed + number for number in numbers]
        rows = [list(start) for _ in numbers]
        sampling = Sampling(temperature=1.0, top_p=0.95)
        for out in lm.generate(rows, max_new_tokens, sampling, seeds):
            yield f"{DOCUMENT}{out.text}\n"


def main() -> None:
    words = argparse.ArgumentParser(description="Make text to train on.")
    words.add_argument("--out", type=Path, required=True, metavar="DIR")
    words.add_argument("--generate", type=int, default=0, metavar="N", help="conversations")
    words.add_argument("--documents", type=int, default=0, metavar="N", help="texts of any kind")
    words.add_argument("--model", default="smollm2-135m", metavar="NAME", help="who writes them")
    words.add_argument("--batch", type=int, default=16, metavar="N", help="written at once")
    words.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    words.add_argument("--seed", type=int, default=0, metavar="N")
    args = words.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if not (args.out / "bible.txt").exists():
            _write(args.out / "bible.txt", iter([bible()]))
        wanted = {
            "written.txt": (conversations, args.generate),
            "documents.txt": (documents, args.documents),
        }
        wanted = {
            name: job for name, job in wanted.items() if job[1] and not (args.out / name).exists()
        }
        if wanted:
            from jaxllama.loading import load

            lm = load(args.model)
            options = {"batch": args.batch, "max_new_tokens": args.max_new_tokens}
            for name, (write, count) in wanted.items():
                _write(args.out / name, write(lm, count, seed=args.seed, **options))
    except JaxLlamaError as error:
        sys.exit(f"error: {error}")


def _write(path: Path, texts: Iterator[str]) -> None:
    with whole_file(path) as file:
        for text in texts:
            file.write(text.encode())
            file.flush()
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

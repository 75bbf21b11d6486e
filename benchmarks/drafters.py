"""A head that drafts for SmolLM2-135M-Instruct: its prompts, and its gain.

    python benchmarks/drafters.py prompts --out prompts.jsonl
    jaxllama train configs/training/smollm2-draft.toml --out RUN
    python benchmarks/drafters.py measure RUN/model --out report.json

Prompts to learn from are chats put together from lists and docstrings, code of installed packages,
and texts of ``configs/texts``.  Those to measure are of other requests and subjects (chats), of
``configs/texts/unseen/code.txt`` (code) and of a book that no training text has
(``configs/texts/test.txt``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pydoc_data.topics
import random
import re
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from jaxllama.config import configs_dir
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.evaluation.speed.harness import timed
from jaxllama.executors.executor import Call
from jaxllama.model.eagle3 import Drafter
from jaxllama.text.rows import Generation, pad_rows
from jaxllama.training import corpus
from jaxllama.training.data import run_tokenizer
from jaxllama.typing import JsonObject
from pallas_kernels.fixed_sums import block_rows

TEXTS = configs_dir() / "texts"
TEMPERATURES = (0.0, 0.8)
NEW, WIDTH = 128, 256  # tokens of an answer that is measured, and of its prompt at most
ROUNDS = 6  # batches of each kind, of all drafts in turn
SPEEDS = """
1:plain:0 1:head:3 1:ngram:3 8:plain:0 8:head:3 64:plain:0 64:head:2 1:ngram:0 1:head:2 1:head:5
64:ngram:2 8:ngram:3 64:head:3
""".split()
MODEL, LONGEST = "smollm2-135m", 200  # tokens of a prompt to learn from
ASKS = (
    "Write a Python function `{name}` that does this: {about}",
    "{about} How would you do this in Python?",
    "What does this mean? {about}",
    "Explain this sentence of a manual to a beginner: {about}",
    "Rewrite this sentence in other words: {about}",
    "Explain what this code does:\n\n{code}",
    "Add comments to this code:\n\n{code}",
    "Write a test for this code:\n\n{code}",
    "Summarize this text in one sentence:\n\n{text}",
    "Continue this story:\n\n{text}",
    "Who is this text about?\n\n{text}",
    "List the key words of this text:\n\n{text}",
    "Correct the mistakes in this text:\n\n{text}",
    "What is {a} + {b}?",
    "If a train travels {a} miles in {b} hours, what is its average speed?",
    "I have {a} apples and give away {b}. How many are left? Explain each step.",
    "Translate to Spanish: {text}",
)
ENDS = (
    "",
    "",
    "",
    " Answer in {b} sentences.",
    " Be brief.",
    " Write for experts.",
    " Use a list.",
)
HELD_ASKS = (
    "My daughter asked me about {} at dinner. What should I tell her?",
    "Give me three tips on how to learn {}.",
    "I am planning a presentation about {}. Suggest an outline.",
    "Who invented {}, and when?",
    "What do people get wrong about {}?",
    "Write a short advertisement for a course on {}.",
    "Which tools do I need to start with {}?",
    "Tell me a joke about {}.",
    "How much does it cost to get into {}?",
    "Is {} good for your health?",
)
HELD_SUBJECTS = (
    "sailing",
    "the violin",
    "mushrooms",
    "origami",
    "archery",
    "beekeeping suits",
    "printing presses",
    "calligraphy",
    "baking sourdough",
    "snowboarding",
)


SITE = Path(sysconfig.get_path("purelib"))
HELD = ("starlette", "jinja2")  # whose sources are the code to measure
_DEFINITION = re.compile(r"^ *(?:def|class) (\w+).*?(?=\n\S|\n *(?:def|class|@)|\Z)", re.M | re.S)
_DOCSTRING = re.compile(r'"""\s*(.+?)(?:\n\s*\n|""")', re.S)


def functions(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield (name, first sentences of the docstring or "", source) of installed definitions."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in library.rglob("*.py") if not {SITE.name, "test"} & set(path.parts)]
    for name in ("torch", "transformers", "numpy", "optax", "jax"):
        files += (SITE / name).rglob("*.py")
    files.sort()
    rng.shuffle(files)
    for path in files:
        source = path.read_text(encoding="utf-8", errors="ignore")[:60_000]
        found = [part for part in _DEFINITION.finditer(source) if len(part[0]) > 120]
        for part in rng.sample(found, min(len(found), 8)):
            about = _DOCSTRING.search(part[0])
            yield part[1], " ".join(about[1].split()) if about else "", textwrap.dedent(part[0])


def sentences() -> list[str]:
    """Return texts that begin with a sentence: books, the model's own, manuals."""
    texts = [
        (TEXTS / name).read_text(encoding="utf-8") for name in ("written.txt", "calibration.txt")
    ]
    texts += pydoc_data.topics.topics.values()
    for path in sorted(SITE.glob("*.dist-info/METADATA")):
        if not path.parent.name.lower().startswith(HELD):
            texts.append(path.read_text(encoding="utf-8").partition("\n\n")[2][:20_000])
    found = list[str]()
    for paragraph in re.split(r"\n\s*\n|\n(?=[A-Z])", "\n\n".join(texts)):
        text = " ".join(paragraph.replace("<|endoftext|>", "").split())
        starts = [0, *(part.end() for part in re.finditer(r"[.!?] (?=[A-Z])", text))]
        if "<|" not in text:
            found += [text[at : at + 400] for at in starts if len(text) - at > 100]
    return found


def training_prompts(count: int, seed: int = 0) -> Iterator[str | list[dict[str, str]]]:
    """Yield ``count`` prompts: chats, beginnings of code, and beginnings of texts, in turns."""
    rng = random.Random(seed)
    plain = [form.format(subject) for form in corpus.FORMS for subject in corpus.SUBJECTS]
    sources, texts = list(itertools.islice(functions(rng), count // 3 + 1)), sentences()
    about = [text for _, text, _ in sources if len(text) > 30]
    texts += [text for text in about if len(text) > 100]
    for number in range(count):
        at = number // 3 % len(sources)
        name, _, code = sources[-1 - at if number % 3 == 0 else at]
        text = rng.choice(texts)[: rng.randint(40, 300)].rstrip()
        if number % 3 == 0:
            ask = rng.choice(ASKS) if rng.random() < 0.6 else rng.choice(plain) + rng.choice(ENDS)
            asked = {"name": name, "about": rng.choice(about)[:250], "code": code[:250]}
            numbers = {"a": rng.randint(2, 300), "b": rng.randint(2, 30)}
            yield [{"role": "user", "content": ask.format(text=text, **asked, **numbers)}]
        else:
            yield code[: rng.randint(60, 280)].rstrip() if number % 3 == 1 else text


def held_prompts(each: int) -> dict[str, list[str | list[dict[str, str]]]]:
    """Return ``each`` prompts, at most 100, of the three kinds that no training sees."""
    asks = [form.format(subject) for form in HELD_ASKS for subject in HELD_SUBJECTS]

    def parts(name: str, size: int, begin: str) -> list[str]:
        text = (TEXTS / name).read_text(encoding="utf-8")
        step = (len(text) - 3 * size) // each
        ends = [text.index(begin, number * step) + len(begin) for number in range(each)]
        return [text[end : end + size].lstrip("\n") for end in ends]

    return {
        "chats": [
            [{"role": "user", "content": asks[number * 37 % len(asks)]}] for number in range(each)
        ],
        "code": list(parts("unseen/code.txt", 300, "\n")),
        "text": list(parts("test.txt", 250, ". ")),
    }


def write_prompts(path: Path, count: int) -> None:
    """Write a file for ``[data] prompts``, without prompts of more than ``LONGEST`` tokens."""
    tokenizer = run_tokenizer(None, MODEL)
    with path.open("w", encoding="utf-8") as file:
        for prompt in training_prompts(count):
            text = prompt if isinstance(prompt, str) else prompt[0]["content"]
            if len(tokenizer.encode(text)) <= LONGEST:
                file.write(json.dumps({"prompt": prompt}) + "\n")


def texts_of(lm: jl.LanguageModel, each: int) -> dict[str, list[list[int]]]:
    """Return the tokens of the prompts to measure, of each kind."""
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    return {
        kind: [
            tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
            for prompt in prompts
        ]
        for kind, prompts in held_prompts(each).items()
    }


def accepted(lm: jl.LanguageModel, drafter: Drafter, each: int, count: int) -> JsonObject:
    """Return tokens a pass of the head and of n-grams, ``count`` drafted, and equal answers.

    All prompts are rows of one call, greedy and at temperature 0.8. A deterministic model has calls
    of so many rows that a pass is one block of its products.
    """
    kinds = texts_of(lm, each)
    rows = [row for _ in TEMPERATURES for rows in kinds.values() for row in rows]
    settings = [Sampling(temperature=t) for t in TEMPERATURES for _ in range(3 * each)]
    size = block_rows() // (1 << count.bit_length()) if lm.deterministic else len(rows)

    def answered(**options: Any) -> list[Generation]:
        found = list[Generation]()
        for at in range(0, len(rows), size):
            part, seeds = slice(at, at + size), list(range(len(rows)))[at : at + size]
            found += lm.generate(rows[part], NEW, settings[part], seeds, **options)
        return found

    plain, report = answered(), dict[str, Any]()
    for name, source in (("head", drafter), ("ngram", "ngram")):
        found = answered(draft=source, draft_tokens=count)
        for at, (temperature, kind) in enumerate(itertools.product(TEMPERATURES, kinds)):
            part = slice(at * each, (at + 1) * each)
            pairs = list(zip(found[part], plain[part], strict=True))
            passes = sum(len(one.tokens) - 1 - one.accepted for one, _ in pairs)
            figures = report[f"{name}, {kind}, {temperature}"] = {
                "tokens_a_pass": sum(len(one.tokens) - 1 for one, _ in pairs) / max(passes, 1),
                "drafted": count,
                "equal": sum(one.tokens == other.tokens for one, other in pairs),
                "equal_bits": sum(one.logprobs == other.logprobs for one, other in pairs),
                "answers": each,
            }
            print(name, kind, temperature, figures, flush=True)
    return report


def speeds(lm: jl.LanguageModel, drafter: Drafter, wanted: list[str]) -> JsonObject:
    """Return greedy tokens/s and ms a pass of ROWS:DRAFT:TOKENS, without prefills and stops.

    A batch ends with its slowest row; no other request takes the place of a row that has ended.
    """
    kinds, report = texts_of(lm, 64), dict[str, Any]()
    dtype, chunk = lm.executor.cache_options(lm.config, None, None, lm.dtype)
    stops, room = jnp.full((1,), -1, jnp.int32), NEW + 16  # every row has all its tokens

    def run(name: str, rows: list[list[int]]) -> np.ndarray:
        """Return (tokens, seconds, passes, passes of a row on average)."""
        count, draft_name, tokens = name.split(":")
        source = {"plain": None, "head": drafter, "ngram": "ngram"}[draft_name]
        greedy = SamplingParams.stack([Sampling()] * int(count), lm.config.vocab_size)
        rest = greedy, stops, WIDTH + room, room, NEW, dtype, chunk
        call = Call(*pad_rows(rows, WIDTH), *rest, drafting=lm.drafting(source, int(tokens)))
        running = lm.executor.begin(lm.config, lm.params, call)
        jax.block_until_ready(running.report)
        found, seconds = timed(running.advance, NEW)
        written = np.asarray(found.counts) - 1
        passes = written - np.asarray(found.drafts[1])
        return np.array([written.sum(), seconds, passes.max(), passes.mean()])

    for name in wanted:
        run(name, kinds["text"][: int(name.split(":")[0])])  # compiles
    for kind, rows in kinds.items():
        sums = {name: np.zeros(4) for name in wanted}
        for number, name in itertools.product(range(ROUNDS), wanted):
            batch = int(name.split(":")[0])
            begin = number * batch % len(rows)
            sums[name] += run(name, rows[begin : begin + batch])
        for name, (tokens, seconds, passes, of_a_row) in sums.items():
            report[f"{name} {kind}"] = {
                "tokens_per_second": tokens / seconds,
                "ms_a_pass": 1e3 * seconds / passes,
                "tokens_a_pass": tokens / of_a_row / int(name.split(":")[0]),
            }
            print(name, kind, report[f"{name} {kind}"], flush=True)
    return report


def measure(args: argparse.Namespace, began: float) -> None:
    """Print and write the parts that were asked for."""
    report = dict[str, Any](device=jax.devices()[0].device_kind, jax=jax.__version__)
    for part in args.parts:
        lm = jl.load(args.model, args.dtype, deterministic=part == "deterministic")
        drafter = jl.load_drafter(args.drafter, lm.dtype, args.quantize)
        if part == "speed":
            report[part] = speeds(lm, drafter, args.speeds)
        else:
            report[part] = accepted(lm, drafter, args.each, args.drafted)
        print(f"{time.monotonic() - began:6.1f} s  {part}", flush=True)
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def main() -> None:
    began = time.monotonic()
    words = argparse.ArgumentParser(description="Prompts and gain of a drafter.")
    jobs = words.add_subparsers(dest="job", required=True)
    job = jobs.add_parser("prompts")
    job.add_argument("--out", type=Path, required=True)
    job.add_argument("--count", type=int, default=16896)
    job = jobs.add_parser("measure")
    job.add_argument("drafter", type=Path)
    job.add_argument("--out", type=Path, required=True)
    job.add_argument("--model", default=MODEL)
    job.add_argument("--dtype", default=None)
    job.add_argument("--quantize", default=None, help="scheme of the head")
    job.add_argument("--each", type=int, default=100, help="prompts of a kind")
    job.add_argument("--drafted", type=int, default=7)
    job.add_argument("--speeds", nargs="+", default=SPEEDS, metavar="ROWS:DRAFT:TOKENS")
    job.add_argument("--parts", nargs="+", default=["plain", "deterministic", "speed"])
    args = words.parse_args()
    if args.job == "measure":
        print(jax.__version__, jax.devices()[0].device_kind, flush=True)
        measure(args, began)
    else:
        write_prompts(args.out, args.count)


if __name__ == "__main__":
    main()

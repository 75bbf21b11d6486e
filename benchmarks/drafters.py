"""A head that drafts for SmolLM2-135M-Instruct: its training in a given time, and its gain.

    python benchmarks/drafters.py train configs/training/smollm2-draft.toml --out RUN --seconds 440
    python benchmarks/drafters.py measure RUN/model --out report.json

Prompts to learn from are chats put together from lists and docstrings, code of installed packages,
and texts of ``configs/texts``.  Those to measure are of other requests and subjects (chats), of
``configs/texts/unseen/code.txt`` (code) and of a book that no training text has
(``configs/texts/test.txt``).

``train`` is ``jaxllama train`` for a limited time: it answers prompts for a quarter of it, and
takes as many steps as fit into the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pydoc_data.topics
import random
import re
import signal
import sysconfig
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from jaxllama.checkpoints.hf import eagle3
from jaxllama.config import configs_dir
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.evaluation.speed.harness import timed
from jaxllama.executors.executor import Call
from jaxllama.model.eagle3 import Drafter
from jaxllama.text.rows import pad_rows
from jaxllama.training import corpus, draft, start, train
from jaxllama.training.checkpoint import Checkpoints
from jaxllama.training.config import TrainConfig, load_train_config
from jaxllama.training.passes import first_state, stored
from jaxllama.training.prompts import PromptFile
from jaxllama.training.run_directory import RunDirectory
from jaxllama.training.step import per_layer
from jaxllama.typing import JsonObject

TEXTS = configs_dir() / "texts"
TEMPERATURES = (0.0, 0.8)
NEW, WIDTH = 128, 256  # tokens of an answer that is measured, and of its prompt at most
ROUNDS = 6  # batches of each kind, of all drafts in turn
SPEEDS = """
1:plain:0 1:head:3 1:ngram:3 8:plain:0 8:head:3 64:plain:0 64:head:2 1:ngram:0 1:head:2 1:head:5
64:ngram:2 8:ngram:3 64:head:3
""".split()
PROBE = 150  # steps, after which the number of steps is known
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


def in_time(path: Path, out: Path, seconds: float, began: float, count: int) -> Path:
    """Train a drafter within ``seconds`` from ``began``; return its folder."""

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    config = load_train_config(path)
    assert config.init_from is not None
    lm = jl.load(config.init_from, config.dtype, exact=True)
    assert lm.tokenizer is not None
    say("the model is loaded")
    start.load = draft.load = lambda *_, **__: lm  # it is loaded once
    out.mkdir(parents=True, exist_ok=True)
    prompts, kept = out / "prompts.jsonl", out / draft.ANSWERS
    room = config.sequence_length - config.answer_tokens
    lines = list[str]()
    for prompt in training_prompts(count):
        text = prompt if isinstance(prompt, str) else prompt[0]["content"]
        if len(lm.tokenizer.encode(text)) <= room - 40:  # of a chat's template
            lines.append(json.dumps({"prompt": prompt}))
    prompts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    say(f"{len(lines)} prompts are written")
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, prompts=str(prompts))
    )
    opened = start.open_data(config)
    assert isinstance(opened, PromptFile)
    say("and tokenized")
    rows, temperatures = list[draft.Answer](), len(config.drafting.temperatures)
    for group in draft.answers(lm, config, [prompt.tokens for prompt in opened.prompts]):
        rows += group
        if len(rows) // len(group) in (1, 2) or len(rows) // len(group) % 10 == 0:
            say(f"{len(rows)} answers, {sum(len(r.tokens) - r.begin for r in rows)} tokens")
        if time.monotonic() - began > seconds / 4:
            break
    used = len(rows) // temperatures
    rows = rows[: used * temperatures]
    tokens = sum(len(row.tokens) - row.begin for row in rows)
    say(f"answered: {used} prompts, {len(rows)} answers, {tokens} tokens")
    prompts.write_text("".join(f"{line}\n" for line in lines[:used]), encoding="utf-8")
    opened = start.open_data(config)
    draft.keep(kept, rows)

    def run(steps: int, name: str, is_probe: bool) -> tuple[Path, int]:
        """Train, and return (the folder, steps that would fit if others than ``steps``, or 0)."""
        directory, wanted = out / name, []
        used = dataclasses.replace(config, steps=steps)
        RunDirectory(directory, used, opened.sha256).close()
        os.link(kept, directory / draft.ANSWERS)
        stop = threading.Event()

        def watch() -> None:
            """Show the curve; stop a run whose number of steps does not fit the time."""
            shown = 0
            while not stop.wait(1.5):
                done = [json.loads(line) for line in _whole_lines(directory / "metrics.jsonl")]
                curve = [row for row in done if "loss" in row]
                now = time.monotonic() - began
                if len(curve) >= shown + 100:
                    shown = len(curve) - len(curve) % 100
                    last = curve[-100:]
                    names = [key for key in last[0] if key.startswith(("right", "tokens_a"))]
                    means = {key: np.mean([row[key] for row in last]) for key in ("loss", *names)}
                    parts = " ".join(f"{key} {value:.3f}" for key, value in means.items())
                    took = np.median([row["seconds"] for row in last])
                    rate = last[-1]["learning_rate"]
                    say(f"step {len(curve)} {parts} lr {rate:.1e} {1e3 * took:.1f} ms")
                if is_probe and not wanted and len(curve) >= PROBE:
                    took = np.mean([row["seconds"] for row in curve[PROBE // 2 :]])
                    wanted.append(len(curve) + int((seconds - now) / took * 0.97))
                    say(f"{1e3 * took:.1f} ms a step: {wanted[0]} steps fit, {steps} are planned")
                    if not 0.85 < wanted[0] / steps < 1.4:
                        wanted[0] = int(wanted[0] - 60 / took)  # compiled again
                        os.kill(os.getpid(), signal.SIGINT)
                        return
                    wanted[0] = 0
                if now > seconds:
                    say("the time is over")
                    os.kill(os.getpid(), signal.SIGINT)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            train(used, directory)
        except KeyboardInterrupt:
            if wanted and wanted[0]:
                return directory, max(wanted[0], config.optimizer.warmup_steps + 1)
            say("writing the newest state")
            _export(used, directory)
        finally:
            stop.set()
            thread.join()
        return directory, 0

    directory, steps = run(config.steps, "first", True)
    if steps:
        say(f"again, with {steps} steps")
        directory, _ = run(steps, "second", False)
    say(f"{directory / 'model'} is written")
    return directory / "model"


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _export(config: TrainConfig, directory: Path) -> None:
    """Write the drafter of the newest checkpoint of a run that was stopped."""
    prompts = start.open_data(config)
    assert isinstance(prompts, PromptFile)
    data = draft.answered(config, prompts, directory, progress=False)
    setup, params, fixed = start.begin(config, data)
    assert setup.head is not None and fixed is not None
    kept = Checkpoints(directory / "checkpoints", 1)
    like = jax.eval_shape(per_layer, first_state(setup, params, None))
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), like)
    state = kept.restore(kept.latest_or_raise(), like)
    learned = stored(state["params"])
    eagle3.save(directory / "model", draft.drafter_of(config, setup.head, learned, fixed))


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

    All prompts are rows of one call, greedy and at temperature 0.8.
    """
    kinds = texts_of(lm, each)
    rows = [row for _ in TEMPERATURES for rows in kinds.values() for row in rows]
    settings = [Sampling(temperature=t) for t in TEMPERATURES for _ in range(3 * each)]
    answered = functools.partial(lm.generate, rows, NEW, settings, list(range(len(rows))))
    plain, report = answered(), dict[str, Any]()
    for name, source in (("head", drafter), ("ngram", "ngram")):
        found = answered(draft=source, draft_tokens=count)
        for at, (temperature, kind) in enumerate(itertools.product(TEMPERATURES, kinds)):
            part = slice(at * each, (at + 1) * each)
            pairs = list(zip(found[part], plain[part], strict=True))
            passes = sum(len(one.tokens) - 1 - one.accepted for one, _ in pairs)
            report[f"{name}, {kind}, {temperature}"] = {
                "tokens_a_pass": sum(len(one.tokens) - 1 for one, _ in pairs) / max(passes, 1),
                "drafted": count,
                "equal": sum(one.tokens == other.tokens for one, other in pairs),
                "equal_bits": sum(one.logprobs == other.logprobs for one, other in pairs),
                "answers": each,
            }
            print(
                f"{name}, {kind}, {temperature}",
                report[f"{name}, {kind}, {temperature}"],
                flush=True,
            )
    return report


def speeds(
    lm: jl.LanguageModel, drafter: Drafter, wanted: list[str], until: float, after: Path | None
) -> JsonObject:
    """Return greedy tokens/s and ms a pass of ROWS:DRAFT:TOKENS, without prefills and stops.

    until: no further program is compiled then. after: a file to wait for before times are taken.
    """
    kinds, report = texts_of(lm, 64), dict[str, Any]()
    dtype, chunk = lm.executor.cache_options(lm.config, None, None, lm.dtype)
    stops, room = jnp.full((1,), -1, jnp.int32), NEW + 16  # every row has all its tokens

    def run(name: str, rows: list[list[int]]) -> np.ndarray:
        """Return (tokens, seconds, passes of a row)."""
        count, draft_name, tokens = name.split(":")
        source = {"plain": None, "head": drafter, "ngram": "ngram"}[draft_name]
        greedy = SamplingParams.stack([Sampling()] * int(count), lm.config.vocab_size)
        rest = greedy, stops, WIDTH + room, room, NEW, dtype, chunk
        call = Call(*pad_rows(rows, WIDTH), *rest, drafting=lm.drafting(source, int(tokens)))
        running = lm.executor.begin(lm.config, lm.params, call)
        jax.block_until_ready(running.report)
        found, seconds = timed(running.advance, NEW)
        written, right = found.counts.sum() - len(rows), found.drafts[1].sum()
        return np.array([written, seconds, (written - right) / len(rows)])

    ready = []
    for name in wanted:
        if time.monotonic() < until:
            run(name, kinds["text"][: int(name.split(":")[0])])
            ready.append(name)
            print(f"{name} is compiled", flush=True)
    while after is not None and not after.exists():
        time.sleep(0.2)
    for kind, rows in kinds.items():
        sums = {name: np.zeros(3) for name in ready}
        for number, name in itertools.product(range(ROUNDS), ready):
            batch = int(name.split(":")[0])
            begin = number * batch % len(rows)
            sums[name] += run(name, rows[begin : begin + batch])
        for name, (tokens, seconds, passes) in sums.items():
            report[f"{name} {kind}"] = {
                "tokens_per_second": tokens / seconds,
                "ms_a_pass": 1e3 * seconds / passes,
                "tokens_a_pass": tokens / passes / int(name.split(":")[0]),
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
            report[part] = speeds(lm, drafter, args.speeds, began + args.seconds, args.after)
        else:
            report[part] = accepted(lm, drafter, args.each, args.drafted)
        print(f"{time.monotonic() - began:6.1f} s  {part}", flush=True)
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def main() -> None:
    began = time.monotonic()
    words = argparse.ArgumentParser(description="Prompts, training and gain of a drafter.")
    jobs = words.add_subparsers(dest="job", required=True)
    job = jobs.add_parser("train")
    job.add_argument("config", type=Path)
    job.add_argument("--out", type=Path, required=True)
    job.add_argument("--seconds", type=float, default=440.0)
    job.add_argument("--count", type=int, default=30000, help="prompts at most")
    job = jobs.add_parser("measure")
    job.add_argument("drafter", type=Path)
    job.add_argument("--out", type=Path, required=True)
    job.add_argument("--model", default="smollm2-135m")
    job.add_argument("--dtype", default=None)
    job.add_argument("--quantize", default=None, help="scheme of the head")
    job.add_argument("--each", type=int, default=100, help="prompts of a kind")
    job.add_argument("--drafted", type=int, default=7)
    job.add_argument("--seconds", type=float, default=600.0, help="to compile")
    job.add_argument("--after", type=Path, default=None, help="a file to wait for")
    job.add_argument("--speeds", nargs="+", default=SPEEDS, metavar="ROWS:DRAFT:TOKENS")
    job.add_argument("--parts", nargs="+", default=["plain", "deterministic", "speed"])
    args = words.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    if args.job == "measure":
        measure(args, began)
    else:
        in_time(args.config, args.out, args.seconds, began, args.count)


if __name__ == "__main__":
    main()

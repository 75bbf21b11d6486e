"""Answers of the model during training, one line of samples.jsonl a question and step."""

from __future__ import annotations

import html
import json
from pathlib import Path

import jax

from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.language_model import LanguageModel
from jaxllama.model import lora
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import adapters
from jaxllama.training.run_directory import PAGE, SAMPLES
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import JsonObject, Params

ADAPTER = "run"


def model_of(
    setup: TrainingSetup,
    params: Params,
    fixed: Params | None,
    tokenizer: Tokenizer,
    deterministic: bool = False,
) -> LanguageModel:
    """Return the model as it stands, with its adapters under the name ``ADAPTER``.

    params, fixed: per layer.
    """
    config = setup.config
    if config.lora is None:
        floats = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
        return LanguageModel(setup.model, floats, tokenizer, deterministic, exact=True)
    assert fixed is not None
    factors = adapters.factors(setup.model, config.lora, params)
    whole = lora.attach(tensor_table(setup.model), fixed, [factors])
    return LanguageModel(
        setup.model, whole, tokenizer, deterministic, adapters=(ADAPTER,), exact=True
    )


def write_rewarded(directory: Path, lines: list[JsonObject]) -> list[str]:
    """Append answers with rewards to the run's file, and return the greedy ones.

    lines: ``Sampler.shown``'s. samples.md, which has all steps of each prompt, is written anew.
    """
    with open(directory / SAMPLES, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    text = (directory / SAMPLES).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    page = ["# Answers over time", ""]
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        page += [f"## {_cell(prompt)}", ""]
        page += [
            "| step | greedy answer | reward | sampled answer | reward |",
            "|---|---|---|---|---|",
        ]
        page += [
            f"| {row['step']} | {_cell(row['answer'])} | {row['answer_reward']:g} | "
            f"{_cell(row['sampled'])} | {row['sampled_reward']:g} |"
            for row in rows
            if row["prompt"] == prompt
        ]
        page.append("")
    (directory / PAGE).write_text("\n".join(page), encoding="utf-8")
    return [line["answer"] for line in lines]


def _cell(text: str) -> str:
    """Return text as it is, in one cell of a table."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def write(directory: Path, setup: TrainingSetup, lm: LanguageModel, step: int) -> list[str]:
    """Append the answers after ``step`` steps to the run's file, and return them."""
    samples = setup.config.samples
    assert samples is not None and lm.tokenizer is not None
    rows = [
        lm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if lm.tokenizer.chat_template is not None
        else lm.tokenizer.encode(prompt)
        for prompt in samples.prompts
    ]
    adapter = ADAPTER if lm.adapters else None
    found = lm.generate(rows, samples.max_new_tokens, adapter=adapter)
    with open(directory / SAMPLES, "a", encoding="utf-8") as file:
        for prompt, answer in zip(samples.prompts, found, strict=True):
            line = {"step": step, "prompt": prompt, "answer": answer.text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return [answer.text for answer in found]
